"""Errors that compilation of a graph raises."""

from __future__ import annotations

from collections.abc import Sequence

from primtorch.schemas import UserFrame


class InductorError(RuntimeError):
    """Base of every error that this package raises."""


class LoweringError(InductorError):
    """A node of the graph has no rule, or its rule failed. Names the node and the user's lines behind it."""

    def __init__(self, node: str, reason: str, frames: Sequence[UserFrame] = ()) -> None:
        where = "".join(f'\n  File "{f.file}", line {f.line}, in {f.function}' for f in frames)
        super().__init__(f"cannot lower {node}: {reason}" + (f"\nThe operation stands at:{where}" if where else ""))


class CompilerMissing(InductorError):
    """There is no C++ compiler on this machine."""


class BuildFailed(InductorError):
    """The C++ compiler (or another kernel compiler) refused generated source."""


class UnknownDevice(InductorError):
    """No code generation back end is registered for a device type."""


class OutOfBounds(InductorError, IndexError):
    """An index that a kernel met lies outside its dimension. (The C++ executor raises a plain IndexError.)"""


class DivisionByZero(InductorError):
    """A kernel met an integer division by zero. (The C++ executor raises a plain RuntimeError.)"""


class NotForCpp(InductorError):
    """A program that C++ cannot run without Python. Names the operator, the reason and the user's line."""
