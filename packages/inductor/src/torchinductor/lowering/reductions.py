"""Rules for reductions and scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from primtorch.symbolic.expr import intern_symbol
from torchinductor.indexing import ONE, Index, contiguous_strides, dot, number, product
from torchinductor.ir import (
    Apply,
    Body,
    Constant,
    IndexExpr,
    Indirect,
    Load,
    Op,
    Recorder,
    Stage,
    ToDtype,
    compute_dtype,
    slice_of,
    space,
    space_index,
)
from torchinductor.lowering.context import Context
from torchinductor.lowering.values import Lazy, Ops, Rule, Strided, TensorValue
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
        picked = _picked(t, dims) if kind == "sum" else None
        return _kept(ctx, picked or ctx.reduction(t, dims, kind, t.dtype), dims, keepdim)

    return rule


_PLAIN = (Load, Constant, IndexExpr, Apply, ToDtype)


def _picked(t: TensorValue, dims: Sequence[int]) -> TensorValue | None:
    """The sum of a row that has a value at one place and zeros elsewhere (a loss's slope by its scores): the value, and
    no loop. None for any other sum."""
    wanted = [d for d in dims if t.shape[d].as_int() != 1]
    if len(wanted) != 1 or isinstance(t.data, Strided) or compute_dtype(t.dtype) != t.dtype:
        return None
    axes, index = space(t.shape), space_index(t.shape)
    recorder = Recorder({a.name: a.size for a in axes})
    chosen = recorder.ops[t.load(index, recorder)]
    if not isinstance(chosen, Apply) or chosen.op != "where" or chosen.dtype != t.dtype:
        return None
    same, zero = recorder.ops[chosen.args[0]], recorder.ops[chosen.args[2]]
    if not isinstance(zero, Constant) or zero.value != 0 or not isinstance(same, Apply) or same.op != "eq":
        return None
    along = IndexExpr(torch.int64, index[wanted[0]])
    place = next((b for a, b in (same.args, same.args[::-1]) if recorder.ops[a] == along), None)
    if place is None:
        return None
    needed = sorted(slice_of(recorder.ops, (place, chosen.args[1])))
    ops = [recorder.ops[position] for position in needed]
    inner = along.expr.symbols() | {op.symbol for op in recorder.ops if isinstance(op, Indirect)}
    if not all(isinstance(op, _PLAIN) and not inner & _symbols(op) for op in ops):
        return None
    numbers = {position: number for number, position in enumerate(needed)}
    body = Body(tuple([op.renumbered(numbers.__getitem__) for op in ops]))
    size, names = t.shape[wanted[0]], {a.name for a in axes}

    def load(at: Index, handler: Ops) -> int:
        moved = {intern_symbol(name): at[d] for d, i in enumerate(index) for name in i.symbols() & names}
        values = body.replay(handler, moved)
        where, zero = values[numbers[place]], handler.constant(0, torch.int64)
        below = handler.apply("lt", where, handler.index_expr(size, torch.int64))
        inside = handler.apply("bitwise_and", handler.apply("ge", where, zero), below)
        return handler.apply("where", inside, values[numbers[chosen.args[1]]], handler.constant(0, t.dtype))

    kept = tuple(ONE if d in dims else s for d, s in enumerate(t.shape))
    reads = frozenset(op.buffer for op in ops if isinstance(op, Load))
    return TensorValue(kept, t.dtype, t.device, Lazy(load, len(ops) + 4, reads, any(op.heavy for op in body.of(Apply))))


def _symbols(op: Op) -> set[str]:
    return {name for expr in op.indices for name in expr.symbols()}


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
        ctx.store(t)
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
