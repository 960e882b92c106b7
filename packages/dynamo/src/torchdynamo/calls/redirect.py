"""The answer of a rule to a call that comes down to another one."""

from __future__ import annotations

from primtorch.frozen import record
from torchdynamo.interpreter.protocol import Args, Kwargs


@record
class Redirect:
    """Call this instead."""

    function: object
    args: Args
    kwargs: Kwargs
