"""Functions that the interpreter calls of itself, in the middle of whatever runs: they are no part of the program.

What it calls while it collects garbage, traces, or clears a weak reference, the frame hook sees by itself.
"""

from __future__ import annotations

import signal
import types


def is_finalizer(code: types.CodeType) -> bool:
    """Whether code is run where the last reference to an object goes."""
    return code.co_name == "__del__"


def handles_a_signal(function: types.FunctionType) -> bool:
    """Whether the function is the handler of a signal now, as it is, as a method or as an object that is called."""
    return any(_function_of(signal.getsignal(number)) is function for number in signal.valid_signals())


def _function_of(handler: object) -> object:
    if isinstance(handler, types.FunctionType):
        return handler
    if isinstance(handler, types.MethodType):
        return handler.__func__
    return vars(type(handler)).get("__call__")
