"""Rules for reductions and scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from torchinductor.indexing import ONE, Index, contiguous_strides, dot, number, product
from torchinductor.ir import Recorder, Stage, space, space_index
from torchinductor.lowering.context import Context
from torchinductor.lowering.values import Ops, Rule, TensorValue
from torchinductor.lowering.views import reshape, squeeze
from torchinductor.ops import ReductionKind, ScanKind


def _kept(ctx: Context, value: TensorValue, dims: Sequence[int], keepdim: bool) -> TensorValue:
    return value if keepdim or not dims else squeeze(ctx, value, dims)


def _trivial(t: TensorValue, dims: Sequence[int]) -> bool:
    return all(t.shape[d].as_int() == 1 for d in dims)


def reduction(kind: ReductionKind) -> Callable[..., TensorValue]:
    """The rule of sum, prod, amax, amin, any, all."""

    def rule(ctx: Context, t: TensorValue, dims: Sequence[int], keepdim: bool = False) -> TensorValue:
        if _trivial(t, dims):
            return _kept(ctx, t, dims, keepdim)
        return _kept(ctx, ctx.reduction(t, dims, kind, t.dtype), dims, keepdim)

    return rule


def arg_reduction(kind: ReductionKind) -> Callable[..., TensorValue]:
    """The rule of argmax and argmin."""

    def rule(ctx: Context, t: TensorValue, dims: Sequence[int], keepdim: bool = False) -> TensorValue:
        over = tuple(dims) or tuple(range(len(t.shape)))
        if _trivial(t, over):
            zero = ctx.lazy(
                tuple(ONE if d in over else s for d, s in enumerate(t.shape)),
                torch.int64,
                t.device,
                lambda index, ops: ops.constant(0, torch.int64),
                cost=0,
            )
            return _kept(ctx, zero, over, keepdim)
        strides = contiguous_strides(t.shape)
        position = (lambda index: index[dims[0]]) if dims else (lambda index: dot(index, strides))
        return _kept(ctx, ctx.reduction(t, over, kind, torch.int64, position=position), over, keepdim)

    return rule


def var_mean(
    ctx: Context, t: TensorValue, dims: Sequence[int], correction: float, keepdim: bool = False
) -> tuple[TensorValue, TensorValue]:
    """Two passes: the mean, then the mean square of what differs from it."""
    count = product(t.shape[d] for d in dims)
    compute = torch.float64 if t.dtype == torch.float64 else torch.float32

    def divided(value: int, ops: Ops, by: float) -> int:
        known = count.as_int()
        if known is not None:
            below = ops.constant(max(known - by, 0.0), compute)
        else:
            below = ops.apply("sub", ops.index_expr(count, compute), ops.constant(by, compute))
            below = ops.apply("maximum", below, ops.constant(0.0, compute))
        return ops.apply("div", value, below)

    if _trivial(t, dims):

        def zero_spread(index: Index, ops: Ops) -> int:
            value = t.load(index, ops)
            return divided(ops.apply("sub", value, value), ops, correction)

        spread = ctx.lazy(t.shape, t.dtype, t.device, zero_spread, of=[t], cost=2)
        return _kept(ctx, spread, dims, keepdim), _kept(ctx, t, dims, keepdim)
    if t.heavy or t.cost > 4:
        ctx.realize(t)
    # The mean is kept in the type it is computed in: the second pass needs its digits.
    mean = ctx.reduction(t, dims, "sum", compute, lambda value, ops, index: divided(value, ops, 0.0))

    def deviation(index: Index, ops: Ops) -> int:
        zero = number(0)
        centre = mean.load(tuple(zero if d in dims else i for d, i in enumerate(index)), ops)
        rest = ops.apply("sub", t.load(index, ops), centre)
        return ops.apply("mul", rest, rest)

    var = ctx.reduction(t, dims, "sum", t.dtype, lambda value, ops, index: divided(value, ops, correction), deviation)
    if compute != t.dtype:
        rounded = ctx.lazy(mean.shape, t.dtype, t.device, mean.load, of=[mean], cost=0)
        return _kept(ctx, var, dims, keepdim), _kept(ctx, rounded, dims, keepdim)
    return _kept(ctx, var, dims, keepdim), _kept(ctx, mean, dims, keepdim)


def scan(kind: ScanKind) -> Callable[..., TensorValue | tuple[TensorValue, TensorValue]]:
    """The rule of cumsum and its kin: one sequential loop along `dim`."""
    paired = kind in ("cummax", "cummin")

    def rule(ctx: Context, t: TensorValue, dim: int) -> TensorValue | tuple[TensorValue, TensorValue]:
        if not t.shape:
            flat = rule(ctx, reshape(ctx, t, (1,)), 0)
            parts = tuple(reshape(ctx, part, ()) for part in (flat if isinstance(flat, tuple) else (flat,)))
            return cast("tuple[TensorValue, TensorValue]", parts) if paired else parts[0]
        if t.shape[dim].as_int() == 1:
            zeros = ctx.lazy(t.shape, torch.int64, t.device, lambda index, ops: ops.constant(0, torch.int64), cost=0)
            return (t, zeros) if paired else t
        axes, index = space(t.shape, (dim,)), space_index(t.shape)
        recorder = Recorder({a.name: a.size for a in axes})
        position = (recorder.index_expr(index[dim], torch.int64),) if paired else ()
        results = recorder.scan(kind, t.load(index, recorder), *position)
        outputs = []
        for result, dtype in zip(results, (t.dtype, torch.int64), strict=False):
            buffer = ctx.new_buffer(t.shape, dtype, t.device)
            recorder.store(buffer.name, dot(index, buffer.strides), result)
            outputs.append(ctx.strided(buffer))
        ctx.kernel(t.device, axes, [Stage("inner", recorder.body())])
        return (outputs[0], outputs[1]) if paired else outputs[0]

    return rule


RULES: Mapping[str, Rule] = {
    "sum": reduction("sum"),
    "prod": reduction("prod"),
    "amax": reduction("amax"),
    "amin": reduction("amin"),
    "any": reduction("any"),
    "all": reduction("all"),
    "argmax": arg_reduction("argmax"),
    "argmin": arg_reduction("argmin"),
    "var_mean": var_mean,
    "cumsum": scan("sum"),
    "cumprod": scan("prod"),
    "cummax": scan("cummax"),
    "cummin": scan("cummin"),
    "logcumsumexp": scan("logcumsumexp"),
}
