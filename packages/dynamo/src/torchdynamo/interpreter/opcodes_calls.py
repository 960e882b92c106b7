"""Instructions that call, make functions and classes, and import."""

from __future__ import annotations

import sys
import types
from typing import Any

from torchdynamo.interpreter.iterators import is_iterable
from torchdynamo.interpreter.protocol import MISSING, NULL
from torchdynamo.interpreter.state import FrameState, opcode


class CallOpcodes(FrameState):
    """Calls, and functions that are made."""

    __slots__ = ()

    # -- calls ------------------------------------------------------------------------------

    def call_in_tail(self, callee: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call whose result is pushed as it is: a break within the callee can go on in it, then here."""
        self.interpreter.tail_call = True
        return self.world.call(callee, args, kwargs)

    @opcode(until=(3, 12))
    def KW_NAMES(self, index: tuple[str, ...]) -> None:
        self.keyword_names = index

    @opcode("CALL", until=(3, 12))
    def CALL(self, count: int) -> None:
        """Below the arguments lie NULL and the callee, or an unbound method and its object."""
        stack = self.stack
        arguments = self.pop_many(count)
        second, first = stack.pop(), stack.pop()
        names = self.keyword_names
        if first is not NULL:
            first, second = second, first
            arguments.insert(0, first)
        if names:
            self.keyword_names = ()
            split = len(arguments) - len(names)
            keywords = dict(zip(names, arguments[split:], strict=True))
            stack.append(self.call_in_tail(second, tuple(arguments[:split]), keywords))
        else:
            stack.append(self.call_in_tail(second, tuple(arguments), {}))

    @opcode("CALL", since=(3, 13))
    def CALL_self_above(self, count: int) -> None:
        """Below the arguments lie the callee and, above it, its object or NULL."""
        arguments = self.pop_many(count)
        owner, callee = self.stack.pop(), self.stack.pop()
        if owner is not NULL:
            arguments.insert(0, owner)
        self.stack.append(self.call_in_tail(callee, tuple(arguments), {}))

    @opcode(since=(3, 13))
    def CALL_KW(self, count: int) -> None:
        names = self.stack.pop()
        arguments = self.pop_many(count)
        owner, callee = self.stack.pop(), self.stack.pop()
        if owner is not NULL:
            arguments.insert(0, owner)
        split = len(arguments) - len(names)
        keywords = dict(zip(names, arguments[split:], strict=True))
        self.stack.append(self.call_in_tail(callee, tuple(arguments[:split]), keywords))

    @opcode()
    def CALL_FUNCTION_EX(self, has_keywords: int) -> None:
        keywords = self.stack.pop() if has_keywords & 1 else {}
        arguments = self.stack.pop()
        second, first = self.stack.pop(), self.stack.pop()
        callee = second if first is NULL else first  # 3.13 pushes the NULL above the callee
        if type(arguments) is not tuple:
            arguments = tuple(self.star_arguments(callee, arguments))
        if has_keywords & 1 and not all(type(key) is str or isinstance(key, str) for key in keywords):
            raise TypeError("keywords must be strings")
        self.stack.append(self.call_in_tail(callee, arguments, dict(keywords) if keywords else {}))

    def star_arguments(self, callee: object, arguments: object) -> list[object]:
        """The values of `*arguments`. Raises TypeError, as Python words it, where they are no iterable."""
        if not is_iterable(arguments):
            name = getattr(callee, "__qualname__", f"{type(callee).__name__} object")
            module = getattr(callee, "__module__", None)
            name = name if module in (None, "builtins") else f"{module}.{name}"
            kind = type(arguments).__name__
            raise TypeError(f"{name}() argument after * must be an iterable, not {kind}")
        iterator = self.world.iterate(arguments)
        values = []
        while True:
            try:
                values.append(self.world.advance(iterator))
            except StopIteration:
                return values

    # -- functions and classes --------------------------------------------------------------

    @opcode("MAKE_FUNCTION", until=(3, 12))
    def MAKE_FUNCTION(self, flags: int) -> None:
        code = self.stack.pop()
        closure = self.stack.pop() if flags & 8 else None
        annotations = self.stack.pop() if flags & 4 else None
        keyword_defaults = self.stack.pop() if flags & 2 else None
        defaults = self.stack.pop() if flags & 1 else None
        function = types.FunctionType(code, self.function.__globals__, None, defaults, closure)
        function.__kwdefaults__ = keyword_defaults
        if annotations is not None:
            _set_annotations(function, annotations)
        self.interpreter.made_functions.add(function)
        self.stack.append(function)

    @opcode("MAKE_FUNCTION", since=(3, 13))
    def MAKE_FUNCTION_bare(self, _: int) -> None:
        code = self.stack.pop()
        empty = tuple(types.CellType() for _ in code.co_freevars)
        function = types.FunctionType(code, self.function.__globals__, None, None, empty)
        self.interpreter.made_functions.add(function)
        self.stack.append(function)

    @opcode(since=(3, 13))
    def SET_FUNCTION_ATTRIBUTE(self, which: int) -> None:
        function = self.stack.pop()
        value = self.stack.pop()
        if which == 1:
            function.__defaults__ = value
        elif which == 2:
            function.__kwdefaults__ = value
        elif which == 4:
            _set_annotations(function, value)
        else:  # the closure; it comes first, before anything else is set
            function = types.FunctionType(function.__code__, function.__globals__, None, None, value)
            self.interpreter.made_functions.add(function)
        self.stack.append(function)

    @opcode()
    def LOAD_BUILD_CLASS(self, _: int) -> None:
        self.stack.append(self.world.load_global(self.function, "__build_class__"))

    # -- imports ----------------------------------------------------------------------------

    @opcode()
    def IMPORT_NAME(self, name: str) -> None:
        level, names = self.pop_many(2)
        self.stack.append(self.world.import_name(self.function, name, names, level))

    @opcode()
    def IMPORT_FROM(self, name: str) -> None:
        module = self.stack[-1]
        value = self.world.call(getattr, (module, name, MISSING), {})
        self.stack.append(submodule(module, name) if value is MISSING else value)


def submodule(module: object, name: str) -> object:
    """What `from module import name` gives where the module has no such attribute, or ImportError."""
    owner = getattr(module, "__name__", None) or "<unknown module name>"
    found = sys.modules.get(f"{owner}.{name}", MISSING)  # a submodule that is being imported in a circle
    if found is MISSING:
        where = getattr(module, "__file__", None) or "unknown location"
        message = f"cannot import name {name!r} from {owner!r} ({where})"
        raise ImportError(message, name=owner, path=getattr(module, "__file__", None))
    return found


def _set_annotations(function: types.FunctionType, annotations: Any) -> None:
    if isinstance(annotations, tuple):  # flat pairs of name and value
        annotations = dict(zip(annotations[::2], annotations[1::2], strict=True))
    function.__annotations__ = annotations
