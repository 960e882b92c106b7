"""What the program asks of tensors' elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .record import PYTHON, Program, maker, part


@part(PYTHON, "item in arithmetic")
def with_item(x: torch.Tensor) -> Any:
    return x * x.sum().item()


@part(PYTHON, "item as a size")
def sized_by_item(x: torch.Tensor) -> Any:
    count = (x > 0).sum().item()
    return torch.zeros(count, dtype=x.dtype) + x.sum(), x[: x[0].argmax().item()] * 2


@part(PYTHON, "tolist")
def with_tolist(x: torch.Tensor) -> Any:
    return x + sum(x[0].tolist())


@part(PYTHON, "split and narrow by numbers of a tensor")
def split_by_lengths(x: torch.Tensor) -> Any:
    lengths = torch.tensor([1, 2, x.shape[0] - 3])
    parts = [part.sum(0) for part in x.split(lengths.flip(0).tolist())]
    return parts, x.narrow(0, lengths[0].item(), lengths[1].item()) * 2


@part(
    PYTHON,
    "a branch on data",
    "data_dependent_branch",
    gradient=False,
    why="Python goes one way or the other by a tensor's data; instead: torch.where, or torch.cond",
)
def branching(x: torch.Tensor) -> Any:
    return x.sin() if x.sum() > 0 else x.cos()


@part(PYTHON, "assert on a tensor")
def asserting(x: torch.Tensor) -> Any:
    assert (x.abs() < 1e9).all()
    return x.sin()


@part(PYTHON, "torch._assert_async, _check and _check_tensor_all")
def checking(x: torch.Tensor) -> Any:
    torch._assert_async((x < 1e9).all())
    torch._assert_async((x < 1e9).all(), "too large")
    torch._check_tensor_all(x < 1e9, lambda: "too large")
    torch._check_value(x.dim() == 2, lambda: "a matrix is wanted")
    positive = (x[0] > 0).sum().item()
    torch._check(positive <= 3)
    return torch.ones(positive, dtype=x.dtype).sum() + x


@part(PYTHON, "nonzero and boolean masks")
def masked(x: torch.Tensor) -> Any:
    return x[x > 0].sum(), x.nonzero()


@part(PYTHON, "min and max of tensors")
def extremes(x: torch.Tensor) -> Any:
    return min(x[0, 0], x[0, 1]) + x


@part(PYTHON, "max by a key")
def largest_by_key(x: torch.Tensor) -> Any:
    return max([x[0, 0], x[1, 1]], key=lambda t: t * 2) + x


@part(PYTHON, "min and max of what a generator gives, and of rows by a key")
def extremes_of_many(x: torch.Tensor) -> Any:
    longest = max(x.unbind(0), key=lambda row: row.norm())
    return max(column.sum() for column in x.unbind(1)) * x, min([x[0, 0]], default=x) * longest


@part(PYTHON, "sorted tensors")
def ordered(x: torch.Tensor) -> Any:
    return torch.stack(sorted([x[0, 0], x[0, 1], x[1, 0]]))


@part(PYTHON, "sorted by a key of shapes")
def ordered_by_shape(x: torch.Tensor) -> Any:
    return torch.cat(sorted([x[:2], x[:1], x[:3]], key=len, reverse=True))


@part(PYTHON, "x.data = ")
def data_set(x: torch.Tensor) -> Any:
    y = x.clone()
    y.data = x.detach() * 2
    return y.sin()


@part(PYTHON, "x.data = , and writes to it")
def data_set_and_written(x: torch.Tensor) -> Any:
    y = x * 2
    y.data = x.detach() - 1
    y.mul_(x)
    with torch.no_grad():
        y[:1].add_(1)
    return y.sin() + y


@maker(PYTHON, "a parameter's data, set and written to", gradient=False)
def parameter_data() -> Program:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def program(x: torch.Tensor) -> Any:
        weight.data = weight.data.lerp(x.detach()[0], 0.5)
        scaled = weight.detach() * 2
        scaled.data.clamp_(max=1.0)
        return scaled + x

    return program
