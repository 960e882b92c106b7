"""Functions that the program marks as regions (`torch.compiler.nested_compile_region`): nodes with a graph inside.

A marked function is interpreted where it is called, as any other is, and what it recorded is noted. When the graph is
finished, the nodes of each call move into a graph of their own, and one call of `InvokeSubgraph` stands where they
were; calls whose graphs are equal share one, so that whoever compiles the graph compiles it once. What a graph of its
own cannot do stays where it is.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from primtorch import ambient
from primtorch.fake import FakeTensor
from primtorch.higher_order import REGION_IN_PLACE, HigherOrder, InvokeSubgraph
from primtorch.ledger import Event
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.wrappers import whole_of
from torchdynamo.graph.regions import Regions, graph_module

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What a tensor's place in its memory matters to: an operand begins where it begins.
_ABSOLUTE = frozenset({"storage_offset", "as_strided", "as_strided_", "as_strided_scatter"})


@dataclass
class Span:
    """What one call recorded.

    Attributes:
        name: of the function.
        nodes: in the order of the graph; some may have gone since.
        stack: where it was called.
        reason: why it stays in place, if that is known already.
    """

    name: str
    nodes: list[fx.Node]
    stack: tuple[UserFrame, ...]
    reason: str | None = None


class InPlace(Exception):
    """A region stays where it is."""


class NestedRegions:
    """The regions of one capture, inner ones first."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.spans: list[Span] = []
        self.in_place: list[Event] = []  # of those that stay
        self._shared: dict[Hashable, fx.GraphModule] = {}

    @contextmanager
    def called(self, name: str, stack: tuple[UserFrame, ...]) -> Iterator[None]:
        """A block in which the function's call is recorded."""
        mark, state = self.regions.mark(), ambient.snapshot()
        yield
        graph = self.regions.graph
        nodes = [node for node in graph.nodes if node not in mark and node.op != "placeholder"]
        left = ambient.changed(state)
        reason = f"it changes {', '.join(sorted(left))}" if left else None
        self.spans.append(Span(name, nodes, stack, reason))

    def outline(self) -> None:
        """Moves the nodes of each call into a graph; the whole graph has its output."""
        for number, span in enumerate(self.spans):
            try:
                written = self._outline(span)
            except InPlace as why:
                self.in_place.append(Event(REGION_IN_PLACE, span.name, str(why), span.stack))
                continue
            own = set(span.nodes)
            for around in self.spans[number + 1 :]:
                if not own.isdisjoint(around.nodes):
                    around.nodes = [*(node for node in around.nodes if node not in own), *written]
        self.spans.clear()

    def _outline(self, span: Span) -> list[fx.Node]:
        """The call and its results, [] where nothing of the region is left."""
        if span.reason is not None:
            raise InPlace(span.reason)
        own = _movable(span.nodes, self.regions.graph)
        if not own:
            return []
        inside = set(own)
        read = list(dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in inside))
        numbers = [node for node in read if isinstance(node.meta.get("val"), _NUMBERS)]
        tensors = [node for node in read if isinstance(node.meta.get("val"), torch.Tensor)]
        if any(whole_of(node.meta["val"]) is not None for node in tensors):
            raise InPlace("it has to do with a tensor that wraps others")
        if len(numbers) + len(tensors) < len(read):
            raise InPlace("it reads something else than tensors and numbers of what is around it")
        results = [node for node in own if any(user not in inside for user in node.users)]
        if any(not isinstance(node.meta.get("val"), FakeTensor) for node in results):
            raise InPlace("something else than tensors is read of it")
        body = self._body(own, (*numbers, *tensors), results)
        return _write_call(span, body, own, numbers, tensors, results)

    def _body(self, own: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
        """The nodes as a graph, or a graph equal to it that there is."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for source in inputs:
            copies[source] = graph.placeholder(source.name)
            copies[source].meta.update(val=source.meta.get("val"), stack=source.meta.get("stack", ()))
        for node in own:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        key = _graph_key(graph, self.regions.modules)
        if key not in self._shared:
            self._shared[key] = graph_module(self.regions.modules, graph, "Region")
        return self._shared[key]


def _movable(nodes: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """What of a region's nodes is left, without the sizes that it computed, which stay: all of the graph may use them.

    Raises:
        InPlace: they are no graph that could be called.
    """
    own = {node for node in nodes if not node._erased}
    own -= {node for node in own if "place" in node.meta and node.args[0] not in own}  # asked of an earlier graph
    for node in [*own]:
        if not isinstance(node.meta.get("val"), torch.Tensor):  # what is asked of its results later
            own.update(user for user in node.users if user.target is operator.getitem)
    left = [node for node in graph.nodes if node in own]
    computing = {node for node in left if not isinstance(node.meta.get("val"), _NUMBERS)}
    for node in left:
        value = node.meta.get("val")
        if node.op == "get_attr":
            raise InPlace("it holds a constant")
        if isinstance(value, _NUMBERS) and not computing.isdisjoint(node.all_input_nodes):
            raise InPlace("it takes a number out of a tensor")
        if isinstance(value, torch.Tensor) and whole_of(value) is not None:
            raise InPlace("it has to do with a tensor that wraps others")
        if str(getattr(node.target, "__name__", node.target)) in _ABSOLUTE:
            raise InPlace("it names places in memory")
    return [node for node in left if node in computing]


def _write_call(
    span: Span,
    body: fx.GraphModule,
    own: Sequence[fx.Node],
    numbers: Sequence[fx.Node],
    tensors: Sequence[fx.Node],
    results: Sequence[fx.Node],
) -> list[fx.Node]:
    """Puts the call and its results in the place of the region's nodes."""
    graph, inside = own[0].graph, set(own)
    values = tuple(node.meta["val"] for node in results)
    target = InvokeSubgraph((body,), len(numbers), tuple(value.requires_grad for value in values))
    with graph.inserting_after(own[-1]):
        call = graph.create_node("call_function", target, (*numbers, *tensors), {}, target.name)
    call.meta.update(val=values, stack=span.stack)
    if any(node.meta.get("effect") for node in own):
        call.meta["effect"] = True
    written = [call]
    for place, node in enumerate(results):
        with graph.inserting_after(written[-1]):
            item = graph.call_function(operator.getitem, (call, place))
        item.meta.update(val=values[place], stack=node.meta.get("stack", ()))
        written.append(item)
        node.replace_all_uses_with(item, lambda user: user not in inside)
    for node in reversed(own):
        graph.erase_node(node)
    return written


# -- equal graphs -----------------------------------------------------------------------------


def _graph_key(graph: fx.Graph, modules: dict[str, nn.Module]) -> Hashable:
    """Equal for graphs that do the same with inputs of the same metadata. What came before a region does not count:
    each call is traced under the state that it is called in."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    rows: list[Hashable] = []
    for node in graph.nodes:
        target: Hashable = node.target
        if node.op == "placeholder":
            value = node.meta.get("val")
            is_tensor = isinstance(value, torch.Tensor)
            target = repr(TensorSpec.of(value)) if is_tensor else f"{type(value).__name__} {value}"
        elif node.op == "call_module":
            target = _module_key(modules[node.target])
        elif isinstance(node.target, HigherOrder):
            target = _operator_key(node.target)
        rows.append((node.op, target, _argument_key(node.args, places), _argument_key(node.kwargs, places)))
    return tuple(rows)


def _module_key(module: nn.Module) -> Hashable:
    """Of the modules that capture makes, a checkpoint is what it holds; of any other there is one."""
    body, rules = getattr(module, "body", None), getattr(module, "rules", None)
    if isinstance(body, fx.GraphModule) and rules is not None:
        return type(module), _graph_key(body.graph, dict(body.named_children())), repr(rules)  # type: ignore[arg-type]
    return id(module)


def _operator_key(target: HigherOrder) -> Hashable:
    return (type(target), tuple(map(id, target.bodies))) if isinstance(target, InvokeSubgraph) else id(target)


def _argument_key(argument: object, places: dict[fx.Node, int]) -> Hashable:
    """An argument by its type and text, another object by its identity."""
    if isinstance(argument, fx.Node):
        return "node", places[argument]
    if isinstance(argument, (tuple, list)):
        return type(argument).__name__, tuple(_argument_key(item, places) for item in argument)
    if isinstance(argument, dict):
        return "dict", tuple((str(key), _argument_key(item, places)) for key, item in argument.items())
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return "slice", tuple(_argument_key(part, places) for part in parts)
    if isinstance(argument, _PLAIN):
        return type(argument).__name__, repr(argument)
    return "object", id(argument)


_PLAIN = (
    int, float, complex, str, bytes, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
