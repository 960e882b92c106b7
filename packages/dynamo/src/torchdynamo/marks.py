"""Functions that users marked, and the calls that mean something only inside of capture."""

from __future__ import annotations

import weakref
from typing import Any

# Held weakly: a mark lives as long as its function.
DISABLED: weakref.WeakSet[Any] = weakref.WeakSet()
ALLOWED: weakref.WeakSet[Any] = weakref.WeakSet()


def marked(function: Any, marks: weakref.WeakSet[Any]) -> bool:
    try:
        return function in marks
    except TypeError:  # neither hashable nor weakly referable: it cannot have been marked
        return False


def graph_break() -> None:
    """Breaks the graph at the call. Does nothing outside of capture."""


def is_compiling() -> bool:
    """True inside of captured code, False elsewhere."""
    return False
