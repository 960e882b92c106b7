"""Function transforms in compiled code: the gradients of each sample of a batch, and a step through a step.

    python examples/function_transforms.py

A small vision transformer's gradients for every sample alone (`vmap` of `grad`, as differential privacy asks for them),
and the gradient of a loss behind an inner step of learning (MAML): eager and compiled, which are one graph each.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import torchcompile

Weights = dict[str, torch.Tensor]


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.between(x))


class ViT(nn.Module):
    """A vision transformer for images of 8 x 8 pixels, in patches of 2 x 2."""

    def __init__(self, width: int = 32, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(images.shape[0], 16, 4)
        return self.head(self.blocks(self.patches(patches) + self.places).mean(1))


def of_each_sample(model: nn.Module) -> Callable[[Weights, torch.Tensor, torch.Tensor], Weights]:
    """(weights, images, labels) -> for each weight the gradients of all samples, stacked."""

    def loss(weights: Weights, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))


def through_a_step(model: nn.Module, rate: float = 0.1) -> Callable[[Weights, torch.Tensor, torch.Tensor], Weights]:
    """(weights, x, y) -> the gradient of one half's loss behind a step of learning from the other half."""

    def loss(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (x,)), y)

    def after_a_step(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        slopes = grad(loss)(weights, x[:half], y[:half])
        return loss({name: w - rate * slopes[name] for name, w in weights.items()}, x[half:], y[half:])

    return grad(after_a_step)


def milliseconds(run: Callable[[], Any], rounds: int = 10) -> float:
    run()
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    return (time.perf_counter() - began) / rounds * 1e3


def main() -> None:
    torch.manual_seed(0)
    model = ViT()
    images, labels = torch.randn(32, 8, 8), torch.randint(10, (32,))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    exact = copy.deepcopy(model).double()
    doubles = {name: w.double() for name, w in weights.items()}
    for name, made in (("gradients of each sample", of_each_sample), ("gradient through a step", through_a_step)):
        torchcompile.reset()
        eager, compiled = made(model), torchcompile.compile(made(model))
        truth = made(exact)(doubles, images.double(), labels)
        errors = [
            max(float((found[w] - truth[w]).norm() / truth[w].norm()) for w in truth)
            for found in (eager(weights, images, labels), compiled(weights, images, labels))
        ]
        times = [milliseconds(lambda f=f: f(weights, images, labels)) for f in (eager, compiled)]  # type: ignore[misc]
        report = torchcompile.report()
        assert report.clean and report.captured == 1 and errors[1] <= 2 * errors[0] + 1e-6, (report, errors)
        print(f"{name}: in one graph, eager {times[0]:.1f} ms, compiled {times[1]:.1f} ms")


if __name__ == "__main__":
    main()
