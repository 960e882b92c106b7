"""A backward for calls in which some outputs were not used: autograd brings no gradient for those.

Autograd runs no node that no gradient reaches. In a graph, what only missing tangents lead to is left out in the same
way, so that it costs neither time nor memory; the input gradients among it are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from aotautograd.gradients import arrange
from aotautograd.passes import eliminate_dead_code, output_node, output_values, same_layout
from aotautograd.schemas import GradientInfo
from primtorch import prims
from primtorch.printing import made_by

# What autograd adds gradients of one value with.
_ACCUMULATES = frozenset({torch.ops.aten.add.Tensor, prims.add})


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """A backward without the placeholders of missing tangents, except `zeros`: it takes those as zeros."""

    module: fx.GraphModule
    zeros: tuple[int, ...]
    made_gradients: tuple[GradientInfo, ...]  # of what it returns


def without_tangents(
    module: fx.GraphModule, tangents: Sequence[str], missing: Sequence[int], made: Sequence[GradientInfo]
) -> BackwardVariant:
    """The part of a backward that the other tangents lead to.

    `tangents`: names of the placeholders of all; `made`: how the gradients are made of what the whole backward returns.
    """
    if not missing:
        return BackwardVariant(module, (), tuple(made))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, env)
    graph.output(output)
    output_node(graph).meta.update(output_node(module.graph).meta)
    names = {tangents[i]: i for i in missing}
    absent = _led_to_only_by(graph, frozenset(tangents), frozenset(names))
    for node in list(graph.nodes):
        if node.op == "output":
            gradients: Any = node.args[0]
            node.args = (tuple(None if g in absent else g for g in gradients),)
        elif node not in absent and node.target in _ACCUMULATES and not node.kwargs and len(node.args) == 2:
            present = [a for a in node.args if a not in absent]
            if len(present) == 1 and isinstance(present[0], fx.Node) and same_layout(present[0], node):
                node.replace_all_uses_with(present[0])
    arranged = _arranged_anew(graph, {tangents[i]: i for i in range(len(tangents))}, made)
    eliminate_dead_code(graph)
    zeros: list[int] = []
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in names:
            if node.users:
                zeros.append(names[node.name])
            else:
                graph.erase_node(node)
    variant = fx.GraphModule(module, graph, module.__class__.__name__)
    made_by(variant, "without_tangents", module)
    return BackwardVariant(variant, tuple(zeros), arranged)


def _arranged_anew(
    graph: fx.Graph, tangents: Mapping[str, int], made: Sequence[GradientInfo]
) -> tuple[GradientInfo, ...]:
    """A sum of which one part is missing is the other part, which may be a tangent, or another result's memory."""
    output = output_node(graph)
    results, again = arrange(
        output_values(graph), {n: tangents[n.name] for n in graph.nodes if n.op == "placeholder" and n.name in tangents}
    )
    output.args = (results,)
    return tuple(
        info
        if info.source == "tangent"
        else replace(
            again[info.slot], steps=again[info.slot].steps + info.steps, cloned=again[info.slot].cloned or info.cloned
        )
        for info in made
    )


def _led_to_only_by(graph: fx.Graph, tangents: frozenset[str], missing: frozenset[str]) -> set[fx.Node]:
    """Nodes that are computed from missing tangents, and from no other one."""
    reached: set[fx.Node] = set()  # by any tangent
    present: set[fx.Node] = set()  # by one that comes
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in tangents:
            reached.add(node)
            if node.name not in missing:
                present.add(node)
        elif node.op != "output":
            sources = node.all_input_nodes
            if any(s in reached for s in sources):
                reached.add(node)
            if any(s in present for s in sources):
                present.add(node)
    return reached - present
