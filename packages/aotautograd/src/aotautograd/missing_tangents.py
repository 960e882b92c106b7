"""A backward for calls in which some outputs were not used: autograd brings no gradient for those.

Autograd runs no node that no gradient reaches. In a graph, what only missing tangents lead to is left out in the same
way, so that it costs neither time nor memory; the input gradients among it are None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument

from aotautograd.inputs import dense_spec
from aotautograd.passes import eliminate_dead_code, output_node, output_values, same_layout
from aotautograd.schemas import GradientInfo, JointGraph, Partition, ProgramMetadata
from primtorch import prims
from primtorch.frozen import record
from primtorch.memory import memory_of
from primtorch.nodes import copy_nodes
from primtorch.printing import made_by

aten = torch.ops.aten

# What autograd adds gradients of one value with.
_ACCUMULATES = frozenset({torch.ops.aten.add.Tensor, prims.add})


@record
class BackwardVariant:
    """A backward without the placeholders of missing tangents and of saved tensors that only those lead to.

    It takes the missing tangents `zeros` as zeros.
    """

    module: fx.GraphModule
    zeros: tuple[int, ...]
    made_gradients: tuple[GradientInfo, ...]  # of what it returns
    reads: tuple[int, ...] = ()  # saved tensors, by their numbers


def tangents_behind(joint: JointGraph) -> tuple[frozenset[int], ...]:
    """For each result of the backward, the tangents that lead to it: at least one of them has to come. A gradient
    that is zeros, whatever the tangents are, is there where autograd comes to its input."""
    names = [n.name for n in joint.module.graph.nodes if n.op == "placeholder"][joint.metadata.num_placeholders :]
    led_to = _led_to_by(joint.module.graph, names)
    results = output_values(joint.module.graph)[joint.num_forward_outputs :]
    found = [led_to.get(result, _NOTHING) if isinstance(result, fx.Node) else _NOTHING for result in results]
    led = (*map(frozenset, joint.metadata.led_to_by), *[frozenset[int]()] * len(results))
    return tuple(tangents or of_leaf for tangents, of_leaf in zip(found, led, strict=False))


class BackwardVariants:
    """The variants of a partition's backward, each made when it is asked for first.

    Args:
        behind: for each result, the tangents that lead to it, as the joint graph of ATen's operators says. After
            lowering, a gradient of zeros depends on no tangent.
    """

    def __init__(self, partition: Partition, metadata: ProgramMetadata, behind: Sequence[frozenset[int]]) -> None:
        self.partition = partition
        self.made = metadata.made_gradients
        self.refused_behind = metadata.refused_behind
        self.behind = tuple(behind)
        self.saved = partition.saved_placeholders
        self.variants: dict[tuple[int, ...], BackwardVariant] = {}
        self.led_to: Mapping[fx.Node, frozenset[int]] | None = None

    def __call__(self, missing: Sequence[int]) -> BackwardVariant:
        key, parts = tuple(missing), self.partition
        if key not in self.variants:
            none = frozenset(i for i, tangents in enumerate(self.behind) if tangents.issubset(key))
            names = parts.tangent_names
            self.variants[key] = without_tangents(parts.backward, names, key, self.made, self.saved, none)
        return self.variants[key]

    def needs(self, missing: Sequence[int], earlier: Sequence[int]) -> tuple[Sequence[int], Sequence[int], bool]:
        """The saved tensors that a variant reads, those to keep behind it, and whether it cannot run.

        Each of autograd's nodes holds what it reads, and frees it when a backward has passed. So does the graph: what
        the missing tangents lead to is kept where neither this backward nor `earlier` ones passed, and where one of
        those has passed nothing can be read again. Some of autograd's nodes keep what a graph has as a constant: what
        they refuse is refused.
        """
        if self.led_to is None:
            self.led_to = _led_to_by(self.partition.backward.graph, self.partition.tangent_names)
        gone, passed = frozenset(missing), frozenset(earlier)
        present = frozenset(range(len(self.partition.tangent_names))) - gone
        keeps: tuple[int, ...] = ()
        if gone:
            only = gone - passed
            keeps = self._saved_for({node for node, tangents in self.led_to.items() if tangents <= only})
        refused = any(self.refused_behind[i].intersection(earlier) for i in present)
        if passed and not refused:
            again = {node for node, tangents in self.led_to.items() if tangents & present and tangents & passed}
            refused = bool(self._saved_for(again))
        return self(missing).reads, keeps, refused

    def _saved_for(self, nodes: Set[fx.Node]) -> tuple[int, ...]:
        """The saved tensors that nodes of the backward read, also where it is to compute again what they read."""
        led_to = self.led_to or {}
        found: set[fx.Node] = set()
        work = list(nodes)
        while work:
            node = work.pop()
            if node not in found and (node not in led_to or node in nodes):
                found.add(node)
                work.extend(node.all_input_nodes)
        names = {node.name for node in found}
        return tuple(i for i, name in enumerate(self.saved) if name in names)


def without_tangents(
    module: fx.GraphModule,
    tangents: Sequence[str],
    missing: Sequence[int],
    made: Sequence[GradientInfo],
    saved: Sequence[str] = (),
    none: Set[int] = frozenset(),
) -> BackwardVariant:
    """The part of a backward that the other tangents lead to.

    `tangents`, `saved`: names of the placeholders of all; `made`: how the gradients are made of what the whole backward
    returns; `none`: results that are None, beside those that only missing tangents lead to in this graph.
    """
    if not missing:
        return BackwardVariant(module, (), tuple(made), tuple(range(len(saved))))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = copy_nodes(graph, module.graph, env)
    graph.output(output)
    output_node(graph).meta.update(output_node(module.graph).meta)
    names = {tangents[i]: i for i in missing}
    absent = _led_to_only_by(graph, frozenset(tangents), frozenset(names))
    for node in list(graph.nodes):
        if node.op == "output":
            gradients = enumerate(output_values(graph))
            node.args = (tuple(None if g in absent or i in none else g for i, g in gradients),)
        elif node not in absent and node.target in _ACCUMULATES and not node.kwargs and len(node.args) == 2:
            present = [a for a in node.args if a not in absent]
            if len(present) == 1 and isinstance(present[0], fx.Node):
                laid_out = laid_out_as(graph, node, present[0])
                if laid_out is not None:
                    node.replace_all_uses_with(laid_out)
    _own_memory(graph, set(tangents))
    eliminate_dead_code(graph)
    unread = {*names, *saved}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in unread and not node.users:
            graph.erase_node(node)
    left = {node.name for node in graph.nodes if node.op == "placeholder"}
    variant = _LazyGraphModule(module, graph, module.__class__.__name__)
    made_by(variant, "without_tangents", module)
    return BackwardVariant(
        variant,
        tuple(i for name, i in names.items() if name in left),
        tuple(map(_never_kept, made)),
        tuple(i for i, name in enumerate(saved) if name in left),
    )


def _own_memory(graph: fx.Graph, tangents: Set[str]) -> None:
    """Copies each result that is a tangent's memory, or an earlier result's.

    A sum of which one part is missing is the other part. Where autograd adds, it hands that part on; where a derivative
    does, it adds zeros. So it is not known whether the gradients share memory then, and they must not where
    autograd's do not.
    """
    output = output_node(graph)
    owned = {n for n in graph.nodes if n.op == "placeholder" and n.name in tangents}
    results: list[Argument] = []
    for result in output_values(graph):
        if isinstance(result, fx.Node):
            if memory_of(result) in owned:
                with graph.inserting_before(output):
                    copy = graph.call_function(aten.clone.default, (result,))
                copy.meta.update(result.meta, val=dense_spec(result.meta["val"]))
                result = copy
            owned.add(memory_of(result))
        results.append(result)
    output.args = (tuple(results),)


def _never_kept(info: GradientInfo) -> GradientInfo:
    """A gradient in the memory of others, whose copy becomes `.grad`.

    Which of several views autograd keeps, and which it copies, depends on the order in which it runs. That was seen for
    all tangents, and may differ without some.
    """
    return replace(info, cloned=info.cloned or bool(info.steps))


def laid_out_as(graph: fx.Graph, total: fx.Node, part: fx.Node) -> fx.Node | None:
    """`part` in the layout of a sum of which it is all that is left; None where that is symbolic."""
    if same_layout(part, total):
        return part
    spec = total.meta["val"]
    sizes, strides = tuple(spec.shape), tuple(spec.stride())
    if not all(type(n) is int for n in (*sizes, *strides)) or part.meta["val"].dtype != spec.dtype:
        return None
    with graph.inserting_before(total) if total.graph is graph else contextlib.nullcontext():
        if isinstance(total.target, prims.Prim):
            copy = graph.call_function(prims.copy_strided, (part, strides))
        else:
            place = graph.call_function(
                aten.empty_strided.default, (sizes, strides), {"dtype": spec.dtype, "device": spec.device}
            )
            place.meta.update(total.meta)
            copy = graph.call_function(aten.copy.default, (place, part))
    copy.meta.update(total.meta)
    return copy


_NOTHING: frozenset[int] = frozenset()


def _led_to_by(graph: fx.Graph, names: Sequence[str]) -> dict[fx.Node, frozenset[int]]:
    """The nodes that are computed from the placeholders of these names, with the places of those that lead to each."""
    places = {name: frozenset((place,)) for place, name in enumerate(names)}
    led_to: dict[fx.Node, frozenset[int]] = {}
    known = led_to.get
    for node in graph.nodes:
        found = _NOTHING
        if node.op == "placeholder":
            found = places.get(node.name, _NOTHING)
        elif node.op != "output":
            for source in node.all_input_nodes:
                behind = known(source, found)
                if behind is not found and not behind <= found:  # nearly always one set, of which no other is made
                    found = found | behind if found else behind
        if found:
            led_to[node] = found
    return led_to


def _led_to_only_by(graph: fx.Graph, tangents: frozenset[str], missing: frozenset[str]) -> set[fx.Node]:
    """Nodes that are computed from missing tangents, and from no other one.

    Of a sum, a part that no tangent leads to is a gradient of zeros, which is there.
    """
    absent: set[fx.Node] = set()
    led_to = _led_to_by(graph, sorted(tangents))
    for node in graph.nodes:
        if node.op == "placeholder":
            gone = node.name in missing
        else:
            parts = [source for source in node.all_input_nodes if source in led_to or node.target in _ACCUMULATES]
            gone = node in led_to and node.op != "output" and absent.issuperset(parts)
        if gone:
            absent.add(node)
    return absent
