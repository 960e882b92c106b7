"""Parts of the graph under construction that become graphs of their own: bodies of checkpoints, autograd functions.

A region is recorded where the program is, like everything else; when its end is reached, its nodes move into a nested
graph, and one `call_module` node stands where they were. What later code reads of a value inside becomes one more
output of the nested graph. Nested graphs are finished, and made modules, when capture is over.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchdynamo.reasons import BreakGraph

MakeModule = Callable[[fx.GraphModule, "Region"], nn.Module]


class Region:
    """A nested graph and the node that calls it.

    Attributes:
        graph: its placeholders stand for `inputs`, nodes of the graph around it, in this order.
        outputs: nodes of `graph`, in the order of its results.
        call: the calling node, None until there is one.
    """

    def __init__(self, inputs: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.inputs = list(inputs)
        self.outputs: list[fx.Node] = []
        self.call: fx.Node | None = None
        self.items: dict[fx.Node, fx.Node] = {}  # an inner node -> the node outside that has its value
        self.copies: dict[fx.Node, fx.Node] = {}  # of moved nodes and of `inputs`
        self.kept = 0  # how many of `outputs` are for the module that runs the graph
        self.has_effect = False
        self.make: MakeModule | None = None
        self.sealed: BreakGraph | None = None  # why none of its values can be one more result

    def escape(self, inner: fx.Node) -> fx.Node:
        """The node around the call that has the value of `inner`."""
        found = self.items.get(inner)
        if found is not None:
            return found
        if self.sealed is not None:
            raise self.sealed
        if self.call is None:
            raise BreakGraph("nested_graph", "a value of a function's backward is used outside of it")
        return self.item(inner, inner.meta.get("val"))

    def keep(self, inner: fx.Node) -> None:
        """One more result of the nested graph that the call does not give."""
        self.outputs.append(inner)
        self.kept += 1

    def item(self, inner: fx.Node, value: object) -> fx.Node:
        """One more result of the call: the value of `inner`, which the program knows as `value`."""
        assert self.call is not None
        graph = self.call.graph
        anchor = max(self.items.values(), key=lambda n: n.meta["place"], default=self.call)
        with graph.inserting_after(anchor):
            place = len(self.outputs) - self.kept
            node = graph.call_function(operator.getitem, (self.call, place))
        node.meta.update(val=value, stack=inner.meta.get("stack", ()), place=place)
        self.outputs.append(inner)
        self.call.meta["val"] = (*self.call.meta["val"], value)
        self.items.setdefault(inner, node)
        return node


class Regions:
    """The nested graphs of one capture, inner ones first."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.modules: dict[str, nn.Module] = {}
        self._all: dict[fx.Graph, Region] = {}
        self._named: dict[str, Region] = {}
        self._moved: dict[fx.Node, fx.Node] = {}
        self.open = 0  # bodies that are being recorded, one within the other
        self.transforms = 0  # transforms and levels of dual numbers that are open: they derive more than autograd does

    # -- recording --------------------------------------------------------------------------

    def mark(self) -> frozenset[fx.Node]:
        """The nodes there are: what is recorded from here on and not among them is the region's."""
        return frozenset(self.graph.nodes)

    @contextmanager
    def body(self) -> Iterator[None]:
        """A block in which what is recorded becomes a nested graph."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def since(self, mark: frozenset[fx.Node]) -> list[fx.Node]:
        """The nodes recorded since, in order; not inputs of the whole graph and what comes from before."""
        found: list[fx.Node] = []
        inside: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node in mark or (node.op == "placeholder" and "nested" not in node.meta):
                continue
            if "place" in node.meta and node.args[0] not in inside:
                continue  # a result of an earlier region, asked for now
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                if node.op == "placeholder" or inside.isdisjoint(node.all_input_nodes):
                    continue
                raise BreakGraph("nested_graph", "a size inside that depends on data")
            found.append(node)
            inside.add(node)
        return found

    def outline(self, nodes: Sequence[fx.Node], also: Iterable[fx.Node] = ()) -> Region:
        """Moves `nodes` into a graph of their own. Its inputs: `also`, what they read from around them, and the
        placeholders among them."""
        own = set(nodes)
        given = [node for node in nodes if node.op == "placeholder"]
        read = dict.fromkeys(also)
        for node in nodes:
            read.update(dict.fromkeys(source for source in node.all_input_nodes if source not in own))
        region = Region(list(read))
        copies: dict[fx.Node, fx.Node] = {}
        for source in (*read, *given):
            copy = region.graph.placeholder(source.name)
            copy.meta.update(val=source.meta.get("val"), stack=source.meta.get("stack", ()))
            copies[source] = copy
        for node in nodes:
            if node in copies:
                continue
            copies[node] = region.graph.node_copy(node, copies.__getitem__)
            region.has_effect |= bool(node.meta.get("effect"))
            for inner in self._named.values():
                if inner.call is node:
                    inner.call = copies[node]
                inner.items = {key: copies[node] if item is node else item for key, item in inner.items.items()}
        for node in nodes:
            self._moved[node] = copies[node]
        for node in reversed(nodes):
            self.graph.erase_node(node)
        region.copies = copies
        self._all[region.graph] = region
        return region

    def call(self, region: Region, inputs: Sequence[fx.Node], name: str, make: MakeModule) -> fx.Node:
        """Writes the node that calls the region, whose module `make` will give."""
        while name in self._named or name in self.modules:
            name += "_"
        region.make = make
        region.call = self.graph.create_node("call_module", name, tuple(inputs))
        region.call.meta["val"] = ()
        if region.has_effect:
            region.call.meta["effect"] = True
        self._named[name] = region
        return region.call

    def finished_sealed(self, region: Region) -> fx.GraphModule:
        """The nested graph of a sealed region, at once: nothing within can get one more result."""
        self._make_called(region.graph)
        return self.finished(region)

    def _make_called(self, graph: fx.Graph) -> None:
        """Makes the modules of the regions that a graph calls, where they are not made yet."""
        for node in graph.nodes:
            inner = self._named.get(node.target) if node.op == "call_module" else None
            if inner is not None and inner.make is not None:
                make, inner.make = inner.make, None
                self.modules[node.target] = make(self.finished(inner), inner)

    def call_module(
        self, module: nn.Module, inputs: Sequence[fx.Node], name: str, region: Region | None = None
    ) -> fx.Node:
        """Writes a node that calls a module which there is; `region`: the sealed one whose graph it runs."""
        while name in self._named or name in self.modules:
            name += "_"
        self.modules[name] = module
        node = self.graph.create_node("call_module", name, tuple(map(self.visible, inputs)))
        if region is not None:
            region.call = node
            if region.has_effect:
                node.meta["effect"] = True
        return node

    def visible(self, node: fx.Node) -> fx.Node:
        """The node of the whole graph that has the value of a node that may have moved into a region."""
        node = self._moved.get(node, node)
        while node.graph is not self.graph:
            node = self._all[node.graph].escape(node)
            node = self._moved.get(node, node)
        return node

    # -- finishing --------------------------------------------------------------------------

    def finish(self) -> None:
        """Makes the modules of all regions that the whole graph still calls."""
        for name, region in self._named.items():
            if region.make is not None and region.call is not None and not region.call._erased:
                make, region.make = region.make, None
                self.modules[name] = make(self.finished(region), region)

    def finished(self, region: Region) -> fx.GraphModule:
        """A nested graph, with its output node and without dead ones."""
        region.graph.output(tuple(region.outputs))
        erase_dead_nodes(region.graph)
        self._make_called(region.graph)  # such as those that the backward of a function calls, which nothing else names
        return graph_module(self.modules, region.graph, "Region")


def erase_dead_nodes(graph: fx.Graph) -> None:
    """Removes what nobody uses, has no effect, and raises nothing."""
    for node in reversed(list(graph.nodes)):
        stays = node.op in ("placeholder", "output") or node.meta.get("effect") or node.meta.get("refusable")
        if not node.users and not stays:
            graph.erase_node(node)


def graph_module(modules: dict[str, nn.Module], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph with the nested modules that it calls."""
    called = {node.target: modules[node.target] for node in graph.nodes if node.op == "call_module"}
    return _CapturedGraph(called, graph, class_name=name)


class _CapturedGraph(_LazyGraphModule):
    """A graph module that writes its Python when its `forward` is asked for: who compiles the graph seldom does."""

    @property
    def _lazy_forward(self) -> Callable[..., object]:  # type: ignore[override]
        self.real_recompile()
        forward: Callable[..., object] = self.forward
        return forward

    forward = _lazy_forward
