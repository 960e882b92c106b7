"""Interpreted frames: the table of handlers, the run loop, the search for exception handlers."""

from __future__ import annotations

import dis

from torchdynamo.interpreter.decode import CodeCache, Handler
from torchdynamo.interpreter.exceptions import set_context
from torchdynamo.interpreter.opcodes_calls import CallOpcodes
from torchdynamo.interpreter.opcodes_control import ControlOpcodes
from torchdynamo.interpreter.opcodes_load_store import LoadStoreOpcodes
from torchdynamo.interpreter.opcodes_operators import OperatorOpcodes
from torchdynamo.interpreter.protocol import Escape, Position, Stop
from torchdynamo.interpreter.state import HandlerBounds, Version, python_version

_RERAISE = dis.opmap["RERAISE"]

# Instructions that are not interpreted, and why. `coverage.py` holds this table against `dis.opmap`.
UNSUPPORTED: dict[str, str] = {
    "ASYNC_GEN_WRAP": "asynchronous generators run outside of capture",
    "BEFORE_ASYNC_WITH": "coroutines run outside of capture",
    "END_ASYNC_FOR": "coroutines run outside of capture",
    "GET_AITER": "coroutines run outside of capture",
    "GET_ANEXT": "coroutines run outside of capture",
    "GET_AWAITABLE": "coroutines run outside of capture",
    "IMPORT_STAR": "occurs at module level only",
    "PRINT_EXPR": "occurs at the interactive prompt only",
}


class InterpretedFrame(LoadStoreOpcodes, OperatorOpcodes, ControlOpcodes, CallOpcodes):
    """One activation of a Python function.

    `fast` are the local slots (cells included), `stack` the value stack, `offset` the instruction at hand.
    """

    __slots__ = ()

    @property
    def offset(self) -> int:
        """Offset in `co_code` of the instruction being executed."""
        return self.decoded.offsets[max(self.index - 1, 0)]

    @property
    def position(self) -> Position:
        """The file, the line and the function of the instruction that runs."""
        decoded = self.decoded
        return Position(decoded.filename, decoded.line(max(self.index - 1, 0)), decoded.name)

    def run(self, path: tuple[int, ...] = ()) -> object:
        """Execute until the frame returns or yields; raise what the program does not handle.

        `path` is that of an `Escape`: before the instruction that it leads to, `Stop` is raised, and the frames are
        as they are there: `index` is the next instruction of the innermost, the others are within their calls.
        """
        interpreter = self.interpreter
        frames, program = interpreter.frames, self.decoded.program
        frames.append(self)
        executed, limit = 0, path[0] if path else -1
        try:
            while True:
                try:
                    while True:
                        if executed == limit:
                            if len(path) == 1:
                                raise Stop(list(frames))
                            # Only the call at hand leads on along the path.
                            interpreter.stop_in_call = path = path[1:] if path else ()
                            limit, path = (executed + 1, ()) if path else (-1, ())
                        index = self.index
                        self.index = index + 1
                        handler, operand = program[index]
                        if handler(self, operand) is not None:
                            result, self.result = self.result, None  # a generator's frame made the generator
                            interpreter.raise_pending()
                            return result
                        if interpreter.pending_escape is not None:
                            interpreter.raise_pending()
                        executed += 1
                except Escape as escape:
                    self._leave(escape, executed)
                    raise
                except BaseException as error:
                    raised = error
                try:
                    interpreter.note_raise(raised)
                    self._let_go_by(raised)
                    executed += 1
                    if not self.unwind(raised):
                        raise raised
                except Escape as escape:
                    self._leave(escape, executed)
                    raise
                finally:
                    del raised  # its traceback holds this frame
        finally:
            frames.pop()

    def _leave(self, escape: Escape, executed: int) -> None:
        if not escape.positions:
            escape.positions = self.interpreter.positions()
        escape.path = (executed, *escape.path)
        if not self.tail and len(self.interpreter.frames) > 1:
            escape.path = ()  # who called does more with the result than to push it

    def _let_go_by(self, error: BaseException) -> None:
        """An exception takes values off the stack, and out of the variables where it leaves the frame."""
        entry = self.decoded.handler(self.decoded.offsets[self.index - 1])
        if entry is not None:
            self.let_go(self.stack[entry.depth :], error)
        elif self.interpreter.frames[0] is not self:  # else the compiled code itself does
            self.let_go([*self.stack, *self.fast], error)

    def throw(self, error: BaseException) -> object:
        """Raise `error` at the instruction where the frame is suspended, and run on."""
        self.interpreter.frames.append(self)
        try:
            if not self.unwind(error):
                raise error
        finally:
            del error  # its traceback holds this frame
            self.interpreter.frames.pop()
        return self.run()

    def unwind(self, error: BaseException) -> bool:
        """Go to the handler of the exception; false when the frame has none: `index` tells of where it was raised."""
        interpreter = self.interpreter
        if interpreter.propagating is error:
            interpreter.propagating = None
        else:
            set_context(error, interpreter.handled_exception())
        self.keyword_names = ()
        index = self.index - 1
        offset = self.decoded.offsets[index]
        entry = self.decoded.handler(offset)
        if self.decoded.opcodes[index] == _RERAISE:  # behind a `finally`, say, which has no line of its own
            index = self.raised_at.get(id(error), index)
        if entry is None:
            interpreter.propagating = error
            interpreter.passed.add(id(error))
            self.index = index + 1
            return False
        interpreter.caught.add(id(error))
        self.raised_at[id(error)] = index
        del self.stack[entry.depth :]
        if entry.lasti:
            self.stack.append(offset)
        self.stack.append(error)
        self.index = entry.target
        return True


def _collect(version: Version) -> dict[int, Handler]:
    table: dict[int, Handler] = {}
    for cls in InterpretedFrame.__mro__:
        for attribute in vars(cls).values():
            bounds: tuple[HandlerBounds, ...] = getattr(attribute, "handler_bounds", ())
            for bound in bounds:
                if bound.include(version) and bound.name in dis.opmap:
                    table[dis.opmap[bound.name]] = attribute
    return table


def _missing(op: int) -> Handler:
    """An instruction without a handler ends capture where it is executed, not where it is decoded."""
    name = dis.opname[op]

    def refuse(frame: InterpretedFrame, _: object) -> None:
        frame.world.unsupported("opcode", f"{name}: {UNSUPPORTED.get(name, 'no handler for this instruction')}")

    return refuse


HANDLERS = _collect(python_version())
CODES = CodeCache(HANDLERS, _missing)
