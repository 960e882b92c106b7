"""Lists, tuples and dicts of another length at each call: what the program does with them at any length needs no guard
on what is in them.

Such a one is told by its length (a dict by its keys), which differed between calls. Capture sees an empty one in its
place. A list may be appended to: its contents are then what the program appended, by which generated code extends the
real one. The length is a number of each call, and what the program asks of that is guarded. A program that asks for
more is captured again, with all of it read and guarded. Once there is a version of that kind, a loop ends the graph at
its head (`loops.py`), and so does whatever else asks a list or a tuple for more: what is behind it gets it as it is.
A dict's items are looked up by their keys, for which a guard is the better price.
"""

from __future__ import annotations

import enum
import types
from typing import Any, NoReturn

from torch import nn

from torchdynamo.interpreter.protocol import Escape, InterpreterObject
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import Source, own_length

__all__ = [
    "GROWING", "Ends", "GrowingDict", "GrowingList", "GrowingTuple", "GrowingView", "ItemsVary", "MakesView",
    "ReadWhole", "Refusal", "length_of", "refuse_growing",
]  # fmt: skip


class ReadWhole(Escape):
    """The program asks for more of what is at `source` than a place to append to."""

    def __init__(self, source: Source, length: int) -> None:
        super().__init__(source, length)
        self.source = source
        self.length = length


class ItemsVary(Escape):
    """A round reads or writes an item of the list at `source` by a number that another round has another of: what is in
    it goes unread."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.source = source


class Refusal:
    """A method that only the whole can answer. No Python function: the interpreter leaves it to C to call it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: object, kind: type) -> object:
        return self if obj is None else types.MethodType(self, obj)

    def __call__(self, obj: Any, *args: object, **kwargs: object) -> Any:
        raise obj.refusal()


class Ends(enum.IntEnum):
    """What a program may ask of such a one that ends the graph, in the place of another capture."""

    NOTHING = 0
    LOOPS = 1
    READS = 2  # whatever asks for what is in it, loops too


class _Growing(InterpreterObject):
    """What came with so many items (or these, by `told_by`), at `source`."""

    __slots__ = ()
    ends: Ends
    came_with: int
    source: Source

    def refusal(self) -> Escape:
        """What is raised where the program asks for what is in it."""
        if self.ends is Ends.READS:
            return BreakGraph("list_of_each_length", f"the {type(self).__name__} at {self.source.expression()}")
        return ReadWhole(self.source, self.came_with)


class GrowingList(_Growing, list[object]):
    """What was appended to the list at `source`."""

    native = list
    __slots__ = ("came_with", "ends", "source")

    def __init__(self, source: Source, came_with: int, ends: Ends) -> None:
        super().__init__()
        self.source, self.came_with, self.ends = source, came_with, ends


class GrowingTuple(_Growing, tuple[object, ...]):
    """The tuple at `source`."""

    native = tuple

    def __new__(cls, source: Source, came_with: int, ends: Ends) -> GrowingTuple:
        """An empty one in its place."""
        made = super().__new__(cls)
        made.source, made.came_with, made.ends = source, came_with, ends
        return made


class GrowingDict(_Growing, dict[object, object]):
    """The dict at `source`."""

    native = dict
    __slots__ = ("came_with", "ends", "source")

    def __init__(self, source: Source, came_with: int, ends: Ends) -> None:
        super().__init__()
        self.source, self.came_with, self.ends = source, came_with, ends


class GrowingView(InterpreterObject):
    """`keys()`, `values()` or `items()` of a growing dict, to loop over."""

    def __init__(self, table: GrowingDict, name: str) -> None:
        self.table, self.name = table, name
        self.native = type(getattr({}, name)())

    def __getattr__(self, name: str) -> NoReturn:
        raise self.refusal()

    def refusal(self) -> Escape:
        """What is raised where the program asks for more."""
        return self.table.refusal()


class MakesView(Refusal):
    """A method that makes a view, for a program that may loop over it."""

    def __call__(self, obj: Any, *args: object, **kwargs: object) -> Any:
        if not obj.ends or args or kwargs:
            raise obj.refusal()
        return GrowingView(obj, self.name)


GROWING = (GrowingList, GrowingTuple, GrowingDict)
# What each answers itself, beside what every object does.
_ANSWERED: dict[Any, dict[str, object]] = {
    GrowingList: dict.fromkeys(("append", "extend", "__iadd__")),
    GrowingTuple: {},
    GrowingDict: {name: MakesView(name) for name in ("keys", "values", "items")},
}
_OF_OBJECTS = frozenset(vars(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"}
for _kind, _answers in _ANSWERED.items():
    _base = _kind.native
    for _name in vars(_base).keys() - _OF_OBJECTS - _answers.keys():
        setattr(_kind, _name, Refusal(_name))
    for _name, _answer in _answers.items():
        if _answer is not None:
            setattr(_kind, _name, _answer)
    _kind.__hash__ = None if _base.__hash__ is None else Refusal("__hash__")
    _kind.__name__ = _base.__name__  # in the errors that a program handles
for _name in ("iter", "len", "contains", "reversed", "eq", "and", "or", "sub", "xor", "repr", "bool"):
    setattr(GrowingView, f"__{_name}__", Refusal(f"__{_name}__"))


def length_of(value: object) -> int:
    """The length of a list, a tuple or a dict, or of what was appended to a growing one."""
    return own_length(value)


def refuse_growing(fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """What grows goes no further than to functions that are interpreted, and to modules, whose calls are such."""
    if isinstance(fn, nn.Module):
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, GROWING):
            module = getattr(fn, "__module__", None) or ""
            if type(fn) not in (types.FunctionType, types.MethodType) or module.partition(".")[0] == "torch":
                raise value.refusal()
