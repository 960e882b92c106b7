"""Traces a program's forward and backward into one functional ATen graph.

The program runs on functional tensors around fake ones. PyTorch's own autograd engine computes the backward; a mode at
the bottom of the dispatcher records every ATen operator that arrives there.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd import special_operators  # noqa: F401 - registers its rules with the recorder
from aotautograd.analysis import analyse
from aotautograd.assumptions import example_values, guard_graph, tried_values
from aotautograd.backward import failing_backwards, leading, led_to_by, tangent_placeholders, trace_backward
from aotautograd.errors import AotAutogradError, user_location
from aotautograd.functionalize import InPlaceCalls, NonLeaf, without_saved_tensor_hooks
from aotautograd.gradients import arrange, share_memory
from aotautograd.higher_order import TracedCalls
from aotautograd.history import freed_behind, last_to_keep
from aotautograd.inputs import ProgramInputs, bind_inputs, dense_spec
from aotautograd.nested_regions import Regions, RegionsInPlace
from aotautograd.overlap import Program, Rebased
from aotautograd.own_functions import with_own_histories
from aotautograd.partitioners import default_partition, is_backward, is_tensor
from aotautograd.present_views import PresentViews
from aotautograd.recompute import source_bytes
from aotautograd.recorder import Recorder, is_cast
from aotautograd.schemas import (
    FOUND,
    UNSEEN,
    FunctionCall,
    InputInfo,
    JointGraph,
    KeptMemory,
    Partitioner,
    ProgramMetadata,
    Values,
)
from aotautograd.untraced_derivatives import call_untraced, with_pullback
from primtorch.ambient import ATTENTION, note, noting, preserved, without_cudnn
from primtorch.errors import DataDependent, PrimTorchError
from primtorch.fake import PROGRAMS_OVER_SYMBOLS, FakeMode
from primtorch.frozen import record
from primtorch.functional_forms import adopting, is_refusal
from primtorch.functionalize import functional_region, unwrap, wrap
from primtorch.higher_order import InvokeSubgraph, handled_by
from primtorch.memory import memory_of
from primtorch.own_derivatives import FunctionBackward
from primtorch.printing import made_by
from primtorch.pullbacks import is_pullback
from primtorch.symbolic import ShapeEnv, numbers
from primtorch.symbolic.numbers import is_symbolic

aten = torch.ops.aten


def trace_joint(
    program: Program, example_inputs: Sequence[object], partitioner: Partitioner = default_partition
) -> JointGraph:
    """The joint graph of `program`, a function of flat inputs to a flat sequence of outputs.

    The forward is traced under the ambient grad and autocast state, the backward with autocast off. There is a backward
    if an output has a history that leads to an input.

    Numbers that the program takes out of tensors, and sizes that depend on data where it branches on them, are those of
    the example inputs; `JointGraph.guard` and `ProgramMetadata.assumptions` say for which inputs the graph holds.
    `partitioner` cuts the regions of the program (`InvokeSubgraph`), each of which is a node.

    Raises:
        AotAutogradError: what a functional graph cannot express, with the user's line.
        DataDependentValue: a number that is not known ahead of time: of random values, of gradients, or because the
            example inputs have no data.
    """
    if torch.is_inference_mode_enabled():  # its tensors count no writes and have no views to follow
        with torch.inference_mode(False), torch.no_grad():
            return trace_joint(program, example_inputs, partitioner)
    manner = _Manner(partitioner)
    while True:
        try:
            with preserved():
                return adopting(lambda manner=manner: _trace(program, example_inputs, manner))  # type: ignore[misc]
        except DataDependent:
            if manner.fix_sizes:
                raise
            manner = replace(manner, fix_sizes=True)
        except RegionsInPlace as asked:
            alone = frozenset() if asked.body is None else manner.in_place | {asked.body}
            manner = replace(manner, partitioner=partitioner if alone else None, in_place=alone)
        except _TraceAgain as found:
            manner = replace(manner, **found.manner)


@record
class _Manner:
    """How to trace, where it is not the plain way: a trace may find out that another one is needed."""

    partitioner: Partitioner | None  # what cuts regions; None: they are traced in place
    in_place: frozenset[fx.GraphModule] = frozenset()  # regions that are, anyway
    fix_sizes: bool = False  # sizes that depend on data are those of the examples
    apart: bool = False  # the backward of some output raises: each is tried alone, and those that raise are left out
    accumulate: bool = False  # autograd writes `.grad` too, which tells who gets the memory that gradients share
    restrided: frozenset[int] = frozenset()  # inputs given another shape under no_grad: the program gets aliases
    untraced: frozenset[OpOverload] = frozenset()  # operators whose derivatives read data: the graph calls pullbacks
    refused: frozenset[OpOverload] = frozenset()  # those of which no example tells what they give


class _TraceAgain(Exception):
    """A trace is of no use; the next one is to differ in these fields of `_Manner`."""

    def __init__(self, **manner: Any) -> None:
        super().__init__(manner)
        self.manner = manner


def _trace(program: Program, example_inputs: Sequence[object], manner: _Manner) -> JointGraph:
    bound = bind_inputs(program, example_inputs)
    recorder = Recorder(bound.fake_mode, manner.fix_sizes)
    recorder.untraced = manner.untraced
    env = bound.fake_mode.shape_env
    assert env is not None
    try:
        with env.asked_by(lambda: recorder.stack):
            return _traced(program, example_inputs, manner, bound, recorder)
    except DataDependent as error:
        op = recorder.derivatives.get(recorder.derived)
        if op is None or op in manner.refused:
            raise
        if op in manner.untraced:
            raise _TraceAgain(untraced=manner.untraced - {op}, refused=manner.refused | {op}) from error
        raise _TraceAgain(untraced=manner.untraced | {op}) from error


def _traced(
    program: Program, example_inputs: Sequence[object], manner: _Manner, bound: ProgramInputs, recorder: Recorder
) -> JointGraph:
    starts = _make_placeholders(recorder, bound)
    without_grad = not torch.is_grad_enabled()
    examples = (bound, list(recorder.graph.nodes), example_inputs, recorder.constants)
    recorder.values = example_values(*examples)
    recorder.examples = tried_values(*examples) if manner.untraced else None
    cut = manner.partitioner
    regions = Regions(recorder, trace_joint, cut, manner.in_place) if cut is not None else None
    nested = TracedCalls(recorder, trace_joint, regions)
    with _tracing(recorder, bound.fake_mode, nested):
        flat, leaves = _wrap_inputs(bound, starts)
        given = _aliased(flat, manner.restrided)
        recorder.follows_history = bool(leaves)
        calls = InPlaceCalls(given, recorder.with_strides, bool(recorder.symbol_nodes), lambda: recorder.stack)
        with calls:
            outputs = _run_program(recorder, program, given, calls.present, nested)
        given, outputs = calls.present.of((given, outputs))
        restrided = manner.restrided | {p for p in starts if torch._functionalize_has_metadata_mutation(flat[p])}  # type: ignore[attr-defined]
        if restrided != manner.restrided:
            raise _TraceAgain(restrided=restrided)
        analysis = analyse(recorder.node_of, recorder.written, bound, starts, flat, given, outputs, recorder.size)
        specs = [dense_spec(unwrap(value)) for _, value in analysis.differentiable]
    tangents = tangent_placeholders(recorder, [bound.fake_mode.from_spec(spec) for spec in specs])
    results: tuple[fx.Node | None, ...] = ()
    failing: dict[int, RuntimeError] = {}
    totals: dict[int, fx.Node] = {}
    kept_bytes: int | None = None
    metadata = replace(analysis.metadata, enables_grad=without_grad and _has_history(analysis.metadata))
    if tangents:
        if regions is not None:
            regions.tangents = len(tangents)
        values = [value for _, value in analysis.differentiable]
        with _tracing(recorder, bound.fake_mode, nested), bound.fake_mode.asking():
            try:
                if manner.apart:
                    failing = failing_backwards(recorder, values, tangents, list(leaves.values()))
                gradients, cloned = trace_backward(
                    recorder,
                    values,
                    tangents,
                    list(leaves.values()),
                    leave_out=failing,
                    accumulate=manner.accumulate,
                    totals=totals if len(values) > 1 and not failing else None,
                )
            except RuntimeError as error:
                if manner.apart or isinstance(error, (AotAutogradError, PrimTorchError)) or is_refusal(error):
                    raise
                # An output's backward raises what eager's would, which is for it to say, if it is run at all.
                raise _TraceAgain(apart=True) from error
        numbers = {recorder.node_of[id(t)]: number for number, t in enumerate(tangents)}
        gradients = with_own_histories(recorder, gradients, numbers)
        at_leaves = [bound.is_leaf[place] for place in leaves]
        if not manner.accumulate and share_memory(gradients, numbers, at_leaves):
            raise _TraceAgain(accumulate=True)
        led = led_to_by(recorder.graph, list(leaves.values()), gradients, values, numbers)
        # Where it leads to no input, but to leaves within the program, all of them stand for those: what the program
        # returns requires a gradient.
        places = [place for place, tangents_there in enumerate(led) if tangents_there] or range(len(led))
        results, made = arrange([gradients[i] for i in places], numbers, [cloned[i] for i in places] if cloned else ())
        slots = tuple(slot for slot, _ in analysis.differentiable)
        inputs = tuple(leaves)
        metadata = replace(
            metadata,
            tangents=slots,
            gradients=tuple(inputs[i] for i in places),
            led_to_by=tuple(led[i] for i in places),
            leading=leading(recorder.graph, totals, numbers),
            refused_behind=_refused_behind(values, bound.fake_mode.shape_env),
            made_gradients=made,
        )
        metadata = replace(metadata, inputs=_with_last_writes(metadata.inputs, calls.written_at, values))
        kept = _kept_memory(recorder.graph)
        metadata = replace(metadata, kept=_kept_of_caller(kept, recorder.graph, metadata, analysis.values))
        kept_bytes = _kept_bytes(kept, metadata, analysis.values)
    recorder.graph.output((*analysis.values, *results))
    joint = JointGraph(_module(recorder), metadata, failing=failing, totals=totals, kept_bytes=kept_bytes)
    return _under_assumptions(joint, recorder)


def _with_last_writes(
    inputs: Sequence[InputInfo], written_at: Mapping[int, int], values: Sequence[torch.Tensor]
) -> tuple[InputInfo, ...]:
    """The inputs, with what is written behind all that autograd keeps behind the values."""
    if not any(info.mutates_data for info in inputs):
        return tuple(inputs)
    last = last_to_keep(values)
    return tuple(replace(info, written_last=written_at.get(info.index, -1) > last) for info in inputs)


def _module(recorder: Recorder) -> fx.GraphModule:
    """What was recorded, what is known of its sizes, and where the program writes what autograd does not see."""
    module = _LazyGraphModule(dict(recorder.constants), recorder.graph, "Joint")  # its code is seldom run
    made_by(module, "trace_joint")
    if recorder.unseen.first is not None:
        module.meta[UNSEEN] = recorder.unseen.first
    env = recorder.fake_mode.shape_env
    if env is not None and (found := env.found()):
        module.meta[FOUND] = found
    return module


def _under_assumptions(joint: JointGraph, recorder: Recorder) -> JointGraph:
    """The joint graph with a guard of what its trace took for granted of the data."""
    assumed = recorder.values.assumed if recorder.values is not None else {}
    if not assumed:
        return joint
    guard = guard_graph(joint.module, joint.metadata.num_placeholders, assumed)
    return replace(joint, metadata=replace(joint.metadata, assumptions=tuple(assumed.values())), guard=guard)


def _refused_behind(values: Sequence[torch.Tensor], env: ShapeEnv | None) -> tuple[frozenset[int], ...]:
    """For each value, those whose backward frees what its own reads, as the backward of all of them did."""
    # To look at what autograd's nodes keep is to read sizes as numbers, which nothing here depends on.
    with env.trial({}) if env is not None else contextlib.nullcontext():
        freed = [freed_behind(value) for value in values]
    return tuple(frozenset(i for i, others in enumerate(freed) if nodes & others) for nodes in freed)


def _kept_memory(graph: fx.Graph) -> set[fx.Node]:
    """What autograd kept is what operators of the backward read. It is to be asked before a pass changes the graph: a
    copy of an input that the program made stands for itself here."""
    return {
        memory_of(source)
        for node in graph.nodes
        if node.op == "call_function" and is_backward(node)
        for source in node.all_input_nodes
    }


def _kept_of_caller(
    kept: Set[fx.Node], graph: fx.Graph, metadata: ProgramMetadata, outputs: Sequence[object]
) -> KeptMemory:
    placeholders = (n for n in graph.nodes if n.op == "placeholder")
    inputs = {
        i for i, node in zip(metadata.placeholders, placeholders, strict=False) if node in kept and type(i) is int
    }
    values = {i for i, v in enumerate(outputs) if isinstance(v, fx.Node) and memory_of(v) in kept}
    return KeptMemory(frozenset(inputs), frozenset(values))


def _kept_bytes(kept: Set[fx.Node], metadata: ProgramMetadata, outputs: Sequence[object]) -> int:
    """Of what the forward computed, but for what it writes to inputs: that is their memory. Where a value was spread
    out of less, of that: programs may make masks where they are traced, and do without them in eager."""
    infos = zip(outputs, metadata.forward_outputs, strict=True)
    written = {memory_of(v) for v, info in infos if info.kind == "updated_input" and isinstance(v, fx.Node)}
    computed = (n for n in kept - written if n.op == "call_function" and not is_backward(n) and is_tensor(n))
    return sum(map(source_bytes, computed))


def _has_history(metadata: ProgramMetadata) -> bool:
    """Whether something that the program returns or writes was made in grad mode. (A view that was taken under no_grad
    says that it requires a gradient where its base does.)"""
    values = any(output.requires_grad for output in metadata.forward_outputs)
    return values or any(o.requires_grad and o.outside_history < len(o.steps) for o in metadata.outputs)


_CHOICES = {state.write: state for state in ATTENTION}


@contextlib.contextmanager
def _tracing(recorder: Recorder, fake_mode: FakeMode, nested: TracedCalls) -> Iterator[None]:
    # The vendor's batch norm and recurrent kernels have private formats of saved values; without them the ordinary
    # operators arrive.
    # Anomaly mode would look for NaN in values that are not there yet.
    anomaly = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False) if anomaly else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(False),  # another thread's operators are not seen
        without_cudnn(),
        without_saved_tensor_hooks(),
        recorder.draws,
        fake_mode,
        recorder,
        functional_region(),
        handled_by(nested),
    ):
        try:
            yield
        finally:
            if torch._C._is_any_autocast_enabled():  # its cache would keep casts of fake weights
                torch.clear_autocast_cache()


def _make_placeholders(recorder: Recorder, bound: ProgramInputs) -> dict[int, torch.Tensor]:
    """Placeholders in their order; returns the fake tensor of each tensor input."""
    fakes: dict[int, torch.Tensor] = {}
    for name, place, value in bound.placeholders():
        recorder.placeholder(name, value)
        if isinstance(value, torch.Tensor):
            assert isinstance(place, int)
            fakes[place] = value
    return fakes


def _wrap_inputs(bound: ProgramInputs, fakes: dict[int, torch.Tensor]) -> tuple[Values, dict[int, torch.Tensor]]:
    """The flat inputs to run the program on, and the leaves to differentiate by."""
    flat = list(bound.values)
    leaves: dict[int, torch.Tensor] = {}
    for place, fake in fakes.items():
        outer = wrap(fake)
        if bound.requires_grad[place]:
            outer.requires_grad_()
            leaves[place] = outer
            if not bound.is_leaf[place]:
                with torch.enable_grad():
                    outer = NonLeaf.apply(outer)
        flat[place] = outer
        bound.versions[place] = outer._version
        bound.storages[place] = outer.untyped_storage()._cdata
    return flat, leaves


def _aliased(flat: Values, places: frozenset[int]) -> Values:
    """The inputs with aliases in some places, whose sizes and strides may change while the inputs keep theirs."""
    with torch.enable_grad():
        return [aten.alias.default(value) if place in places else value for place, value in enumerate(flat)]


def _run_program(
    recorder: Recorder, program: Program, flat: Values, present: PresentViews, nested: TracedCalls
) -> Values:
    if isinstance(program, Rebased):
        inputs = program.inputs_of(flat)
        outputs = _run_program(recorder, program.program, inputs, present, nested)
        return program.outputs_of(inputs, present.of(inputs), present.of(outputs))
    if isinstance(program, fx.GraphModule):
        return _interpret(recorder, program, flat, present, nested)
    recorder.user_node(())
    with noting():
        found = program(*flat)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _call(
    recorder: Recorder, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """A call of the graph. Python's functions of numbers keep symbolic ones symbolic, and operators of somebody's own
    may have derivatives that cannot be traced."""
    if isinstance(function, (OpOverload, OpOverloadPacket)) and (op := with_pullback(function)) is not None:
        if op in recorder.untraced or is_pullback(op):
            return call_untraced(recorder, op, args, kwargs)
        found = op(*args, **kwargs)
        recorder.note_derivative(found, op)
        return found
    if any(map(is_symbolic, args)) and function in numbers.NUMBER_FUNCTIONS:
        number = numbers.function(function, args)
        if number is not None:
            return number
    return PROGRAMS_OVER_SYMBOLS.get(function, function)(*args, **kwargs)


def _may_apply_autograd(module: fx.GraphModule, node: fx.Node) -> Callable[..., object] | None:
    """What a node calls, if it is a module or a function in Python, which may apply an autograd function."""
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    return node.target if isinstance(node.target, (FunctionType, FunctionCall)) else None


def _backward_of(node: fx.Node) -> FunctionBackward | None:
    """The function's backward that a node of a gradient program calls."""
    called = node.target.target if isinstance(node.target, FunctionCall) else None
    return called if isinstance(called, FunctionBackward) else None


def _is_noted(node: fx.Node, args: tuple[Any, ...]) -> bool:
    """Whether the nodes that have made a node's value have said what history it has."""
    is_item = node.target is operator.getitem and isinstance(args[0], (tuple, list))
    return is_item or _backward_of(node) is not None


def _run_node(
    recorder: Recorder,
    module: fx.GraphModule,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    present: PresentViews,
    nested: TracedCalls,
) -> object:
    """What a call of the graph gives."""
    if isinstance(node.target, InvokeSubgraph):
        found = nested.region(node.target, args)
        body: Any = node.target.bodies[0]
        return _interpret(recorder, body, args, present, nested) if found is None else found
    backward = _backward_of(node)
    if backward is not None:
        ends = backward.once and any(isinstance(g, torch.Tensor) and g.requires_grad for g in args[backward.kept :])

        def body(*flat: Any) -> Values:
            found = _interpret(recorder, backward.body, flat, present, nested)
            return recorder.without_histories(found) if ends else found

        return backward.run(body, args)
    if node.op == "call_function":
        result = _call(recorder, node.target, args, kwargs)  # type: ignore[arg-type]  # which it is
        if node.target in _CHOICES:
            note([_CHOICES[node.target]])
        return result
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return module.get_submodule(str(node.target))(*args, **kwargs)


def _interpret(
    recorder: Recorder, module: fx.GraphModule, flat: Values, present: PresentViews, nested: TracedCalls
) -> Values:
    """Runs the graph node by node, so that each operator knows the user's line."""
    values: dict[fx.Node, Any] = {}
    inputs = iter(flat)
    for node in module.graph.nodes:
        stack = node.meta.get("stack") or ()
        recorder.user_node(stack, is_cast(node))
        try:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], values.__getitem__)
                return list(results) if isinstance(results, (tuple, list)) else [results]
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
            else:
                # Not every call comes by the mode that would see to it.
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: present.of(values[n]))
                function = _may_apply_autograd(module, node) if not kwargs else None
                given = recorder.nodes_of(args) if function is not None and recorder.follows_history else ()
                with recorder.unseen.watching(node.target, args, kwargs, stack):
                    values[node] = present.behind(_run_node(recorder, module, node, args, kwargs, present, nested))
                    if node.target == "detach_":
                        recorder.note_detached(values[node])
                    elif recorder.follows_history and not _is_noted(node, args):
                        recorder.note_history(values[node], function, given)
                if function is not None and recorder.follows_history:
                    recorder.unseen.applied(values[node], args)
        except Exception as error:
            if stack and not isinstance(error, AotAutogradError):
                error.add_note("while tracing" + user_location(stack))
            raise
    raise AotAutogradError("the graph has no output node")
