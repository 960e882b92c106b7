"""Losses, each with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from primtorch import prims
from primtorch.arguments import Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.families import Family, Formula, Rule, Trait
from primtorch.layout import broadcast, dense_like
from primtorch.operators.activation import LEAST_VARIANCE, log_sigmoid, sigmoid
from primtorch.operators.build import Fresh, as_dense, contiguous, elementwise, refuse_fresh
from primtorch.operators.refusals import is_empty, refuse, refuse_other_shape, want
from primtorch.promotion import compute_dtype, result_type
from primtorch.samples import after, call, integers, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("loss")
OP.trait(Trait.ANYWHERE, "_ctc_loss _ctc_loss_backward ctc_loss")
OP.trait(Trait.ONE_DEVICE, "nll_loss2d_forward nll_loss_forward")


# --- losses that reduce pointwise terms --------------------------------------------------------------
NONE, MEAN, _SUM = 0, 1, 2


def reduced_loss(loss: Value, reduction: int, dtype: torch.dtype) -> Value:
    """The loss of each element, their mean or their sum (0-d), by torch's number of the reduction."""
    dims = tuple(range(loss.rank))
    if reduction == MEAN:
        loss = loss.mean(dims) if dims else loss
    elif reduction == _SUM:
        loss = loss.sum(dims)
    return loss.to(dtype)


def _loss(body: Callable[..., Value], promotes: bool = True) -> Rule:
    """body(x, target, *rest): the terms. Their dtype is the promoted one, or that of x."""

    def rule(b: Builder, x: Value, target: Value, reduction: int = MEAN, *rest: object, **options: object) -> Value:
        dtype = result_type((x, target))
        t, y = x.to(compute_dtype(dtype)), target.to(compute_dtype(dtype))
        return reduced_loss(body(t, y, *rest, **options), reduction, dtype if promotes else x.dtype)

    return rule


def _loss_backward(slope: Callable[..., Value]) -> Rule:
    """slope(x, target, *rest): the derivative of one term for x, whose dtype it has."""

    def rule(
        b: Builder, grad: Value, x: Value, target: Value, reduction: int, *rest: object, **options: object
    ) -> Value:
        compute = compute_dtype(result_type((x, target, grad)))
        t, y, g = x.to(compute), target.to(compute), grad.to(compute)
        out = slope(t, y, *rest, **options)
        if reduction == MEAN:
            g = g / out.numel()
        return (out * g).to(x.dtype)

    return rule


def _huber(x: Value, y: Value, delta: float = 1.0) -> Value:
    z = (x - y).map(prims.abs)
    return x.b.where(z <= delta, z * z * 0.5, (z - 0.5 * delta) * delta)


def _huber_slope(x: Value, y: Value, delta: float) -> Value:
    return (x - y).maximum(-delta).minimum(delta)


def _smooth_l1(x: Value, y: Value, beta: float = 1.0) -> Value:
    z = (x - y).map(prims.abs)
    return z if beta == 0 else x.b.where(z < beta, z * z * (0.5 / beta), z - 0.5 * beta)


def _smooth_l1_slope(x: Value, y: Value, beta: float) -> Value:
    z = x - y
    sign = z.map(prims.sign)
    return sign if beta == 0 else x.b.where(z.map(prims.abs) < beta, z / beta, sign)


def _pointwise_loss(promotes: bool) -> Formula:
    """A loss of elementwise parts with `reduction` 0 none, 1 mean, 2 sum."""

    def formula(x: TensorLike, target: TensorLike, *args: object, reduction: int = 1, **kwargs: object) -> TensorSpec:
        numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        how = numbers[0] if numbers else reduction
        out = elementwise((x, target), result_type((x, target)) if promotes else x.dtype)
        return out if how == 0 else contiguous(x, (), out.dtype)

    return formula


OP.formula("mse_loss smooth_l1_loss binary_cross_entropy")(_pointwise_loss(True))
OP.formula("huber_loss soft_margin_loss")(_pointwise_loss(False))


@OP.refuses("huber_loss")
def _refuse_huber_loss(x: TensorLike, target: TensorLike, reduction: int = 1, delta: float = 1.0) -> None:
    refuse(delta <= 0, "huber_loss does not support non-positive values for delta.")


@OP.refuses("soft_margin_loss")
def _refuse_soft_margin_loss(x: TensorLike, target: TensorLike, reduction: int = 1) -> None:
    refuse(
        broadcast(tuple(x.shape), tuple(target.shape)) != tuple(x.shape),
        lambda: f"output with shape {list(x.shape)} doesn't match the shape of the target {list(target.shape)}",
    )


OP.rule("mse_loss")(_loss(lambda x, y: (x - y) * (x - y)))


@OP.formula("soft_margin_loss_backward")
def _pointwise_loss_backward(grad: TensorLike, x: TensorLike, target: TensorLike, *args: object) -> TensorSpec:
    return elementwise((x, target, grad), x.dtype)


@OP.formula("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def _row_major_loss_backward(grad: TensorLike, x: TensorLike, target: TensorLike, *args: object) -> TensorSpec:
    out = _pointwise_loss_backward(grad, x, target)
    return contiguous(out, out.shape)


OP.rule("mse_loss_backward")(_loss_backward(lambda x, y: (x - y) * 2.0))
OP.rule("huber_loss")(_loss(_huber, promotes=False))
OP.rule("huber_loss_backward")(_loss_backward(_huber_slope))
OP.rule("smooth_l1_loss")(_loss(_smooth_l1))
OP.rule("smooth_l1_loss_backward")(_loss_backward(_smooth_l1_slope))
OP.rule("soft_margin_loss")(_loss(lambda x, y: (-x * y).map(prims.exp).map(prims.log1p), promotes=False))
OP.rule("soft_margin_loss_backward")(_loss_backward(lambda x, y: -y * sigmoid(-x * y)))


def _clamped_log(x: Value) -> Value:
    return x.map(prims.log).maximum(-100.0)


@OP.rule("binary_cross_entropy")
def _lower_bce(b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN) -> Value:
    t = x.compute()
    want(b, (t >= 0) & (t <= 1), "all elements of input should be between 0 and 1")
    y = target.to(t.dtype)
    loss = (y - 1.0) * (-t).map(prims.log1p).maximum(-100.0) - y * _clamped_log(t)
    return reduced_loss(loss if weight is None else loss * weight.to(t.dtype), reduction, x.dtype)


@OP.formula("binary_cross_entropy_backward")
def _bce_backward(
    grad: TensorLike, x: TensorLike, target: TensorLike, weight: TensorLike | None = None, reduction: int = 1
) -> TensorSpec:
    return as_dense(x)


@OP.rule("binary_cross_entropy_backward")
def _lower_bce_backward(
    b: Builder, grad: Value, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    t = x.compute()
    y, g = target.to(t.dtype), grad.to(t.dtype)
    out = g * (t - y) / ((1.0 - t) * t).maximum(LEAST_VARIANCE)
    if weight is not None:
        out = out * weight.to(t.dtype)
    return (out / x.numel() if reduction == MEAN else out).to(x.dtype)


@OP.formula("binary_cross_entropy_with_logits")
def _bce_logits(
    x: TensorLike, target: TensorLike, weight: TensorLike | None = None, pos_weight: TensorLike | None = None,
    reduction: int = MEAN,
) -> TensorSpec:  # fmt: skip
    """The terms are written over 1 - target, so that they have the target's layout and dtype."""
    shape = tuple(target.shape)
    refuse_other_shape("input", x, shape)
    for factor in (weight, pos_weight):
        refuse(
            factor is not None and broadcast(shape, tuple(factor.shape)) != shape,
            lambda: f"The weight does not fit the target of the shape {list(shape)}",
        )
    return TensorSpec(
        () if reduction else shape, () if reduction else dense_like(shape, target.stride()), target.dtype, x.device
    )


@OP.rule("binary_cross_entropy_with_logits")
def _lower_bce_logits(
    b: Builder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    dtype = compute_dtype(result_type((x, target)))
    t, y = x.to(dtype), target.to(dtype)
    if pos_weight is None:
        loss = (1.0 - y) * t - log_sigmoid(t)
    else:
        loss = (1.0 - y) * t - ((pos_weight.to(dtype) - 1.0) * y + 1.0) * log_sigmoid(t)
    return reduced_loss(loss if weight is None else loss * weight.to(dtype), reduction, target.dtype)


def _by_rows(slope: Value, grad: Value, reduction: int, x: Value) -> Value:
    """The gradient of `x`: each row's loss has the slope (N, C), `grad` is that of the rows' losses or of one."""
    g = grad.to(slope.dtype)
    g = g.reshape((slope.shape[0], 1)) if reduction == NONE else g
    if reduction == MEAN:
        g = g / slope.shape[0]
    return (slope * g).reshape(x.shape).to(x.dtype)


def _rows(x: Value, target: Value) -> tuple[Value, Value]:
    """Batched: (N, C) scores and (N, ...) targets."""
    if x.rank == 2:
        return x, target
    return x.reshape((1, x.numel())), target.reshape((1, target.numel()))


# --- multi_margin_loss -----------------------------------------------------------------------------
def _margins(
    b: Builder, x: Value, target: Value, margin: float, weight: Value | None
) -> tuple[Value, Value, Value | None]:
    """(margin - x[y] + x[c], 0 at c = y; mask of c = y; weight of y as (N, 1))."""
    column = target.to(torch.int64).unsqueeze(1)
    own = b.iota(x.shape[1], x.device).unsqueeze(0).eq(column)
    terms = x - b.emit(prims.gather, x, 1, column) + float(margin)
    scale = None if weight is None else b.emit(prims.index, weight.to(x.dtype), (column,), False)
    return b.where(own, 0.0, terms.maximum(0.0)), own, scale


@OP.formula("multi_margin_loss")
def _multi_margin_loss(
    x: TensorLike,
    target: TensorLike,
    p: float = 1,
    margin: float = 1,
    weight: TensorLike | None = None,
    reduction: int = 1,
) -> TensorSpec:
    return contiguous(x, target.shape if reduction == NONE else ())


def _check_rows(x: TensorLike) -> None:
    shape = x.shape
    refuse(
        x.dim() > 2 or (bool(shape) and is_empty(shape[-1])),
        lambda: f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(shape)}",
    )


@OP.refuses("multi_margin_loss")
def _refuse_multi_margin_loss(
    x: TensorLike,
    target: TensorLike,
    p: float = 1,
    margin: float = 1,
    weight: TensorLike | None = None,
    reduction: int = 1,
) -> None:
    refuse(p not in (1, 2), "multi_margin_loss: only p == 1 and p == 2 supported")
    _check_rows(x)
    rows = x.shape[0] if x.dim() == 2 else 1
    refuse(
        target.dim() > 1 or (target.shape[0] if target.dim() else 1) != rows,
        lambda: f"multi_margin_loss: target tensor should be 1-D with one element a sample, got {list(target.shape)}",
    )
    refuse(target.dtype is not torch.int64, lambda: f"expected scalar type Long but found {target.dtype}")
    classes = x.shape[-1] if x.dim() else 1
    refuse(
        weight is not None and (weight.dim() > 1 or weight.numel() != classes),
        lambda: f"inconsistent weight size, expected {classes}",
    )


@OP.rule("multi_margin_loss")
def _lower_multi_margin(
    b: Builder,
    x: Value,
    target: Value,
    p: float = 1,
    margin: float = 1,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    wide, labels = _rows(x.compute(), target)
    labels = labels.reshape((wide.shape[0],))
    terms, _, scale = _margins(b, wide, labels, margin, weight)
    if p == 2:
        terms = terms * terms
    if scale is not None:
        terms = terms * scale
    loss = terms.sum((1,)) / wide.shape[1]
    if reduction == NONE:
        return loss.reshape(target.shape if x.rank == 2 else ()).to(x.dtype)
    return reduced_loss(loss, reduction, x.dtype)


@OP.formula("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def _margin_loss_backward(grad: TensorLike, x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(x, x.shape)


@OP.rule("multi_margin_loss_backward")
def _lower_multi_margin_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    p: float,
    margin: float,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    wide, labels = _rows(x.compute(), target)
    labels = labels.reshape((wide.shape[0],))
    terms, own, scale = _margins(b, wide, labels, margin, weight)
    slope = terms * 2.0 if p == 2 else (terms > 0.0).to(wide.dtype)
    if scale is not None:
        slope = slope * scale
    slope = slope / wide.shape[1]
    slope = b.where(own, -slope.sum((1,), True), slope)
    return _by_rows(slope, grad, reduction, x)


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


@OP.formula("multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: TensorLike, target: TensorLike, reduction: int) -> tuple[TensorSpec, TensorSpec]:
    each = x.shape[:1] if x.dim() == 2 else ()
    return contiguous(x, each if reduction == NONE else ()), contiguous(x, target.shape)


@OP.refuses("multilabel_margin_loss_forward")
def _refuse_multilabel_margin_loss(x: TensorLike, target: TensorLike, reduction: int) -> None:
    _check_rows(x)
    fits = x.numel() == target.numel() if x.dim() < 2 else tuple(x.shape) == tuple(target.shape)
    refuse(not fits, lambda: f"inconsistent target size: {list(target.shape)} for input of size: {list(x.shape)}")


@OP.rule("multilabel_margin_loss_forward")
def _lower_multilabel_margin(b: Builder, x: Value, target: Value, reduction: int) -> tuple[Value, Value]:
    wide, labels = _rows(x.compute(), target)
    places, counts, named = _labels(b, labels)
    loss = _label_terms(b, wide, places, counts, named).sum((1, 2)) / wide.shape[1]
    is_target = named.to(x.dtype).reshape(target.shape)
    if reduction == NONE:
        return loss.reshape(x.shape[:-1]).to(x.dtype), is_target
    return reduced_loss(loss, reduction, x.dtype), is_target


@OP.rule("multilabel_margin_loss_backward")
def _lower_multilabel_margin_backward(
    b: Builder, grad: Value, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    wide, labels = _rows(x.compute(), target)
    places, counts, named = _labels(b, labels)
    active = (_label_terms(b, wide, places, counts, named) > 0.0).to(wide.dtype)
    slope = b.emit(prims.scatter_add, active.sum((1,)), 1, places, -active.sum((2,))) / wide.shape[1]
    return _by_rows(slope, grad, reduction, x)


# --- negative log-likelihood ---------------------------------------------------------------------
def _class_dim(x: Value) -> int:
    return 0 if x.rank == 1 else 1


def _picked(b: Builder, x: Value, target: Value, ignore_index: Size) -> tuple[Value, Value, int]:
    """(target with ignored entries set to class 0, both with the class dimension; valid mask; class dim)."""
    dim = _class_dim(x)
    target = target.to(torch.int64).unsqueeze(dim) if target.rank < x.rank else target.to(torch.int64)
    valid = target.ne(ignore_index)
    return b.where(valid, target, 0), valid, dim


def _class_weights(b: Builder, x: Value, weight: Value, safe: Value) -> Value:
    return b.emit(prims.index, weight.to(compute_dtype(x.dtype)), (safe,), False)


@OP.formula("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(
    x: TensorLike, target: TensorLike, weight: TensorLike | None, reduction: int, ignore_index: Size
) -> tuple[TensorSpec, TensorSpec]:
    shape: Sizes = ()
    if reduction == 0 and x.dim() > 1:
        shape = (x.shape[0], *x.shape[2:])
    return contiguous(x, shape), contiguous(x, ())


@OP.refuses("nll_loss_forward", "nll_loss2d_forward")
def _refuse_nll_loss(x: TensorLike, target: TensorLike, weight: TensorLike | None, *args: object) -> None:
    refuse(
        target.dtype not in (torch.int64, torch.uint8),
        lambda: f"expected target dtype to be Long or Byte, but got {target.dtype}",
    )

    if x.dim() < 3 and target.dim() < 3:
        _refuse_labels(x, target)
    else:
        refuse(x.dim() != 4 or target.dim() != 3, "only batches of spatial inputs and targets are supported")
        refuse_other_shape("target", target, (x.shape[0], *x.shape[2:]))
    classes = x.shape[0] if x.dim() == 1 else x.shape[1]
    refuse_other_shape("weight", weight, (classes,))


def _refuse_labels(x: TensorLike, target: TensorLike) -> None:
    refuse(x.dim() == 0, "input tensor should be 1D or 2D")
    refuse(target.dim() > 1, "0D or 1D target tensor expected, multi-target not supported")
    if x.dim() == 1 and target.dim() == 1:
        size = target.shape[0]
        refuse(size != 1, lambda: f"For 1D input, 1D target must have size 1, but got target size: {size}", ValueError)
    if x.dim() == 2:
        refuse(target.dim() == 0, "Dimension specified as 0 but tensor has no dimensions", IndexError)
        refuse_other_shape("target", target, x.shape[:1])


@OP.rule("nll_loss_forward", "nll_loss2d_forward")
def _lower_nll_loss(
    b: Builder, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: Size
) -> tuple[Value, Value]:
    wide = x.compute()
    safe, valid, dim = _picked(b, x, target, ignore_index)
    loss = -b.emit(prims.gather, wide, dim, safe)
    scale = valid.to(wide.dtype)
    if weight is not None:
        scale = b.where(valid, _class_weights(b, x, weight, safe), 0.0)
        loss = loss * scale
    loss = b.where(valid, loss, 0.0)
    if reduction == NONE:
        return loss.squeeze(dim).to(x.dtype), b.full((), 0, x.dtype, x.device)
    everything = tuple(range(loss.rank))
    total, weights = loss.sum(everything), scale.sum(everything)
    return (total / weights if reduction == MEAN else total).to(x.dtype), weights.to(x.dtype)


@OP.formula("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(grad: TensorLike, x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(x, x.shape)


@OP.rule("nll_loss_backward", "nll_loss2d_backward")
def _lower_nll_loss_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: Size,
    total_weight: Value,
) -> Value:
    compute = compute_dtype(x.dtype)
    safe, valid, dim = _picked(b, x, target, ignore_index)
    g = grad.to(compute)
    if reduction == MEAN:
        g = g / total_weight.to(compute)
    elif reduction == NONE:
        g = g.unsqueeze(dim)
    g = -g
    if weight is not None:
        g = g * _class_weights(b, x, weight, safe)
    g = b.where(valid, g.expand(safe.shape), 0.0)
    # Every row has one class: comparing positions writes each element once and needs no scatter.
    classes = b.iota(x.shape[dim], x.device).unsqueeze(*(d for d in range(x.rank) if d != dim))
    return b.where(classes.eq(safe), g, 0.0).to(x.dtype)


# --- without a rule of their own ------------------------------------------------------------------
def _ctc(log_probs: TensorLike, longest: Size) -> tuple[TensorSpec, TensorSpec]:
    steps, batch = (log_probs.shape[0], log_probs.shape[1]) if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    lead = (batch,) if log_probs.dim() == 3 else ()
    return contiguous(log_probs, lead), contiguous(log_probs, (*lead, steps, 2 * longest + 1))


@OP.formula("_ctc_loss")
def _ctc_loss(
    log_probs: TensorLike,
    targets: TensorLike,
    input_lengths: TensorLike,
    target_lengths: Sequence[int],
    *args: object,
    **kwargs: object,
) -> tuple[TensorSpec, TensorSpec]:
    return _ctc(log_probs, max(target_lengths, default=0))


@OP.formula("_ctc_loss.Tensor")
def _ctc_loss_tensor(
    log_probs: TensorLike,
    targets: TensorLike,
    input_lengths: TensorLike,
    target_lengths: TensorLike,
    *args: object,
    fresh: Fresh = refuse_fresh,
    **kwargs: object,
) -> tuple[TensorSpec, TensorSpec]:
    return _ctc(log_probs, fresh(None))


@OP.formula("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _ctc_loss_backward(grad: TensorLike, log_probs: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(log_probs, log_probs.shape)


# --- samples ---------------------------------------------------------------------------------------

_PATHS = (after(lambda t: t.log_softmax(2), reals(6, 2, 4)), listed([1, 2], [3, 1]))
_CLASSES = (reals(4, 5), integers(4, below=5))
_MAPS = (reals(2, 5, 3, 4), integers(2, 3, 4, below=5))
OP.samples("_ctc_loss", call(*_PATHS, [6, 5], [2, 1]))
OP.samples("_ctc_loss.Tensor", call(*_PATHS, listed(6, 5), listed(2, 1)))
OP.samples(
    "_ctc_loss_backward", call(reals(2), *_PATHS, [6, 5], [2, 1], reals(2, low=1.0), reals(2, 6, 5, high=0.0), 0)
)
OP.samples(
    "_ctc_loss_backward.Tensor",
    call(reals(2), *_PATHS, listed(6, 5), listed(2, 1), reals(2, low=1.0), reals(2, 6, 5, high=0.0), 0),
)
OP.samples("huber_loss_backward smooth_l1_loss_backward", call(reals(), reals(3, 4), reals(3, 4), 1, 0.5))
OP.samples("mse_loss_backward soft_margin_loss_backward", call(reals(3, 4), reals(3, 4), reals(3, 4), 0))
OP.samples("multi_margin_loss", call(*_CLASSES))
OP.samples("multi_margin_loss_backward", call(reals(), *_CLASSES, 1, 1))
OP.samples("multilabel_margin_loss_forward", call(reals(2, 4), listed([1, 3, -1, 0], [0, -1, 2, 3]), 1))
OP.samples(
    "multilabel_margin_loss_backward",
    call(reals(), reals(2, 4), listed([1, 3, -1, 0], [0, -1, 2, 3]), 1, listed([0.0, 1, 0, 1], [1.0, 0, 0, 0])),
)
OP.samples("nll_loss_forward", call(*_CLASSES, None, 1, -100), call(*_CLASSES, reals(5, low=0.1), 0, 2))
OP.samples("nll_loss2d_forward", call(*_MAPS, None, 1, -100))
OP.samples("nll_loss_backward", call(reals(), *_CLASSES, None, 1, -100, reals(low=3.0)))
OP.samples("nll_loss2d_backward", call(reals(), *_MAPS, None, 1, -100, reals(low=3.0)))
