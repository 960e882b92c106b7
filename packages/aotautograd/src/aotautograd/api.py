"""Programs in, compiled callables out."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from aotautograd.assumptions import holds
from aotautograd.compilers import Compilers, begin, example_values, show
from aotautograd.double_backward import GradientsOnDemand
from aotautograd.errors import TooManyVariants, TracedOtherwise
from aotautograd.first_backward import FirstBackward
from aotautograd.joint import trace_joint
from aotautograd.kept_values import KeptValues
from aotautograd.lowering import Lowering, drawing_operators, lower_joint, lowered_values
from aotautograd.missing_tangents import tangents_behind
from aotautograd.other_sizes import ForSizes, Taken, compiled_later, sizes_given
from aotautograd.outlines import agree, bound, outline_of, partition_of
from aotautograd.overlap import HistoryOfAlias, OverlapCheck, Rebased, bases_of, pattern, rebase
from aotautograd.partitioners import default_partition
from aotautograd.passes import keep_refusals, returning, simplify
from aotautograd.runtime import inference_callable, is_boxed, training_callable, updates_of
from aotautograd.schemas import (
    BackwardGraph,
    BackwardOutline,
    Compiled,
    Compiler,
    Dump,
    GradientInfo,
    JointGraph,
    Opset,
    Outline,
    Partition,
    Partitioner,
    ProgramMetadata,
    Shelf,
    Shelved,
)
from aotautograd.stages import for_turns, turns_of
from aotautograd.wrappers import WrapperProgram, of_wrappers
from primtorch.ambient import as_now, unset
from primtorch.builder import nowhere
from primtorch.environment import environment_of
from primtorch.printing import made_by
from primtorch.schemas import UPDATES

MOST_VARIANTS = 32  # traces of one program for different numbers taken out of its tensors

__all__ = ["aot_function", "aot_module", "partition", "simplify", "trace_joint"]

_log = logging.getLogger("aotautograd")


@dataclass(frozen=True, slots=True)
class Behind:
    """What a compiled forward leads to: see `training_callable`. `begin`: begins with the backward that is likely."""

    compile_backward: Callable[[Sequence[int]], tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]]
    needs: Callable[[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int], bool]]
    gradients: Callable[..., tuple[Sequence[object], tuple[GradientInfo, ...]]]
    cut: Callable[..., object]
    reads: frozenset[int]
    turns: tuple[tuple[int, int], ...]
    begin: Callable[[], None] = lambda: None


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
            placeholders are SymInts first, then tensors; where one is not given, it is the first. Compilers that are
            `BeginningCompiler`s, and leave a forward to other processes, are asked for the backward meanwhile.
        decompositions: the set of operators of these graphs; None: ATen's as they were called.
        preserve: operators that `decompositions` leaves whole.
        walks_windows: of devices, see `primtorch.lower`.
        dump: called with (file name, text) for each stage.
        distinct_inputs: the caller sees to it that no written input shares memory, which saves the check at each call.
        eager_random: random numbers are drawn by ATen's operators, as in eager. Prims have a generator of their own:
            for the same seed the numbers are the same in each run, but not eager's.
        stages: groups of inputs. Autograd gets the gradients of one group before those of the next are computed, each
            by a graph of its own; within a group they come in its order, and those of inputs of no group come last.
        shelf: where what is compiled is kept for other processes, and found again. It is for a graph whose placeholders
            have the examples' metadata, without wrappers, with `distinct_inputs` and at most one stage.

    Raises:
        AotAutogradError, DataDependentValue: see `trace_joint`. What a compiler raises passes through.
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
        return _from_shelf(found, program, compilers)
    apart = of_wrappers(program, lowering, dump)
    if apart is not None:  # capture lets no graph write to a wrapper or to what it wraps
        return _compile(apart.module, example_inputs, _over_wrappers(apart, compilers))[1]
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


def _over_wrappers(program: WrapperProgram, compilers: Compilers) -> Compilers:
    """Compilers of graphs whose values may be wrappers: each takes its graph apart, and lowers what comes of it."""
    forward, backward, inference = map(program.compiler, (compilers.forward, compilers.backward, compilers.inference))
    halves = replace(compilers, forward=forward, backward=backward, inference=inference)
    return replace(halves, lowering=None, stages=(), shelf=None)


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
    behind = _behind(source, joint, parts, compilers)
    if begun.apart and not joint.failing:
        behind.begin()
    forward = begun()
    if compilers.shelf is not None:
        _keep(compilers.shelf, outline_of(joint, parts, behind.reads), _graph_of(source, parts), forward)
    return joint, _with_backward(joint.metadata, parts, forward, behind)


def _keep(shelf: Shelf, outline: Outline | None, graph: BackwardGraph | None, run: Compiled) -> None:
    if outline is not None:
        shelf.keep(outline, graph, run)


def _graph_of(source: JointGraph, parts: Partition) -> BackwardGraph:
    """The backward of a program. `source`: see `_behind`."""
    return BackwardGraph(parts.backward, tangents_behind(source))


def _from_shelf(found: Shelved, program: fx.GraphModule, compilers: Compilers) -> Callable[..., Sequence[object]]:
    """A program that was compiled before. Backwards that were not are compiled of the graph that was kept with it; it
    is traced where a call asks for derivatives of the backward."""
    outline, env = found.outline, environment_of(program)
    metadata = bound(outline.metadata, env)
    if not metadata.needs_backward:
        return inference_callable(metadata, found.forward)
    default_dtype, as_here, lock = torch.get_default_dtype(), as_now(), threading.RLock()
    parts, taken = partition_of(outline, env), Taken(env)
    turns = turns_of(metadata.gradients, compilers.stages)
    traced: list[Behind] = []

    def trace() -> Behind:
        with as_here():
            source, joint, parts = _traced(program, example_values(program), compilers)  # no tensor of a caller is held
            assert parts is not None
            made = _behind(source, joint, parts, compilers)
        if not agree(outline_of(joint, parts, made.reads), outline, env):
            raise TracedOtherwise
        return made

    def behind(what: str) -> Behind:
        with lock:
            if not traced:
                _log.debug("a program that was found compiled is traced for %s", what)  # elsewhere it is before
                # In a thread of its own: in this one autograd's engine runs, which is what a trace tells the forward
                # from the backward by.
                with ThreadPoolExecutor(1) as apart:
                    traced.append(apart.submit(trace).result())
            return traced[0]

    @functools.cache
    def others() -> FirstBackward:
        """For missing tangents that were not met when it was compiled."""
        with lock, unset(default_dtype):
            graph = found.graph(env)
        cut = replace(parts, backward=graph.module)
        return FirstBackward(graph, cut, metadata, compilers, taken, default_dtype)

    def compile_backward(missing: Sequence[int]) -> tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]:
        kept = backward(tuple(missing))
        if kept is None:
            return others().compile(missing)
        return kept[1], kept[0].zeros, for_turns(bound(kept[0].made_gradients, env), turns)

    def needs(missing: Sequence[int], earlier: Sequence[int]) -> tuple[Sequence[int], Sequence[int], bool]:
        kept = None if earlier else backward(tuple(missing))
        return others().needs(missing, earlier) if kept is None else kept[0].needs

    @functools.cache
    def backward(missing: tuple[int, ...]) -> tuple[BackwardOutline, Compiled] | None:
        with unset(default_dtype):
            return found.backward(missing)

    later = Behind(
        compile_backward,
        needs,
        lambda *call: behind("a derivative of the backward").gradients(*call),
        lambda *call: behind("the gradient of a result that others are computed from").cut(*call),
        outline.reads,
        turns,
    )
    return _with_backward(metadata, parts, found.forward, later)


def _traced(
    program: fx.GraphModule | Callable[..., object] | Rebased, example_inputs: Sequence[object], compilers: Compilers
) -> tuple[JointGraph, JointGraph, Partition | None]:
    """The joint graph of ATen operators, what lowering makes of it, and the two halves, where there is a backward."""
    dump = compilers.dump
    joint = trace_joint(program, example_inputs, compilers.partitioner)
    show(dump, "joint_traced", joint.module, str(joint.metadata))
    keep_refusals(joint.module.graph)
    source = joint = simplify(joint)
    if compilers.lowering is not None:
        joint = simplify(lower_joint(joint, compilers.lowering, dump))
    show(dump, "joint", joint.module)
    if not joint.metadata.needs_backward:
        return source, joint, None
    parts = partition(joint, compilers.partitioner)
    show(dump, "forward", parts.forward, parts.table())
    show(dump, "backward", parts.backward)
    return source, joint, parts


def _with_backward(
    metadata: ProgramMetadata, parts: Partition, forward: Compiled, behind: Behind
) -> Callable[..., Sequence[object]]:
    return training_callable(
        metadata,
        parts,
        forward,
        behind.compile_backward,
        behind.needs,
        behind.gradients,
        behind.reads,
        behind.turns,
        behind.cut,
    )


def _behind(source: JointGraph, joint: JointGraph, parts: Partition, compilers: Compilers) -> Behind:
    """What compiles a backward when autograd's engine asks for it, whatever the program has set by then. `source`: the
    joint graph before it was lowered, which further derivatives are taken of."""
    dump = compilers.dump

    def show_gradients(name: str, text: str) -> None:
        if dump is not None:
            dump(f"gradients_{name}", text)

    default_dtype, taken = torch.get_default_dtype(), Taken(environment_of(joint.module))

    def compile_program(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Sequence[object]]:
        with unset(default_dtype):
            settings = replace(compilers, dump=show_gradients if dump is not None else None, stages=(), shelf=None)
            return _compile(module, inputs, settings)[1]

    def compile_inference(module: fx.GraphModule, inputs: list[object]) -> Callable[..., Sequence[object]]:
        with unset(default_dtype):
            run = compiled_later(compilers.inference, taken, "values that the forward kept")(module, inputs)
        return (lambda *values: run(list(values))) if is_boxed(run) else run

    def refuse_failing(missing: Sequence[int]) -> None:
        for place, error in joint.failing.items():
            if place not in missing:
                raise type(error)(*error.args)

    first = FirstBackward(_graph_of(source, parts), parts, joint.metadata, compilers, taken, default_dtype)

    def compile_backward(missing: Sequence[int]) -> tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]:
        refuse_failing(missing)
        return first.compile(missing)

    def kept_values() -> KeptValues:
        with unset(default_dtype):
            values_of = functools.partial(_values_of, source, compilers)
            return KeptValues(source, parts.saved_names, parts.saved_values, values_of, compile_inference)

    # Kept values have names that hold for the graph that was cut; after lowering none of them is known in the source.
    saved_names = parts.saved_names if source is joint else tuple("" for _ in parts.saved_names)
    on_demand = GradientsOnDemand(source, saved_names, compile_program, kept_values, taken)

    def gradients(
        inputs: Sequence[object], saved: Sequence[object], tangents: Sequence[object], missing: Sequence[int]
    ) -> tuple[Sequence[object], tuple[GradientInfo, ...]]:
        refuse_failing(missing)
        return on_demand(inputs, saved, tangents, missing)

    def cut(
        inputs: Sequence[object],
        saved: Sequence[object],
        tangents: Sequence[object],
        missing: Sequence[int],
        observed: Sequence[int],
        inner: int | None,
    ) -> object:
        refuse_failing(missing)
        return on_demand.cut(inputs, saved, tangents, missing, tuple(observed), inner)

    return Behind(compile_backward, first.needs, gradients, cut, on_demand.reads, first.turns, first.begin)


def _values_of(source: JointGraph, compilers: Compilers, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph that returns these nodes of a joint graph, or what they are where that was lowered."""
    if compilers.lowering is None:
        return returning(source.module, nodes)
    return lowered_values(source, nodes, compilers.lowering)


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
