"""What asks about the running frame."""

from __future__ import annotations

import sys
import types

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtin_rules import BuiltinRule, Rules
from torchdynamo.interpreter.builtins_attributes import call_getattr
from torchdynamo.interpreter.exceptions import Traceback
from torchdynamo.interpreter.protocol import MISSING, Args, InterpreterObject, Kwargs, World

RULES = Rules()


@RULES.interprets(globals)
def call_globals(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.interpreter.frames[-1].function.__globals__ if not (args or kwargs) else globals(*args, **kwargs)


@RULES.interprets(locals)
def call_locals(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.interpreter.frames[-1].local_values() if not (args or kwargs) else locals(*args, **kwargs)


@RULES.interprets(vars)
def call_vars(world: World, args: Args, kwargs: Kwargs) -> object:
    if not args and not kwargs:
        return world.interpreter.frames[-1].local_values()
    if len(args) == 1 and not kwargs:
        found = call_getattr(world, (args[0], "__dict__", MISSING), {})
        if found is MISSING:
            raise TypeError("vars() argument must have __dict__ attribute")
        return found
    return vars(*args, **kwargs)


@RULES.interprets(dir)
def call_dir(world: World, args: Args, kwargs: Kwargs) -> object:
    if not args and not kwargs:
        return sorted(world.interpreter.frames[-1].local_values())
    if len(args) == 1 and python_method(type(args[0]), "__dir__") is not None:
        return world.call(sorted, (world.call(type(args[0]).__dir__, args, {}),), {})
    return world.call_leaf(dir, args, kwargs)


@RULES.interprets(sys.exc_info)
def call_exc_info(world: World, args: Args, kwargs: Kwargs) -> object:
    error = world.interpreter.handled_exception()
    return (None, None, None) if error is None else (type(error), error, world.getattr(error, "__traceback__"))


@RULES.interprets(BaseException.with_traceback)
def call_with_traceback(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) == 2 and not kwargs and isinstance(args[1], Traceback):
        return args[0]  # which gets what it has come by where it is raised for real
    return world.call_leaf(BaseException.with_traceback, args, kwargs)


@RULES.interprets(sys.exception)
def call_exception(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.interpreter.handled_exception()


def _in_frame(native: object) -> BuiltinRule:
    """`eval` and `exec` compile text and run it natively, in the namespaces of the interpreted frame."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if len(args) == 1 and not kwargs:
            frame = world.interpreter.frames[-1]
            args = (args[0], frame.function.__globals__, frame.local_values())
        elif len(args) == 3 and not kwargs and _is_namespace(args[1]) and isinstance(args[0], str):
            return native(*args)  # type: ignore[operator]  # what the text makes is interpreted, and what that reads of the module is guarded
        return world.call_leaf(native, args, kwargs)

    return rule


def _is_namespace(thing: object) -> bool:
    """Whether it is the namespace of a module that is loaded."""
    module = sys.modules.get(thing.get("__name__", "")) if type(thing) is dict else None
    return module is not None and vars(module) is thing


RULES[eval] = _in_frame(eval)
RULES[exec] = _in_frame(exec)


class FrameView(InterpreterObject):
    """What `sys._getframe` returns for an interpreted frame."""

    __slots__ = ("_frame", "_place", "_world")
    native = types.FrameType

    def __init__(self, world: World, place: int) -> None:
        self._world, self._place, self._frame = world, place, world.interpreter.frames[place]

    @property
    def f_back(self) -> FrameView | None:
        """The caller's frame, None of the outermost one that is interpreted."""
        return FrameView(self._world, self._place - 1) if self._place else None

    @property
    def f_globals(self) -> dict[str, object]:
        """The function's globals themselves."""
        return self._frame.function.__globals__

    @property
    def f_locals(self) -> dict[str, object]:
        """Local variables by name, as they are now."""
        return self._frame.local_values()

    @property
    def f_code(self) -> types.CodeType:
        """The function's code."""
        return self._frame.function.__code__

    @property
    def f_lineno(self) -> int:
        """The line that is being run."""
        return self._frame.position.line


def _frame_at(world: World, args: Args) -> FrameView:
    depth = max(args[0], 0) if args else 0
    place = len(world.interpreter.frames) - 1 - depth
    if place < 0:
        world.unsupported("c_function", "sys._getframe reads frames outside of the interpreted program")
    return FrameView(world, place)


@RULES.interprets(sys._getframe)
def call_getframe(world: World, args: Args, kwargs: Kwargs) -> object:
    return sys._getframe(*args, **kwargs) if kwargs or len(args) > 1 else _frame_at(world, args)


@RULES.interprets(getattr(sys, "_getframemodulename", None))
def call_getframemodulename(world: World, args: Args, kwargs: Kwargs) -> object:
    """Since Python 3.12."""
    return _frame_at(world, (*args, *kwargs.values()))._frame.function.__module__
