"""Places of largest and smallest values: the first of equals, and a NaN before all others, exactly as in eager."""

from __future__ import annotations

import math
import random

import pytest
import torch

import primtorch
from torchinductor import InductorOptions, compile_graph

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPES = [(3, 1100), (40, 10), (5, 513), (2, 3, 700), (70, 9, 5), (1, 1), (600,), (6, 4, 16, 3)]
# Fewer lanes, and none: what other processors run.
NARROW = {"256 bits": "-mno-avx512f", "128 bits": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


def draw(dtype: torch.dtype, shape: tuple[int, ...], choose: random.Random) -> torch.Tensor:
    """Values with many ties; of floats, some without order and some without end."""
    made = torch.randint(0 if dtype == torch.uint8 else -9, 9, shape, generator=torch.default_generator).to(dtype)
    if choose.random() < 0.3:
        made = torch.full_like(made, choose.choice([0, 3]))
    if dtype.is_floating_point:
        for value in (float("-inf"), float("inf"), float("nan")):
            if choose.random() < 0.5:
                count = choose.choice([1, 3, made.numel() // 2])
                made.view(-1)[torch.randint(0, made.numel(), (count,))] = value
    elif choose.random() < 0.3:
        made.fill_(choose.choice([torch.iinfo(dtype).min, torch.iinfo(dtype).max]))
    order = list(range(made.dim()))
    choose.shuffle(order)
    return made.permute(order)


def best(x: torch.Tensor, dim: int | None, smallest: bool, computed: bool) -> tuple[torch.Tensor, ...]:
    x = x.abs() if computed else x
    place = (torch.argmin if smallest else torch.argmax)(x, dim)
    if dim is None:
        return (place,)
    return (place, *(torch.min if smallest else torch.max)(x, dim))


def hold(seed: int, dtype: torch.dtype, options: InductorOptions) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    x = draw(dtype, choose.choice(SHAPES), choose)
    dim = choose.choice([None, *range(x.dim())])
    smallest, computed = choose.random() < 0.5, choose.random() < 0.3

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return best(x, dim, smallest, computed)

    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x)), [x], options)
    for found, wanted in zip(compiled(x), program(x), strict=True):
        assert isinstance(found, torch.Tensor)
        told = f"seed {seed}: {dtype}, {tuple(x.shape)} by {x.stride()}, along {dim}, smallest: {smallest}"
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), told


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=lambda d: str(d)[6:])
def test_places(dtype: torch.dtype) -> None:
    for seed in range(12):
        hold(seed, dtype, InductorOptions())


@pytest.mark.parametrize("flags", NARROW)
def test_places_without_wide_vectors(flags: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64), 100):
        hold(seed, dtype, InductorOptions(cxx=f"g++ {NARROW[flags]}"))
        # Where a kernel leaves something in the registers that `fmod` computes in, the next result is NaN.
        assert math.fmod(-5.5, 2.0) == -1.5


def test_rows_are_read_by_vectors() -> None:
    x = torch.randn(8, 1024)
    compiled = compile_graph(primtorch.lower(primtorch.trace(lambda x: x.argmax(1), x)), [x], InductorOptions())
    assert "#pragma omp simd reduction(max:r0_m)" in "".join(compiled.sources.values())
