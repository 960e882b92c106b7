"""Sums that run along a row go by vectors: integers exactly, float32 as exact as eager's."""

from __future__ import annotations

import random

import pytest
import torch

import primtorch
from primtorch.testing import assert_as_accurate
from torchinductor import InductorOptions, compile_graph

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool)
SHAPES = [(5, 1030), (600,), (3, 7), (2, 3, 90), (4, 513), (1, 8), (70, 16), (0, 5), (3, 0), ()]
NARROW = {"256 bits": "-mno-avx512f", "128 bits": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


def hold(seed: int, dtype: torch.dtype, options: InductorOptions) -> bool:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = choose.choice(SHAPES)
    x = torch.randn(shape, generator=generator) * 3
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    if dtype.is_floating_point and x.numel() and choose.random() < 0.3:
        x.view(-1)[choose.randrange(x.numel())] = choose.choice([float("inf"), float("nan"), float("-inf")])
    dim = choose.randrange(-1, max(len(shape), 1)) if shape else 0
    use = choose.choice(["alone", "computed", "across"])
    x = x.movedim(-1, 0).contiguous().movedim(0, -1) if use == "across" and shape else x

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.abs() + x if use == "computed" and dtype != torch.bool else x).cumsum(dim)

    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x)), [x], options)
    (found,), wanted = compiled(x), program(x)
    assert isinstance(found, torch.Tensor)
    told = f"seed {seed}: {dtype}, {shape} along {dim}, {use}"
    if dtype.is_floating_point:
        assert torch.equal(found.isfinite(), wanted.isfinite()) and torch.equal(found.isnan(), wanted.isnan()), told
        fine = wanted.isfinite()
        assert_as_accurate(found[fine], wanted[fine], program(x.double())[fine])
    else:
        assert torch.equal(found, wanted), told
    return "run_sum(r0" in "".join(compiled.sources.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_running_sums(dtype: torch.dtype) -> None:
    assert any([hold(seed, dtype, InductorOptions()) for seed in range(16)]) == (dtype != torch.float64)


@pytest.mark.parametrize("flags", NARROW)
def test_running_sums_without_wide_vectors(flags: str) -> None:
    for seed, dtype in enumerate((torch.float32, torch.int64, torch.bfloat16, torch.float32), 100):
        hold(seed, dtype, InductorOptions(cxx=f"g++ {NARROW[flags]}"))
