"""Programs in, compiled callables out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from aotautograd.assumptions import holds
from aotautograd.behind import behind_forward, graph_of, of_shelved
from aotautograd.compilers import Compilers, begin, example_values, show
from aotautograd.errors import TooManyVariants
from aotautograd.joint import trace_joint
from aotautograd.lowering import Lowering, drawing_operators, lower_joint
from aotautograd.maxima import mask_at_maxima
from aotautograd.other_sizes import ForSizes, Taken, sizes_given
from aotautograd.outlines import outline_of
from aotautograd.overlap import HistoryOfAlias, OverlapCheck, Rebased, bases_of, pattern, rebase
from aotautograd.partitioners import default_partition
from aotautograd.passes import keep_refusals, simplify
from aotautograd.returned import read_returned_copies
from aotautograd.runtime import inference_callable, training_callable, updates_of
from aotautograd.schemas import (
    BackwardGraph,
    Compiled,
    Compiler,
    Dump,
    JointGraph,
    Opset,
    Outline,
    Partition,
    Partitioner,
    Shelf,
)
from aotautograd.wrappers import of_wrappers
from primtorch.builder import nowhere
from primtorch.environment import environment_of
from primtorch.printing import made_by
from primtorch.schemas import UPDATES

MOST_VARIANTS = 32  # traces of one program for different numbers taken out of its tensors

__all__ = ["aot_function", "aot_module", "partition", "simplify", "trace_joint"]


def aot_module(
    program: fx.GraphModule | Callable[..., object],
    example_inputs: Sequence[object],
    *,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    inference_compiler: Compiler | None = None,
    partitioner: Partitioner = default_partition,
    decompositions: Opset | None = None,
    dump: Dump | None = None,
    distinct_inputs: bool = False,
    eager_random: bool = False,
    preserve: Sequence[OpOverload] = (),
    walks_windows: Callable[[torch.device], bool] = nowhere,
    stages: Sequence[Sequence[int]] = (),
    shelf: Shelf | None = None,
) -> Callable[..., Sequence[object]]:
    """Compiles a program of flat inputs and a flat sequence of outputs, with its backward.

    The result takes and gives what the program does, for inputs with the metadata of the examples (what differs is for
    the caller to guard). A program that writes to inputs is compiled again for calls in which a written input shares
    memory with another.

    Args:
        example_inputs: tensors (real or fake), numbers, SymInts.
        fw_compiler, bw_compiler, inference_compiler: `(graph, examples) -> callable` for functional graphs, whose
            placeholders are SymInts first, then tensors; where one is not given, it is the first (and may be
            a `BeginningCompiler`).
        decompositions: the set of operators of these graphs; None: ATen's as they were called.
        preserve: operators that `decompositions` leaves whole.
        walks_windows: of devices, see `primtorch.lower`.
        dump: called with (file name, text) for each stage.
        distinct_inputs: the caller sees to it that no written input shares memory, which saves the check at each call.
        eager_random: random numbers are drawn by ATen's operators, as in eager. Prims have a generator of their own:
            for the same seed the numbers are the same in each run, but not eager's.
        stages: groups of inputs. Autograd gets the gradients of one group before those of the next are computed, each
            by a graph of its own; within a group they come in its order, and those of other inputs before the last.
        shelf: where what is compiled is kept for other processes, and found again. It is for a graph whose placeholders
            have the examples' metadata, without wrappers, with `distinct_inputs` and at most one stage.

    Raises what `trace_joint` does; what a compiler raises passes through.
    """
    drawn = drawing_operators(decompositions) if decompositions is not None and eager_random else ()
    lowering = Lowering(decompositions, (*preserve, *drawn), walks_windows) if decompositions is not None else None
    compilers = Compilers(
        fw_compiler,
        bw_compiler or fw_compiler,
        inference_compiler or fw_compiler,
        partitioner,
        lowering,
        dump,
        tuple(map(tuple, stages)),
        shelf,
    )
    found = shelf.find() if shelf is not None else None
    if found is not None:
        assert isinstance(program, fx.GraphModule)
        return of_shelved(found, program, compilers, _traced, _compile)
    apart = of_wrappers(program, lowering, dump)
    if apart is not None:  # capture lets no graph write to a wrapper or to what it wraps
        return _compile(apart.module, example_inputs, apart.compilers(compilers))[1]
    joint, compiled = _compile(program, example_inputs, compilers)
    written = [i.index for i in joint.metadata.inputs if i.mutates_data]
    if distinct_inputs or not written or len(joint.metadata.inputs) == 1:
        return compiled
    tensors = [i.index for i in joint.metadata.inputs]
    overlaps = OverlapCheck(tensors, written)
    variants: dict[object, tuple[Rebased, Callable[..., Sequence[object]]]] = {}

    def call(*flat: object) -> Sequence[object]:
        if not overlaps(flat):
            return compiled(*flat)
        key = (pattern(flat, tensors), torch.is_grad_enabled(), _autocast_state())
        found = variants.get(key)
        if found is None:
            found = variants[key] = _compile_rebased(program, flat, tensors, compilers)
        rebased, run = found
        return rebased.finish(flat, run(*bases_of(rebased, flat)))

    return call


def _compile_rebased(
    program: fx.GraphModule | Callable[..., object],
    flat: Sequence[object],
    tensors: Sequence[int],
    compilers: Compilers,
) -> tuple[Rebased, Callable[..., Sequence[object]]]:
    """The program for inputs that share memory. Which of them get a history is known when it has been traced."""
    given_history: frozenset[int] = frozenset()
    while True:
        rebased, inputs = rebase(program, flat, tensors, given_history)
        try:
            return rebased, _compile(rebased, inputs, replace(compilers, stages=(), shelf=None))[1]
        except HistoryOfAlias as error:
            if error.place in given_history:
                raise
            given_history |= {error.place}


def _compile(
    program: fx.GraphModule | Callable[..., object] | Rebased, example_inputs: Sequence[object], compilers: Compilers
) -> tuple[JointGraph, Callable[..., Sequence[object]]]:
    """The program for all inputs with the examples' metadata, whatever numbers it takes out of them."""
    joint, compiled = _compile_trace(program, example_inputs, compilers)
    if joint.guard is None:
        return joint, compiled
    graph = program if isinstance(program, fx.GraphModule) else None
    taken = Taken(environment_of(graph) if graph is not None else None)
    variants: list[tuple[JointGraph, ForSizes[Callable[..., Sequence[object]]]]] = [(joint, ForSizes(Taken(None), ""))]
    variants[0][1]({}, lambda: compiled)

    def call(*flat: object) -> Sequence[object]:
        sizes = sizes_given(graph, flat) if graph is not None and taken.env is not None else {}
        for traced, later in variants:
            if holds(traced, flat):
                return later(sizes, lambda: _compile_trace(program, flat, compilers)[1])(*flat)
        if len(variants) >= MOST_VARIANTS:
            raise TooManyVariants(joint.metadata.assumptions)
        for_sizes: ForSizes[Callable[..., Sequence[object]]] = ForSizes(taken, "the program for other numbers")
        found: list[JointGraph] = []

        def trace() -> Callable[..., Sequence[object]]:
            traced, run = _compile_trace(program, flat, compilers)
            found.append(traced)
            return run

        run = for_sizes(sizes, trace)
        variants.append((found[0], for_sizes))
        return run(*flat)

    return joint, call


def _compile_trace(
    program: fx.GraphModule | Callable[..., object] | Rebased, example_inputs: Sequence[object], compilers: Compilers
) -> tuple[JointGraph, Callable[..., Sequence[object]]]:
    """The pipeline: trace, clean, lower, cut, compile, wrap."""
    source, joint, parts = _traced(program, example_inputs, compilers)
    if parts is None:
        module = _LazyGraphModule(joint.module, joint.module.graph, "Inference")
        module.meta[UPDATES] = updates_of(joint.metadata)
        run = compilers.inference(module, example_values(module))
        if compilers.shelf is not None:
            _keep(compilers.shelf, outline_of(joint, None, frozenset()), None, run)
        return joint, inference_callable(joint.metadata, run)
    parts.forward.meta[UPDATES] = updates_of(joint.metadata)
    begun = begin(compilers.forward, parts.forward)
    behind = behind_forward(source, joint, parts, compilers, _compile)
    if begun.apart and not joint.failing:
        behind.begin()
    forward = begun()
    if compilers.shelf is not None:
        _keep(compilers.shelf, outline_of(joint, parts, behind.reads()), graph_of(source, parts), forward)
    return joint, training_callable(joint.metadata, parts, forward, behind)


def _keep(shelf: Shelf, outline: Outline | None, graph: BackwardGraph | None, run: Compiled) -> None:
    if outline is not None:
        shelf.keep(outline, graph, run)


def _traced(
    program: fx.GraphModule | Callable[..., object] | Rebased, example_inputs: Sequence[object], compilers: Compilers
) -> tuple[JointGraph, JointGraph, Partition | None]:
    """The joint graph of ATen operators, what lowering makes of it, and the two halves, where there is a backward."""
    dump = compilers.dump
    joint = trace_joint(program, example_inputs, compilers.partitioner)
    show(dump, "joint_traced", joint.module, joint.metadata.__str__)
    keep_refusals(joint.module.graph)
    source = joint = simplify(joint)
    if compilers.lowering is not None:
        if compilers.lowering.opset == "prims":  # elsewhere the backward of a pool reads what was pooled
            mask_at_maxima(joint)
        joint = lower_joint(joint, compilers.lowering, dump)
        if compilers.lowering.opset == "prims":
            read_returned_copies(joint)
        joint = simplify(joint)
    show(dump, "joint", joint.module)
    if not joint.metadata.needs_backward:
        return source, joint, None
    parts = partition(joint, compilers.partitioner)
    show(dump, "forward", parts.forward, parts.table)
    show(dump, "backward", parts.backward)
    return source, joint, parts


def partition(joint: JointGraph, strategy: Partitioner = default_partition) -> Partition:
    """The forward and the backward of a joint graph, as the strategy cuts it; the joint graph stays as it is."""
    parts = strategy(joint)
    for module in parts:
        made_by(module, getattr(strategy, "__name__", type(strategy).__name__), joint.module)
    return parts


def aot_function(
    function: Callable[..., object],
    *,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    inference_compiler: Compiler | None = None,
    partitioner: Partitioner = default_partition,
    decompositions: Opset | None = None,
    dump: Dump | None = None,
    eager_random: bool = False,
    preserve: Sequence[OpOverload] = (),
) -> Callable[..., object]:
    """A compiled form of a function of pytrees. Tensors anywhere in the arguments are inputs; everything else is
    constant.

    It is traced once for each structure of arguments, metadata of tensors, and state of grad mode and autocast. The
    keywords are those of `aot_module`, and so are the errors, which a call raises.
    """
    cache: dict[object, tuple[Callable[..., Sequence[object]], list[pytree.TreeSpec]]] = {}

    def call(*args: object, **kwargs: object) -> object:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        key = (structure, tuple(map(_key, leaves)), torch.is_grad_enabled(), _autocast_state())
        found = cache.get(key)
        if found is None:
            results: list[pytree.TreeSpec] = []
            flat = _flat_program(function, structure, constants, leaves, results)
            compiled = aot_module(
                flat,
                tensors,
                fw_compiler=fw_compiler,
                bw_compiler=bw_compiler,
                inference_compiler=inference_compiler,
                partitioner=partitioner,
                decompositions=decompositions,
                dump=dump,
                eager_random=eager_random,
                preserve=preserve,
            )
            found = cache[key] = (compiled, results)
        compiled, results = found
        return pytree.tree_unflatten(list(compiled(*tensors)), results[0])

    return call


def _flat_program(
    function: Callable[..., object],
    structure: pytree.TreeSpec,
    constants: list[object],
    leaves: list[object],
    results: list[pytree.TreeSpec],
) -> Callable[..., list[object]]:
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def program(*tensors: torch.Tensor) -> list[object]:
        filled = list(constants)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        args, kwargs = pytree.tree_unflatten(filled, structure)
        outputs, spec = pytree.tree_flatten(function(*args, **kwargs))
        results[:] = [spec]
        return outputs

    return program


def _key(leaf: object) -> object:
    if isinstance(leaf, slice):
        return (slice, leaf.start, leaf.stop, leaf.step)
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf), leaf)
    return (type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_leaf)


def _autocast_state() -> object:
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
