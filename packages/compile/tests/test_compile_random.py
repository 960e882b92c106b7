"""`options={"eager_random": True}`: every draw is eager's, in eager's order, and the generator ends where eager's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchcompile


def creation(x):
    return torch.rand(3) + x, torch.randn(3), torch.randint(0, 10, (4,)), torch.randperm(5), torch.rand_like(x) * x


def unused(x):
    torch.rand(7)
    return F.dropout(x, 0.5) + torch.rand_like(x)


def dropouts(x):
    return (
        F.dropout1d(x[None, None] * 1.0, 0.5), F.alpha_dropout(x, 0.3), F.rrelu(x, training=True),
        F.feature_alpha_dropout(x[None, :, None], 0.5),
    )  # fmt: skip


def in_place(x):
    normal, uniform, late = torch.empty(4).normal_(1, 2), torch.empty(3).uniform_(2, 3), torch.empty(3).exponential_()
    picks = torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 5, replacement=True)
    return normal, uniform * x, late, torch.bernoulli(torch.full((5,), 0.3)), picks


def distributions(x):
    rate = x.abs().detach()
    return F.gumbel_softmax(x[None], hard=True), torch.normal(x, 2.0), torch.normal(0.0, rate), torch.poisson(rate * 5)


def attention(x):
    q = x.view(1, 1, 1, 3)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def under_a_checkpoint(x):
    return checkpoint(lambda v: F.dropout(v.sin(), 0.5), x, use_reentrant=False) + F.dropout(x, 0.2)


def order_of_use_is_not_that_of_drawing(x):
    first, second = torch.rand(3), torch.rand(3)
    return second - x, first * x


def a_draw_waits_for_a_kernel(x):
    """Another draw does not, and kernels that fuse across both would change their order."""
    heads = torch.bernoulli(torch.sigmoid(x.detach() * 3))
    noise = torch.rand(3)
    tails = torch.bernoulli(torch.sigmoid(x.detach() * 3 + noise))
    return (x * 3).exp() * noise + heads, torch.sigmoid(x * 3) * 2, tails


PROGRAMS: tuple[Callable[[Any], Any], ...] = (
    creation, unused, dropouts, in_place, distributions, attention, under_a_checkpoint,
    order_of_use_is_not_that_of_drawing, a_draw_waits_for_a_kernel,
)  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_draws_are_eagers(program: Callable[[Any], Any], backend: str) -> None:
    options = {"eager_random": True, "strict": True}
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True, options=options)
    for seed in (1, 2):
        runs = []
        for f in (program, compiled):
            x = torch.linspace(-1, 2, 3).requires_grad_()
            torch.manual_seed(seed)
            results = f(x)
            results = results if isinstance(results, tuple) else (results,)
            sum(r.sum() for r in results if r.requires_grad).backward()
            runs.append([*results, x.grad, torch.rand(2)])
        torch.testing.assert_close(runs[1], runs[0])
