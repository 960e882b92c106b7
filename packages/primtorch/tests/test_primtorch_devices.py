"""Programs over two devices: what eager moves by itself is moved by a prim, and no other prim sees two devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from primtorch import interpret, lower, verify
from primtorch.errors import NotClosed
from primtorch.fake import formula_of
from primtorch.placement import resolved_device
from primtorch.prims import add, device_put
from primtorch.spec import TensorSpec

aten = torch.ops.aten
THERE = torch.device("cuda:0")
"""Described, never used: the graphs are lowered without running anything, and run with all of it on the CPU."""


def graph_of(op: Any, make: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], tensors: list[torch.Tensor],
             places: str) -> fx.GraphModule:  # fmt: skip
    """One call of `op` on inputs of which those marked "c" are on the CPU and those marked "g" elsewhere."""
    graph = fx.Graph()
    inputs = []
    for i, (tensor, place) in enumerate(zip(tensors, places, strict=True)):
        node = graph.placeholder(f"x{i}")
        spec = TensorSpec.of(tensor)
        node.meta["val"] = spec if place == "c" else TensorSpec(spec.shape, spec.strides, spec.dtype, THERE)
        inputs.append(node)
    args, kwargs = make(*inputs)
    described = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    call = graph.call_function(op, args, kwargs)
    call.meta["val"] = formula_of(op)(*described[0], **described[1])
    graph.output((call,))
    return fx.GraphModule({}, graph)


rows, number = torch.randn(4, 3, dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64)
mask = torch.rand(4, 3) > 0.5
places = torch.tensor([2, 0])
given = lambda *args, **kwargs: (args, kwargs)

# What it is called -> the overload, its arguments of the inputs, the inputs, where each is, how many of them move.
MOVED: dict[str, tuple[Any, Callable[..., Any], list[torch.Tensor], str, int]] = {
    "add": (aten.add.Tensor, given, [rows, number], "gc", 1),
    "add: the CPU's first": (aten.add.Tensor, given, [number, rows], "cg", 1),
    "add: two 0-d tensors": (aten.add.Tensor, given, [number, number.exp()], "gc", 1),
    "sub: scaled": (aten.sub.Tensor, lambda x, y: given(x, y, alpha=2), [rows, number], "gc", 1),
    "div": (aten.div.Tensor, given, [rows, number], "gc", 1),
    "div: integers": (aten.div.Tensor, given, [rows, torch.tensor(3)], "gc", 1),
    "div: floor": (aten.div.Tensor_mode, lambda x, y: given(x, y, rounding_mode="floor"), [rows, number], "gc", 1),
    "pow": (aten.pow.Tensor_Tensor, given, [number, rows], "cg", 1),
    "eq": (aten.eq.Tensor, given, [rows, number], "gc", 1),
    "maximum": (aten.maximum.default, given, [rows, number], "gc", 1),
    "where": (aten.where.self, given, [mask, rows, number], "ggc", 1),
    "where: two numbers": (aten.where.self, given, [mask, number, number.exp()], "gcc", 2),
    "where: condition": (aten.where.self, given, [torch.tensor(True), rows, rows], "cgg", 1),
    "masked_fill": (aten.masked_fill.Tensor, given, [rows, mask, number], "ggc", 1),
    "clamp": (aten.clamp.Tensor, given, [rows, number], "gc", 1),
    "lerp": (aten.lerp.Tensor, given, [rows, rows.exp(), number], "ggc", 1),
    "addcmul": (aten.addcmul.default, given, [rows, rows.exp(), number], "ggc", 1),
    "mse_loss": (aten.mse_loss.default, given, [rows, number], "gc", 1),
    "fill": (aten.fill.Tensor, given, [rows, number], "gc", 1),
    "fill: on the CPU": (aten.fill.Tensor, given, [rows, number], "cg", 1),
    "copy": (aten.copy.default, given, [rows, rows.exp()], "gc", 1),
    "copy: to the CPU": (aten.copy.default, given, [rows, rows.exp()], "cg", 1),
    "index": (aten.index.Tensor, lambda x, i: given(x, [i]), [rows, places], "gc", 1),
    "index: by a mask": (aten.index.Tensor, lambda x, i: given(x, [None, i]), [rows, places], "gc", 1),
    "index_put": (aten.index_put.default, lambda x, i, v: given(x, [i], v), [rows, places, number], "gcc", 2),
    "index_put: a mask": (aten.index_put.default, lambda x, i, v: given(x, [i], v), [rows, mask, number], "ggc", 1),
    "index_fill": (aten.index_fill.int_Tensor, lambda x, i, v: given(x, 0, i, v), [rows, places, number], "ggc", 1),
    "select_scatter": (aten.select_scatter.default, lambda x, v: given(x, v, 0, 1), [rows, rows[0]], "gc", 1),
    "slice_scatter": (aten.slice_scatter.default, lambda x, v: given(x, v, 0, 0, 2), [rows, rows[:2]], "gc", 1),
    "linspace": (aten.linspace.Tensor_Scalar, lambda x: given(x, 5.0, 4, device=THERE), [number], "c", 1),
}  # fmt: skip


@pytest.mark.parametrize("opset", ["prims", "core_aten"])
@pytest.mark.parametrize("name", list(MOVED))
def test_what_eager_moves_is_moved_by_a_prim(name: str, opset: Any) -> None:
    op, make, tensors, where, moves = MOVED[name]
    graph = graph_of(op, make, tensors, where)
    lowered = lower(graph, opset)
    verify(lowered, opset)
    wanted = next(n for n in graph.graph.nodes if n.op == "call_function").meta["val"]
    out = next(n for n in lowered.graph.nodes if n.op == "output").args[0][0]
    assert out.meta["val"].device == wanted.device
    if opset == "prims":
        assert sum(n.target is device_put for n in lowered.graph.nodes) == moves


@pytest.mark.parametrize("name", [n for n in MOVED if n != "linspace"])
def test_values_with_the_moves_as_copies(name: str) -> None:
    op, make, tensors, where, _ = MOVED[name]
    lowered = lower(graph_of(op, make, tensors, where))
    args, kwargs = make(*tensors)
    stay = type("Stay", (), {"device_put": staticmethod(lambda t, device: t.clone())})()
    torch.testing.assert_close(interpret(lowered, stay)(*tensors)[0], op(*args, **kwargs))


def test_one_device_needs_no_move() -> None:
    for where in ("gg", "cc"):
        lowered = lower(graph_of(aten.add.Tensor, given, [rows, number], where))
        assert not any(n.target is device_put for n in lowered.graph.nodes)


def test_a_prim_over_two_devices_is_no_closed_graph() -> None:
    graph = fx.Graph()
    here, there = graph.placeholder("x"), graph.placeholder("y")
    here.meta["val"] = TensorSpec.of(rows)
    there.meta["val"] = TensorSpec((4, 3), (3, 1), torch.float32, THERE)
    made = graph.call_function(add, (here, there))
    made.meta["val"] = there.meta["val"]
    graph.output((made,))
    with pytest.raises(NotClosed, match="operands are on cpu and cuda:0"):
        verify(fx.GraphModule({}, graph))


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a factory makes on "cuda" lies on one of them: kernels are launched there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolved_device("cuda") == torch.device("cuda", 1)
    assert resolved_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert resolved_device("cpu") == resolved_device(None) == torch.device("cpu")
    with torch.device("meta"):
        assert resolved_device(None) == torch.device("meta")


FACTORIES: dict[str, tuple[Any, ...]] = {
    "arange": (5,), "eye": (3,), "full": ((2, 3), 1.5), "linspace": (0.0, 1.0, 5), "logspace": (0.0, 1.0, 5, 10.0),
    "ones": ((2, 3),), "zeros": ((2, 3),), "rand": ((2, 3),), "randn": ((2, 3),), "randperm": (5,),
    "randint": (5, (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_its_result_where_out_is(name: str) -> None:
    args = FACTORIES[name]
    made = getattr(torch, name)(*args)
    target = TensorSpec(tuple(made.shape), made.stride(), made.dtype, THERE)
    overload = next(o for o in _out_overloads(name) if _takes(o, args))
    assert formula_of(overload)(*args, out=target) == target


def _out_overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, o) for o in packet.overloads() if o == "out" or o.endswith("_out")]


def _takes(overload: Any, args: tuple[Any, ...]) -> bool:
    placed = [a for a in overload._schema.arguments if not a.kwarg_only]
    kinds = [str(a.type) for a in placed]
    return len(placed) == len(args) and all((kind in ("List[int]", "int[]")) == isinstance(arg, tuple)
                                             for kind, arg in zip(kinds, args, strict=True))  # fmt: skip


# Operators on an image whose channels lie last: the CPU's kernels keep that, an NVIDIA GPU's write by rows (a GPU gave
# these, forward and gradient).
BY_ROWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "reflect": (aten.reflection_pad2d.default, ([1, 2, 0, 1],)),
    "replicate": (aten.replication_pad2d.default, ([1, 2, 0, 1],)),
    "pixel_shuffle": (aten.pixel_shuffle.default, (2,)),
    "pixel_unshuffle": (aten.pixel_unshuffle.default, (2,)),
    "channel_shuffle": (aten.channel_shuffle.default, (2,)),
    "roll": (aten.roll.default, ([1, 2], [2, 3])),
    "group_norm": (aten.native_group_norm.default, (None, None, 2, 4, 24, 2, 1e-5)),
}


@pytest.mark.parametrize("name", list(BY_ROWS))
def test_layouts_that_only_the_cpu_keeps(name: str) -> None:
    op, arguments = BY_ROWS[name]
    image = torch.randn(2, 4, 6, 4).to(memory_format=torch.channels_last)
    here = TensorSpec.of(image)
    found = [formula_of(op)(replace(here, device=place), *arguments) for place in (here.device, THERE)]
    kept, by_rows = (spec[0] if isinstance(spec, tuple) else spec for spec in found)
    real = op(image, *arguments)
    real = real[0] if isinstance(real, tuple) else real
    assert kept.strides == real.stride() != by_rows.strides
    assert by_rows.strides == torch.empty(kept.shape).stride() and by_rows.device == THERE


@pytest.mark.parametrize("pad", ["reflection_pad", "replication_pad"])
@pytest.mark.parametrize("spatial", [2, 3])
def test_gradients_of_pads_that_only_the_cpu_keeps(pad: str, spatial: int) -> None:
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[spatial]
    image = torch.randn(2, 4, *(5,) * spatial).to(memory_format=last)
    padding = [1] * (2 * spatial)
    made = getattr(aten, f"{pad}{spatial}d").default(image, padding)
    op = getattr(aten, f"{pad}{spatial}d_backward").default
    here, there = (
        formula_of(op)(replace(TensorSpec.of(made), device=place), replace(TensorSpec.of(image), device=place), padding)
        for place in (image.device, THERE)
    )
    assert here.strides == op(made, image, padding).stride() == image.stride()
    assert there.strides == image.contiguous().stride()
