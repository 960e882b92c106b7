"""The driver: from one call of a function to an entry of its compiled callable.

interpret -> (break? again, stopping there) -> values and effects -> finish the graph, guards -> back end -> Entry
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Generic, TypeVar

import torch
from torch import fx

from primtorch import graph_text
from primtorch.ambient import preserved
from primtorch.errors import DataDependent
from primtorch.frozen import record
from primtorch.interrupts import pass_on_interrupt
from primtorch.ledger import Event
from primtorch.withheld import COLLECTOR
from torchdynamo._C import Entry, GuardTree
from torchdynamo.after_break.break_step import continue_after, has_rule, started
from torchdynamo.after_break.rerun import Rerun, communicates, has_effects, switched_states
from torchdynamo.after_break.resume import origin_of, written_code
from torchdynamo.after_break.stopped import Stopped
from torchdynamo.capture import (
    AsksNumber,
    AsksText,
    Broke,
    Capture,
    Directions,
    Finished,
    GoesUnread,
    HasToBegin,
    HasToCut,
    HasToRaise,
    Raised,
    ReadsWhole,
    Unrolls,
    interpret,
)
from torchdynamo.emit.codegen import GIVEN, Codegen, parameter_name
from torchdynamo.emit.emitted import Emitted
from torchdynamo.emit.generated_code import forget_ended_code, load
from torchdynamo.emit.graph_inputs import GraphInput, finish_graph, takes_floats
from torchdynamo.errors import CaptureDied, InternalError, TorchDynamoError, Unsupported
from torchdynamo.events import LOOPED_BATCH, NOTHING_TO_COMPILE, UNSTARTED_GENERATOR, of_function
from torchdynamo.function import CallFrames, Compiled, Frames, Function
from torchdynamo.graph.derivatives import first_leaf_behind
from torchdynamo.graph.recorder import as_break
from torchdynamo.graph.regions import graph_module
from torchdynamo.graph.taken_numbers import NumberAsked
from torchdynamo.graph.tensor_classes import PLAIN_TENSORS, on_plain_tensors
from torchdynamo.graph.torch_functions import home_of
from torchdynamo.guards.global_state import function_modes, global_state
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.guards.memory_guards import guard_written_memory, guard_written_objects, written_inputs
from torchdynamo.guards.shape_guards import add_shape_guards
from torchdynamo.interpreter.bytecode_text import bytecode_text
from torchdynamo.interpreter.decode import flat_size
from torchdynamo.interpreter.protocol import Marker
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import (
    OF_EACH_LENGTH,
    BreakGraph,
    GivesUp,
    LeafOutlivesGraph,
    OutlivesGraph,
    WorkOutlivesGraph,
    describe,
)
from torchdynamo.schemas import AmbientRead, GlobalState, GraphBreak, Guard, GuardKind
from torchdynamo.sources import Attribute, Source

Result = TypeVar("Result")
_AGAIN: Final = Marker("AGAIN")  # what a capture has taught makes another one of the same call
_MODULE_CALL: Final = torch.nn.modules.module.__file__


# Classes of tensors have a say in what the program does with one, and in nothing that capture asks of it.
_without_classes = torch._C.DisableTorchFunctionSubclass


@record
class Generated:
    """A capture with the code of its values and effects; `tail` ends the generated function."""

    capture: Capture
    codegen: Codegen
    tail: list[str]
    graph_break: GraphBreak | None  # where the tail goes on after one
    module: object  # the name of the module that what the tail calls is called from


@record
class Finishing:
    """What the back end takes, and the guards so far; `asked` relations of numbers are among them."""

    inputs: list[GraphInput]
    guards: tuple[Guard, ...]
    graph: fx.GraphModule | None
    asked: int


@record
class Whole(Generic[Result]):
    """One graph of a whole call, which no back end has seen."""

    result: Result
    graph: fx.GraphModule
    finished: Finishing
    pinned: Sequence[object]
    outside: Outside  # released: what it knows of symbols


class OwnFault(Exception):
    """An error of capture's own, which is told: `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def convert(state: Function, flat: tuple[object, ...]) -> Entry | None:
    """One capture, start to end. Afterwards it holds none of the program's objects."""
    opened: list[Capture] = []
    forget_ended_code()
    try:
        frames = _frames(state, flat)
        entry: Entry | Marker | None = _found(state, frames) or _foreseen(state)
        while isinstance(entry, Marker):
            entry = _convert(state, flat, frames, opened)
        return entry
    except OwnFault as fault:
        state.fault(fault.error)
        return None
    finally:
        for capture in opened:
            capture.release()


def _frames(state: Function, flat: tuple[object, ...]) -> CallFrames | None:
    """Where the back end keeps frames of such calls for other processes, if it does."""
    frames: Frames | None = getattr(state.backend, "frames", None)
    if frames is None:
        return None
    with _own_faults(state):
        return frames.of_call(state, flat)


def _found(state: Function, frames: CallFrames | None) -> Entry | None:
    """An entry of a frame that another process captured: everything that it read is the same here."""
    if frames is None:
        return None
    with _own_faults(state):  # guards are asked as at every call
        emitted = frames.find()
    if emitted is None:
        return None
    try:
        compiled_graph = _call_backend(state, emitted) if emitted.graph is not None else None
    except DataDependent:
        return None
    with _own_faults(state), _without_classes():
        state.stats.add(found=1)
        return _entry(state, emitted.with_asked(), compiled_graph)


def _foreseen(state: Function) -> Marker:
    """Tells the back end, if it wants to know, that there will be a graph."""
    foresee: Callable[[], None] | None = getattr(state.backend, "foresee", None)
    if foresee is not None:
        foresee()
    return _AGAIN


def _convert(
    state: Function, flat: tuple[object, ...], frames: CallFrames | None, opened: list[Capture]
) -> Entry | Marker | None:
    """The stages, each with what it may end in before the next."""
    ambient, text, told = global_state(), None, state.stats.ledger.events
    with _own_faults(state), _without_classes():
        state.show("bytecode.txt", bytecode_text, state.function.__code__)
        if state.options.rehearse is not None:
            death = state.options.rehearse(lambda: _capture_and_generate(state, flat, ambient, opened))
            if death is not None:
                raise CaptureDied(f"capture {death}; `python -m torchcompile minify SCRIPT` reduces the program")
        generated = _capture_and_generate(state, flat, ambient, opened)
        if not isinstance(generated, Generated):
            return generated
        if _cannot_begin_anew(generated.capture.outside):
            state.asks_data = True
            return _AGAIN
        shared = guard_written_memory(generated.capture.outside)
        if shared is not None:
            return _break_at_writes(state, shared)
        finished = _finish(state, generated, ambient)
        if finished.graph is None and generated.graph_break is None and state.found:
            state.eager = of_function(NOTHING_TO_COMPILE, state.function)
            state.stats.ledger.add(state.eager)
            return None
        state.show("guards.txt", print_guards, finished.guards)
        if finished.graph is not None:
            state.show("torch_graph.py", graph_text, finished.graph, "graph")
        outside = generated.capture.outside
        emitted = _emitted(state, generated, finished)
        for operator, where in outside.recorder.looped.items():
            state.stats.ledger.add(Event(LOOPED_BATCH, state.function.__qualname__, operator, where))
        for event in outside.recorder.nested.in_place:
            state.stats.ledger.add(event)
        if frames is not None and state.stats.ledger.events == told:  # what was told is to be told again
            text = frames.written(emitted, outside)
    try:
        compiled_graph = _call_backend(state, emitted) if finished.graph is not None else None
    except DataDependent as error:
        if _break_there(state, generated.capture.outside, error):
            return _AGAIN
        if state.options.fullgraph:
            raise
        broke = as_break(error)
        return state.no_graph(GraphBreak(broke.reason, broke.detail, error.frames or state.frames()))
    with _own_faults(state), _without_classes():
        emitted = emitted.with_asked()
        if frames is not None and text is not None and state.stats.ledger.events == told:
            frames.keep(text)
        return _entry(state, emitted, compiled_graph)


def capture_whole(
    state: Function, flat: tuple[object, ...], read: Callable[[Generated], Result]
) -> Whole[Result] | Entry:
    """One graph of a whole call, for who takes it away and makes no entry of it (options: `fullgraph`, `strict`).

    Args:
        read: asked for what the program returns, before the graph is finished.

    Returns:
        An entry where the program raised, or is a lazy module's first call: to be run once in the place of a graph.

    Raises:
        Unsupported: the program leaves the graph.
    """
    opened: list[Capture] = []
    try:
        with _own_faults(state), _without_classes():
            ambient = global_state()
            capture = _capture(state, flat, None, Directions(), opened)
            if isinstance(capture, Entry):
                return capture
            assert capture is not None
            generated = _generate(state, capture, ambient)
            shared = guard_written_memory(capture.outside)
            if shared is not None:
                text = " and ".join(source.expression() for source in shared)
                raise BreakGraph("overlapping_inputs", text)
            with torch._C.DisableTorchFunction():
                result = read(generated)
            finished = _finish(state, generated, ambient)
            graph = finished.graph or graph_module({}, capture.outside.recorder.graph, "Graph")
            return Whole(result, graph, finished, capture.outside.externals.pins.objects, capture.outside)
    except NumberAsked as asked:
        state.unread |= asked.places
        return capture_whole(state, flat, read)
    except BreakGraph as error:
        raise Unsupported(describe(GraphBreak(error.reason, error.detail, state.frames()))) from error
    except OwnFault as fault:
        if isinstance(fault.error, BreakGraph):
            where = GraphBreak(fault.error.reason, fault.error.detail, state.frames())
            raise Unsupported(describe(where)) from fault.error
        raise fault.error from None
    finally:
        for capture in opened:
            capture.release()


@contextmanager
def _own_faults(state: Function) -> Iterator[None]:
    """A block of capture's own work: what it raises is a fault of capture, but for the errors that users are told by.
    What the program raises is an ending of the interpretation, and what a back end raises is the user's to see."""
    try:
        with COLLECTOR.off():
            yield
    except Exception as error:
        pass_on_interrupt(error)
        raises = state.options.strict or state.options.fullgraph
        if isinstance(error, TorchDynamoError) and (raises or not isinstance(error, InternalError)):
            raise
        raise OwnFault(error) from error


# -- interpretation --------------------------------------------------------------------------


def _capture_and_generate(
    state: Function, flat: tuple[object, ...], ambient: GlobalState, opened: list[Capture]
) -> Generated | Entry | None:
    """The deepest capture whose state generated code can hand over to what follows a break."""
    depth: int | None = None
    directions = Directions()
    while True:
        capture = _capture(state, flat, depth, directions, opened)
        if not isinstance(capture, Capture):
            return capture
        try:
            return _generate(state, capture, ambient)
        except OutlivesGraph as error:
            directions, depth = _leaf(directions).before(type(error), error.ordinal), None
        except NumberAsked as asked:
            state.unread |= asked.places
            directions, depth = _leaf(directions), None
        except BreakGraph as error:
            if error.reason == "data_dependent_shape" and not state.breaks_at_data:
                state.breaks_at_data, depth = True, None
                continue
            depth = len(capture.ending.frames) - 1 if isinstance(capture.ending, Stopped) else 0
            if depth < 1 and _unrolls_instead(state, capture.stopped_for):
                directions, depth = _leaf(directions), None
                continue
            if depth < 1:  # else the innermost frame runs for real, and is captured on its own
                return state.no_graph(GraphBreak(error.reason, error.detail, state.frames()))


def _leaf(directions: Directions) -> Directions:
    """What of them a capture that begins anew is told: the leaf, which an earlier graph ends before."""
    return Directions(refused={kind: n for kind, n in directions.refused.items() if kind is LeafOutlivesGraph})


def _capture(
    state: Function, flat: tuple[object, ...], depth: int | None, told: Directions, opened: list[Capture]
) -> Capture | Entry | None:
    """Interprets the call; at a break, again up to the instruction that broke, in the outer `depth` frames (or any).

    No variable here holds the ending: its exceptions lead to this frame, and would keep what the program gives up.
    """
    symbols = state.options.dynamic is not False
    whole: set[Source] = set()  # growing lists that this call reads, where a longer or shorter one is only appended to
    for _ in range(64):
        capture = interpret(state.function, flat, state.policy(symbols, whole), told)
        opened.append(capture)
        match capture.ending:
            case Finished():
                state.learn_loops(capture.outside.loops.fixed, None)
                return capture
            case Stopped(graph_break=broken):
                if len(told.stop_at) > 1 and not has_rule(capture.ending):
                    told = replace(told, stop_at=told.stop_at[:-1])  # the innermost frame is captured on its own
                    continue
                refused = capture.raise_to_refuse(capture.ending)
                if refused < 0:
                    state.learn_loops(capture.outside.loops.fixed, broken)
                    return capture
                told = told.to_the_end().before(GivesUp, refused)
            case HasToRaise(ordinal=ordinal):
                told = told.to_the_end().before(GivesUp, ordinal)
            case HasToCut(calls=calls):
                told = replace(told.to_the_end(), cut_at=calls)
            case HasToBegin(ordinal=ordinal):
                told = told.to_the_end().before(WorkOutlivesGraph, ordinal)
            case AsksNumber(places=places, as_size=as_size):
                state.unread |= {place for place in places if not as_size or place in state.sizes}
                state.sizes |= places
            case AsksText(origins=origins):
                state.plain_texts |= origins.places
                state.fixed |= origins.sources
            case GoesUnread(source=source):
                state.changed.add(source)
                state.varied.add(source)
            case Unrolls(place=place):
                state.unrolled.add(place)
                told = told.to_the_end()
            case ReadsWhole(source=source, length=length):
                whole.add(source)
                state.read_lengths.setdefault(source, set()).add(length)
            case Raised(error=DataDependent()) if not state.breaks_at_data:
                state.breaks_at_data = True  # the program itself asks for such a size: what follows gets it as a number
                told = told.to_the_end()
            case Raised() if capture.takes_for_granted and not (state.asks_data or state.options.fullgraph):
                state.asks_data, told = True, told.to_the_end()  # the way here may not be this call's
            case Raised() if numbers := capture.outside.run_time_numbers() - state.fixed:
                state.fixed |= numbers  # C code may refuse a symbol for a number
            case Raised(of_symbols=True) if symbols and capture.outside.shape_env.symbols:
                symbols, told = False, told.to_the_end()  # one graph for these sizes
            case Raised(ordinal=ordinal):
                if state.options.fullgraph or ordinal < 0 or not state.knows_raise(capture.ending):
                    certain = not capture.takes_for_granted
                    return state.judged_by_eager(capture.ending, capture.recorded_at(), certain)
                told = told.before(GivesUp, ordinal)  # eager raised it there, too: the graph ends before it
            case Broke() as broke:
                if broke.graph_break.reason == "symbolic_size" and state.options.fullgraph and symbols:
                    symbols, told = False, told.to_the_end()  # one graph for these sizes
                    continue
                if broke.uninitialized and not state.lazy:
                    return state.makes_parameters(broke.graph_break)
                if broke.graph_break.reason in OF_EACH_LENGTH and (state.options.fullgraph or broke.is_error):
                    state.unrolls, told = True, told.to_the_end()
                    continue
                if broke.graph_break.reason == "float_of_each_call" and (state.options.fullgraph or broke.is_error):
                    state.guards_floats, told = True, told.to_the_end()
                    continue
                told = _stopping(state, broke, depth, told)
                if not told.stop_at and _unrolls_instead(state, broke.graph_break.reason):
                    told = told.to_the_end()
                elif not told.stop_at:
                    assert told.reason is not None
                    return state.no_graph(told.reason)
    raise InternalError("capture did not settle on a place to break")


def _stopping(state: Function, broke: Broke, depth: int | None, told: Directions) -> Directions:
    """Directions to stop at a break. Raises Unsupported where breaks are errors."""
    reason = broke.graph_break
    if not reason.user_frames:  # it broke before the first instruction, or behind the last
        reason = replace(reason, user_frames=state.frames())
    refused = reason.reason == "exception" and told.refused.get(GivesUp, -1) >= 0  # for a break behind it
    if state.options.fullgraph or (broke.is_error and not refused):
        raise Unsupported(describe(reason))
    return replace(told, stop_at=broke.path[: _depth(state, broke) if depth is None else depth], reason=reason)


def _unrolls_instead(state: Function, reason: str) -> bool:
    """Where a graph cannot end at the head of a loop over modules, which it does not have to, all rounds are its."""
    if state.whole_rounds or reason != "repeated_modules":
        return False
    state.whole_rounds = True
    return True


def _depth(state: Function, broke: Broke) -> int:
    """How many of a break's frames are split. Of torch's own call of a module none is where hooks or its forward talk
    to other processes: it runs as it is, and the forwards in it are captured on their own, which modules share."""
    depth, frames = len(broke.path), broke.graph_break.user_frames
    if broke.graph_break.reason == "distributed" and len(frames) == depth:
        while depth > 1 and frames[depth - 1].file == _MODULE_CALL:
            depth -= 1
    if depth < len(broke.path) and state.nested is not None:
        state.nested.finds_layers = True
    return depth


def _break_there(state: Function, outside: Outside, error: DataDependent) -> bool:
    """Lets the graph end before a size that the back end has to know; False where it does already."""
    taken = set(outside.recorder.taken.made.values()) - state.unread
    if taken:
        state.unread |= taken
        return True
    if not state.breaks_at_data:
        state.breaks_at_data = True
        return True
    if not error.frames or error.frames in state.refused:
        return False
    state.refused.add(error.frames)
    return True


def _cannot_begin_anew(outside: Outside) -> bool:
    """Whether the graph takes conditions for granted, and does what may not be done twice where they are not met."""
    conditions = outside.recorder.conditions
    return bool(conditions.met) and (not conditions.can_begin_anew or bool(written_inputs(outside)))


def _break_at_writes(state: Function, shared: tuple[Source, Source]) -> Entry | Marker | None:
    """Lets the graph end before a write to either of two inputs, which share memory."""
    if not state.shared.issuperset(shared):
        state.shared.update(shared)
        return _AGAIN
    text = " and ".join(source.expression() for source in shared)
    return state.no_graph(GraphBreak("overlapping_inputs", text, state.frames()))


# -- code, graph, guards ---------------------------------------------------------------------


def _generate(state: Function, capture: Capture, ambient: GlobalState) -> Generated:
    """Writes values and effects; the tail returns, or goes on after a break."""
    outside, calls = capture.outside, capture.calls
    codegen = Codegen(outside, capture.interpreter)
    graph_break: GraphBreak | None = None
    caller = outside.function
    with torch._C.DisableTorchFunction():
        match capture.ending:
            case Finished(value=value):
                tail = [f"return {codegen.value(value)}"]
            case Stopped(graph_break=graph_break) as stopped:
                caller = stopped.frames[-1].frame.function
                assert state.nested is not None
                tail = continue_after(codegen, stopped, state.nested.resume, state.nested.hook)
            case ending:
                raise InternalError(f"no code for a capture that ended in {type(ending).__name__}")
        codegen.side_effects()
        codegen.number_rows()
        codegen.check_conditions()
        for said in calls.emissions.made:
            codegen.call_at_each_call(said.function, said.args, said.kwargs)
        for block in calls.blocks.close():
            codegen.effects.append(f"{codegen.pin(block.enter)}({codegen.items(block.args)})")
        if capture.grad_enabled != ambient.grad_enabled:
            codegen.effects.append(f"{codegen.pin(torch._C._set_grad_enabled)}({capture.grad_enabled})")
        for choice, value in capture.attention:
            codegen.effects.append(f"{codegen.pin(choice.write)}({value!r})")
        _refuse_leaves(outside, codegen)
    return Generated(capture, codegen, tail, graph_break, caller.__globals__.get("__name__"))


def _refuse_leaves(outside: Outside, codegen: Codegen) -> None:
    """A graph's own leaf is none to those who differentiate behind the graph."""
    leaving = [*(node.meta.get("val") for node in codegen.outputs), *(fake for _, _, fake in outside.tensors)]
    leaf = first_leaf_behind(leaving, outside.recorder.leaves) if outside.recorder.leaves else -1
    if leaf >= 0:
        raise LeafOutlivesGraph("derivatives by a tensor that the program makes are taken behind the graph", leaf)


def _finish(state: Function, generated: Generated, ambient: GlobalState) -> Finishing:
    """Finishes the graph and its guards."""
    outside, codegen = generated.capture.outside, generated.codegen
    for function in codegen.unstarted:
        state.stats.ledger.add(of_function(UNSTARTED_GENERATOR, function))
    guard_written_objects(outside, codegen.written)
    inputs = finish_graph(outside, codegen, takes_floats(state.backend))
    guards = _guards(outside, ambient)
    graph = _graph_module(outside, state.function.__name__)
    return Finishing(inputs, guards, graph, len(outside.shape_env.guards))


def _guards(outside: Outside, ambient: GlobalState) -> tuple[Guard, ...]:
    """All guards: those of the reads, and those of the relations between sizes that were asked."""
    externals = outside.externals
    add_shape_guards(outside)
    hashed = [known.source for known in externals.hashed.values()]
    if len(hashed) > 1:
        externals.guards.add(hashed[0], GuardKind.ALL_DISTINCT, tuple(hashed[1:]))
    code = Attribute(externals.pins.source(outside.function), "__code__", native=True)
    externals.guards.add(code, GuardKind.IDENTITY, outside.function.__code__)
    externals.guards.add(None, GuardKind.GLOBAL_STATE, ambient)
    if ambient.torch_function_modes:
        modes = AmbientRead(function_modes, (), function_modes())
        externals.guards.add(None, GuardKind.AMBIENT, modes)
    return externals.guards.guards()


def _graph_module(outside: Outside, name: str) -> fx.GraphModule | None:
    if not any(node.op.startswith("call") for node in outside.recorder.graph.nodes):
        return None
    class_name = f"Graph_{name}" if name.isidentifier() else "Graph"
    return graph_module(outside.recorder.regions.modules, outside.recorder.graph, class_name)


# -- back end, entry -------------------------------------------------------------------------


def _call_backend(state: Function, emitted: Emitted) -> Callable[..., Sequence[object]]:
    """What it raises is for the user to see."""
    assert emitted.graph is not None
    examples: list[object] = [item.example for item in emitted.inputs]
    classes = {type(one) for one in examples if isinstance(one, torch.Tensor)} - PLAIN_TENSORS
    began = time.perf_counter()
    emitted.graph.meta["began"] = state.began
    try:
        with preserved(), _without_classes() if classes else contextlib.nullcontext():
            compiled = state.backend(emitted.graph, examples)
    finally:
        state.stats.add(backend_seconds=time.perf_counter() - began)
    if not callable(compiled):
        raise TypeError(f"the backend returned {type(compiled).__name__}, expected a callable")
    return on_plain_tensors(compiled) if classes else compiled


def _emitted(state: Function, generated: Generated, finished: Finishing) -> Emitted:
    """The generated function as text, and all that is about it."""
    outside, function, graph = generated.capture.outside, state.function, finished.graph
    slots = function.__code__.co_varnames[: flat_size(function.__code__)]
    parameters = [parameter_name(index, name) for index, name in enumerate(slots)]
    effects = graph is not None and has_effects(graph)
    interpreted = {written_code(code): module for code, module in outside.interpreted.items()}
    if origin_of(function) is None:
        interpreted[function.__code__] = home_of(function)
    return Emitted(
        guards=finished.guards,
        pinned=outside.externals.pins.objects,
        graph=graph,
        inputs=finished.inputs if graph is not None else [],
        text=generated.codegen.source_text(parameters, graph is not None, effects, generated.tail),
        module=generated.module,
        graph_break=generated.graph_break,
        written=_written(outside, finished.inputs),
        states=() if graph is None else switched_states(graph),
        communicates=graph is not None and communicates(graph),
        programs=tuple((module, code) for code, module in interpreted.items()),
        symbols=outside,
        asked=finished.asked,
    )


def _entry(state: Function, emitted: Emitted, compiled_graph: Callable[..., object] | None) -> Entry:
    """The generated function with its guards."""
    function, pinned, graph_break = state.function, emitted.pinned, emitted.graph_break
    if emitted.graph is not None:
        state.stats.add(graphs=1)
    if graph_break is not None:
        state.stats.record_break(function.__qualname__, graph_break)
    rerun = Rerun(function, state.stats.ledger, emitted.written, emitted.states, emitted.communicates)
    closure = function.__closure__ or ()
    given = (pinned, function.__globals__, closure, sys, compiled_graph, rerun)
    names = dict[str, object](zip(GIVEN, given, strict=True))
    if emitted.module is not None:
        names["__name__"] = emitted.module  # some C code asks the frame that calls it
    code = load(emitted.text, function.__qualname__, names)
    if graph_break is not None and origin_of(function) is None:
        code = started(code)
    state.show("compiled.py", str, emitted.text)
    sources = [item.source for item in emitted.inputs if item.source is not None]
    tree = emitted.tree or GuardTree(emitted.guards, sources, function, pinned)
    made = (emitted.guards, emitted.graph, emitted.text, graph_break, pinned, emitted.programs)
    any_length = graph_break is not None and graph_break.reason in OF_EACH_LENGTH and origin_of(function) is None
    return Entry(tree, code, Compiled(*made, known=frozenset(state.changed)), comes_last=any_length)


def _written(outside: Outside, inputs: Sequence[GraphInput]) -> tuple[int, ...]:
    """Which of the inputs that the guards read the program writes to, or gives another shape."""
    changed = {id(tensor) for _, tensor in written_inputs(outside)}
    read = [item.example for item in inputs if item.source is not None]
    return tuple(place for place, example in enumerate(read) if id(example) in changed)
