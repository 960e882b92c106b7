"""A backward in stages: the gradients of some inputs are handed to autograd before the rest is computed.

Autograd goes on to an input as soon as a node gives its gradient, and a compiled backward is one node: whoever waits
for gradients (the reducer of a data-parallel model) gets all of them at the end. So the backward is cut into graphs,
each run by a node of its own. A stage computes what its gradients need and no stage before it has computed, and
whatever reads the stage's inputs: behind it, an optimizer may write to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd.events import tell_not_cut
from aotautograd.inputs import spec_of_clone
from aotautograd.passes import has_effect, output_values
from aotautograd.schemas import Compiled, Compiler, GradientInfo
from primtorch.frozen import record
from primtorch.memory import memory_of, viewed
from primtorch.printing import made_by
from primtorch.symbolic import expr_of

aten = torch.ops.aten

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@record
class Stage:
    """One part of a backward.

    Attributes:
        inputs: names of the backward's placeholders and of values that earlier stages carry to this one.
        results: which of the backward's results it returns first.
        carried: names of what it returns behind those, for later stages.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    results: tuple[int, ...]
    carried: tuple[str, ...]


def stages_of(inputs: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The stage of each input's gradient; inputs of no group come with the last. Empty where there is one stage."""
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    found = [group_of.get(place, len(groups) - 1) for place in inputs]
    numbers = {group: stage for stage, group in enumerate(sorted(set(found)))}
    return tuple(numbers[group] for group in found) if len(numbers) > 1 else ()


def turns_of(inputs: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """For each input's gradient its stage, and its turn among all that are handed to autograd. Those of inputs of no
    group come together, and before those of the last group: what made these inputs goes on while somebody sees to
    these. Empty without groups."""
    if not groups:
        return ()
    ahead = [place for group in groups[:-1] for place in group]
    turn_of = {place: turn for turn, place in enumerate(ahead)}
    turn_of |= {place: turn for turn, place in enumerate(groups[-1], len(ahead) + 1)}
    stages = stages_of(inputs, groups) or (0,) * len(inputs)
    turns = (turn_of.get(place, len(ahead)) for place in inputs)
    return tuple(zip(stages, turns, strict=True))


def for_turns(made: Sequence[GradientInfo], turns: Sequence[object]) -> tuple[GradientInfo, ...]:
    """How gradients are made where they are handed on one after the other.

    A hook may write to a gradient that has become `.grad` before the next turn comes: no other may share its memory.
    """
    if not turns:
        return tuple(made)
    slots = [(info.source, info.slot) for info in made]
    return tuple(
        replace(info, cloned=info.cloned or info.source == "tangent" or slots.count(slot) > 1)
        for info, slot in zip(made, slots, strict=True)
    )


def cut(
    module: fx.GraphModule, made: Sequence[GradientInfo], stages: Sequence[int], inputs: Mapping[str, int]
) -> tuple[Stage | None, ...]:
    """The graphs of a backward's stages, None where there is nothing to compute.

    Args:
        made: how the gradient of each input is made of what `module` returns.
        stages: the stage of each.
        inputs: placeholders of `module` that are inputs with a gradient, or views of them: the stage of that.
    """
    try:
        return _cut(module, made, stages, inputs)
    except NotCut as reason:  # the first stage computes everything, and the others hand it on
        tell_not_cut(str(reason))
        names = tuple(n.name for n in module.graph.nodes if n.op == "placeholder")
        slots = tuple(range(len(output_values(module.graph))))
        return Stage(module, names, slots, ()), *[None] * max(stages)


def _cut(
    module: fx.GraphModule, made: Sequence[GradientInfo], stages: Sequence[int], inputs: Mapping[str, int]
) -> tuple[Stage | None, ...]:
    cutting = _Cutting(module, max(stages) + 1)
    results = output_values(module.graph)
    wanted = wanted_slots(made, stages)
    first = {slot: at for at in reversed(range(cutting.count)) for slot in wanted[at] if results[slot] is not None}
    readers = cutting.readers(inputs)
    for stage in range(cutting.count):
        cutting.own(stage, [results[slot] for slot, at in first.items() if at == stage])  # type: ignore[misc]
        cutting.own(stage, readers[stage])
    cutting.own_effects()
    slots = [tuple(sorted(slot for slot, at in first.items() if at == stage)) for stage in range(cutting.count)]
    return cutting.stages([[(slot, results[slot]) for slot in group] for group in slots])  # type: ignore[misc]


def wanted_slots(made: Sequence[GradientInfo], stages: Sequence[int]) -> list[set[int]]:
    """Which results of the backward each stage hands on."""
    wanted: list[set[int]] = [set() for _ in range(max(stages) + 1)]
    for info, stage in zip(made, stages, strict=True):
        if info.source == "result":
            wanted[stage].add(info.slot)
    return wanted


class _Cutting:
    """Which stage computes each node. What costs nothing (views, sizes) belongs to every stage that reads it."""

    def __init__(self, module: fx.GraphModule, count: int) -> None:
        self.module, self.count = module, count
        self.owner: dict[fx.Node, int] = {}
        self.place = {node: place for place, node in enumerate(module.graph.nodes)}
        self.placeholders = [n for n in self.place if n.op == "placeholder"]
        self.body = [n for n in self.place if n.op not in ("placeholder", "get_attr", "output")]
        self.costless = {n for n in self.body if viewed(n) is not None or isinstance(_value(n), _NUMBERS)}
        self.effects = [n for n in self.body if has_effect(n)]
        self.copied: set[fx.Node] = set()  # of what crosses from one stage to the next: it is a result as well
        self.effect_before = dict(zip(self.effects[1:], self.effects, strict=False))  # they stay in order

    def free(self, node: fx.Node) -> bool:
        return node in self.costless

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Nodes as the graph has them."""
        return sorted(nodes, key=self.place.__getitem__)

    def readers(self, inputs: Mapping[str, int]) -> list[list[fx.Node]]:
        """For each stage, the nodes that read the memory of its inputs."""
        found: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node in self.body:
            if self.free(node):
                continue
            read = {inputs[m.name] for m in map(memory_of, node.all_input_nodes) if m.name in inputs}
            if read:
                found[min(read)].append(node)
        return found

    def own(self, stage: int, nodes: Iterable[fx.Node]) -> None:
        work = list(nodes)
        seen: set[fx.Node] = set()
        while work:
            node = work.pop()
            if node in seen or node in self.owner or node.op in ("placeholder", "get_attr"):
                continue
            seen.add(node)
            work.extend(node.all_input_nodes)
            if self.free(node):
                continue
            self.owner[node] = stage
            work.extend(user for user in node.users if user.target is operator.getitem and not self.free(user))
            if node in self.effect_before:
                work.append(self.effect_before[node])

    def own_effects(self) -> None:
        """What nobody asked for and has to happen all the same: at the end."""
        self.own(self.count - 1, self.effects)

    def stages(self, returned: Sequence[Sequence[tuple[int, fx.Node]]]) -> tuple[Stage | None, ...]:
        owned: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node, owner in self.owner.items():
            owned[owner].append(node)
        ends = [[node for _, node in group] for group in returned]
        parts = [self._part(owned[stage], ends[stage]) for stage in range(self.count)]
        needed = [{n for node in part for n in node.all_input_nodes} | set(ends[at]) for at, part in enumerate(parts)]
        last = {node: stage for stage, nodes in enumerate(needed) for node in nodes}  # the stage that needs it last
        crossing = [self.in_order(n for n in nodes if last.get(n, -1) > stage) for stage, nodes in enumerate(owned)]
        known = {str(expr_of(n)) for n in map(_value, self.placeholders) if isinstance(n, torch.SymInt)}
        if any(not _is_tensor(node) or not _symbols(node) <= known for group in crossing for node in group):
            raise NotCut("a number that only the data tells crosses from one stage to the next")
        return tuple(
            self._stage(stage, part, returned[stage], crossing[stage], needed[stage])
            if part or returned[stage]
            else None
            for stage, part in enumerate(parts)
        )

    def _part(self, owned: Sequence[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of a stage in the graph's order, with what is free."""
        found = set(owned)
        work = [*ends, *(source for node in owned for source in node.all_input_nodes)]
        while work:
            node = work.pop()
            if node in found or not self.free(node):
                continue
            found.add(node)
            work.extend(node.all_input_nodes)
        return self.in_order(found)

    def _stage(
        self,
        stage: int,
        part: Sequence[fx.Node],
        returned: Sequence[tuple[int, fx.Node]],
        carried: Sequence[fx.Node],
        needed: Set[fx.Node],
    ) -> Stage:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        numbers = [n for n in self.placeholders if not _is_tensor(n)]
        tensors = self.in_order(n for n in needed if n.op == "placeholder" and _is_tensor(n))
        given = self.in_order(n for n in needed if self.owner.get(n, stage) < stage)
        for node in (*numbers, *tensors, *given):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
            if node in self.copied:
                env[node].meta["val"] = spec_of_clone(node.meta["val"])
        for node in self.in_order((*part, *(n for n in needed if n.op == "get_attr"))):
            env[node] = graph.node_copy(node, env.__getitem__)
        own = {node for _, node in returned}
        held = {memory_of(node) for node in own}
        results = [
            _copied(graph, env[n]) if self.owner.get(memory_of(n), stage) < stage else env[n] for _, n in returned
        ]
        kept = [_copied(graph, env[n]) if n in held else env[n] for n in carried]
        self.copied |= held.intersection(carried)
        graph.output((*results, *kept))
        module = _LazyGraphModule(self.module, graph, f"BackwardStage{stage}")
        made_by(module, "cut into stages", self.module)
        inputs = tuple(n.name for n in (*numbers, *tensors, *given))
        return Stage(module, inputs, tuple(slot for slot, _ in returned), tuple(n.name for n in carried))


class NotCut(Exception):
    """Why a backward has to stay whole."""


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(_value(node), (*_NUMBERS, tuple, list))


def _symbols(node: fx.Node) -> set[str]:
    value = node.meta["val"]
    return {s for n in (*value.shape, *value.stride()) if isinstance(n, torch.SymInt) for s in expr_of(n).symbols()}


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(aten.clone.default, (node,))
    copy.meta.update(node.meta, val=spec_of_clone(node.meta["val"]))
    return copy


class StagedBackward:
    """The compiled stages of a backward. A call takes the list of the whole backward's inputs, empties it, and gives a
    `StagedRun`."""

    _boxed_call = True

    def __init__(
        self,
        module: fx.GraphModule,
        stages: Sequence[Stage | None],
        compiler: Compiler,
        made: Sequence[GradientInfo],
        stage_of: Sequence[int],
        example_values: Callable[[fx.GraphModule], list[object]],
    ) -> None:
        self.names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        self.count = len(output_values(module.graph))
        self.stages = stages
        self.compiled: list[Compiled | None] = [
            None if stage is None else compiler(stage.module, example_values(stage.module)) for stage in stages
        ]
        self.wanted = wanted_slots(made, stage_of)
        reads = [() if stage is None else stage.inputs for stage in stages]
        self.read = set().union(*reads)
        self.last = [set(names).difference(*reads[at + 1 :]) for at, names in enumerate(reads)]

    def __call__(self, inputs: list[object]) -> Any:
        values = {name: v for name, v in zip(self.names, inputs, strict=True) if name in self.read}
        inputs.clear()
        return StagedRun(self, values)


class StagedRun:
    """One run: each call computes the next stage, and gives its results at their places among all."""

    def __init__(self, backward: StagedBackward, values: dict[str, object]) -> None:
        self.backward, self.values, self.at = backward, values, 0
        self.shared: dict[int, object] = {}  # results that several stages hand on

    def __call__(self) -> list[object]:
        at, backward = self.at, self.backward
        self.at += 1
        stage, compiled = backward.stages[at], backward.compiled[at]
        results: list[object] = [None] * backward.count
        if stage is not None and compiled is not None:
            last, values = backward.last[at], self.values
            given = [values.pop(name) if name in last else values[name] for name in stage.inputs]
            boxed = getattr(compiled, "_boxed_call", False)
            returned: Any = compiled(given) if boxed else compiled(*given)
            del given
            for slot, value in zip(stage.results, returned, strict=False):
                results[slot] = value
            values.update(zip(stage.carried, returned[len(stage.results) :], strict=True))
        later = set[int]().union(*backward.wanted[at + 1 :])
        self.shared.update((slot, results[slot]) for slot in later if results[slot] is not None)
        for slot in backward.wanted[at]:
            if results[slot] is None:
                results[slot] = self.shared.get(slot)
        return results
