"""One interpretation of a call: from real arguments to a recorded graph, a result or a place to stop."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from primtorch.ambient import preserved
from primtorch.schemas import UserFrame
from torchdynamo.after_break.stopped import Stopped, StoppedFrame
from torchdynamo.calls.calls import OpenBlock
from torchdynamo.calls.emissions import Emission
from torchdynamo.capture_world import CaptureWorld
from torchdynamo.emit.codegen import parameter_name
from torchdynamo.graph.derivatives import CutGraph
from torchdynamo.graph.scalars import NumberNeeded
from torchdynamo.guards.memory_guards import refuse_writes
from torchdynamo.interpreter import InterpretedFrame, Interpreter
from torchdynamo.interpreter.exceptions import empty_frames, strip_traceback
from torchdynamo.interpreter.protocol import MISSING, NULL, Position, Stop
from torchdynamo.interpreter.state import HandlerSlot
from torchdynamo.marks import region
from torchdynamo.outside.dynamic_policy import DynamicPolicy
from torchdynamo.outside.growing_lists import ReadWhole
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph, GivesUp
from torchdynamo.schemas import GraphBreak
from torchdynamo.sources import Source


@dataclass(slots=True)
class Captured:
    """What an interpretation came to: `outside` and `value`, `stopped`, `broke`, `error`, `cut_at` or `read_whole`."""

    outside: Outside
    interpreter: Interpreter
    value: Any = None
    stopped: Stopped | None = None
    broke: tuple[GraphBreak, tuple[int, ...]] | None = None  # why, and the path to the instruction
    error: BaseException | None = None
    cut_at: int | None = None  # number of recorded calls behind which the graph has to end
    read_whole: Source | None = None  # a list that has to be captured with all that is in it
    breaks_are_errors: bool = False  # where it broke
    refused_raise: int = -1  # of an exception that has to be raised for real
    raises: dict[int, int] = field(default_factory=dict)  # ordinal of the raise, by identity of the exception
    passes: dict[int, int] = field(default_factory=dict)  # of what was raised again and left a frame, in the same way
    grad_enabled: bool = True
    close_blocks: Callable[[], list[OpenBlock]] = list
    emissions: Sequence[Emission] = ()
    where: Position | None = None  # in the root frame, of the error

    def release(self) -> None:
        """Lets go of the program's objects. What points to this record, or to its error, keeps none of them alive."""
        if self.error is not None and self.outside.externals.lookup(self.error) is not None:  # it is the program's
            self.error.__traceback__ = strip_traceback(self.error.__traceback__)
        self.outside.release()
        self.interpreter.release()
        empty_frames(self.error)
        for frame in self.stopped.frames if self.stopped is not None else ():
            for error in frame.handled.values():
                empty_frames(error)
        self.value = self.stopped = self.error = None


def interpret(
    function: types.FunctionType,
    flat: tuple[Any, ...],
    policy: DynamicPolicy,
    stop_at: tuple[int, ...] = (),
    reason: GraphBreak | None = None,
    refused_raise: int = -1,
    refused_start: int = -1,
    cut_at: int | None = None,
) -> Captured:
    """Runs `function` on `flat` in the interpreter.

    Args:
        stop_at: path to the instruction before which it stops, of an earlier run that broke there for `reason`.
        refused_raise: ordinal of a raise that breaks the graph.
        refused_start: ordinal of a generator at whose start the graph ends.
        cut_at: number of recorded calls behind which the graph ends, of an earlier run that asked for it.
    """
    interpreter: Interpreter | None = None
    stack = UserStack()

    def user_frames() -> tuple[UserFrame, ...]:
        return stack.now(interpreter.frames) if interpreter is not None else ()

    outside = Outside(function, policy, user_frames)
    outside.recorder.cut_at = cut_at
    outside.recorder.refused = policy.refused
    refuse_writes(outside, policy.shared)
    world = CaptureWorld(outside)
    interpreter = Interpreter(world)
    interpreter.refused_raise = refused_raise
    interpreter.refused_start = refused_start
    calls = world.calls
    captured = Captured(outside, interpreter, close_blocks=calls.close_blocks, emissions=calls.emissions.made)
    frame: InterpretedFrame | None = None
    with preserved(), interpreter.deep_stack(_DEEPEST):
        try:
            names = function.__code__.co_varnames
            arguments = [outside.argument(i, parameter_name(i, names[i]), value) for i, value in enumerate(flat)]
            frame = interpreter.root_frame(function, arguments)
            with outside.recorder:
                captured.value = frame.run(stop_at)
                if interpreter.pending_escape is not None:
                    raise interpreter.pending_escape
        except Stop as stop:
            assert reason is not None
            captured.stopped = Stopped(_stopped(stop.frames, interpreter.handled_exception()), reason)
        except BreakGraph as error:
            where = as_user_frames(error.positions)
            captured.broke = (GraphBreak(error.reason, error.detail, where), error.path)
            if isinstance(error, GivesUp):
                captured.refused_raise = error.ordinal
            errors = outside.overlays.read(region(), "errors")
            captured.breaks_are_errors = bool(region().errors if errors is MISSING else errors)
        except CutGraph as error:
            captured.cut_at = error.call
        except ReadWhole as error:
            captured.read_whole = error.source
        except NumberNeeded as needed:
            captured.error = needed.error
        except Exception as error:
            captured.error = error
            captured.where = frame.position if frame is not None else None
        finally:
            world.calls.emissions.close()
            stack.clear()
        captured.grad_enabled = torch.is_grad_enabled()
        captured.raises = interpreter.raises
        captured.passes = {key: at for key, at in interpreter.reraises.items() if key in interpreter.passed}
    return captured


def _stopped(frames: list[InterpretedFrame], handled: BaseException | None) -> list[StoppedFrame]:
    """The frames' state. An exception is handled at each `HandlerSlot`; the innermost handles `handled`."""
    found = []
    for frame in reversed(frames):
        index = frame.index if frame is frames[-1] else frame.index - 1
        names = frame.decoded.local_names
        bound = {name: value for name, value in zip(names, frame.fast, strict=True) if value is not NULL}
        state = StoppedFrame(frame, index, list(frame.stack), bound, {})
        for place in range(len(state.stack) - 1, -1, -1):
            slot = state.stack[place]
            if isinstance(slot, HandlerSlot) and slot.ended:
                state.stack[place] = slot.previous
            elif isinstance(slot, HandlerSlot) and handled is not None:
                state.handled[place] = handled
                handled = slot.previous
        found.append(state)
    return found[::-1]


class UserStack:
    """The user's frames, as asked for at each read and each node: what has not moved since is not made anew."""

    def __init__(self) -> None:
        self._levels: list[tuple[InterpretedFrame, int, tuple[UserFrame, ...]]] = []  # the stack down to each frame

    def now(self, frames: list[InterpretedFrame]) -> tuple[UserFrame, ...]:
        levels, same = self._levels, 0
        for (known, index, _), frame in zip(levels, frames, strict=False):
            if known is not frame or index != frame.index:
                break
            same += 1
        del levels[same:]
        found = levels[-1][2] if levels else ()
        for frame in frames[same:]:
            found = (*found, *as_user_frames((frame.position,)))
            levels.append((frame, frame.index, found))
        return found

    def clear(self) -> None:
        self._levels.clear()


def as_user_frames(positions: tuple[Position, ...]) -> tuple[UserFrame, ...]:
    return tuple(UserFrame(p.file, p.line, p.function) for p in positions)


# Python frames of a capture. While a frame hook is installed each takes a part of the C stack.
_DEEPEST = 6_000
