"""Programs that sum up columns of what they go through by rows, with one kernel for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from device_cases import activate_and_share, gradients, normalise

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A program of tensors.

    Attributes:
        shapes: of the inputs.
    """

    program: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    def inputs(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=draw).to(self.dtype) for shape in self.shapes]


def root_mean_square(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def normalise_sum(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """A block's end: what a product lacks, the residual, a norm; the gradient of `bias` is a sum of columns too."""
    return F.layer_norm(residual + (x + bias), weight.shape, weight, shift)


def share_and_sum(shares: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax's gradient and the sums of its columns, which are those of what is stored."""
    product = shares * slope
    grad = product - shares * product.sum(-1, keepdim=True)
    return grad, grad.sum(0)


def standardised(x: Tensor) -> tuple[Tensor, ...]:
    """Columns' sums of several values, of integers too, and what is computed of them."""
    rows = x - x.mean(-1, keepdim=True)
    return rows, rows.abs().sum(0).sqrt(), (x > 0).sum(0), x.square().sum(0) + 1


def of_several_axes(x: Tensor, weight: Tensor, bias: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """Rows along two dimensions that are no one walk: the images lie by channels last, with a margin."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = normalise(leaves[0][:, :-1], *leaves[1:])
    return out.detach(), *torch.autograd.grad(out, leaves, slope[:, 1:])


CASES: dict[str, Case] = {
    "layer norm": Case(gradients(normalise), ((40, 32), (32,), (32,), (40, 32))),
    "odd rows and columns": Case(gradients(normalise), ((37, 21), (21,), (21,), (37, 21))),
    "a row in a tile": Case(gradients(normalise), ((11, 100), (100,), (100,), (11, 100))),
    "fewer rows than a tile": Case(gradients(normalise), ((3, 20), (20,), (20,), (3, 20))),
    "in halves": Case(gradients(normalise), ((40, 32), (32,), (32,), (40, 32)), dtype=torch.bfloat16),
    "in doubles": Case(gradients(normalise), ((13, 32), (32,), (32,), (13, 32)), dtype=torch.float64),
    "root mean square": Case(gradients(root_mean_square), ((40, 32), (32,), (40, 32))),
    "end of a block": Case(gradients(normalise_sum), ((40, 32), (40, 32), (32,), (32,), (32,), (40, 32))),
    "much to compute": Case(gradients(activate_and_share), ((40, 32), (32,), (32,), (40, 32))),
    "sums of what is stored": Case(share_and_sum, ((40, 32), (40, 32)), dtype=torch.bfloat16),
    "several sums": Case(standardised, ((50, 24),)),
    "batches of rows": Case(gradients(normalise), ((4, 9, 32), (32,), (32,), (4, 9, 32))),
    "rows with a margin": Case(of_several_axes, ((4, 9, 32), (32,), (32,), (4, 9, 32))),
}


def of_any_number(p, n, x, slope, weight):  # type: ignore[no-untyped-def]
    """In prims: rows without their means, and sums of columns of these and of what they are multiplied by."""
    width = x.shape[1]
    rows = p.sub(x, p.expand(p.mul(p.sum(x, (1,), True), 1 / width), x.shape))
    scaled = p.mul(p.mul(rows, slope), p.expand(weight, x.shape))
    return rows, p.sum(p.mul(rows, slope), (0,)), p.sum(slope, (0,)), scaled


def of_any_number_in_eager(x: Tensor, slope: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    rows = x - x.mean(1, keepdim=True)
    return rows, (rows * slope).sum(0), slope.sum(0), rows * slope * weight
