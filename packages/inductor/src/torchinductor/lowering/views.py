"""Rules for views and for shape prims: index arithmetic, folded into whoever reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ONE, ZERO, Index, as_expr, broadcast_strides, exprs, is_one, product, reshape_index
from torchinductor.ir import Apply, Recorder, space, space_index
from torchinductor.lowering.context import Context, same_strides
from torchinductor.lowering.values import Lazy, Masked, Ops, Size, Sizes, Strided, TensorValue


def _view(ctx: Context, t: TensorValue, shape: Index, index_map: Callable[[Index, Ops], Index]) -> TensorValue:
    """A view that is not (or not surely) a strided one of memory. That of a conversion is the conversion of a view."""
    narrower = None if t.narrower is None else _view(ctx, t.narrower, shape, index_map)

    def load(index: Index, ops: Ops) -> int:
        return t.load(index_map(index, ops), ops)

    return ctx.lazy(shape, t.dtype, t.device, load, of=[t], cost=0, narrower=narrower)


def _strided(t: TensorValue, shape: Index, strides: Index, offset: IntExpr) -> TensorValue:
    assert isinstance(t.data, Strided)
    return TensorValue(shape, t.dtype, t.device, Strided(t.data.buffer, strides, offset))


def expand(ctx: Context, t: TensorValue, shape: Sizes) -> TensorValue:
    """Dims of size one repeated, and new ones in front; stride zero where the value is stored."""
    sizes = exprs(shape)
    lead = len(sizes) - len(t.shape)
    grown = [is_one(a) and not is_one(b) for a, b in zip(t.shape, sizes[lead:], strict=True)]
    repeats = any(grown) or any(not is_one(s) for s in sizes[:lead])
    dear = t.heavy or t.cost > 8
    if repeats and isinstance(t.data, Lazy) and t.shape and (dear or _repeats_root(ctx, t, sizes)):
        ctx.realize(t)
    if isinstance(t.data, Strided):
        kept = tuple(ZERO if g else s for g, s in zip(grown, t.data.strides, strict=True))
        return _strided(t, sizes, (ZERO,) * lead + kept, t.data.offset)

    def index_map(index: Index, ops: Ops) -> Index:
        return tuple(ZERO if g else i for g, i in zip(grown, index[lead:], strict=True))

    return _view(ctx, t, sizes, index_map)


def _repeats_root(ctx: Context, t: TensorValue, sizes: Index) -> bool:
    """Whether a square root would be computed for so many elements more than there are of it that it is stored."""
    least, few, many = ctx.traits_of(t.device).repeated_roots, product(t.shape).as_int(), product(sizes).as_int()
    if least is None or not few or many is None or many < least * few or not t.reads:
        return False
    recorder = Recorder({axis.name: axis.size for axis in space(t.shape)})
    t.load(space_index(t.shape), recorder)
    return any(op.op in ("sqrt", "rsqrt") for op in recorder.body().of(Apply))


def permute(ctx: Context, t: TensorValue, dims: Sequence[int]) -> TensorValue:
    """The dims in another order."""
    shape = tuple(t.shape[d] for d in dims)
    if isinstance(t.data, Strided):
        return _strided(t, shape, tuple(t.data.strides[d] for d in dims), t.data.offset)
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return _view(ctx, t, shape, lambda index, ops: tuple(index[i] for i in inverse))


def reshape(ctx: Context, t: TensorValue, shape: Sizes) -> TensorValue:
    """Another shape of as many elements, in row-major order."""
    sizes, old = exprs(shape), t.shape
    if isinstance(t.data, Strided):
        strides = broadcast_strides(old, t.data.strides, sizes)
        if strides is not None:
            return _strided(t, sizes, strides, t.data.offset)
    if any(s.as_int() == 0 for s in sizes):
        return _view(ctx, t, sizes, lambda index, ops: (ZERO,) * len(old))
    return _view(ctx, t, sizes, lambda index, ops: reshape_index(index, old, sizes, _ranges(ops)))


def _ranges(ops: Ops) -> Mapping[str, IntExpr]:
    while isinstance(ops, Masked):
        ops = ops.ops
    return getattr(ops, "ranges", {})


def squeeze(ctx: Context, t: TensorValue, dims: Sequence[int]) -> TensorValue:
    """Without the dims of size one in `dims`."""
    keep = [d for d in range(len(t.shape)) if d not in dims]
    shape = tuple(t.shape[d] for d in keep)
    if isinstance(t.data, Strided):
        return _strided(t, shape, tuple(t.data.strides[d] for d in keep), t.data.offset)

    def index_map(index: Index, ops: Ops) -> Index:
        rest = iter(index)
        return tuple(ZERO if d in dims else next(rest) for d in range(len(t.shape)))

    return _view(ctx, t, shape, index_map)


def unsqueeze(ctx: Context, t: TensorValue, dims: Sequence[int]) -> TensorValue:
    """With a dim of size one at `dim`."""
    rank = len(t.shape) + len(dims)
    old = iter(range(len(t.shape)))
    source = [None if d in dims else next(old) for d in range(rank)]
    shape = tuple(ONE if s is None else t.shape[s] for s in source)
    if isinstance(t.data, Strided):
        return _strided(t, shape, _unsqueezed_strides(t, shape, source), t.data.offset)
    return _view(
        ctx, t, shape, lambda index, ops: tuple(i for i, s in zip(index, source, strict=True) if s is not None)
    )


def _unsqueezed_strides(t: TensorValue, shape: Index, source: Sequence[int | None]) -> Index:
    assert isinstance(t.data, Strided)
    result: list[IntExpr] = [ONE] * len(shape)
    for d in range(len(shape) - 1, -1, -1):
        s = source[d]
        if s is not None:
            result[d] = t.data.strides[s]
        elif d + 1 < len(shape):
            result[d] = result[d + 1] * shape[d + 1]
    return tuple(result)


def slice_(ctx: Context, t: TensorValue, dim: int, start: Size, stop: Size, step: Size) -> TensorValue:
    """Every step-th element of a dim from start to stop."""
    low, high, by = as_expr(start), as_expr(stop), as_expr(step)
    length = high - low if is_one(by) else (high - low + by - ONE) // by
    shape = (*t.shape[:dim], length, *t.shape[dim + 1 :])
    if isinstance(t.data, Strided):
        strides = list(t.data.strides)
        offset = t.data.offset + low * strides[dim]
        strides[dim] = strides[dim] * by
        return _strided(t, shape, tuple(strides), offset)
    return _view(ctx, t, shape, lambda i, ops: (*i[:dim], low + i[dim] * by, *i[dim + 1 :]))


def flip(ctx: Context, t: TensorValue, dims: Sequence[int]) -> TensorValue:
    """Dims in reverse."""
    shape = t.shape
    return _view(
        ctx, t, shape, lambda index, ops: tuple(shape[d] - ONE - i if d in dims else i for d, i in enumerate(index))
    )


def roll(ctx: Context, t: TensorValue, shifts: Sizes, dims: Sequence[int]) -> TensorValue:
    """Elements moved round along dims; without dims, in the flattened tensor."""
    if not dims:
        flat = roll(ctx, reshape(ctx, t, (product(t.shape),)), shifts, (0,))
        return reshape(ctx, flat, t.shape)
    by: dict[int, IntExpr] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        by[dim] = by.get(dim, ZERO) + as_expr(shift)
    # Less than the size, however far it is: then what is moved round is so once, and needs no division.
    by = {dim: shift if t.shape[dim].as_int() is not None else shift % t.shape[dim] for dim, shift in by.items()}

    def index_map(index: Index, ops: Ops) -> Index:
        return tuple(ops.simplify((i - by[d]) % t.shape[d]) if d in by else i for d, i in enumerate(index))

    return t if any(s.as_int() == 0 for s in t.shape) else _view(ctx, t, t.shape, index_map)


def diagonal(ctx: Context, t: TensorValue, offset: int, dim1: int, dim2: int) -> TensorValue:
    """The diagonal of two dims, as the last dim."""
    rows, columns = t.shape[dim1], t.shape[dim2]
    down, right = as_expr(max(-offset, 0)), as_expr(max(offset, 0))
    length = (rows - down).minimum(columns - right).maximum(ZERO)
    keep = [d for d in range(len(t.shape)) if d not in (dim1, dim2)]
    shape = (*(t.shape[d] for d in keep), length)
    if isinstance(t.data, Strided) and length.terms:
        strides = t.data.strides
        start = t.data.offset + down * strides[dim1] + right * strides[dim2]
        return _strided(t, shape, (*(strides[d] for d in keep), strides[dim1] + strides[dim2]), start)

    def index_map(index: Index, ops: Ops) -> Index:
        result = dict(zip(keep, index, strict=False))
        result[dim1], result[dim2] = index[-1] + down, index[-1] + right
        return tuple(result[d] for d in range(len(t.shape)))

    return _view(ctx, t, shape, index_map)


def unfold(ctx: Context, t: TensorValue, dim: int, size: Size, step: Size) -> TensorValue:
    """Windows of `size` elements along a dim, `step` apart, as a last dim."""
    width, by = as_expr(size), as_expr(step)
    if not t.shape:
        return _view(ctx, t, (width,), lambda index, ops: ())
    count = (t.shape[dim] - width) // by + ONE
    shape = (*t.shape[:dim], count, *t.shape[dim + 1 :], width)
    if isinstance(t.data, Strided):
        strides = list(t.data.strides)
        return _strided(t, shape, (*strides[:dim], strides[dim] * by, *strides[dim + 1 :], strides[dim]), t.data.offset)
    return _view(ctx, t, shape, lambda i, ops: (*i[:dim], i[dim] * by + i[-1], *i[dim + 1 : -1]))


def _laid_out(ctx: Context, t: TensorValue) -> tuple[TensorValue, IntExpr]:
    """t in memory with the strides that its meta names, and its meta's storage offset."""
    assert ctx.node is not None
    meta = ctx.node.args[0].meta["val"]  # type: ignore[union-attr]
    return ctx.realize_exactly(t, exprs(meta.stride())), as_expr(meta.storage_offset())


def as_strided(ctx: Context, t: TensorValue, shape: Sizes, strides: Sizes, offset: Size) -> TensorValue:
    """A layout in elements over the memory of the stored value."""
    base, start = _laid_out(ctx, t)
    assert isinstance(base.data, Strided)
    return _strided(base, exprs(shape), exprs(strides), base.data.offset + as_expr(offset) - start)


def as_strided_scatter(
    ctx: Context, t: TensorValue, src: TensorValue, shape: Sizes, strides: Sizes, offset: Size
) -> TensorValue:
    """A copy of t in which src stands where a layout in elements says."""
    assert ctx.node is not None
    meta = ctx.node.args[0].meta["val"]  # type: ignore[union-attr]
    buffer = ctx.new_buffer(t.shape, t.dtype, t.device, exprs(meta.stride()))
    ctx.write(buffer, t)
    ctx.write(buffer, src, exprs(strides), as_expr(offset) - as_expr(meta.storage_offset()))
    return ctx.strided(buffer)


def copy_strided(ctx: Context, t: TensorValue, strides: Sizes) -> TensorValue:
    """The value in memory of its own with these strides. What lies so already is not copied: nothing here writes to it,
    and what the graph returns has memory of its own whatever rules give.

    Raises:
        LoweringError: elements would share a place.
    """
    wanted = exprs(strides)
    if isinstance(t.data, Strided) and same_strides(t.shape, t.data.strides, wanted) and _fills(ctx, t):
        return TensorValue(t.shape, t.dtype, t.device, t.data)
    value = ctx.lazy(t.shape, t.dtype, t.device, t.load, of=[t], cost=0)
    empty = any(n.as_int() == 0 for n in t.shape)
    if not empty and any(s.as_int() == 0 and not is_one(n) for s, n in zip(wanted, t.shape, strict=True)):
        raise ctx.fail("copy_strided to overlapping memory")
    ctx.realize(value, wanted)
    return value


_UNUSED = 64  # of what is looked at, at most this part of its memory may be left out


def _fills(ctx: Context, t: TensorValue) -> bool:
    """Whether a stored value is all of its memory, or all but a margin: who keeps the one keeps the other."""
    assert isinstance(t.data, Strided)
    whole, own = (product(shape) for shape in (ctx.buffers[t.data.buffer].shape, t.shape))
    known, part = whole.as_int(), own.as_int()
    return whole == own if known is None or part is None else (known - part) * _UNUSED <= known


def _in_range(ops: Ops, position: IntExpr, low: IntExpr | None, high: IntExpr | None) -> int | None:
    """Whether low <= position < high, as a value; None when nothing is asked."""
    value = ops.index_expr(position, torch.int64)
    mask: int | None = None
    if low is not None:
        mask = ops.apply("ge", value, ops.index_expr(low, torch.int64))
    if high is not None:
        above = ops.apply("lt", value, ops.index_expr(high, torch.int64))
        mask = above if mask is None else ops.apply("bitwise_and", mask, above)
    return mask


def masked(value: TensorValue, index: Index, ops: Ops, mask: int, other: int) -> int:
    """The element where `mask` holds, else `other`; no memory is touched where it does not."""
    return ops.apply("where", mask, value.load(index, Masked(ops, mask)), other)


def cat(ctx: Context, tensors: Sequence[TensorValue], dim: int) -> TensorValue:
    """Tensors one after the other along a dim."""
    parts = [t for t in tensors if t.shape[dim].as_int() != 0]
    if len(parts) == 1:
        return parts[0]
    first = tensors[0]
    total, starts = ZERO, []
    for t in parts:
        starts.append(total)
        total = total + t.shape[dim]
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    if not parts:
        return ctx.lazy(shape, first.dtype, first.device, lambda index, ops: ops.constant(0, first.dtype), cost=0)
    if len(parts) > 4:
        return _cat_in_memory(ctx, parts, starts, dim, shape)

    def load(index: Index, ops: Ops) -> int:
        def at(part: int) -> Index:
            return (*index[:dim], index[dim] - starts[part], *index[dim + 1 :])

        last = len(parts) - 1
        result: int | None = None
        for part in range(last, -1, -1):
            mask = _in_range(ops, index[dim], starts[part] if part else None, starts[part + 1] if part < last else None)
            assert mask is not None
            if result is None:
                result = parts[part].load(at(part), Masked(ops, mask))
            else:
                result = masked(parts[part], at(part), ops, mask, result)
        assert result is not None
        return result

    return ctx.lazy(shape, first.dtype, first.device, load, of=parts, cost=2 * len(parts))


def _cat_in_memory(
    ctx: Context, parts: Sequence[TensorValue], starts: Sequence[IntExpr], dim: int, shape: Index
) -> TensorValue:
    buffer = ctx.new_buffer(shape, parts[0].dtype, parts[0].device)
    for part, start in zip(parts, starts, strict=True):
        ctx.write(buffer, part, buffer.strides, start * buffer.strides[dim])
    return ctx.strided(buffer)


def pad(ctx: Context, t: TensorValue, low: Sizes, high: Sizes, value: bool | int | float) -> TensorValue:
    """A constant number before and after each dim; negative amounts cut."""
    lows, highs = exprs(low), exprs(high)
    shape = tuple(s + a + b for s, a, b in zip(t.shape, lows, highs, strict=True))

    def positive(amount: IntExpr) -> bool:
        known = amount.as_int()
        return known is None or known > 0

    def load(index: Index, ops: Ops) -> int:
        inside = tuple(i - a for i, a in zip(index, lows, strict=True))
        mask: int | None = None
        for d, i in enumerate(inside):
            part = _in_range(ops, i, ZERO if positive(lows[d]) else None, t.shape[d] if positive(highs[d]) else None)
            mask = part if mask is None else mask if part is None else ops.apply("bitwise_and", mask, part)
        if mask is None:
            return t.load(inside, ops)
        return masked(t, inside, ops, mask, ops.constant(value, t.dtype))

    return ctx.lazy(shape, t.dtype, t.device, load, of=[t], cost=4)


def slice_scatter(
    ctx: Context, t: TensorValue, src: TensorValue, dim: int, start: Size, stop: Size, step: Size
) -> TensorValue:
    """A copy of t in which src stands in a slice of a dim."""
    low, high, by = as_expr(start), as_expr(stop), as_expr(step)
    if low == ZERO and high == t.shape[dim] and is_one(by):
        return src

    def load(index: Index, ops: Ops) -> int:
        shifted = index[dim] - low
        mask = _in_range(ops, index[dim], None if low == ZERO else low, None if high == t.shape[dim] else high)
        if not is_one(by):
            hit = ops.apply("eq", ops.index_expr(shifted % by, torch.int64), ops.constant(0, torch.int64))
            mask = hit if mask is None else ops.apply("bitwise_and", mask, hit)
        assert mask is not None
        inside = (*index[:dim], shifted // by, *index[dim + 1 :])
        return masked(src, inside, ops, mask, t.load(index, ops))

    return ctx.lazy(t.shape, t.dtype, t.device, load, of=[t, src], cost=3)


RULES: Mapping[str, Callable[..., TensorValue]] = {
    "expand": expand,
    "permute": permute,
    "reshape": reshape,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "slice": slice_,
    "flip": flip,
    "roll": roll,
    "diagonal": diagonal,
    "unfold": unfold,
    "as_strided": as_strided,
    "as_strided_scatter": as_strided_scatter,
    "copy_strided": copy_strided,
    "cat": cat,
    "pad": pad,
    "slice_scatter": slice_scatter,
}
