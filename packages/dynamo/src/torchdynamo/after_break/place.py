"""The place where a program breaks the graph, and what goes on behind it: resume functions of its frames, with their
states.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchdynamo.after_break.liveness import live_slots
from torchdynamo.after_break.resume import Entrance, Entry, StackSlot, make_resume, origin_of
from torchdynamo.after_break.stopped import Stopped, StoppedFrame
from torchdynamo.after_break.suspended import closes
from torchdynamo.emit.codegen import Codegen
from torchdynamo.interpreter.decode import ExceptionEntry
from torchdynamo.interpreter.protocol import NULL
from torchdynamo.interpreter.state import HandlerSlot
from torchdynamo.outside.loops import varies
from torchdynamo.reasons import OF_EACH_LENGTH

Varied = tuple[tuple[int, ...], ...]  # places of a state's values: in the state, in that of the frame inside, ...

# (function, entrance, compiled, frames inside, what varies of the state) -> what enters the function there. What goes
# on inside of it is named so that each chain of frames has a compiled continuation of its own, not a version of one.
Resume = Callable[[types.FunctionType, Entrance, bool, tuple[types.FunctionType, ...], Varied], object]
Lines = list[str]


@dataclass(slots=True)
class Step:
    """How the breaking instruction is executed.

    Attributes:
        lines: statements that execute it.
        stack: the values below its operands, which stay on the stack.
        pushed: what it puts on the stack: names that `lines` bind, or NULL.
        calls: whether it may call the user's own functions.
        branches: (condition, code offset, stack, pushed) where it may go instead of to the next instruction.
        bound: variables that it sets, by the names that `lines` bind.
        executed: how many instructions it stands for; 0 when it always raises.
        raised: the expressions of what it raises, if it can only raise.
        again: what it raises was raised in the frame before: the traceback has it.
        returns: it leaves its frame, and what it pushes is the result of the call.
        counts: which name it binds to the number of a loop's round.
    """

    lines: Lines
    stack: list[Any]
    pushed: list[Any] = field(default_factory=lambda: ["r"])
    calls: bool = True
    branches: list[tuple[str, int, list[object], list[object]]] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    executed: int = 1
    again: bool = False
    raised: tuple[str, ...] = ()
    returns: bool = False
    counts: str = ""


class Next:
    """What generated code returns when the program goes on in a continuation.

    The frame of the generated code is gone by then: whatever only its variables held is given up before the program
    goes on.

    Attributes:
        state: emptied by the continuation.
        error: what the breaking instruction has raised.
    """

    __slots__ = ("entry", "error", "state")

    def __init__(
        self, entry: Callable[[object], object], state: list[object], error: BaseException | None = None
    ) -> None:
        self.entry = entry
        self.state = state
        self.error = error


@dataclass(slots=True)
class Place:
    """The instruction that breaks, its operands on the stack, and who writes the code."""

    codegen: Codegen
    stopped: Stopped
    resume: Resume
    instruction: dis.Instruction
    stack: list[Any]
    around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] = lambda entry: entry  # what enters a continuation
    counts: str = ""

    @property
    def here(self) -> StoppedFrame:
        """The innermost frame."""
        return self.stopped.frames[-1]

    def pop(self) -> str:
        """An expression for the top of the stack, which is taken off."""
        return self.codegen.value(self.stack.pop())

    def enter(
        self,
        offset: int,
        stack: list[object],
        pushed: list[object],
        compiled: bool = True,
        bound: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The call that goes on at `offset` of the innermost frame's code, and behind it in the frames outside."""
        return self._chain(offset, Entry.NEXT, stack, pushed, compiled, bound)

    def back(self, pushed: list[object]) -> str:
        """The call that goes on behind the innermost frame's own."""
        *frames, _ = self.stopped.frames
        caller = frames[-1]
        following = start_of(caller, caller.index + 1)
        return self._chain(following, Entry.NEXT, caller.stack, pushed, True, {}, frames)

    def arrive(self, name: str) -> str:
        """The call that goes on in the handler of the exception `name`, in the innermost frame that has one."""
        frames = self.stopped.frames
        while (handler := handler_of(frames[-1])) is None:
            frames = frames[:-1]
        stack = self.stack if frames[-1] is self.here else frames[-1].stack
        return self._chain(0, Entry.RAISE, stack[: handler.depth], [name], True, {}, frames, name)

    def leave(self, name: str, entry: Entry) -> str:
        """The call that raises the exception `name` where the instruction stands, and passes all the frames."""
        return self._chain(0, entry, [], [name], False, {}, error=name)

    def _chain(
        self,
        offset: int,
        entry: Entry,
        stack: list[object],
        pushed: list[object],
        compiled: bool,
        bound: Mapping[str, str],
        frames: Sequence[StoppedFrame] | None = None,
        error: str | None = None,
    ) -> str:
        *outer, inner = frames or self.stopped.frames
        function, state, varied = self._state(inner, offset, entry, stack, pushed, compiled and not outer, bound)
        within: tuple[types.FunctionType, ...] = ()
        for depth in range(len(outer) - 1, -1, -1):
            caller = outer[depth]
            following = start_of(caller, caller.index + 1)
            within = (*within, function)
            inside: list[object] = [self.codegen.pin(function), state]
            function, state, varied = self._state(
                caller, following, Entry.CALL, caller.stack, inside, compiled and not depth, {}, within, varied
            )
        raised = f", {error}" if error is not None else ""
        return f"{self.codegen.pin(Next)}({self.codegen.pin(self.around(function))}, {state}{raised})"

    def _state(
        self,
        frame: StoppedFrame,
        offset: int,
        entry: Entry,
        stack: list[object],
        pushed: list[object],
        compiled: bool,
        bound: Mapping[str, str],
        within: tuple[types.FunctionType, ...] = (),
        inside: Varied = (),
    ) -> tuple[Any, str, Varied]:
        """The resume function of one frame, an expression of its argument, and what of that is another one at each
        call."""
        at = frame.frame.decoded.offsets[frame.index]
        entries = [*stack, *pushed] if entry is Entry.NEXT else stack
        slots = tuple(map(_kind_of_slot, entries))
        values = [self._stack_value(frame, place) for place, slot in enumerate(stack) if slot is not NULL]
        varied = tuple((len(values) + 1, *path) for path in inside)
        values += [name for name in pushed if name is not NULL]
        names = carried(frame, offset, entry, bound)
        held = {len(values) + place: frame.locals.get(name) for place, name in enumerate(names) if name not in bound}
        held |= dict(enumerate(slot for slot in stack if slot is not NULL))
        values += [bound[name] if name in bound else self.codegen.value(frame.locals[name]) for name in names]
        if self.stopped.graph_break.reason in OF_EACH_LENGTH:
            varied += tuple(
                (place,) for place, name in enumerate(values) if name == self.counts or varies(held.get(place))
            )
        function = frame.frame.function
        origin = origin_of(function)
        if origin is not None:  # go on with the function itself, not with what resumes it
            function, offset, at = origin.function, origin.offset(offset), origin.at(at)
        if entry is Entry.NEXT:
            at = 0
        entrance = Entrance(offset if entry in (Entry.NEXT, Entry.CALL) else 0, slots, names, entry, at)
        return self.resume(function, entrance, compiled, within, varied), f"[{', '.join(values)}]", varied

    def _stack_value(self, frame: StoppedFrame, place: int) -> str:
        return self.codegen.value(frame.handled.get(place, frame.stack[place]))

    def guarded(self) -> bool:
        """Whether any of the frames has a handler for what the instruction raises."""
        return any(handler_of(frame) is not None for frame in self.stopped.frames)


def start_of(frame: StoppedFrame, index: int) -> int:
    """Where the code is entered at instruction number `index`: at its first EXTENDED_ARG."""
    code, offset = frame.frame.function.__code__.co_code, frame.frame.decoded.offsets[index]
    while offset and code[offset - 2] == dis.EXTENDED_ARG:
        offset -= 2
    return offset


def handler_of(frame: StoppedFrame) -> ExceptionEntry | None:
    """The frame's handler for what its instruction raises."""
    decoded = frame.frame.decoded
    return decoded.handler(decoded.offsets[frame.index])


def _kind_of_slot(value: object) -> StackSlot:
    if isinstance(value, HandlerSlot):
        return StackSlot.HANDLER
    return StackSlot.NULL if value is NULL else StackSlot.VALUE


def carried(frame: StoppedFrame, offset: int, entry: Entry, bound: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that the code at `offset`, or the handler of an exception before it, may still use; and those that
    end only where the frame does, with what that means."""
    decoded, code = frame.frame.decoded, frame.frame.function.__code__
    live: frozenset[int] = frozenset()
    kept = {name for name, value in frame.locals.items() if name not in bound and closes(value)}
    if entry in (Entry.LEAVE, Entry.PASS):
        return tuple(name for name in decoded.local_names if name in kept)
    if entry is not Entry.RAISE:
        live = live_slots(decoded, decoded.index_of[offset], code.co_names)
    handler = handler_of(frame) if entry is not Entry.NEXT else None
    if handler is not None:
        live |= live_slots(decoded, handler.target, code.co_names)
    kept |= {name for slot, name in enumerate(decoded.local_names) if slot in live}
    kept |= {name for name, value in frame.locals.items() if isinstance(value, types.CellType)}
    return tuple(name for name in decoded.local_names if name in kept and (name in frame.locals or name in bound))


def passing(place: Place, error: str) -> str:
    """A statement that raises an exception as it is: `raise` would set its context anew."""
    return f"{place.codegen.pin(_pass_on)}([{error}])"


def _empty() -> None:
    pass


_pass_on = make_resume(types.FunctionType(_empty.__code__, {}), Entrance(0, entry=Entry.PASS))


def indented(lines: Lines) -> Lines:
    """The statements, one block further in."""
    return [f"    {line}" for line in lines]
