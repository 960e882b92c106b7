"""Reductions and scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from primtorch.arguments import Sizes
from primtorch.layout import contiguous_strides
from primtorch.prims.record import Prim, Reference, require, require_dim, require_dims, spec_like
from primtorch.spec import TensorSpec


def _reduced(t: TensorSpec, dims: Sequence[int], keepdim: bool) -> Sizes:
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(t.shape))
    return tuple(size for d, size in enumerate(t.shape) if d not in dims)


def _result(t: TensorSpec, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> TensorSpec:
    shape = _reduced(t, dims, keepdim)
    return spec_like(t, shape, contiguous_strides(shape), dtype)


def _over_dims(name: str, doc: str, meta: Callable[..., TensorSpec], run: Reference) -> Prim:
    schema = f"{name}(t: Tensor, dims: Dims, keepdim: bool = False) -> Tensor"
    return Prim(schema, "reduction", doc, meta, run, frozenset({"reduction"}))


def _reduction(name: str, reference: Reference, doc: str, takes: Callable[[torch.dtype], bool]) -> Prim:
    def meta(t: TensorSpec, dims: Sequence[int], keepdim: bool = False) -> TensorSpec:
        require_dims(name, dims, len(t.shape))
        require(takes(t.dtype), name, lambda: f"does not take dtype {t.dtype}")
        return _result(t, dims, keepdim)

    def run(t: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
        if not dims:
            return t.clone(memory_format=torch.contiguous_format)
        out: torch.Tensor = reference(t, tuple(dims), keepdim)
        return out

    return _over_dims(name, doc, meta, run)


def _arg_reduction(name: str, reference: Reference, doc: str) -> Prim:
    def meta(t: TensorSpec, dims: Sequence[int], keepdim: bool = False) -> TensorSpec:
        require(len(dims) <= 1, name, lambda: f"takes one dimension or (), got {tuple(dims)}")
        require_dims(name, dims, len(t.shape))
        return _result(t, dims or range(len(t.shape)), keepdim, torch.int64)

    def run(t: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
        out: torch.Tensor = reference(t, dims[0] if dims else None, keepdim)
        return out

    return _over_dims(name, doc, meta, run)


def _prod(t: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    for dim in dims:
        t = torch.prod(t, dim, keepdim=True, dtype=t.dtype)
    return t if keepdim else t.squeeze(dims)


def _var_mean_meta(
    t: TensorSpec, dims: Sequence[int], correction: float, keepdim: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    require_dims("var_mean", dims, len(t.shape))
    require(t.dtype.is_floating_point, "var_mean", lambda: f"does not take dtype {t.dtype}")
    out = _result(t, dims, keepdim)
    return out, out


def _var_mean(
    t: torch.Tensor, dims: Sequence[int], correction: float, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if not dims:  # eager takes () to mean every dimension
        return torch.var_mean(t.unsqueeze(-1), (-1,), correction=correction, keepdim=False)
    return torch.var_mean(t, tuple(dims), correction=correction, keepdim=keepdim)


sum = _reduction(
    "sum",
    lambda t, dims, keepdim: torch.sum(t, dims, keepdim, dtype=t.dtype),
    "Sum over dims, in t's dtype; bfloat16 and float16 are summed in float32 and rounded once.",
    lambda dtype: dtype is not torch.bool,
)
prod = _reduction("prod", _prod, "Product over dims, in t's dtype.", lambda dtype: dtype is not torch.bool)
amax = _reduction(
    "amax",
    torch.amax,
    "Largest value over dims; NaN wins. Empty dims are an error in eager.",
    lambda dtype: not dtype.is_complex,
)
amin = _reduction("amin", torch.amin, "Smallest value over dims; NaN wins.", lambda dtype: not dtype.is_complex)
all = _reduction(
    "all",
    torch.all,
    "Whether every element over dims is true; true when there is none.",
    lambda dtype: dtype is torch.bool,
)
any = _reduction(
    "any",
    torch.any,
    "Whether any element over dims is true; false when there is none.",
    lambda dtype: dtype is torch.bool,
)
argmax = _arg_reduction(
    "argmax",
    torch.argmax,
    "int64 index of the first largest element (the first NaN if any) along one dim, or of the "
    "row-major flattened tensor for dims=().",
)
argmin = _arg_reduction(
    "argmin",
    torch.argmin,
    "int64 index of the first smallest element (the first NaN if any) along one dim, or of the "
    "row-major flattened tensor for dims=().",
)
var_mean = Prim(
    "var_mean(t: Tensor, dims: Dims, correction: float, keepdim: bool = False) -> (Tensor, Tensor)",
    "reduction",
    "mean = sum(t)/n and var = sum((t - mean)^2) / max(0, n - correction), n the number of elements "
    "reduced, computed without cancellation (Welford 1962).",
    _var_mean_meta,
    _var_mean,
    frozenset({"reduction"}),
)


# --- scans ---------------------------------------------------------------------------------------
def _scan(name: str, reference: Reference, doc: str) -> Prim:
    def meta(t: TensorSpec, dim: int) -> TensorSpec:
        require_dim(name, dim, len(t.shape))
        return spec_like(t, t.shape, contiguous_strides(t.shape))

    return Prim(
        f"{name}(t: Tensor, dim: int) -> Tensor",
        "scan",
        doc,
        meta,
        lambda t, dim: reference(t, dim).contiguous(),
        frozenset({"scan"}),
    )


def _index_scan(name: str, reference: Reference, doc: str) -> Prim:
    def meta(t: TensorSpec, dim: int) -> tuple[TensorSpec, TensorSpec]:
        require_dim(name, dim, len(t.shape))
        strides = contiguous_strides(t.shape)
        return spec_like(t, t.shape, strides), spec_like(t, t.shape, strides, torch.int64)

    return Prim(f"{name}(t: Tensor, dim: int) -> (Tensor, Tensor)", "scan", doc, meta, reference, frozenset({"scan"}))


cumsum = _scan(
    "cumsum",
    lambda t, dim: torch.cumsum(t, dim, dtype=t.dtype),
    "out[i] = t[0] + ... + t[i] along dim, in t's dtype; reduced precision is summed in float32.",
)
cumprod = _scan("cumprod", lambda t, dim: torch.cumprod(t, dim, dtype=t.dtype), "out[i] = t[0] * ... * t[i] along dim.")
logcumsumexp = _scan("logcumsumexp", torch.logcumsumexp, "out[i] = log(e^t[0] + ... + e^t[i]) along dim, stably.")
cummax = _index_scan(
    "cummax", torch.cummax, "Running maximum along dim and the int64 index of its last occurrence; NaN wins."
)
cummin = _index_scan(
    "cummin", torch.cummin, "Running minimum along dim and the int64 index of its last occurrence; NaN wins."
)
