"""Compiles programs with a dump folder each: `dumped_programs.py FOLDER`. Run by test_compile_dumps.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torchcompile

Tensor = torch.Tensor


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inner(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.dropout(self.outer(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1)


def calls(x: Tensor) -> Tensor:
    """Calls of several operands each, whose memory ends in one place."""
    a = x.sin() @ x.T
    parts = torch.cat([torch.topk(a, 3, -1).values, a.sort(-1).values[:, :3]], -1)
    solved = torch.linalg.solve(a + 100 * torch.eye(len(a)), parts)
    return torch.einsum("ij,jk,kl->il", solved.T, a.exp(), solved) + a[a > 0].sum()


HISTORY: dict[str, Any] = {}


def breaks(x: Tensor) -> Tensor:
    """Two graphs, and changes to the world around them. A set of texts would be printed in its own order."""
    HISTORY.update(first=x.sum(), kinds={3, 5, 7})
    y = {kind: x * kind for kind in HISTORY["kinds"]}
    torchcompile.graph_break()
    return sum(y.values(), x).cos() + HISTORY["first"]


def sizes(x: Tensor) -> Tensor:
    rows, columns = x.shape
    return x.reshape(columns, rows).softmax(-1) @ x.new_ones(rows, columns * 2) + rows / columns


torch.manual_seed(0)
images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]] = {
    "attention": (nn.Sequential(Attention(), Attention()), (torch.randn(2, 16, 32),)),
    "images": (images, (torch.randn(2, 3, 16, 16),)),
    "calls": (calls, (torch.randn(8, 8),)),
    "breaks": (breaks, (torch.randn(8),)),
    "sizes": (sizes, (torch.randn(4, 6), torch.randn(5, 7))),
}

if __name__ == "__main__":
    for name, (program, inputs) in PROGRAMS.items():
        compiled = torchcompile.compile(program, options={"dump": str(Path(sys.argv[1]) / name)})
        for given in inputs:
            compiled(given.requires_grad_()).sum().backward()
