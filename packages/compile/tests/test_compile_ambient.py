"""Programs that change the ambient state: results, gradients and the state afterwards are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile
import torchdynamo

BACKENDS = ("eager", "aot_eager", "inductor")


def evaluated(x: torch.Tensor, w: torch.Tensor) -> Any:
    total = 0.0
    with torch.no_grad():
        for row in x:
            total += (row * w).sum().item()
    return w * total


@torch.no_grad()
def decorated(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = (x * w).sum()
    return y + 1 if y.item() > 0 else y


def scaled_by_a_number(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.no_grad():
        largest = y.abs().max().item()
    return y / largest


def enabled_within(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.no_grad():
        plain = x * 2
        with torch.enable_grad():
            y, view, written = w * plain, w.view(-1, 1), x.clone()
            written.mul_(w)
    return y, view, written, plain


def left_off(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    torch.set_grad_enabled(False)
    z = y * w
    torchdynamo.graph_break()
    return y, z, z * w


def default_device(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.device("meta"):
        shape = torch.ones(2).new_empty(4).shape
        torchdynamo.graph_break()
        at = torch.ones(shape, device=x.device)
        on_meta = torch.zeros(3).device.type == "meta"
    return at * x.sum() + on_meta, torch.ones(1) + w.sum()


PROGRAMS: tuple[Callable[..., Any], ...] = (
    evaluated, decorated, scaled_by_a_number, enabled_within, left_off, default_device,
)  # fmt: skip


def _outcome(program: Callable[..., Any], grad: bool) -> tuple[list[torch.Tensor], list[Any], bool]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, dtype=torch.float64, generator=generator)
    w = torch.rand(3, dtype=torch.float64, generator=generator).requires_grad_()
    try:
        torch.set_grad_enabled(grad)
        results = program(x, w)
        left = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    results = list(results) if isinstance(results, tuple) else [results]
    grads: list[Any] = []
    for result in results:
        if result.requires_grad:
            grads.append(torch.autograd.grad(result.sum(), w, retain_graph=True)[0])
    return results, grads, left


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_as_eager(program: Callable[..., Any], backend: str, grad: bool) -> None:
    wanted, wanted_grads, wanted_left = _outcome(program, grad)
    compiled = torchcompile.compile(program, backend=backend)
    for _ in range(2):
        results, grads, left = _outcome(compiled, grad)
        assert left is wanted_left
        assert [r.requires_grad for r in results] == [r.requires_grad for r in wanted]
        torch.testing.assert_close(results, wanted)
        torch.testing.assert_close(grads, wanted_grads)
