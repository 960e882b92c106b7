"""Parts of a program that it calls several times (`InvokeSubgraph`) in a trace: each is traced once and differentiated
once, and every call of it is one node of the forward and one of the backward.

A region is a program: it is traced as programs are, and its joint graph is cut in two. Its writes to operands, and
results that are views, are done around the node. What ties a region to the program around it more closely is traced in
place, operator by operator, like the rest of the program, which has the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd.errors import AotAutogradError
from aotautograd.events import tell_in_place
from aotautograd.inputs import Computed
from aotautograd.kept_values import is_resumed, without_history
from aotautograd.passes import (
    eliminate_dead_code,
    is_effect,
    is_random,
    keep_refusals,
    output_node,
    output_values,
    simplify,
)
from aotautograd.recorder import Recorder
from aotautograd.schemas import (
    HISTORY,
    REGION,
    History,
    JointGraph,
    OutputInfo,
    OutputKind,
    Partition,
    Partitioner,
    RegionCall,
    SymbolSource,
    TracedRegion,
)
from primtorch.ambient import ATTENTION, autocast_state, function_modes, preserved
from primtorch.errors import PrimTorchError
from primtorch.functionalize import unwrap, wrap
from primtorch.higher_order import InvokeSubgraph, handled_by
from primtorch.interrupts import pass_on_interrupt
from primtorch.spec import Size, TensorSpec, spec_of

Trace = Callable[[fx.GraphModule, Sequence[object], Partitioner], JointGraph]
Values = tuple[Any, ...]


class InPlace(Exception):
    """A region cannot be a graph of its own; says why."""


class RegionsInPlace(Exception):
    """The program is to be traced again with this region in place, or all of them: it takes a derivative of a
    derivative."""

    def __init__(self, body: fx.GraphModule | None = None) -> None:
        super().__init__()
        self.body = body


class Regions:
    """Takes the calls of regions of a program that `recorder` records; `trace` traces one, `partitioner` cuts it."""

    def __init__(
        self, recorder: Recorder, trace: Trace, partitioner: Partitioner, in_place: frozenset[fx.GraphModule]
    ) -> None:
        self.recorder = recorder
        self.in_place = in_place
        self.tangents = 1  # of the program: where there are several, a backward may come without some
        self.trace = trace
        self.partitioner = partitioner
        self.traced: dict[object, TracedRegion | InPlace] = {}

    def call(self, operator: InvokeSubgraph, operands: Values) -> Values | None:
        """The results of a call, whose node is written; None where the region is to be traced in place."""
        body = operator.bodies[0]
        try:
            if not isinstance(body, fx.GraphModule):
                raise InPlace("it is no graph")
            if body in self.in_place:
                raise InPlace("gradients may come for some of its results alone")
            region = self._region(body, operands)
            self._refuse_now(region, operands)
        except InPlace as why:
            tell_in_place(str(why), self.recorder.stack)
            return None
        call = RegionCall(region, body)
        if region.backward is None:
            found = self.emit(call, region.forward, self._inputs(region.joint.metadata.placeholders, operands))
        else:
            found = _Region.apply(self, call, *operands)  # type: ignore[no-untyped-call]
        return self._around(region, operands, found)

    # -- tracing a region -------------------------------------------------------------------

    def _region(self, body: fx.GraphModule, operands: Values) -> TracedRegion:
        """The region for operands like these under the state at hand."""
        key = (body, torch.is_grad_enabled(), _state(), tuple(map(_key, operands)))
        found = self.traced.get(key)
        if found is None:
            if torch._C._current_graph_task_id() != -1:  # by which a trace tells the backward from the forward
                raise InPlace("it is run again by the backward")
            try:
                found = self._traced(body, operands)
            except InPlace as why:
                found = why
            except (RuntimeError, ValueError, TypeError, IndexError, PrimTorchError, AotAutogradError) as error:
                pass_on_interrupt(error)  # what the program itself does wrong is raised where it is traced in place
                found = InPlace(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            self.traced[key] = found
        if isinstance(found, InPlace):
            raise found
        return found

    def _traced(self, body: fx.GraphModule, operands: Values) -> TracedRegion:
        program, examples = _program(body, operands)
        with preserved(), handled_by(None):
            for _ in function_modes():  # those of the trace around it
                torch._C._pop_torch_function_stack()
            joint = self.trace(program, examples, self.partitioner)
        _refuse(joint)
        keep_refusals(joint.module.graph)
        joint = simplify(joint)
        if not joint.metadata.needs_backward:
            _refuse_results(output_values(joint.module.graph))
            return TracedRegion(joint, joint.module)
        return _halves(joint, self.partitioner(joint))

    def _refuse_now(self, region: TracedRegion, operands: Values) -> None:
        """Refuses what depends on the call, not on the operands' metadata."""
        draws = any(is_random(node) for node in region.forward.graph.nodes)
        if draws and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise InPlace("it draws random numbers within a checkpoint")
        written = [info.index for info in region.joint.metadata.inputs if info.mutates_data]
        if written:
            storages = [t.untyped_storage()._cdata for t in operands if isinstance(t, torch.Tensor)]
            for index in written:
                if storages.count(operands[index].untyped_storage()._cdata) > 1:
                    raise InPlace("it writes to an operand that shares memory with another")

    # -- writing nodes ----------------------------------------------------------------------

    def _inputs(self, placeholders: Sequence[int | SymbolSource], operands: Values) -> list[object]:
        """What a traced region's graph takes, of what the program gives."""
        nodes = self.recorder.symbol_nodes
        return [
            nodes[place.name].meta["val"] if isinstance(place, SymbolSource) else operands[place]
            for place in placeholders
        ]

    def emit(self, call: RegionCall, graph: fx.GraphModule, inputs: Sequence[object]) -> Values:
        """Writes the node of a graph's call, and gives its results."""
        recorder = self.recorder
        numbers = [value for value in inputs if not isinstance(value, torch.Tensor)]
        tensors = [unwrap(value) for value in inputs if isinstance(value, torch.Tensor)]
        results = output_values(graph.graph)
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        tags = {name for name, has in (("random", is_random), ("effect", is_effect)) if any(map(has, nodes))}
        operator = InvokeSubgraph((graph,), len(numbers), (False,) * len(results), tags=frozenset(tags))
        fakes = tuple(recorder.fake_mode.from_spec(_described(node.meta["val"])) for node in results)  # type: ignore[union-attr]
        args = (*(recorder.size(number) for number in numbers), *map(recorder.lift, tensors))  # type: ignore[arg-type]
        node = recorder.call_graphs(operator, args, fakes)
        node.meta[REGION] = call
        return tuple(map(wrap, fakes))

    def _around(self, region: TracedRegion, operands: Values, found: Values) -> Values:
        """The region's results, of its graph's; its writes are done."""
        metadata = region.joint.metadata
        with torch.no_grad():
            for value, info in zip(found, metadata.forward_outputs, strict=False):
                if info.input is not None:
                    operands[info.input].copy_(value)
        return tuple(_result(info, operands, found) for info in metadata.outputs)


def _result(info: OutputInfo, operands: Values, found: Values) -> Any:
    match info.kind:
        case OutputKind.VALUE:
            return found[info.slot]
        case OutputKind.INPUT:
            return operands[info.slot]
        case OutputKind.CONSTANT:
            return info.value
    value = found[info.slot] if info.kind is OutputKind.VIEW_OF_VALUE else operands[info.slot]
    for step in info.steps:
        value = step.op(value, *step.args, **dict(step.kwargs))
    return value


class _Region(torch.autograd.Function):
    """A call, and behind it the call of its backward."""

    @staticmethod
    def forward(ctx: Any, regions: Regions, call: RegionCall, *operands: Any) -> Values:
        region, metadata = call.region, call.region.joint.metadata
        inputs = regions._inputs(metadata.placeholders, operands)
        found = regions.emit(call, region.forward, inputs)
        count = len(metadata.forward_outputs)
        written = {info.index for info in metadata.inputs if info.mutates_data}
        kept = []
        for place in region.kept:
            value: Any = found[place] if place >= 0 else inputs[-1 - place]
            is_written = place < 0 and metadata.placeholders[-1 - place] in written
            kept.append(wrap(unwrap(value)) if is_written else value)  # what it was before
        _mark(regions, region)
        ctx.regions, ctx.call, ctx.operands = regions, call, len(operands)
        ctx.numbers = [inputs[place] for place in region.numbers]
        ctx.save_for_backward(*kept)
        apart = [v for v, info in zip(found, metadata.forward_outputs, strict=False) if info.tangent is None]
        ctx.mark_non_differentiable(*apart)
        ctx.set_materialize_grads(False)
        return found[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[object, ...]:
        if torch.is_grad_enabled():
            raise RegionsInPlace
        region: TracedRegion = ctx.call.region
        metadata, backward = region.joint.metadata, region.backward
        assert backward is not None
        missing = any(gradients[slot] is None for slot in metadata.tangents)
        if len(metadata.tangents) > 1 and (missing or ctx.regions.tangents > 1):
            raise RegionsInPlace(ctx.call.body)  # autograd runs nothing behind a result that is not used
        specs = [node.meta["val"] for node in region.tangents]
        tangents = [_laid_out(gradients[slot], spec) for slot, spec in zip(metadata.tangents, specs, strict=True)]
        found = ctx.regions.emit(ctx.call, backward, (*ctx.numbers, *ctx.saved_tensors, *tangents))
        results: list[object] = [None] * ctx.operands
        for place, made in zip(metadata.gradients, metadata.made_gradients, strict=True):
            number = region.gradients[made.slot] if made.source == "result" else None
            value = tangents[made.slot] if made.source == "tangent" else None if number is None else found[number]
            for step in made.steps if value is not None else ():
                value = step.op(value, *step.args, **dict(step.kwargs))
            results[place] = value
        return (None, None, *results)


def _mark(regions: Regions, region: TracedRegion) -> None:
    """Says of the results that are kept which have no history: a derivative of the backward may be given them."""
    node = next(iter(reversed(regions.recorder.graph.nodes)))
    while REGION not in node.meta:
        node = node.prev
    for item in node.users:
        if item.args[1] in region.without_history:
            item.meta[HISTORY] = History.NONE


def _laid_out(gradient: torch.Tensor | None, spec: Any) -> torch.Tensor:
    """A gradient as the region's backward was traced for it; zeros where none came."""
    shape, strides = tuple(spec.shape), tuple(spec.stride())
    if gradient is None:
        return torch.empty_strided(shape, strides, dtype=spec.dtype, device=spec.device).zero_()
    if _texts(gradient.stride()) == _texts(strides):
        return gradient
    return torch.empty_strided(shape, strides, dtype=spec.dtype, device=spec.device).copy_(gradient)


# -- what a region's trace is ------------------------------------------------------------------


def _program(body: fx.GraphModule, operands: Values) -> tuple[fx.GraphModule, list[object]]:
    """The body as a program of operands like these, and examples of them."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(body.graph, copies))  # type: ignore[arg-type]
    examples: list[object] = []
    for node, operand in zip(graph.find_nodes(op="placeholder"), operands, strict=True):
        is_tensor = isinstance(operand, torch.Tensor)
        node.meta["val"] = _described(unwrap(operand)) if is_tensor else operand
        examples.append(Computed(torch.is_grad_enabled() and operand.requires_grad) if is_tensor else operand)
    return _LazyGraphModule(body, graph, "Region"), examples


def _state() -> tuple[object, ...]:
    """What a trace depends on beside the operands."""
    return autocast_state(), torch.get_default_dtype(), *(str(state.read()) for state in ATTENTION)


def _key(operand: object) -> object:
    if not isinstance(operand, torch.Tensor):
        return type(operand), str(operand)
    bare = unwrap(operand)
    sizes = _texts((*bare.shape, *bare.stride()))
    return sizes, bare.dim(), bare.dtype, bare.device, operand.requires_grad


def _texts(sizes: Sequence[Size]) -> tuple[str, ...]:
    return tuple(map(str, sizes))


def _described(value: object) -> TensorSpec:
    """A tensor that begins where its memory does."""
    spec = spec_of(value)
    return TensorSpec(spec.shape, spec.strides, spec.dtype, spec.device)


def _refuse(joint: JointGraph) -> None:
    """Refuses what ties a region to the program around it."""
    metadata = joint.metadata
    questions = (
        ("it takes numbers out of tensors", bool(metadata.assumptions)),
        ("its backward raises", bool(joint.failing)),
        ("one of its results is computed from another", any(metadata.leading)),
        ("it records history where the program does not", metadata.enables_grad),
        ("it gives an operand another shape", any(info.mutates_metadata for info in metadata.inputs)),
        ("it writes to what requires a gradient", any(i.mutates_data and i.requires_grad for i in metadata.inputs)),
        ("it gives a number", any(info.kind == "symbol" for info in metadata.forward_outputs)),
        (
            "it writes what has a history",
            any(info.input is not None and info.requires_grad for info in metadata.forward_outputs),
        ),
        ("it gives a view whose history is not a view's", not all(map(_is_plain, metadata.outputs))),
    )
    for reason, holds in questions:
        if holds:
            raise InPlace(reason)


def _is_plain(info: OutputInfo) -> bool:
    """Whether a result's history is that of the value or of a view of it."""
    return not (info.stale or info.outside_history or info.history >= 0)


def _halves(joint: JointGraph, parts: Partition) -> TracedRegion:
    """The forward, whose further results are what is kept beside its operands, and the backward."""
    metadata = joint.metadata
    count = joint.num_forward_outputs
    returned = list(output_values(parts.forward.graph))
    numbers, saved = returned[len(returned) - parts.num_saved_symbols :], parts.saved_values
    inputs = parts.forward.graph.find_nodes(op="placeholder")
    results: list[Any] = returned[:count]
    names = [str(node.name) for node in without_history(joint) if not is_resumed(node)]
    apart, kept = [], []
    for name, node in zip(parts.saved_names, saved, strict=True):
        if node in inputs:
            kept.append(-1 - inputs.index(node))
            continue
        if node not in results:
            results.append(node)
        kept.append(results.index(node))
        if name in names and kept[-1] >= count:
            apart.append(kept[-1])
    if any(node not in inputs for node in numbers):
        raise InPlace("its backward reads a number that it computes")
    _refuse_results(results)
    forward = _returning(parts.forward, results)
    pulled = output_values(parts.backward.graph)
    gradients: list[Any] = list(dict.fromkeys(node for node in pulled if node is not None))
    if any(not isinstance(node, fx.Node) or node.op == "placeholder" for node in gradients):
        raise InPlace("a gradient of its is what it was given")
    given = parts.backward.graph.find_nodes(op="placeholder")
    return TracedRegion(
        joint,
        forward,
        _returning(parts.backward, gradients),
        kept=tuple(kept),
        names={place: name for name, place in zip(parts.saved_names, kept, strict=True) if place >= count},
        numbers=tuple(inputs.index(node) for node in numbers),
        tangents=tuple(given[len(given) - len(metadata.tangents) :]),
        gradients=tuple(None if node is None else gradients.index(node) for node in pulled),
        without_history=frozenset(apart),
    )


def _refuse_results(results: Sequence[Any]) -> None:
    """Each result of a graph is memory of its own."""
    if any(not isinstance(node, fx.Node) or node.op != "call_function" for node in results):
        raise InPlace("it gives what it was given, as a new value")
    if len(set(results)) < len(results) or any(node.meta.get("val") is None for node in results):
        raise InPlace("it gives one value twice")


def _returning(module: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph with these results, in place."""
    output_node(module.graph).args = (tuple(results),)
    eliminate_dead_code(module.graph)
    return module
