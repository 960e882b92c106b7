"""A process of `test_compile_artifacts.py`: saves programs of symbolic sizes, or runs what it loads at other sizes."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import aotautograd.api
import torchcompile
import torchinductor.compile

SIZES = ((4, 8), (3, 10), (6, 12))


class Images(nn.Module):
    """Compiling it asks for more than capture did: sizes of pooled images, a number that a division gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.last(pooled.mean((2, 3)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.table(x)
        return self.last((words @ words.mT).softmax(-1) @ words)


def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sizes in views of inputs, in numbers, and in what only the data tells."""
    both = torch.cat([x, y])
    return both[: x.shape[0]] * x.shape[0] / 3.0, x.t()[1:], y[:, 0] * both.sum(), (y > 0).nonzero()


def programs() -> Iterator[tuple[str, Any, dict[str, Any], list[tuple[torch.Tensor, ...]]]]:
    """Name, program, settings of `compile`, and calls."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield "images", Images(), {"dynamic": True}, [(torch.randn(n, 3, k, k),) for n, k in SIZES]
    yield "words", Words(), {}, [(torch.randint(0, 20, size),) for size in SIZES]  # symbolic from the second on
    pairs = [tuple(torch.randn(rows, 5, requires_grad=True) for rows in size) for size in SIZES]
    for pair in pairs:
        for tensor in pair:
            torchcompile.mark_dynamic(tensor, 0)
    yield "views", views, {}, pairs


def results(run: Callable[..., Any], program: Any, call: tuple[torch.Tensor, ...]) -> list[Any]:
    """Of a call under no_grad, then of one with gradients."""
    with torch.no_grad():
        found = [run(*call)]
    out = run(*call)
    first = out[0] if isinstance(out, tuple) else out
    derived = list(program.parameters()) if isinstance(program, nn.Module) else list(call)
    return [*found, out, torch.autograd.grad(first.square().sum(), derived)]


def main(stage: str, folder: str) -> None:
    nothing = mock.Mock(side_effect=AssertionError("a call compiles"))
    if stage == "load":
        os.environ["PATH"] = "/nowhere"
        os.environ.pop("CXX", None)
        aotautograd.api.trace_joint = torchinductor.compile.lower_graph = nothing
    for name, program, settings, calls in programs():
        eager, file = copy.deepcopy(program), Path(folder) / name
        compiled = torchcompile.compile(program, **settings) if stage == "save" else torchcompile.load(file, program)
        for call in calls[:2] if stage == "save" else calls:
            torch.testing.assert_close(results(compiled, program, call), results(eager, eager, call))
        if stage == "save":
            torchcompile.save(compiled, file)
    assert stage == "save" or not [e for e in torchcompile.report().events if e.kind.id != "recompiled"]


if __name__ == "__main__":
    main(*sys.argv[1:])
