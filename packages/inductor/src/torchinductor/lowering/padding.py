"""Matrix products of 16-bit numbers whose sizes no vector load divides: their operands get a margin of zeros.

A device that multiplies matrices in units of its own takes several times as long where rows do not start, and do not
end, at multiples of 16 bytes (a vocabulary of 50,257 words). An operand that is computed anyway is stored with a margin
at once, so that only the margin itself is written besides; the product's result is a view without the columns too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import fx

from primtorch.memory import memory_of
from primtorch.prims import Prim
from primtorch.spec import TensorSpec
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ONE, Index, contiguous_strides, exprs, number, product
from torchinductor.lowering.aten_calls import aten_call
from torchinductor.lowering.context import Context, Margins
from torchinductor.lowering.values import Lazy, Strided, TensorValue
from torchinductor.schemas import ProductRates

FACTORS: Mapping[str, int] = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""By prim: where its factors stand among the arguments; what stands before is added."""

_UNKNOWN = 1024  # what a size counts as that is not known
_LAUNCH = 5e-6  # seconds that a kernel more takes
_SPARED = 0.5  # results that may be moved more for a memory less
_WHOLES = 64  # times as large as what else a kernel reads for a result that goes over a product
_POINT_BY_POINT = ("elementwise", "comparison", "ternary", "conversion")  # how the names of families begin


def aligned_product(
    ctx: Context, prim: Prim, args: Sequence[object], kwargs: Mapping[str, object], meta: object
) -> TensorValue | None:
    """The product of operands with margins, as a view without its own; None where they do not pay."""
    at = FACTORS[prim.name]
    a, b = args[at : at + 2]
    if not isinstance(a, TensorValue) or not isinstance(b, TensorValue) or not isinstance(meta, TensorSpec):
        return None
    sizes = _margins(ctx, a, b)
    if sizes is None:
        return None
    rows, depth, columns = sizes
    if (rows, depth) == a.shape and _written_in_place(ctx, a, b, args, at, kwargs):
        return _odd_product(ctx, a, b, args[:at], meta)
    batch = a.shape[:-2]
    factors = [with_margin(ctx, a, (*batch, rows, depth)), with_margin(ctx, b, (*batch, depth, columns))]
    out = (*batch, rows, columns)
    grown = [
        with_margin(ctx, t, _broadcast(t.shape, a.shape[-2], b.shape[-1], out)) if isinstance(t, TensorValue) else t
        for t in args[:at]
    ]
    call = aten_call(prim, (*grown, *factors, *args[at + 2 :]), kwargs)
    if call is None:
        return None
    padded = TensorSpec(_given(out), _given(contiguous_strides(out)), meta.dtype, meta.device)
    (result,) = ctx.extern(*call, [padded], "any")
    assert result is not None and isinstance(result.data, Strided)
    shape = (*batch, a.shape[-2], b.shape[-1])
    return TensorValue(shape, result.dtype, result.device, result.data, contiguous_strides(shape))


def _odd_product(
    ctx: Context, a: TensorValue, b: TensorValue, added: Sequence[object], meta: TensorSpec
) -> TensorValue:
    """The product in memory without a margin: by an operator of ours, which writes its rows in groups."""
    unit = _rates(ctx, a).alignment // a.dtype.itemsize
    args = (a, _by_columns(ctx, b), added[0] if added else None, unit)
    (result,) = ctx.extern(torch.ops.torchinductor.odd_product.default, args, {}, [meta], "any")
    assert result is not None
    return result


def _written_in_place(
    ctx: Context, a: TensorValue, b: TensorValue, args: Sequence[object], at: int, kwargs: Mapping[str, object]
) -> bool:
    """Whether a product of two matrices is nothing but a result of the graph, which has no margin, and large enough:
    each group of its rows reads all of the second factor, and a copy reads and writes the result. What a kernel makes a
    result of, point by point, goes over the product where that has no margin: less is held, and as much is moved."""
    assert ctx.node is not None
    if kwargs or len(args) > at + 2 or len(a.shape) != 2:
        return False
    returned = _only_returned(ctx.node)
    if not returned and not _goes_over(ctx.node):
        return False
    if not _matrix_of(a).along_rows or (_matrix_of(b).along_rows and not isinstance(b.data, Lazy)):
        return False  # what is left out of them would be neighbours in memory
    if at and not (isinstance(args[0], TensorValue) and args[0].shape == b.shape[1:]):
        return False
    sizes = [size.as_int() for size in (*a.shape, b.shape[-1])]
    if None in sizes:
        return False
    rows, depth, columns = (size or 0 for size in sizes)
    rates = _rates(ctx, a)
    unit = rates.alignment // a.dtype.itemsize
    groups = unit // math.gcd(columns, unit)
    read_again = (groups - 1) * depth * columns * a.dtype.itemsize + groups * _LAUNCH * rates.bandwidth
    return read_again < (2 if returned else _SPARED) * rows * columns * a.dtype.itemsize


def _by_columns(ctx: Context, value: TensorValue) -> TensorValue:
    """A second factor whose columns lie in one piece: one that is not stored yet is stored so."""
    if isinstance(value.data, Lazy):
        depth = value.shape[0]
        buffer = ctx.new_buffer(value.shape, value.dtype, value.device, (ONE, depth))
        ctx.write(buffer, value)
        value.data = Strided(buffer.name, (ONE, depth))
    return value


def _goes_over(node: fx.Node) -> bool:
    """Whether one result of the graph alone is made of a node, point by point with little else, and is as large."""
    size, dtype = _elements(node), node.meta["val"].dtype
    while not all(user.op == "output" for user in node.users):
        (user, *others) = node.users
        if others or not isinstance(user.target, Prim) or _elements(user) != size:
            return False
        if user.target.name != "reshape" and not user.target.family.startswith(_POINT_BY_POINT):
            return False
        if any(_elements(memory_of(n)) * _WHOLES > size for n in user.all_input_nodes if n is not node):
            return False
        node = user
    return bool(node.users) and bool(node.meta["val"].dtype == dtype)


def _elements(node: fx.Node) -> int:
    value = node.meta["val"]
    return _count(product(exprs(value.shape))) if hasattr(value, "shape") else 1


def _only_returned(node: fx.Node) -> bool:
    """Whether nothing but the graph's caller reads a node, or a view of it."""
    return bool(node.users) and all(
        user.op == "output"
        or (isinstance(user.target, Prim) and user.target.name == "reshape" and _only_returned(user))
        for user in node.users
    )


def _rates(ctx: Context, value: TensorValue) -> ProductRates:
    rates = ctx.traits_of(value.device).products
    assert rates is not None
    return rates


def _given(index: Index) -> tuple[int, ...]:
    """Sizes as a spec has them: symbols stay as they are."""
    known = [size.as_int() for size in index]
    return tuple(size if number is None else number for size, number in zip(index, known, strict=True))  # type: ignore[misc]


def _broadcast(shape: Index, rows: IntExpr, columns: IntExpr, out: Index) -> Index:
    """The shape of what is added to a product that grows to `out`: dims of size one stay."""
    grown = list(shape)
    for place, (old, new) in enumerate(((columns, out[-1]), (rows, out[-2])), 1):
        if len(shape) >= place and shape[-place] == old:
            grown[-place] = new
    return tuple(grown)


class _Matrix(NamedTuple):
    """A factor: its shape, and whether neighbours in memory are neighbours in a row, as it lies or as eager lays it."""

    shape: Index
    along_rows: bool
    dtype: torch.dtype


def _matrix(shape: Index, strides: Index | None, dtype: torch.dtype) -> _Matrix:
    return _Matrix(shape, strides is None or strides[-1] == ONE or strides[-2] != ONE, dtype)


def _matrix_of(value: TensorValue) -> _Matrix:
    strides = value.data.strides if isinstance(value.data, Strided) else value.hint
    return _matrix(value.shape, strides, value.dtype)


def _margins(ctx: Context, a: TensorValue, b: TensorValue) -> Index | None:
    """(rows, depth, columns) of a product with margins, None where it is as well without."""
    rates = ctx.traits_of(a.device).products
    if rates is None:
        return None
    grown = _grown(rates, _matrix_of(a), _matrix_of(b))
    if grown is None:
        return None
    sizes, saved = grown
    copied = sum(
        _count(product(value.shape)) * value.dtype.itemsize * 2
        for value, shape in ((a, sizes[:2]), (b, sizes[1:]))
        if isinstance(value.data, Strided) and _widened(ctx, value, (*value.shape[:-2], *shape)) is None
    )
    return sizes if saved > copied / rates.bandwidth else None


def _grown(rates: ProductRates, a: _Matrix, b: _Matrix) -> tuple[Index, float] | None:
    """(rows, depth, columns) with margins, and the seconds that are saved if these come free; None where none are.

    What runs on in memory has to end at a multiple of the unit: the depth of a factor's row (or column), the columns of
    the result; the rows only where the first factor's columns lie in one piece.
    """
    if a.dtype.itemsize != 2 or not a.dtype.is_floating_point or a.dtype != b.dtype:
        return None
    rows, depth, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if any(size.as_int() in (0, 1) for size in (rows, depth, columns)):
        return None  # of a vector
    unit = rates.alignment // a.dtype.itemsize
    sizes = (
        rows if a.along_rows else _whole(rows, unit),
        _whole(depth, unit) if a.along_rows or not b.along_rows else depth,
        _whole(columns, unit),
    )
    work = 2.0 * _count(product(a.shape)) * _count(columns)
    saved = work / rates.unaligned - work / rates.aligned - 2 * _LAUNCH
    return (sizes, saved) if sizes != (rows, depth, columns) and saved > 0 else None


def _count(size: IntExpr) -> int:
    known = size.as_int()
    return _UNKNOWN if known is None else known


def _whole(size: IntExpr, unit: int) -> IntExpr:
    """The size, or the next multiple of the unit where it is known not to be one."""
    known = size.as_int()
    return size if known is None else number(-(-known // unit) * unit)


def _widened(ctx: Context, value: TensorValue, shape: Index) -> TensorValue | None:
    """A stored value with a margin that its memory has; None where it has none."""
    data = value.data
    if not isinstance(data, Strided):
        return None
    have = ctx.margins.get(data.buffer, {})
    for old, new, stride in zip(value.shape, shape, data.strides, strict=True):
        if new != old and have.get(stride) != (old, new):
            return None
    return TensorValue(shape, value.dtype, value.device, data)


def with_margin(ctx: Context, value: TensorValue, shape: Index) -> TensorValue:
    """The value with zeros up to a larger shape, in memory."""
    if shape == value.shape:
        return value
    found = _widened(ctx, value, shape)
    if found is not None:
        return found
    if len(shape) < 2 or _matrix_of(value).along_rows:
        strides = contiguous_strides(shape)
    else:
        *outer, last, before = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
        strides = (*outer, before, last)
    buffer = ctx.new_buffer(shape, value.dtype, value.device, strides)
    ctx.write(buffer, value)
    margins: Margins = {}
    for dim, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
        if old != new:
            slab = (*value.shape[:dim], new - old, *shape[dim + 1 :])
            zeros = ctx.lazy(slab, value.dtype, value.device, lambda _, ops: ops.constant(0, value.dtype), cost=0)
            ctx.write(buffer, zeros, strides, old * strides[dim])
            margins[strides[dim]] = (old, new)
    ctx.margins[buffer.name] = margins
    if isinstance(value.data, Lazy):
        value.data = Strided(buffer.name, strides)
    return TensorValue(shape, value.dtype, value.device, Strided(buffer.name, strides))


def realize_for_products(ctx: Context, node: fx.Node, value: TensorValue) -> None:
    """Stores a node's value, which several others read: with the margins that products among them want."""
    rates = ctx.traits_of(value.device).products
    if rates is not None and isinstance(value.data, Lazy) and len(value.shape) > 1:
        wanted = value.shape
        for user, swapped in products_of(node):
            own = _wanted(rates, user, node, swapped) or wanted
            wanted = tuple(b if b != old else a for a, b, old in zip(wanted, own, value.shape, strict=True))
        with_margin(ctx, value, wanted)
    ctx.realize(value)


def products_of(node: fx.Node, swapped: bool = False) -> Iterator[tuple[fx.Node, bool]]:
    """The matrix products that read a node, each with whether it takes rows for columns."""
    for user in node.users:
        name = user.target.name if isinstance(user.target, Prim) else ""
        if name in FACTORS:
            yield user, swapped
        elif name == "permute":
            order = tuple(cast("Sequence[int]", user.args[1]))
            if len(order) > 1 and (*order[:-2], order[-1], order[-2]) == tuple(range(len(order))):
                yield from products_of(user, not swapped)


def _wanted(rates: ProductRates, user: fx.Node, node: fx.Node, swapped: bool) -> Index | None:
    """The shape that a node should have for a product that takes it as a factor."""
    factors = user.args[FACTORS[user.target.name] :][:2]  # type: ignore[union-attr]
    metas = [factor.meta["val"] for factor in factors]  # type: ignore[union-attr]
    a, b = (_matrix(exprs(m.shape), exprs(m.stride()), m.dtype) for m in metas)
    grown = _grown(rates, a, b)
    if grown is None:
        return None
    (rows, depth, columns), _ = grown
    first = factors[0] is node or (isinstance(factors[0], fx.Node) and node in factors[0].all_input_nodes)
    pair = (rows, depth) if first else (depth, columns)
    return (*a.shape[:-2], *(reversed(pair) if swapped else pair))
