"""Gather, scatter, masks, and indices along one dimension; those of several are in `advanced_indexing`."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import TENSORS, Number, TensorLike
from primtorch.builder import Builder, Operand, Value, tensor_among
from primtorch.families import Family, Trait
from primtorch.layout import (
    broadcast,
    broadcast_shapes,
    product,
    same_shape,
    wrap_dim,
)
from primtorch.operators.advanced_indexing import integer_indices
from primtorch.operators.build import Fresh, as_dense, contiguous, refuse_fresh
from primtorch.operators.elementwise import truth
from primtorch.operators.refusals import is_empty, refuse, refuse_overflow
from primtorch.prims import Prim
from primtorch.promotion import result_type
from primtorch.samples import call, integers, listed, reals, truths
from primtorch.spec import Size, TensorSpec

OP = Family("indexing")
OP.trait(Trait.ANYWHERE, "_pack_padded_sequence")
OP.trait(
    Trait.ONE_DEVICE,
    "gather index_add index_copy index_reduce index_select masked_scatter masked_select put scatter "
    "scatter_add scatter_reduce take",
)
OP.trait(Trait.TO_FIRST, "index_fill.int_Tensor")
OP.trait(Trait.OVERLAPS, "index_fill masked_fill")
OP.trait(Trait.SHARES_NOTHING, "gather index_select masked_select take")


@OP.formula("masked_fill.Scalar", "masked_fill.Tensor", "masked_scatter")
def _masked(x: TensorLike, mask: TensorLike, value: Number) -> TensorSpec:
    return contiguous(x, broadcast(tuple(x.shape), tuple(mask.shape)))


@OP.refuses("masked_fill.Tensor", "masked_fill.Scalar")
def _refuse_masked_fill(x: TensorLike, mask: TensorLike, value: Number) -> None:
    refuse(mask.dtype is not torch.bool, lambda: f"masked_fill only supports boolean masks, but got dtype {mask.dtype}")
    if isinstance(value, TENSORS):
        refuse(
            value.dim() > 0,
            lambda: f"masked_fill only supports a 0-dimensional value, but got {value.dim()} dimension(s)",
        )
        refuse(value.dtype.is_complex and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}")
    else:
        refuse(isinstance(value, complex) and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}")
        refuse_overflow(value, x.dtype)


@OP.refuses("masked_scatter")
def _refuse_masked_scatter(x: TensorLike, mask: TensorLike, source: TensorLike) -> None:
    refuse(mask.dtype is not torch.bool, lambda: f"masked_scatter_ only supports boolean masks, but got {mask.dtype}")
    refuse(
        x.dtype is not source.dtype, lambda: f"masked_scatter: expected {x.dtype} and got {source.dtype} for the source"
    )


@OP.rule("masked_fill.Scalar", "masked_fill.Tensor")
def _lower_masked_fill(b: Builder, x: Value, mask: Value, value: Operand) -> Value:
    if isinstance(value, Value):
        value = value.to(x.dtype)
    return b.where(truth(mask), value, x)


@OP.formula("index_fill.int_Scalar", "index_fill.int_Tensor", "put")
def _updated(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return as_dense(x)


@OP.refuses("index_fill.int_Scalar", "index_fill.int_Tensor")
def _refuse_index_fill(x: TensorLike, dim: int, index: TensorLike, value: TensorLike | Number) -> None:
    wrap_dim(dim, x.dim())
    refuse(index.dim() > 1, "Index has to be a vector/scalar")
    if isinstance(value, TENSORS):
        refuse(value.dim() > 0, lambda: f"index_fill_ only supports a 0-dimensional value tensor, not {value.dim()}")
    else:
        refuse_overflow(value, x.dtype)


def _along(dim: int, index: Value) -> tuple[Value | None, ...]:
    return (*(None,) * dim, index.to(torch.int64).reshape((index.numel(),)))


@OP.formula("index_select")
def _index_select(x: TensorLike, dim: int, index: TensorLike) -> TensorSpec:
    shape = list(x.shape)
    at = wrap_dim(dim, x.dim())
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if shape:
        shape[at] = index.shape[0] if index.dim() else 1
    return contiguous(x, shape)


@OP.refuses("index_select")
def _refuse_index_select(x: TensorLike, dim: int, index: TensorLike) -> None:
    at = wrap_dim(dim, x.dim())
    refuse(index.dim() > 1, "index_select(): Index is supposed to be a vector", IndexError)
    if x.dim() == 0:
        refuse(index.dim() == 1 and index.shape[0] != 1, "index_select(): Index to scalar can have only 1 value")
    elif not any(map(is_empty, index.shape)):
        refuse(is_empty(x.shape[at]), "index_select(): self indexing axis dim should be positive")
    refuse(index.dtype not in (torch.int64, torch.int32), "index_select(): Expected dtype int32 or int64 for index")


@OP.rule("index_select")
def _lower_index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    if x.rank == 0:
        return x
    return b.emit(prims.index, x, _along(x.dim(dim), index), False)


def _expanded_values(x: Value, dim: int, index: Value, source: Value) -> Value:
    shape = [index.numel() if d == dim else s for d, s in enumerate(x.shape)]
    return source.expand(shape)


@OP.formula(
    "scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two index_add "
    "index_copy index_reduce"
)
def _rewritten(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(x, x.shape)


def _index_dtype(name: str, index: TensorLike) -> None:
    if any(is_empty(s) for s in index.shape):
        return
    refuse(index.dtype not in (torch.int64, torch.int32), lambda: f"{name}(): Expected dtype int32/int64 for index")


@OP.refuses("scatter.src", "scatter.reduce", "scatter_add", "scatter_reduce.two",
     "scatter.value", "scatter.value_reduce")  # fmt: skip
def _refuse_scatter(
    x: TensorLike, dim: int, index: TensorLike, src: TensorLike, *args: object, **options: object
) -> None:
    at = wrap_dim(dim, x.dim())
    if any(is_empty(s) for s in index.shape):
        return
    _index_dtype("scatter", index)
    refuse(
        max(x.dim(), 1) != max(index.dim(), 1), "Index tensor must have the same number of dimensions as self tensor"
    )
    if isinstance(src, TENSORS):
        refuse(x.dtype is not src.dtype, "scatter(): Expected self.dtype to be equal to src.dtype")
        refuse(
            max(src.dim(), 1) != max(index.dim(), 1),
            "Index tensor must have the same number of dimensions as src tensor",
        )
    for d in range(index.dim() if x.dim() else 0):
        large = d != at and index.shape[d] > x.shape[d]
        beyond = isinstance(src, TENSORS) and src.dim() > 0 and index.shape[d] > src.shape[d]
        refuse(
            large or beyond,
            lambda: (
                f"Expected index {list(index.shape)} to be no larger than self {list(x.shape)} apart from "
                f"dimension {at} and to be no larger than src"
            ),
        )


@OP.refuses("index_add")
def _refuse_index_add(x: TensorLike, dim: int, index: TensorLike, source: TensorLike, *, alpha: Number = 1) -> None:
    _refuse_into("index_add_()", x, dim, index, source)


@OP.refuses("index_reduce")
def _refuse_index_reduce(
    x: TensorLike, dim: int, index: TensorLike, source: TensorLike, reduce: str, *, include_self: bool = True
) -> None:
    refuse(reduce not in ("prod", "mean", "amax", "amin"), lambda: f"index_reduce_(): unknown reduction {reduce}")
    _refuse_into("index_reduce_()", x, dim, index, source)


def _count(index: TensorLike) -> Size:
    """How many places a vector, or a tensor of a single one, gives."""
    return index.shape[0] if index.dim() else 1


def _refuse_into(name: str, x: TensorLike, dim: int, index: TensorLike, source: TensorLike) -> None:
    """What combining slices of a source with those that a vector of places names refuses."""
    at = wrap_dim(dim, x.dim())
    refuse(index.dim() > 1, lambda: f"{name}: Index is supposed to be a vector", IndexError)
    refuse(x.dtype is not source.dtype, lambda: f"{name}: self and source must have the same scalar type")
    refuse(at > 0 and at >= source.dim(), lambda: f"{name}: Indexing dim {dim} is out of bounds of the source tensor")
    refuse(
        _count(index) != (source.shape[at] if source.dim() else 1),
        lambda: f"{name}: Number of indices should be equal to source.size(dim), for dim: {dim}",
        RuntimeError if source.dim() else IndexError,
    )
    own, given = list(x.shape), list(source.shape)
    if own and given:
        del own[at], given[at]
    refuse(
        not same_shape(own, given),
        lambda: (
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(x.shape)} source.shape = {list(source.shape)}"
        ),
    )


@OP.refuses("index_copy")
def _refuse_index_copy(x: TensorLike, dim: int, index: TensorLike, source: TensorLike) -> None:
    at = wrap_dim(dim, x.dim())
    refuse(
        index.dim() > 1, lambda: f"index_copy_(): Index should have dimension 1 or 0 (got {index.dim()})", IndexError
    )
    own, given = list(x.shape), list(source.shape)
    refuse(
        bool(own and given) and len(own) != len(given),
        "index_copy_(): When source and destination are not scalars, their dimensionality must match",
        IndexError,
    )
    refuse(
        not given and _count(index) != 1,
        "index_copy_(): When source is scalar, index should have one element",
        IndexError,
    )
    rest = [part[:at] + part[at + 1 :] for part in (own, given)]
    refuse(not same_shape(*rest), "index_copy_(): Source/destination tensor must have same slice shapes")
    refuse(
        bool(given) and _count(index) != given[at],
        "index_copy_(): Number of indices should be equal to source.size(dim)",
        IndexError,
    )


@OP.rule("index_add")
def _lower_index_add(b: Builder, x: Value, dim: int, index: Value, source: Value, *, alpha: Number = 1) -> Value:
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        source = b.binary(prims.mul, source.compute(), alpha).to(source.dtype)
    if x.rank == 0:
        return x + source.reshape(())
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(dim, index), _expanded_values(x, dim, index, source), True, False)


@OP.rule("index_copy")
def _lower_index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    if x.rank == 0:
        return source.reshape(())
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(dim, index), _expanded_values(x, dim, index, source), False, False)


@OP.rule("index_fill.int_Scalar", "index_fill.int_Tensor")
def _lower_index_fill(b: Builder, x: Value, dim: int, index: Value, value: Operand) -> Value:
    fill = value.to(x.dtype) if isinstance(value, Value) else b.full((), value, x.dtype, x.device)
    if x.rank == 0:
        return fill
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(dim, index), _expanded_values(x, dim, index, fill), False, True)


def _is_empty(index: Value) -> bool:
    """Whether there is nothing to follow; the rank of such an index is anything."""
    return any(type(size) is int and size == 0 for size in index.shape)


def _full_rank(x: Value, index: Value) -> Value:
    return index.to(torch.int64).reshape((1,) * x.rank) if index.rank != x.rank else index.to(torch.int64)


def _for_each(b: Builder, x: Value, index: Value, value: Number) -> Value:
    """A number as the `src` of a scatter."""
    shape = index.shape if index.rank == x.rank or _is_empty(index) else (1,) * max(x.rank, 1)
    return b.full((), value, x.dtype, x.device).expand(shape)


@OP.formula("gather")
def _gather(x: TensorLike, dim: int, index: TensorLike, *, sparse_grad: bool = False) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, index.shape)


@OP.refuses("gather")
def _refuse_gather(x: TensorLike, dim: int, index: TensorLike, *, sparse_grad: bool = False) -> None:
    at = wrap_dim(dim, x.dim())
    _index_dtype("gather", index)
    if any(is_empty(s) for s in index.shape):
        return
    refuse(
        max(x.dim(), 1) != max(index.dim(), 1), "Index tensor must have the same number of dimensions as input tensor"
    )
    for d in range(x.dim() if x.dim() == index.dim() else 0):
        refuse(
            d != at and index.shape[d] > x.shape[d],
            lambda: (
                f"Size does not match at dimension {d} expected index {list(index.shape)} to be no larger than self "
                f"{list(x.shape)} apart from dimension {at}"
            ),
        )


@OP.rule("gather")
def _lower_gather(b: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if x.rank == 0:
        return x.expand(index.shape)
    if index.rank == 0:  # of a 1-d tensor
        return b.emit(prims.gather, x, x.dim(dim), index.to(torch.int64).reshape((1,))).reshape(())
    if index.rank != x.rank and _is_empty(index):
        return b.full(index.shape, 0, x.dtype, x.device)
    return b.emit(prims.gather, x, x.dim(dim), index.to(torch.int64))


def _scattering(
    b: Builder, prim: Prim, x: Value, dim: int, index: Value, src: Value, *rest: object, **options: object
) -> Value:
    """Scatter prims take equal ranks and a src of the index's shape; a 0-d tensor is one of a single element."""
    if index.rank != x.rank and _is_empty(index):
        return x
    shape = x.shape
    if x.rank == 0:
        x = x.reshape((1,))
    index, src = _full_rank(x, index), src.reshape((1,) * x.rank) if src.rank != x.rank else src
    if not same_shape(index.shape, src.shape):
        for d, size in enumerate(index.shape):
            src = src.slice(d, 0, size)
    out = b.emit(prim, x, x.dim(dim), index, src.to(x.dtype), *rest, **options)
    return out.reshape(shape)


@OP.rule("scatter.src")
def _lower_scatter(b: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scattering(b, prims.scatter, x, dim, index, src)


@OP.rule("scatter.value")
def _lower_scatter_value(b: Builder, x: Value, dim: int, index: Value, value: Number) -> Value:
    src = _for_each(b, x, index, value)
    return _scattering(b, prims.scatter, x, dim, index, src)


def _scatter_by(
    b: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if reduce == "sum" and include_self:
        return _scattering(b, prims.scatter_add, x, dim, index, src)
    return _scattering(b, prims.scatter_reduce, x, dim, index, src, reduce, include_self=include_self)


@OP.rule("scatter.reduce")
def _lower_scatter_with_reduce(b: Builder, x: Value, dim: int, index: Value, src: Value, *, reduce: str) -> Value:
    return _scatter_by(b, x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@OP.rule("scatter.value_reduce")
def _lower_scatter_value_with_reduce(
    b: Builder, x: Value, dim: int, index: Value, value: Number, *, reduce: str
) -> Value:
    src = _for_each(b, x, index, value)
    return _scatter_by(b, x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@OP.rule("scatter_add")
def _lower_scatter_add(b: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scattering(b, prims.scatter_add, x, dim, index, src)


OP.rule("scatter_reduce.two")(_scatter_by)


@OP.rule("index_reduce")
def _lower_index_reduce(
    b: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if x.rank == 0:
        out = b.emit(
            prims.scatter_reduce,
            x.reshape((1,)),
            0,
            index.to(torch.int64).reshape((1,)),
            source.reshape((1,)),
            reduce,
            include_self=include_self,
        )
        return out.reshape(())
    dim = x.dim(dim)
    source = source.to(x.dtype)
    places = index.to(torch.int64).reshape([index.numel() if d == dim else 1 for d in range(x.rank)])
    return b.emit(
        prims.scatter_reduce,
        x,
        dim,
        places.expand(source.shape),
        source,
        reduce,
        include_self=include_self,
    )


@OP.formula("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def _isin(elements: TensorLike, test: TensorLike, *, assume_unique: bool = False, invert: bool = False) -> TensorSpec:
    return contiguous(elements, elements.shape, torch.bool)


@OP.rule("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def _lower_isin(
    b: Builder, elements: Operand, tests: Operand, *, assume_unique: bool = False, invert: bool = False
) -> Value:
    device = tensor_among(elements, tests).device
    dtype = result_type((elements, tests))
    given, sought = (v.to(dtype) if isinstance(v, Value) else b.full((), v, dtype, device) for v in (elements, tests))
    hits = given.unsqueeze(given.rank).eq(sought.reshape((sought.numel(),)))
    found = hits.reduce(prims.any, (given.rank,))
    return ~found if invert else found


@OP.formula("repeat_interleave.Tensor")
def _repeat_interleave(
    repeats: TensorLike, *, output_size: Size | None = None, fresh: Fresh = refuse_fresh
) -> TensorSpec:
    count = fresh(None) if output_size is None else output_size
    return TensorSpec((count,), (1,), torch.int64, repeats.device)


@OP.rule("repeat_interleave.Tensor")
def _lower_repeat_interleave(b: Builder, repeats: Value, *, output_size: Size | None = None) -> Value:
    """Each position i repeats[i] times."""
    whole = b.val
    if output_size is None and whole is not None and type(whole.shape[0]) is int:
        output_size = whole.shape[0]
    if output_size is None:
        if whole is not None:
            b.val = whole.shape[0]  # the number is the one that the result's size stands for
        count: Size = b.call(prims.local_scalar, (repeats.to(torch.int64).sum((0,)),), {})
        b.val = whole
    else:
        count = output_size
    if isinstance(repeats.shape[0], int) and repeats.shape[0] == 0:
        return b.full((0,), 0, repeats.dtype, repeats.device)
    ends = b.emit(prims.cumsum, repeats.to(torch.int64), 0)
    found = b.emit(prims.searchsorted, ends, b.iota(count, repeats.device), True)
    return found.to(repeats.dtype)


@OP.refuses("take")
def _refuse_take(x: TensorLike, index: TensorLike) -> None:
    _refuse_no_places("take()", x, index)


def _refuse_no_places(name: str, x: TensorLike, index: TensorLike) -> None:
    given = not any(map(is_empty, index.shape))
    refuse(given and any(map(is_empty, x.shape)), lambda: f"{name}: the tensor that is indexed is empty", IndexError)


@OP.refuses("put")
def _refuse_put(x: TensorLike, index: TensorLike, source: TensorLike, accumulate: bool = False) -> None:
    refuse(x.dtype is not source.dtype, lambda: f"put_(): self and source expected to have the same dtype, {x.dtype}")
    refuse(
        source.numel() != index.numel(),
        lambda: (
            "put_(): Expected source and index to have the same number of elements, but got "
            f"source.numel() = {source.numel()}, index.numel() = {index.numel()}"
        ),
        IndexError,
    )
    _refuse_no_places("put_()", x, index)


@OP.formula("take")
def _take(x: TensorLike, index: TensorLike) -> TensorSpec:
    return contiguous(x, index.shape)


@OP.rule("take")
def _lower_take(b: Builder, x: Value, index: Value) -> Value:
    return b.emit(prims.index, x.reshape((x.numel(),)), (index.to(torch.int64),), True)


@OP.rule("put")
def _lower_put(b: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    flat = x.reshape((x.numel(),))
    out = b.emit(prims.index_put, flat, (index.to(torch.int64),), source.reshape(index.shape), accumulate, True)
    return out.reshape(x.shape)


@OP.formula("masked_select")
def _masked_select(x: TensorLike, mask: TensorLike, *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    shape = broadcast(tuple(x.shape), tuple(mask.shape))
    whole = mask.dim() == len(shape) and all(a is b for a, b in zip(mask.shape, shape, strict=True))
    count = fresh(product(shape), of=mask if whole else None)
    return TensorSpec((count,), (1,), x.dtype, x.device)


@OP.rule("masked_select")
def _lower_masked_select(b: Builder, x: Value, mask: Value) -> Value:
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, x = mask.expand(shape), x.expand(shape)
    if not shape:
        mask, x = mask.reshape((1,)), x.reshape((1,))
    count = None if b.val is None else b.val.shape[0]
    return b.emit(prims.index, x, integer_indices(b, (mask,), count), False)


@OP.rule("masked_scatter")
def _lower_masked_scatter(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    """The k-th true element of the mask, in row-major order, takes source's k-th. The others read a place of their own
    before these: the source may have none."""
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, x = mask.expand(shape), x.expand(shape)
    flat = mask.reshape((mask.numel(),)).to(torch.int64)
    place = b.emit(prims.cumsum, flat, 0) * flat
    values = b.cat([b.full((1,), 0, source.dtype, source.device), source.reshape((source.numel(),))], 0)
    picked = b.emit(prims.index, values, (place,), False)
    return b.where(mask, picked.reshape(shape), x)


@OP.formula("nonzero")
def _nonzero(x: TensorLike, *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    count = fresh(product(x.shape), of=x)
    # The result is filled column by column: its transpose is row-major.
    return TensorSpec((count, x.dim()), (1, count), torch.int64, x.device)


@OP.rule("nonzero")
def _lower_nonzero(b: Builder, x: Value) -> Value:
    return b.emit(prims.nonzero, x)


# --- positions -----------------------------------------------------------------------------------
def _rank_among_true(b: Builder, mask: Value) -> tuple[Value, Value]:
    """(how many true elements come before each, flat int64; their number)."""
    ones = mask.reshape((mask.numel(),)).to(torch.int64)
    return b.emit(prims.cumsum, ones, 0) - ones, ones.sum((0,))


@OP.refuses("nonzero_static")
def _refuse_nonzero_static(x: TensorLike, *, size: Size, fill_value: int = -1) -> None:
    refuse(size < 0, "nonzero_static: 'size' must be an non-negative integer")


@OP.formula("nonzero_static")
def _nonzero_static(x: TensorLike, *, size: Size, fill_value: int = -1) -> TensorSpec:
    return contiguous(x, (size, x.dim()), torch.int64)


@OP.rule("nonzero_static")
def _lower_nonzero_static(b: Builder, x: Value, *, size: Size, fill_value: int = -1) -> Value:
    if x.rank == 0:
        return b.full((size, 0), 0, torch.int64, x.device)
    mask = x if x.dtype is torch.bool else x.ne(0)
    before, count = _rank_among_true(b, mask)
    kept = mask.reshape((mask.numel(),)) & (before < size)
    slots = b.where(kept, before, size)
    flat = b.emit(
        prims.scatter, b.full((size + 1,), 0, torch.int64, x.device), 0, slots, b.iota(x.numel(), x.device)
    ).slice(0, 0, size)
    columns = []
    for length in reversed(x.shape):
        columns.append(flat % length)
        flat = flat // length
    places = b.cat([c.unsqueeze(1) for c in reversed(columns)], 1)
    return b.where((b.iota(size, x.device) < count).unsqueeze(1), places, fill_value)


@OP.formula("masked_scatter_backward")
def _masked_scatter_backward(grad: TensorLike, mask: TensorLike, sizes: Sequence[Size]) -> TensorSpec:
    return contiguous(grad, sizes)


@OP.rule("masked_scatter_backward")
def _lower_masked_scatter_backward(b: Builder, grad: Value, mask: Value, sizes: Sequence[Size]) -> Value:
    total = product(sizes)
    mask = mask.expand(grad.shape)
    before, _ = _rank_among_true(b, mask)
    slots = b.where(mask.reshape((mask.numel(),)), before, total)
    zeros = b.full((total + 1,), 0, grad.dtype, grad.device)
    out = b.emit(prims.scatter, zeros, 0, slots, grad.reshape((grad.numel(),)))
    return out.slice(0, 0, total).reshape(sizes)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("gather", call(reals(5, 4), 0, integers(3, 2, below=5)), call(reals(5, 4), 1, integers(5, 6, below=4)))
OP.samples("scatter.src scatter_add", call(reals(5, 4), 0, listed([0, 1], [3, 2]), reals(2, 2)))
OP.samples("scatter.value", call(reals(5, 4), 1, integers(2, 2, below=4), 2))
OP.samples("scatter.reduce", call(reals(5, 4), 0, integers(2, 2, below=5), reals(2, 2), reduce="add"))
OP.samples("scatter.value_reduce", call(reals(5, 4), 0, integers(2, 2, below=5), 2, reduce="multiply"))
OP.samples(
    "scatter_reduce.two", *(call(reals(5, 4), 0, integers(2, 2, below=5), reals(2, 2), how) for how in ("amax", "mean"))
)
OP.samples("index_add index_copy", call(reals(5, 4), 0, listed(3, 1), reals(2, 4)))
OP.samples("index_reduce", call(reals(5, 4), 0, listed(3, 1), reals(2, 4), "amin"))
OP.samples("index_fill.int_Scalar", call(reals(5, 4), 1, listed(3, 1), 2))
OP.samples("index_fill.int_Tensor", call(reals(5, 4), 1, listed(3, 1), reals()))
OP.samples("index_select", call(reals(5, 4), 1, integers(6, below=4)))
OP.samples("masked_fill.Scalar", call(reals(2, 3), truths(3), 2))
OP.samples("masked_fill.Tensor", call(reals(2, 3), truths(2, 3), reals()))
OP.samples("masked_scatter", call(reals(2, 3), truths(2, 3), reals(6)))
OP.samples("masked_scatter_backward", call(reals(2, 3), truths(2, 3), [6]))
OP.samples("masked_select", call(reals(2, 3), truths(2, 3)))
OP.samples("nonzero_static", call(integers(3, 4, below=2), size=5))
OP.samples("nonzero", call(integers(3, 4, below=2)))
OP.samples("put", call(reals(3, 4), listed(0, 7), reals(2)))
OP.samples("take", call(reals(3, 4), integers(2, 3, below=12)))
OP.samples("repeat_interleave.Tensor", call(integers(4)), call(listed(1, 2, 1), output_size=4))
