"""The interpreter: calls, by what is called, and the stack of frames."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence
from contextlib import contextmanager
from typing import Any

from torchdynamo.interpreter.attributes import bind, is_python
from torchdynamo.interpreter.builtin_rules import BuiltinRule
from torchdynamo.interpreter.builtins_iteration import itertools_call
from torchdynamo.interpreter.builtins_table import BUILTINS
from torchdynamo.interpreter.exceptions import empty_frames
from torchdynamo.interpreter.frame import CODES, InterpretedFrame
from torchdynamo.interpreter.protocol import Args, Escape, InterpreterObject, Kwargs, Position, World
from torchdynamo.interpreter.state import ExceptionState

_RECURSION_LIMIT = 12_000  # Python frames that a deep program may need while it is interpreted


class Interpreter:
    """Runs functions in a world. One interpreter serves one thread and one capture."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.interpreter = self
        self.frames: list[InterpretedFrame] = []
        self.exc_state = ExceptionState()
        self.propagating: BaseException | None = None  # an exception on its way out of an inner frame
        self.pending_escape: Escape | None = None
        self.tail_call = False
        self.stop_in_call: tuple[int, ...] = ()
        self.raises: dict[int, int] = {}
        self.reraises: dict[int, int] = {}
        self.caught: set[int] = set()
        self.raised_groups: dict[int, BaseException] = {}
        self.passed: set[int] = set()
        self.made_functions: MutableSet[types.FunctionType] = weakref.WeakSet()
        self.refused_raise: int = -1
        self.room = _RECURSION_LIMIT  # frames that the program may have
        self.refused_start: int = -1
        self._raised = 0
        self._starts = 0

    # -- entry ------------------------------------------------------------------------------

    def root_frame(self, fn: types.FunctionType, arguments: Sequence[object]) -> InterpretedFrame:
        """The outermost frame of a capture; `arguments` are bound: one for each argument slot of the code."""
        return InterpretedFrame(self, fn, CODES.get(fn.__code__), list(arguments))

    def run(self, fn: object, *args: object, **kwargs: object) -> object:
        """Interpret a call, with room for deep programs on Python's stack."""
        with self.deep_stack():
            return self.world.call(fn, args, kwargs)

    @contextmanager
    def deep_stack(self, most: int = _RECURSION_LIMIT) -> Iterator[None]:
        """Room on Python's stack, where a frame of the program takes several; the program's own limit stays."""
        limit, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
        while frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        self.room = limit - depth
        sys.setrecursionlimit(max(limit, most))
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)

    # -- state ------------------------------------------------------------------------------

    def handled_exception(self) -> BaseException | None:
        """The exception that the innermost handler is handling, or None."""
        state: ExceptionState | None = self.exc_state
        while state is not None and state.value is None:
            state = state.previous
        return None if state is None else state.value

    def release(self) -> None:
        """Lets go of the exceptions that the program was handling or passing on where it ended."""
        empty_frames(self.propagating)
        state: ExceptionState | None = self.exc_state
        while state is not None:
            empty_frames(state.value)
            state.value, state = None, state.previous
        for error in self.raised_groups.values():
            empty_frames(error)
        self.raised_groups.clear()
        self.propagating = self.pending_escape = None

    def raise_pending(self) -> None:
        """Raises what a destructor had to raise and could not."""
        pending, self.pending_escape = self.pending_escape, None
        if pending is not None:
            raise pending

    def note_raise(self, error: BaseException) -> None:
        """Counts an exception where it starts; ends capture where that is `refused_raise`."""
        if self.propagating is not error:
            self.world.note_raise(error)
            self.raises[id(error)] = self._count(error)

    def note_start(self, name: str) -> int:
        """Counts the generators whose bodies begin to run; ends capture at number `refused_start`."""
        self._starts += 1
        if self._starts == self.refused_start:
            self.world.unsupported("generator", f"{name}() is still running where the graph ends")
        return self._starts

    def note_reraise(self, error: BaseException) -> None:
        """Counts where an exception that a handler had caught goes on for the first time."""
        if id(error) in self.caught and id(error) not in self.reraises:
            self.reraises[id(error)] = self._count(error)

    def _count(self, error: BaseException) -> int:
        self._raised += 1
        if self._raised == self.refused_raise:
            self.world.unsupported("exception", f"{type(error).__name__} is raised")
        return self._raised

    def positions(self) -> tuple[Position, ...]:
        """Where the program is, outermost frame first."""
        return tuple(frame.position for frame in self.frames)

    # -- calls ------------------------------------------------------------------------------

    def call(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        """Call anything: Python functions are interpreted, C code that calls back has a Python form here."""
        kind = type(fn)
        tail, self.tail_call = self.tail_call, False
        if kind is types.FunctionType:
            return self.call_function(fn, args, kwargs, tail)
        if kind is types.MethodType:
            if isinstance(fn.__self__, InterpreterObject):
                return fn(*args, **kwargs)
            self.tail_call = tail
            return self.world.call(fn.__func__, (fn.__self__, *args), kwargs)
        if kind is functools.partial:
            self.tail_call = tail
            return self.world.call(fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
        rule = _BY_KIND.get(kind)
        if rule is not None:
            return rule(self, fn, args, kwargs)
        if isinstance(fn, type):
            return self.call_class(fn, args, kwargs)
        if isinstance(fn, InterpreterObject):
            return fn(*args, **kwargs)  # type: ignore[operator]
        found = self.world.class_get(kind, "__call__")
        if found is not None and is_python(found[0]):
            self.tail_call = tail
            return self.world.call(found[0], (fn, *args), kwargs)
        if found is not None and found[0] is vars(functools.partial)["__call__"]:
            self.tail_call = tail
            return self.world.call(found[0], (fn, *args), kwargs)
        unbound = (staticmethod, types.MethodType, types.BuiltinFunctionType, functools.partial)
        if found is not None and isinstance(found[0], unbound):
            return self.world.call(bind(self.world, found[0], fn, kind), args, kwargs)
        return self.world.call_leaf(fn, args, kwargs)

    def call_function(
        self, fn: types.FunctionType, args: Sequence[object], kwargs: Mapping[str, object], tail: bool = False
    ) -> object:
        """Runs a function of Python's in a frame of its own. `tail`: its result is the caller's instruction's.

        Raises what the program raises, and `Escape` where interpretation ends.
        """
        if self.pending_escape is not None:
            raise self.pending_escape
        if len(self.frames) > self.room:
            raise RecursionError("maximum recursion depth exceeded")
        decoded = CODES.get(fn.__code__)
        if decoded.simple_arguments == len(args) and not kwargs:
            arguments = list(args)
        elif decoded.is_coroutine:  # making a coroutine runs none of its body
            return self.world.call_leaf(fn, tuple(args), dict(kwargs))
        else:
            arguments = self.bind(fn, decoded.binder, args, kwargs)
        if decoded.is_coroutine:
            return self.world.call_leaf(fn, tuple(args), dict(kwargs))
        frame = InterpretedFrame(self, fn, decoded, arguments)
        frame.tail = tail
        path: tuple[int, ...] = ()
        if tail:
            path, self.stop_in_call = self.stop_in_call, ()
        return frame.run(path)

    def bind(
        self, fn: types.FunctionType, code: types.CodeType, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> list[object]:
        """The argument slots of a call, bound by CPython."""
        defaults, keyword_defaults = self.world.function_defaults(fn)
        binder = types.FunctionType(code, {}, None, defaults)
        if keyword_defaults:
            binder.__kwdefaults__ = keyword_defaults
        binder.__qualname__ = fn.__qualname__
        return list(binder(*args, **kwargs))

    def call_class(self, cls: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """`type.__call__`, or the metaclass's own."""
        world = self.world
        meta = type(cls)
        rule = BUILTINS.get(cls)
        if rule is not None:
            return rule(world, args, kwargs)
        if cls in _ITERTOOLS:
            return itertools_call(world, cls, args, kwargs)
        if meta is not type and is_python(meta.__call__):
            return world.call(meta.__call__, (cls, *args), kwargs)
        return self.instantiate(cls, args, kwargs)

    def instantiate(self, cls: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call of a class: `__new__`, then `__init__` where that gave an instance."""
        world = self.world
        new = cls.__new__
        if not is_python(new) and not is_python(cls.__init__):
            return world.call_leaf(cls, args, kwargs)
        if is_python(new):
            obj = world.call(new, (cls, *args), kwargs)
        else:
            obj = world.call_leaf(new, (cls, *args), kwargs)
        kind = world.class_of(obj)
        if not issubclass(kind, cls):
            return obj
        init: object = kind.__init__
        if init is object.__init__:
            return obj  # the arguments were checked by __new__
        call = world.call if is_python(init) else world.call_leaf
        result = call(init, (obj, *args), kwargs)
        if result is not None:
            raise TypeError(f"__init__() should return None, not '{type(result).__name__}'")
        return obj

    def run_class_body(self, fn: types.FunctionType, namespace: object) -> object:
        """Execute the body of a class statement in `namespace`; the value is the `__class__` cell or None."""
        return InterpretedFrame(self, fn, CODES.get(fn.__code__), [], namespace).run()


_ITERTOOLS: frozenset[type] = frozenset(kind for kind in vars(itertools).values() if isinstance(kind, type))
# Called with an object of the kind that the table has it for.
Rule = Callable[[Interpreter, Any, tuple[object, ...], dict[str, object]], object]


def _call_builtin(interpreter: Interpreter, fn: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    rule = BUILTINS.get(fn)
    if rule is not None:
        return rule(interpreter.world, args, kwargs)
    owner = getattr(fn, "__self__", None)
    if owner is not None and type(owner) is not types.ModuleType:
        method = getattr(type(owner) if not isinstance(owner, type) else owner, fn.__name__, None)
        rule = None if method is None else _hashable_rule(method)
        if rule is not None and not isinstance(owner, type):
            return rule(interpreter.world, (owner, *args), kwargs)
    return interpreter.world.call_leaf(fn, args, kwargs)


def _hashable_rule(method: object) -> BuiltinRule | None:
    try:
        return BUILTINS.get(method)
    except TypeError:
        return None


def _call_cached(interpreter: Interpreter, fn: Any, args: Args, kwargs: Kwargs) -> object:
    """A result cached natively may hold values of another capture: the wrapped function is run."""
    return interpreter.world.call(fn.__wrapped__, args, kwargs)


def _call_method_wrapper(interpreter: Interpreter, fn: types.MethodWrapperType, args: Args, kwargs: Kwargs) -> object:
    rule = BUILTINS.get(getattr(fn.__objclass__, fn.__name__, None))
    if rule is not None:
        return rule(interpreter.world, (fn.__self__, *args), kwargs)
    return interpreter.world.call_leaf(fn, args, kwargs)


def _call_itemgetter(interpreter: Interpreter, fn: operator.itemgetter[object], args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return fn(*args, **kwargs)
    values = tuple(interpreter.world.getitem(args[0], key) for key in fn.__reduce__()[1])
    return values[0] if len(values) == 1 else values


def _call_attrgetter(interpreter: Interpreter, fn: operator.attrgetter[object], args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return fn(*args, **kwargs)
    values = []
    for path in fn.__reduce__()[1]:
        value = args[0]
        for name in path.split("."):
            value = interpreter.world.getattr(value, name)
        values.append(value)
    return values[0] if len(values) == 1 else tuple(values)


def _call_methodcaller(interpreter: Interpreter, fn: Any, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return fn(*args, **kwargs)
    maker, reduced = fn.__reduce__()[:2]
    keywords = maker.keywords if isinstance(maker, functools.partial) else {}
    names = (*maker.args, *reduced) if isinstance(maker, functools.partial) else reduced
    return interpreter.world.call(interpreter.world.getattr(args[0], names[0]), tuple(names[1:]), dict(keywords))


_BY_KIND: dict[type, Rule] = {
    types.BuiltinFunctionType: _call_builtin,
    types.WrapperDescriptorType: _call_builtin,
    types.MethodDescriptorType: _call_builtin,
    types.MethodWrapperType: _call_method_wrapper,
    functools._lru_cache_wrapper: _call_cached,
    operator.itemgetter: _call_itemgetter,
    operator.attrgetter: _call_attrgetter,
    operator.methodcaller: _call_methodcaller,
}
