"""Derivatives of derivatives: gradient penalties and Hessian-vector products equal eager's, to third order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aotautograd import aot_function


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def scalar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ w).pow(3) * x.sum()).sum()


def derivatives(f: Callable[..., torch.Tensor], order: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    value = f(x, w)
    found = [value]
    for _ in range(order):
        grads = torch.autograd.grad(value, (x, w), create_graph=True)
        found += grads
        value = sum(g.sin().sum() for g in grads)
    value.backward()
    return [*found, x.grad, w.grad]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders(order: int) -> None:
    compiled = aot_function(scalar, fw_compiler=identity)
    for a, b in zip(derivatives(scalar, order), derivatives(compiled, order), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_penalty(dropout: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(64, 1)).double()
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    names = [n for n, _ in net.named_parameters()]

    def program(x: torch.Tensor, buffers: dict[str, torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        y = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)) | buffers, (x,))
        return torch.nn.functional.dropout(y, dropout).sum()

    compiled = aot_function(program, fw_compiler=identity)
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    results = []
    for f in (program, compiled):
        for _ in range(2):
            net.zero_grad()
            torch.manual_seed(3)
            image = x.clone().requires_grad_()
            copies = {k: v.clone() for k, v in buffers.items()}
            out = f(image, copies, *net.parameters())
            (grad,) = torch.autograd.grad(out, image, create_graph=True)
            (out + (grad.norm() - 1) ** 2).backward()
        results.append([image.grad, *(p.grad.clone() for p in net.parameters()), *copies.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
