"""Gather, scatter, advanced indexing, and sizes that depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Fresh, Table, contiguous, refuse_fresh, strided
from primtorch.layout import (
    Sizes,
    broadcast,
    contiguous_strides,
    dense_like,
    iterator_strides,
    product,
    strides_in_order,
    wrap_dim,
)
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic.sym_node import node_of

TABLE = Table()
DATA_DEPENDENT = frozenset(
    {
        "index.Tensor",
        "_unsafe_index.Tensor",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "repeat_interleave.Tensor",
        "_unique",
        "_ctc_loss.Tensor",
    }
)
"""Operators whose formula takes `fresh`."""


def _like(x: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return strided(x, shape, dense_like(shape, x.stride()))


@TABLE.op("gather")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> TensorSpec:
    wrap_dim(dim, x.dim())
    empty = any(type(size) is int and size == 0 for size in index.shape)
    if x.dim() != index.dim() and x.dim() and index.dim() and not empty:
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    return contiguous(x, index.shape)


@TABLE.op(
    "scatter.src",
    "scatter.value",
    "scatter.reduce",
    "scatter.value_reduce",
    "scatter_add",
    "scatter_reduce.two",
    "index_add",
    "index_copy",
    "index_reduce",
)
def _rewritten(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(x, x.shape)


@TABLE.op("index_fill.int_Scalar", "index_fill.int_Tensor", "index_put", "_unsafe_index_put", "put")
def _updated(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return _like(x)


@TABLE.op("masked_fill.Scalar", "masked_fill.Tensor", "masked_scatter")
def _masked(x: Any, mask: Any, value: Any) -> TensorSpec:
    return contiguous(x, broadcast(tuple(x.shape), tuple(mask.shape)))


@TABLE.op("_embedding_bag_backward")
def _embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: Size,
    *args: Any,
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[1]))


@TABLE.op("_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad: Any, indices: Any, offset2bag: Any, bag_size: Any, maximum_indices: Any, num_weights: Size, *args: Any
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[1]))


@TABLE.op("index_select")
def _index_select(x: Any, dim: int, index: Any) -> TensorSpec:
    shape = list(x.shape)
    at = wrap_dim(dim, x.dim())
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if shape:
        shape[at] = index.shape[0] if index.dim() else 1
    return contiguous(x, shape)


@TABLE.op("take")
def _take(x: Any, index: Any) -> TensorSpec:
    return contiguous(x, index.shape)


@TABLE.op("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any], *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    plain = _expand_masks(x, indices, fresh)
    if len(plain) > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()} (got {len(plain)})")
    plain += [None] * (x.dim() - len(plain))
    used = [d for d, i in enumerate(plain) if i is not None]
    shape, strides = tuple(x.shape), x.stride()
    if not used:
        return _like(x)
    common: Sizes = ()
    for d in used:
        common = broadcast(common, tuple(plain[d].shape))
    # Indices that are not adjacent move to the front.
    adjacent = used == list(range(used[0], used[-1] + 1))
    order = [d for d in range(len(plain)) if plain[d] is None]
    lead = used[0] if adjacent else 0
    before, after = order[:lead], order[lead:]
    out: Sizes = (*(shape[d] for d in before), *common, *(shape[d] for d in after))
    # The kernel iterates over the output with the indexed dims' stride in the source set to 0.
    source = (*(strides[d] for d in before), *(0 for _ in common), *(strides[d] for d in after))
    operands: list[tuple[Sizes, Sizes]] = [(out, source)]
    for d in used:
        own = tuple(plain[d].shape)
        lead_ones = (1,) * (len(common) - len(own))
        index_shape = (*(1 for _ in before), *lead_ones, *own, *(1 for _ in after))
        index_strides = (*(0 for _ in before), *(0 for _ in lead_ones), *plain[d].stride(), *(0 for _ in after))
        operands.append((index_shape, index_strides))
    return strided(x, out, _index_strides(out, tuple(operands)))


def _index_strides(shape: Sizes, operands: tuple[tuple[Sizes, Sizes], ...]) -> Sizes:
    # The order of dims follows from comparing strides, which a data-dependent size has no answer for.
    if any(isinstance(s, torch.SymInt) and node_of(s).hint is None for s in shape):
        return contiguous_strides(shape)
    return iterator_strides(shape, operands)


def _expand_masks(x: Any, indices: Sequence[Any], fresh: Fresh) -> list[Any]:
    """Boolean masks become one index per masked dim, all of one data-dependent length."""
    out: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            out.append(index)
            continue
        for k in range(index.dim()):
            if index.shape[k] != x.shape[len(out) + k]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {k} does not match the shape of the "
                    "indexed tensor "
                    f"{list(x.shape)} at index {len(out) + k}"
                )
        count = fresh(product(index.shape))
        column = TensorSpec((count,), (max(index.dim(), 1),), torch.int64, index.device)
        out.extend([column] * index.dim())
    return out


@TABLE.op("nonzero")
def _nonzero(x: Any, *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    count = fresh(product(x.shape))
    # The result is filled column by column: its transpose is row-major.
    return TensorSpec((count, x.dim()), (1, count), torch.int64, x.device)


@TABLE.op("masked_select")
def _masked_select(x: Any, mask: Any, *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    count = fresh(product(broadcast(tuple(x.shape), tuple(mask.shape))))
    return TensorSpec((count,), (1,), x.dtype, x.device)


@TABLE.op("_unique2")
def _unique(
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    fresh: Fresh = refuse_fresh,
) -> tuple[TensorSpec, ...]:
    count = fresh(product(x.shape))

    def of(shape: tuple[Size, ...], dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(shape, (1,) if len(shape) == 1 else contiguous_strides(shape), dtype, x.device)

    inverse = of(tuple(x.shape), torch.int64) if return_inverse else of((0,), torch.int64)
    return of((count,), x.dtype), inverse, of((count,) if return_counts else (0,), torch.int64)


@TABLE.op("unique_dim")
def _unique_dim(
    x: Any,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    fresh: Fresh = refuse_fresh,
) -> tuple[TensorSpec, ...]:
    at = wrap_dim(dim, x.dim())
    size = x.shape[at]
    count = 0 if type(size) is int and size == 0 else fresh(size, 1 if type(size) is int else 0)
    shape = (*x.shape[:at], count, *x.shape[at + 1 :])
    # The slices lie one after another in memory.
    slices = strides_in_order(shape, [*(d for d in reversed(range(len(shape))) if d != at), at])
    inverse = contiguous(x, (size,), torch.int64)
    return strided(x, shape, slices), inverse, contiguous(x, (count,), torch.int64)


@TABLE.op("unique_dim_consecutive")
def _unique_dim_consecutive(
    x: Any, dim: int, return_inverse: bool = False, return_counts: bool = False, *, fresh: Fresh = refuse_fresh
) -> tuple[TensorSpec, ...]:
    return _unique_dim(x, dim, fresh=fresh)


@TABLE.op("unique_consecutive")
def _unique_consecutive(
    x: Any,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    *,
    fresh: Fresh = refuse_fresh,
) -> tuple[TensorSpec, ...]:
    if dim is not None:
        return _unique_dim(x, dim, fresh=fresh)
    count = fresh(product(x.shape))
    inverse = contiguous(x, tuple(x.shape) if return_inverse else (0,), torch.int64)
    return contiguous(x, (count,)), inverse, contiguous(x, (count,) if return_counts else (0,), torch.int64)


@TABLE.op("bincount")
def _bincount(x: Any, weights: Any = None, minlength: int = 0, *, fresh: Fresh = refuse_fresh) -> TensorSpec:
    kept = torch.float32 if weights is not None and weights.dtype is torch.float32 else torch.float64
    empty = type(x.shape[0]) is int and x.shape[0] == 0
    count = minlength if empty else fresh(None, minlength)
    return contiguous(x, (count,), torch.int64 if weights is None or empty else kept)


@TABLE.op("_unique")
def _unique_flat(
    x: Any, sorted: bool = True, return_inverse: bool = False, *, fresh: Fresh = refuse_fresh
) -> tuple[TensorSpec, ...]:
    return _unique(x, sorted, return_inverse, fresh=fresh)[:2]


@TABLE.op("nonzero_static")
def _nonzero_static(x: Any, *, size: Size, fill_value: int = -1) -> TensorSpec:
    return contiguous(x, (size, x.dim()), torch.int64)


@TABLE.op("_unsafe_masked_index")
def _masked_index(x: Any, mask: Any, indices: Sequence[Any], fill: Any) -> TensorSpec:
    return _index(x, indices)


@TABLE.op("_unsafe_masked_index_put_accumulate")
def _masked_index_put(x: Any, mask: Any, indices: Sequence[Any], values: Any) -> TensorSpec:
    return _like(x)


@TABLE.op("topk")
def _topk(x: Any, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[TensorSpec, TensorSpec]:
    shape = list(x.shape)
    at = wrap_dim(dim, x.dim())
    if shape:
        if k > shape[at]:
            raise RuntimeError("selected index k out of range")
        shape[at] = k
    return contiguous(x, shape), contiguous(x, shape, torch.int64)


@TABLE.op("sort")
def _sort(x: Any, dim: int = -1, descending: bool = False) -> tuple[TensorSpec, TensorSpec]:
    wrap_dim(dim, x.dim())
    shape = tuple(x.shape)
    strides = dense_like(shape, x.stride())
    return strided(x, shape, strides), strided(x, shape, strides, torch.int64)


@TABLE.op("sort.stable")
def _sort_stable(
    x: Any, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    return _sort(x, dim, descending)


@TABLE.op("searchsorted.Tensor")
def _searchsorted(sequence: Any, values: Any, *, out_int32: bool = False, **options: Any) -> TensorSpec:
    return contiguous(values, values.shape, torch.int32 if out_int32 else torch.int64)


@TABLE.op("bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> TensorSpec:
    return contiguous(x, x.shape, torch.int32 if out_int32 else torch.int64)


@TABLE.op("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def _isin(elements: Any, test: Any, *, assume_unique: bool = False, invert: bool = False) -> TensorSpec:
    return contiguous(elements, elements.shape, torch.bool)


@TABLE.op("masked_scatter_backward")
def _masked_scatter_backward(grad: Any, mask: Any, sizes: Sequence[Size]) -> TensorSpec:
    return contiguous(grad, sizes)
