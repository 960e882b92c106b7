"""The answer of a rule to a call that comes down to another one."""

from __future__ import annotations

from dataclasses import dataclass

from torchdynamo.interpreter.protocol import Args, Kwargs


@dataclass(frozen=True, slots=True)
class Redirect:
    """Call this instead."""

    function: object
    args: Args
    kwargs: Kwargs
