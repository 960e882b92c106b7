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

    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...
    def call_function(
        self, fn: types.FunctionType, args: Sequence[object], kwargs: Mapping[str, object], tail: bool = False
    ) -> object: ...
    def instantiate(self, cls: type, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...
    def run_class_body(self, fn: types.FunctionType, namespace: object) -> object: ...
    def raise_pending(self) -> None: ...
    def handled_exception(self) -> BaseException | None: ...
    def note_raise(self, error: BaseException) -> None: ...
    def note_reraise(self, error: BaseException) -> None: ...
    def note_start(self, name: str) -> int: ...
    def positions(self) -> tuple[Position, ...]: ...


class World(Protocol):
    """Decides what happens when the program touches something."""

    interpreter: InterpreterApi

    # names
    def load_global(self, fn: types.FunctionType, name: str) -> object: ...
    def store_global(self, fn: types.FunctionType, name: str, value: object) -> None: ...
    def delete_global(self, fn: types.FunctionType, name: str) -> None: ...
    def make_cell(self, cell: types.CellType) -> types.CellType: ...  # tells of a cell that the program makes
    def load_cell(self, cell: types.CellType) -> object: ...  # MISSING when empty
    def store_cell(self, cell: types.CellType, value: object) -> None: ...
    def delete_cell(self, cell: types.CellType) -> None: ...
    def function_defaults(
        self, fn: types.FunctionType
    ) -> tuple[tuple[object, ...] | None, dict[str, object] | None]: ...

    # attributes, as the program sees them
    def getattr(self, obj: object, name: str) -> object: ...
    def setattr(self, obj: object, name: str, value: object) -> None: ...
    def delattr(self, obj: object, name: str) -> None: ...

    def class_of(self, obj: object) -> type: ...
    def make_super(self, cls: object, obj: object) -> object: ...  # `super()` in a method

    # attributes, the storage below the protocol of `attributes.py`
    def instance_get(self, obj: object, name: str) -> object: ...  # the instance's own dict; MISSING
    def instance_set(self, obj: object, name: str, value: object) -> None: ...
    def instance_del(self, obj: object, name: str) -> None: ...
    def class_get(self, cls: type, name: str) -> tuple[object, type] | None: ...  # (value, owner) by the MRO
    def class_set(self, cls: type, name: str, value: object) -> None: ...
    def class_del(self, cls: type, name: str) -> None: ...
    def leaf_getattr(self, obj: object, name: str) -> object: ...  # attribute of an object of a C type
    def leaf_setattr(self, obj: object, name: str, value: object) -> None: ...
    def leaf_delattr(self, obj: object, name: str) -> None: ...
    def descriptor_get(self, descriptor: object, obj: object, cls: type) -> object: ...  # descriptor of a C type
    def descriptor_set(self, descriptor: object, obj: object, value: object) -> None: ...
    def descriptor_del(self, descriptor: object, obj: object) -> None: ...

    # items, operators
    def getitem(self, obj: object, key: object) -> object: ...
    def setitem(self, obj: object, key: object, value: object) -> None: ...
    def delitem(self, obj: object, key: object) -> None: ...
    def truth(self, obj: object) -> bool: ...
    def check(self, obj: object, expected: bool) -> bool: ...  # the truth, of what makes the program raise otherwise
    def unary(self, op: str, a: object) -> object: ...
    def binary(self, op: str, a: object, b: object) -> object: ...
    def inplace(self, op: str, a: object, b: object) -> object: ...
    def compare(self, op: str, a: object, b: object) -> object: ...
    def choose(  # of two values, and its key, by what `op` says of the two keys; None: ask for the truth
        self, op: str, values: tuple[object, object], keys: tuple[object, object]
    ) -> tuple[object, object] | None: ...
    def is_same(self, a: object, b: object) -> bool: ...
    def contains(self, container: object, item: object) -> bool: ...
    def tell_apart(self, *values: object) -> None: ...  # C code is about to hash or compare them
    def iterate(self, obj: object) -> Any: ...
    def advance(self, iterator: object) -> object: ...  # raises StopIteration
    def convert(self, value: object, how: str) -> str: ...  # "str", "repr" or "ascii"
    def format_value(self, value: object, spec: str) -> str: ...
    def join_texts(self, parts: object) -> str: ...

    # calls
    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...
    def call_leaf(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...  # runs C code
    def build_class(
        self, body: types.FunctionType, name: str, bases: tuple[object, ...], kwargs: dict[str, object]
    ) -> object: ...
    def import_name(self, fn: types.FunctionType, name: str, fromlist: object, level: int) -> Any: ...
    def let_go(
        self, values: Sequence[object], error: BaseException | None
    ) -> None: ...  # they leave the innermost frame
    def note_raise(self, error: BaseException) -> None: ...  # before any handler of the program sees it
    def unsupported(self, reason: str, detail: str) -> NoReturn: ...
