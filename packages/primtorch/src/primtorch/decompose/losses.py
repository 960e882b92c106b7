"""Margin losses, each with its gradient."""

from __future__ import annotations

from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.activations import _MEAN, _NONE, reduced
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable

aten = torch.ops.aten
RULES = RuleTable()


def _rows(x: Value, target: Value) -> tuple[Value, Value]:
    """Batched: (N, C) scores and (N, ...) targets."""
    if x.rank == 2:
        return x, target
    return x.reshape((1, x.numel())), target.reshape((1, target.numel()))


# --- multi_margin_loss -----------------------------------------------------------------------------
def _margins(
    b: Builder, x: Value, target: Value, margin: Any, weight: Value | None
) -> tuple[Value, Value, Value | None]:
    """(margin - x[y] + x[c], 0 at c = y; mask of c = y; weight of y as (N, 1))."""
    column = target.to(torch.int64).unsqueeze(1)
    own = b.iota(x.shape[1], x.device).unsqueeze(0).eq(column)
    terms = x - b.emit(prims.gather, x, 1, column) + float(margin)
    scale = None if weight is None else b.emit(prims.index, weight.to(x.dtype), (column,), False)
    return b.where(own, 0.0, terms.maximum(0.0)), own, scale


@RULES(aten.multi_margin_loss.default)
def _multi_margin(
    b: Builder,
    x: Value,
    target: Value,
    p: Any = 1,
    margin: Any = 1,
    weight: Value | None = None,
    reduction: int = _MEAN,
) -> Value:
    wide, labels = _rows(x.compute(), target)
    labels = labels.reshape((wide.shape[0],))
    terms, _, scale = _margins(b, wide, labels, margin, weight)
    if p == 2:
        terms = terms * terms
    if scale is not None:
        terms = terms * scale
    loss = terms.sum((1,)) / wide.shape[1]
    if reduction == _NONE:
        return loss.reshape(target.shape if x.rank == 2 else ()).to(x.dtype)  # type: ignore[no-any-return]
    return reduced(loss, reduction, x.dtype)


@RULES(aten.multi_margin_loss_backward.default)
def _multi_margin_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    p: Any,
    margin: Any,
    weight: Value | None = None,
    reduction: int = _MEAN,
) -> Value:
    wide, labels = _rows(x.compute(), target)
    labels = labels.reshape((wide.shape[0],))
    terms, own, scale = _margins(b, wide, labels, margin, weight)
    slope = terms * 2.0 if p == 2 else (terms > 0.0).to(wide.dtype)
    if scale is not None:
        slope = slope * scale
    slope = slope / wide.shape[1]
    slope = b.where(own, -slope.sum((1,), True), slope)
    g = grad.to(wide.dtype)
    g = g.reshape((wide.shape[0], 1)) if reduction == _NONE else g
    if reduction == _MEAN:
        g = g / wide.shape[0]
    return (slope * g).reshape(x.shape).to(x.dtype)  # type: ignore[no-any-return]


# --- multilabel_margin_loss --------------------------------------------------------------------------
def _labels(b: Builder, target: Value) -> tuple[Value, Value, Value]:
    """(labels with 0 after the first negative one, which of them count, mask (N, C) of the classes named)."""
    negative = (target < 0).to(torch.int64)
    counts = b.emit(prims.cumsum, negative, 1).eq(0)
    labels = b.where(counts, target.to(torch.int64), 0)
    zeros = b.full(target.shape, 0, torch.int64, target.device)
    named = b.emit(prims.scatter_add, zeros, 1, labels, counts.to(torch.int64)) > 0
    return labels, counts, named


def _label_terms(b: Builder, x: Value, labels: Value, counts: Value, named: Value) -> Value:
    """(N, j, c): 1 - x[y_j] + x[c] where positive, for labels j and classes c that no label names."""
    scores = b.emit(prims.gather, x, 1, labels)
    terms = (x.unsqueeze(1) - scores.unsqueeze(2) + 1.0).maximum(0.0)
    return b.where(counts.unsqueeze(2) & ~named.unsqueeze(1), terms, 0.0)


@RULES(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin(b: Builder, x: Value, target: Value, reduction: int) -> tuple[Value, Value]:
    wide, labels = _rows(x.compute(), target)
    places, counts, named = _labels(b, labels)
    loss = _label_terms(b, wide, places, counts, named).sum((1, 2)) / wide.shape[1]
    is_target = named.to(x.dtype).reshape(target.shape)
    if reduction == _NONE:
        return loss.reshape(x.shape[:-1]).to(x.dtype), is_target
    return reduced(loss, reduction, x.dtype), is_target


@RULES(aten.multilabel_margin_loss_backward.default)
def _multilabel_margin_backward(
    b: Builder, grad: Value, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    wide, labels = _rows(x.compute(), target)
    places, counts, named = _labels(b, labels)
    active = (_label_terms(b, wide, places, counts, named) > 0.0).to(wide.dtype)
    slope = b.emit(prims.scatter_add, active.sum((1,)), 1, places, -active.sum((2,))) / wide.shape[1]
    g = grad.to(wide.dtype)
    g = g.reshape((wide.shape[0], 1)) if reduction == _NONE else g
    if reduction == _MEAN:
        g = g / wide.shape[0]
    return (slope * g).reshape(x.shape).to(x.dtype)  # type: ignore[no-any-return]
