"""Gather, scatter and advanced indexing; sort and search."""

# ruff: noqa: B023 -- the messages of checks are built at once, in the iteration that fails
from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch.arguments import Sizes
from primtorch.layout import broadcast_shapes, contiguous_strides, dense_like, same_shape
from primtorch.prims.record import Prim, require, require_dim, spec_like
from primtorch.promotion import Typed
from primtorch.spec import Size, TensorSpec

aten = torch.ops.aten


def _contiguous(t: TensorSpec, shape: Sequence[Size], dtype: torch.dtype | None = None) -> TensorSpec:
    return spec_like(t, shape, contiguous_strides(tuple(shape)), dtype)


def _preserved(t: TensorSpec) -> TensorSpec:
    return spec_like(t, t.shape, dense_like(t.shape, t.strides))


def indexed_shape(shape: Sequence[Size], indices: Sequence[Typed | None]) -> Sizes:
    """Shape of t[indices] with None for a whole dimension: adjacent index tensors stay in place, else they lead."""
    used = [d for d, index in enumerate(indices) if index is not None]
    if not used:
        return tuple(shape)
    block = broadcast_shapes(*(index.shape for index in indices if index is not None))
    rest = [shape[d] for d in range(len(shape)) if d not in used]
    place = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    return (*rest[:place], *block, *rest[place:])


def _check_indices(name: str, t: TensorSpec, indices: Sequence[TensorSpec | None]) -> None:
    require(len(indices) <= len(t.shape), name, lambda: f"{len(indices)} indices for a tensor of rank {len(t.shape)}")
    for dtype in (index.dtype for index in indices if index is not None):
        require(dtype is torch.int64, name, lambda: f"index dtype {dtype}, not int64")


def _index_meta(t: TensorSpec, indices: Sequence[TensorSpec | None], wrap: bool) -> TensorSpec:
    _check_indices("index", t, indices)
    return _contiguous(t, indexed_shape(t.shape, indices))


def _refuse_negative(indices: Sequence[torch.Tensor | None]) -> None:
    """What eager does for operators that do not count from the end: an error on the host, an assertion on a device."""
    for index in indices:
        if index is None:
            continue
        fits = (index >= 0).all()
        if index.device.type != "cpu":
            torch._assert_async(fits)
        elif not fits:
            raise IndexError(
                f"index {int(index.min())} is out of bounds: negative indices do not count from the end here"
            )


def _index(t: torch.Tensor, indices: Sequence[torch.Tensor | None], wrap: bool) -> torch.Tensor:
    if not wrap:
        _refuse_negative(indices)
    if all(index is None for index in indices):
        return t.clone(memory_format=torch.contiguous_format)
    return torch.ops.aten.index.Tensor(t, list(indices)).contiguous()  # type: ignore[no-any-return]


def _index_put_meta(
    t: TensorSpec, indices: Sequence[TensorSpec | None], values: TensorSpec, accumulate: bool, wrap: bool
) -> TensorSpec:
    _check_indices("index_put", t, indices)
    shape = indexed_shape(t.shape, indices)
    require(values.dtype == t.dtype, "index_put", lambda: f"values have dtype {values.dtype}, the tensor {t.dtype}")
    require(
        same_shape(values.shape, shape),
        "index_put",
        lambda: f"values have shape {tuple(values.shape)}, the indexed part {tuple(shape)}",
    )
    return _preserved(t)


def _index_put(
    t: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool, wrap: bool
) -> torch.Tensor:
    if not wrap:
        _refuse_negative(indices)
    out = torch.empty_like(t).copy_(t)
    return torch.ops.aten.index_put_.default(out, list(indices), values, accumulate)  # type: ignore[no-any-return]


def _check_along(name: str, t: TensorSpec, dim: int, index: TensorSpec) -> None:
    require_dim(name, dim, len(t.shape))
    require(index.dtype is torch.int64, name, lambda: f"index has dtype {index.dtype}, expected int64")
    require(
        len(index.shape) == len(t.shape), name, lambda: f"index has rank {len(index.shape)}, the tensor {len(t.shape)}"
    )


def _gather_meta(t: TensorSpec, dim: int, index: TensorSpec) -> TensorSpec:
    _check_along("gather", t, dim, index)
    return _contiguous(t, index.shape)


def _scatter_meta(
    t: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, *rest: object, **options: object
) -> TensorSpec:
    _check_along("scatter", t, dim, index)
    require(src.dtype == t.dtype, "scatter", lambda: f"src has dtype {src.dtype}, the tensor {t.dtype}")
    return _contiguous(t, t.shape)


index = Prim(
    "index(t: Tensor, indices: tuple[Tensor | None, ...], wrap: bool) -> Tensor",
    "indexing",
    "Advanced indexing: int64 indices broadcast together, None takes a whole dimension. Adjacent indices leave their "
    "broadcast shape in place, separated ones put it first. With `wrap` an index in [-size, 0) counts from the end; "
    "any other index outside of [0, size) is an error.",
    _index_meta,
    _index,
    frozenset({"indexing"}),
)
index_put = Prim(
    "index_put(t: Tensor, indices: tuple[Tensor | None, ...], values: Tensor, accumulate: bool, wrap: bool) -> Tensor",
    "indexing",
    "t with the elements that index(t, indices, wrap) reads replaced by `values` (of that shape), or added to "
    "when `accumulate`. With equal indices and no accumulation, any one of the values is taken.",
    _index_put_meta,
    _index_put,
    frozenset({"indexing"}),
)
gather = Prim(
    "gather(t: Tensor, dim: int, index: Tensor) -> Tensor",
    "indexing",
    "out[i][j][k] = t[i][index[i][j][k]][k] for dim = 1; index sizes may be smaller than t's in other dims. "
    "Indices are in [0, size).",
    _gather_meta,
    torch.gather,
    frozenset({"indexing"}),
)
scatter = Prim(
    "scatter(t: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor",
    "indexing",
    "t with out[i][index[i][j][k]][k] = src[i][j][k] for dim = 1. With equal indices any one value is taken.",
    _scatter_meta,
    lambda t, dim, index, src: torch.scatter(t, dim, index, src).contiguous(),
    frozenset({"indexing"}),
)
scatter_add = Prim(
    "scatter_add(t: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor",
    "indexing",
    "t with out[i][index[i][j][k]][k] += src[i][j][k] for dim = 1.",
    _scatter_meta,
    lambda t, dim, index, src: torch.scatter_add(t, dim, index, src).contiguous(),
    frozenset({"indexing"}),
)
scatter_reduce = Prim(
    "scatter_reduce(t: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool) -> Tensor",
    "indexing",
    "As scatter_add with `reduce` one of prod, mean, amax, amin; without `include_self` the elements of t "
    "that receive a value do not count.",
    _scatter_meta,
    lambda t, dim, index, src, reduce, *, include_self: torch.scatter_reduce(
        t, dim, index, src, reduce, include_self=include_self
    ).contiguous(),
    frozenset({"indexing"}),
    aten.scatter_reduce.two,
)


# --- sort and search -----------------------------------------------------------------------------
def _sort_meta(t: TensorSpec, dim: int, descending: bool, stable: bool) -> tuple[TensorSpec, TensorSpec]:
    require_dim("sort", dim, len(t.shape))
    return _preserved(t), spec_like(t, t.shape, dense_like(t.shape, t.strides), torch.int64)


def _topk_meta(t: TensorSpec, k: Size, dim: int, largest: bool, sorted: bool) -> tuple[TensorSpec, TensorSpec]:
    require_dim("topk", dim, len(t.shape))
    shape = list(t.shape)
    if shape:
        shape[dim] = k
    return _contiguous(t, shape), _contiguous(t, shape, torch.int64)


def _searchsorted_meta(sequence: TensorSpec, values: TensorSpec, right: bool) -> TensorSpec:
    require(sequence.dtype == values.dtype, "searchsorted", lambda: f"dtypes {sequence.dtype} and {values.dtype}")
    return _contiguous(values, values.shape, torch.int64)


sort = Prim(
    "sort(t: Tensor, dim: int, descending: bool, stable: bool) -> (Tensor, Tensor)",
    "sort",
    "Values in order along dim and their int64 positions; NaN counts as the largest.",
    _sort_meta,
    lambda t, dim, descending, stable: torch.sort(t, dim=dim, descending=descending, stable=stable),
)
topk = Prim(
    "topk(t: Tensor, k: Size, dim: int, largest: bool, sorted: bool) -> (Tensor, Tensor)",
    "sort",
    "The k largest or smallest values along dim and their int64 positions.",
    _topk_meta,
    torch.topk,
    frozenset(),
    aten.topk.default,
)
searchsorted = Prim(
    "searchsorted(sequence: Tensor, values: Tensor, right: bool) -> Tensor",
    "sort",
    "For each value the int64 position at which it would be put into the ascending last dimension of `sequence` "
    "(1-d, or with the leading shape of `values`): before equal elements, or after them when `right`.",
    _searchsorted_meta,
    lambda sequence, values, right: torch.searchsorted(sequence, values, right=right),
)
