"""Indexing, gathering and scattering; embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_sizes
from primtorch.decompose.reductions import vector_norm
from primtorch.decompose.table import RuleTable
from primtorch.layout import broadcast_shapes
from primtorch.prims.indexing import indexed_shape
from primtorch.promotion import compute_dtype, result_type
from primtorch.spec import TensorSpec

aten = torch.ops.aten
RULES = RuleTable()


def _integer_indices(
    b: Builder, x: Value, indices: Sequence[Value | None], count: Any = None
) -> tuple[Value | None, ...]:
    """int64 indices; a mask becomes the positions of its true elements, whose number only the data knows: `count`
    where the graph has a symbol for it."""
    out: list[Value | None] = []
    for index in indices:
        if index is None or index.dtype is torch.int64:
            out.append(index)
        elif index.dtype in (torch.bool, torch.uint8):
            saved, b.val = b.val, None
            if count is not None:
                b.val = TensorSpec((count, index.rank), (1, count), torch.int64, index.device)
            positions = b.emit(prims.nonzero, index)
            b.val = saved
            out.extend(positions.select(1, d) for d in range(index.rank))
        else:
            out.append(index.to(torch.int64))
    return tuple(out)


@RULES(aten.index.Tensor, "aten::_unsafe_index.Tensor")
def _index(b: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    return b.emit(prims.index, x, _integer_indices(b, x, indices, _selected(b, indices)), True)  # type: ignore[no-any-return]


def _selected(b: Builder, indices: Sequence[Value | None]) -> Any:
    """The size that the result has where one mask alone selects."""
    tensors = [i for i in indices if i is not None]
    if len(tensors) != 1 or tensors[0].dtype is torch.int64 or b.val is None:
        return None
    return b.val.shape[list(indices).index(tensors[0])]


@RULES(aten.index_put.default, "aten::_unsafe_index_put.default")
def _index_put(
    b: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False, unsafe: bool = False
) -> Value:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype in (torch.bool, torch.uint8):
        return _masked_put(b, x, list(indices).index(given[0]), given[0], values, accumulate)
    whole = _integer_indices(b, x, indices)
    shape = indexed_shape(x.shape, whole)
    surplus = values.rank - len(shape)
    if surplus > 0:  # eager lets leading dimensions of size 1 go
        values = values.reshape(values.shape[surplus:])
    return b.emit(prims.index_put, x, whole, values.expand(shape), accumulate, True)  # type: ignore[no-any-return]


def _masked_put(b: Builder, x: Value, lead: int, mask: Value, values: Value, accumulate: bool) -> Value:
    """x with `values` where the mask is true, over its dims from `lead` on: no size depends on how many those are.

    The k-th true element, in row-major order, takes the k-th of the values, or the only one. That there are as many is
    checked when the program runs.
    """
    if mask.dtype is not torch.bool:
        mask = mask.ne(0)
    before, behind = x.shape[:lead], x.shape[lead + mask.rank :]
    surplus = values.rank - (lead + 1 + len(behind))
    if surplus > 0:  # eager lets leading dimensions of size 1 go
        values = values.reshape(values.shape[surplus:])
    at = values.rank - len(behind) - 1  # where the values are counted
    count = values.shape[at] if at >= 0 else 1
    if isinstance(count, int) and count == 1:
        picked = values.squeeze(at) if at >= 0 else values
        picked = picked.reshape((*picked.shape[:at], *(1,) * mask.rank, *picked.shape[at:])) if at > 0 else picked
    else:
        picked = _counted(b, values.expand((*before, count, *behind)), lead, mask)
    whole = mask.reshape((*(1,) * lead, *mask.shape, *(1,) * len(behind)))
    if accumulate:
        picked = x | picked if x.dtype is torch.bool else x + picked
    return b.where(whole, picked, x)


def _counted(b: Builder, values: Value, lead: int, mask: Value) -> Value:
    """At the k-th true element of the mask the k-th value along dim `lead`; any value elsewhere."""
    count = values.shape[lead]
    flat = mask.reshape((mask.numel(),)).to(torch.int64)
    found = flat.sum((0,))
    fits = found.eq(count)
    if not isinstance(count, int):
        fits = fits | b.full((), count, torch.int64, mask.device).eq(1)
    shown = ", ".join(map(str, values.shape))
    message = f"shape mismatch: value tensor of shape [{shown}] cannot be broadcast to what the mask selects"
    b.emit(prims.assert_async, fits, message)
    if not isinstance(count, int) or count == 0:  # an element to read where there is none
        values = b.emit(prims.pad, values, (0,) * values.rank, _unit(values.rank, lead), 0)
    place = (b.emit(prims.cumsum, flat, 0) - 1).maximum(0).minimum(count - 1 if count != 0 else 0)
    if not isinstance(count, int):
        place = place.maximum(0)
    picked = b.emit(prims.index, values, (*(None,) * lead, place), False)
    return picked.reshape((*values.shape[:lead], *mask.shape, *values.shape[lead + 1 :]))  # type: ignore[no-any-return]


def _unit(rank: int, dim: int) -> tuple[int, ...]:
    return tuple(int(d == dim) for d in range(rank))


def _along(x: Value, dim: int, index: Value) -> tuple[Value | None, ...]:
    return (*(None,) * dim, index.to(torch.int64).reshape((index.numel(),)))


@RULES(aten.index_select.default)
def _index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    if x.rank == 0:
        return x
    return b.emit(prims.index, x, _along(x, x.dim(dim), index), False)  # type: ignore[no-any-return]


def _expanded_values(x: Value, dim: int, index: Value, source: Value) -> Value:
    shape = [index.numel() if d == dim else s for d, s in enumerate(x.shape)]
    return source.expand(shape)


@RULES(aten.index_add.default)
def _index_add(b: Builder, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        source = b.binary(prims.mul, source.compute(), alpha).to(source.dtype)
    if x.rank == 0:
        return x + source.reshape(())
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(x, dim, index), _expanded_values(x, dim, index, source), True, False)  # type: ignore[no-any-return]


@RULES(aten.index_copy.default)
def _index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    if x.rank == 0:
        return source.reshape(())
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(x, dim, index), _expanded_values(x, dim, index, source), False, False)  # type: ignore[no-any-return]


@RULES(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(b: Builder, x: Value, dim: int, index: Value, value: Any) -> Value:
    value = value.to(x.dtype) if isinstance(value, Value) else b.full((), value, x.dtype, x.device)
    if x.rank == 0:
        return value  # type: ignore[no-any-return]
    dim = x.dim(dim)
    return b.emit(prims.index_put, x, _along(x, dim, index), _expanded_values(x, dim, index, value), False, True)  # type: ignore[no-any-return]


def _is_empty(index: Value) -> bool:
    """Whether there is nothing to follow; the rank of such an index is anything."""
    return any(type(size) is int and size == 0 for size in index.shape)


def _full_rank(x: Value, index: Value) -> Value:
    return index.to(torch.int64).reshape((1,) * x.rank) if index.rank != x.rank else index.to(torch.int64)


def _for_each(b: Builder, x: Value, index: Value, value: Any) -> Value:
    """A number as the `src` of a scatter."""
    shape = index.shape if index.rank == x.rank or _is_empty(index) else (1,) * max(x.rank, 1)
    return b.full((), value, x.dtype, x.device).expand(shape)  # type: ignore[no-any-return]


@RULES(aten.gather.default)
def _gather(b: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if x.rank == 0:
        return x.expand(index.shape)
    if index.rank == 0:  # of a 1-d tensor
        return b.emit(prims.gather, x, x.dim(dim), index.to(torch.int64).reshape((1,))).reshape(())  # type: ignore[no-any-return]
    if index.rank != x.rank and _is_empty(index):
        return b.full(index.shape, 0, x.dtype, x.device)
    return b.emit(prims.gather, x, x.dim(dim), index.to(torch.int64))  # type: ignore[no-any-return]


def _scattering(
    b: Builder, prim: Any, x: Value, dim: int, index: Value, src: Value, *rest: Any, **options: Any
) -> Value:
    """Scatter prims take equal ranks and a src of the index's shape; a 0-d tensor is one of a single element."""
    if index.rank != x.rank and _is_empty(index):
        return x
    shape = x.shape
    if x.rank == 0:
        x = x.reshape((1,))
    index, src = _full_rank(x, index), src.reshape((1,) * x.rank) if src.rank != x.rank else src
    if not same_sizes(index.shape, src.shape):
        for d, size in enumerate(index.shape):
            src = src.slice(d, 0, size)
    out = b.emit(prim, x, x.dim(dim), index, src.to(x.dtype), *rest, **options)
    return out.reshape(shape)  # type: ignore[no-any-return]


@RULES(aten.scatter.src)
def _scatter(b: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scattering(b, prims.scatter, x, dim, index, src)


@RULES(aten.scatter.value)
def _scatter_value(b: Builder, x: Value, dim: int, index: Value, value: Any) -> Value:
    src = _for_each(b, x, index, value)
    return _scattering(b, prims.scatter, x, dim, index, src)


@RULES(aten.scatter.reduce)
def _scatter_with_reduce(b: Builder, x: Value, dim: int, index: Value, src: Value, *, reduce: str) -> Value:
    return _scatter_by(b, x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@RULES(aten.scatter.value_reduce)
def _scatter_value_with_reduce(b: Builder, x: Value, dim: int, index: Value, value: Any, *, reduce: str) -> Value:
    src = _for_each(b, x, index, value)
    return _scatter_by(b, x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@RULES(aten.scatter_add.default)
def _scatter_add(b: Builder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scattering(b, prims.scatter_add, x, dim, index, src)


def _scatter_by(
    b: Builder, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if reduce == "sum" and include_self:
        return _scattering(b, prims.scatter_add, x, dim, index, src)
    return _scattering(b, prims.scatter_reduce, x, dim, index, src, reduce, include_self=include_self)


RULES.add(aten.scatter_reduce.two, _scatter_by)


@RULES(aten.index_reduce.default)
def _index_reduce(
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
        return out.reshape(())  # type: ignore[no-any-return]
    dim = x.dim(dim)
    source = source.to(x.dtype)
    places = index.to(torch.int64).reshape([index.numel() if d == dim else 1 for d in range(x.rank)])
    return b.emit(  # type: ignore[no-any-return]
        prims.scatter_reduce,
        x,
        dim,
        places.expand(source.shape),
        source,
        reduce,  # type: ignore[no-any-return]
        include_self=include_self,
    )


@RULES(aten._unsafe_masked_index.default)
def _unsafe_masked_index(b: Builder, x: Value, mask: Value, indices: Sequence[Value | None], fill: Any) -> Value:
    """x at the indices, clamped into range, where the mask is true; `fill` elsewhere."""
    out = b.emit(prims.index, x, _clamped(x, indices), True)
    return b.where(mask, out, fill)


@RULES(aten._unsafe_masked_index_put_accumulate.default)
def _unsafe_masked_index_put(
    b: Builder, x: Value, mask: Value, indices: Sequence[Value | None], values: Value
) -> Value:
    places = _clamped(x, indices)
    kept = b.where(mask, values, 0).expand(indexed_shape(x.shape, places))
    return b.emit(prims.index_put, x, places, kept, True, True)  # type: ignore[no-any-return]


def _clamped(x: Value, indices: Sequence[Value | None]) -> tuple[Value | None, ...]:
    return tuple(
        None if i is None else i.to(torch.int64).maximum(-x.shape[d]).minimum(x.shape[d] - 1)
        for d, i in enumerate(indices)
    )


@RULES(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def _isin(b: Builder, elements: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False) -> Value:
    device = (elements if isinstance(elements, Value) else tests).device
    dtype = result_type((elements, tests))
    elements, tests = (v.to(dtype) if isinstance(v, Value) else b.full((), v, dtype, device) for v in (elements, tests))
    hits = elements.unsqueeze(elements.rank).eq(tests.reshape((tests.numel(),)))
    found = hits.reduce(prims.any, (elements.rank,))
    return ~found if invert else found  # type: ignore[no-any-return]


@RULES(aten.repeat_interleave.Tensor)
def _repeat_interleave(b: Builder, repeats: Value, *, output_size: Any = None) -> Value:
    """Each position i repeats[i] times."""
    whole = b.val
    if output_size is None and whole is not None and type(whole.shape[0]) is int:
        output_size = whole.shape[0]
    if output_size is None:
        if whole is not None:
            b.val = whole.shape[0]  # the number is the one that the result's size stands for
        output_size = b.emit(prims.local_scalar, repeats.to(torch.int64).sum((0,)))
        b.val = whole
    if isinstance(repeats.shape[0], int) and repeats.shape[0] == 0:
        return b.full((0,), 0, repeats.dtype, repeats.device)
    ends = b.emit(prims.cumsum, repeats.to(torch.int64), 0)
    found = b.emit(prims.searchsorted, ends, b.iota(output_size, repeats.device), True)
    return found.to(repeats.dtype)  # type: ignore[no-any-return]


@RULES(aten.take.default)
def _take(b: Builder, x: Value, index: Value) -> Value:
    return b.emit(prims.index, x.reshape((x.numel(),)), (index.to(torch.int64),), True)  # type: ignore[no-any-return]


@RULES(aten.put.default)
def _put(b: Builder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    flat = x.reshape((x.numel(),))
    out = b.emit(prims.index_put, flat, (index.to(torch.int64),), source.reshape(index.shape), accumulate, True)
    return out.reshape(x.shape)  # type: ignore[no-any-return]


@RULES(aten.masked_select.default)
def _masked_select(b: Builder, x: Value, mask: Value) -> Value:
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, x = mask.expand(shape), x.expand(shape)
    if not shape:
        mask, x = mask.reshape((1,)), x.reshape((1,))
    count = None if b.val is None else b.val.shape[0]
    return b.emit(prims.index, x, _integer_indices(b, x, (mask,), count), False)  # type: ignore[no-any-return]


@RULES(aten.masked_scatter.default)
def _masked_scatter(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    """The k-th true element of the mask, in row-major order, takes source's k-th."""
    shape = broadcast_shapes(x.shape, mask.shape)
    mask, x = mask.expand(shape), x.expand(shape)
    flat = mask.reshape((mask.numel(),)).to(torch.int64)
    place = (b.emit(prims.cumsum, flat, 0) - 1).maximum(0)
    picked = b.emit(prims.index, source.reshape((source.numel(),)), (place,), False)
    return b.where(mask, picked.reshape(shape), x)


@RULES(aten.nonzero.default)
def _nonzero(b: Builder, x: Value) -> Value:
    return b.emit(prims.nonzero, x)  # type: ignore[no-any-return]


# --- embeddings ----------------------------------------------------------------------------------
@RULES(aten.embedding.default)
def _embedding(
    b: Builder,
    weight: Value,
    indices: Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return b.emit(prims.index, weight, (indices.to(torch.int64),), False)  # type: ignore[no-any-return]


@RULES(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    b: Builder, grad: Value, indices: Value, num_weights: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> Value:
    """Sum the gradient's rows into the rows that they were read from; reduced precision is summed in float32."""
    indices = indices.to(torch.int64)
    g = grad.to(compute_dtype(grad.dtype))
    if scale_grad_by_freq:
        ones = b.full(indices.shape, 1, torch.int64, grad.device)
        counts = b.emit(
            prims.index_put, b.full((num_weights,), 0, torch.int64, grad.device), (indices,), ones, True, False
        )
        g = g / b.emit(prims.index, counts, (indices,), False).to(g.dtype).unsqueeze(indices.rank)
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        g = b.where(indices.eq(padding_idx).unsqueeze(indices.rank), 0.0, g)
    table = b.full((num_weights, grad.shape[-1]), 0, g.dtype, grad.device)
    return b.emit(prims.index_put, table, (indices,), g, True, False).to(grad.dtype)  # type: ignore[no-any-return]


@RULES("aten::embedding_renorm.default")
def _embedding_renorm(b: Builder, weight: Value, indices: Value, max_norm: float, norm_type: float) -> Value:
    """The rows that are read, scaled down to `max_norm` where they are longer."""
    rows = b.full((weight.shape[0],), False, torch.bool, weight.device)
    flat = indices.to(torch.int64).reshape((indices.numel(),))
    marks = b.full((indices.numel(),), True, torch.bool, weight.device)
    read = b.emit(prims.index_put, rows, (flat,), marks, False, False)
    wide = weight.compute()
    norms = vector_norm(b, wide, float(norm_type), (1,), True)
    scaled = (wide * (float(max_norm) / (norms + 1e-7))).to(weight.dtype)
    return b.where(read.unsqueeze(1) & (norms > float(max_norm)), scaled, weight)
