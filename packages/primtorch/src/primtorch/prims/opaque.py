"""Operators taken whole: linear algebra, Fourier transforms, special polynomials, samplers, data-dependent sizes.

Each is one ATen overload with the same arguments and results; a backend may call ATen for it.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from primtorch.prims.record import Meta, Pointwise, Prim, fresh_size, meta_of
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv

aten = torch.ops.aten


def _opaque(
    overload: OpOverload,
    family: str,
    doc: str,
    *tags: str,
    name: str | None = None,
    of: Pointwise | None = None,
    meta: Meta | None = None,
) -> Prim:
    """Shapes and strides are those of the overload's formula, unless `meta` gives them."""
    meta = meta or meta_of(overload)
    short = name or overload._schema.name.split("::")[1].lstrip("_")
    arguments = str(overload._schema).split("(", 1)[1]
    return Prim(f"{short}({arguments}", family, doc, meta, overload, frozenset({"opaque", *tags}), overload, of)


# --- linear algebra ------------------------------------------------------------------------------


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
)
cholesky_inverse = _opaque(
    aten.cholesky_inverse.default,
    _LINALG,
    "Inverse from a Cholesky factor.",
)
linalg_inv_ex = _opaque(aten.linalg_inv_ex.default, _LINALG, "Inverse, info.")
linalg_eigh = _opaque(aten._linalg_eigh.default, _LINALG, "Eigenvalues and vectors of a Hermitian matrix.")
linalg_eig = _opaque(aten.linalg_eig.default, _LINALG, "Eigenvalues and vectors of a square matrix.")
linalg_eigvals = _opaque(
    aten.linalg_eigvals.default,
    _LINALG,
    "Eigenvalues of a square matrix.",
)
linalg_svd = _opaque(aten._linalg_svd.default, _LINALG, "A = U diag(S) V^H.")
linalg_qr = _opaque(aten.linalg_qr.default, _LINALG, "A = Q R.")
linalg_householder_product = _opaque(
    aten.linalg_householder_product.default,
    _LINALG,
    "First columns of a product of Householder reflections.",
)
ormqr = _opaque(
    aten.ormqr.default,
    _LINALG,
    "Multiply by the Q of a QR factorisation.",
)
geqrf = _opaque(aten.geqrf.default, _LINALG, "QR as Householder reflections.")
linalg_solve_ex = _opaque(aten._linalg_solve_ex.default, _LINALG, "Solve A X = B.")
linalg_solve_triangular = _opaque(aten.linalg_solve_triangular.default, _LINALG, "Solve with a triangular matrix.")
triangular_solve = _opaque(aten.triangular_solve.default, _LINALG, "Solve with a triangular matrix; also a copy of it.")
linalg_lstsq = _opaque(aten.linalg_lstsq.default, _LINALG, "Least squares.")
linalg_ldl_factor_ex = _opaque(aten.linalg_ldl_factor_ex.default, _LINALG, "A = L D L^H, packed.")
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
pdist_forward = _opaque(aten._pdist_forward.default, _LINALG, "p-norm distances between pairs of rows.")
pdist_backward = _opaque(aten._pdist_backward.default, _LINALG, "Gradient of pdist.")


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
    return _opaque(overload, "special", doc, "pointwise", name=op, of=Pointwise(f"special_{op}", to_float=True))


def _polynomial(op: str, doc: str) -> Prim:
    of = Pointwise(f"special_{op}.|x_scalar|n_scalar", to_float=True)
    return _opaque(getattr(aten, f"special_{op}").default, "special", doc, "pointwise", name=op, of=of)


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
polygamma = _opaque(aten.polygamma.default, "special", "The n-th derivative of digamma.", "pointwise")


# --- samplers, grids, losses with loops over data ------------------------------------------------


_MISC = "whole"
grid_sampler_2d = _opaque(aten.grid_sampler_2d.default, _MISC, "Images sampled at the points of a grid.")
grid_sampler_3d = _opaque(aten.grid_sampler_3d.default, _MISC, "Volumes sampled at the points of a grid.")
grid_sampler_2d_backward = _opaque(aten.grid_sampler_2d_backward.default, _MISC, "Gradients of grid_sampler_2d.")
grid_sampler_3d_backward = _opaque(aten.grid_sampler_3d_backward.default, _MISC, "Gradients of grid_sampler_3d.")
embedding_bag = _opaque(aten._embedding_bag.default, _MISC, "Sums, means or maxima of bags of rows.")
embedding_bag_dense_backward = _opaque(
    aten._embedding_bag_dense_backward.default,
    _MISC,
    "Gradient of embedding_bag for the table.",
)
embedding_bag_per_sample_weights_backward = _opaque(
    aten._embedding_bag_per_sample_weights_backward.default,
    _MISC,
    "Gradient of embedding_bag for the sample weights.",
)
ctc_loss = _opaque(aten._ctc_loss.default, _MISC, "Connectionist temporal classification loss.")
ctc_loss_backward = _opaque(aten._ctc_loss_backward.default, _MISC, "Gradient of ctc_loss.")
histc = _opaque(
    aten.histc.default,
    _MISC,
    "Counts of the elements in `bins` equal intervals.",
)
mode = _opaque(
    aten.mode.default,
    _MISC,
    "The most frequent value along a dimension and its position.",
)
multinomial = _opaque(aten.multinomial.default, _MISC, "Row indices drawn with the given weights.", "effect")
poisson = _opaque(aten.poisson.default, _MISC, "Poisson variates with the given rates.", "effect")
binomial = _opaque(aten.binomial.default, _MISC, "Binomial variates.", "effect")
standard_gamma = _opaque(aten._standard_gamma.default, _MISC, "Gamma variates of rate 1.", "effect")
standard_gamma_grad = _opaque(aten._standard_gamma_grad.default, _MISC, "d sample / d shape parameter.")
sample_dirichlet = _opaque(aten._sample_dirichlet.default, _MISC, "Dirichlet variates.", "effect")
dirichlet_grad = _opaque(aten._dirichlet_grad.default, _MISC, "Gradient of a Dirichlet sample.")
randperm = _opaque(
    aten.randperm.default,
    _MISC,
    "A random permutation of 0..n-1.",
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


if hasattr(aten, "hash_tensor"):
    hash_tensor = _opaque(aten.hash_tensor.default, _MISC, "Exclusive or of the elements' bits.")
cholesky_solve_helper = _opaque(
    aten._cholesky_solve_helper.default,
    _LINALG,
    "Solve A X = B from the Cholesky factor of A.",
)
embedding_bag_forward_only = _opaque(
    aten._embedding_bag_forward_only.default, _MISC, "embedding_bag where no gradient is needed."
)


# --- sizes that depend on data, values that leave the graph ---------------------------------------
def _local_scalar(t: TensorSpec) -> float | torch.SymInt | torch.SymFloat:
    if t.dtype.is_complex:
        return 0.0
    if t.dtype.is_floating_point:
        return ShapeEnv().unbacked_float()
    return fresh_size((t,), None, -(2**63))


_CONTROL = "data-dependent"
nonzero = _opaque(
    aten.nonzero.default,
    _CONTROL,
    "Row-major positions of the elements that are not zero, (count, rank) int64.",
    "dynamic",
)
unique2 = _opaque(aten._unique2.default, _CONTROL, "Distinct elements, positions, counts.", "dynamic")
unique_dim = _opaque(
    aten.unique_dim.default, _CONTROL, "Distinct slices along a dimension, positions, counts.", "dynamic"
)
unique_consecutive = _opaque(
    aten.unique_consecutive.default,
    _CONTROL,
    "Elements without consecutive repetitions.",
    "dynamic",
)
unique_dim_consecutive = _opaque(
    aten.unique_dim_consecutive.default,
    _CONTROL,
    "Slices without consecutive repetitions.",
    "dynamic",
)
bincount = _opaque(aten.bincount.default, _CONTROL, "How often each non-negative integer occurs.", "dynamic")
local_scalar = _opaque(
    aten._local_scalar_dense.default,
    _CONTROL,
    "The value of a tensor with one element, as a Python number.",
    "dynamic",
    name="local_scalar",
    meta=_local_scalar,
)
assert_async = _opaque(
    aten._assert_async.msg,
    _CONTROL,
    "Stop with a message unless a one-element tensor is true.",
    "effect",
    meta=lambda t, message: None,
)
