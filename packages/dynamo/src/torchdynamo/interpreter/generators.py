"""Generators whose bodies are interpreted. They behave as generators to native code, too."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchdynamo.interpreter.protocol import Escape, InterpreterObject, World
from torchdynamo.interpreter.state import ExceptionState

if TYPE_CHECKING:
    from torchdynamo.interpreter.frame import InterpretedFrame

_RESUME = dis.opmap["RESUME"]
_YIELD_VALUE = dis.opmap["YIELD_VALUE"]
_HAS_CLEANUP_THROW = "CLEANUP_THROW" in dis.opmap


class InterpretedGenerator(InterpreterObject):
    """A suspended frame. `gi_frame` is the interpreted frame, None once it has finished."""

    native = types.GeneratorType

    def __init__(self, frame: Any) -> None:
        self._frame: InterpretedFrame | None = frame
        self._exceptions = ExceptionState()
        self.gi_running = False
        self.gi_code = frame.function.__code__
        self.__name__ = frame.function.__name__
        self.__qualname__ = frame.function.__qualname__
        self._started = False
        self.start = 0  # how many generators had started when this one did, itself included

    @property
    def unstarted(self) -> InterpretedFrame | None:
        """The frame, as long as none of its body has run."""
        return None if self._started else self._frame

    @property
    def gi_frame(self) -> object:
        """The frame, None once it has ended."""
        return self._frame

    @property
    def gi_suspended(self) -> bool:
        """Whether it waits at a `yield`."""
        return self._started and self._frame is not None and not self.gi_running

    @property
    def gi_yieldfrom(self) -> object:
        """What it delegates to, or None."""
        return self._delegate()

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        return self.send(None)

    def send(self, value: object) -> object:
        """Goes on to the next `yield`, whose value it gives. Raises StopIteration at the end."""
        frame = self._frame
        if self.gi_running:
            raise ValueError("generator already executing")
        if frame is None:
            raise StopIteration
        if not self._started and value is not None:
            raise TypeError("can't send non-None value to a just-started generator")
        frame.stack.append(value)
        return self._resume(frame, None)

    def throw(self, kind: object, value: object = None, traceback: types.TracebackType | None = None) -> object:
        """Raises an exception where it waits, and gives the next value."""
        error = _thrown(kind, value, traceback)
        if self.gi_running:
            raise ValueError("generator already executing")
        frame = self._frame
        if frame is None:
            raise error
        try:
            return self._throw(frame, error)
        finally:
            del error  # its traceback holds this frame

    def _throw(self, frame: InterpretedFrame, error: BaseException) -> object:
        delegate = self._delegate()
        if delegate is not None:
            try:
                return self._throw_into(delegate, error, frame)
            except BaseException as raised:  # the body runs on below, outside of this handler
                error = raised
            if isinstance(error, StopIteration) and not _HAS_CLEANUP_THROW:
                # Continue after the delegation: RESUME, the jump back to SEND, and where SEND goes at the end.
                send = frame.decoded.program[frame.index + 1].operand
                frame.stack[-1] = error.value
                frame.index = frame.decoded.program[send].operand
                return self._resume(frame, None)
        try:
            return self._resume(frame, error)
        finally:
            del error

    def _throw_into(self, delegate: object, error: BaseException, frame: InterpretedFrame) -> object:
        world = frame.world
        self.gi_running = True
        try:
            if isinstance(error, GeneratorExit):
                close = getattr(delegate, "close", None)
                if close is not None:
                    _call(world, close, ())
                raise error
            throw = getattr(delegate, "throw", None)
            if throw is None:
                raise error
            return _call(world, throw, (error,))
        finally:
            del error
            self.gi_running = False

    def close(self) -> object:
        """Ends it: what waits in `finally` blocks runs."""
        frame = self._frame
        if frame is None:
            return None
        if not self._started:
            self._frame = None
            return None
        try:
            self.throw(GeneratorExit())
        except GeneratorExit:
            return None
        except StopIteration as stop:
            return stop.value if _CLOSE_RETURNS else None
        raise RuntimeError("generator ignored GeneratorExit")

    def _delegate(self) -> object:
        """The iterator that `yield from` is waiting for."""
        frame = self._frame
        if frame is None or not self._started or self.gi_running:
            return None
        opcodes, arguments, index = frame.decoded.opcodes, frame.decoded.arguments, frame.index
        waiting = opcodes[index - 1] == _YIELD_VALUE and opcodes[index] == _RESUME and (arguments[index] & 3) >= 2
        return frame.stack[-1] if waiting else None

    def _resume(self, frame: InterpretedFrame, error: BaseException | None) -> object:
        interpreter = frame.interpreter
        started = self._started
        if not started:
            self.start = interpreter.note_start(self.__qualname__)
            self._started = True
        state = self._exceptions
        state.previous, interpreter.exc_state = interpreter.exc_state, state
        self.gi_running = True
        try:
            if error is None:
                value = frame.run()
            elif not started:  # nothing of the body can handle it
                raise error
            else:
                value = frame.throw(error)
        except StopIteration as stop:
            self._frame = None
            failure = RuntimeError("generator raised StopIteration")
            failure.__cause__ = failure.__context__ = stop
            interpreter.propagating = failure
        except BaseException:
            self._frame = None
            raise
        else:
            if frame.decoded.opcodes[frame.index - 1] == _YIELD_VALUE:
                return value
            self._frame = None
            raise StopIteration if value is None else StopIteration(value)
        finally:
            del error
            self.gi_running = False
            interpreter.exc_state, state.previous = state.previous, None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame

    def __del__(self) -> None:
        """A generator that is dropped runs its `finally` and `with` blocks, as long as the program runs."""
        frame = self._frame
        if frame is None or not self._started or self.gi_running or not frame.interpreter.frames:
            return
        offset = frame.decoded.offsets[frame.index - 1]
        if not any(entry.start <= offset < entry.end for entry in frame.decoded.exceptions):
            return
        try:
            self.close()
        except Escape as escape:  # a destructor cannot raise: the end of the instruction does
            frame.interpreter.pending_escape = escape

    def __repr__(self) -> str:
        return f"<generator object {self.__qualname__} at {id(self):#x}>"


_CLOSE_RETURNS = "END_FOR" in dis.opmap and "TO_BOOL" in dis.opmap  # Python 3.13


def _call(world: World, method: Any, arguments: tuple[object, ...]) -> object:
    if isinstance(getattr(method, "__self__", None), InterpreterObject):
        return method(*arguments)
    return world.call(method, arguments, {})


def _thrown(kind: object, value: object, traceback: types.TracebackType | None) -> BaseException:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        if isinstance(value, kind):
            error: BaseException = value
        elif value is None:
            error = kind()
        else:
            error = kind(*value) if isinstance(value, tuple) else kind(value)
    elif isinstance(kind, BaseException):
        if value is not None:
            raise TypeError("instance exception may not have a separate value")
        error = kind
    else:
        name = type(kind).__name__
        raise TypeError(f"exceptions must be classes or instances deriving from BaseException, not {name}")
    return error.with_traceback(traceback) if isinstance(traceback, types.TracebackType) else error
