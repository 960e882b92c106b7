"""Leaves that a program makes where nothing is recorded, and keeps: with grad mode off, and in inference mode."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo

MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip
LEAVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "requires_grad_": lambda x: (x + 1).requires_grad_(), "Parameter": lambda x: nn.Parameter(x * 2),
    "detached": lambda x: x.detach().requires_grad_(), "tensor": lambda x: torch.tensor([1.0, 2.0], requires_grad=True),
    "zeros": lambda x: torch.zeros(2, requires_grad=True), "a view": lambda x: x[:1].requires_grad_(),
}  # fmt: skip
USES: dict[str, Callable[[SimpleNamespace, torch.Tensor], Any]] = {
    "kept": lambda keeper, leaf: setattr(keeper, "leaf", leaf), "given": lambda keeper, leaf: leaf,
    "used": lambda keeper, leaf: leaf * 3, "kept and used": lambda keeper, leaf: (setattr(keeper, "leaf", leaf), leaf.sin())[1],
}  # fmt: skip


def told(given: object) -> object:
    if not isinstance(given, torch.Tensor):
        return given
    return type(given), given.requires_grad, given.is_leaf, given.is_inference(), given.tolist()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", LEAVES)
def test_leaves(kind: str, use: str) -> None:
    def program(keeper: SimpleNamespace, x: torch.Tensor) -> Any:
        return USES[use](keeper, LEAVES[kind](x)), x + 1

    for first, second in itertools.product(MODES, repeat=2):
        torchdynamo.reset()
        strict = torchdynamo.CaptureOptions(strict=True)
        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=strict)(program)
        for mode in (first, second, first):
            seen = []
            for call in (program, compiled):
                keeper = SimpleNamespace(leaf=None)
                with MODES[mode]():
                    given, other = call(keeper, torch.arange(2.0))
                seen.append((told(given), told(other), told(keeper.leaf)))
            assert seen[0] == seen[1], f"{mode} of {first}, {second}"
