"""A captured graph as rows, and back: the same nodes, with what is known of their values.

Sizes that are symbols stand there as expressions, which belong to no capture (`symbols.KnownSymbols`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from primtorch.fake import FakeMode, FakeTensor
from primtorch.frozen import record
from primtorch.records import Codec
from primtorch.spec import TensorSpec
from primtorch.symbolic import FloatExpr, IntExpr, spelt
from primtorch.symbolic.codecs import CODECS as SYMBOLIC
from primtorch.wrappers import whole_of
from torchdynamo.errors import NotExportable, UnsafeArchive
from torchdynamo.exported.targets import function_named, name_of
from torchdynamo.graph.derivatives import CALL
from torchdynamo.graph.regions import graph_module
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.rows import Reader, Row, Writer
from torchdynamo.kept.symbols import KnownSymbols
from torchdynamo.sources import Source


@record
class Node:
    """A node of a graph, by its place."""

    place: int


@record
class Value:
    """What a node gives: a tensor of this description, with expressions for sizes that are symbols."""

    spec: TensorSpec
    requires_grad: bool


@record
class Number:
    """What a node gives: a number that is known at each call."""

    expr: IntExpr | FloatExpr


CLASSES = (Node, Value, Number)
CODECS = (
    *SYMBOLIC,
    Codec(range, lambda numbers: (numbers.start, numbers.stop, numbers.step), range),
    Codec(bytes, lambda text: (text.hex(),), bytes.fromhex),
    Codec(slice, lambda part: (part.start, part.stop, part.step), slice),
    Codec(complex, lambda number: (number.real, number.imag), complex),
    Codec(type(...), lambda _: (), lambda: ...),
)
_AS_THEY_ARE = frozenset((int, bool, float, str, type(None), torch.dtype, torch.device))
# What is known of a node; how many calls came before it, and what it may refuse, capture alone asks.
_KNOWN = frozenset({"val", "stack", "source", "effect", CALL, "refusable"})


def written(graph: fx.GraphModule, writer: Writer) -> list[Row]:
    """The rows of a graph.

    Raises:
        NotKept: it holds what has no form as text: graphs within it, operators of the program's own.
    """
    places: dict[fx.Node, Node] = {}
    rows = []
    for place, node in enumerate(graph.graph.nodes):
        if node.op in ("get_attr", "call_module") or node.meta.keys() - _KNOWN:
            raise NotKept(f"the graph holds {node.op} {node.target}, {sorted(node.meta)}")
        target = node.target if node.op != "call_function" else _name_of(node.target)
        args, kwargs = argument(tuple(node.args), places), argument(dict(node.kwargs), places)
        value = node.meta.get("val")
        value = None if node.op == "placeholder" and isinstance(value, torch.Tensor) else _value(value)
        stack = writer.stack(tuple(node.meta.get("stack") or ()))
        rows.append([node.op, node.name, target, args, kwargs, value, stack, bool(node.meta.get("effect"))])
        places[node] = Node(place)
    return rows


def _name_of(target: object) -> str:
    try:
        return name_of(target)
    except NotExportable as error:
        raise NotKept(str(error)) from None


def argument(value: object, places: Mapping[fx.Node, Node]) -> object:
    """An argument of a node, with others by their places.

    Raises:
        NotKept: it has no form as text.
    """
    kind = type(value)
    if kind is fx.Node:
        return places[value]  # type: ignore[index]
    if kind in _AS_THEY_ARE:
        return value
    if kind is tuple or kind is torch.Size:
        return tuple([argument(item, places) for item in value])  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        raise NotKept(f"the graph is given a {kind.__name__}")
    if isinstance(value, list):
        return [argument(item, places) for item in value]
    if isinstance(value, dict):
        return {key: argument(item, places) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(argument(part, places) for part in (value.start, value.stop, value.step)))
    return value


def _value(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_value(item) for item in value]
    if isinstance(value, FakeTensor):
        if whole_of(value) is not None or class_of(value) is not None:
            raise NotKept("a tensor of another class")
        return Value(_through(TensorSpec.of(value), spelt), value.requires_grad)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return Number(spelt(value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise NotKept(f"the graph gives a {type(value).__name__}")


def _through(spec: TensorSpec, change: Callable[[Any], Any]) -> TensorSpec:
    """A description with other numbers."""
    shape, strides = (tuple(map(change, numbers)) for numbers in (spec.shape, spec.strides))
    return TensorSpec(shape, strides, spec.dtype, spec.device, change(spec.offset))


def made(
    rows: Sequence[Row], reader: Reader, inputs: Sequence[Any], sources: Sequence[Source | None],
    symbols: KnownSymbols, name: str,
) -> fx.GraphModule:  # fmt: skip
    """The graph of these rows, for inputs of a call. Raises NotKept where it calls what nobody may."""
    graph, mode = fx.Graph(), FakeMode()
    nodes: list[fx.Node] = []
    remaining = iter(zip(inputs, sources, strict=True))
    with torch._C.DisableTorchFunction():
        for op, node_name, target, args, kwargs, value, stack, effect in rows:
            try:
                found = target if op != "call_function" else function_named(target, ())
            except UnsafeArchive as error:
                raise NotKept(str(error)) from None
            node = graph.create_node(op, found, given(args, nodes), given(kwargs, nodes), name=node_name)
            if node.name != node_name:
                raise NotKept(f"no name of a node: {node_name!r}")
            if op == "placeholder":
                example, source = next(remaining)
                node.meta["source"] = source.expression() if source is not None else ""
                if value is None:
                    assert source is not None
                    dims, strides = symbols.of_tensor(source)
                    node.meta["val"] = mode.from_tensor(example, dynamic=dims, strides=strides)
                else:
                    node.meta["val"] = example
            elif op != "output":
                node.meta["val"] = _made_value(value, mode, symbols)
            node.meta["stack"] = reader.stack(stack)
            if effect:
                node.meta["effect"] = True
            nodes.append(node)
    return graph_module({}, graph, name)


def given(value: Any, nodes: Sequence[fx.Node]) -> Any:
    """What `argument` wrote, with the nodes at these places."""
    kind = type(value)
    if kind is Node:
        return nodes[value.place]
    if kind in (tuple, list):
        return kind(given(item, nodes) for item in value)
    if kind is dict:
        return {key: given(item, nodes) for key, item in value.items()}
    if kind is slice:
        return slice(*(given(part, nodes) for part in (value.start, value.stop, value.step)))
    return value


def _made_value(value: object, mode: FakeMode, symbols: KnownSymbols) -> object:
    if type(value) is Value:
        return mode.from_spec(_through(value.spec, symbols.bound), requires_grad=value.requires_grad)
    if type(value) is Number:
        return symbols.bound(value.expr)
    return tuple(_made_value(item, mode, symbols) for item in value) if type(value) is list else value
