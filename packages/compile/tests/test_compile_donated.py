"""A backward writes over what its forward kept for it alone; what anybody else holds or reads again stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import torchcompile
from primtorch.testing import assert_as_accurate


class Scores(nn.Module):
    """Scores that are returned beside the loss, of what several kinds of layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 51)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x + self.down(F.gelu(self.up(x)).softmax(-1))
        logits = self.head(hidden.tanh())
        return F.cross_entropy(logits, labels), logits


Step = Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], list[torch.Tensor]]


def once(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    loss, logits = net(x, labels)
    before = logits.detach().clone()
    loss.backward()
    assert torch.equal(before, logits), "the caller's scores were written over"
    return [loss.detach(), logits.detach()]


def several_times(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Twice with the graph kept, then for the last time."""
    loss, logits = net(x, labels)
    for again in (True, True, False):
        loss.backward(retain_graph=again)
    return [loss.detach(), logits.detach()]


def by_both_results(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    loss, logits = net(x, labels)
    logits.square().mean().backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), logits.detach()]


def twice_derived(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    loss, logits = net(x, labels)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return [loss.detach(), slope.detach()]


def in_batches(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    _, logits = net(x, labels)
    tangents = torch.stack([torch.ones_like(logits), logits.detach().sin()])
    return list(torch.autograd.grad(logits, x, tangents, is_grads_batched=True))


def with_scores_written(net: Callable[..., Any], x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The caller may write to what eager's autograd does not keep."""
    loss, logits = net(x, labels)
    with torch.no_grad():
        logits.mul_(3)
    loss.backward()
    return [loss.detach(), logits.detach()]


STEPS: dict[str, Step] = {
    f.__name__: f for f in (once, several_times, by_both_results, twice_derived, in_batches, with_scores_written)
}


@contextmanager
def seen() -> Iterator[None]:
    """A program looks at what is kept, holds it, and finds it as it was."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor, tensor.detach().clone()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    assert all(torch.equal(tensor, copied) for tensor, copied in kept), "what a hook holds was written over"


@contextmanager
def in_numpy() -> Iterator[None]:
    """What is kept lies in memory that another library lends, which is unpacked as often as the graph is run."""
    with saved_tensors_hooks(lambda t: t.detach().cpu().numpy(), torch.from_numpy):
        yield


HOOKS = {"none": nullcontext, "seen": seen, "on the CPU": save_on_cpu, "in numpy": in_numpy}


def gradients(net: nn.Module, step: Step, inputs: tuple[torch.Tensor, torch.Tensor], run: Any) -> list[torch.Tensor]:
    x = inputs[0].detach().clone().requires_grad_()
    for p in net.parameters():
        p.grad = None
    found = step(run, x, inputs[1])
    return [*found, *(leaf.grad for leaf in (x, *net.parameters()) if leaf.grad is not None)]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_are_eagers_whoever_holds_what_is_kept(name: str, hook: str) -> None:
    seed, step = torch.seed(), STEPS[name]
    net = Scores()
    inputs = torch.randn(16, 24), torch.randint(0, 51, (16,))
    exact = gradients(double := copy.deepcopy(net).double(), step, (inputs[0].double(), inputs[1]), double)
    eager = gradients(net, step, inputs, net)
    compiled = torchcompile.compile(net)
    for _ in range(2):
        with HOOKS[hook]():
            found = gradients(net, step, inputs, compiled)
        assert_as_accurate(tuple(found), tuple(eager), tuple(exact), f"seed {seed}")


def test_a_gradient_lies_where_the_scores_were_kept(tmp_path: Path) -> None:
    """One claim at least, so that what is above is of memory that was written over."""
    torchcompile.compile(Scores(), options={"dump": tmp_path})(torch.randn(16, 24), torch.randint(0, 51, (16,)))[
        0
    ].backward()
    (program,) = (path.read_text() for path in tmp_path.rglob("*backward_program.txt"))
    assert "= claim %" in program
