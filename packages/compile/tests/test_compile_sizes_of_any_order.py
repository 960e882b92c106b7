"""Programs over dynamic sizes give eager's values and gradients at sizes unlike the first call's, and are compiled once
for all that are no 0 and no 1."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchcompile
from primtorch.ledger import LEDGER, Effect, of

pytestmark = pytest.mark.warm

IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "max pool": lambda x: F.max_pool2d(x, 2),
    "padded max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "padded average pool": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "amax": lambda x: x.amax((2, 3)),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear, enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, reduced": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "reflected": lambda x: F.pad(x, (2, 1, 0, 2), mode="reflect"),
    "replicated": lambda x: F.pad(x, (3, 1, 0, 2), mode="replicate"),
    "rolled": lambda x: x.roll((3, -5), (2, 3)),
    "joined": lambda x: torch.cat([x.sigmoid(), x, x * 2], 3),
    "masked": lambda x: x.tril(1) + x.flip(3),
    "picked": lambda x: x[:, :, torch.arange(x.shape[2] - 1, -1, -1)],
    "windows": lambda x: x.flatten(2).mean(1, keepdim=True) * x.flatten(2),
}
SHAPES = ((2, 3, 16, 12), (3, 3, 6, 9), (2, 3, 31, 4), (5, 3, 4, 40), (2, 3, 7, 7))
EDGES = ((1, 3, 6, 8), (2, 3, 4, 1), (0, 3, 6, 8))


def _judged(program: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], x: Tensor, told: str) -> None:
    """Holds values and gradients to eager's, where it takes the image."""
    ours, eager = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    try:
        wanted = program(eager)
    except (RuntimeError, IndexError):
        return
    found = compiled(ours)
    torch.testing.assert_close(found, wanted, msg=lambda m: f"{told}: {m}")
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, ours, weights)[0],
        torch.autograd.grad(wanted, eager, weights)[0],
        msg=lambda m: f"{told}, gradient: {m}",
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("name", IMAGES)
def test_images_of_any_size(name: str, layout: torch.memory_format) -> None:
    seed = random.randrange(2**32)
    torch.manual_seed(seed)
    program = IMAGES[name]
    compiled = torchcompile.compile(program, options={"strict": True}, dynamic=True, fullgraph=True)
    for shape in SHAPES:
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout)
        _judged(program, compiled, x, f"seed {seed}, {shape}")
    recompiled = of(LEDGER.events, Effect.RECOMPILE)
    assert len(recompiled) <= 2, recompiled  # of odd sizes, or of those that a window is as long as
    for shape in EDGES:
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout)
        _judged(program, compiled, x, f"seed {seed}, {shape}")
