"""Each part of a convolution's gradient, alone and with the others: what is not asked for changes how the rest is made."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile

KINDS: dict[str, type[nn.Module]] = {
    "1": nn.Conv1d, "2": nn.Conv2d, "3": nn.Conv3d,
    "transposed 1": nn.ConvTranspose1d, "transposed 2": nn.ConvTranspose2d, "transposed 3": nn.ConvTranspose3d,
}  # fmt: skip
ASKED = [asked for asked in itertools.product((False, True), repeat=3) if any(asked)]
DTYPES = (torch.float64, torch.complex128, torch.float32, torch.bfloat16)


def gradients(call: Any, module: nn.Module, image: torch.Tensor, asked: tuple[bool, ...]) -> list[torch.Tensor | None]:
    image = image.detach().requires_grad_(asked[0])
    module.zero_grad()
    for parameter, wanted in zip((module.weight, module.bias), asked[1:], strict=True):
        parameter.requires_grad_(wanted)
    out = call(image)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).bfloat16().view(out.shape).to(out.dtype)
    out.backward(weights)  # the same numbers in each dtype
    return [image.grad, module.weight.grad, module.bias.grad]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_and_every_dtype(kind: str, asked: tuple[bool, ...], dynamic: bool) -> None:
    """As far from what float64 (or complex128) gives as eager is, twice, and some units in the last place."""
    seed = random.randrange(2**32)
    draw, generator = random.Random(seed), torch.manual_seed(seed)
    dims = int(kind[-1])
    for dtype in DTYPES:
        module = KINDS[kind](4, 8, 3, stride=2, padding=1, groups=draw.choice((1, 2, 4))).to(dtype)
        image = torch.randn(3, 4, *(9, 8, 7)[:dims], generator=generator, dtype=torch.float64).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        exact = gradients(judge := copy.deepcopy(module).to(wide), judge, image.to(wide), asked)
        expected = gradients(module, module, image, asked)
        torchcompile.reset()
        compiled = torchcompile.compile(module, dynamic=dynamic)
        for _ in range(2):  # the second call is one of what is compiled
            found = gradients(compiled, module, image, asked)
            for name, truth, a, b in zip(("image", "weight", "bias"), exact, expected, found, strict=True):
                said = f"{name} {dtype}, seed {seed}"
                assert (a is None) == (b is None), said
                if truth is not None and a is not None and b is not None:
                    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), said
                    own, ours = (float((t - truth).abs().max() / truth.abs().max()) for t in (a, b))
                    assert ours <= 2 * own + 8 * torch.finfo(dtype).eps, (said, ours, own)
