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


class Recurrent(torch.nn.Module):
    """A recurrent layer between layers that do without the length."""

    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.before, self.layer, self.behind = torch.nn.Linear(5, 4), kind(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.layer(torch.tanh(self.before(x)))
        return self.behind(torch.relu(out))


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM], ids=lambda kind: kind.__name__)
def test_recurrent_layers_over_sequences_of_many_lengths(kind: type[torch.nn.RNNBase], dynamic: bool | None) -> None:
    """Their C++ reads the length as a number: it is fixed, or the layer runs by itself between two graphs."""
    module = Recurrent(kind)
    compiled = torchcompile.compile(module, dynamic=dynamic)
    for length, batch in ((5, 2), (6, 3), (7, 4), (9, 5)):
        x = torch.randn(length, batch, 5)
        found, expected = compiled(x), module(x)
        close(found, expected)
        parameters = list(module.parameters())
        close(
            torch.autograd.grad(found.square().sum(), parameters),
            torch.autograd.grad(expected.square().sum(), parameters),
        )
    assert not torchcompile.report().fallbacks
    reasons = {b.reason for b in torchdynamo.stats().break_details}
    assert reasons <= ({"symbolic_size", "operator_without_meta"} if kind is torch.nn.LSTM else set())
