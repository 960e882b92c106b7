"""One interpretation of a call: from real arguments to a recorded graph, a result or a place to stop."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from primtorch.schemas import UserFrame
from torchdynamo.capture_world import CaptureWorld
from torchdynamo.codegen import parameter_name
from torchdynamo.interpreter import InterpretedFrame, Interpreter
from torchdynamo.interpreter.protocol import NULL, Position
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GraphBreak
from torchdynamo.world import DynamicPolicy, Outside


@dataclass(slots=True)
class Stopped:
    """The root frame just before the instruction that breaks the graph."""

    index: int  # of the instruction in the decoded code
    frame: InterpretedFrame
    stack: list[Any]  # NULL for empty slots
    locals: dict[str, Any]
    graph_break: GraphBreak


@dataclass(slots=True)
class Captured:
    """What an interpretation came to: `value` and `outside`, or `stopped`, or `broke`, or `error`."""

    outside: Outside
    value: Any = None
    stopped: Stopped | None = None
    broke: tuple[GraphBreak, int | None] | None = None
    error: BaseException | None = None
    grad_enabled: bool = True
    close_regions: Callable[[], list[tuple[Any, ...]]] = list
    where: Position | None = None  # in the root frame, of the error
    alive: list[Any] = field(default_factory=list)


def interpret(
    function: types.FunctionType,
    flat: tuple[Any, ...],
    policy: DynamicPolicy,
    stop_at: int | None,
    reason: GraphBreak | None,
) -> Captured:
    """Runs `function` on `flat` in the interpreter; before its instruction number `stop_at` it stops."""
    interpreter: Interpreter | None = None

    def user_frames() -> tuple[UserFrame, ...]:
        return as_user_frames(interpreter.positions()) if interpreter is not None else ()

    outside = Outside(function, policy, user_frames)
    world = CaptureWorld(outside)
    interpreter = Interpreter(world)
    captured = Captured(outside, close_regions=world.calls.close_regions)
    frame: InterpretedFrame | None = None
    with restored_ambient_state():
        try:
            names = function.__code__.co_varnames
            arguments = [outside.argument(i, parameter_name(i, names[i]), value) for i, value in enumerate(flat)]
            frame = interpreter.root_frame(function, arguments)
            with outside.recorder:
                returned = frame.run_until(stop_at)
            if returned:
                captured.value = frame.result
            else:
                assert reason is not None
                captured.stopped = _stopped(frame, reason)
        except BreakGraph as error:
            where = as_user_frames(error.positions)
            place = frame.executed if frame is not None else None
            captured.broke = (GraphBreak(error.reason, error.detail, where), place)
        except Exception as error:
            captured.error = error
            captured.where = frame.position if frame is not None else None
        captured.grad_enabled = torch.is_grad_enabled()
    return captured


def _stopped(frame: InterpretedFrame, reason: GraphBreak) -> Stopped:
    names = frame.decoded.local_names
    bound = {name: value for name, value in zip(names, frame.fast, strict=True) if value is not NULL}
    return Stopped(frame.index, frame, list(frame.stack), bound, reason)


def as_user_frames(positions: tuple[Position, ...]) -> tuple[UserFrame, ...]:
    return tuple(UserFrame(p.file, p.line, p.function) for p in positions)


@contextmanager
def restored_ambient_state() -> Iterator[None]:
    """Grad mode, autocast and the random state are afterwards what they were, however capture ends."""
    grad = torch.is_grad_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        now = torch.autocast_increment_nesting()
        for _ in range(now - nesting + 1):
            torch.autocast_decrement_nesting()
