"""The exponential of generated C++, over all of float32: within 1.25 units in the last place, ends and all."""

from __future__ import annotations

import pytest
import torch

import primtorch
from torchinductor import InductorOptions, compile_graph

FLAGS = {"native": "", "256 bits": "-mno-avx512f", "without fma": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


@pytest.mark.parametrize("flags", FLAGS)
def test_exp(flags: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (400_000,), generator=generator).to(torch.int32).view(torch.float32)
    spread = torch.rand(400_000, generator=generator, dtype=torch.float64).mul(200).sub(108).float()
    ends = torch.tensor([0.0, -0.0, 88.72283, 88.72284, 89.5, -87.33655, -87.4, -103.97, -103.98, -104.5, 3e38, -3e38])
    limits = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45])
    x = torch.cat((bits, spread, ends, limits))
    options = InductorOptions(cxx=f"g++ {FLAGS[flags]}" if FLAGS[flags] else None)
    found = compile_graph(primtorch.lower(primtorch.trace(torch.exp, x)), [x], options)(x)[0]
    assert isinstance(found, torch.Tensor)
    truth = x.double().exp()
    rounded = truth.float()
    assert torch.equal(found.isnan(), x.isnan())
    over = rounded.isinf()
    assert torch.equal(found[over], rounded[over])
    fine = ~over & ~x.isnan()
    unit = torch.exp2(rounded[fine].double().clamp_min(2.0**-126).log2().floor() - 23)
    worst = ((found[fine].double() - truth[fine]).abs() / unit).max()
    assert worst <= 1.25, worst
