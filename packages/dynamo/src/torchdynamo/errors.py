"""Errors that capture raises to its user."""

from __future__ import annotations


class TorchDynamoError(RuntimeError):
    """Base of every error that capture raises."""


class Unsupported(TorchDynamoError):
    """`fullgraph=True` met something that breaks the graph, or would have run eagerly or otherwise than planned.

    Attributes:
        breaks: all places where the call leaves the graph, where they were looked for (`export`).
    """

    breaks: tuple[object, ...] = ()


class InternalError(TorchDynamoError):
    """A fault in capture itself (raised under `strict=True` and `fullgraph=True`, counted and logged otherwise)."""


class CaptureDied(InternalError):
    """A capture would have ended the process, or would not have ended: it was made in another one first."""


class SizeNotDynamic(TorchDynamoError):
    """A size that was marked with `mark_dynamic` has to be one number, or to keep within less than was promised."""


class RecompileLimitExceeded(TorchDynamoError):
    """`on_recompile="error"`, `set_stance("fail_on_recompile")`, or the limit under `fullgraph=True`."""


class NotExportable(TorchDynamoError):
    """What a function takes, gives or does has no place in a graph to take away, or none in a file."""


class UnsafeArchive(TorchDynamoError):
    """A file is no exported graph, or names what a reader does not call or make without being told to."""


def mark_of_compiler(error: BaseException) -> None:
    """Says of an exception that a compiled graph is about to raise that it is none of its operators', but of who
    compiles it for this call: an eager run would not raise it, and hide it."""
    error._of_compiler = True  # type: ignore[attr-defined]


def is_of_compiler(error: BaseException) -> bool:
    """Whether an exception is marked so."""
    return getattr(error, "_of_compiler", False) is True
