"""Compiled functions that write buffers, within eager's checkpoints: the second run ends where eager's does, and what
eager has written by then is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torchcompile

pytestmark = pytest.mark.warm

Body = Callable[[nn.Linear, nn.BatchNorm1d, torch.Tensor], torch.Tensor]


def normalised(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    return norm(linear(x)).sin()


def normalised_last(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    return norm(linear(x))


def written_first(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    norm.running_mean.add_(1.0)  # type: ignore[union-attr]
    return linear(x).sin()


def written_in_between(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    y = linear(x).sin()
    norm.running_mean[1:].mul_(0.5)  # type: ignore[index]
    return y * linear.bias  # which keeps its factors


def written_last(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    y = linear(x).sin()
    norm.running_mean.mul_(2.0)  # type: ignore[union-attr]
    return y + 1


def written_twice(linear: nn.Linear, norm: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    norm.running_mean.add_(1.0)  # type: ignore[union-attr]
    y = linear(x).sin()
    norm.running_var.mul_(2.0)  # type: ignore[union-attr]
    return y


BODIES = [normalised, normalised_last, written_first, written_in_between, written_last, written_twice]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_buffers_after_steps_are_eagers(body: Body, early: bool, reentrant: bool, backend: str) -> None:
    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        linear, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        function = lambda x: body(linear, norm, x)  # noqa: E731
        run = torchcompile.compile(function, backend=backend) if compiled else function
        found = []
        for _ in range(3):
            x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(-1, 4).requires_grad_()
            with set_checkpoint_early_stop(early):
                y = checkpoint(run, x, use_reentrant=reentrant)
                (y * torch.arange(20).view(5, 4).cos()).sum().backward()
            found += [x.grad, y.detach(), *[b.clone() for b in norm.buffers()]]
        return [*found, *[p.grad for p in (linear.weight, linear.bias)]]

    for mine, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not torchcompile.report().fallbacks
