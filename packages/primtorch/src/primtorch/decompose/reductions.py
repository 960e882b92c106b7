"""Reductions, scans, norms of vectors, sorting and searching."""

from __future__ import annotations

import math
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.pointwise import truth
from primtorch.decompose.table import RuleTable
from primtorch.layout import product, reduced_dims, wrap_dim
from primtorch.prims import Prim
from primtorch.promotion import compute_dtype, float_of
from primtorch.symbolic import hint_of

aten = torch.ops.aten
RULES = RuleTable()


def _accumulated(x: Value, dtype: torch.dtype | None) -> Value:
    """Operand of a sum: integers and bool are summed in int64."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    return x.to(dtype)


@RULES(aten.sum.default, aten.sum.dim_IntList)
def _sum(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return _accumulated(x, dtype).sum(reduced_dims(dim, x.rank), keepdim)


@RULES(aten.nansum.default)
def _nansum(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if x.dtype.is_floating_point:
        x = b.where(x.map(prims.isnan), 0, x)
    return _sum(b, x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


@RULES(aten.mean.default, aten.mean.dim)
def _mean(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    out_dtype = dtype or x.dtype
    if not (out_dtype.is_floating_point or out_dtype.is_complex):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {out_dtype}"
        )
    dims = reduced_dims(dim, x.rank)
    return _mean_of(x.to(compute_dtype(out_dtype)), dims, keepdim).to(out_dtype)


def _mean_of(x: Value, dims: tuple[int, ...], keepdim: bool) -> Value:
    count = product([x.shape[d] for d in dims])
    total = x.sum(dims, keepdim)
    return total / (math.nan if isinstance(count, int) and count == 0 else count)


@RULES(aten.prod.default, aten.prod.dim_int)
def _prod(b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return _accumulated(x, dtype).reduce(prims.prod, reduced_dims(dim, x.rank), keepdim)


def _is_known(size: Any) -> bool:
    """Whether a size, or a product of sizes, does not depend on data."""
    return isinstance(size, int) or hint_of(size, -1) >= 0


def _want_some(b: Builder, x: Value, dims: tuple[int, ...]) -> None:
    """Nothing has no largest element. Sizes that are known were looked at when the program was traced."""
    count = product([x.shape[d] for d in dims])
    if not _is_known(count):
        message = "Expected reduction dim to have non-zero size: the largest or smallest of no elements was asked for"
        b.emit(prims.assert_async, b.full((), count, torch.int64, x.device).ne(0), message)


def _extremum(prim: Prim) -> Any:
    def rule(b: Builder, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
        dims = reduced_dims(dim, x.rank)
        _want_some(b, x, dims)
        return x.reduce(prim, dims, keepdim)

    return rule


RULES.add(aten.amax.default, _extremum(prims.amax))
RULES.add(aten.amin.default, _extremum(prims.amin))
RULES.add(aten.max.default, _extremum(prims.amax))
RULES.add(aten.min.default, _extremum(prims.amin))


@RULES(aten.aminmax.default)
def _aminmax(b: Builder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = reduced_dims(dim, x.rank)
    _want_some(b, x, dims)
    return x.reduce(prims.amin, dims, keepdim), x.reduce(prims.amax, dims, keepdim)


def _extremum_along(value: Prim, place: Prim) -> Any:
    def rule(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if x.rank == 0:
            return x, b.full((), 0, torch.int64, x.device)
        dims = (x.dim(dim),)
        _want_some(b, x, dims)
        keys = x.to(torch.uint8) if x.dtype is torch.bool else x
        return x.reduce(value, dims, keepdim), b.emit(place, keys, dims, keepdim)

    return rule


RULES.add(aten.max.dim, _extremum_along(prims.amax, prims.argmax))
RULES.add(aten.min.dim, _extremum_along(prims.amin, prims.argmin))


def _arg(prim: Prim) -> Any:
    def rule(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if x.rank == 0:
            return b.full((), 0, torch.int64, x.device)
        _want_some(b, x, reduced_dims(dim, x.rank))
        keys = x.to(torch.uint8) if x.dtype is torch.bool else x
        return b.emit(prim, keys, () if dim is None else (x.dim(dim),), keepdim)  # type: ignore[no-any-return]

    return rule


RULES.add(aten.argmax.default, _arg(prims.argmax))
RULES.add(aten.argmin.default, _arg(prims.argmin))


def _logical(prim: Prim) -> Any:
    def rule(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        out = truth(x).reduce(prim, reduced_dims(dim, x.rank), keepdim)
        return out.to(torch.uint8) if x.dtype is torch.uint8 else out

    return rule


for _packet, _prim in ((aten.any, prims.any), (aten.all, prims.all)):
    for _overload in ("default", "dim", "dims"):
        RULES.add(getattr(_packet, _overload), _logical(_prim))


@RULES(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(b: Builder, x: Value, dim: Any = None) -> Value:
    return truth(x).to(torch.int64).sum(reduced_dims(dim, x.rank))


# --- variance ------------------------------------------------------------------------------------
def _var_mean_wide(b: Builder, x: Value, dim: Any, correction: Any, keepdim: bool) -> tuple[Value, Value]:
    dims = reduced_dims(dim, x.rank)
    if not x.dtype.is_complex:
        return b.emit(prims.var_mean, x.compute(), dims, float(correction), keepdim)  # type: ignore[no-any-return]
    re = b.emit(prims.var_mean, x.compute().map(prims.real), dims, float(correction), keepdim)
    im = b.emit(prims.var_mean, x.compute().map(prims.imag), dims, float(correction), keepdim)
    return re[0] + im[0], b.emit(prims.complex, re[1], im[1])


def _correction(unbiased: bool, correction: Any) -> Any:
    return (1 if unbiased else 0) if correction is None else correction


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


@RULES(aten.var.correction)
def _var(b: Builder, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return _var_mean_wide(b, x, dim, _correction(True, correction), keepdim)[0].to(_real_dtype(x.dtype))


@RULES(aten.std.correction)
def _std(b: Builder, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    variance = _var_mean_wide(b, x, dim, _correction(True, correction), keepdim)[0]
    return variance.map(prims.sqrt).to(_real_dtype(x.dtype))


@RULES(aten.var_mean.correction)
def _var_mean(
    b: Builder, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    var, mean = _var_mean_wide(b, x, dim, _correction(True, correction), keepdim)
    return var.to(_real_dtype(x.dtype)), mean.to(x.dtype)


@RULES(aten.std_mean.correction)
def _std_mean(
    b: Builder, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    var, mean = _var_mean_wide(b, x, dim, _correction(True, correction), keepdim)
    return var.map(prims.sqrt).to(_real_dtype(x.dtype)), mean.to(x.dtype)


@RULES(aten.var.default, aten.var.dim)
def _var_unbiased(b: Builder, x: Value, *rest: Any, **options: Any) -> Value:
    dim, unbiased, keepdim = _unbiased_arguments(rest, options)
    return _var(b, x, dim, correction=int(unbiased), keepdim=keepdim)  # type: ignore[no-any-return]


@RULES(aten.std.default, aten.std.dim)
def _std_unbiased(b: Builder, x: Value, *rest: Any, **options: Any) -> Value:
    dim, unbiased, keepdim = _unbiased_arguments(rest, options)
    return _std(b, x, dim, correction=int(unbiased), keepdim=keepdim)  # type: ignore[no-any-return]


def _unbiased_arguments(rest: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, bool, bool]:
    if rest and isinstance(rest[0], bool):
        return None, rest[0], False
    padded = (*rest, *(None, True, False)[len(rest) :])
    return (options.get("dim", padded[0]), options.get("unbiased", padded[1]), options.get("keepdim", padded[2]))


# --- norms of vectors ------------------------------------------------------------------------------
def vector_norm(b: Builder, x: Value, order: float, dims: tuple[int, ...], keepdim: bool) -> Value:
    size = x.map(prims.abs)
    if order == math.inf:
        return size.reduce(prims.amax, dims, keepdim)
    if order == -math.inf:
        return size.reduce(prims.amin, dims, keepdim)
    if order == 0:
        return size.ne(0.0).to(size.dtype).sum(dims, keepdim)
    if order == 1:
        return size.sum(dims, keepdim)
    if order == 2:
        return (size * size).sum(dims, keepdim).map(prims.sqrt)
    return (size ** float(order)).sum(dims, keepdim) ** (1.0 / order)


@RULES(aten.linalg_vector_norm.default)
def _linalg_vector_norm(
    b: Builder, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out_dtype = dtype or x.dtype
    wide = x.to(compute_dtype(out_dtype))
    out = vector_norm(b, wide, float(order), reduced_dims(dim, x.rank), keepdim)
    return out.to(_real_dtype(out_dtype))


@RULES(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def _norm(b: Builder, x: Value, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return _linalg_vector_norm(b, x, 2 if p is None else p, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


@RULES(aten.renorm.default)
def _renorm(b: Builder, x: Value, p: Any, dim: int, maxnorm: Any) -> Value:
    dim = x.dim(dim)
    wide = x.compute()
    norm = vector_norm(b, wide, float(p), tuple(d for d in range(x.rank) if d != dim), True)
    factor = b.where(norm > float(maxnorm), float(maxnorm) / (norm + 1e-7), 1.0)
    return (wide * factor.to(wide.dtype)).to(x.dtype)


@RULES(aten.dist.default)
def _dist(b: Builder, x: Value, y: Value, p: Any = 2) -> Value:
    difference = x - y.to(x.dtype)
    return _linalg_vector_norm(b, difference, p)  # type: ignore[no-any-return]


@RULES(aten.logsumexp.default)
def _logsumexp(b: Builder, x: Value, dim: Any, keepdim: bool = False) -> Value:
    dtype = float_of(x.dtype)
    wide = x.to(compute_dtype(dtype))
    dims = reduced_dims(dim, x.rank)
    if any(isinstance(x.shape[d], int) and x.shape[d] == 0 for d in dims):
        return wide.map(prims.exp).sum(dims, keepdim).map(prims.log).to(dtype)
    top = (
        wide.reduce(prims.amax, dims, True)
        if not wide.dtype.is_complex
        else (wide.map(prims.real).reduce(prims.amax, dims, True).to(wide.dtype))
    )
    size = top.map(prims.abs)
    shift = b.where(size.eq(math.inf), 0, top)
    out = (wide - shift).map(prims.exp).sum(dims, True).map(prims.log) + shift
    return (out if keepdim else out.squeeze(*dims)).to(dtype)


# --- scans ---------------------------------------------------------------------------------------
def _scan(prim: Prim) -> Any:
    def rule(b: Builder, x: Value, dim: int, *, dtype: Any = None) -> Value:
        x = _accumulated(x, dtype)
        return b.emit(prim, x, x.dim(dim)) if x.rank else x

    return rule


RULES.add(aten.cumsum.default, _scan(prims.cumsum))
RULES.add(aten.cumprod.default, _scan(prims.cumprod))


@RULES(aten.logcumsumexp.default)
def _logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    return b.emit(prims.logcumsumexp, x.compute(), x.dim(dim)).to(x.dtype) if x.rank else x  # type: ignore[no-any-return]


@RULES(aten.cummax.default)
def _cummax(b: Builder, x: Value, dim: int) -> Any:
    return b.emit(prims.cummax, x, x.dim(dim)) if x.rank else (x, b.full((), 0, torch.int64, x.device))


@RULES(aten.cummin.default)
def _cummin(b: Builder, x: Value, dim: int) -> Any:
    return b.emit(prims.cummin, x, x.dim(dim)) if x.rank else (x, b.full((), 0, torch.int64, x.device))


# --- order ---------------------------------------------------------------------------------------
@RULES(aten.sort.default)
def _sort(b: Builder, x: Value, dim: int = -1, descending: bool = False) -> Any:
    return b.emit(prims.sort, x, x.dim(dim), descending, False) if x.rank else (x, b.full((), 0, torch.int64, x.device))


@RULES(aten.sort.stable)
def _sort_stable(b: Builder, x: Value, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return (
        b.emit(prims.sort, x, x.dim(dim), descending, bool(stable))
        if x.rank
        else (x, b.full((), 0, torch.int64, x.device))
    )


@RULES(aten.topk.default)
def _topk(b: Builder, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return b.emit(prims.topk, x, k, x.dim(dim), largest, sorted)


def _at_rank(b: Builder, x: Value, place: Any, dim: int, keepdim: bool) -> tuple[Value, Value]:
    values, indices = b.emit(prims.sort, x, dim, False, True)
    picked = [v.slice(dim, place, place + 1) for v in (values, indices)]
    first, second = picked if keepdim else [v.squeeze(dim) for v in picked]
    return first, second


@RULES(aten.kthvalue.default)
def _kthvalue(b: Builder, x: Value, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _at_rank(b, x, k - 1, x.dim(dim), keepdim)


def _medians(b: Builder, x: Value, dim: int, keepdim: bool, *, ignore_nan: bool) -> tuple[Value, Value]:
    """The lower of the two middle elements; NaN sorts last, so it decides only when it may."""
    _want_some(b, x, (dim,))
    size = x.shape[dim]
    values, indices = b.emit(prims.sort, x, dim, False, True)
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


@RULES(aten.median.dim)
def _median(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _medians(b, x, x.dim(dim), keepdim, ignore_nan=False)


@RULES(aten.nanmedian.dim)
def _nanmedian(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.full((), 0, torch.int64, x.device)
    return _medians(b, x, x.dim(dim), keepdim, ignore_nan=True)


def _median_of_all(*, ignore_nan: bool) -> Any:
    def rule(b: Builder, x: Value) -> Value:
        """That of nothing is NaN, or the least integer."""
        nothing = math.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        flat, size = x.reshape((x.numel(),)), x.numel()
        if not _is_known(size):
            # One element more, which is read, where there is no other, and is else cut off.
            more = b.cat([flat, b.full((1,), nothing, x.dtype, x.device)], 0)
            flat = b.emit(prims.slice, more, 0, 0, torch.sym_max(size, 1), 1)
        elif same_size(size, 0):
            return b.full((), nothing, x.dtype, x.device)
        return _medians(b, flat, 0, False, ignore_nan=ignore_nan)[0]

    return rule


RULES.add(aten.median.default, _median_of_all(ignore_nan=False))
RULES.add(aten.nanmedian.default, _median_of_all(ignore_nan=True))


@RULES(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(
    b: Builder,
    sequence: Value,
    values: Any,
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
    return found.to(torch.int32) if out_int32 else found  # type: ignore[no-any-return]


@RULES(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(b: Builder, values: Any, boundaries: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return _searchsorted(b, boundaries, values, out_int32=out_int32, right=right)  # type: ignore[no-any-return]


@RULES(aten.diff.default)
def _diff(
    b: Builder, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None
) -> Value:
    dim = wrap_dim(dim, x.rank)
    parts = [p for p in (prepend, x, append) if p is not None]
    x = b.cat(parts, dim)
    for _ in range(n):
        size = x.shape[dim]
        if same_size(size, 0):
            break
        high, low = x.slice(dim, 1, size), x.slice(dim, 0, size - 1)
        x = high ^ low if x.dtype is torch.bool else high - low
    return x
