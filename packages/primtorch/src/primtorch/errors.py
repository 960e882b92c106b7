"""Errors of this package: what, where in the user's program, why, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from primtorch.schemas import UserFrame


def format_frames(frames: Sequence[UserFrame]) -> str:
    """The user's frames as indented lines, outermost first; empty without frames."""
    return "".join(f"\n  {frame}" for frame in frames)


class PrimTorchError(RuntimeError):
    """Base of this package's errors."""

    frames: tuple[UserFrame, ...] = ()

    def locate(self, frames: Sequence[UserFrame]) -> None:
        """Name the user's lines, where the error was raised without knowing them."""
        if not self.frames and frames:
            self.frames = tuple(frames)
            self.args = (f"{self}{format_frames(frames)}",)


class DataDependent(PrimTorchError):
    """A result depends on tensor data that does not exist while shapes are propagated.

    Attributes:
        symbols: those whose values were asked for, where it is numbers.
    """

    def __init__(
        self, what: str, why: str, remedy: str, frames: Sequence[UserFrame] = (), symbols: Iterable[str] = ()
    ) -> None:
        self.symbols = frozenset(symbols)
        self.what = what
        self.frames = tuple(frames)
        super().__init__(f"{what}: {why}. {remedy}{format_frames(frames)}")


class DataDependentShape(DataDependent):
    """An operator's output size depends on the data (nonzero, unique, masked_select, ...)."""


class DataDependentValue(DataDependent):
    """A Python number or branch depends on the data (item, bool, int, a comparison of unbacked sizes)."""


class FakeTensorError(PrimTorchError):
    """A fake tensor was used in a way that has no meaning for it."""


class NoFormula(PrimTorchError, NotImplementedError):
    """No shape propagation is known for an operator."""

    def __init__(self, op: str, frames: Sequence[UserFrame] = (), reason: str = "") -> None:
        self.op = op
        self.frames = tuple(frames)
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"no shape propagation for {op}{why}. "
            f"Give it one with primtorch.fake.register_formula({op!r}, fn).{format_frames(frames)}"
        )


class IncompleteOperator(PrimTorchError):
    """The record of an operator lacks a part that another part needs."""

    def __init__(self, operator: str, lacks: str, why: str) -> None:
        self.operator = operator
        super().__init__(f"the record of {operator}: {lacks} ({why})")


class PrimError(PrimTorchError, ValueError):
    """A prim got arguments that its schema does not take."""


class NotClosed(PrimTorchError):
    """A graph holds an operator outside of its opset, or an operator has no rule into it."""

    def __init__(self, op: str, reason: str, node: str = "", frames: Sequence[UserFrame] = ()) -> None:
        self.op = op
        self.reason = reason
        self.frames = tuple(frames)
        where = f" (node {node})" if node else ""
        super().__init__(f"{op}{where}: {reason}{format_frames(frames)}")


class TraceError(PrimTorchError):
    """A function can't be recorded as a graph."""


class NoDerivative(RuntimeError):
    """An operator over graphs has no derivative. As eager's error of the kind, it is for who runs the backward."""
