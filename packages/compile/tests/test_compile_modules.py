"""nn.Module's world through the whole stack: trained step by step beside eager, with changes between the steps.

In double precision, where both agree to rounding, and with eager's random numbers, so that dropout does too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_cases import CASES, train
from torch import nn

import torchcompile
import torchdynamo


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.expected_eager(*case.breaks)) for name, case in CASES.items()]
)
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
    """Their C++ reads the length as a number: it is fixed."""
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
    assert not reasons


_SEEN: list[Any] = []
_REGISTRY: set[Any] = set()
_FACTORS: dict[Any, float] = {}
_WEAK: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class KnowsItself(nn.Module):
    """Asks in many ways which object it is, before and behind a break of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_forward_hook(lambda module, args, result: result * (2 if module is _SEEN[0] else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._ask(self.linear(x))
        torchdynamo.graph_break()
        return self._ask(x)

    def _ask(self, x: torch.Tensor) -> torch.Tensor:
        _SEEN.append(self)
        x = x + len(_SEEN) if self in _REGISTRY else x
        x = x * _FACTORS.get(self, 1.0) * _WEAK.get(self, 1.0)
        x = x - 5 if type(self) is KnowsItself and self.__class__ is type(_SEEN[0]) else x
        return x * 3 if self == _SEEN[0] and self is _SEEN[0] and id(self) == id(_SEEN[0]) else x


@pytest.mark.expected_eager("graph_break")
def test_a_compiled_module_is_itself_in_its_own_call() -> None:
    model = KnowsItself().double()
    compiled = torchcompile.compile(model)
    assert compiled == model and model == compiled and hash(compiled) == hash(model) and compiled != KnowsItself()
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    for key in (None, model, compiled):
        for table in (_REGISTRY, _FACTORS, _WEAK):
            table.clear()
        if key is not None:
            _REGISTRY.add(key)
            _FACTORS[key], _WEAK[key] = 2.0, 0.5
        outcomes = []
        for call in (model, compiled, copy.deepcopy(compiled) if key is None else compiled):
            _SEEN.clear()
            outcomes.append(call(x))
            assert call is not compiled or all(found is model for found in _SEEN)
        assert all(torch.equal(outcomes[0], outcome) for outcome in outcomes), key


def test_state_outside_of_the_dictionary_is_the_models() -> None:
    class Slotted(nn.Module):
        __slots__ = ("scale",)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = self.scale + 1.0
            return x * self.scale

    model = Slotted()
    model.scale = 1.0
    compiled = torchcompile.compile(model)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert model.scale == 3.0


def test_a_compiled_class() -> None:
    @torchcompile.compile
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + x

    class Wider(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    @torchcompile.compile(fullgraph=True)
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    for block in (Block(4), Block(6), Wider(4)):
        x = torch.randn(2, block.linear.weight.shape[0])
        torch.testing.assert_close(block(x), block.forward(x))
        torch.testing.assert_close(copy.deepcopy(block)(x), block.forward(x))
    assert torchcompile.report().captured
    assert torch.equal(Scale(2.0)(torch.ones(3)), torch.full((3,), 2.0))
    whole = torchcompile.compile(nn.Sequential(Block(4), Wider(4), torchcompile.compile(nn.ReLU())), fullgraph=True)
    assert whole(torch.ones(4)).shape == torch.Size([4])  # those within are part of its one graph
    scaled = torchcompile.compile(lambda x: Scale(2.0)(x) + 1, fullgraph=True)
    assert torch.equal(scaled(torch.ones(3)), torch.full((3,), 3.0))
    for kind in (nn.Linear, int):
        with pytest.raises(torchcompile.NotCompilable):
            torchcompile.compile(kind)
