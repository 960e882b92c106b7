"""Instructions that jump, loop, return, raise, handle exceptions, run `with` blocks and yield."""

from __future__ import annotations

from torchdynamo.interpreter.attributes import special_method
from torchdynamo.interpreter.exceptions import after_clauses, exception_to_raise, matches, split, strip_traceback
from torchdynamo.interpreter.generators import InterpretedGenerator
from torchdynamo.interpreter.protocol import MISSING, InterpreterObject
from torchdynamo.interpreter.state import LEAVE, FrameState, HandlerSlot, opcode


class ControlOpcodes(FrameState):
    """Jumps, loops, exceptions, `with`, generators."""

    __slots__ = ()

    # -- jumps ------------------------------------------------------------------------------

    @opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
    def JUMP(self, target: int) -> None:
        self.index = target

    @opcode("POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE")
    def POP_JUMP_IF_TRUE(self, target: int) -> None:
        value = self.stack.pop()
        if self.world.watches_tests:
            self.world.at_test(self, value)
        if value is True or (value is not False and self.branches_on(value, target, self.index)):
            self.index = target

    @opcode("POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE")
    def POP_JUMP_IF_FALSE(self, target: int) -> None:
        value = self.stack.pop()
        if self.world.watches_tests:
            self.world.at_test(self, value)
        if value is False or (value is not True and not self.branches_on(value, self.index, target)):
            self.index = target

    @opcode("POP_JUMP_IF_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE")
    def POP_JUMP_IF_NONE(self, target: int) -> None:
        if self.stack.pop() is None:
            self.index = target

    @opcode("POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE")
    def POP_JUMP_IF_NOT_NONE(self, target: int) -> None:
        if self.stack.pop() is not None:
            self.index = target

    @opcode(until=(3, 11))
    def JUMP_IF_TRUE_OR_POP(self, target: int) -> None:
        if self.world.truth(self.stack[-1]):
            self.index = target
        else:
            self.stack.pop()

    @opcode(until=(3, 11))
    def JUMP_IF_FALSE_OR_POP(self, target: int) -> None:
        if self.world.truth(self.stack[-1]):
            self.stack.pop()
        else:
            self.index = target

    # -- loops ------------------------------------------------------------------------------

    @opcode()
    def GET_ITER(self, _: int) -> None:
        self.stack[-1] = self.world.iterate(self.stack[-1])

    @opcode("FOR_ITER", until=(3, 11))
    def FOR_ITER(self, target: int) -> None:
        self._next_or_jump(target)

    @opcode("FOR_ITER", since=(3, 12), until=(3, 12))
    def FOR_ITER_over_end_for(self, target: int) -> None:
        self._next_or_jump(target + 1)

    @opcode("FOR_ITER", since=(3, 13))
    def FOR_ITER_over_end_for_and_pop(self, target: int) -> None:
        self._next_or_jump(target + 2)

    def _next_or_jump(self, target: int) -> None:
        try:
            value = self.world.advance(self.stack[-1])
        except StopIteration:
            self.stack.pop()
            self.index = target
        else:
            self.stack.append(value)

    @opcode("END_FOR", since=(3, 12), until=(3, 12))
    def END_FOR(self, _: int) -> None:
        self.pop_many(2)

    @opcode("END_FOR", since=(3, 13))
    def END_FOR_one(self, _: int) -> None:
        self.stack.pop()

    # -- leaving ----------------------------------------------------------------------------

    @opcode()
    def RETURN_VALUE(self, _: int) -> bool:
        self._let_go_of_locals()
        self.result = self.stack.pop()
        self.fast.clear()  # what only the locals held is finalised while the frame is still there
        return LEAVE

    @opcode(since=(3, 12))
    def RETURN_CONST(self, value: object) -> bool:
        self._let_go_of_locals()
        self.result = value
        self.fast.clear()
        return LEAVE

    def _let_go_of_locals(self) -> None:
        """What the outermost frame holds is given up by the compiled code itself, when it returns."""
        if self.interpreter.frames[0] is not self:
            self.let_go(self.fast)

    @opcode()
    def RETURN_GENERATOR(self, _: int) -> bool:
        self.result = InterpretedGenerator(self)
        self.tail = False  # its body is run by whoever advances it
        return LEAVE

    @opcode()
    def YIELD_VALUE(self, _: int) -> bool:
        self.result = self.stack.pop()
        return LEAVE

    # -- delegation to another iterator -----------------------------------------------------

    @opcode()
    def GET_YIELD_FROM_ITER(self, _: int) -> None:
        if not isinstance(self.stack[-1], InterpretedGenerator):
            self.stack[-1] = self.world.iterate(self.stack[-1])

    @opcode("SEND", until=(3, 11))
    def SEND(self, target: int) -> None:
        if self._send(target):
            del self.stack[-2]

    @opcode("SEND", since=(3, 12))
    def SEND_keeping_receiver(self, target: int) -> None:
        self._send(target)

    def _send(self, target: int) -> bool:
        """Replace the value on top by what the receiver below yields; true when it is exhausted."""
        receiver, value = self.stack[-2:]
        try:
            if value is None and not isinstance(receiver, InterpretedGenerator):
                self.stack[-1] = self.world.advance(receiver)
            elif isinstance(receiver, InterpreterObject):
                self.stack[-1] = receiver.send(value)  # type: ignore[attr-defined]
            else:
                self.stack[-1] = self.world.call(self.world.getattr(receiver, "send"), (value,), {})
        except StopIteration as stop:
            self.stack[-1] = stop.value
            self.index = target
            return True
        return False

    @opcode(since=(3, 12))
    def END_SEND(self, _: int) -> None:
        del self.stack[-2]

    @opcode(since=(3, 12))
    def CLEANUP_THROW(self, _: int) -> None:
        error = self.stack[-1]
        if not isinstance(error, StopIteration):
            self.reraise(error)
        self.pop_many(3)
        self.stack += [None, error.value]

    # -- exceptions -------------------------------------------------------------------------

    def reraise(self, error: BaseException) -> None:
        """Raise an exception again: its context stays as it is."""
        self.interpreter.note_reraise(error)
        self.interpreter.propagating = error
        self.interpreter.raised_groups.pop(id(error), None)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    @opcode()
    def RAISE_VARARGS(self, count: int) -> None:
        if count == 0:
            handled = self.interpreter.handled_exception()
            if handled is None:
                raise RuntimeError("No active exception to reraise")
            self.reraise(handled)
        cause = self.stack.pop() if count == 2 else MISSING
        error = exception_to_raise(self.world, self.stack.pop(), cause)
        if isinstance(error, BaseExceptionGroup):
            self.interpreter.raised_groups[id(error)] = error
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    @opcode()
    def PUSH_EXC_INFO(self, _: int) -> None:
        state = self.interpreter.exc_state
        error = self.stack[-1]
        error.__traceback__ = strip_traceback(error.__traceback__)
        self.stack[-1] = HandlerSlot(state.value)
        self.stack.append(error)
        state.value = error

    @opcode()
    def POP_EXCEPT(self, _: int) -> None:
        slot = self.stack.pop()
        self.interpreter.exc_state.value = slot.previous
        slot.ended = True

    @opcode()
    def CHECK_EXC_MATCH(self, _: int) -> None:
        wanted = self.stack.pop()
        self.stack.append(matches(self.stack[-1], wanted))

    @opcode()
    def CHECK_EG_MATCH(self, _: int) -> None:
        wanted, error = self.stack.pop(), self.stack.pop()
        taken, rest = split(error, wanted)
        self.stack += (rest, taken)
        if taken is not None:
            self.interpreter.exc_state.value = taken

    @opcode(until=(3, 11))
    def PREP_RERAISE_STAR(self, _: int) -> None:
        left, caught = self.stack.pop(), self.stack.pop()
        self.stack.append(after_clauses(caught, left, self.interpreter.raised_groups))

    @opcode()
    def RERAISE(self, _: int) -> None:
        self.reraise(self.stack.pop())

    @opcode()
    def LOAD_ASSERTION_ERROR(self, _: int) -> None:
        self.stack.append(AssertionError)

    # -- with -------------------------------------------------------------------------------

    @opcode()
    def BEFORE_WITH(self, _: int) -> None:
        world, manager = self.world, self.stack[-1]
        enter = special_method(world, manager, "__enter__")
        message = f"'{type(manager).__name__}' object does not support the context manager protocol"
        if enter is MISSING:
            raise TypeError(message)
        leave = special_method(world, manager, "__exit__")
        if leave is MISSING:
            raise TypeError(f"{message} (missed __exit__ method)")
        self.stack[-1] = leave
        self.stack.append(world.call(enter, (), {}))

    @opcode()
    def WITH_EXCEPT_START(self, _: int) -> None:
        error = self.stack[-1]
        arguments = (type(error), error, self.world.getattr(error, "__traceback__"))
        self.stack.append(self.world.call(self.stack[-4], arguments, {}))
