"""Strides of a convolution's result and gradients: the formulas' and the prims', beside ATen's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from primtorch import prims
from primtorch.fake import formula_of
from primtorch.spec import TensorSpec

aten = torch.ops.aten
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t.contiguous(),
    lambda t: t.contiguous(memory_format=torch.channels_last),
    lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    lambda t: torch.cat([t, t], 1).contiguous(memory_format=torch.channels_last)[:, : t.shape[1]],
)


def cases(seed: int) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Arguments of a convolution and of its backward."""
    draw = random.Random(seed)
    for _ in range(300):
        batch, channels, side, kernel = (draw.choice(c) for c in ((1, 2), (1, 2, 4), (1, 5, 8), (1, 3)))
        groups, transposed = draw.choice((1, channels)), draw.random() < 0.3
        filters = draw.choice((1, 3)) * groups
        lead = (channels, filters // groups) if transposed else (filters, channels // groups)
        x = draw.choice(LAYOUTS)(torch.randn(batch, channels, side, side))
        weight = draw.choice(LAYOUTS)(torch.randn(*lead, kernel, kernel))
        window = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
        try:
            grad = draw.choice(LAYOUTS)(torch.randn_like(aten.convolution(x, weight, None, *window)))
        except RuntimeError:  # oneDNN has no name for some layouts of filters
            continue
        yield (x, weight, None, *window), (grad, x, weight, [filters], *window, [True] * 3)


def agrees(spec: TensorSpec, real: torch.Tensor) -> bool:
    strides = zip(spec.strides, real.stride(), real.shape, strict=True)
    return tuple(spec.shape) == tuple(real.shape) and all(a == b or size == 1 for a, b, size in strides)


def test_strides_of_convolutions_are_those_of_aten() -> None:
    seed = random.randrange(1 << 30)
    for forward, backward in cases(seed):
        result, gradients = aten.convolution(*forward), aten.convolution_backward(*backward)
        of_specs = [
            tuple(TensorSpec.of(a) if isinstance(a, torch.Tensor) else a for a in c) for c in (forward, backward)
        ]
        for rule in (formula_of(aten.convolution.default), prims.convolution.meta):
            assert agrees(rule(*of_specs[0]), result), f"seed {seed}: {of_specs[0]}"
        for rule in (formula_of(aten.convolution_backward.default), prims.convolution_backward.meta):
            assert all(map(agrees, rule(*of_specs[1]), gradients)), f"seed {seed}: {of_specs[1]}"
