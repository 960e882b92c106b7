"""A training step over a vocabulary that no vector load divides keeps its scores as the product wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu

import torchcompile
from primtorch.testing import assert_as_accurate
from torchinductor.codegen.cpp.backend import CppBackend
from torchinductor.schemas import DeviceTraits, ProductRates

WORDS, WIDTH, TOKENS = 517, 24, 40
MARGIN = 520


@pytest.fixture(autouse=True)
def device_that_wants_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = ProductRates(alignment=16, aligned=1e9, unaligned=1e3, bandwidth=4e12)
    monkeypatch.setattr(CppBackend, "traits", DeviceTraits(products=rates))


def step(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (x @ w.t()).view(4, TOKENS // 4, WORDS)
    return F.cross_entropy(logits.float().flatten(0, 1), ids), logits


def leaves(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(size, WIDTH, generator=generator).bfloat16() for size in (TOKENS, WORDS))
    x, w = (t.requires_grad_() for t in made)
    return x, w, torch.randint(WORDS, (TOKENS,), generator=generator)


def compiled(function: Callable[..., Any] = step) -> Callable[..., Any]:
    return torchcompile.compile(function, fullgraph=True, options={"cache": None})


def exact(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]


def gradients(function: Callable[..., Any], inputs: Any, overwrite: bool = False, **kwargs: Any) -> list[torch.Tensor]:
    loss, logits = function(*inputs)
    seen = logits.detach().clone()
    if overwrite:
        with torch.no_grad():
            logits.fill_(3.0)
    return [loss, seen, *torch.autograd.grad(loss, inputs[:2], **kwargs)]


def scores_kept(loss: torch.Tensor) -> list[torch.Tensor]:
    return [t for t in loss.grad_fn.saved_tensors if t.numel() == TOKENS * WORDS]  # type: ignore[union-attr]


def test_the_scores_are_kept_where_the_product_wrote_them() -> None:
    loss, logits = compiled()(*leaves())
    (kept,) = scores_kept(loss)
    assert kept.dtype == torch.bfloat16 and kept.stride()[-2:] == (MARGIN, 1)
    assert kept.untyped_storage().nbytes() == TOKENS * MARGIN * 2
    assert logits.is_contiguous() and logits.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr()


@pytest.mark.parametrize("overwrite", [False, True])
def test_values(overwrite: bool) -> None:
    """The caller may write to the scores before the backward."""
    inputs = leaves()
    found = gradients(compiled(), inputs, overwrite)
    assert_as_accurate(found, gradients(step, inputs), gradients(step, exact(*inputs)))


def test_the_scores_have_a_gradient_too() -> None:
    def both(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = step(x, w, ids)
        return loss + logits.float().square().mean(), logits

    def run(function: Callable[..., Any], inputs: Any) -> list[torch.Tensor]:
        loss, logits = function(*inputs)
        return list(torch.autograd.grad((loss, logits), inputs[:2], (torch.ones_like(loss), torch.ones_like(logits))))

    inputs = leaves(1)
    assert_as_accurate(run(compiled(both), inputs), run(both, inputs), run(both, exact(*inputs)))


def test_a_second_backward() -> None:
    inputs = leaves(2)
    loss, _ = compiled()(*inputs)
    first = torch.autograd.grad(loss, inputs[:2], retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs[:2]), strict=True):
        assert torch.equal(a, b)


def test_a_derivative_of_the_backward() -> None:
    def run(function: Callable[..., Any], inputs: Any) -> list[torch.Tensor]:
        loss, _ = function(*inputs)
        (slope,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        return list(torch.autograd.grad(slope.float().square().sum() * 1e4, inputs[:2]))

    inputs = leaves(3)
    assert_as_accurate(run(compiled(), inputs), run(step, inputs), run(step, exact(*inputs)))


def test_hooks_that_close_the_gaps() -> None:
    inputs = leaves(4)
    with save_on_cpu():
        found = gradients(compiled(), inputs)
    for a, b in zip(found, gradients(compiled(), inputs), strict=True):
        assert torch.equal(a, b)
