"""Scans and differences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Value, same_size
from primtorch.families import Family, Rule, Trait
from primtorch.layout import wrap_dim
from primtorch.operators.build import contiguous
from primtorch.operators.reduction import accumulated
from primtorch.prims import Prim
from primtorch.promotion import integer_sum_dtype
from primtorch.spec import TensorSpec

OP = Family("scan")
OP.trait(Trait.CONVERTS_OUT, "cumprod cumsum")
OP.trait(Trait.OVERLAPS, "cummax cummin")


# --- scans ---------------------------------------------------------------------------------------
def _scan(prim: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
        x = accumulated(x, dtype)
        return b.emit(prim, x, x.dim(dim)) if x.rank else x

    return rule


@OP.formula("cumsum", "cumprod")
def _cumsum(x: TensorLike, dim: int, *, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or integer_sum_dtype(x.dtype))


OP.rule("cumsum")(_scan(prims.cumsum))
OP.rule("cumprod")(_scan(prims.cumprod))


@OP.formula("logcumsumexp")
def _logcumsumexp(x: TensorLike, dim: int) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape)


@OP.rule("logcumsumexp", "_logcumsumexp?")
def _lower_logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    return b.emit(prims.logcumsumexp, x.compute(), x.dim(dim)).to(x.dtype) if x.rank else x


@OP.formula("cummax", "cummin")
def _cummax(x: TensorLike, dim: int) -> tuple[TensorSpec, TensorSpec]:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape), contiguous(x, x.shape, torch.int64)


def _extremes(prim: Prim) -> Rule:
    def rule(b: Builder, x: Value, dim: int) -> Sequence[Value]:
        return b.emit_several(prim, x, x.dim(dim)) if x.rank else (x, b.full((), 0, torch.int64, x.device))

    return rule


OP.rule("cummax")(_extremes(prims.cummax))
OP.rule("cummin")(_extremes(prims.cummin))


@OP.rule("diff")
def _lower_diff(
    b: Builder, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Value:
    dim = wrap_dim(dim, x.rank)
    parts = [p for p in (prepend, x, append) if p is not None]
    x = b.cat(parts, dim)
    for _ in range(n):
        size = x.shape[dim]
        if same_size(size, 0):
            break
        high, low = x.slice(dim, 1, size), x.slice(dim, 0, size - 1)
        x = high ^ low if x.dtype is torch.bool else high - low
    return x
