"""Linear algebra. LAPACK's results are column-major in their last two dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Table, common_device, contiguous, elementwise, strided
from primtorch.layout import broadcast, contiguous_strides, wrap_dim
from primtorch.promotion import complex_of, real_of, result_type
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def column_major(like: Any, shape: Sequence[Size], dtype: torch.dtype | None = None) -> TensorSpec:
    """A batch of column-major matrices."""
    sizes = tuple(shape)
    swapped = (*sizes[:-2], sizes[-1], sizes[-2])
    strides = contiguous_strides(swapped)
    return strided(like, sizes, (*strides[:-2], strides[-1], strides[-2]), dtype)


def _smaller(a: Size, b: Size) -> Size:
    return a if a is b else torch.sym_min(a, b)


def _pivots(a: Any) -> TensorSpec:
    return contiguous(a, (*a.shape[:-2], _smaller(a.shape[-2], a.shape[-1])), torch.int32)


def _info(a: Any) -> TensorSpec:
    return contiguous(a, a.shape[:-2], torch.int32)


@TABLE.op("linalg_cholesky_ex")
def _cholesky_ex(a: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return column_major(a, a.shape), _info(a)


@TABLE.op("linalg_inv_ex")
def _inv_ex(a: Any, *, check_errors: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return column_major(a, a.shape), _info(a)


@TABLE.op("linalg_lu_factor_ex")
def _lu_factor_ex(a: Any, *, pivot: bool = True, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    return column_major(a, a.shape), _pivots(a), _info(a)


@TABLE.op("lu_unpack")
def _lu_unpack(
    lu: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    *lead, m, n = lu.shape
    k = _smaller(m, n)
    nothing = contiguous(lu, (0,))
    permutation = contiguous(lu, (*lead, m, m)) if unpack_pivots else nothing
    if not unpack_data:
        return permutation, nothing, nothing
    return permutation, contiguous(lu, (*lead, m, k)), contiguous(lu, (*lead, k, n))


@TABLE.op("linalg_lu")
def _lu(a: Any, *, pivot: bool = True) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    return _lu_unpack(a, None, True, pivot)


@TABLE.op("linalg_lu_solve")
def _lu_solve(lu: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> TensorSpec:
    lead = broadcast(tuple(lu.shape[:-2]), tuple(b.shape[:-2]))
    shape = (*lead, *b.shape[-2:])
    return column_major(b, shape) if left else contiguous(b, shape)


@TABLE.op("linalg_solve_triangular")
def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> TensorSpec:
    """The solver works on a copy by columns, of the transposed system where the solution stands on the left."""
    for x in (a, b):
        if x.dim() < 2:
            raise RuntimeError("linalg.solve_triangular: the inputs must have at least 2 dimensions")
    lead = broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return column_major(b, (*lead, *b.shape[-2:]))


@TABLE.op("linalg_lstsq")
def _lstsq(a: Any, b: Any, rcond: float | None = None, *, driver: str | None = None) -> tuple[TensorSpec, ...]:
    """The solver leaves the solution in the memory of a right side, which is as high as the matrix where that is more
    than its width."""
    *lead, rows, columns = a.shape
    vector = b.dim() == a.dim() - 1
    width = 1 if vector else b.shape[-1]
    height = rows if rows is columns else torch.sym_max(rows, columns)
    if vector:
        solution = strided(a, (*lead, columns), contiguous_strides((*lead, height)))
    else:
        strides = contiguous_strides((*lead, width, height))
        solution = strided(a, (*lead, columns, width), (*strides[:-2], strides[-1], strides[-2]))
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    residuals = (*lead, width) if driver != "gelsy" and rows > columns else (0,)
    values = (*lead, _smaller(rows, columns)) if driver in ("gelsd", "gelss") else (0,)
    return (
        solution,
        contiguous(a, residuals, real_of(a.dtype)),
        contiguous(a, lead if driver != "gels" else (0,), torch.int64),
        contiguous(a, values, real_of(a.dtype)),
    )


@TABLE.op("linalg_ldl_solve")
def _ldl_solve(ld: Any, pivots: Any, b: Any, *, hermitian: bool = False) -> TensorSpec:
    lead = broadcast(tuple(ld.shape[:-2]), tuple(b.shape[:-2]))
    return column_major(b, (*lead, *b.shape[-2:]))


@TABLE.op("cholesky")
def _cholesky(a: Any, upper: bool = False) -> TensorSpec:
    return column_major(a, a.shape)


@TABLE.op("_linalg_det")
def _det(a: Any) -> tuple[TensorSpec, ...]:
    return contiguous(a, a.shape[:-2]), column_major(a, a.shape), _pivots(a)


@TABLE.op("_linalg_slogdet")
def _slogdet(a: Any) -> tuple[TensorSpec, ...]:
    lead = a.shape[:-2]
    return contiguous(a, lead), contiguous(a, lead, real_of(a.dtype)), column_major(a, a.shape), _pivots(a)


@TABLE.op("linalg_qr")
def _qr(a: Any, mode: str = "reduced") -> tuple[TensorSpec, TensorSpec]:
    *lead, m, n = a.shape
    k = _smaller(m, n) if mode == "reduced" else m
    r = column_major(a, (*lead, _smaller(m, n) if mode != "complete" else m, n))
    return (contiguous(a, (0,)) if mode == "r" else column_major(a, (*lead, m, k))), r


@TABLE.op("_linalg_svd")
def _svd(
    a: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    *lead, m, n = a.shape
    k = _smaller(m, n)
    values = contiguous(a, (*lead, k), real_of(a.dtype))
    if not compute_uv:
        empty = contiguous(a, (0,))
        return empty, values, empty
    left = column_major(a, (*lead, m, m if full_matrices else k))
    right_shape = (*lead, n if full_matrices else k, n)
    # On CPU V^H is column-major as LAPACK leaves it; the CUDA solvers give V, so V^H is row-major.
    right = column_major(a, right_shape) if a.device.type == "cpu" else contiguous(a, right_shape)
    return left, values, right


@TABLE.op("_linalg_eigh")
def _eigh(a: Any, UPLO: str = "L", compute_v: bool = True) -> tuple[TensorSpec, TensorSpec]:
    values = contiguous(a, a.shape[:-1], real_of(a.dtype))
    return values, column_major(a, a.shape) if compute_v else contiguous(a, (0,))


@TABLE.op("linalg_eig")
def _eig(a: Any) -> tuple[TensorSpec, TensorSpec]:
    dtype = complex_of(a.dtype)
    return contiguous(a, a.shape[:-1], dtype), column_major(a, a.shape, dtype)


@TABLE.op("linalg_cross")
def _cross(a: Any, b: Any, *, dim: int = -1) -> TensorSpec:
    wrap_dim(dim, a.dim())
    return contiguous(a, broadcast(tuple(a.shape), tuple(b.shape)))


@TABLE.op("_linalg_check_errors")
def _check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    return None


@TABLE.op("linalg_matrix_exp")
def _matrix_exp(a: Any) -> TensorSpec:
    return contiguous(a, a.shape)


@TABLE.op("_cdist_forward")
def _cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> TensorSpec:
    common_device((x1, x2))
    lead = broadcast(tuple(x1.shape[:-2]), tuple(x2.shape[:-2]))
    return contiguous(x1, (*lead, x1.shape[-2], x2.shape[-2]))


@TABLE.op("_cdist_backward")
def _cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> TensorSpec:
    if any(size == 0 for size in (*cdist.shape, x1.shape[-1])):
        return contiguous(x1, x1.shape)  # the kernel leaves before it expands the batch
    lead = broadcast(tuple(x1.shape[:-2]), tuple(x2.shape[:-2]))
    return contiguous(x1, (*lead, *x1.shape[-2:]))


@TABLE.op("trace")
def _trace(a: Any) -> TensorSpec:
    return contiguous(a, (), a.dtype if a.dtype.is_floating_point or a.dtype.is_complex else torch.int64)


@TABLE.op("dist")
def _dist(a: Any, b: Any, p: Any = 2) -> TensorSpec:
    return contiguous(a, (), real_of(elementwise((a, b), result_type((a, b))).dtype))
