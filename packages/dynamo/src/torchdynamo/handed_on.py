"""Functions of a package around capture that only call the program's own: what users are told is of that one."""

from __future__ import annotations

import weakref
from types import FunctionType

# Beside the functions, which stay as they are, holding neither: a body may hold the class whose call hands on to it.
_BODIES: weakref.WeakKeyDictionary[FunctionType, weakref.ref[FunctionType]] = weakref.WeakKeyDictionary()


def hands_on_to(function: object, body: object) -> None:
    """Notes what a function hands its arguments on to, where that is a function of Python."""
    if isinstance(function, FunctionType) and isinstance(body, FunctionType):
        _BODIES[function] = weakref.ref(body)


def body_of(function: FunctionType) -> FunctionType:
    """The program's function behind one that hands on to it, or goes on with such a one; else the function itself."""
    found = _BODIES.get(function)
    return (found() if found is not None else None) or function
