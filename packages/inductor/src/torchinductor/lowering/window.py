"""Rules for pooling windows: each output element looks at the window unrolled, or reduces over it when it is large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product as cartesian

import torch

from primtorch.prims.window import offset_dtype
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import (
    ONE,
    ZERO,
    Index,
    as_expr,
    at_least,
    contiguous_strides,
    dot,
    exprs,
    nonnegative,
    number,
)
from torchinductor.lowering.context import Context
from torchinductor.lowering.reductions import reduction
from torchinductor.lowering.values import Masked, Ops, Rule, Sizes, TensorValue
from torchinductor.lowering.views import masked

# Windows of at most this many elements are unrolled.
_UNROLL = 32


class Windows:
    """Geometry of pooling and convolution: which input elements belong to an output element."""

    def __init__(
        self, t: TensorValue, kernel: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, shape: Index
    ) -> None:
        self.sizes = t.shape[2:]
        self.kernel = tuple(int(k) for k in kernel)
        self.stride, self.padding, self.dilation = exprs(stride), exprs(padding), exprs(dilation)
        self.out = shape[2:]

    @property
    def count(self) -> int:
        """Elements of a window."""
        total = 1
        for k in self.kernel:
            total *= k
        return total

    def places(self) -> Iterator[tuple[int, ...]]:
        """Where they are in it, one after the other."""
        return cartesian(*(range(k) for k in self.kernel))

    def at(self, out: Sequence[IntExpr], place: Sequence[IntExpr]) -> Index:
        """The spatial input index, possibly outside the input."""
        return tuple(
            o * s + k * d - p
            for o, k, s, d, p in zip(out, place, self.stride, self.dilation, self.padding, strict=True)
        )

    def inside(self, ops: Ops, spatial: Index, place: Sequence[int] | None) -> int | None:
        """Whether the input index lies inside; None when it surely does."""
        mask: int | None = None

        def both(part: int) -> int:
            return part if mask is None else ops.apply("bitwise_and", mask, part)

        for d, position in enumerate(spatial):
            first = ZERO if place is None else number(place[d])
            last = number(self.kernel[d] - 1) if place is None else first
            low = (first * self.dilation[d] - self.padding[d]).as_int()
            if low is None or low < 0:
                mask = both(ops.apply("ge", ops.index_expr(position, torch.int64), ops.constant(0, torch.int64)))
            high = (
                self.sizes[d] - ONE - ((self.out[d] - ONE) * self.stride[d] + last * self.dilation[d] - self.padding[d])
            )
            if not self._surely_positive(high):
                size = ops.index_expr(self.sizes[d], torch.int64)
                mask = both(ops.apply("lt", ops.index_expr(position, torch.int64), size))
        return mask

    def _surely_positive(self, room: IntExpr) -> bool:
        """Whether what is left of a dim behind the last window is surely at least zero. A size that only the data tells
        may be none, and images of no elements are refused where sizes are known."""
        sizes = {name for size in self.sizes for name in size.symbols() if not name.startswith("u")}
        return nonnegative(room) or (room.symbols() <= sizes and at_least(room, ZERO))


def _lowest(dtype: torch.dtype) -> float | int | bool:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min if dtype != torch.bool else False


def _result_shape(ctx: Context) -> Index:
    assert ctx.node is not None
    meta = ctx.node.meta["val"]
    return exprs((meta[0] if isinstance(meta, (tuple, list)) else meta).shape)


def max_pool(
    ctx: Context, t: TensorValue, kernel: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[TensorValue, TensorValue]:
    """The largest element of each window of (N, C, *spatial), and its offset in the flattened window."""
    shape = _result_shape(ctx)
    windows = Windows(t, kernel, stride, padding, dilation, shape)
    if t.heavy or t.cost > 2:
        ctx.store(t)
    inner = contiguous_strides(exprs(windows.kernel))
    dtype = offset_dtype(windows.kernel)

    def best(index: Index, ops: Ops) -> tuple[int, int]:
        value = place = -1
        for offset in windows.places():
            spatial = windows.at(index[2:], exprs(offset))
            mask = windows.inside(ops, spatial, offset)
            lowest = ops.constant(_lowest(t.dtype), t.dtype)
            at = (*index[:2], *spatial)
            found = t.load(at, ops) if mask is None else masked(t, at, ops, mask, lowest)
            here = dot(exprs(offset), inner)
            if value < 0:
                if mask is not None:
                    # The first window element may lie in the padding: take the first element inside instead.
                    here = dot(tuple(_before_inside(i, windows.dilation[d]) for d, i in enumerate(spatial)), inner)
                value, place = found, ops.index_expr(here, torch.int32)
                continue
            greater = ops.apply("gt", found, value)
            if t.dtype.is_floating_point:
                greater = ops.apply("bitwise_or", greater, ops.apply("isnan", found))
            value = ops.apply("where", greater, found, value)
            place = ops.apply("where", greater, ops.index_expr(here, torch.int32), place)
        return value, place

    def offset(index: Index, ops: Ops) -> int:
        return ops.to_dtype(best(index, ops)[1], dtype, torch.int32)

    values = ctx.lazy(shape, t.dtype, t.device, lambda i, ops: best(i, ops)[0], of=[t], cost=3 * windows.count)
    offsets = ctx.lazy(shape, dtype, t.device, offset, of=[t], cost=3 * windows.count)
    return values, offsets


def _before_inside(position: IntExpr, step: IntExpr) -> IntExpr:
    """The least k >= 0 for which position + k*step is not negative."""
    return ((step - ONE - position) // step).maximum(ZERO)


def avg_pool(
    ctx: Context,
    t: TensorValue,
    kernel: Sequence[int],
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> TensorValue:
    """The mean of each window of (N, C, *spatial); integers are divided toward zero."""
    shape = _result_shape(ctx)
    rank = len(shape) - 2
    windows = Windows(t, kernel, stride, padding, [1] * rank, shape)
    if t.heavy or t.cost > 2:
        ctx.store(t)
    compute = torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype

    def count(index: Index, ops: Ops) -> int:
        """Elements that the sum is divided by."""
        if divisor is not None:
            return ops.constant(divisor, compute)
        total = ONE
        for d in range(rank):
            start = index[2 + d] * windows.stride[d] - windows.padding[d]
            border = windows.padding[d] if count_include_pad else ZERO
            stop = (start + as_expr(kernel[d])).minimum(windows.sizes[d] + border)
            total = total * (stop - (start if count_include_pad else start.maximum(ZERO)))
        return ops.index_expr(total, compute)

    def element(index: Index, place: Index, known: Sequence[int] | None, ops: Ops) -> int:
        spatial = windows.at(index[2:], place)
        mask = windows.inside(ops, spatial, known)
        at = (*index[:2], *spatial)
        return (
            t.load(at, ops)
            if mask is None
            else t.load(at, Masked(ops, mask))
            if t.cost <= 1
            else masked(t, at, ops, mask, ops.constant(0, t.dtype))
        )

    if windows.count <= _UNROLL:

        def unrolled(index: Index, ops: Ops) -> int:
            total: int | None = None
            for offset in windows.places():
                part = element(index, exprs(offset), offset, ops)
                total = part if total is None else ops.apply("add", total, part)
            assert total is not None
            return ops.apply("div" if compute.is_floating_point else "trunc_div", total, count(index, ops))

        return ctx.lazy(shape, t.dtype, t.device, unrolled, of=[t], cost=2 * windows.count)
    # One more dim a window dim, summed over.
    wide = (*shape, *exprs(windows.kernel))
    cut = len(shape)
    view = ctx.lazy(wide, compute, t.device, lambda i, ops: element(i[:cut], i[cut:], None, ops), of=[t], cost=2)
    total = reduction("sum")(ctx, view, tuple(range(cut, len(wide))), False)
    op = "div" if compute.is_floating_point else "trunc_div"
    return ctx.lazy(
        shape, t.dtype, t.device, lambda i, ops: ops.apply(op, total.load(i, ops), count(i, ops)), of=[total], cost=2
    )


RULES: Mapping[str, Rule] = {"max_pool": max_pool, "avg_pool": avg_pool}
