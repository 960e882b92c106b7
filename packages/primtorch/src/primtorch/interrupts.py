"""Exceptions that no code of ours or of the program raises: a handler of a signal does, between any two instructions of
what runs in the main thread. A time limit (`SIGALRM`) and a request to end (`SIGTERM`) are made so. They are the
caller's: whoever handles errors of a stage asks first, and lets them pass."""

from __future__ import annotations

import functools
import inspect
import signal
import types


def interrupt_behind(error: BaseException) -> BaseException | None:
    """The exception of a signal's handler that this error is, or was made from; None where there is none.

    A handler is known by its code, so that one in C is not: what `default_int_handler` raises is no `Exception`.
    """
    codes: set[types.CodeType] | None = None
    cause: BaseException | None = error
    while cause is not None:
        place = cause.__traceback__
        while place is not None:
            codes = _codes_of_handlers() if codes is None else codes
            if place.tb_frame.f_code in codes:
                return cause
            place = place.tb_next
        cause = cause.__cause__
    return None


def pass_on_interrupt(error: BaseException) -> None:
    """Raises the exception of a signal's handler that is behind this error, if one is."""
    interrupt = interrupt_behind(error)
    if interrupt is not None:
        raise interrupt


_SIGNALS = tuple(signal.valid_signals())


def _codes_of_handlers() -> set[types.CodeType]:
    handlers = map(signal.getsignal, _SIGNALS)
    codes = (_code_of(handler) for handler in handlers if callable(handler))
    return {code for code in codes if code is not None}


def _code_of(handler: object) -> types.CodeType | None:
    """The code that runs first where this is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, (types.FunctionType, types.MethodType)):
        handler = inspect.getattr_static(type(handler), "__call__", None)
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, types.CodeType) else None
