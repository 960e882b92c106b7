"""The callable around compiled graphs: autograd, write-back of mutations, reconstruction of aliases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotautograd._C import wrap
from aotautograd.gradients import sources_of
from aotautograd.replay import replay_of
from aotautograd.schemas import (
    HELD,
    UNHELD,
    BackwardPlan,
    CallPlan,
    Compiled,
    GradientInfo,
    GradientSet,
    GradientSource,
    HistoryPlan,
    InputInfo,
    OutputInfo,
    OutputKind,
    Partition,
    ProgramMetadata,
    TangentLayout,
    Values,
)
from aotautograd.versions import before_last_change, restride, set_version, version_of
from primtorch import forks
from primtorch.arguments import TensorLike
from primtorch.frozen import record
from primtorch.spec import Size
from primtorch.symbolic import expr_of

Flat = Callable[..., Values]
# What one node hands on: the stage and the turn, the tangents that lead to it, the gradients.
_Part = tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]


@record
class Behind:
    """What a compiled forward leads to, made when autograd's engine asks for it. `missing`: the outputs that no
    gradient came for.

    Attributes:
        compile_backward: (missing) -> the compiled backward without their tangents, those that it takes as zeros
            nevertheless, and how the gradients are made of what it returns; asked once for each `missing`.
        needs: (missing, those of earlier runs) -> saved tensors to read, to keep, and whether they were freed.
        gradients: (forward's inputs, saved tensors, tangents, missing) -> results that autograd can follow, and how the
            gradients are made of them. It gets the inputs that it does not read, or that the program wrote, as None.
        cut: `gradients` where results are computed from others of them (`GradientsOnDemand.cut`).
        reads: gives the places of the forward's inputs that `gradients` needs. Asked for when the backward has begun to
            be compiled, which does not wait for the answer.
        turns: for each gradient its stage, and its turn among all, in which they are handed on.
        begin: begins with the backward that is likely.
        apart: whether the compiled backward cannot take a tangent, and `gradients` can; None: there is none such.
    """

    compile_backward: Callable[[Sequence[int]], tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]]
    needs: Callable[[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int], bool]]
    gradients: Callable[[Values, Values, Values, Sequence[int]], tuple[Values, tuple[GradientInfo, ...]]]
    cut: Callable[..., object]
    reads: Callable[[], frozenset[int]]
    turns: tuple[tuple[int, int], ...]
    begin: Callable[[], None] = lambda: None
    apart: Callable[[object], bool] | None = None


def inference_callable(metadata: ProgramMetadata, compiled: Compiled) -> Flat:
    """Calls a forward that has no backward."""
    return _finished(metadata, wrap(_call_plan(metadata, compiled), None))


def training_callable(metadata: ProgramMetadata, partition: Partition, forward: Compiled, behind: Behind) -> Flat:
    """Calls a forward whose results lead to the compiled backward."""
    history = _history_plan(metadata, partition, behind)
    call: Flat = wrap(_call_plan(metadata, forward), history)
    restrided = [info.index for info in metadata.inputs if info.mutates_metadata]
    return _finished(metadata, _on_aliases(call, restrided) if restrided else call)


def _finished(metadata: ProgramMetadata, call: Flat) -> Flat:
    finish = _epilogue(metadata)
    finished: Flat = call if finish is None else lambda *flat: finish(flat, call(*flat))
    # A change of shapes alone leaves what autograd keeps of the input as it is. Where it does make a derivative raise,
    # because it came later than what that reads, the trace has found out.
    counted = [(info.index, info.version_bumps) for info in metadata.inputs if not info.mutates_data]
    if any(bumps for _, bumps in counted):
        finished = _counting_first(finished, [(place, bumps) for place, bumps in counted if bumps])
    return torch.enable_grad()(finished) if metadata.enables_grad else finished


def _on_aliases(call: Flat, places: Sequence[int]) -> Flat:
    """Calls with aliases of some inputs: what is kept of an input for the backward has the shape that it came in."""

    def aliasing(*flat: object) -> Values:
        given = list(flat)
        with torch.enable_grad():
            for place in places:
                given[place] = torch.ops.aten.alias.default(given[place])
        return call(*given)

    return aliasing


def _counting_first(call: Flat, counted: Sequence[tuple[int, int]]) -> Flat:
    """Counts the changes of inputs before the call, which keeps them in the version that they have then."""

    def counting(*flat: Any) -> Values:
        for place, bumps in counted:
            set_version(flat[place], version_of(flat[place]) + bumps)
        return call(*flat)

    return counting


def is_boxed(compiled: Compiled) -> bool:
    """Whether a compiled graph takes one list of its inputs, which it may empty, in place of the inputs."""
    return bool(getattr(compiled, "_boxed_call", False))


def _call_plan(metadata: ProgramMetadata, forward: Compiled) -> CallPlan:
    places = tuple((p, -1) if isinstance(p, int) else (p.input, p.dim) for p in metadata.placeholders)
    as_given = places == tuple((i, -1) for i in range(metadata.num_inputs))
    return CallPlan(
        forward, is_boxed(forward), metadata.num_inputs, () if as_given else places, metadata.complex_inputs
    )


class _CompiledOnce:
    """Compiles each variant of the backward at its first use, once for all threads."""

    def __init__(self, behind: Behind, kept_symbols: Sequence[str]) -> None:
        self.compile_backward = behind.compile_backward
        self.kept_symbols = kept_symbols
        self.lock = forks.lock()
        self.compiled: dict[tuple[int, ...], BackwardPlan] = {}

    def __call__(self, missing: Sequence[int]) -> BackwardPlan:
        key = tuple(missing)
        with self.lock:
            if key not in self.compiled:
                backward, zeros, made = self.compile_backward(key)
                self.compiled[key] = BackwardPlan(
                    backward, is_boxed(backward), zeros, sources_of(made, self.kept_symbols)
                )
            return self.compiled[key]


def _history_plan(metadata: ProgramMetadata, partition: Partition, behind: Behind) -> HistoryPlan:
    outputs = tuple(
        "symbol" if o.kind == "symbol" else "constant" if o.tangent is None else "differentiable"
        for o in metadata.forward_outputs
    )
    differentiable = [i for i, kind in enumerate(outputs) if kind == "differentiable"]
    taken = [n.meta["val"] for n in partition.backward.graph.nodes if n.op == "placeholder"]
    specs = taken[len(taken) - len(metadata.tangents) :]
    kept_symbols = [
        str(expr_of(n)) if isinstance(n, torch.SymInt) else "" for n in taken[: partition.num_saved_symbols]
    ]

    def followed(
        inputs: Values, saved: Values, tangents: Values, missing: Sequence[int]
    ) -> tuple[Values, tuple[GradientSource, ...]]:
        results, made = behind.gradients(inputs, saved, tangents, missing)
        return results, sources_of(made, kept_symbols)

    def followed_apart(*call: object) -> object:
        found: Any = behind.cut(*call)
        return found if call[-1] is not None else (found[0], sources_of(found[1], kept_symbols))

    return HistoryPlan(
        backward=_CompiledOnce(behind, kept_symbols),
        needs=behind.needs,
        gradients=followed,
        cut=followed_apart,
        apart=behind.apart,
        interrupted=_interrupted(metadata),
        leading=metadata.leading,
        layouts=_symbolic_layouts(kept_symbols, specs),
        differentiable=metadata.gradients,
        sets=_gradient_sets(metadata, behind.turns),
        outputs=outputs,
        tangents=tuple(differentiable.index(slot) for slot in metadata.tangents),
        expected=tuple(_tangent_layout(spec) for spec in specs),
        held=_held(metadata, partition, behind.reads()),
        saved=partition.num_saved_tensors,
    )


def _gradient_sets(metadata: ProgramMetadata, turns: Sequence[tuple[int, int]]) -> tuple[GradientSet, ...] | None:
    """The gradients by the tangents that lead to them; None for one result that leads to all, which takes one node. (Of
    several, hooks of those from which no backward begins are not to run.) Those of later turns come first: their nodes
    are to be older. Of gradients that one node hands on, the engine takes one or another first; whoever notes their
    order (a reducer, to make its buckets) is to find the one that was asked for."""
    members: dict[tuple[int, ...], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, tangents in enumerate(metadata.led_to_by):
        members[tangents][turns[place] if turns else (0, 0)].append(place)
    if not turns and members.keys() == {(0,)} and len(metadata.tangents) == 1:
        return None
    parts: list[_Part] = [
        (turn, tangents, tuple(places)) for tangents, m in members.items() if tangents for turn, places in m.items()
    ]
    parts.sort(key=lambda part: part[0], reverse=True)  # the sets of one turn stay as they come
    nodes = _in_pairs(parts[::-1])[::-1]
    ahead: dict[tuple[int, ...], int] = {}  # the set of the same tangents that comes before
    found: list[GradientSet] = []
    for place in range(len(nodes) - 1, -1, -1):
        (stage, _), tangents, gradients = nodes[place]
        found.append(GradientSet(tangents, gradients, stage, ahead.get(tangents, -1)))
        ahead[tangents] = place
    return tuple(found[::-1])


def _in_pairs(parts: Sequence[_Part]) -> list[_Part]:
    """Two gradients that follow each other are handed on by one node, which saves every other node. Their order stays:
    the engine takes what is ready out of a heap, where accumulators of gradients are above all else, and of two equal
    ones the first that came is at the top. Of three it is one or another."""
    joined: list[_Part] = []
    for part in parts:
        (stage, turn), tangents, gradients = part
        before = joined[-1] if joined else None
        if before is not None and len(before[2]) == len(gradients) == 1 and before[:2] == ((stage, turn - 1), tangents):
            joined[-1] = ((stage, turn), tangents, (*before[2], *gradients))
        else:
            joined.append(part)
    return joined


def _held(metadata: ProgramMetadata, partition: Partition, reads: frozenset[int]) -> tuple[int, ...]:
    """Where a derivative of the backward finds each input: see `HistoryPlan.held`."""
    kept = zip(partition.saved_names, partition.saved_values, strict=False)
    saved = {name: (k, value) for k, (name, value) in enumerate(kept)}
    # A written input leads back to the node, so the node must not hold it.
    written = {i.index for i in metadata.inputs if i.mutates_data}
    derived = {i.index for i in metadata.inputs if i.requires_grad}
    placeholders = [n for n in partition.forward.graph.nodes if n.op == "placeholder"]
    places: list[int] = []
    for i, (p, node) in enumerate(zip(metadata.placeholders, placeholders, strict=True)):
        if p in written:
            places.append(UNHELD)
        elif node.name in saved and (saved[node.name][1] is node or p not in derived):
            places.append(saved[node.name][0])  # or a copy of it, which has no history
        else:
            is_symbol = isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat))
            places.append(HELD if i in reads or is_symbol else UNHELD)
    return tuple(places)


def _tangent_layout(spec: TensorLike) -> TangentLayout:
    """The layout that the backward was traced with."""
    if all(type(n) is int for n in (*spec.shape, *spec.stride())):
        return TangentLayout(spec.dtype, spec.device, tuple(map(int, spec.shape)), tuple(map(int, spec.stride())))
    return TangentLayout(spec.dtype, spec.device, None, None)


def _symbolic_layouts(
    names: Sequence[str], specs: Sequence[TensorLike]
) -> Callable[[Sequence[int]], Sequence[tuple[Sequence[int], Sequence[int]]]]:
    """Sizes and strides of each tangent, from the sizes that the forward kept, whose symbols are `names`."""
    prepared = [(_sizes(spec.shape), _sizes(spec.stride())) for spec in specs]

    def layouts(kept: Sequence[int]) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        symbols = {name: int(size) for name, size in zip(names, kept, strict=True) if name}
        return [(shape_of(symbols), stride_of(symbols)) for shape_of, stride_of in prepared]

    return layouts


def _sizes(sizes: Sequence[Size]) -> Callable[[dict[str, int]], tuple[int, ...]]:
    if all(type(s) is int for s in sizes):
        known = tuple([int(s) for s in sizes])
        return lambda symbols: known
    exprs = [expr_of(s) for s in sizes]
    return lambda symbols: tuple([e.evaluate(symbols) for e in exprs])


def _epilogue(metadata: ProgramMetadata) -> Callable[[Values, Values], Values] | None:
    """Write-back and outputs; None if the forward's values are the program's outputs as they are."""
    plain = all(
        o.kind is OutputKind.VALUE and o.slot == i and o.same_as is None for i, o in enumerate(metadata.outputs)
    )
    writes = [_write_back(metadata, info) for info in metadata.inputs if info.mutates_data]
    restrides = [_restride(info) for info in metadata.inputs if info.mutates_metadata]
    if plain and not writes and not restrides and len(metadata.outputs) == len(metadata.forward_outputs):
        return None
    symbol_reads = _symbol_reads(metadata)
    makers = [_maker(o) for o in metadata.outputs]

    def finish(flat: Values, values: Values) -> Values:
        symbols = {name: read(flat) for name, read in symbol_reads} if symbol_reads else {}
        for name, slot in metadata.number_slots:
            symbols[name] = values[slot]
        for write in writes:
            write(flat, values)
        outputs: list[object] = []
        for make in makers:
            outputs.append(make(flat, values, outputs, symbols))
        for give_shape in restrides:  # behind the outputs, which are views of the inputs as they came
            give_shape(flat, symbols)
        return outputs

    return finish


def _interrupted(metadata: ProgramMetadata) -> Callable[[Values, Values], None] | None:
    """Writes back what eager has written when it keeps the last tensor: `torch.utils.checkpoint` ends the second run of
    a program there, by an error."""
    writes = [_write_back(metadata, info) for info in metadata.inputs if info.mutates_data and not info.written_last]
    if not writes:
        return None

    def write_all(flat: Values, values: Values) -> None:
        for write in writes:
            write(flat, values)

    return write_all


def _symbol_reads(metadata: ProgramMetadata) -> list[tuple[str, Callable[[Values], int]]]:
    reads: list[tuple[str, Callable[[Values], int]]] = []
    for name, place, dim in metadata.symbol_places:
        if dim is None:
            reads.append((name, lambda flat, place=place: int(flat[place])))  # type: ignore[misc]
        else:
            reads.append((name, lambda flat, place=place, dim=dim: int(flat[place].shape[dim])))  # type: ignore[misc]
    return reads


def updates_of(metadata: ProgramMetadata) -> dict[int, int]:
    """Which results of the forward are new values of which of its inputs, where autograd need not see the write, and
    nothing may end the call before it."""
    written = {i.index for i in metadata.inputs if i.mutates_data and not (i.mutation_in_grad_mode or i.written_last)}
    slots = {f.input: slot for slot, f in enumerate(metadata.forward_outputs) if f.input in written}
    places = enumerate(metadata.placeholders)
    return {slots[p]: place for place, p in places if isinstance(p, int) and p in slots}


def _write_back(metadata: ProgramMetadata, info: InputInfo) -> Callable[..., None]:
    """Gives an input its new elements, and the version that it has then: views remember that of their base. A forward
    that has written them where they belong returns the input's memory (`primtorch.schemas.UPDATES`)."""
    place, bumps, differentiable = info.index, info.version_bumps, info.mutation_in_grad_mode
    slot = next(i for i, f in enumerate(metadata.forward_outputs) if f.input == place)

    def write(flat: Values, values: Values) -> None:
        target, value = flat[place], values[slot]
        if not differentiable and _is_there(value, target):
            if bumps:
                set_version(target, version_of(target) + bumps)
            return
        version = version_of(target) + bumps
        if differentiable:
            target.copy_(value)
        elif bumps:
            target.detach().copy_(value)
        else:
            target.data.copy_(value)
        set_version(target, version)

    return write


def _is_there(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a new value lies in the memory that it is for."""
    if not torch._C._is_alias_of(value, target):  # type: ignore[attr-defined]
        return False
    places = [(t.storage_offset(), t.stride(), t.dtype) for t in (value, target)]
    return places[0] == places[1]


def _restride(info: InputInfo) -> Callable[..., None]:
    """Gives an input its new sizes and strides."""
    place, unseen = info.index, info.metadata_under_no_grad
    replay = replay_of(info.metadata_steps)

    def give_shape(flat: Values, symbols: dict[str, int]) -> None:
        target = flat[place]
        restride(target, replay(target.detach(), symbols), seen=torch.is_grad_enabled() and not unseen)

    return give_shape


class _InMemoryOf(torch.autograd.Function):
    """(value, the same elements where they are to lie, whether that is no view) -> those, with the value's history."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor, memory: torch.Tensor, apart: bool) -> torch.Tensor:
        return memory.data if apart else memory

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradients[0], None, None


def _made_by_function(output: OutputInfo) -> Callable[..., object]:
    """An output in the memory of an input or of another output, with a history of its own."""
    replay, slot, history = replay_of(output.steps), output.slot, output.history
    of_value = output.kind is OutputKind.VIEW_OF_VALUE

    def make(flat: Values, values: Values, outputs: object, symbols: dict[str, int]) -> object:
        with torch.no_grad():
            memory = replay((values if of_value else flat)[slot].detach(), symbols)
        return _InMemoryOf.apply(values[history], memory, output.apart)  # type: ignore[no-untyped-call]

    return make


def _maker(output: OutputInfo) -> Callable[..., object]:
    """How one output is made from (flat inputs, forward values, outputs so far, symbols)."""
    slot = output.slot
    if output.same_as is not None:
        return lambda flat, values, outputs, symbols, same=output.same_as: outputs[same]
    if output.kind is OutputKind.VALUE:
        return lambda flat, values, outputs, symbols: values[slot]
    if output.kind is OutputKind.INPUT:
        return lambda flat, values, outputs, symbols: flat[slot]
    if output.kind is OutputKind.CONSTANT:
        return lambda flat, values, outputs, symbols: output.value
    if output.history >= 0:
        return _made_by_function(output)
    replay = replay_of(output.steps, output.outside_history if output.requires_grad else len(output.steps))
    if output.stale:
        fresh = replay
        replay = lambda base, symbols: before_last_change(base, lambda t: fresh(t, symbols))
    if output.kind is OutputKind.VIEW_OF_VALUE:
        return lambda flat, values, outputs, symbols: replay(values[slot], symbols)
    return lambda flat, values, outputs, symbols: replay(flat[slot], symbols)
