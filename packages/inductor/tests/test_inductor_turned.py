"""Accesses that are contiguous across the loop that is vectorised are turned over in a buffer of a tile."""

from __future__ import annotations

import random

import pytest
import torch
from test_inductor_symbolic import symbolic

import primtorch
from torchinductor import InductorOptions, compile_graph

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.int8, torch.bool)
SHAPES = [(40, 130), (16, 64), (17, 9), (8, 8), (3, 50, 21), (2, 3, 33, 70), (100, 7)]
NARROW = {"256 bits": "-mno-avx512f", "128 bits": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


def laid(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values with the dims in another order in memory."""
    back = [order.index(d) for d in range(len(order))]
    return x.permute(order).contiguous().permute(back)


def hold(seed: int, dtype: torch.dtype, options: InductorOptions) -> bool:
    """Values of two operands that lie in two orders, into results that lie in two; says whether any was turned over."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = choose.choice(SHAPES)
    orders = [choose.sample(range(len(shape)), len(shape)) for _ in range(4)]
    values = torch.randint(0, 2 if dtype == torch.bool else 50, (2, *shape), generator=generator).to(dtype)
    x, y = laid(values[0], orders[0]), laid(values[1], orders[1])

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x ^ y if dtype == torch.bool else x + y
        return z.permute(orders[2]).contiguous(), (~z if dtype == torch.bool else z * 2).permute(orders[3]).contiguous()

    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x, y)), [x, y], options)
    for found, wanted in zip(compiled(x, y), program(x, y), strict=True):
        assert isinstance(found, torch.Tensor)
        assert found.stride() == wanted.stride()
        assert torch.equal(found, wanted), f"seed {seed}: {dtype}, {shape}, orders {orders}"
    return any(" turn(" in text.split('extern "C" int')[-1] for text in compiled.sources.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_orders_of_memory(dtype: torch.dtype) -> None:
    turned = [hold(seed, dtype, InductorOptions()) for seed in range(8)]
    assert any(turned)


@pytest.mark.parametrize("flags", NARROW)
def test_orders_of_memory_without_wide_vectors(flags: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.int8), 100):
        hold(seed, dtype, InductorOptions(cxx=f"g++ {NARROW[flags]}"))


def test_symbolic_sizes() -> None:
    gm = symbolic(
        lambda p, n, m, x, y: p.copy_strided(p.add(p.permute(x, (1, 0)), y), (n, 1)),
        (40, 90),
        lambda n, m: [((n, m), torch.float32), ((m, n), torch.float32)],
    )
    compiled = compile_graph(gm, (), InductorOptions())
    assert any(" turn(" in text.split('extern "C" int')[-1] for text in compiled.sources.values())
    for n, m in ((40, 90), (1, 3), (0, 4), (17, 129), (64, 16)):
        x, y = torch.randn(n, m), torch.randn(m, n)
        (found,) = compiled(n, m, x, y)
        assert torch.equal(found, x.t() + y)


def test_in_place() -> None:
    """A result that takes the memory of an operand that lies across: the whole tile is read before it is written."""
    w = torch.randn(96, 80)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.mm(w)).t() + x.new_ones(80, 96).cumsum(1).cumsum(0)

    x = torch.randn(96, 96)
    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x, w)), [x, w], InductorOptions())
    torch.testing.assert_close(compiled(x, w)[0], program(x, w))
