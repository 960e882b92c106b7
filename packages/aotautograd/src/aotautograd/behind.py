"""What a compiled forward leads to: backwards and their derivatives, compiled when autograd's engine asks for them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import fx

from aotautograd.compilers import Compilers, example_values
from aotautograd.double_backward import GradientsOnDemand
from aotautograd.errors import TracedOtherwise
from aotautograd.first_backward import FirstBackward
from aotautograd.kept_values import KeptValues
from aotautograd.lowering import lowered_values
from aotautograd.missing_tangents import tangents_behind
from aotautograd.other_sizes import Taken, compiled_later
from aotautograd.outlines import agree, bound, outline_of, partition_of
from aotautograd.passes import returning
from aotautograd.runtime import Behind, inference_callable, is_boxed, training_callable
from aotautograd.schemas import (
    BackwardGraph,
    BackwardOutline,
    Compiled,
    GradientInfo,
    JointGraph,
    Partition,
    Shelved,
)
from aotautograd.stages import for_turns, turns_of
from aotautograd.wrappers import WrapperProgram
from primtorch import forks
from primtorch.ambient import as_now, unset
from primtorch.environment import environment_of
from primtorch.wrappers import wraps_others

_log = logging.getLogger("aotautograd")

TraceParts: TypeAlias = Callable[
    [fx.GraphModule, Sequence[object], Compilers], tuple[JointGraph, JointGraph, Partition | None]
]
"""The front half of the pipeline: the joint graph as it was traced, as it was lowered, and its halves."""
CompileProgram: TypeAlias = Callable[
    [fx.GraphModule, Sequence[object], Compilers], tuple[JointGraph, Callable[..., Sequence[object]]]
]
"""The whole pipeline."""


def graph_of(source: JointGraph, parts: Partition) -> BackwardGraph:
    """The backward of a program. `source`: see `behind_forward`."""
    return BackwardGraph(parts.backward, tangents_behind(source))


def behind_forward(
    source: JointGraph, joint: JointGraph, parts: Partition, compilers: Compilers, compile_program: CompileProgram
) -> Behind:
    """What compiles a backward when autograd's engine asks for it, whatever the program has set by then. `source`: the
    joint graph before it was lowered, which further derivatives are taken of."""
    dump = compilers.dump

    def show_gradients(name: str, text: str) -> None:
        if dump is not None:
            dump(f"gradients_{name}", text)

    default_dtype, taken = torch.get_default_dtype(), Taken(environment_of(joint.module))

    def compile_gradients(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Sequence[object]]:
        with unset(default_dtype):
            settings = replace(compilers, dump=show_gradients if dump is not None else None, stages=(), shelf=None)
            return compile_program(module, inputs, settings)[1]

    def compile_apart(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Sequence[object]]:
        with unset(default_dtype):
            settings = replace(compilers, dump=show_gradients if dump is not None else None)
            program = WrapperProgram(module, settings.lowering, settings.dump, arriving=True)
            return compile_program(program.module, inputs, program.compilers(settings))[1]

    def compile_inference(module: fx.GraphModule, inputs: list[object]) -> Callable[..., Sequence[object]]:
        with unset(default_dtype):
            run = compiled_later(compilers.inference, taken, "values that the forward kept")(module, inputs)
        return (lambda *values: run(list(values))) if is_boxed(run) else run

    def refuse_failing(missing: Sequence[int]) -> None:
        for place, error in joint.failing.items():
            if place not in missing:
                raise type(error)(*error.args)

    first = FirstBackward(graph_of(source, parts), parts, joint.metadata, compilers, taken, default_dtype)

    def compile_backward(missing: Sequence[int]) -> tuple[Compiled, tuple[int, ...], tuple[GradientInfo, ...]]:
        refuse_failing(missing)
        return first.compile(missing)

    def kept_values() -> KeptValues:
        with unset(default_dtype):
            values_of = functools.partial(_values_of, source, compilers)
            return KeptValues(source, parts.saved_names, parts.saved_values, values_of, compile_inference)

    # Kept values have names that hold for the graph that was cut; after lowering none of them is known in the source.
    saved_names = parts.saved_names if source is joint else tuple("" for _ in parts.saved_names)
    on_demand = GradientsOnDemand(source, saved_names, compile_gradients, kept_values, taken, compile_apart)

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

    apart = None if compilers.of_wrappers else wraps_others
    return Behind(
        compile_backward, first.needs, gradients, cut, lambda: on_demand.reads, first.turns, first.begin, apart
    )


def _values_of(source: JointGraph, compilers: Compilers, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph that returns these nodes of a joint graph, or what they are where that was lowered."""
    if compilers.lowering is None:
        return returning(source.module, nodes)
    return lowered_values(source, nodes, compilers.lowering)


def of_shelved(
    found: Shelved,
    program: fx.GraphModule,
    compilers: Compilers,
    trace_parts: TraceParts,
    compile_program: CompileProgram,
) -> Callable[..., Sequence[object]]:
    """A program that was compiled before. Backwards that were not are compiled of the graph that was kept with it; it
    is traced where a call asks for derivatives of the backward."""
    outline, env = found.outline, environment_of(program)
    metadata = bound(outline.metadata, env)
    if not metadata.needs_backward:
        return inference_callable(metadata, found.forward)
    default_dtype, as_here, lock = torch.get_default_dtype(), as_now(), forks.rlock()
    parts, taken = partition_of(outline, env), Taken(env)
    turns = turns_of(metadata.gradients, compilers.stages)
    traced: list[Behind] = []

    def trace() -> Behind:
        with as_here():
            source, joint, parts = trace_parts(
                program, example_values(program), compilers
            )  # no tensor of a caller is held
            assert parts is not None
            made = behind_forward(source, joint, parts, compilers, compile_program)
        if not agree(outline_of(joint, parts, made.reads()), outline, env):
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
        lambda: outline.reads,
        turns,
        apart=wraps_others,
    )
    return training_callable(metadata, parts, found.forward, later)
