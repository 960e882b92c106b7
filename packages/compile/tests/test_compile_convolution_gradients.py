"""Each part of a convolution's gradient, alone and with the others: what is not asked for changes how the rest is made."""

from __future__ import annotations

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
# Float32 and what is smaller is computed in it; float64's and complex128's own rounding is of 1e-16.
DTYPES = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def gradients(call: Any, module: nn.Module, image: torch.Tensor, asked: tuple[bool, ...]) -> list[torch.Tensor | None]:
    image = image.detach().requires_grad_(asked[0])
    module.zero_grad()
    for parameter, wanted in zip((module.weight, module.bias), asked[1:], strict=True):
        parameter.requires_grad_(wanted)
    out = call(image)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    (out * weights).sum().abs().backward()
    return [image.grad, module.weight.grad, module.bias.grad]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_and_every_dtype(kind: str, asked: tuple[bool, ...]) -> None:
    seed = random.randrange(2**32)
    generator = torch.manual_seed(seed)
    dims = int(kind[-1])
    for dtype, tolerance in DTYPES.items():
        groups = random.Random(f"{seed} {dtype}").choice((1, 2, 4))
        module = KINDS[kind](4, 8, 3, stride=2, padding=1, groups=groups).to(dtype)
        image = torch.randn(3, 4, *(9, 8, 7)[:dims], generator=generator, dtype=torch.float64).to(dtype)
        expected = gradients(module, module, image, asked)
        torchcompile.reset()
        found = gradients(torchcompile.compile(module), module, image, asked)
        for name, a, b in zip(("image", "weight", "bias"), expected, found, strict=True):
            assert (a is None) == (b is None), (name, dtype, seed)
            if a is not None and b is not None:
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), (name, dtype, seed)
                gap = float((a - b).abs().max() / a.abs().max())
                assert gap <= tolerance, (name, dtype, gap, seed)
