"""Resampling and pooling of infinite values and gradients: which elements are infinite, which no numbers, and which
neither, is as in eager: a weight of zero makes a NaN of what is infinite where eager has one, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchcompile

Tensor = torch.Tensor
Resized = Callable[[int], int]

# Of sides of 6 and 8 these ratios are exact, or give no place that is an element's: elsewhere it depends on how eager
# rounds whether a weight is zero.
SIZES: dict[str, tuple[bool, Resized]] = {
    "twice": (False, lambda n: 2 * n), "half": (False, lambda n: n // 2), "more": (False, lambda n: n + 3),
    "less": (False, lambda n: n - 2), "the same": (False, lambda n: n), "one": (False, lambda n: 1),
    "between, by corners": (True, lambda n: 2 * n - 1), "the same, by corners": (True, lambda n: n),
    "one, by corners": (True, lambda n: 1),
}  # fmt: skip
MODES = {1: ("linear", "nearest"), 2: ("bilinear", "bicubic", "nearest-exact"), 3: ("trilinear", "nearest")}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
POOLS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "adaptive average of 3": (2, lambda x: F.adaptive_avg_pool2d(x, 3)),
    "adaptive average of 12": (2, lambda x: F.adaptive_avg_pool2d(x, 12)),
    "adaptive average of a line": (1, lambda x: F.adaptive_avg_pool1d(x, 4)),
    "adaptive average of a volume": (3, lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2))),
    "adaptive maximum": (2, lambda x: F.adaptive_max_pool2d(x, 3)),
    "average": (2, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "average, more at the end": (2, lambda x: F.avg_pool2d(x, 3, 2, 1, True, False)),
    "maximum": (2, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "reflected border": (2, lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect")),
    "circular border": (2, lambda x: F.pad(x, (2, 1, 1, 2), mode="circular")),
}


def kinds(t: Tensor) -> Tensor:
    """0 for a number, 1 and 2 for the infinite ones, 3 for none."""
    infinite = torch.where(t == float("inf"), 1, torch.where(t == -float("inf"), 2, 0))
    return torch.where(t.isnan(), 3, infinite)


def spoilt(t: Tensor, draw: random.Random) -> Tensor:
    for value in (float("inf"), -float("inf"), float("nan")):
        if draw.random() < 0.8:
            t.view(-1)[draw.randrange(t.numel())] = value
    return t


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, tangent)[0]


def check(
    name: str,
    rank: int,
    function: Callable[[Tensor], Tensor],
    dynamic: bool,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    seed = random.randrange(2**31)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layouts = [torch.contiguous_format] + {2: [torch.channels_last], 3: [torch.channels_last_3d]}.get(rank, [])
    for layout in layouts:
        dtype = draw.choice(dtypes)
        torchcompile.reset()
        compiled = torchcompile.compile(function, dynamic=True if dynamic else None, options={"strict": True})
        for _ in range(2):
            sides = [draw.choice((6, 8)) if dynamic else 8 for _ in range(rank)]
            x = spoilt(torch.randn(2, 3, *sides, generator=generator).to(dtype), draw)
            shape = function(x.float()).shape
            tangent = spoilt(torch.randn(shape, generator=generator).to(dtype), draw)
            x, tangent = (t.contiguous(memory_format=layout) for t in (x, tangent))
            where = f"seed {seed}: {name} of {sides}, {layout}, {dtype}"
            wanted = with_gradient(function, x, tangent)
            for ours, theirs in zip(with_gradient(compiled, x, tangent), wanted, strict=True):
                assert torch.equal(kinds(ours), kinds(theirs)), where


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("size", SIZES)
def test_resampling(size: str, dynamic: bool) -> None:
    corners, resized = SIZES[size]
    for rank, modes in MODES.items():
        mode = random.choice([m for m in modes if not (corners and m.startswith("nearest"))])
        how = {} if mode.startswith("nearest") else {"align_corners": corners}

        def function(x: Tensor, mode: str = mode, how: dict[str, bool] = how) -> Tensor:
            return F.interpolate(x, [resized(n) for n in x.shape[2:]], mode=mode, **how)  # type: ignore[arg-type]

        check(f"{mode} to {size}", rank, function, dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_antialiased_resampling(size: str, mode: str, dynamic: bool) -> None:
    """A window shows what is infinite in it, also where its weight is zero, and nothing of what lies beside it."""
    corners, resized = SIZES[size]

    def function(x: Tensor) -> Tensor:
        sizes = [resized(n) for n in x.shape[2:]]
        return F.interpolate(x, sizes, mode=mode, align_corners=corners, antialias=True)

    check(f"{mode} to {size}, antialiased", 2, function, dynamic, DTYPES[:2])


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", POOLS)
def test_pools_and_borders(name: str, dynamic: bool) -> None:
    check(name, *POOLS[name], dynamic)
