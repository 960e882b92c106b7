"""A joint graph with the operators of its regions in the place of their calls: what derivatives of it are taken of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd.partitioners import is_backward, mark_phases
from aotautograd.passes import eliminate_dead_code, output_values, present
from aotautograd.schemas import (
    HISTORY,
    PHASE,
    REGION,
    UNSEEN,
    FunctionResult,
    History,
    JointGraph,
    RegionCall,
    TracedRegion,
)

Env = dict[Any, Any]  # of nodes, and of calls of autograd functions


def flattened(joint: JointGraph) -> JointGraph:
    """The same joint graph without calls of regions, or itself where it has none. What a call gave has the name that it
    had."""
    if not any(REGION in node.meta for node in joint.module.graph.nodes):
        return joint
    return _Flattening(joint).run()


@dataclass
class _Flattening:
    joint: JointGraph
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: Env = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    regions: dict[TracedRegion, JointGraph] = field(default_factory=dict)  # their own, flat
    copies: list[tuple[fx.Node, Env]] = field(default_factory=list)  # with what names the nodes around them
    calls: dict[RegionCall, Env] = field(default_factory=dict)  # the nodes of a region's joint graph, for each call

    def run(self) -> JointGraph:
        for node in self.joint.module.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.env.__getitem__))
            elif REGION not in node.meta:
                if node in self.env:  # what a region gives
                    continue
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
                self.copies.append((self.env[node], self.env))
            elif node.meta[REGION] not in self.calls:
                self.forward(node, node.meta[REGION])
            else:
                self.backward(node, node.meta[REGION])
        for copy, env in self.copies:
            _rebind(copy, env)
        held = {str(n.target): getattr(self.joint.module, str(n.target)) for n in _constants(self.joint.module.graph)}
        module = _LazyGraphModule(held | self.constants, self.graph, "Flat")
        module.meta.update(self.joint.module.meta)
        for joint in self.regions.values():
            if UNSEEN in joint.module.meta:
                module.meta.setdefault(UNSEEN, joint.module.meta[UNSEEN])
        totals = {tangent: self.env[present(total)] for tangent, total in self.joint.totals.items()}
        eliminate_dead_code(self.graph)
        return replace(self.joint, module=module, totals=totals)

    def forward(self, node: fx.Node, call: RegionCall) -> None:
        region = call.region
        if region not in self.regions:
            self.regions[region] = flattened(region.joint)
        joint = self.regions[region]
        mark_phases(joint)
        inner: Env = {}
        self.calls[call] = inner
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        for place, given in zip(placeholders, node.args, strict=False):
            inner[place] = self.env[given] if isinstance(given, fx.Node) else given
        values = output_values(joint.module.graph)[: joint.num_forward_outputs]
        by_name = {n.name: n for n in joint.module.graph.nodes}
        given_by = dict(enumerate(values))
        given_by |= {place: by_name[name] for place, name in region.names.items()}
        items = {item.args[1]: item for item in node.users}
        names = {given_by[place]: item.name for place, item in items.items()}  # type: ignore[index]
        self.copy(node, joint, [n for n in joint.module.graph.nodes if not is_backward(n)], inner, names)
        for place, item in items.items():
            self.env[item] = inner[given_by[place]]  # type: ignore[index]
            if item.meta.get(HISTORY) is History.NONE:
                self.env[item].meta[HISTORY] = History.NONE

    def backward(self, node: fx.Node, call: RegionCall) -> None:
        region, joint, inner = call.region, self.regions[call.region], self.calls[call]
        placeholders = joint.module.graph.find_nodes(op="placeholder")
        tangents = placeholders[joint.metadata.num_placeholders :]
        for place, given in zip(tangents, node.args[len(node.args) - len(tangents) :], strict=True):
            inner[place] = self.env[given]  # type: ignore[index]
        self.copy(node, joint, [n for n in joint.module.graph.nodes if is_backward(n)], inner, {})
        pulled = output_values(joint.module.graph)[joint.num_forward_outputs :]
        by_place = {number: value for number, value in zip(region.gradients, pulled, strict=True) if number is not None}
        for item in node.users:
            self.env[item] = inner[by_place[item.args[1]]]  # type: ignore[index]

    def copy(self, call: fx.Node, joint: JointGraph, nodes: list[fx.Node], inner: Env, names: dict[Any, str]) -> None:
        """Nodes of a region. What the call gives has its name, all others begin with the call's."""
        for node in nodes:
            if node in inner or node.op == "output":
                continue
            made = self.graph.node_copy(node, inner.__getitem__)
            if node.op == "get_attr":
                made.target = f"{call.name}_{node.target}"
                self.constants[made.target] = getattr(joint.module, str(node.target))
            made._rename(names.get(node, f"{call.name}_{node.name}"))
            made.meta[PHASE] = call.meta[PHASE]
            self.copies.append((made, inner))
            inner[node] = made


def _constants(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "get_attr"]


def _rebind(node: fx.Node, env: Env) -> None:
    """The call of an autograd function that a value's history is names nodes of its own graph."""
    found = node.meta.get(HISTORY)
    if isinstance(found, FunctionResult):
        here = lambda values: tuple(env.get(present(a)) if isinstance(a, fx.Node) else a for a in values)
        if found.call not in env:
            env[found.call] = replace(found.call, args=here(found.call.args), given=here(found.call.given))
        node.meta[HISTORY] = FunctionResult(env[found.call], found.path)
