"""Programs of matrix products and what stands around them, for the template's tests: structure, binaries, values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

F16, F32, F64 = torch.float16, torch.float32, torch.float64
Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A program, its inputs' shapes, and what it becomes: templates, kernels beside them, calls of ATen."""

    program: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    made: tuple[int, int, int] = (1, 0, 0)
    dtype: torch.dtype = F32

    def inputs(self, dtype: torch.dtype | None = None, device: str = "cpu") -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(s, generator=generator) / s[-1] ** 0.5 for s in self.shapes]
        return [v.to(self.dtype).to(dtype or self.dtype).to(device) for v in values]


def halved(x: Tensor) -> Tensor:
    """Rounded to float16, except by the judge."""
    return x.half() if x.dtype is F32 else x


def step(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A training step of two layers: its loss and gradients."""
    parameters = [p.detach().requires_grad_() for p in (w, b, v)]
    loss = F.linear(F.gelu(F.linear(x, *parameters[:2])), parameters[2]).square().mean()
    return loss, *torch.autograd.grad(loss, parameters)


X, W, ROW, LIKE = (70, 40), (40, 33), (33,), (70, 33)

CASES: dict[str, Case] = {
    "mm": Case(torch.mm, (X, W)),
    "mm of halves": Case(torch.mm, (X, W), dtype=F16),
    "mm of doubles": Case(torch.mm, (X, W), dtype=F64),
    "whole tiles": Case(torch.mm, ((64, 64), (64, 128)), dtype=F16),
    "a transposed weight": Case(F.linear, (X, (33, 40), ROW)),
    "a transposed result": Case(lambda x, w: torch.mm(x, w).t().contiguous(), (X, W), (1, 1, 0)),
    "addmm": Case(torch.addmm, (ROW, X, W)),
    "addmm, scaled": Case(lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), (LIKE, X, W)),
    "addmm without bias": Case(lambda b, x, w: torch.addmm(b, x, w, beta=0), (ROW, X, W)),
    "bias, gelu, residual": Case(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (X, (33, 40), ROW, LIKE)),
    "the same in halves": Case(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (X, (33, 40), ROW, LIKE), dtype=F16),
    "three dims": Case(lambda x, w, b: torch.tanh(F.linear(x, w)) * b, ((2, 35, 40), (33, 40), (2, 35, 33))),
    "bmm": Case(lambda a, b: torch.bmm(a, b).relu(), ((3, 20, 40), (3, 40, 33))),
    "bmm by one matrix": Case(lambda a, b: torch.bmm(a, b.expand(3, 40, 33)), ((3, 20, 40), (40, 33))),
    "baddbmm": Case(lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.1), ((1, 1, 33), (3, 20, 40), (3, 40, 33))),
    "two results": Case(lambda x, w: ((y := torch.mm(x, w)).sin(), y), (X, W)),
    "several readers": Case(lambda x, w: ((y := torch.mm(x, w)).sin(), y.cos() * 2), (X, W)),
    "a chain": Case(lambda x, w, v: torch.mm(torch.mm(x, w).relu(), v), (X, W, (33, 20)), (2, 0, 0)),
    "casts of operands": Case(lambda x, w: torch.mm(halved(x), halved(w)).to(x.dtype) + 1, (X, W)),
    "a shifted operand": Case(lambda x, w: torch.mm(x + 1, w + 1), (X, W)),
    "a stored operand": Case(lambda x, w, v: torch.mm(torch.sigmoid(x) * v, w), (X, W, X), (1, 1, 0)),
    "a sum behind it": Case(lambda x, w: torch.mm(x, w).relu().sum(1), (X, W), (1, 1, 0)),
    "a softmax behind it": Case(lambda x, w, r: (torch.mm(x, w) + r).softmax(1), (X, W, LIKE), (1, 1, 0)),
    "over an operand that dies": Case(lambda x, w, v: torch.mm(x, w) * torch.mm(x, v), (X, W, W), (2, 0, 0)),
    "a shifted reader": Case(lambda x, w: (y := torch.mm(x, w)) + F.pad(y[1:], (0, 0, 0, 1)), (X, W), (1, 1, 0)),
    "a picked bias": Case(lambda x, w, t: torch.mm(x, w) + t[(x[:, 0] > 0).long()], (X, W, (2, 33))),
    "a training step": Case(step, (X, (33, 40), ROW, (20, 33)), (5, 2, 0)),
    "one column": Case(lambda x, w: torch.mm(x, w).relu(), (X, (40, 1)), (0, 1, 1)),
    "a short side": Case(lambda x, w: torch.mm(x, w).relu(), ((70, 8), (8, 33)), (0, 1, 1)),
    "integers": Case(lambda x, w: torch.mm((x * 9).long(), (w * 9).long()), (X, W), (0, 2, 1)),
}
"""By what stands around the product."""
