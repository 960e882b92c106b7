"""What the interpreter asks of the world, and the markers both sides share.

The interpreter executes instructions. Whatever an instruction does to an object goes through the `World`:
`PlainWorld` answers as CPython does, a capturing world adds guards, overlays and graph breaks.
This module and its neighbours import nothing outside of the standard library.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from torchdynamo.interpreter.frame import InterpretedFrame
    from torchdynamo.interpreter.state import ExceptionState

# What a program calls, and with what: objects of its own, of which a rule knows what it asks for.
Callee: TypeAlias = Callable[..., object]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Rule: TypeAlias = Callable[[Callee, Args, Kwargs], object]


class Marker:
    """A named singleton."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NULL: Final = Marker("NULL")  # an empty stack slot, or a local variable that is not bound
MISSING: Final = Marker("MISSING")  # a lookup that found nothing


class Position:
    """A place in the user's program: file, line, function."""

    __slots__ = ("file", "function", "line")

    def __init__(self, file: str, line: int, function: str) -> None:
        self.file = file
        self.line = line
        self.function = function

    def __repr__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Escape(BaseException):
    """Leaves all interpreted frames; no `except`, `finally` or `with` of the program sees it.

    `positions` is filled in where the escape started: the user's frames, outermost first. `path` says which
    instruction each frame was at, as the number of those it had executed, outermost first; it ends at the first
    frame whose result is not plainly that of the call instruction beneath it.
    """

    positions: tuple[Position, ...] = ()
    path: tuple[int, ...] = ()


class Stop(Escape):
    """The program was run up to a given place. `frames` are those on the path to it, as they are before it."""

    def __init__(self, frames: list[InterpretedFrame]) -> None:
        super().__init__()
        self.frames = frames


class Interrupted(Escape):
    """A handler of a signal raised `interrupt` while the program was interpreted."""

    def __init__(self, interrupt: BaseException) -> None:
        super().__init__()
        self.interrupt = interrupt


class UnsupportedProgram(Escape):
    """`PlainWorld` met something that the interpreter does not do."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class InterpreterObject:
    """Base of the interpreter's own objects that a program can hold. Their methods run natively."""

    __slots__ = ()
    native: type = object  # the type that the program believes this object has


def is_text(value: object) -> bool:
    """Whether a value is a text to the program."""
    return isinstance(value, str) or (isinstance(value, InterpreterObject) and value.native is str)


class InterpreterApi(Protocol):
    """The part of `Interpreter` that worlds, frames and builtins use."""

    world: World
    frames: list[InterpretedFrame]
    propagating: BaseException | None
    pending_escape: Escape | None  # raised where nothing could raise it; the end of the instruction does
    exc_state: ExceptionState
    tail_call: bool  # the call that follows gives a call instruction its result, untouched
    stop_in_call: tuple[int, ...]  # path on which the call that follows has to stop
    raises: dict[int, int]  # ordinal of the raise, by identity of the exception
    reraises: dict[int, int]  # ordinal of where a caught exception first goes on, by its identity
    caught: set[int]  # identities of the exceptions that reached a handler
    raised_groups: dict[int, BaseException]  # groups that a `raise` names, and none has raised again; by identity
    passed: set[int]  # identities of the exceptions that left a frame
    made_functions: MutableSet[types.FunctionType]  # by the program itself
    refused_raise: int  # ordinal of the raise that ends capture, or -1
    refused_start: int  # ordinal of the generator at whose start capture ends, or -1

    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Calls anything: functions of Python are interpreted, the rest is the world's."""

    def call_function(
        self, fn: types.FunctionType, args: Sequence[object], kwargs: Mapping[str, object], tail: bool = False
    ) -> object:
        """Runs a function of Python's in a frame of its own."""

    def instantiate(self, cls: type, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call of a class."""

    def run_class_body(self, fn: types.FunctionType, namespace: object) -> object:
        """Runs a class body in its namespace; gives the cell of `__class__`, if there is one."""

    def raise_pending(self) -> None:
        """Raises the escape that had to wait for the end of the instruction, if there is one."""

    def handled_exception(self) -> BaseException | None:
        """The exception that the innermost handler is handling, or None."""

    def note_raise(self, error: BaseException) -> None:
        """Counts an exception that the program raises."""

    def note_reraise(self, error: BaseException) -> None:
        """Counts where a caught exception goes on."""

    def note_start(self, name: str) -> int:
        """Counts a generator that starts; gives its ordinal."""

    def positions(self) -> tuple[Position, ...]:
        """Where the frames are, outermost first."""


class World(Protocol):
    """Decides what happens when the program touches something."""

    interpreter: InterpreterApi
    watches_tests: bool  # whether `at_test` is told of truths that are known, too

    # names
    def load_global(self, fn: types.FunctionType, name: str) -> object:
        """A global, else a built-in name. Raises NameError."""

    def store_global(self, fn: types.FunctionType, name: str, value: object) -> None:
        """Sets a global."""

    def delete_global(self, fn: types.FunctionType, name: str) -> None:
        """Deletes a global. Raises NameError."""

    def at_test(self, frame: Any, value: object) -> None:
        """A conditional jump of the frame is about to ask for the truth of a value."""

    def make_cell(self, cell: types.CellType) -> types.CellType:
        """Tells of a cell that the program makes; gives the one to use."""

    def load_cell(self, cell: types.CellType) -> object:
        """What a cell holds; MISSING when it is empty."""

    def store_cell(self, cell: types.CellType, value: object) -> None:
        """Fills a cell."""

    def delete_cell(self, cell: types.CellType) -> None:
        """Empties a cell."""

    def function_defaults(self, fn: types.FunctionType) -> tuple[tuple[object, ...] | None, dict[str, object] | None]:
        """A function's `__defaults__` and `__kwdefaults__`."""

    # attributes, as the program sees them
    def getattr(self, obj: object, name: str) -> object:
        """`obj.name`, by all of Python's rules."""

    def setattr(self, obj: object, name: str, value: object) -> None:
        """`obj.name = value`, by all of Python's rules."""

    def delattr(self, obj: object, name: str) -> None:
        """`del obj.name`, by all of Python's rules."""

    def class_of(self, obj: object) -> type:
        """`type(obj)` as the program has it."""

    def make_super(self, cls: object, obj: object) -> object:
        """`super(cls, obj)`, which `super()` in a method is."""

    # attributes, the storage below the protocol of `attributes.py`
    def instance_get(self, obj: object, name: str) -> object:
        """What the instance's own dict has; MISSING where it has none."""

    def instance_set(self, obj: object, name: str, value: object) -> None:
        """Writes to the instance's own dict."""

    def instance_del(self, obj: object, name: str) -> None:
        """Deletes from the instance's own dict."""

    def class_get(self, cls: type, name: str) -> tuple[object, type] | None:
        """(value, owner) by the class's MRO, or None."""

    def class_set(self, cls: type, name: str, value: object) -> None:
        """Writes to a class's own dict."""

    def class_del(self, cls: type, name: str) -> None:
        """Deletes from a class's own dict."""

    def leaf_getattr(self, obj: object, name: str) -> object:
        """An attribute of an object of a C type."""

    def leaf_setattr(self, obj: object, name: str, value: object) -> None:
        """Sets an attribute of an object of a C type."""

    def leaf_delattr(self, obj: object, name: str) -> None:
        """Deletes an attribute of an object of a C type."""

    def descriptor_get(self, descriptor: object, obj: object, cls: type) -> object:
        """`__get__` of a descriptor of a C type."""

    def descriptor_set(self, descriptor: object, obj: object, value: object) -> None:
        """`__set__` of a descriptor of a C type."""

    def descriptor_del(self, descriptor: object, obj: object) -> None:
        """`__delete__` of a descriptor of a C type."""

    # items, operators
    def getitem(self, obj: object, key: object) -> object:
        """`obj[key]`"""

    def setitem(self, obj: object, key: object, value: object) -> None:
        """`obj[key] = value`"""

    def delitem(self, obj: object, key: object) -> None:
        """`del obj[key]`"""

    def truth(self, obj: object) -> bool:
        """`bool(obj)`, for a branch."""

    def check(self, obj: object, expected: bool) -> bool:
        """The truth, of what makes the program raise where it is not `expected`."""

    def unary(self, op: str, a: object) -> object:
        """`op a`"""

    def binary(self, op: str, a: object, b: object) -> object:
        """`a op b`"""

    def inplace(self, op: str, a: object, b: object) -> object:
        """`a op= b`"""

    def compare(self, op: str, a: object, b: object) -> object:
        """`a op b` for a comparison."""

    def choose(  # of two values, and its key, by what `op` says of the two keys; None: ask for the truth
        self, op: str, values: tuple[object, object], keys: tuple[object, object]
    ) -> tuple[object, object] | None:
        """Of two values, and its key, by what `op` says of the two keys; None: ask for the truth."""

    def order(self, values: list[object], keys: list[object], reverse: bool) -> list[object] | None:
        """The values as `sorted` has them by these keys; None: ask for the truth of each comparison."""

    def is_same(self, a: object, b: object) -> bool:
        """`a is b`"""

    def contains(self, container: object, item: object) -> bool:
        """`item in container`"""

    def tell_apart(self, *values: object) -> None:
        """C code is about to hash or to compare the values."""

    def iterate(self, obj: object) -> Any:
        """`iter(obj)`"""

    def advance(self, iterator: object) -> object:
        """`next(iterator)`. Raises StopIteration."""

    def convert(self, value: object, how: str) -> str:
        """The value's text, by "str", "repr" or "ascii"."""

    def format_value(self, value: object, spec: str) -> str:
        """`format(value, spec)`"""

    def join_texts(self, parts: object) -> str:
        """The parts of an f-string in one."""

    # calls
    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Calls anything."""

    def call_leaf(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Calls what runs C code."""

    def build_class(
        self, body: types.FunctionType, name: str, bases: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A `class` statement: the class."""

    def import_name(self, fn: types.FunctionType, name: str, fromlist: object, level: int) -> Any:
        """An `import` statement: the module, by its `level`."""

    def let_go(self, values: Sequence[object], error: BaseException | None) -> None:
        """Values leave the innermost frame, with the exception that ends it, if one does."""

    def note_raise(self, error: BaseException) -> None:
        """An exception is raised; no handler of the program has seen it."""

    def unsupported(self, reason: str, detail: str) -> NoReturn:
        """Ends interpretation: the program does what it cannot follow."""
