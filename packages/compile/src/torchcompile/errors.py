"""Errors of the user's API. Each message says what was wrong and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CompileError(RuntimeError):
    """Base of every error that this package raises."""


class InvalidArgument(CompileError, ValueError):
    """An unknown mode, backend or option, or a value that it does not take."""


class NotCompilable(CompileError, TypeError):
    """`compile` was given something that is neither a module nor a function."""


class ArtifactError(CompileError):
    """A file of `torchcompile.save` cannot be written or read."""


class ArtifactMismatch(ArtifactError):
    """A file of `torchcompile.save` was made elsewhere, or of another program; the message names what differs.

    Attributes:
        differences: (what, there, here).
    """

    def __init__(self, message: str, differences: Sequence[tuple[str, str, str]] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class WrongResult(CompileError):
    """`options={"verify": True}`: a compiled graph computes something else than eager does."""


class CompilerDied(CompileError):
    """`options={"verify": True}` or `{"minify_on_error": True}`: a stage or a kernel ends the process that meets it, or
    never ends. It was met in another one."""


def unknown(
    kind: str, given: object, known: Iterable[str], also: Iterable[str] = (), else_: str = ""
) -> InvalidArgument:
    """An error for an unknown name that lists the known ones and names the nearest of these, and of those taken too;
    where there is none, `else_` says what else it may be."""
    names = sorted(known)
    close = difflib.get_close_matches(str(given), (*names, *also), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else else_ and f" {else_}"
    return InvalidArgument(f"unknown {kind} {given!r}; known: {', '.join(names)}.{hint}")
