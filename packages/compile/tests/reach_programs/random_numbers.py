"""Random numbers, their generators and distributions."""

from __future__ import annotations

from typing import Any

import torch

from .record import PYTHON, Program, maker, part


@part(PYTHON, "random numbers and the generator's state", gradient=False)
def generator_state(x: torch.Tensor) -> Any:
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x * 0 + first.sum() - torch.rand(3).sum()


@part(PYTHON, "torch.random.fork_rng and manual_seed", gradient=False)
def forked(x: torch.Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inside = torch.rand(3)
    return x * 0 + inside


@part(PYTHON, "a multivariate normal distribution")
def multivariate(x: torch.Tensor) -> Any:
    spread = x[:3].mT @ x[:3] + torch.eye(3, dtype=x.dtype)
    found = torch.distributions.MultivariateNormal(x[0], spread, validate_args=True)
    return found.log_prob(x), found.rsample()


@maker(PYTHON, "a generator of the program's own", gradient=False)
def from_a_generator() -> Program:
    generator = torch.Generator()

    def program(x: torch.Tensor) -> Any:
        made = torch.Generator().manual_seed(3)
        return x * 0 + torch.rand(3, generator=generator) + torch.rand(3, generator=made)

    return program


@part(PYTHON, "torch.manual_seed", gradient=False)
def seeded(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return torch.rand(3) + x


@part(
    PYTHON,
    "torch.initial_seed",
    "random_state",
    gradient=False,
    why="the seed is the generator's at the time of the call, a number for Python; instead: hand the seed in, or keep it"
    " where it is set",
)
def first_seed(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return x * torch.initial_seed()


@part(PYTHON, "torch.distributions with validation")
def distributions(x: torch.Tensor) -> Any:
    return torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x + 1)


@part(PYTHON, "a categorical distribution")
def categorical(x: torch.Tensor) -> Any:
    found = torch.distributions.Categorical(logits=x, validate_args=True)
    return found.log_prob(torch.zeros(x.shape[0], dtype=torch.int64)), found.entropy()
