"""Errors that capture raises to its user."""

from __future__ import annotations

from collections.abc import Sequence

from primtorch.schemas import UserFrame


def format_user_frames(frames: Sequence[UserFrame]) -> str:
    """The user's stack, outermost first, in the form of a traceback."""
    return "\n".join(f'  File "{f.file}", line {f.line}, in {f.function}' for f in frames)


class TorchDynamoError(RuntimeError):
    """Base of every error that capture raises."""


class Unsupported(TorchDynamoError):
    """`fullgraph=True` met something that breaks the graph."""


class InternalError(TorchDynamoError):
    """A fault in capture itself (raised under `strict=True`, counted and logged otherwise)."""


class SizeNotDynamic(TorchDynamoError):
    """A size that was marked with `mark_dynamic` has to be one number, or to keep within less than was promised."""


class RecompileLimitExceeded(TorchDynamoError):
    """`on_recompile="error"`, or the limit under `fullgraph=True`."""
