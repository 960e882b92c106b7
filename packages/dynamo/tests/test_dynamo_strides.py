"""Strides that differ between calls for reasons of their own become symbols: those of parts of something longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import torchdynamo


def graphs_of(
    program: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, dynamic: bool | None = None
) -> list[torch.fx.GraphModule]:
    """Calls the program compiled and as it is, with one result: values, strides and what it says. The graphs."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True, dynamic=dynamic, recompile_limit=20)
    compiled = torchdynamo.optimize(backend, options=options)(program)
    for arguments in calls:
        found, expected = compiled(*arguments), program(*arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert [leaf.stride() for leaf in found if isinstance(leaf, torch.Tensor)] == [
            leaf.stride() for leaf in expected if isinstance(leaf, torch.Tensor)
        ]
    return graphs


def parts(lengths: Iterable[tuple[int, int]], batch: int = 1) -> list[tuple[torch.Tensor]]:
    """The first `used` of `room` rows."""
    return [(torch.randn(batch, 4, room, 8)[:, :, :used],) for room, used in lengths]


def attends(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return keys.softmax(-1) @ keys.transpose(-1, -2), keys * 2, keys.sum(-2)


ROOMS = ((16, 4), (16, 6), (20, 6), (24, 8), (28, 9), (31, 5), (40, 39), (17, 3))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_of_which_a_part_is_filled(batch: int) -> None:
    graphs = graphs_of(attends, parts(ROOMS, batch))
    assert len(graphs) == 3  # the first sizes, other lengths, other rooms
    keys = [node.meta["val"] for node in graphs[-1].graph.nodes if node.op == "placeholder"][-1]
    assert isinstance(keys.stride(1), torch.SymInt)
    assert len(graphs_of(attends, parts(ROOMS, batch), dynamic=False)) == len(ROOMS)


def test_a_cache_that_is_full_has_a_version_where_the_program_asks() -> None:
    def flattens(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return keys.flatten(1), keys + 1

    calls = parts(((16, 4), (16, 6), (20, 6), (24, 24), (28, 9), (31, 31)))
    assert len(graphs_of(flattens, calls)) <= 4


def test_the_stride_of_a_single_row() -> None:
    """A window of positions, one row: its stride is the length of what it is cut out of, and moves nothing."""
    calls = [(torch.arange(room)[None, start : start + 4],) for room, start in ((7, 0), (9, 2), (11, 3), (13, 0))]
    assert len(graphs_of(lambda positions: (positions * 2, positions.cumsum(1)), calls)) == 2


def test_what_a_program_says_of_strides() -> None:
    def says(x: torch.Tensor) -> tuple[Any, ...]:
        rows = x.stride(0) * 2
        return x + rows, rows, x.stride(), x.is_contiguous()

    graphs_of(says, [(torch.randn(3, room)[:, :5],) for room in (8, 9, 12, 5, 15, 5)])


def test_other_layouts_have_versions_of_their_own() -> None:
    """Rows along another dim are another program: no stride of these is a symbol."""
    rows = [torch.randn(2, 3, side, side) for side in (4, 6, 8, 10)]
    calls = [
        (x.contiguous(memory_format=layout),) for x in rows for layout in (torch.contiguous_format, torch.channels_last)
    ]
    graphs = graphs_of(lambda x: (x.sin() + 1,), calls)
    assert len(graphs) <= 4
    for graph in graphs:
        strides = next(n.meta["val"].stride() for n in reversed(graph.graph.nodes) if n.op == "placeholder")
        assert 1 in [stride for stride in strides if isinstance(stride, int)]
    matrices = [(torch.randn(4, 8),), (torch.randn(8, 4).t(),), (torch.randn(4, 1).expand(4, 8),)] * 2
    assert len(graphs_of(lambda x: (x * 2, x.sum(0)), matrices)) == 3


def test_writes_to_a_part() -> None:
    def fills(x: torch.Tensor, value: float) -> tuple[torch.Tensor, ...]:
        x.mul_(value)
        x[:, 0] = 1.0
        return (x + 1,)

    rooms = [torch.randn(3, room) for room in (8, 9, 12, 15)]
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(fills)
    for room in rooms:
        expected, found = room.clone(), room.clone()
        torch.testing.assert_close(compiled(found[:, :5], 2.0), fills(expected[:, :5], 2.0))
        assert torch.equal(found, expected)
