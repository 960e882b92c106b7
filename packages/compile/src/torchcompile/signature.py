"""When two captured graphs are the same to a compiler: a graph equal to an earlier one is not compiled again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import fx

from primtorch.higher_order import HigherOrder, InvokeSubgraph
from primtorch.schemas import UPDATES
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, shape_env_of
from primtorch.wrappers import whole_of
from torchdynamo.guards.global_state import function_modes, global_state

# Arguments whose text says all of them. Any other object may be another one with the same text.
_PLAIN = (
    fx.Node, int, float, complex, str, bytes, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def signature(gm: fx.GraphModule) -> Hashable | None:
    """What decides a graph's compiled form: nodes, inputs, what is known of sizes, ambient state.

    None if the graph holds objects of its own.
    """
    rows = _rows(gm)
    return None if rows is None else (global_state(), function_modes(), *facts(gm), *rows)


def _rows(gm: fx.GraphModule) -> list[Hashable] | None:
    """The nodes of a graph; of a region's call, with those of the region."""
    rows: list[Hashable] = []
    for node in gm.graph.nodes:
        target: Hashable = node.target
        if isinstance(target, InvokeSubgraph):
            (body,) = target.bodies
            inner = _rows(body) if isinstance(body, fx.GraphModule) else None
            if inner is None:
                return None
            target = (target.sizes, *inner)
        if node.op in ("get_attr", "call_module") or isinstance(target, HigherOrder):
            return None
        if not _is_plain((node.args, node.kwargs)):
            return None
        made = node.meta.get("val")
        if isinstance(made, torch.Tensor) and whole_of(made) is not None:  # by code that the graph does not show
            return None
        value = ""
        if node.op == "placeholder":
            held = node.meta.get("val")
            tensor = isinstance(held, torch.Tensor)
            value = f"{TensorSpec.of(held)!r} {held.requires_grad} {type(held)}" if tensor else repr(held)
        rows.append((node.op, node.name, target, repr(node.args), repr(node.kwargs), value))
    return rows


def program_form(gm: fx.GraphModule) -> Hashable | None:
    """What decides the program of a graph of prims, which is all but the names in it: stages of a backward that belong
    to layers that are built alike have one. Users' lines are part of it, which a program tells.

    None where a size is a symbol, whose questions are asked of each graph, or the graph holds objects of its own.
    """
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    rows: list[Hashable] = [global_state()]
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module") or isinstance(node.target, HigherOrder):
            return None
        value = node.meta.get("val")
        if not _is_plain((node.args, node.kwargs)) or not _is_fixed(value):
            return None
        called = node.target if node.op == "call_function" else None
        arguments = _argument_form((node.args, node.kwargs), places)
        rows.append((node.op, called, arguments, _value_form(value), node.meta.get("stack", ())))
    return None if gm.meta.get(UPDATES) else tuple(rows)


def _argument_form(argument: object, places: Mapping[fx.Node, int]) -> Hashable:
    """A plain argument, with nodes by their places. Numbers of one value may be of other types."""
    match argument:
        case fx.Node():
            return places[argument]
        case tuple() | list():
            return (type(argument).__name__, *(_argument_form(part, places) for part in argument))
        case dict():
            return ("dict", *((key, _argument_form(part, places)) for key, part in argument.items()))
        case slice():
            return ("slice", _argument_form((argument.start, argument.stop, argument.step), places))
    return type(argument).__name__, repr(argument)


def _is_fixed(value: object) -> bool:
    """Whether no size in what a node gives is a symbol, and its metadata says all of it."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_fixed, value))
    if isinstance(value, torch.Tensor):
        return whole_of(value) is None and _is_fixed(TensorSpec.of(value))
    if isinstance(value, TensorSpec):
        return all(type(size) is int for size in (*value.shape, *value.strides, value.offset))
    return value is None or type(value) in (int, float, bool)


def _value_form(value: object) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_value_form, value))
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    return value if isinstance(value, TensorSpec) else (type(value).__name__, repr(value))


def facts(gm: fx.GraphModule) -> tuple[str, ...]:
    """What capture took for granted of the numbers in a graph: compiled code may rely on it.

    A size's value in the example is none of it, nor is the line of the program that asked.
    """
    env = shape_env(gm)
    if env is None:
        return ()
    symbols = (f"{s.name} {s.backed} {s.min} {s.max} {env.definitions.get(s.name)}" for s in env.symbols.values())
    return (*symbols, *(str(guard.expr) for guard in (*env.guards, *env.assumptions)))


def shape_env(gm: fx.GraphModule) -> ShapeEnv | None:
    """That of the symbols of a captured graph."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return shape_env_of(value)
    return None


def _is_plain(argument: object) -> bool:
    if isinstance(argument, (tuple, list)):
        return all(map(_is_plain, argument))
    if isinstance(argument, dict):
        return all(map(_is_plain, (*argument, *argument.values())))
    if isinstance(argument, slice):
        return _is_plain((argument.start, argument.stop, argument.step))
    return isinstance(argument, _PLAIN)
