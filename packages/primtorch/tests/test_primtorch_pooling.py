"""The gradient of max pooling: gathered by every position from the windows over it, or scattered from the windows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import fx

import primtorch
from primtorch.testing import assert_as_accurate

Tensor = torch.Tensor
aten = torch.ops.aten
POOLS = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
BACKWARDS = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def lowered(
    rank: int, grad: Tensor, x: Tensor, window: tuple[object, ...], indices: Tensor, walked: bool
) -> fx.GraphModule:
    traced = primtorch.trace(lambda g, x, at: BACKWARDS[rank](g, x, *window, at), grad, x, indices)
    return primtorch.lower(traced, walks_windows=lambda device: walked)


def scatters(graph: fx.GraphModule) -> bool:
    return any(getattr(node.target, "name", "") in ("index_put", "scatter_add") for node in graph.graph.nodes)


def check(rank: int, x: Tensor, window: tuple[object, ...], walked: bool = False) -> fx.GraphModule:
    """Against eager in float64, at the maxima that the dtype has."""
    values, indices = POOLS[rank](x, *window)
    grad = torch.randn_like(values)
    graph = lowered(rank, grad, x, window, indices, walked)
    found = graph(grad, x, indices)
    eager = BACKWARDS[rank](grad, x, *window, indices)
    truth = BACKWARDS[rank](grad.double(), x.double(), *window, indices)
    assert_as_accurate(found, eager, truth)
    return graph


def windows(rank: int, count: int) -> list[tuple[object, ...]]:
    draw = random.Random(rank)
    made: list[tuple[object, ...]] = []
    while len(made) < count:
        kernel = [draw.randint(1, 4) for _ in range(rank)]
        dilation = [draw.randint(1, 2) for _ in range(rank)]
        padding = [draw.randint(0, min(k // 2, 2)) for k in kernel]
        stride = [draw.randint(1, 4) for _ in range(rank)]
        made.append((kernel, stride, padding, dilation, draw.random() < 0.5))
    return made


# Kernel 4 with dilation 2 reaches over 7 positions.
@pytest.mark.parametrize("window", windows(2, 30) + windows(3, 12), ids=str)
def test_gradients_are_those_of_eager(window: tuple[object, ...]) -> None:
    rank = len(window[0])  # type: ignore[arg-type]
    sides = [9, 8, 10][:rank]
    for lead, dtype in (((2, 3), torch.float32), ((1, 3), torch.float64), ((2, 3), torch.bfloat16)):
        check(rank, torch.randn(*lead, *sides, dtype=dtype).to(memory_format=LAST[rank]), window)
        check(rank, torch.randn(*lead, *sides, dtype=dtype), window, walked=True)
    check(rank, torch.randn(3, *sides), window)


@pytest.mark.parametrize(
    ("window", "scattered"),
    [
        (([3, 3], [2, 2], [1, 1], [1, 1], False), False),
        (([3, 3], [1, 1], [1, 1], [1, 1], False), False),
        (([5, 2], [5, 2], [0, 0], [1, 1], True), False),
        (([4, 4], [1, 1], [0, 0], [1, 1], False), True),  # a position is part of 16 windows
        (([3, 3], [2, 2], [1, 1], [4, 4], False), True),  # reaches over 9 positions: 5 windows along each dim
    ],
)
def test_what_few_windows_overlap_is_gathered(window: tuple[object, ...], scattered: bool) -> None:
    x = torch.randn(2, 3, 14, 13)
    for image, walked in ((x.to(memory_format=torch.channels_last), False), (x, False), (x, True)):
        # Windows are walked where their channels lie apart.
        assert scatters(check(2, image, window, walked)) == (scattered or walked)
    assert scatters(check(2, x.to(memory_format=torch.channels_last), window, walked=True)) == scattered


def test_ties_nan_and_infinity_go_where_the_forward_said() -> None:
    window = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    for fill in (0.0, float("nan"), float("-inf")):
        x = torch.randn(2, 3, 9, 8).to(memory_format=torch.channels_last)
        x[:, :, 2:6, 1:7] = fill
        assert not scatters(check(2, x, window))


def test_empty_batches() -> None:
    x = torch.randn(0, 3, 9, 8).to(memory_format=torch.channels_last)
    check(2, x, ([3, 3], [2, 2], [1, 1], [1, 1], False))


@pytest.mark.parametrize("sides", list(itertools.product((7, 8), (1, 2), (5,))), ids=str)
def test_windows_past_the_end(sides: tuple[int, int, int]) -> None:
    """Positions behind the last window, and windows that start in the padding."""
    for ceil, padding in itertools.product((False, True), (0, 1)):
        # What is behind the last whole vector of channels may name a place outside of its window, and is scattered.
        for channels in (16, 3):
            x = torch.randn(2, channels, *sides).to(memory_format=torch.channels_last_3d)
            pad = [padding, 0, padding]
            scattered = scatters(check(3, x, ([3, 1, 2], [2, 1, 3], pad, [1, 1, 1], ceil)))
            assert scattered == (channels == 3)
