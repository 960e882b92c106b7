"""What a program returns lies in memory as eager's does: results share it with each other and with inputs where eager's
do, and nowhere else. What a program writes is written as if at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchcompile

BACKENDS = ("eager", "aot_eager", "inductor")


def copies(x):
    return x.clone(), x.clone(), x.clone().view(3, 1), x.clone()[1:]


def constants(x):
    a, b = torch.zeros(3), torch.zeros(3)
    a += 1
    b += 1
    return a, b, torch.zeros(3), torch.ones(3), x * 0


def equal_results(x):
    return x * 2, 2 * x, x + x, x * 2, (x * 2)[1:]


def calls_that_change_nothing(x):
    return (
        x + 0, x * 1, x / 1, x.pow(1), -(-x), torch.cat([x]), torch.stack([x])[0], x.repeat(1), x.flip(0).flip(0),
        x.double().to(x.dtype), torch.where(torch.ones(3, dtype=torch.bool), x, 0.0), F.pad(x, (0, 0)),
        x.masked_fill(torch.zeros(3, dtype=torch.bool), 1.0), x.index_select(0, torch.arange(3)),
        x.abs().abs(), x.abs(),
    )  # fmt: skip


def views(x):
    y = x * 2
    return y, y.view(3, 1), y[1:], x.view(3, 1), x.expand(2, 3), (x * 2)[1:]


def swap(x, y):
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def rotate(x, y, z):
    kept = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(kept)
    return x.clone(), z + 0


def value_before_a_write(x):
    y = x.clone()
    x.add_(1)
    return y, x + 0


def written_and_returned(x, y):
    x.copy_(y * 2)
    return y * 2, x


PROGRAMS: dict[Callable[..., Any], tuple[int, bool]] = {  # number of inputs, whether they may require gradients
    copies: (1, True),
    constants: (1, True),
    equal_results: (1, True),
    calls_that_change_nothing: (1, True),
    views: (1, True),
    swap: (2, False),
    rotate: (3, False),
    value_before_a_write: (1, False),
    written_and_returned: (2, False),
}


def sharing(tensors: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Pairs that lie in one memory."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return {(i, j) for i, j in itertools.combinations(range(len(places)), 2) if places[i] == places[j]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_results_share_memory_where_eagers_do(program: Callable[..., Any], backend: str) -> None:
    count, differentiable = PROGRAMS[program]
    for requires_grad in (False, True)[: 1 + differentiable]:
        compiled = torchcompile.compile(program, backend=backend, fullgraph=True, options={"strict": True})
        theirs = [torch.randn(3).requires_grad_(requires_grad) for _ in range(count)]
        ours = [t.detach().clone().requires_grad_(requires_grad) for t in theirs]
        for _ in range(2):
            expected, found = program(*theirs) or (), compiled(*ours) or ()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(ours, theirs)
            assert sharing([*ours, *found]) == sharing([*theirs, *expected])


def test_states_that_start_equal_go_their_own_ways() -> None:
    """Zeros made for each of several counters are several counters."""

    @torchcompile.compile(fullgraph=True, options={"strict": True})
    def start(like):
        return [torch.zeros(()) for _ in like], [x.clone() for x in like]

    @torchcompile.compile(fullgraph=True, options={"strict": True})
    def advance(counters, averages, like):
        for counter, average, x in zip(counters, averages, like):
            counter += 1
            average.lerp_(x, 0.5)

    like = [torch.ones(2), torch.ones(2)]
    counters, averages = start(like)
    like[1] *= 3
    for _ in range(3):
        advance(counters, averages, like)
    assert [c.item() for c in counters] == [3, 3]
    torch.testing.assert_close(averages[0], torch.ones(2))
    torch.testing.assert_close(averages[1], torch.full((2,), 2.75))
