"""Functions that users marked, and the calls that mean something only inside of capture."""

from __future__ import annotations

import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from torch import nn

from primtorch.frozen import record
from torchdynamo import torch_compilers_marks

F = TypeVar("F", bound=Callable[..., object])


class MarkKind(enum.Enum):
    """What a marked function's calls are."""

    DISABLED = "disabled"  # a break; the call and all that it calls run as they are
    SKIPPED = "skipped"  # a break; the call runs as it is, what it calls is captured
    ALLOWED = "allowed"  # one node of the graph
    CONSTANT = "constant"  # run once, at capture
    REFUSED = "refused"  # a break: what the graph would have taken
    SUBSTITUTED = "substituted"  # calls of another function, `substitute`


@record
class Mark:
    """A user's word on a function."""

    kind: MarkKind
    reason: str | None = None
    substitute: Callable[..., object] | None = None


# Held weakly: a mark lives as long as its function.
_MARKS: weakref.WeakKeyDictionary[object, Mark] = weakref.WeakKeyDictionary()
# What stands for a function of anybody's, C's included, by identity: those take no weak reference, and seldom end.
STAND_INS: dict[int, tuple[object, Mark]] = {}


def put_stand_in(function: object, mark: Mark | None) -> None:
    """Has calls of a function refused or made calls of another one; None takes that back.

    Raises:
        TypeError: the object is no callable.
    """
    if not callable(function):
        raise TypeError(f"expected a function, got a {type(function).__name__}")
    if mark is None:
        STAND_INS.pop(id(function), None)
    else:
        STAND_INS[id(function)] = (function, mark)


def put_mark(function: object, mark: Mark) -> None:
    """Marks a function, a method's function or a callable object.

    Raises:
        TypeError: the object is no callable, or a class.
    """
    target = function.__func__ if isinstance(function, types.MethodType) else function
    if not callable(target) or isinstance(target, type):
        kind = "a class" if isinstance(target, type) else f"a {type(target).__name__}"
        raise TypeError(f"expected a function, a method or an nn.Module to mark, got {kind}")
    _MARKS[target] = mark


def marks_objects() -> bool:
    """Whether the program has marked anything but Python functions and modules, or has calls of a function mean
    another's."""
    return bool(STAND_INS) or any(not isinstance(marked, (types.FunctionType, nn.Module)) for marked in list(_MARKS))


def marks_modules() -> bool:
    """Whether the program has marked any `nn.Module`."""
    return any(isinstance(marked, nn.Module) for marked in list(_MARKS))


def mark_of(function: object) -> Mark | None:
    """The mark of a function, by torchdynamo or by torch.compiler.disable and the like."""
    try:
        mark = _MARKS.get(function)
    except TypeError:  # neither hashable nor weakly referable: it cannot have been marked
        return None
    if mark is None and type(function) is types.FunctionType and function.__dict__:
        for name, foreign in _FOREIGN.items():
            if function.__dict__.get(name):
                return replace(foreign, reason=function.__dict__.get("_torchdynamo_disable_msg"))
    if mark is None and torch_compilers_marks.allowed_in_graph(function):
        return Mark(MarkKind.ALLOWED)
    return mark


# Attributes that other compilers' decorators leave on a function.
_FOREIGN: dict[str, Mark] = {
    "_torchdynamo_disable": Mark(MarkKind.DISABLED),
    "_dynamo_marked_constant": Mark(MarkKind.CONSTANT),
}


def graph_break() -> None:
    """Breaks the graph at the call. Does nothing outside of capture."""


def cudagraph_mark_step_begin() -> None:
    """Does nothing: a replay of a CUDA graph never overwrites a result that somebody holds. Here so that programs which
    say where a step begins run as they are."""


def is_compiling() -> bool:
    """True inside of captured code, False elsewhere."""
    return False


class Region:
    """What holds where a thread's program is: `errors` tells whether a break is an error, None where nobody said."""

    def __init__(self) -> None:
        self.errors: bool | None = None


_of_threads = threading.local()


def region() -> Region:
    """That of the thread that asks."""
    try:
        found: Region = _of_threads.region
    except AttributeError:
        found = _of_threads.region = Region()
    return found


class error_on_graph_break:
    """A region, or a function, in which a graph break is an error (or, with False, is none again).

    Inside of a compiled function, `with error_on_graph_break():` or `@error_on_graph_break()`; a break there raises
    `Unsupported` as `fullgraph=True` does everywhere. `fullgraph=True` is not lifted by `error_on_graph_break(False)`.

    Args:
        error: whether breaks are errors in it.
    """

    def __init__(self, error: bool = True) -> None:
        self.error = error
        self.before: list[bool | None] = []

    def __enter__(self) -> None:
        here = region()
        self.before.append(here.errors)
        here.errors = self.error

    def __exit__(self, *raised: object) -> None:
        region().errors = self.before.pop()

    def __call__(self, function: F) -> F:
        error = self.error

        @functools.wraps(function)
        def within(*args: object, **kwargs: object) -> object:
            with error_on_graph_break(error):
                return function(*args, **kwargs)

        return cast(F, within)
