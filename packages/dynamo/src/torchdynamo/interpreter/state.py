"""The state of an interpreted frame, and how handlers of instructions are declared."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from torchdynamo.interpreter.decode import DecodedCode
from torchdynamo.interpreter.iterators import EnumerateIterator, FilterIterator, MapIterator, ZipIterator
from torchdynamo.interpreter.protocol import MISSING, NULL, InterpreterApi, World

H = TypeVar("H", bound=Callable[..., object])
Version = tuple[int, int]

LEAVE: Final = True  # a handler returns it to leave the run loop; the frame's `result` holds the value
FIRST: Version = (3, 11)
LAST: Version = (3, 13)


# Types of what may be closed when its last reference goes, and whose methods do not see to that themselves.
CLOSED: frozenset[type] = frozenset({types.GeneratorType, EnumerateIterator, FilterIterator, MapIterator, ZipIterator})


class HandlerBounds:
    """Which instruction a function handles, and under which versions of Python."""

    __slots__ = ("name", "since", "until")

    def __init__(self, name: str, since: Version, until: Version) -> None:
        self.name = name
        self.since = since
        self.until = until

    def include(self, version: Version) -> bool:
        """Whether a version of Python has the instruction."""
        return self.since <= version <= self.until


def opcode(*names: str, since: Version = FIRST, until: Version = LAST) -> Callable[[H], H]:
    """Declare a method of a frame as the handler of the instruction that bears its name (or of `names`)."""

    def mark(method: H) -> H:
        wanted = names or (method.__name__,)
        method.handler_bounds = tuple(HandlerBounds(name, since, until) for name in wanted)  # type: ignore[attr-defined]
        return method

    return mark


def python_version() -> Version:
    """The Python that runs, as (3, 11)."""
    return (sys.version_info[0], sys.version_info[1])


class ExceptionState:
    """The exception being handled. A generator has its own, stacked on that of whoever resumes it."""

    __slots__ = ("previous", "value")

    def __init__(self, previous: ExceptionState | None = None) -> None:
        self.value: BaseException | None = None
        self.previous = previous


class HandlerSlot:
    """The stack entry below a handled exception: the exception that was handled before it.

    `ended`: the handler has been left, and a copy of the entry is still on the stack.
    """

    __slots__ = ("ended", "previous")

    def __init__(self, previous: BaseException | None) -> None:
        self.previous = previous
        self.ended = False


class FrameState:
    """Locals, stack and position of one frame. Families of handlers are mixed into it."""

    __slots__ = (
        "decoded", "fast", "function", "index", "interpreter", "keyword_names", "names", "raised_at", "result",
        "stack", "tail", "world",
    )  # fmt: skip

    def __init__(
        self,
        interpreter: InterpreterApi,
        function: types.FunctionType,
        decoded: DecodedCode,
        arguments: list[Any],
        names: Any = None,
    ) -> None:
        self.interpreter = interpreter
        self.world: World = interpreter.world
        self.function = function
        self.decoded = decoded
        arguments.extend([NULL] * (len(decoded.local_names) - len(arguments)))
        self.fast = arguments  # slots in the order of `decoded.local_names`; cells once they are made
        self.stack: list[Any] = []
        self.index = 0  # of the next instruction; of the current one plus 1 while a handler runs
        self.raised_at: dict[int, int] = {}  # by the id of an exception that a handler has: the instruction that raised
        self.names = names  # the namespace of a class body
        self.keyword_names: tuple[str, ...] = ()
        self.result: object = None
        self.tail = False  # what it returns is pushed by the calling frame's call instruction, and that is all

    def pop_many(self, count: int) -> list[Any]:
        """Takes the last `count` values off the stack, in their order."""
        if not count:
            return []
        stack = self.stack
        values = stack[-count:]
        del stack[-count:]
        return values

    def branches_on(self, value: object, if_true: int, if_false: int) -> bool:
        """The truth of a value that decides which of two instructions comes next."""
        self.world.at_test(self, value)
        decoded = self.decoded
        raises = decoded.raises(if_true)
        if raises is decoded.raises(if_false):
            return self.world.truth(value)
        return self.world.check(value, not raises)

    def let_go(self, values: Sequence[object], error: BaseException | None = None) -> None:
        """Called before an instruction, or an exception, gives up values: generators among them may close."""
        if not CLOSED.isdisjoint(map(type, values)):
            self.world.let_go(values, error)

    def local_values(self) -> dict[str, object]:
        """What `locals()` returns: bound variables by name, cells opened."""
        if self.names is not None:
            names: dict[str, object] = self.names
            return names
        values = {}
        for name, value in zip(self.decoded.local_names, self.fast, strict=True):
            if isinstance(value, types.CellType):
                value = self.world.load_cell(value)
            if value is not NULL and value is not MISSING:
                values[name] = value
        return values
