"""Losses of one call, backward one after the other: what autograd's nodes free and keep."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotautograd import aot_function, min_cut, run_graph
from aotautograd.schemas import Opset

Outputs = tuple[torch.Tensor, ...]
PARTITIONERS = {"default": {}, "min cut": {"partitioner": min_cut()}}


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)


def disjoint(x: torch.Tensor, y: torch.Tensor, d: torch.Tensor) -> Outputs:
    return x.sin() * x, y.exp().cos(), d * 2


def shared_data(x: torch.Tensor, y: torch.Tensor, d: torch.Tensor) -> Outputs:
    h = d.sin() + 1
    return (h * x).tanh(), (h * y).exp(), h * y


def shared_input(x: torch.Tensor, y: torch.Tensor, d: torch.Tensor) -> Outputs:
    return x.sin() * d, x.cos() * y, (x @ y).exp()


def shared_trunk(x: torch.Tensor, y: torch.Tensor, d: torch.Tensor) -> Outputs:
    h = (x * y).exp()
    return h.sin(), h.cos(), d + x


def trunk_without_memory(x: torch.Tensor, y: torch.Tensor, d: torch.Tensor) -> Outputs:
    h = x + y
    return h.sin(), h * d, h.sum()


PROGRAMS = (disjoint, shared_data, shared_input, shared_trunk, trunk_without_memory)


def run(program: Callable[..., Outputs], order: tuple[int, ...], retained: tuple[bool, ...]) -> list[Any]:
    """What each backward does to the gradients, or that it raises."""
    torch.manual_seed(0)
    inputs = [leaf(2, 2), leaf(2, 2), torch.rand(2, 2, dtype=torch.float64)]
    outputs, seen = program(*inputs), []
    for place, retain in zip(order, retained, strict=True):
        if not outputs[place].requires_grad:
            continue
        try:
            outputs[place].sum().backward(retain_graph=retain)
        except RuntimeError as error:
            seen.append("second time" if "second time" in str(error) else str(error))
            break
        seen.append([None if t.grad is None else t.grad.clone() for t in inputs[:2]])
    return seen


def agree(eager: list[Any], ours: list[Any]) -> bool:
    if len(eager) != len(ours):
        return False
    return all(
        a == b
        if isinstance(a, str) or isinstance(b, str)
        else all(
            (g is None) == (h is None) and (g is None or torch.allclose(g, h, rtol=1e-12))
            for g, h in zip(a, b, strict=True)
        )
        for a, b in zip(eager, ours, strict=True)
    )


@pytest.mark.parametrize("opset", [None, "prims"])
@pytest.mark.parametrize("partitioner", sorted(PARTITIONERS))
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_after_the_other(program: Callable[..., Outputs], partitioner: str, opset: Opset | None) -> None:
    """In every order, retained or not: gradients where eager has some, its error where it has that."""
    compiled = aot_function(program, fw_compiler=run_graph, decompositions=opset, **PARTITIONERS[partitioner])
    for order in itertools.product(range(3), repeat=3):
        retained = tuple(random.random() < 0.5 for _ in order)
        eager, ours = run(program, order, retained), run(compiled, order, retained)
        assert agree(eager, ours), f"order {order}, retained {retained}: {ours} instead of {eager}"


def test_a_loss_frees_what_it_passed() -> None:
    """A result that is still there keeps nothing of the backward that went through its history."""

    def program(x: torch.Tensor, w: torch.Tensor) -> Outputs:
        h = (x @ w).exp()
        return h.sin().sum(), h

    compiled = aot_function(program, fw_compiler=run_graph)
    loss, h = compiled(leaf(2, 2), leaf(2, 2))
    node = loss.grad_fn
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        _ = node.saved_tensors
    with pytest.raises(RuntimeError, match="second time"):
        h.sum().backward()


def test_a_write_to_what_only_the_other_loss_reads() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Outputs:
        a, b = x.exp(), y.exp()
        return a, b

    for f in (program, aot_function(program, fw_compiler=run_graph)):
        x, y = leaf(3), leaf(3)
        a, b = f(x, y)
        with torch.no_grad():
            b.add_(1)
        a.sum().backward()
        torch.testing.assert_close(x.grad, x.detach().exp(), rtol=1e-12, atol=0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()
