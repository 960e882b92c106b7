"""Images of changing sizes are resampled by one version of a program, as eager resamples them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile

Tensor = torch.Tensor
SIZES = ((5, 6), (7, 9), (8, 12), (4, 5), (11, 3))
MODES: dict[str, dict[str, Any]] = {
    "nearest": {}, "nearest-exact": {}, "bilinear": {"align_corners": False}, "bicubic": {"align_corners": True},
    "area": {}, "antialiased": {"mode": "bilinear", "antialias": True},
}  # fmt: skip
# Each takes an image, another one that is larger, and the mode.
CALLS: dict[str, Callable[..., Tensor]] = {
    "to another's size": lambda x, y, **how: F.interpolate(x, size=y.shape[-2:], **how),
    "to sizes that are computed": lambda x, y, **how: F.interpolate(x, size=(x.shape[2] * 2, y.shape[3] // 2), **how),
    "by a factor": lambda x, y, **how: F.interpolate(x, scale_factor=2, **how),
    "by a factor for each dim": lambda x, y, **how: F.interpolate(x, scale_factor=(1.5, 0.75), **how),
    "by a factor of the sizes": lambda x, y, **how: F.interpolate(
        x, scale_factor=1.5, recompute_scale_factor=True, **how
    ),
    "by a module": lambda x, y, **how: torch.nn.Upsample(scale_factor=2)(x),
}


@pytest.fixture(autouse=True)
def forget() -> None:
    torchcompile.reset()


def check(call: Callable[..., Tensor], images: list[tuple[Tensor, Tensor]], versions: int = 2) -> None:
    compiled = torchcompile.compile(call, fullgraph=True)
    for x, y in images:
        x.requires_grad_()
        wanted, given = call(x, y), compiled(x, y)
        assert given.stride() == wanted.stride() and given.dtype is wanted.dtype
        torch.testing.assert_close(given, wanted)
        grads = [torch.autograd.grad(result.sin().sum(), x)[0] for result in (wanted, given)]
        torch.testing.assert_close(grads[1], grads[0])
    assert torchcompile.report().captured <= versions, torchcompile.report()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_images_of_changing_sizes(name: str, mode: str) -> None:
    how = {"mode": mode, **MODES[mode]}  # antialiased, each size has weights of its own, and so a version

    def call(x: Tensor, y: Tensor) -> Tensor:
        return CALLS[name](x, y, **how)

    made = torch.Generator().manual_seed(len(name))
    draw = lambda *shape: torch.rand(*shape, dtype=torch.float64, generator=made)  # noqa: E731
    check(
        call,
        [(draw(2, 3, h, w), draw(2, 3, h + 3, w + 1)) for h, w in SIZES],
        len(SIZES) if mode == "antialiased" else 2,
    )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_one_size_of_image_to_changing_sizes(mode: str) -> None:
    """The image has no symbol, the size that it is brought to is one."""
    image = torch.rand(1, 2, 4, 4, dtype=torch.float64)

    def call(x: Tensor, y: Tensor) -> Tensor:
        return F.interpolate(x, y.shape[-2:], mode=mode)

    check(call, [(image, torch.zeros(3, n, n + 1, dtype=torch.float64)) for n in (5, 6, 8, 7)])


@pytest.mark.parametrize("rank", [3, 5])
@pytest.mark.parametrize("linear", [False, True])
def test_signals_and_volumes(rank: int, linear: bool) -> None:
    mode = {3: "linear", 5: "trilinear"}[rank] if linear else "nearest"

    def call(x: Tensor, y: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.5, mode=mode)

    shapes = [(2, 3, *(n + d for d in range(rank - 2))) for n in (3, 4, 6, 5)]
    check(call, [(torch.rand(shape, dtype=torch.float64), torch.empty(0)) for shape in shapes])


def test_factors_that_are_no_quotients() -> None:
    """They round: each size has a version of its own, and the sizes are eager's."""

    def call(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=1 / 3)

    compiled = torchcompile.compile(call, fullgraph=True)
    for n in (6, 9, 10, 29):
        x = torch.rand(1, 2, n, n)
        torch.testing.assert_close(compiled(x), call(x))
