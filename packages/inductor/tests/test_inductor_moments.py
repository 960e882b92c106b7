"""Means and variances of columns in one pass over memory: generated C++ against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import primtorch
from primtorch.testing import assert_as_accurate
from torchinductor import InductorOptions, compile_graph, generate_source
from torchinductor.codegen.cpp import plan

Program = Callable[..., object]


def batch_norm(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return F.batch_norm(x, mean, var, training=True), mean, var


# Programs, shapes, and whether the channels come last.
CASES: dict[str, tuple[Program, tuple[int, ...], bool]] = {
    "columns": (lambda x: torch.var_mean(x, 0), (257, 130), False),
    "few columns": (lambda x: torch.var_mean(x, 0, correction=0), (200, 7), False),
    "of a computed value": (lambda x: torch.var_mean(x.abs() * 2, 0), (160, 64), False),
    "with a maximum": (lambda x: (*torch.var_mean(x, 0), x.amax(0)), (300, 65), False),
    "batch norm": (batch_norm, (3, 70, 20, 13), True),
    "batch norm of rows": (batch_norm, (1031, 33), False),
}


@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("name", CASES)
def test_one_pass(name: str, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    program, shape, last = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + shift
    x = x.to(memory_format=torch.channels_last) if last else x
    monkeypatch.setattr(plan, "_FAR", 1)
    compiled = compile_graph(primtorch.lower(primtorch.trace(program, x)), [x], InductorOptions())
    assert "_gaps" in "".join(compiled.sources.values())
    for found, eager, truth in zip(compiled(x), program(x), program(x.double()), strict=True):  # type: ignore[arg-type]
        assert_as_accurate(found, eager, truth)


@pytest.mark.parametrize("rows", [256, 4096])
def test_two_passes_where_caches_keep_the_values(rows: int) -> None:
    x = torch.empty(rows, 1024)
    (text,) = generate_source(primtorch.lower(primtorch.trace(lambda x: torch.var_mean(x, 0), x))).values()
    assert ("_gaps" in text) == (rows == 4096)
