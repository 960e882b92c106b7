"""Linear algebra. LAPACK's results are column-major in their last two dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Operand, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Refusal, Trait
from primtorch.layout import broadcast, contiguous_strides, wrap_dim
from primtorch.operators.build import common_device, contiguous, strided
from primtorch.operators.contraction import adjoint, batched_matmul
from primtorch.operators.elementwise import promoted
from primtorch.operators.refusals import refuse, refuse_other_shape
from primtorch.promotion import complex_of, compute_dtype, real_of, result_type
from primtorch.samples import after, call, listed, matrix, positive, reals
from primtorch.spec import Size, TensorSpec

OP = Family("linalg")
OP.trait(
    Trait.CONVERTS_OUT,
    "cholesky cholesky_inverse cholesky_solve geqrf linalg_eig linalg_eigvals linalg_householder_product "
    "linalg_lstsq linalg_pinv",
)
OP.trait(Trait.ROWS_OUT, "cholesky")
OP.trait(Trait.SHARES_NOTHING, "linalg_cross")


@OP.formula("_linalg_check_errors")
def _check_errors(info: object, api_name: str, *, is_matrix: bool) -> None:
    return None


@OP.rule("_linalg_check_errors")
def _lower_check_errors(b: Builder, info: Value, api_name: str, *, is_matrix: bool) -> None:
    fine = info.eq(0)
    fine = fine.reduce(prims.all, tuple(range(fine.rank)))
    b.emit(
        prims.assert_async,
        fine,
        f"{api_name}: the factorization failed: the matrix is singular, not positive definite, or holds NaN",
    )


@OP.formula("linalg_cross")
def _cross(a: TensorLike, b: TensorLike, *, dim: int = -1) -> TensorSpec:
    wrap_dim(dim, a.dim())
    return contiguous(a, broadcast(tuple(a.shape), tuple(b.shape)))


@OP.refuses("linalg_cross")
def _refuse_cross(x: TensorLike, other: TensorLike, *, dim: int = -1) -> None:
    refuse(x.dim() != other.dim(), "linalg.cross: inputs must have the same number of dimensions.")
    at = wrap_dim(dim, x.dim())
    refuse(
        x.shape[at] != 3 or other.shape[at] != 3,
        lambda: f"linalg.cross: inputs dimension {dim} must have length 3. Got {x.shape[at]} and {other.shape[at]}",
    )


@OP.rule("linalg_cross")
def _lower_cross(b: Builder, x: Value, y: Value, *, dim: int = -1) -> Value:
    dtype = result_type((x, y))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    dim = x.dim(dim)

    def turned(v: Value, shift: int) -> Value:
        return b.emit(prims.roll, v, (shift,), (dim,))

    return (turned(x, -1) * turned(y, -2) - turned(x, -2) * turned(y, -1)).to(dtype)


@OP.rule("linalg_pinv.atol_rtol_tensor")
def _lower_pinv(
    b: Builder, x: Value, *, atol: Value | None = None, rtol: Value | None = None, hermitian: bool = False
) -> Value:
    """V diag(1/s) U^H over the singular values above max(atol, rtol * largest) (Moore 1920, Penrose 1955)."""
    rows, columns = x.shape[-2:]
    real = x.dtype.to_real() if x.dtype.is_complex else x.dtype
    if isinstance(x.numel(), int) and x.numel() == 0:
        return b.full((*x.shape[:-2], columns, rows), 0, x.dtype, x.device)
    if hermitian:
        values, u = b.emit_several(prims.linalg_eigh, x, "L", True)
        sizes = values.map(prims.abs)
    else:
        u, values, vh = b.emit_several(prims.linalg_svd, x, False, True)
        sizes = values
    largest = sizes.reduce(prims.amax, (sizes.rank - 1,), True)
    eps = torch.finfo(real).eps * torch.sym_max(rows, columns)
    relative: Operand = eps if rtol is None else rtol.to(real).unsqueeze(rtol.rank)
    if rtol is None and atol is not None:
        relative = b.where(atol.to(real).unsqueeze(atol.rank) > 0.0, 0.0, b.full((), eps, real, x.device))
    limit = largest * relative
    if atol is not None:
        limit = b.binary(prims.maximum, limit, atol.to(real).unsqueeze(atol.rank))
    kept = sizes > limit
    inverse = b.where(kept, b.where(kept, values, 1.0).map(prims.reciprocal), 0.0).to(x.dtype)
    v = u if hermitian else adjoint(vh)
    return batched_matmul(b, v * inverse.unsqueeze(inverse.rank - 1), adjoint(u))


@OP.rule("_euclidean_dist")
def _lower_euclidean(b: Builder, x: Value, y: Value) -> Value:
    return b.emit(prims.cdist_forward, x, y, 2.0, None)


@OP.rule("_linalg_eigvals")
def _lower_eigenvalues(b: Builder, x: Value) -> Value:
    return b.emit(prims.linalg_eigvals, x)


def column_major(like: TensorLike, shape: Sequence[Size], dtype: torch.dtype | None = None) -> TensorSpec:
    """A batch of column-major matrices."""
    sizes = tuple(shape)
    swapped = (*sizes[:-2], sizes[-1], sizes[-2])
    strides = contiguous_strides(swapped)
    return strided(like, sizes, (*strides[:-2], strides[-1], strides[-2]), dtype)


@OP.formula("cholesky")
def _cholesky(a: TensorLike, upper: bool = False) -> TensorSpec:
    return column_major(a, a.shape)


def _refuse_unless_square(name: str) -> Refusal:
    def check(a: TensorLike, *args: object, **options: object) -> None:
        refuse(a.dim() < 2, lambda: f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
        refuse(
            a.shape[-1] != a.shape[-2],
            lambda: (
                f"linalg.{name}: A must be batches of square matrices, but they are {a.shape[-2]} by "
                f"{a.shape[-1]} matrices"
            ),
        )

    return check


for _name in ("linalg_cholesky_ex", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "linalg_eig",
              "linalg_eigvals", "linalg_matrix_exp", "linalg_ldl_factor_ex", "cholesky",
              "cholesky_inverse"):  # fmt: skip
    OP.refuses(_name)(_refuse_unless_square(_name))


@OP.rule("cholesky?")  # torch before 2.14
def _lower_cholesky(b: Builder, x: Value, upper: bool = False) -> Value:
    factor, info = b.emit_several(prims.linalg_cholesky_ex, x, upper=upper, check_errors=False)
    _lower_check_errors(b, info, "cholesky", is_matrix=x.rank == 2)
    return factor


# --- without a rule of their own ------------------------------------------------------------------
def _smaller(a: Size, b: Size) -> Size:
    return a if a is b else torch.sym_min(a, b)


def _pivots(a: TensorLike) -> TensorSpec:
    return contiguous(a, (*a.shape[:-2], _smaller(a.shape[-2], a.shape[-1])), torch.int32)


def _info(a: TensorLike) -> TensorSpec:
    return contiguous(a, a.shape[:-2], torch.int32)


@OP.formula("linalg_cholesky_ex")
def _cholesky_ex(a: TensorLike, *, upper: bool = False, check_errors: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return column_major(a, a.shape), _info(a)


@OP.formula("linalg_inv_ex")
def _inv_ex(a: TensorLike, *, check_errors: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return column_major(a, a.shape), _info(a)


@OP.formula("linalg_lu_factor_ex")
def _lu_factor_ex(a: TensorLike, *, pivot: bool = True, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    return column_major(a, a.shape), _pivots(a), _info(a)


@OP.refuses("linalg_qr", "linalg_lu", "linalg_lu_factor_ex", "_linalg_svd")
def _refuse_matrix(a: TensorLike, *args: object, **options: object) -> None:
    refuse(a.dim() < 2, lambda: f"The input tensor A must have at least 2 dimensions, but it has {a.dim()}.")


@OP.formula("lu_unpack")
def _lu_unpack(
    lu: TensorLike, pivots: TensorLike | None, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    *lead, m, n = lu.shape
    k = _smaller(m, n)
    nothing = contiguous(lu, (0,))
    permutation = contiguous(lu, (*lead, m, m)) if unpack_pivots else nothing
    if not unpack_data:
        return permutation, nothing, nothing
    return permutation, contiguous(lu, (*lead, m, k)), contiguous(lu, (*lead, k, n))


@OP.formula("linalg_lu")
def _lu(a: TensorLike, *, pivot: bool = True) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    return _lu_unpack(a, None, True, pivot)


@OP.refuses("linalg_lu_solve")
def _refuse_lu_solve(
    lu: TensorLike, pivots: TensorLike, b: TensorLike, *, left: bool = True, adjoint: bool = False
) -> None:
    _refuse_unless_square("lu_solve")(lu)
    refuse(b.dim() < 2, lambda: f"linalg.lu_solve: B must have at least 2 dimensions, but it has {b.dim()}")
    refuse(
        lu.shape[-1] != b.shape[-2 if left else -1],
        lambda: f"linalg.lu_solve: Incompatible shapes of A and B ({list(lu.shape)} and {list(b.shape)})",
    )
    refuse(pivots.dim() == 0, "Dimension specified as -1 but tensor has no dimensions", IndexError)
    refuse_other_shape("pivots", pivots, lu.shape[:-1])


@OP.formula("linalg_lu_solve")
def _lu_solve(
    lu: TensorLike, pivots: TensorLike, b: TensorLike, *, left: bool = True, adjoint: bool = False
) -> TensorSpec:
    lead = broadcast(tuple(lu.shape[:-2]), tuple(b.shape[:-2]))
    shape = (*lead, *b.shape[-2:])
    return column_major(b, shape) if left else contiguous(b, shape)


@OP.formula("linalg_solve_triangular")
def _solve_triangular(
    a: TensorLike, b: TensorLike, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> TensorSpec:
    """The solver works on a copy by columns, of the transposed system where the solution stands on the left."""
    _refuse_unless_square("solve_triangular")(a)
    refuse(b.dim() < 2, "linalg.solve_triangular: the inputs must have at least 2 dimensions")
    refuse(
        b.shape[-2 if left else -1] != a.shape[-1],
        lambda: f"linalg.solve_triangular: Incompatible shapes of A and B ({list(a.shape)} and {list(b.shape)})",
    )
    lead = broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return column_major(a, (*lead, *b.shape[-2:]))


@OP.formula("linalg_lstsq")
def _lstsq(
    a: TensorLike, b: TensorLike, rcond: float | None = None, *, driver: str | None = None
) -> tuple[TensorSpec, ...]:
    """The solver leaves the solution in the memory of a right side, which is as high as the matrix where that is more
    than its width."""
    *matrices, rows, columns = a.shape
    vector = b.dim() == a.dim() - 1
    lead = broadcast(tuple(matrices), tuple(b.shape[:-1] if vector else b.shape[:-2]))
    width = 1 if vector else b.shape[-1]
    height = rows if rows is columns else torch.sym_max(rows, columns)
    if vector:
        solution = strided(a, (*lead, columns), contiguous_strides((*lead, height)))
    else:
        strides = contiguous_strides((*lead, width, height))
        solution = strided(a, (*lead, columns, width), (*strides[:-2], strides[-1], strides[-2]))
    driver = driver or ("gelsy" if Fact.LSTSQ_BY_GELSY.on(a.device) else "gels")
    residuals = (*lead, width) if driver != "gelsy" and rows > columns else (0,)
    values = (*matrices, _smaller(rows, columns)) if driver in ("gelsd", "gelss") else (0,)
    return (
        solution,
        contiguous(a, residuals, real_of(a.dtype)),
        contiguous(a, matrices if driver != "gels" else (0,), torch.int64),
        contiguous(a, values, real_of(a.dtype)),
    )


@OP.refuses("linalg_lstsq")
def _refuse_lstsq(x: TensorLike, other: TensorLike, *args: object, **options: object) -> None:
    refuse(x.dim() < 2, "torch.linalg.lstsq: input must have at least 2 dimensions.")
    refuse(other.dim() < 1, "torch.linalg.lstsq: other must have at least 1 dimension.")
    refuse(
        other.dim() not in (x.dim() - 1, x.dim()),
        "torch.linalg.lstsq: other must have as many dimensions as input, or one less.",
    )
    rows = other.shape[-2 if other.dim() == x.dim() else -1]
    refuse(rows != x.shape[-2], "torch.linalg.lstsq: input.size(-2) should match the rows of other")


@OP.refuses("linalg_ldl_solve")
def _refuse_ldl_solve(ld: TensorLike, pivots: TensorLike, b: TensorLike, *, hermitian: bool = False) -> None:
    _refuse_unless_square("ldl_solve")(ld)
    refuse_other_shape("pivots", pivots, ld.shape[:-1])
    refuse(b.dim() < 2, lambda: f"Dimension out of range: -2 of a tensor of {b.dim()} dimensions", IndexError)
    refuse(b.shape[-2] != ld.shape[-1], lambda: f"Incompatible matrix sizes: {list(ld.shape)} and {list(b.shape)}")


@OP.formula("linalg_ldl_solve")
def _ldl_solve(ld: TensorLike, pivots: TensorLike, b: TensorLike, *, hermitian: bool = False) -> TensorSpec:
    lead = broadcast(tuple(ld.shape[:-2]), tuple(b.shape[:-2]))
    return column_major(b, (*lead, *b.shape[-2:]))


@OP.formula("_linalg_det")
def _det(a: TensorLike) -> tuple[TensorSpec, ...]:
    return contiguous(a, a.shape[:-2]), column_major(a, a.shape), _pivots(a)


@OP.formula("_linalg_slogdet")
def _slogdet(a: TensorLike) -> tuple[TensorSpec, ...]:
    lead = a.shape[:-2]
    return contiguous(a, lead), contiguous(a, lead, real_of(a.dtype)), column_major(a, a.shape), _pivots(a)


@OP.formula("linalg_qr")
def _qr(a: TensorLike, mode: str = "reduced") -> tuple[TensorSpec, TensorSpec]:
    *lead, m, n = a.shape
    k = _smaller(m, n) if mode == "reduced" else m
    r = column_major(a, (*lead, _smaller(m, n) if mode != "complete" else m, n))
    return (contiguous(a, (0,)) if mode == "r" else column_major(a, (*lead, m, k))), r


@OP.formula("_linalg_svd")
def _svd(
    a: TensorLike, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
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
    columns = Fact.LAPACK_LEAVES_COLUMNS.on(a.device)
    right = column_major(a, right_shape) if columns else contiguous(a, right_shape)
    return left, values, right


@OP.formula("_linalg_eigh")
def _eigh(a: TensorLike, UPLO: str = "L", compute_v: bool = True) -> tuple[TensorSpec, TensorSpec]:
    values = contiguous(a, a.shape[:-1], real_of(a.dtype))
    return values, column_major(a, a.shape) if compute_v else contiguous(a, (0,))


@OP.formula("linalg_eig")
def _eig(a: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    dtype = complex_of(a.dtype)
    lies = column_major if Fact.LAPACK_LEAVES_COLUMNS.on(a.device) else contiguous
    return contiguous(a, a.shape[:-1], dtype), lies(a, a.shape, dtype)


@OP.formula("linalg_matrix_exp")
def _matrix_exp(a: TensorLike) -> TensorSpec:
    return contiguous(a, a.shape)


@OP.formula("_cdist_forward")
def _cdist(x1: TensorLike, x2: TensorLike, p: float, compute_mode: int | None) -> TensorSpec:
    common_device((x1, x2))
    lead = broadcast(tuple(x1.shape[:-2]), tuple(x2.shape[:-2]))
    return contiguous(x1, (*lead, x1.shape[-2], x2.shape[-2]))


@OP.formula("_cdist_backward")
def _cdist_backward(grad: TensorLike, x1: TensorLike, x2: TensorLike, p: float, cdist: TensorLike) -> TensorSpec:
    if any(size == 0 for size in (*cdist.shape, x1.shape[-1])):
        return contiguous(x1, x1.shape)  # the kernel leaves before it expands the batch
    lead = broadcast(tuple(x1.shape[:-2]), tuple(x2.shape[:-2]))
    return contiguous(x1, (*lead, *x1.shape[-2:]))


@OP.refuses("_linalg_solve_ex")
def _refuse_solve(a: TensorLike, b: TensorLike, *, left: bool = True, check_errors: bool = False) -> None:
    _refuse_unless_square("linalg.solve")(a)
    rows = b.shape[-1] if _takes_vectors(a, b) or not left else b.shape[-2]
    refuse(
        rows != a.shape[-1],
        lambda: f"linalg.solve: Incompatible shapes of A and B ({list(a.shape)} and {list(b.shape)})",
    )


@OP.refuses("ormqr")
def _refuse_ormqr(
    x: TensorLike, tau: TensorLike, other: TensorLike, left: bool = True, transpose: bool = False
) -> None:
    refuse(x.dim() < 2 or other.dim() < 2, "torch.ormqr: input and other must have at least 2 dimensions.")
    refuse_other_shape("the batch of tau", tau, (*x.shape[:-2], *tau.shape[-1:]))
    refuse(
        list(x.shape[:-2]) != list(other.shape[:-2]),
        "torch.ormqr: input and other must have the same batch dimensions.",
    )
    rows = other.shape[-2] if left else other.shape[-1]
    refuse(rows != x.shape[-2], "torch.ormqr: other must have as many rows, or columns, as input")
    smaller = rows if rows < x.shape[-1] else x.shape[-1]
    refuse(tau.shape[-1] > x.shape[-1] or tau.shape[-1] != smaller, "torch.ormqr: tau.shape[-1] does not fit")


# --- factors and solutions -----------------------------------------------------------------------
@OP.refuses("linalg_householder_product")
def _refuse_householder_product(a: TensorLike, tau: TensorLike) -> None:
    refuse(a.dim() < 2, "torch.linalg.householder_product: input must have at least 2 dimensions.")
    refuse(a.shape[-2] < a.shape[-1], "torch.linalg.householder_product: input is wider than high")
    refuse(tau.dim() == 0, "Dimension specified as -1 but tensor has no dimensions", IndexError)
    refuse(a.shape[-1] < tau.shape[-1], "torch.linalg.householder_product: tau is longer than input is wide")
    refuse_other_shape("the batch of tau", tau, (*a.shape[:-2], tau.shape[-1]))


@OP.formula("cholesky_inverse", "_cholesky_solve_helper", "linalg_householder_product")
def _by_columns(a: TensorLike, *args: object, **options: object) -> TensorSpec:
    return column_major(a, a.shape)


def _batch(a: TensorLike, b: TensorLike) -> tuple[Size, ...]:
    """The batch dims that two batches of matrices have in common."""
    return broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))


@OP.formula("cholesky_solve")
def _cholesky_solve(b: TensorLike, a: TensorLike, upper: bool = False) -> TensorSpec:
    refuse(b.dim() < 2, lambda: f"b should have at least 2 dimensions, but has {b.dim()} dimensions instead")
    refuse(a.dim() < 2, lambda: f"u should have at least 2 dimensions, but has {a.dim()} dimensions instead")
    _refuse_unless_square("cholesky_solve")(a)
    refuse(a.shape[-1] != b.shape[-2], lambda: f"Incompatible matrix sizes: {list(a.shape)} and {list(b.shape)}")
    return column_major(b, (*_batch(a, b), *b.shape[-2:]))


@OP.formula("ormqr")
def _ormqr(a: TensorLike, tau: TensorLike, other: TensorLike, left: bool = True, transpose: bool = False) -> TensorSpec:
    return column_major(other, other.shape)


@OP.formula("linalg_eigvals")
def _eigvals(a: TensorLike) -> TensorSpec:
    return contiguous(a, a.shape[:-1], complex_of(a.dtype))


@OP.formula("geqrf")
def _geqrf(a: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    return column_major(a, a.shape), contiguous(a, (*a.shape[:-2], _smaller(a.shape[-2], a.shape[-1])))


@OP.formula("linalg_ldl_factor_ex")
def _ldl_factor_ex(a: TensorLike, *, hermitian: bool = False, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    return column_major(a, a.shape), contiguous(a, a.shape[:-1], torch.int32), _info(a)


def _takes_vectors(a: TensorLike, b: TensorLike) -> bool:
    """As eager has it, b is a vector, or a batch of them, where it has a's batch dims and one more."""
    return b.dim() == 1 or (a.dim() - 1 == b.dim() and list(b.shape) == list(a.shape[:-1]))


@OP.formula("_linalg_solve_ex")
def _solve(a: TensorLike, b: TensorLike, *, left: bool = True, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    vectors = _takes_vectors(a, b)
    shape = (*a.shape[:-2], a.shape[-1]) if vectors else (*_batch(a, b), *b.shape[-2:])
    x = column_major(a, shape) if left and len(shape) > 1 else contiguous(a, shape)  # a batch of vectors as a matrix
    return x, column_major(a, a.shape), contiguous(a, a.shape[:-1], torch.int32), _info(a)


@OP.refuses("triangular_solve")
def _refuse_triangular_solve(b: TensorLike, a: TensorLike, *args: object, **options: object) -> None:
    refuse(
        b.dim() < 2, lambda: f"torch.triangular_solve: Expected b to have at least 2 dimensions, but it has {b.dim()}"
    )
    _refuse_unless_square("triangular_solve")(a)
    refuse(a.shape[-1] != b.shape[-2], lambda: f"Incompatible matrix sizes: {list(a.shape)} and {list(b.shape)}")


@OP.formula("triangular_solve")
def _triangular_solve(b: TensorLike, a: TensorLike, *args: object, **options: object) -> tuple[TensorSpec, TensorSpec]:
    batch = _batch(a, b)
    return column_major(b, (*batch, *b.shape[-2:])), column_major(a, (*batch, *a.shape[-2:]))


# --- distances -------------------------------------------------------------------------------------
@OP.formula("_pdist_forward")
def _pdist(x: TensorLike, p: float = 2) -> TensorSpec:
    n = x.shape[0]
    return contiguous(x, ((n * (n - 1)) // 2,))


@OP.formula("_pdist_backward")
def _pdist_backward(grad: TensorLike, x: TensorLike, p: float, pdist: TensorLike) -> TensorSpec:
    return contiguous(x, x.shape)


# --- samples ---------------------------------------------------------------------------------------

_LU = (matrix(4, 4), listed(2, 2, 4, 4, dtype=torch.int32))
OP.samples("_linalg_det linalg_lu_factor_ex", call(matrix(2, 4, 4)))
OP.samples("_linalg_slogdet linalg_eig linalg_eigvals _linalg_eigvals linalg_matrix_exp", call(matrix(4, 4)))
OP.samples("lu_unpack", call(*_LU))
OP.samples("linalg_lu_solve", call(*_LU, matrix(4, 2)))
OP.samples("linalg_cholesky_ex cholesky linalg_inv_ex _linalg_eigh linalg_ldl_factor_ex", call(positive()))
OP.samples("cholesky_solve", call(matrix(4, 2), after(torch.linalg.cholesky, positive())))
OP.samples("_cholesky_solve_helper", call(matrix(4, 2), after(torch.linalg.cholesky, positive()), False))
OP.samples("cholesky_inverse", call(after(torch.linalg.cholesky, positive())))
OP.samples("linalg_lu linalg_qr _linalg_svd geqrf", call(matrix(4, 3)))
OP.samples("linalg_householder_product", call(matrix(5, 3), matrix(3)))
OP.samples("ormqr", call(matrix(5, 3), matrix(3), matrix(5, 2)))
OP.samples("_linalg_solve_ex", call(positive(), matrix(4, 2)))
OP.samples("linalg_solve_triangular", call(after(torch.triu, positive()), matrix(4, 2), upper=True))
OP.samples("triangular_solve", call(matrix(4, 2), after(torch.triu, positive())))
OP.samples("linalg_lstsq", call(matrix(5, 3), matrix(5, 2), driver="gelsd"))
OP.samples("linalg_ldl_solve", call(positive(), listed(1, 2, 3, 4, dtype=torch.int32), matrix(4, 2)))
OP.samples("_linalg_check_errors", call(listed(0, dtype=torch.int32), "an operator", is_matrix=True))
OP.samples("linalg_cross", call(reals(4, 3), reals(1, 3)))
OP.samples("_cdist_forward", call(reals(2, 4, 3), reals(2, 5, 3), 2.0, None))
OP.samples("_cdist_backward", call(reals(4, 5), reals(4, 3), reals(5, 3), 2.0, reals(4, 5, low=1.0)))
OP.samples("_pdist_forward", call(reals(5, 3), 2.0))
OP.samples("_pdist_backward", call(reals(10), reals(5, 3), 2.0, reals(10, low=1.0)))
