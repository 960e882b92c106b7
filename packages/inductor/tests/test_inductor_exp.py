"""The exponential and the error function of generated C++ in units in the last place, over all of float32, ends and all."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

import primtorch
from torchinductor import InductorOptions, compile_graph
from torchinductor.codegen.cpp.build import FLAGS as BUILD_FLAGS

FLAGS = {"native": "", "256 bits": "-mno-avx512f", "without fma": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


def drawn_bits(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (400_000,), generator=generator).to(torch.int32).view(torch.float32)


def compiled(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, flags: str) -> torch.Tensor:
    options = InductorOptions(cxx=f"g++ {FLAGS[flags]}" if FLAGS[flags] else None)
    found = compile_graph(primtorch.lower(primtorch.trace(function, x)), [x], options)(x)[0]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("flags", FLAGS)
def test_exp(flags: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = drawn_bits(generator)
    spread = torch.rand(400_000, generator=generator, dtype=torch.float64).mul(200).sub(108).float()
    ends = torch.tensor([0.0, -0.0, 88.72283, 88.72284, 89.5, -87.33655, -87.4, -103.97, -103.98, -104.5, 3e38, -3e38])
    limits = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45])
    x = torch.cat((bits, spread, ends, limits))
    found = compiled(torch.exp, x, flags)
    truth = x.double().exp()
    rounded = truth.float()
    assert torch.equal(found.isnan(), x.isnan())
    over = rounded.isinf()
    assert torch.equal(found[over], rounded[over])
    fine = ~over & ~x.isnan()
    unit = torch.exp2(rounded[fine].double().clamp_min(2.0**-126).log2().floor() - 23)
    worst = ((found[fine].double() - truth[fine]).abs() / unit).max()
    assert worst <= 1.25, worst


@pytest.mark.parametrize("flags", FLAGS)
def test_erf(flags: str) -> None:
    """Where vectors are of 512 bits it is our own; libmvec promises four units."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(400_000, generator=generator, dtype=torch.float64).mul(10).sub(5).float()
    ends = torch.tensor([0.0, -0.0, 3.83, 3.92, 3.999999, 4.0, 4.000001, -4.0, 3e38, -3e38, 1e-45, -1e-45, 1.2e-38])
    limits = torch.tensor([float("inf"), float("-inf"), float("nan")])
    x = torch.cat((drawn_bits(generator), spread, ends, limits))
    found = compiled(torch.erf, x, flags)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.signbit()[~x.isnan()], x.signbit()[~x.isnan()])
    fine = ~x.isnan()
    truth = x[fine].double().erf()
    unit = torch.exp2(truth.abs().clamp(2.0**-126, 1 - 2.0**-53).log2().floor() - 23)
    error = (found[fine].double() - truth).abs() / unit
    worst = error.max()
    assert worst <= (2.25 if own_erf() and flags == "native" else 4.0), (worst, x[fine][error.argmax()])


def own_erf() -> bool:
    """Whether the compiler makes vectors of 512 bits here."""
    said = subprocess.run(["g++", *BUILD_FLAGS, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True)
    return "__AVX512F__" in said.stdout
