"""The callable around compiled graphs: autograd, write-back of mutations, reconstruction of aliases."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotautograd.errors import InputMismatch, InvalidJoint
from aotautograd.schemas import (
    Compiled,
    InputInfo,
    OutputInfo,
    OutputKind,
    Partition,
    ProgramMetadata,
    SymbolSource,
    ViewStep,
)
from primtorch.symbolic import expr_of

Flat = Callable[..., Sequence[Any]]


def boxed(compiled: Compiled) -> Callable[[list[Any]], Sequence[Any]]:
    """One way to call a compiled graph: with a list that it may empty, if it says that it does (`_boxed_call`)."""
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda inputs: compiled(*inputs)


def inference_callable(metadata: ProgramMetadata, compiled: Compiled) -> Flat:
    """Calls a forward that has no backward."""
    run = boxed(compiled)
    set_grad_enabled = torch._C._set_grad_enabled
    finish = _epilogue(metadata)

    def call(*flat: Any) -> Sequence[Any]:
        inputs = gather(flat)
        before = torch.is_grad_enabled()
        if before:
            set_grad_enabled(False)
        try:
            if torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():
                    values = run(inputs)
            else:
                values = run(inputs)
        finally:
            if before:
                set_grad_enabled(True)
        return values if finish is None else finish(flat, values)

    gather = _gather(metadata)
    return call


def training_callable(
    metadata: ProgramMetadata,
    partition: Partition,
    forward: Compiled,
    backward: Callable[[], Compiled],
    gradients: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> Flat:
    """Calls a forward whose results are connected to the compiled backward, which `backward()` gives at its first use.

    `gradients(inputs, saved tensors, tangents)` computes the gradients in a way that can be differentiated; an input
    that the program wrote is given as None.
    """
    # Function.apply in Python first looks for transforms on every argument; its C++ base is what does the work.
    apply = super(
        torch.autograd.Function, _autograd_function(metadata, partition, boxed(forward), backward, gradients)
    ).apply
    gather = _gather(metadata)
    finish = _epilogue(metadata)
    differentiable = metadata.gradients

    def call(*flat: Any) -> Sequence[Any]:
        values = apply(gather(flat), *[flat[i] for i in differentiable])
        return values if finish is None else finish(flat, values)

    return call


def _gather(metadata: ProgramMetadata) -> Callable[[tuple[Any, ...]], list[Any]]:
    """Flat inputs of the program -> inputs of the forward graph."""
    places = metadata.placeholders
    if places == tuple(range(metadata.num_inputs)) and not metadata.complex_inputs:
        return list
    if not metadata.complex_inputs:
        return lambda flat: [flat[p] if isinstance(p, int) else flat[p.input].shape[p.dim] for p in places]

    def gather(flat: tuple[Any, ...]) -> list[Any]:
        resolved = list(flat)
        for i in metadata.complex_inputs:  # a compiler reads memory, in which a lazy conjugation has not happened
            resolved[i] = flat[i].resolve_conj()
        return [resolved[p] if isinstance(p, int) else flat[p.input].shape[p.dim] for p in places]

    return gather


def _autograd_function(
    metadata: ProgramMetadata,
    partition: Partition,
    forward: Callable[[list[Any]], Sequence[Any]],
    compile_backward: Callable[[], Compiled],
    differentiable_gradients: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> type[torch.autograd.Function]:
    returned = len(metadata.forward_outputs)
    last_tensor = returned + partition.num_saved_tensors
    tensor_slots = [i for i, o in enumerate(metadata.forward_outputs) if o.kind != "symbol"]
    constant = [i for i, o in enumerate(metadata.forward_outputs) if o.tangent is None and o.kind != "symbol"]
    tangent_slots = metadata.tangents
    specs = [n.meta["val"] for n in partition.backward.graph.nodes if n.op == "placeholder"][-len(tangent_slots) :]
    symbol_places = _symbol_places(metadata, partition)
    layouts = [_layout(spec) for spec in specs]
    unreached = _without_unreached(partition)
    compiled: list[Callable[[list[Any]], Sequence[Any]]] = []
    # A written input leads back to this node, so the node must not hold it.
    written = {i.index for i in metadata.inputs if i.mutates_data}
    unheld = [i for i, p in enumerate(metadata.placeholders) if p in written]
    unguarded = _unguarded(metadata, partition, written)
    version_of = operator.attrgetter("_version")

    class CompiledProgram(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: list[Any], *differentiable: torch.Tensor) -> Any:
            ctx.inputs = held = list(inputs)
            for i in unheld:
                held[i] = None
            ctx.versions = [version_of(held[i]) for i in unguarded]
            if symbol_places:
                ctx.symbols = {name: int(inputs[i]) for name, i in symbol_places.items()}
            if torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():
                    values = forward(inputs)
            else:
                values = forward(inputs)
            # A view made in here could not be written to afterwards; an alias with the same version counter can.
            outputs = list(values[:returned])
            for i in tensor_slots:
                if outputs[i]._is_view():
                    outputs[i] = outputs[i].detach()
            ctx.save_for_backward(*values[returned:last_tensor])
            ctx.scalars = values[last_tensor:]
            if constant:
                ctx.mark_non_differentiable(*[outputs[i] for i in constant])
            ctx.set_materialize_grads(False)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            symbols = ctx.symbols if symbol_places else {}
            saved = ctx.saved_tensors
            given = [gradients[s] for s in tangent_slots]
            tangents = [layout(g, symbols) for g, layout in zip(given, layouts, strict=True)]
            if torch.is_grad_enabled():
                if ctx.versions != [version_of(ctx.inputs[i]) for i in unguarded]:
                    raise InputMismatch(
                        "an input of the compiled program was modified in place after the forward, and a derivative of "
                        "the backward needs its old value"
                    )
                results = differentiable_gradients(ctx.inputs, saved, tangents)
                return (None, *unreached(given, results))
            inputs = [*ctx.scalars, *saved, *tangents]
            if not compiled:
                compiled.append(boxed(compile_backward()))
            # Unless the graph is retained, the list is now all that holds what was saved: a compiled backward that
            # empties it frees each activation after its last use.
            ctx.maybe_clear_saved_tensors()
            del saved, tangents
            with torch._C._DisableAutocast():
                results = compiled[0](inputs)
            return (None, *unreached(given, results))

    return CompiledProgram


def _symbol_places(metadata: ProgramMetadata, partition: Partition) -> dict[str, int]:
    """The input that carries each symbol."""
    return {
        (p.name if isinstance(p, SymbolSource) else str(expr_of(n.meta["val"]))): i
        for i, (p, n) in enumerate(
            zip(metadata.placeholders, (n for n in partition.forward.graph.nodes if n.op == "placeholder"), strict=True)
        )
        if isinstance(n.meta["val"], torch.SymInt)
    }


def _unguarded(metadata: ProgramMetadata, partition: Partition, written: set[Any]) -> list[int]:
    """Inputs whose version a derivative of the backward must check itself."""
    saved_inputs = set(partition.saved_names)
    # Autograd itself sees to it that saved tensors are not modified; the other inputs are read by a derivative of the
    # backward.
    return [
        i
        for i, (p, n) in enumerate(zip(metadata.placeholders, partition.forward.graph.nodes, strict=False))
        if p not in written and n.name not in saved_inputs and not isinstance(n.meta["val"], torch.SymInt)
    ]


def _without_unreached(partition: Partition) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]:
    """Puts None for the gradients that only tangents which did not come lead to, as autograd leaves them out."""
    reach: list[int] = []

    def unreached(given: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        missing = sum(1 << i for i, g in enumerate(given) if g is None)
        if not missing:
            return results
        if not reach:
            reach.extend(_tangents_behind(partition.backward, len(given)))
        # A gradient behind no tangent at all is a constant, which belongs to the program as a whole.
        return [None if r and not r & ~missing else g for r, g in zip(reach, results, strict=True)]

    return unreached


def _tangents_behind(backward: torch.fx.GraphModule, tangents: int) -> list[int]:
    """For each output of a backward, a mask of the tangents that it is computed from."""
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    masks = {n: 1 << i for i, n in enumerate(placeholders[len(placeholders) - tangents :])}
    for node in backward.graph.nodes:
        if node.op == "output":
            return [masks.get(g, 0) if isinstance(g, torch.fx.Node) else 0 for g in node.args[0]]
        for source in node.all_input_nodes:
            masks[node] = masks.get(node, 0) | masks.get(source, 0)
    raise InvalidJoint("the backward has no output")


def _layout(spec: Any) -> Callable[[torch.Tensor | None, dict[str, int]], torch.Tensor]:
    """Brings a tangent into the layout that the backward was traced with; None becomes zeros."""
    dtype, device = spec.dtype, spec.device
    shape_of, stride_of = _sizes(spec.shape), _sizes(spec.stride())
    is_complex = dtype.is_complex

    def fit(gradient: torch.Tensor | None, symbols: dict[str, int]) -> torch.Tensor:
        shape, stride = shape_of(symbols), stride_of(symbols)
        if gradient is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        if is_complex or gradient.is_neg():
            gradient = gradient.resolve_conj().resolve_neg()
        found = gradient.stride()
        if found == stride:
            return gradient
        if all(n == 1 or a == b for n, a, b in zip(shape, found, stride, strict=True)):
            return gradient.as_strided(shape, stride)  # they differ where nothing is stepped over
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(gradient)

    return fit


def _sizes(sizes: Sequence[Any]) -> Callable[[dict[str, int]], tuple[int, ...]]:
    if all(type(s) is int for s in sizes):
        known = tuple(sizes)
        return lambda symbols: known
    exprs = [expr_of(s) for s in sizes]
    return lambda symbols: tuple([e.evaluate(symbols) for e in exprs])


def _epilogue(metadata: ProgramMetadata) -> Callable[[tuple[Any, ...], Sequence[Any]], Sequence[Any]] | None:
    """Write-back and outputs; None if the forward's values are the program's outputs as they are."""
    plain = all(
        o.kind is OutputKind.VALUE and o.slot == i and o.same_as is None for i, o in enumerate(metadata.outputs)
    )
    writes = [_write_back(metadata, info) for info in metadata.inputs if info.mutates_data or info.mutates_metadata]
    if plain and not writes and len(metadata.outputs) == len(metadata.forward_outputs):
        return None
    symbol_reads = _symbol_reads(metadata)
    makers = [_maker(o) for o in metadata.outputs]

    def finish(flat: tuple[Any, ...], values: Sequence[Any]) -> Sequence[Any]:
        symbols = {name: read(flat) for name, read in symbol_reads} if symbol_reads else {}
        for write in writes:
            write(flat, values, symbols)
        outputs: list[Any] = []
        for make in makers:
            outputs.append(make(flat, values, outputs, symbols))
        return outputs

    return finish


def _symbol_reads(metadata: ProgramMetadata) -> list[tuple[str, Callable[[tuple[Any, ...]], int]]]:
    reads: list[tuple[str, Callable[[tuple[Any, ...]], int]]] = []
    for name, place, dim in metadata.symbol_places:
        if dim is None:
            reads.append((name, lambda flat, place=place: int(flat[place])))  # type: ignore[misc]
        else:
            reads.append((name, lambda flat, place=place, dim=dim: int(flat[place].shape[dim])))  # type: ignore[misc]
    return reads


def _version_of(t: torch.Tensor) -> int:
    """`_version`, or 0 for an inference tensor, which counts no writes."""
    return 0 if t.is_inference() else t._version


def _write_back(metadata: ProgramMetadata, info: InputInfo) -> Callable[..., None]:
    place = info.index
    slot = next((i for i, f in enumerate(metadata.forward_outputs) if f.input == place), None)
    differentiable = info.mutation_in_grad_mode
    bumps = info.version_bumps
    if info.mutates_metadata:
        shape_of, stride_of, offset_of = (
            _sizes(info.final_shape),
            _sizes(info.final_stride),
            _sizes((info.final_offset,)),
        )

    def write(flat: tuple[Any, ...], values: Sequence[Any], symbols: dict[str, int]) -> None:
        target = flat[place]
        version = _version_of(target)
        if info.mutates_metadata:
            target.as_strided_(shape_of(symbols), stride_of(symbols), offset_of(symbols)[0])
        if slot is not None:
            if differentiable:
                target.copy_(values[slot])
            elif bumps:
                target.detach().copy_(values[slot])
            else:
                target.data.copy_(values[slot])
        if bumps > 1 and not target.is_inference() and _version_of(target) != version + bumps:
            torch._C._autograd._unsafe_set_version_counter((target,), (version + bumps,))

    return write


def _maker(output: OutputInfo) -> Callable[..., Any]:
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
    replay = _replay(output.steps, output.requires_grad)
    if output.kind is OutputKind.VIEW_OF_VALUE:
        return lambda flat, values, outputs, symbols: replay(values[slot], symbols)
    return lambda flat, values, outputs, symbols: replay(flat[slot], symbols)


def _replay(steps: Sequence[ViewStep], requires_grad: bool) -> Callable[[Any, dict[str, int]], Any]:
    prepared = [
        (s.op, _arguments(s.args), _arguments(tuple(v for _, v in s.kwargs)), [k for k, _ in s.kwargs]) for s in steps
    ]

    def replay(base: Any, symbols: dict[str, int]) -> Any:
        if not requires_grad and base.requires_grad:
            with torch.no_grad():
                return run(base, symbols)
        return run(base, symbols)

    def run(value: Any, symbols: dict[str, int]) -> Any:
        for op, args, values, names in prepared:
            if op is torch.ops.aten.view_as_real.default:  # there is no such view of a lazily conjugated tensor
                value = op(value.resolve_conj())
            elif op is operator.getitem:
                value = value[args(symbols)[0]]
            else:
                value = op(value, *args(symbols), **dict(zip(names, values(symbols), strict=True)))
        return value

    return replay


def _arguments(args: tuple[Any, ...]) -> Callable[[dict[str, int]], tuple[Any, ...]]:
    if not _symbolic(args):
        return lambda symbols: args

    def evaluate(a: Any, symbols: dict[str, int]) -> Any:
        if isinstance(a, torch.SymInt):
            return expr_of(a).evaluate(symbols)
        if isinstance(a, (tuple, list)):
            return [evaluate(x, symbols) for x in a]
        return a

    return lambda symbols: tuple([evaluate(a, symbols) for a in args])


def _symbolic(a: Any) -> bool:
    return isinstance(a, torch.SymInt) or (isinstance(a, (tuple, list)) and any(map(_symbolic, a)))
