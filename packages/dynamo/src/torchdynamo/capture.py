"""One interpretation of a call: from real arguments to a recorded graph, and to how the program ended."""

from __future__ import annotations

import types
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch

from primtorch.ambient import ATTENTION, Ambient, preserved
from primtorch.frozen import record
from primtorch.interrupts import pass_on_interrupt
from primtorch.schemas import TORCH, UserFrame
from torchdynamo.after_break.stopped import Stopped, StoppedFrame
from torchdynamo.calls.calls import Calls
from torchdynamo.capture_world import CaptureWorld
from torchdynamo.emit.codegen import parameter_name
from torchdynamo.graph.derivatives import CutGraph
from torchdynamo.graph.run_time_texts import Origins, TextNeeded
from torchdynamo.graph.scalars import NumberNeeded
from torchdynamo.graph.taken_numbers import NumberAsked
from torchdynamo.guards.memory_guards import refuse_writes
from torchdynamo.interpreter import InterpretedFrame, Interpreter
from torchdynamo.interpreter.exceptions import empty_frames, strip_traceback
from torchdynamo.interpreter.protocol import MISSING, NULL, Interrupted, Position, Stop
from torchdynamo.interpreter.state import HandlerSlot
from torchdynamo.marks import region
from torchdynamo.outside.dynamic_policy import DynamicPolicy
from torchdynamo.outside.growing_lists import ItemsVary, ReadWhole
from torchdynamo.outside.loops import Unrolled
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import (
    BreakGraph,
    ClassOutlivesGraph,
    GeneratorOutlivesGraph,
    GivesUp,
    LeafOutlivesGraph,
    OutlivesGraph,
    Uninitialized,
    WorkOutlivesGraph,
)
from torchdynamo.schemas import GraphBreak
from torchdynamo.sources import Source
from torchdynamo.watchers import saving_unseen

Lines = tuple[tuple[str, int], ...]  # files and their lines, from a captured function inwards


@record
class Finished:
    """The program returned."""

    value: object


@record
class Broke:
    """An instruction breaks the graph."""

    graph_break: GraphBreak
    path: tuple[int, ...]  # to the instruction
    is_error: bool  # breaks are errors where it is
    uninitialized: bool = False  # a parameter that a lazy module's first call makes


@record
class HasToRaise:
    """An exception leaves what it closes: it has to be raised for real."""

    ordinal: int  # of its raise


@record
class HasToCut:
    """The graph has to end behind a number of recorded calls."""

    calls: int


@record
class HasToBegin:
    """A collective has to be begun for real: at the graph's end nobody can wait for it."""

    ordinal: int  # among those that give work


@record
class ReadsWhole:
    """A list has to be captured with all that is in it."""

    source: Source
    length: int


@record
class Raised:
    """An exception left the function: the program's, or a fault of capture."""

    error: BaseException
    where: Position | None = None  # in the root frame
    ordinal: int = -1  # of its raise, where it could be raised for real
    of_symbols: bool = False  # C code has no use for a symbol: with numbers in their place it may not be raised

    @property
    def place(self) -> tuple[type, int]:
        """Its type, and its line in the root frame."""
        return type(self.error), self.where.line if self.where is not None else 0


@record
class AsksNumber:
    """The values of numbers are needed that the program takes out of tensors."""

    places: frozenset[tuple[UserFrame, ...]]
    as_size: bool  # by an operator, which may take them for sizes


@record
class AsksText:
    """Texts are needed that are known only at each call."""

    origins: Origins


@record
class GoesUnread:
    """A list whose items are others in each round of a loop has to be captured without what is in it."""

    source: Source


@record
class Unrolls:
    """What is begun at a place over modules has to be captured with all its rounds, as none has to be of its own."""

    place: tuple[UserFrame, ...]


Ending = (
    GoesUnread
    | AsksNumber
    | AsksText
    | Finished
    | Stopped
    | Broke
    | HasToRaise
    | HasToCut
    | HasToBegin
    | ReadsWhole
    | Unrolls
    | Raised
)


@record
class Directions:
    """What an interpretation is told by the endings of those before it.

    Attributes:
        stop_at: path to the instruction before which it stops, of an earlier one that broke there for `reason`.
        refused: ordinals of what outlives the graph, by the error that told so: the graph ends before it is made.
        cut_at: number of recorded calls behind which the graph ends.
    """

    stop_at: tuple[int, ...] = ()
    reason: GraphBreak | None = None
    refused: Mapping[type[OutlivesGraph], int] = field(default_factory=dict)
    cut_at: int | None = None

    def before(self, kind: type[OutlivesGraph], ordinal: int) -> Directions:
        """The same, and the graph ends before number `ordinal` of what such an error tells of."""
        return replace(self, refused={**self.refused, kind: ordinal})

    def to_the_end(self) -> Directions:
        """The same, without a place to stop."""
        return replace(self, stop_at=(), reason=None)


@dataclass(slots=True)
class Capture:
    """One interpretation: what it has recorded, and how it ended (None once it is released)."""

    outside: Outside
    interpreter: Interpreter
    calls: Calls
    ending: Ending | None = None
    grad_enabled: bool = True
    attention: tuple[tuple[Ambient, object], ...] = ()  # kernels that the program has chosen for what follows

    @property
    def takes_for_granted(self) -> bool:
        """Whether the graph would ask at the end of a call if the data were such that the program went this way."""
        return bool(self.outside.recorder.conditions.met)

    def recorded_at(self) -> frozenset[Lines]:
        """Where the graph's calls are in the program: data may make them raise."""
        calls = (node for node in self.outside.recorder.graph.nodes if node.op.startswith("call"))
        return frozenset(tuple((frame.file, frame.line) for frame in node.meta["stack"]) for node in calls)

    @property
    def stopped_for(self) -> str:
        """The reason of the break at which it stopped, or nothing."""
        return self.ending.graph_break.reason if isinstance(self.ending, Stopped) else ""

    def raise_to_refuse(self, stopped: Stopped) -> int:
        """The raise of an exception that the program has at hand where it stopped, if the graph cannot hold it, or -1.

        Generated code could make an exception, or hand on that of an earlier part, but not the traceback that it has
        got on its way: it is raised for real instead.
        """
        raises, again, passed = self.interpreter.raises, self.interpreter.reraises, self.interpreter.passed
        ordinals = [
            raises.get(id(value), again.get(id(value), -1) if id(value) in passed else -1)
            for frame in stopped.frames
            for value in (*frame.handled.values(), *frame.stack, *frame.locals.values())
            if isinstance(value, BaseException)
        ]
        return min((ordinal for ordinal in ordinals if ordinal >= 0), default=-1)

    def release(self) -> None:
        """Lets go of the program's objects. What points to this record, or to its error, keeps none of them alive."""
        ending, self.ending = self.ending, None
        error = ending.error if isinstance(ending, Raised) else None
        if error is not None and self.outside.externals.lookup(error) is not None:  # it is the program's
            error.__traceback__ = strip_traceback(error.__traceback__)
        self.outside.release()
        self.interpreter.release()
        empty_frames(error)
        for frame in ending.frames if isinstance(ending, Stopped) else ():
            for handled in frame.handled.values():
                empty_frames(handled)


def interpret(
    function: types.FunctionType, flat: tuple[object, ...], policy: DynamicPolicy, directions: Directions
) -> Capture:
    """Runs `function` on `flat` in the interpreter."""
    stack = UserStack()
    outside = Outside(function, policy, stack.now)
    outside.recorder.cut_at = directions.cut_at
    outside.recorder.refused = policy.refused
    outside.recorder.taken.refused, outside.recorder.taken.sizes = policy.unread, policy.sizes
    refused = directions.refused.get
    outside.recorder.refused_leaf = refused(LeafOutlivesGraph, -1)
    if policy.asks_data:
        outside.recorder.conditions.refuse()
    refuse_writes(outside, policy.shared)
    world = CaptureWorld(outside)
    interpreter = Interpreter(world)
    calls = world.calls = Calls(outside, world, interpreter)
    stack.frames = outside.loops.frames = interpreter.frames
    calls.works.refused = refused(WorkOutlivesGraph, -1)
    interpreter.refused_raise = refused(GivesUp, -1)
    interpreter.refused_start = refused(GeneratorOutlivesGraph, -1)
    outside.classes.refused = refused(ClassOutlivesGraph, -1)
    capture = Capture(outside, interpreter, calls)
    frame: InterpretedFrame | None = None
    chosen = [state.read() for state in ATTENTION]
    with preserved(), saving_unseen(), interpreter.deep_stack(_DEEPEST):
        try:
            names = function.__code__.co_varnames
            arguments = [outside.argument(i, parameter_name(i, names[i]), value) for i, value in enumerate(flat)]
            frame = interpreter.root_frame(function, arguments)
            with outside.recorder:
                try:
                    capture.ending = Finished(frame.run(directions.stop_at))
                except Stop as stop:
                    assert directions.reason is not None
                    capture.ending = Stopped(_stopped(stop.frames, interpreter.handled_exception()), directions.reason)
                if interpreter.pending_escape is not None and isinstance(capture.ending, Finished):
                    raise interpreter.pending_escape
                begin = calls.works.finish()
                if begin >= 0:
                    capture.ending = HasToBegin(begin)
        except Interrupted as error:
            raise error.interrupt from None
        except BreakGraph as error:
            pass_on_interrupt(error)
            capture.ending = _broke(error, outside)
        except CutGraph as error:
            capture.ending = HasToCut(error.call)
        except NumberAsked as error:
            capture.ending = AsksNumber(error.places, error.as_size)
        except TextNeeded as error:
            capture.ending = _without_text(error, policy.in_rounds, outside)
        except Unrolled as error:
            capture.ending = Unrolls(error.place)
        except ItemsVary as error:
            capture.ending = GoesUnread(error.source)
        except ReadWhole as error:
            capture.ending = ReadsWhole(error.source, error.length)
        except NumberNeeded as needed:
            capture.ending = Raised(needed.error, None, interpreter.raises.get(id(needed.error), -1), of_symbols=True)
        except BaseException as error:
            if not isinstance(error, Exception) and interpreter.propagating is not error:
                raise  # what the program raises, SystemExit, say, has left a frame of it
            pass_on_interrupt(error)
            places = outside.recorder.taken.places_of(error)
            if places:
                capture.ending = AsksNumber(places, as_size=False)
                return capture
            where = frame.position if frame is not None else None
            capture.ending = Raised(error, where, interpreter.raises.get(id(error), -1))
        finally:
            calls.emissions.close()
            stack.clear()
        if calls.duals.entered is not None and isinstance(capture.ending, (Finished, Broke, Stopped)):
            capture.ending = HasToCut(calls.duals.entered)
        capture.grad_enabled = torch.is_grad_enabled()
        now = ((state, state.read(), before) for state, before in zip(ATTENTION, chosen, strict=True))
        capture.attention = tuple((state, value) for state, value, before in now if value != before)
    return capture


def _without_text(error: TextNeeded, in_rounds: bool, outside: Outside) -> AsksText | Broke | HasToRaise:
    """A text is needed where none is known yet: that of a loop's round is another one in the next."""
    if not in_rounds or not error.origins.sources:
        return AsksText(error.origins)
    broke = BreakGraph("list_of_each_length", "what is found by a text that each round has another of")
    broke.positions, broke.path = error.positions, error.path
    return _broke(broke, outside)


def _broke(error: BreakGraph, outside: Outside) -> Broke | HasToRaise:
    if isinstance(error, GivesUp) and error.ordinal >= 0:
        return HasToRaise(error.ordinal)
    errors = outside.overlays.read(region(), "errors")
    is_error = bool(region().errors if errors is MISSING else errors)
    return Broke(
        GraphBreak(error.reason, error.detail, as_user_frames(error.positions)),
        error.path,
        is_error,
        isinstance(error, Uninitialized),
    )


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
        self.frames: list[InterpretedFrame] = []  # those of the interpreter
        self._known: list[InterpretedFrame] = []  # as they were when they were asked for last
        self._indices: list[int] = []
        self._levels: list[tuple[UserFrame, ...]] = []  # the stack down to each frame

    def now(self) -> tuple[UserFrame, ...]:
        """The user's frames, outermost first; those that have not moved on are the same objects."""
        frames, levels = self.frames, self._levels
        indices = [frame.index for frame in frames]
        if indices != self._indices or frames != self._known:
            moved = zip(self._indices, indices, self._known, frames, strict=False)
            same = next((at for at, (a, b, c, d) in enumerate(moved) if a != b or c is not d), len(levels))
            del levels[min(same, len(frames)) :]
            for frame in frames[len(levels) :]:
                levels.append((*(levels[-1] if levels else ()), *as_user_frames((frame.position,))))
            self._known, self._indices = list(frames), indices
        return levels[-1] if levels else ()

    def clear(self) -> None:
        """Forgets the frames."""
        self._known, self._indices, self._levels = [], [], []


def lines_from(code: types.CodeType, traceback: types.TracebackType | None) -> Lines:
    """The lines that an error came through, from a run of `code` inwards."""
    lines: list[tuple[str, int]] = []
    while traceback is not None:
        if lines or traceback.tb_frame.f_code is code:
            lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return tuple(lines)


def passes(lines: Lines, places: Set[Lines]) -> bool:
    """Whether an error that came through `lines` was raised by what is called at one of the places: by a kernel, or by
    torch's Python around it."""
    end = len(lines)
    while end and lines[end - 1][0].startswith(TORCH) and lines[:end] not in places:
        end -= 1
    return lines[:end] in places


def as_user_frames(positions: tuple[Position, ...]) -> tuple[UserFrame, ...]:
    """Positions of the interpreter as the frames that graphs and errors have."""
    return tuple(UserFrame(p.file, p.line, p.function) for p in positions)


# Python frames of a capture. While a frame hook is installed each takes a part of the C stack.
_DEEPEST = 6_000
