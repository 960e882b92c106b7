"""Training steps in compiled code: forward, backward, clipping and the optimizer in one graph; a step through steps.

    python examples/training_step.py

A small classifier is trained by one compiled function, and a sine's learner by the gradient behind two inner steps
(MAML): eager and compiled, which has the graph of the first step, when there is no state yet, and that of all others.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import torchcompile

Batch = tuple[torch.Tensor, ...]
Step = Callable[..., torch.Tensor]

STEPS = 40


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)
    )


def images(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(10, (64,), generator=generator)
    return torch.eye(64)[labels * 6] + 0.5 * torch.randn(64, 64, generator=generator), labels


def trained(model: nn.Module) -> Step:
    """(images, labels) -> the loss, one step of learning later."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def learner() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def sines(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    height, phase, *places = torch.rand(22, generator=generator).split([1, 1, 10, 10])
    x = torch.cat(places).mul(10).sub(5)[:, None]
    y = (0.1 + 4.9 * height) * torch.sin(x + math.pi * phase)
    return x, y


def learning_to_learn(model: nn.Module, rate: float = 0.01, inner: int = 2) -> Step:
    """(x, y) -> the loss of one half behind inner steps of learning from the other half, one outer step later."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        for _ in range(inner):
            loss = F.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
            weights = {name: w - rate * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        outer = F.mse_loss(functional_call(model, weights, (x[10:],)), y[10:])
        outer.backward()
        optimizer.step()
        return outer.detach()

    return step


def losses(step: Step, batches: list[Batch]) -> tuple[list[float], float]:
    """The loss of each step, and the milliseconds of one of the last."""
    found = [float(step(*batch)) for batch in batches[:5]]
    began = time.perf_counter()
    found += [float(step(*batch)) for batch in batches[5:]]
    return found, (time.perf_counter() - began) / len(batches[5:]) * 1e3


def main() -> None:
    for name, make, made, draw in (
        ("a classifier's step", classifier, trained, images),
        ("a step through two steps", learner, learning_to_learn, sines),
    ):
        torchcompile.reset()
        torch.manual_seed(0)
        model = make()
        batches = [draw(number) for number in range(STEPS)]
        exact = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
        truth, _ = losses(made(copy.deepcopy(model).double()), exact)
        eager, of_eager = losses(made(copy.deepcopy(model)), batches)
        compiled, of_compiled = losses(torchcompile.compile(made(model)), batches)
        errors = [max(abs(a - b) for a, b in zip(found, truth, strict=True)) for found in (eager, compiled)]
        report = torchcompile.report()
        assert report.clean and report.captured == 2, report
        assert errors[1] <= 4 * errors[0] + 1e-4, errors
        print(f"{name}, in one graph: loss {compiled[0]:.3f} to {compiled[-1]:.3f}")
        print(f"    eager {of_eager:.2f} ms, compiled {of_compiled:.2f} ms")


if __name__ == "__main__":
    main()
