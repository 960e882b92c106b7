"""What raising and catching mean: which exception is raised, whether a clause matches, whose traceback it carries."""

from __future__ import annotations

import os
import types
from typing import Any

from torchdynamo.interpreter.protocol import MISSING, World

_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of all of capture


def exception_to_raise(world: World, raised: Any, cause: Any = MISSING) -> BaseException:
    """The instance that `raise raised from cause` raises."""
    error = _instance(world, raised, "exceptions must derive from BaseException")
    if cause is not MISSING:
        if cause is not None:
            cause = _instance(world, cause, "exception causes must derive from BaseException")
        error.__cause__ = cause
    return error


def _instance(world: World, raised: Any, message: str) -> BaseException:
    if isinstance(raised, BaseException):
        return raised
    if not (isinstance(raised, type) and issubclass(raised, BaseException)):
        raise TypeError(message)
    error = world.call(raised, (), {})
    if not isinstance(error, BaseException):
        kind = type(error).__name__
        text = f"calling {raised!r} should have returned an instance of BaseException, not {kind}"
        raise TypeError(text)
    return error


def matches(error: BaseException, wanted: Any) -> bool:
    """`except wanted:` compares by real subclassing; `__subclasscheck__` is not asked."""
    for cls in wanted if isinstance(wanted, tuple) else (wanted,):
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    classes = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(cls in type(error).__mro__ for cls in classes)


def set_context(error: BaseException, handled: BaseException | None) -> None:
    """Note that `error` was raised while `handled` was handled; a chain never becomes a ring."""
    if handled is None or handled is error:
        return
    link = handled
    while (below := link.__context__) is not None:
        if below is error:
            link.__context__ = None
            break
        link = below
    error.__context__ = handled


def strip_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without capture's own frames."""
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_FOLDER):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = types.TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
