"""Order and counts: sorting, searching, medians, distinct elements, histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import TENSORS, Number, TensorLike
from primtorch.builder import Builder, Operand, Value, same_size
from primtorch.families import Family, Rule, Trait
from primtorch.layout import contiguous_strides, dense_like, product, same_shape, strides_in_order, wrap_dim
from primtorch.operators.build import Fresh, contiguous, refuse_fresh, strided
from primtorch.operators.creation import lower_linspace
from primtorch.operators.elementwise import same
from primtorch.operators.reduction import full_formula, is_known, max_dim, refuse_element_along, want_some
from primtorch.operators.refusals import refuse, refuse_other_shape
from primtorch.samples import call, integers, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("sort")
OP.trait(Trait.OVERLAPS, "histc")
OP.trait(Trait.SHARES_NOTHING, "kthvalue")


# --- order ---------------------------------------------------------------------------------------
@OP.formula("sort")
def _sort(x: TensorLike, dim: int = -1, descending: bool = False) -> tuple[TensorSpec, TensorSpec]:
    wrap_dim(dim, x.dim())
    shape = tuple(x.shape)
    strides = dense_like(shape, x.stride())
    return strided(x, shape, strides), strided(x, shape, strides, torch.int64)


@OP.formula("sort.stable")
def _sort_stable(
    x: TensorLike, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    return _sort(x, dim, descending)


def _sorted(b: Builder, x: Value, dim: int, descending: bool, *, stable: bool) -> Sequence[Value]:
    if not x.rank:
        return x, b.full((), 0, torch.int64, x.device)
    return b.emit_several(prims.sort, x, x.dim(dim), descending, stable)


@OP.rule("sort")
def _lower_sort(b: Builder, x: Value, dim: int = -1, descending: bool = False) -> Sequence[Value]:
    return _sorted(b, x, dim, descending, stable=False)


@OP.rule("sort.stable")
def _lower_sort_stable(
    b: Builder, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Sequence[Value]:
    return _sorted(b, x, dim, descending, stable=bool(stable))


@OP.formula("topk")
def _topk(
    x: TensorLike, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorSpec, TensorSpec]:
    shape = list(x.shape)
    at = wrap_dim(dim, x.dim())
    if shape:
        if k > shape[at]:
            raise RuntimeError("selected index k out of range")
        shape[at] = k
    return contiguous(x, shape), contiguous(x, shape, torch.int64)


@OP.rule("topk")
def _lower_topk(
    b: Builder, x: Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Sequence[Value]:
    return b.emit_several(prims.topk, x, k, x.dim(dim), largest, sorted)


def _at_rank(b: Builder, x: Value, place: Size, dim: int, keepdim: bool) -> tuple[Value, Value]:
    values, indices = b.emit_several(prims.sort, x, dim, False, True)
    picked = [v.slice(dim, place, place + 1) for v in (values, indices)]
    first, second = picked if keepdim else [v.squeeze(dim) for v in picked]
    return first, second


@OP.formula("kthvalue")
def _kthvalue(x: TensorLike, k: Size, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return max_dim(x, dim, keepdim)


@OP.refuses("kthvalue")
def _refuse_kthvalue(x: TensorLike, k: Size, dim: int = -1, keepdim: bool = False) -> None:
    size = x.shape[wrap_dim(dim, x.dim())] if x.dim() else 1
    refuse(k < 1 or k > size, lambda: f"kthvalue(): selected number k out of range for dimension {dim}")


@OP.rule("kthvalue")
def _lower_kthvalue(b: Builder, x: Value, k: Size, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _at_rank(b, x, k - 1, x.dim(dim), keepdim)


def _medians(b: Builder, x: Value, dim: int, keepdim: bool, *, ignore_nan: bool) -> tuple[Value, Value]:
    """The lower of the two middle elements; NaN sorts last, so it decides only when it may."""
    want_some(b, x, (dim,))
    size = x.shape[dim]
    values, indices = b.emit_several(prims.sort, x, dim, False, True)
    nan = x.map(prims.isnan).to(torch.int64).sum((dim,), True) if x.dtype.is_floating_point else None
    if nan is None:
        place = b.full([1 if d == dim else s for d, s in enumerate(x.shape)], (size - 1) // 2, torch.int64, x.device)
    elif ignore_nan:
        place = ((size - nan - 1) // 2).maximum(0)
    else:
        place = b.where(nan > 0, size - nan, (size - 1) // 2 + nan * 0)
    picked = [b.emit(prims.gather, v, dim, place) for v in (values, indices)]
    first, second = picked if keepdim else [v.squeeze(dim) for v in picked]
    return first, second


@OP.formula("median.dim", "nanmedian.dim")
def _median(x: TensorLike, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return max_dim(x, dim, keepdim)


OP.refuses("median.dim", "nanmedian.dim", "mode")(refuse_element_along)


@OP.rule("median.dim")
def _lower_median(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _medians(b, x, x.dim(dim), keepdim, ignore_nan=False)


@OP.rule("nanmedian.dim")
def _lower_nanmedian(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _medians(b, x, x.dim(dim), keepdim, ignore_nan=True)


def _median_of_all(*, ignore_nan: bool) -> Rule:
    def rule(b: Builder, x: Value) -> Value:
        """That of nothing is NaN, or the least integer."""
        nothing = math.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        flat, size = x.reshape((x.numel(),)), x.numel()
        if not is_known(size):
            # One element more, which is read, where there is no other, and is else cut off.
            more = b.cat([flat, b.full((1,), nothing, x.dtype, x.device)], 0)
            flat = b.emit(prims.slice, more, 0, 0, torch.sym_max(size, 1), 1)
        elif same_size(size, 0):
            return b.full((), nothing, x.dtype, x.device)
        return _medians(b, flat, 0, False, ignore_nan=ignore_nan)[0]

    return rule


OP.formula("median nanmedian")(full_formula(same))
OP.rule("median")(_median_of_all(ignore_nan=False))
OP.rule("nanmedian")(_median_of_all(ignore_nan=True))


@OP.formula("searchsorted.Tensor")
def _searchsorted(
    sequence: TensorLike, values: TensorLike, *, out_int32: bool = False, **options: object
) -> TensorSpec:
    return contiguous(values, values.shape, torch.int32 if out_int32 else torch.int64)


@OP.refuses("searchsorted.Tensor")
def _refuse_searchsorted(
    sequence: TensorLike, values: TensorLike, *, sorter: TensorLike | None = None, **options: object
) -> None:
    _refuse_sequence(sequence, sorter)
    ranks = f"but got dim({sequence.dim()}) and dim({values.dim()})"
    refuse(not values.dim() and sequence.dim() != 1, f"a scalar is searched for in boundaries of dimension 1, {ranks}")
    refuse(
        sequence.dim() != 1 and not same_shape(sequence.shape[:-1], values.shape[:-1]),
        f"boundaries tensor should be 1 dimension or the first N-1 dimensions must match, {ranks}",
    )


@OP.refuses("searchsorted.Scalar")
def _refuse_searchsorted_number(
    sequence: TensorLike, value: Number, *, sorter: TensorLike | None = None, **options: object
) -> None:
    _refuse_sequence(sequence, sorter)
    refuse(sequence.dim() != 1, "a scalar is searched for in boundaries of dimension 1")


def _refuse_sequence(sequence: TensorLike, sorter: TensorLike | None) -> None:
    refuse(sequence.dim() == 0, "boundaries tensor should have positive dimension, but got 0 dimension")
    refuse_other_shape("sorter", sorter, sequence.shape)


@OP.rule("searchsorted.Tensor", "searchsorted.Scalar")
def _lower_searchsorted(
    b: Builder,
    sequence: Value,
    values: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        sequence = b.emit(prims.gather, sequence, sequence.rank - 1, sorter)
    if not isinstance(values, Value):
        values = b.full((), values, sequence.dtype, sequence.device)
    found = b.emit(prims.searchsorted, sequence, values.to(sequence.dtype), right or side == "right")
    return found.to(torch.int32) if out_int32 else found


@OP.formula("bucketize.Tensor")
def _bucketize(x: TensorLike, boundaries: TensorLike, *, out_int32: bool = False, right: bool = False) -> TensorSpec:
    return contiguous(x, x.shape, torch.int32 if out_int32 else torch.int64)


@OP.refuses("bucketize.Tensor")
def _refuse_bucketize(x: TensorLike, boundaries: TensorLike, **options: object) -> None:
    refuse(boundaries.dim() != 1, lambda: f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


@OP.rule("bucketize.Tensor", "bucketize.Scalar")
def _lower_bucketize(
    b: Builder, values: Operand, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    return _lower_searchsorted(b, boundaries, values, out_int32=out_int32, right=right)


# --- histograms ----------------------------------------------------------------------------------
def _counted(b: Builder, x: Value, edges: Value, weight: Value | None, density: bool) -> tuple[Value, Value]:
    """Counts in [e_i, e_i+1), the last interval closed."""
    flat = x.reshape((x.numel(),))
    bins = edges.shape[0] - 1
    inside = (flat >= edges.select(0, 0)) & (flat <= edges.select(0, bins))
    place = (b.emit(prims.searchsorted, edges, flat, True) - 1).maximum(0).minimum(bins - 1)
    ones = b.full_like(flat, 1) if weight is None else weight.reshape((x.numel(),))
    counts = b.emit(prims.scatter_add, b.full((bins,), 0, x.dtype, x.device), 0, place, b.where(inside, ones, 0))
    if density:
        widths = edges.slice(0, 1, bins + 1) - edges.slice(0, 0, bins)
        counts = counts / (counts.sum((0,)) * widths)
    return counts, edges


@OP.formula("histogram.bin_ct")
def _histogram(x: TensorLike, bins: Size = 100, **options: object) -> tuple[TensorSpec, TensorSpec]:
    return contiguous(x, (bins,)), contiguous(x, (bins + 1,))


@OP.formula("histogram.bins_tensor")
def _histogram_edges(x: TensorLike, bins: TensorLike, **options: object) -> tuple[TensorSpec, TensorSpec]:
    return contiguous(x, (bins.shape[0] - 1,)), contiguous(x, bins.shape)


@OP.refuses("histogram.bin_ct")
def _refuse_histogram(x: TensorLike, bins: Size = 100, *, weight: TensorLike | None = None, **options: object) -> None:
    refuse(bins <= 0, lambda: f"torch.histogram(): bins must be > 0, but got {bins}")
    refuse_other_shape("weight", weight, x.shape)


def _refuse_edges(edges: TensorLike) -> None:
    refuse(edges.dim() != 1, "bins tensor should have one dimension")
    refuse(edges.shape[0] < 2, "torch.histogram(): bins must be > 0")


@OP.refuses("histogram.bins_tensor")
def _refuse_histogram_edges(
    x: TensorLike, bins: TensorLike, *, weight: TensorLike | None = None, **options: object
) -> None:
    _refuse_edges(bins)
    refuse_other_shape("weight", weight, x.shape)


@OP.rule("histogram.bins_tensor")
def _lower_histogram_by_edges(
    b: Builder, x: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    return _counted(b, x, bins, weight, density)


@OP.rule("histogram.bin_ct")
def _lower_histogram_by_count(
    b: Builder,
    x: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    if range is not None:
        low, high = (b.full((), float(v), x.dtype, x.device) for v in range)
    elif any(isinstance(size, int) and size == 0 for size in x.shape):
        low, high = b.full((), 0.0, x.dtype, x.device), b.full((), 1.0, x.dtype, x.device)
    else:
        flat = x.reshape((x.numel(),))
        low, high = flat.reduce(prims.amin, (0,)), flat.reduce(prims.amax, (0,))
    point = low.eq(high)
    low, high = b.where(point, low - 0.5, low), b.where(point, high + 0.5, high)
    edges = lower_linspace(b, low, high, bins + 1, dtype=x.dtype, device=x.device)
    return _counted(b, x, edges, weight, density)


@OP.formula("_unique2")
def _unique(
    x: TensorLike,
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


@OP.formula("_unique")
def _unique_flat(
    x: TensorLike, sorted: bool = True, return_inverse: bool = False, *, fresh: Fresh = refuse_fresh
) -> tuple[TensorSpec, ...]:
    return _unique(x, sorted, return_inverse, fresh=fresh)[:2]


@OP.rule("_unique?")
def _lower_unique(b: Builder, x: Value, sorted: bool = True, return_inverse: bool = False) -> tuple[Value, Value]:
    if b.val is not None:
        b.val = (*b.val, b.contiguous_spec((0,), torch.int64, x.device))
    values, inverse, _ = b.emit_several(prims.unique2, x, sorted, return_inverse, False)
    return values, inverse


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("unique_dim")
def _unique_dim(
    x: TensorLike,
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


@OP.formula("unique_dim_consecutive")
def _unique_dim_consecutive(
    x: TensorLike, dim: int, return_inverse: bool = False, return_counts: bool = False, *, fresh: Fresh = refuse_fresh
) -> tuple[TensorSpec, ...]:
    return _unique_dim(x, dim, fresh=fresh)


@OP.formula("unique_consecutive")
def _unique_consecutive(
    x: TensorLike,
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


@OP.refuses("bincount")
def _refuse_bincount(x: TensorLike, weights: TensorLike | None = None, minlength: int = 0, **options: object) -> None:
    refuse(x.dim() != 1, "bincount only supports 1-d non-negative integral inputs.")
    refuse(minlength < 0, "minlength should be >= 0")
    refuse_other_shape("weights", weights, x.shape)


@OP.formula("bincount")
def _bincount(
    x: TensorLike, weights: TensorLike | None = None, minlength: int = 0, *, fresh: Fresh = refuse_fresh
) -> TensorSpec:
    kept = torch.float32 if weights is not None and weights.dtype is torch.float32 else torch.float64
    empty = type(x.shape[0]) is int and x.shape[0] == 0
    count = minlength if empty else fresh(None, minlength)
    return contiguous(x, (count,), torch.int64 if weights is None or empty else kept)


@OP.refuses("_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors")
def _refuse_histogramdd(
    x: TensorLike, bins: Sequence[Size | TensorLike], *, weight: TensorLike | None = None, **options: object
) -> None:
    refuse(x.dim() < 2, "torch.histogramdd: input tensor should have at least 2 dimensions")
    refuse(
        len(bins) != x.shape[-1], "histogramdd: The size of bins must be equal to the innermost dimension of the input."
    )
    for edges in bins:
        if isinstance(edges, TENSORS):
            _refuse_edges(edges)
        else:
            refuse(edges <= 0, "torch.histogramdd: bins must be > 0")
    refuse_other_shape("weight", weight, x.shape[:-1])


@OP.formula("_histogramdd_bin_edges")
def _histogramdd_bin_edges(x: TensorLike, bins: Sequence[Size], **options: object) -> list[TensorSpec]:
    return [contiguous(x, (count + 1,)) for count in bins]


@OP.formula("_histogramdd_from_bin_cts")
def _histogramdd(x: TensorLike, bins: Sequence[Size], **options: object) -> TensorSpec:
    return contiguous(x, bins)


@OP.formula("_histogramdd_from_bin_tensors")
def _histogramdd_edges(x: TensorLike, bins: Sequence[TensorLike], **options: object) -> TensorSpec:
    return contiguous(x, [edges.shape[0] - 1 for edges in bins])


@OP.formula("mode")
def _mode(x: TensorLike, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return max_dim(x, dim, keepdim)


@OP.refuses("histc")
def _refuse_histc(x: TensorLike, bins: Size = 100, min: float = 0, max: float = 0) -> None:
    refuse(bins <= 0, lambda: f"bins must be > 0, but got {bins}")
    refuse(min > max, "torch.histc: max must be larger than min")


@OP.formula("histc")
def _histc(x: TensorLike, bins: Size = 100, min: Number = 0, max: Number = 0) -> TensorSpec:
    return contiguous(x, (bins,))


# --- samples ---------------------------------------------------------------------------------------

_LEVELS = listed(-1.0, -0.25, 0.5, 2.0)
OP.samples("bincount", call(integers(9)), call(integers(9), reals(9), 8))
OP.samples("bucketize.Tensor", call(reals(2, 3), _LEVELS))
OP.samples("bucketize.Scalar", call(0.3, _LEVELS))
OP.samples(
    "searchsorted.Tensor",
    call(_LEVELS, reals(2, 5)),
    call(listed([1, 2, 2, 5], [0, 3, 3, 3]), listed([2, 5], [3, 9]), right=True),
)
OP.samples("searchsorted.Scalar", call(_LEVELS, 0.3))
OP.samples("histc", call(reals(20), 5, -2, 2))
OP.samples("histogram.bins_tensor", call(reals(20), _LEVELS))
OP.samples("_histogramdd_bin_edges _histogramdd_from_bin_cts", call(reals(20, 2), [3, 4]))
OP.samples("_histogramdd_from_bin_tensors", call(reals(20, 2), [_LEVELS, _LEVELS]))
OP.samples("kthvalue", call(reals(3, 9), 4))
OP.samples("mode", call(listed([1.0, 2.0, 2.0], [3.0, 3.0, 1.0]), 1, True))
OP.samples("sort.stable", call(reals(3, 9), stable=True, dim=0))
OP.samples("topk", call(reals(3, 9), 4, 1, True, True), call(reals(9, 2), 3, 0, False, True))
OP.samples("_unique2", call(integers(3, 4), True, True, True))
OP.samples("unique_dim", call(integers(6, 2, below=2), 0, True, True, True))
OP.samples("unique_consecutive", call(listed(1, 1, 2, 2, 1), True, True))
OP.samples("unique_dim_consecutive", call(listed([1, 2], [1, 2], [0, 1]), 0, True, True))
