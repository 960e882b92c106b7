"""Which modules are built alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchdistributed import ReplicaRounds, forms

_SHARED = functools.partial(nn.functional.gelu, approximate="tanh")


class Part(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(3, 3), nn.Sequential(nn.GELU(), nn.Dropout(0.1))
        self.empty: list[object] = []
        self.register_buffer("seen", torch.zeros(2))
        for name, value in more.items():
            setattr(self, name, value)


def _hooked(i: int) -> nn.Module:
    part = Part()
    if i == 2:
        part.rest[0].register_forward_hook(lambda *given: None)
    return part


def _holding_itself(i: int) -> nn.Module:
    part = Part(number=i)
    part.held = [part, part.layer]  # type: ignore[assignment]
    return part


ALIKE: list[Callable[[int], nn.Module]] = [
    lambda i: Part(),
    lambda i: Part(number=i),
    lambda i: Part(number=i + 3, other=7),
    lambda i: Part(activation=functools.partial(nn.functional.gelu, approximate="tanh")),
    lambda i: Part(activation=_SHARED, table={"a": (1, 2.0)}),
    lambda i: Part(_own=None),
    _holding_itself,
]
UNLIKE: dict[int, list[Callable[[int], nn.Module]]] = {
    2: [
        lambda i: Part(kind="even" if i % 2 else "odd", number=i),
        lambda i: Part().requires_grad_(i > 0),
        lambda i: Part().train(i > 0),
        lambda i: Part().to(torch.float64 if i else torch.float32),
        lambda i: nn.Linear(3, 3, bias=i > 1),
        lambda i: Part(layer=nn.Linear(3, 4 if i else 3)),
        _hooked,
    ],
    5: [
        lambda i: Part(number=2**i),
        lambda i: Part(rate=i / 10),
        lambda i: Part(_own=str(i)),
        lambda i: Part(scales=[2**i]),
        lambda i: nn.Conv1d(3, 3, 1, dilation=2**i),
        lambda i: Part(activation=lambda x: x),
        lambda i: Part(more=nn.ModuleList(nn.Linear(2, 2) for _ in range(i))),
    ],
}


@pytest.mark.parametrize("make", ALIKE)
def test_parts_that_are_built_alike_have_one_form(make: Callable[[int], nn.Module]) -> None:
    assert forms([make(i) for i in range(5)]) == 1


@pytest.mark.parametrize(("count", "make"), [(count, make) for count, found in UNLIKE.items() for make in found])
def test_parts_that_differ_in_what_guards_compare_have_others(count: int, make: Callable[[int], nn.Module]) -> None:
    assert forms([make(i) for i in range(5)]) == count


def test_nothing_goes_round_by_round_where_no_replica_runs() -> None:
    assert ReplicaRounds(2)([Part() for _ in range(5)]) is None
