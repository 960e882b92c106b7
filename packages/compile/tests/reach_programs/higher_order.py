"""Operators over functions, and checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .record import Program, maker, part

HIGHER = "Higher-order operators"


@part(HIGHER, "torch.cond")
def cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


@part(HIGHER, "while_loop", gradient=False)
def loop(x: torch.Tensor) -> Any:
    count = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 1.5), (count, x))


def scanned_row_by_row(x: torch.Tensor) -> Any:
    carry, products = torch.zeros_like(x[0]), []
    for row in x:
        products.append(carry * row)
        carry = carry + row
    return carry, torch.stack(products)


@part(HIGHER, "scan", judge=scanned_row_by_row)  # its gradient in eager is wrong on torch 2.11
def scanned(x: torch.Tensor) -> Any:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)


@part(HIGHER, "associative_scan", gradient=False)
def associative(x: torch.Tensor) -> Any:
    return associative_scan(torch.add, x, 0, combine_mode="generic")


@part(HIGHER, "map")
def mapped(x: torch.Tensor) -> Any:
    return hop_map(lambda row: row.sin() * 2, x)


@part(HIGHER, "checkpoint")
def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


def kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@part(HIGHER, "checkpoint with a policy")
def checkpointed_by_policy(x: torch.Tensor) -> torch.Tensor:
    chosen = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(lambda t: (t.sin() @ t.mT).exp(), x, use_reentrant=False, context_fn=chosen)  # type: ignore[no-any-return]


@maker(HIGHER, "a nested compile region, called several times")
def region() -> Program:
    def layer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x * scale).tanh() + x

    return functools.partial(reduced, marked(layer))


def reduced(layer: Program, x: torch.Tensor) -> Any:
    return functools.reduce(layer, [x[0], x[1], x[2]], x)


def marked(function: Program) -> Program:
    return getattr(torch.compiler, "nested_compile_region", lambda function: function)(function)  # type: ignore[no-any-return]


@maker(HIGHER, "a nested compile region that is a module with batch norm and dropout")
def region_of_layers() -> Program:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

        @marked
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.dropout(self.norm(x).relu(), 0.0, self.training)  # type: ignore[no-any-return]

    return torch.nn.Sequential(Layer(), Layer(), Layer())


@maker(HIGHER, "a nested compile region within another, and a checkpoint within that")
def region_of_regions() -> Program:
    inner = marked(lambda x: checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False) * 2)
    outer = marked(lambda x: inner(inner(x)).tanh() + x)
    return lambda x: outer(outer(x))
