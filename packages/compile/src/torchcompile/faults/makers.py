"""The stages, run apart: ahead-of-time autograd with compilers that stop where one ends, or see what it gets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

import torchinductor
from aotautograd import aot_module, run_graph
from aotautograd.schemas import Opset, Partitioner
from primtorch.interpret import interpret
from primtorch.lower import lower
from torchcompile.faults.judge import results
from torchcompile.faults.schemas import Compile, Makers, Named, Program, Run, Stage
from torchcompile.passes import attention_masks, plain_graph
from torchinductor.program import Value

Compiler = Callable[[fx.GraphModule, list[Value]], Run]


@dataclass(frozen=True)
class StageSettings:
    """What the stages before the kernels are told."""

    partitioner: Partitioner
    preserve: Sequence[OpOverload] = ()
    eager_random: bool = False


def makers(settings: StageSettings, kernels: Compile | None = None, program: Compile | None = None) -> Makers:
    """The stages of a back end.

    Args:
        kernels: compiles a captured graph by all stages; None if the back end ends with the joint graph.
        program: compiles a graph of prims.
    """

    def with_compiler(gm: fx.GraphModule, inputs: list[Value], opset: Opset | None, compiler: Compiler) -> Run:
        return aot_module(
            attention_masks(plain_graph(gm, with_facts=True)),
            inputs,
            fw_compiler=compiler,
            partitioner=settings.partitioner,
            decompositions=opset,
            distinct_inputs=True,  # capture guards it
            eager_random=settings.eager_random,
            preserve=settings.preserve,
            walks_windows=torchinductor.walks_windows,
        )

    def joint(gm: fx.GraphModule, inputs: list[Value]) -> Run:
        return with_compiler(gm, inputs, None, run_graph)

    def prims(gm: fx.GraphModule, inputs: list[Value]) -> Run:
        return with_compiler(gm, inputs, "prims", lambda graph, _: interpret(graph))

    def given(stage: Stage, of: Program) -> Sequence[Program]:
        """Forward and backward as they come to the stage, with what a call of `of` runs them on."""
        seen: list[Program] = []

        def look(graph: fx.GraphModule, examples: list[Value]) -> Run:
            return _seeing(graph, seen)

        run = with_compiler(of.module, list(of.inputs), "prims" if stage == "kernels" else None, look)
        results(run, of.inputs, wide=False)
        return seen

    def lowered(gm: fx.GraphModule, inputs: list[Value]) -> Run:
        return interpret(lower(gm, "prims", tuple(settings.preserve), walks_windows=torchinductor.walks_windows))

    if kernels is None or program is None:
        return Makers({"joint": joint})
    return Makers({"joint": joint, "prims": prims, "kernels": kernels}, given, {"prims": lowered, "kernels": program})


def makers_of(backend: Compile, name: str | None = None) -> Makers:
    """What a back end of the caller's own makes of a captured graph, as one stage.

    Args:
        name: by which any program has it: one of torch's.
    """
    module, qualname = (getattr(backend, part, None) or "" for part in ("__module__", "__qualname__"))
    if name is not None:
        named: Named | None = Named("", repr(name))
    elif getattr(sys.modules.get(module), qualname, None) is backend and module != "__main__":
        named = Named(f"from {module} import {qualname}", qualname)
    else:
        named = None

    def run(gm: fx.GraphModule, inputs: list[Value]) -> Run:
        if not any(node.op.startswith("call") for node in gm.graph.nodes):  # capture gives no back end such a graph
            return gm.forward
        return backend(plain_graph(gm, with_facts=True), inputs)

    return Makers({"backend": run}, named=named)


def _seeing(graph: fx.GraphModule, seen: list[Program]) -> Run:
    """Runs a graph as it is, and keeps it with what it was run on."""

    def run(*values: Value) -> Sequence[object]:
        kept = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)
        seen.append(Program(graph, kept, described=True))
        found: Sequence[object] = graph.forward(*values)
        return found

    return run
