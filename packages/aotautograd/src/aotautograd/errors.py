"""Errors of this package: what, where in the user's code, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from aotautograd.schemas import Assumption
from primtorch.schemas import UserFrame


def user_location(stack: Sequence[UserFrame]) -> str:
    """The user's frames in the form of a traceback, or an empty string."""
    return "".join(f'\n  File "{f.file}", line {f.line}, in {f.function}' for f in stack)


class AotAutogradError(RuntimeError):
    """Base of every error that this package raises by itself (what eager would raise passes through unchanged)."""

    def __init__(self, message: str, stack: Sequence[UserFrame] = ()) -> None:
        super().__init__(message + user_location(stack))
        self.stack = tuple(stack)


class UnsupportedMutation(AotAutogradError):
    """A write that a functional graph cannot express."""


class UnsupportedAlias(AotAutogradError):
    """An aliasing relation between outputs that the wrapper cannot rebuild."""


class InputMismatch(AotAutogradError):
    """A compiled function was called with other inputs than it was compiled for."""


class InvalidJoint(AotAutogradError):
    """A graph breaks the conventions of joint graphs."""


class DoubleBackwardUnavailable(AotAutogradError):
    """A second derivative needs a value that the program did not keep."""


class UnsupportedTransform(AotAutogradError):
    """A compiled program was called under forward-mode differentiation or a transform of torch.func."""


class TooManyVariants(AotAutogradError):
    """A program branches on numbers that differ from call to call."""

    def __init__(self, assumptions: Sequence[Assumption]) -> None:
        first = assumptions[0]
        super().__init__(
            f"the program takes a Python value out of a tensor ({first.kind} of {first.node}), and it was another one "
            "at each of many calls, each of which needs a graph of its own; keep the value in a tensor, or this part "
            "out of the compiled region",
            first.stack,
        )


class TracedOtherwise(AotAutogradError):
    """A program that was compiled in another process is traced again, and its trace is not what it was there."""

    def __init__(self) -> None:
        super().__init__(
            "the program's trace differs from that of the process which compiled it, so that this derivative cannot be "
            "joined to what was kept; clear the cache (python -m torchcompile cache clear) and run again"
        )
