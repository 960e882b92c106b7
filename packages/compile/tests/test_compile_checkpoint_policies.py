"""Checkpoints that keep what a policy says, operator by operator: values and gradients as without one, and nothing else
kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchcompile

aten = torch.ops.aten


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def large_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    large = op is aten.mm.default and args[1].shape[1] > 4
    return CheckpointPolicy.PREFER_SAVE if large else CheckpointPolicy.PREFER_RECOMPUTE


def nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return False


# What chooses, and how many numbers are kept for the backward beside inputs.
POLICIES: dict[str, tuple[Callable[[], Any], int]] = {
    "a list": (functools.partial(create_selective_checkpoint_contexts, [aten.mm.default]), 3 * 6 + 3 * 4),
    "a function": (functools.partial(create_selective_checkpoint_contexts, products), 3 * 6 + 3 * 4),
    "by sizes": (lambda: create_selective_checkpoint_contexts(large_products), 3 * 6),
    "nothing": (lambda: create_selective_checkpoint_contexts(nothing), 0),
}


def network(context_fn: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def body(t: torch.Tensor) -> torch.Tensor:
            return (((t @ w).sin() @ v).exp() * t).cos()

        return checkpoint(body, x.sin(), use_reentrant=False, context_fn=context_fn) * 2  # type: ignore[no-any-return]

    return program


def derived(program: Callable[..., torch.Tensor], rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, 4), (4, 6), (6, 4))
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    out = program(*given)
    return [out, *torch.autograd.grad(out.sum(), given)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", POLICIES)
def test_values_and_gradients(name: str, backend: str) -> None:
    program = network(POLICIES[name][0])
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    for rows in (3, 3, 5):
        torch.testing.assert_close(derived(compiled, rows), derived(program, rows))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", POLICIES)
def test_only_what_the_policy_chose_is_kept(name: str, backend: str) -> None:
    context_fn, wanted = POLICIES[name]
    compiled = torchcompile.compile(network(context_fn), backend=backend, fullgraph=True)
    given = [torch.ones(shape, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (4, 6), (6, 4))]
    inputs, kept = {t.data_ptr() for t in given}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in inputs:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = compiled(*given)
    assert alive.requires_grad and sum(kept.values()) == wanted


OFFLOADED = pytest.param(
    "offloaded", marks=pytest.mark.expected_eager("ambient_state", "loop")
)  # hooks for what is saved


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["without reentrance", "reentrant", "over a policy", OFFLOADED, "applied"])
def test_wrapped_modules_are_in_the_graph(kind: str, backend: str) -> None:
    """The wrappers of `torch.distributed.algorithms._checkpoint` communicate with nobody."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 4)).double()

    def wrapped(module: nn.Module) -> nn.Module:
        if kind == "offloaded":
            return wrappers.offload_wrapper(module)
        if kind == "applied":
            whole = nn.Sequential(module)
            wrappers.apply_activation_checkpointing(whole, check_fn=lambda part: isinstance(part, nn.Linear))
            return whole
        reentrance = wrappers.CheckpointImpl.REENTRANT if kind == "reentrant" else wrappers.CheckpointImpl.NO_REENTRANT
        how = {"context_fn": POLICIES["a list"][0]} if kind == "over a policy" else {}
        return wrappers.checkpoint_wrapper(module, reentrance, **how)

    torch.manual_seed(0)
    model = nn.Sequential(wrapped(block()), wrapped(block()))
    compiled = torchcompile.compile(model, backend=backend, options={"eager_random": True})
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        results = []
        for called in (model, compiled):
            torch.manual_seed(rows)
            out = called(x)
            out.square().sum().backward()
            leaves = (x, *model.parameters())
            results.append((out, [leaf.grad for leaf in leaves]))
            for leaf in leaves:
                leaf.grad = None
        torch.testing.assert_close(results[1], results[0])
    assert sorted(compiled.state_dict()) == sorted(model.state_dict())
