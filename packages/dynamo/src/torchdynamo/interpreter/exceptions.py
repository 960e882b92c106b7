"""What raising and catching mean: which exception is raised, whether a clause matches, whose traceback it carries."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from torchdynamo.interpreter.protocol import MISSING, InterpreterObject, World

FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of all of capture


class Traceback(InterpreterObject):
    """The way that an exception has come, which only a real raise tells. The program may hand it on.

    Args:
        refuse: raises what is to be raised where the program looks into it.
    """

    native = types.TracebackType

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self.refuse = refuse

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse()


def exception_to_raise(world: World, raised: object, cause: object = MISSING) -> BaseException:
    """The instance that `raise raised from cause` raises."""
    error = _instance(world, raised, "exceptions must derive from BaseException")
    if cause is not MISSING:
        if cause is not None:
            cause = _instance(world, cause, "exception causes must derive from BaseException")
        error.__cause__ = cause
    return error


def _instance(world: World, raised: object, message: str) -> BaseException:
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


def matches(error: BaseException, wanted: object) -> bool:
    """`except wanted:` compares by real subclassing; `__subclasscheck__` is not asked."""
    for cls in wanted if isinstance(wanted, tuple) else (wanted,):
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    classes = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(cls in type(error).__mro__ for cls in classes)


def split(error: BaseException | None, wanted: Any) -> tuple[BaseException | None, BaseException | None]:
    """What `except* wanted:` takes of an exception, as a group, and what it leaves."""
    for cls in wanted if isinstance(wanted, tuple) else (wanted,):
        if isinstance(cls, type) and issubclass(cls, BaseExceptionGroup):
            text = "catching ExceptionGroup with except* is not allowed. Use except instead."
            raise TypeError(text)
    if error is None:
        return None, None
    if matches(error, wanted):
        return (error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])), None
    if isinstance(error, BaseExceptionGroup):
        return error.split(wanted)
    return None, error


def after_clauses(
    caught: BaseException, left: list[BaseException | None], raised_groups: Container[int]
) -> BaseException | None:
    """What `try` raises after its `except*` clauses, or None.

    Args:
        caught: what arrived at the first of them.
        left: what the clauses raised, and parts of `caught` that they raised again or did not take.
        raised_groups: identities of the groups that a clause raised by name: they are new, whatever they hold.
    """
    if not isinstance(caught, BaseExceptionGroup):
        return next(iter(left), None)
    found = [error for error in left if error is not None]
    same = [error for error in found if id(error) not in raised_groups and _is_part(error, caught)]
    raised = [error for error in found if not any(error is one for one in same)]
    again = {id(leaf) for error in same for leaf in _leaves(error)}
    rest = caught.subgroup(lambda error: id(error) in again) if again else None
    if rest is not None:
        raised.append(rest)
    return BaseExceptionGroup("", raised) if len(raised) > 1 else next(iter(raised), None)


def _is_part(error: BaseException, whole: BaseException) -> bool:
    """A group that `split` made of `whole`, not one that a clause made."""
    names = ("__notes__", "__cause__", "__context__")
    alike = all(getattr(error, name, None) is getattr(whole, name, None) for name in names)
    return alike and isinstance(error, BaseExceptionGroup)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


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
        if not traceback.tb_frame.f_code.co_filename.startswith(FOLDER):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = types.TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def empty_frames(error: BaseException | None) -> None:
    """Takes the variables out of capture's own frames in the tracebacks of an exception and of those behind it.

    The frames would keep what the program has given up alive, until a garbage collection: the captured objects hold
    the exception, too. A frame of a library keeps those of capture that called it. Files and lines stay.
    """
    chain, seen = [error], set()
    passed: set[types.FrameType] = set()
    while chain:
        error = chain.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        chain += (error.__cause__, error.__context__)
        trace = error.__traceback__
        while trace is not None:
            frame: types.FrameType | None = trace.tb_frame
            while frame is not None and frame not in passed:
                passed.add(frame)
                if frame.f_code.co_filename.startswith(FOLDER):
                    with suppress(RuntimeError):  # it is still running
                        frame.clear()
                frame = frame.f_back
            trace = trace.tb_next
