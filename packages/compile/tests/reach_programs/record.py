"""What a program of the language is, and the table of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Program = Callable[..., Any]


def sizes(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape, dtype=torch.float64),)


@dataclass(frozen=True)
class Part:
    """A part of the language.

    Attributes:
        make: gives the program, anew for each compiler: it may hold state.
        calls: the arguments of each call, drawn anew for each compiler from one seed.
        gradient: whether the sum of the floating results is differentiated by the arguments.
        breaks: what the ledger may tell beside recompilations, by its kinds: why it is not one graph.
        why: where it is not one graph, what about it cannot be in one, and what to write instead.
        judge: the same in plain operators, for what torch itself computes wrongly in a version that is supported.
    """

    group: str
    name: str
    make: Callable[[], Program]
    calls: Callable[[], list[tuple[Any, ...]]]
    gradient: bool = True
    breaks: tuple[str, ...] = ()
    judge: Program | None = None
    why: str = ""

    def run(self, compiler: Callable[[Program], Program]) -> list[tuple[list[Any], list[Any]]]:
        """The leaves of each call's results, and its gradients by the tensors among its arguments."""
        torch.manual_seed(1)
        program = compiler(self.make())
        torch.manual_seed(2)
        return [self._call(program, args) for args in self.calls()]

    def _call(self, program: Program, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        by = [a for a in args if isinstance(a, torch.Tensor)] if self.gradient else []
        for leaf in by:
            leaf.requires_grad_()
        leaves = [
            leaf
            for result in pytree.tree_leaves(program(*args))
            for leaf in (pytree.tree_leaves(list(result)) if isinstance(result, Iterator) else [result])
        ]
        floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        if not by or not floats:
            return leaves, []
        total: Any = sum(t.sum() for t in floats)
        return leaves, list(torch.autograd.grad(total, by, allow_unused=True))


PARTS: dict[str, Part] = {}


def default_calls() -> list[tuple[Any, ...]]:
    return [sizes(4, 3), sizes(4, 3), sizes(6, 3)]


def maker(
    group: str,
    name: str,
    *breaks: str,
    calls: Callable[[], list[tuple[Any, ...]]] = default_calls,
    gradient: bool = True,
    judge: Program | None = None,
    why: str = "",
) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Adds what makes a program: one that holds state."""

    def add(make: Callable[[], Program]) -> Callable[[], Program]:
        PARTS[name] = Part(group, name, make, calls, gradient, breaks, judge, why)
        return make

    return add


def part(group: str, name: str, *breaks: str, **more: Any) -> Callable[[Program], Program]:
    """Adds a program without state."""

    def add(program: Program) -> Program:
        maker(group, name, *breaks, **more)(lambda: program)
        return program

    return add


PYTHON = "Python"
