"""Programs as users write them: whole, with their loops, losses, optimizers and bookkeeping.

Each is a function of what compiles a part of it, written once and run twice: with `lambda f: f`, which is eager, and
with `torchcompile.compile`. It returns what is to be the same; random numbers are drawn from the same seed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Wrap = Callable[[Any], Any]
Values = Any  # a tree of tensors, numbers and strings


@dataclass(frozen=True)
class Program:
    """One of them.

    Args:
        run: it, given what compiles.
        breaks: graph breaks that it has for good reason, each told.
        recompiles: whether graphs are made again for what changes between its steps.
    """

    run: Callable[[Wrap], Values]
    breaks: int = 0
    recompiles: bool = False


PROGRAMS: dict[str, Program] = {}
"""By name, those of this folder's files."""


def program(
    breaks: int = 0, recompiles: bool = False
) -> Callable[[Callable[[Wrap], Values]], Callable[[Wrap], Values]]:
    """Puts a function into the table, under its name."""

    def put(run: Callable[[Wrap], Values]) -> Callable[[Wrap], Values]:
        PROGRAMS[run.__name__] = Program(run, breaks, recompiles)
        return run

    return put


def trained(model: torch.nn.Module, *more: Any) -> Values:
    """What a training leaves in a model: parameters, gradients, buffers."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return dict(model.named_parameters()), gradients, dict(model.named_buffers()), more


FILES = ("generative", "sequences", "vision", "control", "science", "training")


def of_file(name: str) -> dict[str, Program]:
    """The programs of a file of this folder."""
    module = importlib.import_module(f"user_programs.{name}")
    return {name: found for name, found in PROGRAMS.items() if found.run.__module__ == module.__name__}
