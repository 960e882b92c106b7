"""Modules of torch, as torch's own database makes and calls them: results, gradients and buffers are eager's."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import torchcompile

MOST = 3  # calls of a module's, drawn from its own
# Their Python looks into tensors: at targets' lengths, at whether a mask is the causal one.
BREAKS = ("CTCLoss", "Transformer", "TransformerEncoder", "TransformerDecoder")
Outcome = tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]


def calls(info: Any, seed: int) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Modules in training or not, each with arguments."""
    made = [
        (training, sample)
        for training in (True, False)
        for sample in info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
        if sample.forward_input is not None
    ]
    for training, sample in random.Random(seed).sample(made, min(MOST, len(made))):
        torch.manual_seed(seed)
        how = sample.constructor_input
        module = info.module_cls(*how.args, **how.kwargs).double().train(training)
        yield module, sample.forward_input.args, sample.forward_input.kwargs


def fresh(value: Any) -> Any:
    """Leaves of their own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def outcome(module: nn.Module, call: Any, args: Any, kwargs: Any, seed: int) -> Outcome:
    """What a call gives: results, gradients of all that it was made of, buffers behind it."""
    args, kwargs = pytree.tree_map(fresh, (args, kwargs))
    torch.manual_seed(seed)
    results = [leaf for leaf in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    wanted = [leaf for leaf in (*given, *module.parameters()) if leaf.requires_grad]
    derived = [result for result in results if result.requires_grad]
    tangents = [torch.randn_like(result) for result in derived]
    gradients = torch.autograd.grad(derived, wanted, tangents, allow_unused=True) if derived and wanted else ()
    return results, list(gradients), list(module.buffers())


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name.removeprefix("nn."))
def test_a_module_of_torch(info: Any) -> None:
    seed = random.randrange(1 << 30)
    for place, (module, args, kwargs) in enumerate(calls(info, seed)):
        twin = copy.deepcopy(module)
        torchcompile.reset()
        expected = outcome(twin, twin, args, kwargs, seed)
        found = outcome(module, torchcompile.compile(module, options={"strict": True}), args, kwargs, seed)
        for what, mine, eagers in zip(("result", "gradient", "buffer"), found, expected, strict=True):
            told = f"seed {seed}, call {place}, {what}"
            for one, other in itertools.zip_longest(mine, eagers):
                torch.testing.assert_close(
                    one, other, rtol=1e-7, atol=1e-9, equal_nan=True, check_stride=True, msg=lambda m: f"{told}: {m}"
                )
        report = torchcompile.report()
        assert not report.fallbacks, report
        assert not report.breaks or info.name.removeprefix("nn.") in BREAKS, report
