"""bfloat16 and float16: casts that the program wrote round, autocast's need not, and `precision="eager"` rounds as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchcompile
from primtorch.testing import assert_as_accurate


def bits(program: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of what can have one."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = program(*leaves)
    torch.manual_seed(0)
    gradients = torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *gradients]


def written_into(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    y[:] = x
    return y


CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda x: x.half().float(),
    "to": lambda x: x.to(torch.bfloat16).to(torch.float32) * 2,
    "type": lambda x: x.type(torch.bfloat16).float().neg(),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float16)).float(),
    "copy_": lambda x: torch.empty(x.shape, dtype=torch.float16).copy_(x).float(),
    "an item": lambda x: written_into(x, torch.bfloat16).float(),
    "what is lost": lambda x: x.bfloat16().float() - x,
    "by way of float64": lambda x: x.double().half().float(),
    "both types": lambda x: x.half().bfloat16().float(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_that_the_program_wrote_round(name: str) -> None:
    x = torch.randn(999)
    for ours, eager in zip(
        bits(torchcompile.compile(CASTS[name], fullgraph=True), x), bits(CASTS[name], x), strict=True
    ):
        assert torch.equal(ours, eager)


def test_casts_under_autocast() -> None:
    """One that the program wrote rounds there too; one that autocast puts in is fused."""
    linear, x = nn.Linear(8, 8), torch.randn(16, 8)

    def program(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.bfloat16().float() - x, linear(x.sin()).float()

    lost, _ = torchcompile.compile(program, fullgraph=True)(x)
    assert torch.equal(lost, program(x)[0]) and lost.any()


UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.abs, torch.neg, torch.relu, lambda t: t * 0.3, lambda t: t + 1.7, lambda t: t - 0.1, lambda t: t / 3,
    lambda t: 1 / (t.abs() + 1), lambda t: t.clamp(-1, 1), lambda t: (t.abs() + 1).sqrt(), torch.square,
    lambda t: F.leaky_relu(t), lambda t: F.hardtanh(t), lambda t: F.hardswish(t), lambda t: t**3,
    lambda t: torch.sub(2.5, t), lambda t: t.addcmul(t, t, value=0.5),
    lambda t: t + torch.tensor(1.7),
)  # fmt: skip
BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 0.5),
    lambda a, b: torch.where(a > b, a, b * 2), lambda a, b: a.addcmul(a, b),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chains_are_eagers_to_the_bit(dtype: torch.dtype) -> None:
    seed = int(torch.randint(2**31, ()))
    generator = torch.Generator().manual_seed(seed)

    def pick(among: tuple[Any, ...]) -> Any:
        return among[int(torch.randint(len(among), (), generator=generator))]

    for _ in range(6):
        steps = [(pick(UNARY), pick(BINARY), pick(UNARY)) for _ in range(3)]

        def program(x, y, steps=steps):
            results = []
            for first, both, last in steps:
                x, y = both(first(x), y), last(y)
                results += [x, y]
            return results

        inputs = [torch.randn(700, generator=generator).to(dtype) for _ in range(2)]
        compiled = torchcompile.compile(program, fullgraph=True, options={"precision": "eager"})
        for ours, eager in zip(compiled(*inputs), program(*inputs), strict=True):
            assert torch.equal(ours.nan_to_num(), eager.nan_to_num()), f"seed {seed}"


IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin_": lambda x: x.sin_(),
    "rsqrt_": lambda x: x.rsqrt_(),
    "lgamma_": lambda x: x.lgamma_(),
    "elu": lambda x: torch.nn.functional.elu(x, inplace=True),
    "mish": lambda x: torch.nn.functional.mish(x, inplace=True),
    "logit_": lambda x: x.logit_(0.1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_PLACE)
def test_16_bit_floats_of_symbolic_size_are_written_in_place(name: str, dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        IN_PLACE[name](y)
        return y

    compiled = torchcompile.compile(program, dynamic=True, fullgraph=True)
    for rows in (3, 5):
        given = torch.rand(rows, 4, dtype=torch.float64) * 0.8 + 0.1
        leaves = [given.to(dtype).to(kind).requires_grad_() for kind in (dtype, dtype, torch.float64)]
        values = [f(x) for f, x in zip((compiled, program, program), leaves, strict=True)]
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y, x in zip(values, leaves, strict=True)]
        for ours, eager, exact in (values, gradients):
            assert_as_accurate([ours], [eager], [exact], name)


def test_16_bit_floats_of_symbolic_size_are_drawn_in_place() -> None:
    compiled = torchcompile.compile(
        lambda x: torch.empty_like(x).normal_(2.0, 0.5), dynamic=True, fullgraph=True, options={"eager_random": True}
    )
    for rows in (3, 5):
        x = torch.zeros(rows, 4, dtype=torch.bfloat16)
        torch.manual_seed(rows)
        found = compiled(x)
        torch.manual_seed(rows)
        assert torch.equal(found, torch.empty_like(x).normal_(2.0, 0.5))


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat([x, x[:3]]),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "where": lambda x: torch.where(x > 0, x, x.flip(0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, -0.5),
    "index": lambda x: x[torch.arange(len(x)).flip(0)],
    "transpose": lambda x: x.view(256, -1).t().contiguous(),
    "stack": lambda x: torch.stack([x, x.roll(1)], 1),
    "a written slice": lambda x: x.clone().index_fill_(0, torch.tensor([1, 5]), 2.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_keep_all_bits(copy: str, dtype: torch.dtype) -> None:
    """Of whatever lies in memory: programs pack integers into the memory of floats, where most of a NaN's bits differ
    between two integers."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copied = COPIES[copy](x.view(dtype))
        return copied, copied.view(torch.int16)

    patterns = torch.arange(2**16).to(torch.int16)
    floats, integers = torchcompile.compile(program, fullgraph=True)(patterns)
    wanted = COPIES[copy](patterns.view(dtype)).view(torch.int16)
    assert torch.equal(integers, wanted) and torch.equal(floats.view(torch.int16), wanted)
