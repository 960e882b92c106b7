"""Lists that grow from call to call: what the program only appends to needs no guard on what is in it.

Such a list is told by its length, which differed between calls. Capture sees an empty list in its place, whose contents
are what the program appended; generated code extends the real one by them. Its length is a number of each call, and
what the program asks of that is guarded. A program that asks for more is captured again, with all of the list read and
guarded. One that has a good many versions by then ends its graph there, and what is behind it gets the list as it is.
"""

from __future__ import annotations

import types
from typing import NoReturn

from torchdynamo.interpreter.protocol import Escape
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import Source

__all__ = ["GrowingList", "ReadWhole", "length_of", "refuse_growing"]


class ReadWhole(Escape):
    """The program asks for more of the list at `source` than a place to append to."""

    def __init__(self, source: Source, length: int) -> None:
        super().__init__(source, length)
        self.source = source
        self.length = length


class _Refusal:
    """A method that only the whole list can answer. No Python function: the interpreter leaves it to C to call it."""

    def __get__(self, obj: object, kind: type) -> object:
        return self if obj is None else types.MethodType(self, obj)

    def __call__(self, obj: GrowingList, *args: object, **kwargs: object) -> NoReturn:
        raise obj.refusal()


class GrowingList(list[object]):
    """What was appended to the list at `source`, which came with so many items; `breaks` where a program that asks for
    more is not captured again."""

    __slots__ = ("breaks", "came_with", "source")

    def __init__(self, source: Source, came_with: int, breaks: bool) -> None:
        super().__init__()
        self.source = source
        self.came_with = came_with
        self.breaks = breaks

    def refusal(self) -> Escape:
        """What is raised where the program asks for the list."""
        if self.breaks:
            return BreakGraph("list_of_each_length", f"the list at {self.source.expression()}")
        return ReadWhole(self.source, self.came_with)


_ANSWERED = frozenset({"append", "extend", "__iadd__"})
_OF_OBJECTS = frozenset(vars(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"}
for _name in vars(list).keys() - _ANSWERED - _OF_OBJECTS:
    setattr(GrowingList, _name, _Refusal())
GrowingList.__hash__ = None
GrowingList.__name__ = "list"  # in the errors that a program handles


def length_of(value: list[object]) -> int:
    """The length of a list, or of what was appended to a growing one."""
    return list.__len__(value)


def refuse_growing(fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """A growing list goes no further than to functions that are interpreted."""
    for value in (*args, *kwargs.values()):
        if type(value) is GrowingList:
            module = getattr(fn, "__module__", None) or ""
            if type(fn) not in (types.FunctionType, types.MethodType) or module.partition(".")[0] == "torch":
                raise value.refusal()
