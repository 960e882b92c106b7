"""Reductions and scans of arrays as torch calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.rules import Axis, Rule, dim_of, dims, known, refuse_complex, truths
from torchdynamo.arrays.values import Model, model_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld


def _values(n: ArrayWorld, asked: Model, a: object) -> torch.Tensor:
    """The elements in the dtype of the result."""
    found: torch.Tensor = n.tensor(a, asked.dtype)
    return found


def _sum(
    n: ArrayWorld, asked: Model, a: object, axis: Axis = None, dtype: object = None, *, keepdims: bool = False
) -> object:
    x = _values(n, asked, a)
    return x.sum(dims(axis, x), keepdim=keepdims, dtype=x.dtype) if x.dim() and axis != () else x.clone()


def _prod(
    n: ArrayWorld, asked: Model, a: object, axis: Axis = None, dtype: object = None, *, keepdims: bool = False
) -> object:
    x = _values(n, asked, a)
    for dim in sorted((dim % x.dim() for dim in dims(axis, x)), reverse=True):
        x = x.prod(dim, keepdim=keepdims, dtype=x.dtype)
    return x


def _mean(
    n: ArrayWorld, asked: Model, a: object, axis: Axis = None, dtype: object = None, *, keepdims: bool = False
) -> object:
    x = _wide(n.tensor(a), asked)
    over = dims(axis, x)
    return (x.sum(over, keepdim=keepdims) if x.dim() else x) / _count(x, over)


def _wide(x: torch.Tensor, asked: Model) -> torch.Tensor:
    """The elements as means are computed: those of half precision in single, whole numbers in double."""
    if x.dtype == torch.float16 and asked.dtype.itemsize <= 4:
        return x.to(torch.float32)
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.float64)
    wanted = {4: torch.float32, 8: torch.float64}.get(asked.dtype.itemsize)
    return x.to(wanted) if wanted is not None and asked.dtype.kind == "f" and x.dtype != wanted else x


def _count(x: torch.Tensor, over: tuple[int, ...]) -> int:
    return math.prod(int(x.shape[dim]) for dim in over)


def _var(
    n: ArrayWorld,
    asked: Model,
    a: object,
    axis: Axis = None,
    dtype: object = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
) -> torch.Tensor:
    x = n.tensor(a)
    if x.is_complex():
        raise BreakGraph("numpy", "the variance of complex numbers")
    x = _wide(x, asked)
    over = dims(axis, x)
    if not x.dim():
        x, over = x.unsqueeze(0), (0,)
    count = _count(x, over)
    about = x - x.sum(over, keepdim=True) / count
    return (about * about).sum(over, keepdim=keepdims) / torch.full(
        (), max(count - ddof, 0), dtype=about.dtype, device="cpu"
    )


def _std(
    n: ArrayWorld,
    asked: Model,
    a: object,
    axis: Axis = None,
    dtype: object = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
) -> object:
    return torch.sqrt(_var(n, asked, a, axis, dtype, ddof=ddof, keepdims=keepdims))


def _extreme(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, *, keepdims: bool = False) -> object:
        x = n.tensor(a)
        refuse_complex(x)
        return getattr(torch, name)(x, dims(axis, x), keepdim=keepdims) if x.dim() and axis != () else x.clone()

    return Rule(program)


def _place(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object, axis: int | None = None, *, keepdims: bool = False) -> object:
        x = n.tensor(a)
        refuse_complex(x)
        x = x.to(torch.uint8) if x.dtype == torch.bool else x
        if axis is None:
            found = getattr(torch, name)(x.reshape(-1), 0)
            return found.reshape((1,) * x.dim()) if keepdims else found
        return getattr(torch, name)(x, dim_of(axis), keepdim=keepdims)

    return Rule(program)


def _truth(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, *, keepdims: bool = False) -> object:
        x = truths(n.tensor(a))
        return getattr(torch, name)(x, dims(axis, x), keepdim=keepdims) if x.dim() and axis != () else x.clone()

    return Rule(program)


def _scan(name: str) -> Rule:
    def program(n: ArrayWorld, asked: Model, a: object, axis: int | None = None, dtype: object = None) -> object:
        x = _values(n, asked, a)
        if axis is None:
            return getattr(torch, name)(x.reshape(-1), 0)
        return getattr(torch, name)(x, dim_of(axis))

    return Rule(program)


def _ptp(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, *, keepdims: bool = False) -> object:
    x = n.tensor(a)
    refuse_complex(x)
    over = dims(axis, x)
    return torch.amax(x, over, keepdim=keepdims) - torch.amin(x, over, keepdim=keepdims)


def _count_nonzero(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, *, keepdims: bool = False) -> object:
    x = n.tensor(a) != 0
    return x.sum(dims(axis, x), keepdim=keepdims, dtype=torch.int64)


def _median(n: ArrayWorld, asked: Model, a: object, axis: int | None = None, *, keepdims: bool = False) -> object:
    """The mean of the two in the middle."""
    x = _wide(n.tensor(a), asked)
    refuse_complex(x)
    if isinstance(axis, (tuple, list)):
        raise BreakGraph("numpy", "the median over several axes")
    shape = (1,) * x.dim()
    moved = x.reshape(-1) if axis is None else x.movedim(dim_of(axis), -1)
    ordered = torch.sort(moved, -1)[0]
    size = int(ordered.shape[-1])
    found = (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
    found = torch.where(torch.isnan(ordered[..., -1]), ordered[..., -1], found)  # NaN is sorted to the end
    if not keepdims:
        return found
    return found.reshape(shape) if axis is None else found.unsqueeze(dim_of(axis))


def _average(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, weights: object = None) -> object:
    if weights is None:
        return _mean(n, asked, a, axis)
    known(weights)  # a sum of zero raises
    x, w = _values(n, asked, a), _values(n, asked, weights)
    if w.shape != x.shape:
        if w.dim() != 1 or axis is None or isinstance(axis, (tuple, list)):
            raise BreakGraph("numpy", "an average by weights of another shape")
        w = w.reshape([-1 if dim == dim_of(axis) % x.dim() else 1 for dim in range(x.dim())])
    over = dims(axis, x)
    return (x * w).sum(over) / w.expand(x.shape).sum(over)


def _quantile(
    n: ArrayWorld,
    asked: Model,
    a: object,
    q: Any,
    axis: int | None = None,
    *,
    method: str = "linear",
    keepdims: bool = False,
) -> object:
    """Between the two elements that lie around each place, from the nearer one on."""
    known(q, method)
    x = n.tensor(a, asked.dtype)
    if isinstance(axis, (tuple, list)) or numpy.ndim(q) > 1 or method != "linear" or asked.dtype.itemsize < 4:
        raise BreakGraph("numpy", "a quantile over several axes, at places of several dims, or by another method")
    as_elements = isinstance(q, (int, float)) and model_of(a).dtype.kind == "f"
    moved = x.reshape(-1) if axis is None else x.movedim(dim_of(axis), -1)
    ordered = torch.sort(moved, -1)[0]
    last = int(ordered.shape[-1]) - 1
    places = numpy.atleast_1d(last * numpy.asarray(q, dtype=asked.dtype if as_elements else None))
    found = torch.stack([_between(ordered, float(place), last) for place in places])
    found = torch.where(torch.isnan(ordered[..., -1]), ordered[..., -1], found)  # NaN is sorted to the end
    if keepdims:
        shape = (
            found.shape[0],
            *((1,) * x.dim() if axis is None else found.unsqueeze(dim_of(axis) % x.dim() + 1).shape[1:]),
        )
        found = found.reshape(shape)
    return found if numpy.ndim(q) else found[0]


def _between(ordered: torch.Tensor, place: float, last: int) -> torch.Tensor:
    """At a place among ordered elements."""
    low = min(math.floor(place), last)
    below, above = ordered[..., low], ordered[..., min(low + 1, last)]
    part, step = place - low, above - below
    return above - step * (1 - part) if part >= 0.5 else below + step * part


def _percentile(
    n: ArrayWorld,
    asked: Model,
    a: object,
    q: Any,
    axis: int | None = None,
    *,
    method: str = "linear",
    keepdims: bool = False,
) -> object:
    known(q)
    return _quantile(n, asked, a, numpy.true_divide(q, 100), axis, method=method, keepdims=keepdims)


def _nanmean(n: ArrayWorld, asked: Model, a: object, axis: Axis = None, *, keepdims: bool = False) -> object:
    x = _wide(n.tensor(a), asked)
    if x.is_complex():
        raise BreakGraph("numpy", "the mean of complex numbers without NaN")
    over = dims(axis, x)
    return torch.nansum(x, over, keepdim=keepdims) / (~torch.isnan(x)).sum(over, keepdim=keepdims)


def _nansum(
    n: ArrayWorld, asked: Model, a: object, axis: Axis = None, dtype: object = None, *, keepdims: bool = False
) -> object:
    return torch.nansum(_values(n, asked, a), dims(axis, n.tensor(a)), keepdim=keepdims)


def _cov(
    n: ArrayWorld,
    asked: Model,
    m: object,
    y: object = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: float | None = None,
) -> torch.Tensor:
    known(rowvar, bias, ddof)
    if y is not None:
        raise BreakGraph("numpy", "cov() of two arrays: concatenate them")
    x = torch.atleast_2d(n.tensor(m, asked.dtype))
    if x.is_complex():
        raise BreakGraph("numpy", "cov() of complex numbers")
    x = x if rowvar or n.tensor(m).dim() == 1 else x.mT
    by = x.shape[1] - (ddof if ddof is not None else int(not bias))
    if by <= 0:
        raise BreakGraph("numpy", "cov() of too few observations, which warns")
    x = x - x.mean(1, keepdim=True)
    found: torch.Tensor = (x @ x.mT / by).squeeze()
    return found


def _corrcoef(n: ArrayWorld, asked: Model, x: object, y: object = None, rowvar: bool = True) -> torch.Tensor:
    found = _cov(n, asked, x, y, rowvar)
    if not found.dim():
        return found / found
    deviations = found.diagonal().sqrt()
    return (found / deviations[:, None] / deviations).clip(-1, 1)


REDUCTIONS: dict[str, Rule] = {
    "sum": Rule(_sum), "prod": Rule(_prod), "mean": Rule(_mean), "var": Rule(_var), "std": Rule(_std),
    "max": _extreme("amax"), "min": _extreme("amin"), "argmax": _place("argmax"), "argmin": _place("argmin"),
    "any": _truth("any"), "all": _truth("all"), "cumsum": _scan("cumsum"), "cumprod": _scan("cumprod"),
}  # fmt: skip
# Functions that are no methods.
REDUCING: dict[str, Rule] = {
    "ptp": Rule(_ptp), "count_nonzero": Rule(_count_nonzero), "median": Rule(_median), "average": Rule(_average),
    "nansum": Rule(_nansum), "nanmean": Rule(_nanmean), "quantile": Rule(_quantile), "percentile": Rule(_percentile),
    "cov": Rule(_cov), "corrcoef": Rule(_corrcoef),
}  # fmt: skip
