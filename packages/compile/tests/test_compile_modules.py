"""nn.Module's world through the whole stack: trained step by step beside eager, with changes between the steps.

In double precision, where both agree to rounding, and with eager's random numbers, so that dropout does too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_cases import CASES, train

import torchcompile
import torchdynamo


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_a_module_trains_as_in_eager(name: str) -> None:
    case = CASES[name]
    train(case, torchcompile.compile(case.call, options={"strict": True, "eager_random": True}), close)
    report = torchcompile.report()
    assert not report.fallbacks, report
    assert report.captured <= case.graphs
    assert {b.reason for b in torchdynamo.stats().break_details} <= case.breaks  # float32 has operators of its own
