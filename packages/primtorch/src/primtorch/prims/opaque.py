"""Operators taken whole: linear algebra, Fourier transforms, special polynomials, samplers, data-dependent sizes.

Each is one ATen overload with the same arguments and results; a backend may call ATen for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.layout import contiguous_strides, dense_like
from primtorch.prims.elementwise import _COMPLEX_TO_REAL
from primtorch.prims.record import Pointwise, Prim, meta_of, spec_like
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, shape_env_of

aten = torch.ops.aten
_TO_COMPLEX = {real: cplx for cplx, real in _COMPLEX_TO_REAL.items()}


def _opaque(
    overload: OpOverload,
    family: str,
    doc: str,
    meta: Callable[..., Any] | None = None,
    *tags: str,
    name: str | None = None,
    of: Pointwise | None = None,
) -> Prim:
    """Without `meta`, shapes and strides are those of the overload's formula."""
    meta = meta or meta_of(overload)
    short = name or overload._schema.name.split("::")[1].lstrip("_")
    arguments = str(overload._schema).split("(", 1)[1]
    return Prim(short, f"{short}({arguments}", family, doc, meta, overload, frozenset({"opaque", *tags}), overload, of)


def _dense(t: TensorSpec, shape: Sequence[Any], dtype: torch.dtype | None = None) -> TensorSpec:
    return spec_like(t, shape, contiguous_strides(shape), dtype)


def _column_major(t: TensorSpec, shape: Sequence[Any], dtype: torch.dtype | None = None) -> TensorSpec:
    """Batches of matrices stored by columns, as LAPACK returns them."""
    if len(shape) < 2:
        return _dense(t, shape, dtype)
    swapped = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
    return spec_like(t, shape, (*swapped[:-2], swapped[-1], swapped[-2]), dtype)


def _complex_of(t: TensorSpec) -> torch.dtype:
    return _TO_COMPLEX.get(t.dtype, t.dtype)


def _like(t: TensorSpec, *rest: Any, **options: Any) -> TensorSpec:
    return _dense(t, t.shape)


def _preserved(t: TensorSpec, *rest: Any, **options: Any) -> TensorSpec:
    return spec_like(t, t.shape, dense_like(t.shape, t.strides))


# --- linear algebra ------------------------------------------------------------------------------


def _rank_min(a: TensorSpec) -> Any:
    return torch.sym_min(a.shape[-2], a.shape[-1])


def _solve_ex(a: TensorSpec, b: TensorSpec, *, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    batch = a.shape[:-2]
    pivots, info = _dense(a, a.shape[:-1], torch.int32), _dense(a, batch, torch.int32)
    vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and tuple(b.shape) == tuple(a.shape[:-1]))
    shape = (*batch, a.shape[-1]) if vector else (*batch, *b.shape[-2:])
    x = _column_major(a, shape) if left and len(shape) > 1 else _dense(a, shape)  # a batch of vectors as a matrix
    return x, _column_major(a, a.shape), pivots, info


def _triangular_solve(
    b: TensorSpec, a: TensorSpec, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, ...]:
    batch = a.shape[:-2] if len(a.shape) >= len(b.shape) else b.shape[:-2]
    return _column_major(b, (*batch, *b.shape[-2:])), _column_major(a, (*batch, *a.shape[-2:]))


def _geqrf(a: TensorSpec) -> tuple[Any, ...]:
    return _column_major(a, a.shape), _dense(a, (*a.shape[:-2], _rank_min(a)))


def _ldl_factor_ex(a: TensorSpec, *, hermitian: bool = False, check_errors: bool = False) -> tuple[Any, ...]:
    return (_column_major(a, a.shape), _dense(a, a.shape[:-1], torch.int32), _dense(a, a.shape[:-2], torch.int32))


def _pdist(t: TensorSpec, p: float = 2) -> TensorSpec:
    n = t.shape[0]
    return _dense(t, ((n * (n - 1)) // 2,))


_LINALG = "linear algebra"
linalg_det = _opaque(aten._linalg_det.default, _LINALG, "Determinant, with its LU factors and pivots.")
linalg_slogdet = _opaque(aten._linalg_slogdet.default, _LINALG, "Sign and log |det|, LU factors, pivots.")
linalg_lu_factor_ex = _opaque(aten.linalg_lu_factor_ex.default, _LINALG, "Packed LU, pivots, info.")
linalg_lu = _opaque(aten.linalg_lu.default, _LINALG, "A = P L U.")
lu_unpack = _opaque(aten.lu_unpack.default, _LINALG, "P, L, U of a packed factorisation.")
linalg_lu_solve = _opaque(aten.linalg_lu_solve.default, _LINALG, "Solve with LU factors.")
linalg_cholesky_ex = _opaque(aten.linalg_cholesky_ex.default, _LINALG, "A = L L^H, info.")
cholesky_solve = _opaque(
    aten.cholesky_solve.default,
    _LINALG,
    "Solve with a Cholesky factor.",
    lambda b, a, upper=False: _column_major(b, b.shape),
)
cholesky_inverse = _opaque(
    aten.cholesky_inverse.default,
    _LINALG,
    "Inverse from a Cholesky factor.",
    lambda a, upper=False: _column_major(a, a.shape),
)
linalg_inv_ex = _opaque(aten.linalg_inv_ex.default, _LINALG, "Inverse, info.")
linalg_eigh = _opaque(aten._linalg_eigh.default, _LINALG, "Eigenvalues and vectors of a Hermitian matrix.")
linalg_eig = _opaque(aten.linalg_eig.default, _LINALG, "Eigenvalues and vectors of a square matrix.")
linalg_eigvals = _opaque(
    aten.linalg_eigvals.default,
    _LINALG,
    "Eigenvalues of a square matrix.",
    lambda a: _dense(a, a.shape[:-1], _complex_of(a)),
)
linalg_svd = _opaque(aten._linalg_svd.default, _LINALG, "A = U diag(S) V^H.")
linalg_qr = _opaque(aten.linalg_qr.default, _LINALG, "A = Q R.")
linalg_householder_product = _opaque(
    aten.linalg_householder_product.default,
    _LINALG,
    "First columns of a product of Householder reflections.",
    lambda a, tau: _column_major(a, a.shape),
)
ormqr = _opaque(
    aten.ormqr.default,
    _LINALG,
    "Multiply by the Q of a QR factorisation.",
    lambda a, tau, other, left=True, transpose=False: _column_major(other, other.shape),
)
geqrf = _opaque(aten.geqrf.default, _LINALG, "QR as Householder reflections.", _geqrf)
linalg_solve_ex = _opaque(aten._linalg_solve_ex.default, _LINALG, "Solve A X = B.", _solve_ex)
linalg_solve_triangular = _opaque(aten.linalg_solve_triangular.default, _LINALG, "Solve with a triangular matrix.")
triangular_solve = _opaque(
    aten.triangular_solve.default, _LINALG, "Solve with a triangular matrix; also a copy of it.", _triangular_solve
)
linalg_lstsq = _opaque(aten.linalg_lstsq.default, _LINALG, "Least squares.")
linalg_ldl_factor_ex = _opaque(aten.linalg_ldl_factor_ex.default, _LINALG, "A = L D L^H, packed.", _ldl_factor_ex)
linalg_ldl_solve = _opaque(
    aten.linalg_ldl_solve.default,
    _LINALG,
    "Solve with LDL factors.",
)
linalg_matrix_exp = _opaque(aten.linalg_matrix_exp.default, _LINALG, "e^A.")
cdist_forward = _opaque(aten._cdist_forward.default, _LINALG, "p-norm distances between rows.")
cdist_backward = _opaque(
    aten._cdist_backward.default,
    _LINALG,
    "Gradient of cdist for its first operand.",
)
pdist_forward = _opaque(aten._pdist_forward.default, _LINALG, "p-norm distances between pairs of rows.", _pdist)
pdist_backward = _opaque(
    aten._pdist_backward.default, _LINALG, "Gradient of pdist.", lambda grad, t, p, pdist: _like(t)
)


# --- Fourier transforms --------------------------------------------------------------------------


_FFT = "fft"
fft_r2c = _opaque(aten._fft_r2c.default, _FFT, "Discrete Fourier transform of real data.")
fft_c2r = _opaque(aten._fft_c2r.default, _FFT, "Inverse transform to real data.")
fft_c2c = _opaque(
    aten._fft_c2c.default,
    _FFT,
    "Discrete Fourier transform of complex data.",
)


# --- special functions of two variables and orthogonal polynomials --------------------------------
def _special(op: str, doc: str) -> Prim:
    overload = getattr(aten, f"special_{op}").default
    return _opaque(overload, "special", doc, None, "pointwise", name=op, of=Pointwise(f"special_{op}", to_float=True))


def _polynomial(op: str, doc: str) -> Prim:
    of = Pointwise(f"special_{op}.|x_scalar|n_scalar", to_float=True)
    return _opaque(getattr(aten, f"special_{op}").default, "special", doc, None, "pointwise", name=op, of=of)


airy_ai = _special("airy_ai", "Airy function Ai.")
bessel_j0 = _special("bessel_j0", "Bessel function of the first kind, order 0.")
bessel_j1 = _special("bessel_j1", "Bessel function of the first kind, order 1.")
bessel_y0 = _special("bessel_y0", "Bessel function of the second kind, order 0.")
bessel_y1 = _special("bessel_y1", "Bessel function of the second kind, order 1.")
modified_bessel_k0 = _special("modified_bessel_k0", "Modified Bessel function of the second kind, order 0.")
modified_bessel_k1 = _special("modified_bessel_k1", "Modified Bessel function of the second kind, order 1.")
scaled_modified_bessel_k0 = _special("scaled_modified_bessel_k0", "e^t * K0(t).")
scaled_modified_bessel_k1 = _special("scaled_modified_bessel_k1", "e^t * K1(t).")
spherical_bessel_j0 = _special("spherical_bessel_j0", "sin(t) / t.")
modified_bessel_i0 = _special("modified_bessel_i0", "Modified Bessel function of the first kind, order 0.")
modified_bessel_i1 = _special("modified_bessel_i1", "Modified Bessel function of the first kind, order 1.")
chebyshev_polynomial_t = _polynomial("chebyshev_polynomial_t", "T_n(x).")
chebyshev_polynomial_u = _polynomial("chebyshev_polynomial_u", "U_n(x).")
chebyshev_polynomial_v = _polynomial("chebyshev_polynomial_v", "V_n(x).")
chebyshev_polynomial_w = _polynomial("chebyshev_polynomial_w", "W_n(x).")
shifted_chebyshev_polynomial_t = _polynomial("shifted_chebyshev_polynomial_t", "T_n(2x - 1).")
shifted_chebyshev_polynomial_u = _polynomial("shifted_chebyshev_polynomial_u", "U_n(2x - 1).")
shifted_chebyshev_polynomial_v = _polynomial("shifted_chebyshev_polynomial_v", "V_n(2x - 1).")
shifted_chebyshev_polynomial_w = _polynomial("shifted_chebyshev_polynomial_w", "W_n(2x - 1).")
hermite_polynomial_h = _polynomial("hermite_polynomial_h", "Physicists' Hermite polynomial H_n(x).")
hermite_polynomial_he = _polynomial("hermite_polynomial_he", "Probabilists' Hermite polynomial He_n(x).")
laguerre_polynomial_l = _polynomial("laguerre_polynomial_l", "Laguerre polynomial L_n(x).")
legendre_polynomial_p = _polynomial("legendre_polynomial_p", "Legendre polynomial P_n(x).")
polygamma = _opaque(
    aten.polygamma.default, "special", "The n-th derivative of digamma.", lambda n, t: _preserved(t), "pointwise"
)


# --- samplers, grids, losses with loops over data ------------------------------------------------


def _grid_sampler_backward(
    grad: TensorSpec,
    t: TensorSpec,
    grid: TensorSpec,
    interpolation: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    return (_like(t) if output_mask[0] else None), _like(grid)


def _embedding_bag(
    weight: TensorSpec,
    indices: TensorSpec,
    offsets: TensorSpec,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: TensorSpec | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, ...]:
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    fast_sum = mode == 0 and padding_idx < 0 and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    offset2bag = (0,) if fast_sum and weight.strides[1] == 1 else (indices.shape[0],)
    max_indices = (bags, weight.shape[1]) if mode == 2 else (bags,)
    return (
        _dense(weight, (bags, weight.shape[1])),
        _dense(indices, offset2bag),
        _dense(indices, (bags,)),
        _dense(indices, max_indices),
    )


def _ctc_loss(log_probs: TensorSpec, targets: TensorSpec, *rest: Any) -> tuple[Any, ...]:
    batch = log_probs.shape[1] if len(log_probs.shape) == 3 else 1
    longest = max(rest[1]) if isinstance(rest[1], (list, tuple)) else targets.shape[-1]
    return _dense(log_probs, (batch,)), _dense(log_probs, (batch, log_probs.shape[0], 2 * longest + 1))


def _multinomial(t: TensorSpec, num_samples: Any, replacement: bool = False, *, generator: Any = None) -> TensorSpec:
    return _dense(t, (*t.shape[:-1], num_samples), torch.int64)


_MISC = "whole"
grid_sampler_2d = _opaque(aten.grid_sampler_2d.default, _MISC, "Images sampled at the points of a grid.")
grid_sampler_3d = _opaque(aten.grid_sampler_3d.default, _MISC, "Volumes sampled at the points of a grid.")
grid_sampler_2d_backward = _opaque(
    aten.grid_sampler_2d_backward.default, _MISC, "Gradients of grid_sampler_2d.", _grid_sampler_backward
)
grid_sampler_3d_backward = _opaque(
    aten.grid_sampler_3d_backward.default, _MISC, "Gradients of grid_sampler_3d.", _grid_sampler_backward
)
embedding_bag = _opaque(aten._embedding_bag.default, _MISC, "Sums, means or maxima of bags of rows.", _embedding_bag)
embedding_bag_dense_backward = _opaque(
    aten._embedding_bag_dense_backward.default,
    _MISC,
    "Gradient of embedding_bag for the table.",
)
embedding_bag_per_sample_weights_backward = _opaque(
    aten._embedding_bag_per_sample_weights_backward.default,
    _MISC,
    "Gradient of embedding_bag for the sample weights.",
    lambda grad, weight, indices, *rest: _dense(grad, (indices.shape[0],)),
)
ctc_loss = _opaque(aten._ctc_loss.default, _MISC, "Connectionist temporal classification loss.")
ctc_loss_backward = _opaque(aten._ctc_loss_backward.default, _MISC, "Gradient of ctc_loss.")
histc = _opaque(
    aten.histc.default,
    _MISC,
    "Counts of the elements in `bins` equal intervals.",
    lambda t, bins=100, min=0, max=0: _dense(t, (bins,)),
)
mode = _opaque(
    aten.mode.default,
    _MISC,
    "The most frequent value along a dimension and its position.",
)
multinomial = _opaque(
    aten.multinomial.default, _MISC, "Row indices drawn with the given weights.", _multinomial, "effect"
)
poisson = _opaque(aten.poisson.default, _MISC, "Poisson variates with the given rates.", _preserved, "effect")
binomial = _opaque(aten.binomial.default, _MISC, "Binomial variates.", _preserved, "effect")
standard_gamma = _opaque(aten._standard_gamma.default, _MISC, "Gamma variates of rate 1.", _preserved, "effect")
standard_gamma_grad = _opaque(aten._standard_gamma_grad.default, _MISC, "d sample / d shape parameter.", _preserved)
sample_dirichlet = _opaque(aten._sample_dirichlet.default, _MISC, "Dirichlet variates.", _preserved, "effect")
dirichlet_grad = _opaque(aten._dirichlet_grad.default, _MISC, "Gradient of a Dirichlet sample.", _preserved)
randperm = _opaque(
    aten.randperm.default,
    _MISC,
    "A random permutation of 0..n-1.",
    lambda n, *, dtype=torch.int64, layout=None, device=None, pin_memory=None: TensorSpec(
        (n,), (1,), dtype or torch.int64, torch.device(device or "cpu")
    ),
    "effect",
)


fractional_max_pool2d = _opaque(
    aten.fractional_max_pool2d.default,
    _MISC,
    "Maxima over windows whose places are drawn (Graham 2014), with their flat positions; the draws are an argument.",
)
fractional_max_pool3d = _opaque(
    aten.fractional_max_pool3d.default,
    _MISC,
    "Maxima over drawn windows of volumes, with their flat positions.",
)


segment_reduce = _opaque(
    aten.segment_reduce.default, _MISC, "Reduction over consecutive segments of given lengths or offsets."
)
segment_reduce_backward = _opaque(
    aten._segment_reduce_backward.default,
    _MISC,
    "Gradient of segment_reduce.",
)


def _hashed(t: TensorSpec, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> TensorSpec:
    rank = len(t.shape)
    dims = {d % rank for d in dim} if dim and rank else set(range(rank))
    shape = [1 if d in dims else s for d, s in enumerate(t.shape) if keepdim or d not in dims]
    return _dense(t, shape, torch.uint64)


if hasattr(aten, "hash_tensor"):
    hash_tensor = _opaque(aten.hash_tensor.default, _MISC, "Exclusive or of the elements' bits.", _hashed)
cholesky_solve_helper = _opaque(
    aten._cholesky_solve_helper.default,
    _LINALG,
    "Solve A X = B from the Cholesky factor of A.",
    lambda b, factor, upper: _column_major(b, b.shape),
)
embedding_bag_forward_only = _opaque(
    aten._embedding_bag_forward_only.default, _MISC, "embedding_bag where no gradient is needed.", _embedding_bag
)


# --- sizes that depend on data, values that leave the graph ---------------------------------------
def _count(*specs: Any, least: int = 0, most: int | None = None) -> torch.SymInt:
    """A fresh size known only when the program runs, in the shape environment of the operands if they have one."""
    for spec in specs:
        if isinstance(spec, TensorSpec):
            for size in spec.shape:
                env = shape_env_of(size)
                if env is not None:
                    return env.unbacked(min=least, max=most)
    return ShapeEnv().unbacked(min=least, max=most)


def _nonzero(t: TensorSpec) -> TensorSpec:
    count = _count(t)
    return spec_like(t, (count, len(t.shape)), (1, count), torch.int64)


def _unique2(
    t: TensorSpec, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, ...]:
    count = _count(t)
    return (
        _dense(t, (count,)),
        _dense(t, t.shape if return_inverse else (0,), torch.int64),
        _dense(t, (count,) if return_counts else (0,), torch.int64),
    )


def _unique_dim(
    t: TensorSpec, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, ...]:
    count = _count(t)
    dim = dim % len(t.shape)
    shape = [*t.shape[:dim], count, *t.shape[dim + 1 :]]
    # The slices lie one after another in memory.
    strides = list(contiguous_strides([count, *shape[:dim], *shape[dim + 1 :]]))
    strides.insert(dim, strides.pop(0))
    return (spec_like(t, shape, strides), _dense(t, (t.shape[dim],), torch.int64), _dense(t, (count,), torch.int64))


def _unique_consecutive(
    t: TensorSpec, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Any, ...]:
    if dim is not None:
        return _unique_dim(t, dim)
    count = _count(t)
    return (
        _dense(t, (count,)),
        _dense(t, t.shape if return_inverse else (0,), torch.int64),
        _dense(t, (count,) if return_counts else (0,), torch.int64),
    )


def _bincount(t: TensorSpec, weights: TensorSpec | None = None, minlength: int = 0) -> TensorSpec:
    dtype = torch.int64 if weights is None else (weights.dtype if weights.dtype is torch.float32 else torch.float64)
    return _dense(t, (_count(t, least=minlength),), dtype)


def _local_scalar(t: TensorSpec) -> Any:
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return 0.0
    return _count(t, least=-(2**63))


_CONTROL = "data-dependent"
nonzero = _opaque(
    aten.nonzero.default,
    _CONTROL,
    "Row-major positions of the elements that are not zero, (count, rank) int64.",
    _nonzero,
    "dynamic",
)
unique2 = _opaque(aten._unique2.default, _CONTROL, "Distinct elements, positions, counts.", _unique2, "dynamic")
unique_dim = _opaque(
    aten.unique_dim.default, _CONTROL, "Distinct slices along a dimension, positions, counts.", _unique_dim, "dynamic"
)
unique_consecutive = _opaque(
    aten.unique_consecutive.default,
    _CONTROL,
    "Elements without consecutive repetitions.",
    _unique_consecutive,
    "dynamic",
)
unique_dim_consecutive = _opaque(
    aten.unique_dim_consecutive.default,
    _CONTROL,
    "Slices without consecutive repetitions.",
    lambda t, dim, return_inverse=False, return_counts=False: _unique_dim(t, dim),
    "dynamic",
)
bincount = _opaque(aten.bincount.default, _CONTROL, "How often each non-negative integer occurs.", _bincount, "dynamic")
local_scalar = _opaque(
    aten._local_scalar_dense.default,
    _CONTROL,
    "The value of a tensor with one element, as a Python number.",
    _local_scalar,
    "dynamic",
    name="local_scalar",
)
assert_async = _opaque(
    aten._assert_async.msg,
    _CONTROL,
    "Stop with a message unless a one-element tensor is true.",
    lambda t, message: None,
    "effect",
)
