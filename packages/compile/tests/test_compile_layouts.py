"""Values where PyTorch's own kernels choose how their results lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchcompile

CHANNELS_LAST = torch.channels_last


class Patches(nn.Module):
    """Pixels to tokens: the gradient of the convolution's result comes with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).flatten(2).transpose(1, 2).contiguous().sin().sum()


@pytest.mark.parametrize("image", [torch.contiguous_format, CHANNELS_LAST])
@pytest.mark.parametrize("weight", [torch.contiguous_format, CHANNELS_LAST])
def test_gradients_of_convolutions_in_mixed_layouts(image: torch.memory_format, weight: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Patches().double().to(memory_format=weight)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=image).requires_grad_()
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x), inputs)
    found = torch.autograd.grad(torchcompile.compile(model)(x), inputs)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)
