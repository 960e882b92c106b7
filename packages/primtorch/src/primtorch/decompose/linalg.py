"""Linear algebra around the factorisations that are taken whole; products of several operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.pointwise import promoted
from primtorch.decompose.reductions import vector_norm
from primtorch.decompose.table import RuleTable
from primtorch.layout import broadcast_shapes, product, wrap_dim
from primtorch.promotion import compute_dtype, result_type

aten = torch.ops.aten
RULES = RuleTable()


@RULES(aten._linalg_check_errors.default)
def _check_errors(b: Builder, info: Value, api_name: str, *, is_matrix: bool) -> None:
    fine = info.eq(0)
    fine = fine.reduce(prims.all, tuple(range(fine.rank)))
    b.emit(
        prims.assert_async,
        fine,
        f"{api_name}: the factorization failed: the matrix is singular, not positive definite, or holds NaN",
    )


@RULES(aten.linalg_cross.default)
def _cross(b: Builder, x: Value, y: Value, *, dim: int = -1) -> Value:
    dtype = result_type((x, y))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    dim = x.dim(dim)

    def turned(v: Value, shift: int) -> Value:
        return b.emit(prims.roll, v, (shift,), (dim,))  # type: ignore[no-any-return]

    return (turned(x, -1) * turned(y, -2) - turned(x, -2) * turned(y, -1)).to(dtype)


def _matmul(b: Builder, x: Value, y: Value) -> Value:
    """Batches of matrices of one dtype; batch dims broadcast."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    n = product(batch)
    left = x.expand((*batch, *x.shape[-2:])).reshape((n, *x.shape[-2:]))
    right = y.expand((*batch, *y.shape[-2:])).reshape((n, *y.shape[-2:]))
    return b.emit(prims.bmm, left, right).reshape((*batch, x.shape[-2], y.shape[-1]))  # type: ignore[no-any-return]


def _adjoint(x: Value) -> Value:
    turned = x.transpose(x.rank - 2, x.rank - 1)
    return turned.map(prims.conj) if x.dtype.is_complex else turned


@RULES(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(
    b: Builder, x: Value, *, atol: Value | None = None, rtol: Value | None = None, hermitian: bool = False
) -> Value:
    """V diag(1/s) U^H over the singular values above max(atol, rtol * largest) (Moore 1920, Penrose 1955)."""
    rows, columns = x.shape[-2:]
    real = x.dtype.to_real() if x.dtype.is_complex else x.dtype
    if isinstance(x.numel(), int) and x.numel() == 0:
        return b.full((*x.shape[:-2], columns, rows), 0, x.dtype, x.device)
    if hermitian:
        values, u = b.emit(prims.linalg_eigh, x, "L", True)
        sizes = values.map(prims.abs)
    else:
        u, values, vh = b.emit(prims.linalg_svd, x, False, True)
        sizes = values
    largest = sizes.reduce(prims.amax, (sizes.rank - 1,), True)
    eps = torch.finfo(real).eps * torch.sym_max(rows, columns)
    relative: Any = eps if rtol is None else rtol.to(real).unsqueeze(rtol.rank)
    if rtol is None and atol is not None:
        relative = b.where(atol.to(real).unsqueeze(atol.rank) > 0.0, 0.0, b.full((), eps, real, x.device))
    limit = largest * relative
    if atol is not None:
        limit = b.binary(prims.maximum, limit, atol.to(real).unsqueeze(atol.rank))
    kept = sizes > limit
    inverse = b.where(kept, b.where(kept, values, 1.0).map(prims.reciprocal), 0.0).to(x.dtype)
    v = u if hermitian else _adjoint(vh)
    return _matmul(b, v * inverse.unsqueeze(inverse.rank - 1), _adjoint(u))


@RULES(aten._trilinear.default)
def _trilinear(
    b: Builder,
    x: Value,
    y: Value,
    z: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """x * y * z, each with dims of size 1 inserted, summed over `sumdim`."""
    operands = []
    for v, dims in ((x, expand1), (y, expand2), (z, expand3)):
        rank = v.rank + len(dims)
        operands.append(v.compute().unsqueeze(*(wrap_dim(d, rank) for d in dims)))
    product = operands[0] * operands[1] * operands[2]
    return product.sum(tuple(sorted(product.dim(d) for d in sumdim))).to(x.dtype)


@RULES(aten._euclidean_dist.default)
def _euclidean(b: Builder, x: Value, y: Value) -> Value:
    return b.emit(prims.cdist_forward, x, y, 2.0, None)  # type: ignore[no-any-return]


@RULES(aten._linalg_eigvals.default)
def _eigenvalues(b: Builder, x: Value) -> Value:
    return b.emit(prims.linalg_eigvals, x)  # type: ignore[no-any-return]


@RULES("aten::cholesky.default")  # torch before 2.14
def _cholesky(b: Builder, x: Value, upper: bool = False) -> Value:
    factor, info = b.emit(prims.linalg_cholesky_ex, x, upper=upper, check_errors=False)
    _check_errors(b, info, "cholesky", is_matrix=x.rank == 2)
    return factor  # type: ignore[no-any-return]


@RULES(aten.linear_backward.default)
def _linear_backward(
    b: Builder, x: Value, grad: Value, weight: Value, output_mask: Sequence[bool]
) -> tuple[Value | None, ...]:
    rows = product(x.shape[:-1])
    g, flat = grad.reshape((rows, grad.shape[-1])), x.reshape((rows, x.shape[-1]))
    return (
        b.emit(prims.mm, g, weight).reshape(x.shape) if output_mask[0] else None,
        b.emit(prims.mm, g.transpose(0, 1), flat) if output_mask[1] else None,
        g.compute().sum((0,)).to(g.dtype) if output_mask[2] else None,
    )


@RULES(aten.matmul_backward.default)
def _matmul_backward(b: Builder, grad: Value, x: Value, y: Value, mask: Sequence[bool]) -> tuple[Value | None, ...]:
    if x.rank < 2 or y.rank < 2:
        raise NotImplementedError("matmul_backward of vectors: differentiate matmul instead")
    gx = _summed_to(_matmul(b, grad, _adjoint(y)), x.shape) if mask[0] else None
    gy = _summed_to(_matmul(b, _adjoint(x), grad), y.shape) if mask[1] else None
    return gx, gy


def _summed_to(x: Value, shape: Sequence[Any]) -> Value:
    lead = x.rank - len(shape)
    x = x.sum(tuple(range(lead)))
    dims = tuple(d for d, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return x.sum(dims, True)


# --- products with another result dtype ------------------------------------------------------------
@RULES("aten::mm.dtype")
def _mm_dtype(b: Builder, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return b.emit(prims.mm, x.to(out_dtype), y.to(out_dtype))  # type: ignore[no-any-return]


@RULES("aten::bmm.dtype")
def _bmm_dtype(b: Builder, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return b.emit(prims.bmm, x.to(out_dtype), y.to(out_dtype))  # type: ignore[no-any-return]


@RULES("aten::addmm.dtype")
def _addmm_dtype(
    b: Builder, bias: Value, x: Value, y: Value, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    return b.emit(prims.addmm, *(v.to(out_dtype) for v in (bias, x, y)), beta=beta, alpha=alpha)  # type: ignore[no-any-return]


@RULES("aten::baddbmm.dtype")
def _baddbmm_dtype(
    b: Builder, bias: Value, x: Value, y: Value, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    return b.emit(prims.baddbmm, *(v.to(out_dtype) for v in (bias, x, y)), beta=beta, alpha=alpha)  # type: ignore[no-any-return]


# --- weight norm ---------------------------------------------------------------------------------
def _other_dims(x: Value, dim: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.rank) if d != dim)


@RULES(aten._weight_norm_interface.default)
def _weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    """g * v / ||v||, the norm over all dims but `dim` (Salimans and Kingma 2016)."""
    wide = v.compute()
    norms = vector_norm(b, wide, 2.0, _other_dims(v, dim), True)
    kept = norms if v.dtype is torch.bfloat16 or v.dtype is torch.float16 else norms.to(g.dtype)
    return (wide * (g.to(wide.dtype) / norms)).to(v.dtype), kept


@RULES(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(b: Builder, grad: Value, v: Value, g: Value, norms: Value, dim: int) -> tuple[Value, Value]:
    wide, w, n, scale = v.compute(), grad.compute(), norms.to(compute_dtype(v.dtype)), g.compute()
    along = (w * wide).sum(_other_dims(v, dim), True)
    grad_v = scale / n * (w - wide * (along / (n * n)))
    return grad_v.to(v.dtype), (along / n).to(g.dtype)


# --- joins of matrices -----------------------------------------------------------------------------
@RULES(aten.block_diag.default)
def _block_diag(b: Builder, tensors: Sequence[Value]) -> Value:
    dtype = result_type(tensors)
    blocks = [t.to(dtype).reshape((*(1,) * (2 - t.rank), *t.shape)) for t in tensors]
    width: Any = 0
    for t in blocks:
        width = width + t.shape[1]
    rows, start = [], 0
    for t in blocks:
        rows.append(b.emit(prims.pad, t, (0, start), (0, width - start - t.shape[1]), b.number(0, t)))
        start = start + t.shape[1]
    return b.cat(rows, 0)
