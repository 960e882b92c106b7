"""A backend for the whole set of prims on numpy: one table entry a prim.

What is taken whole (linear algebra, special functions, samplers) goes to PyTorch's own kernels through `whole`: a
device without such a kernel does the same with its host's.
"""

from __future__ import annotations

import math

import convolutions
import numpy as np
import philox
import torch
import windows
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from primtorch.prims import PRIMS

DTYPES = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.uint64: np.uint64,
}


def to_numpy(tensor):
    return tensor.detach().numpy()


def to_torch(array):
    return torch.from_numpy(np.array(array))


def whole(prim):
    """The prim on PyTorch's kernels."""

    def call(*args, **kwargs):
        result = prim(*_mapped(to_torch, np.ndarray, args), **_mapped(to_torch, np.ndarray, kwargs))
        return _mapped(to_numpy, torch.Tensor, result)

    return call


def _mapped(function, kind, value):
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {k: _mapped(function, kind, v) for k, v in value.items()}
    return type(value)(_mapped(function, kind, v) for v in value) if isinstance(value, (tuple, list)) else value


# --- elementwise -----------------------------------------------------------------------------------
def like_operand(function):
    """numpy widens small integers in some functions; a prim's result has its operand's dtype."""
    return lambda x, *rest: np.asarray(function(x, *rest)).astype(x.dtype, copy=False)


def same_dtype(function):
    """Numbers take the tensor's dtype."""

    def call(a, b):
        dtype = (a if isinstance(a, np.ndarray) else b).dtype
        return np.asarray(function(np.asarray(a, dtype), np.asarray(b, dtype))).astype(dtype, copy=False)

    return call


def to_bool(function):
    return lambda a, b: function(*(np.asarray(v, (a if isinstance(a, np.ndarray) else b).dtype) for v in (a, b)))


def sign(x):
    if np.issubdtype(x.dtype, np.floating):
        return np.where(np.isnan(x), 0, np.sign(x))
    return np.sign(x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def erf(x):
    return np.frompyfunc(math.erf, 1, 1)(x)


def erfc(x):
    return np.frompyfunc(math.erfc, 1, 1)(x)


def trunc_div(a, b):
    return np.trunc(np.divide(a, b)) if np.issubdtype(a.dtype, np.floating) else np.fix(a / b)


def convert(x, dtype, rounded=False):
    if dtype is torch.bool:
        return x != 0
    return (x.real if np.iscomplexobj(x) and not dtype.is_complex else x).astype(DTYPES[dtype])


def where(condition, a, b):
    dtype = (a if isinstance(a, np.ndarray) else b).dtype
    return np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype))


# --- shape ---------------------------------------------------------------------------------------
def at(rank, dim, part):
    return (*(slice(None),) * dim, part, *(slice(None),) * (rank - dim - 1))


def pad(x, low, high, value):
    x = x[tuple(slice(max(-a, 0), n - max(-z, 0)) for n, a, z in zip(x.shape, low, high, strict=True))]
    grown = [(max(a, 0), max(z, 0)) for a, z in zip(low, high, strict=True)]
    return np.pad(x, grown, constant_values=np.asarray(value, x.dtype))


def expand_dims(x, dims):
    return np.expand_dims(x, tuple(dims)) if dims else x


def unfold(x, dim, size, step):
    return sliding_window_view(x, size, dim)[at(x.ndim + 1, dim, slice(None, None, step))]


def by_strides(x, shape, strides, offset):
    flat = np.ascontiguousarray(x).reshape(-1)[offset:]
    return as_strided(flat, shape, [s * x.itemsize for s in strides])


def slice_scatter(x, src, dim, start, stop, step):
    out = x.copy()
    out[at(x.ndim, dim, slice(start, stop, step))] = src
    return out


def as_strided_scatter(x, src, shape, strides, offset):
    out = np.array(x, order="C")
    by_strides(out, shape, strides, offset)[...] = src
    return out


# --- reductions and scans ----------------------------------------------------------------------------
def reduction(function):
    return lambda x, dims, keepdim=False: np.asarray(function(x, axis=tuple(dims), keepdims=keepdim)).astype(
        x.dtype, copy=False
    )


def position(function):
    def call(x, dims, keepdim=False):
        if dims:
            return np.asarray(function(x, axis=dims[0], keepdims=keepdim))
        flat = function(x.reshape(-1))
        return np.reshape(flat, (1,) * x.ndim if keepdim else ())

    return call


def var_mean(x, dims, correction, keepdim=False):
    mean = x.mean(tuple(dims), keepdims=True)
    count = math.prod(x.shape[d] for d in dims)
    var = np.square(x - mean).sum(tuple(dims), keepdims=keepdim) / np.asarray(max(0, count - correction), x.dtype)
    return var, mean if keepdim else mean.squeeze(tuple(dims))


def running(accumulate):
    """Values and the place of the last element that equals each."""

    def call(x, dim):
        values = accumulate(x, axis=dim)
        hit = (x == values) | (np.isnan(x) & np.isnan(values))
        place = np.arange(x.shape[dim]).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        return values, np.maximum.accumulate(np.where(hit, place, 0), axis=dim)

    return call


# --- indexing and order ------------------------------------------------------------------------------
def key(indices, wrap):
    if not wrap and any(i is not None and (i < 0).any() for i in indices):
        raise IndexError("a negative index, where none counts from the end")
    return tuple(slice(None) if i is None else i for i in indices)


def index_put(x, indices, values, accumulate, wrap):
    out = x.copy()
    if accumulate:
        np.add.at(out, key(indices, wrap), values)
    else:
        out[key(indices, wrap)] = values
    return out


def along(index, dim):
    """Advanced indices that read or write x[..., index, ...]."""
    grid = list(np.ogrid[tuple(slice(n) for n in index.shape)])
    grid[dim] = index
    return tuple(grid)


def gather(x, dim, index):
    return x[along(index, dim)]


def scatter(x, dim, index, src):
    out = x.copy()
    out[along(index, dim)] = src[tuple(slice(n) for n in index.shape)]
    return out


def scatter_with(function):
    def call(x, dim, index, src):
        out = x.copy()
        function.at(out, along(index, dim), src)
        return out

    return call


def scatter_reduce(x, dim, index, src, reduce, *, include_self):
    function, start = {
        "prod": (np.multiply, 1),
        "mean": (np.add, 0),
        "amax": (np.maximum, -np.inf),
        "amin": (np.minimum, np.inf),
    }[reduce]
    where_ = along(index, dim)
    hits = np.zeros(x.shape, np.int64)
    np.add.at(hits, where_, 1)
    out = x.copy() if include_self else np.where(hits > 0, np.asarray(start, x.dtype), x)
    function.at(out, where_, src)
    if reduce == "mean":
        out = (out / np.maximum(hits + bool(include_self), 1)).astype(x.dtype)
    return out


def sort(x, dim, descending, stable):
    if descending:  # reversed twice, so that equal elements keep their order
        order = x.shape[dim] - 1 - np.flip(np.argsort(np.flip(x, dim), dim, kind="stable"), dim)
    else:
        order = np.argsort(x, dim, kind="stable")
    return np.take_along_axis(x, order, dim), order


def topk(x, k, dim, largest, sorted):
    values, order = sort(x, dim, largest, True)
    first = at(x.ndim, dim, slice(k))
    return values[first], order[first]


def searchsorted(sequence, values, right):
    side = "right" if right else "left"
    if sequence.ndim == 1:
        return np.searchsorted(sequence, values, side)
    rows = zip(sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1]), strict=True)
    return np.stack([np.searchsorted(s, v, side) for s, v in rows]).reshape(values.shape)


# --- products ------------------------------------------------------------------------------------
def addmm(bias, a, b, *, beta=1, alpha=1):
    product = np.matmul(a, b) * np.asarray(alpha, a.dtype)
    return product if beta == 0 else bias * np.asarray(beta, a.dtype) + product


def fft_c2c(x, dim, normalization, forward):
    count = math.prod(x.shape[d] for d in dim)
    raw = np.fft.fftn(x, axes=dim) if forward else np.fft.ifftn(x, axes=dim) * count
    return (raw * {0: 1.0, 1: count**-0.5, 2: 1.0 / count}[normalization]).astype(x.dtype)


def _complex(re, im):
    return (re + 1j * im).astype(np.result_type(re.dtype, np.complex64))


TABLE = {
    **{
        n: like_operand(getattr(np, n))
        for n in (
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "floor",
            "ceil",
            "trunc",
        )
    },
    **{f"a{n}": like_operand(getattr(np, f"arc{n}")) for n in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{
        n: same_dtype(getattr(np, m))
        for n, m in (
            ("add", "add"),
            ("sub", "subtract"),
            ("mul", "multiply"),
            ("div", "divide"),
            ("floor_div", "floor_divide"),
            ("fmod", "fmod"),
            ("remainder", "remainder"),
            ("pow", "power"),
            ("maximum", "maximum"),
            ("minimum", "minimum"),
            ("fmax", "fmax"),
            ("fmin", "fmin"),
            ("atan2", "arctan2"),
            ("copysign", "copysign"),
            ("hypot", "hypot"),
            ("nextafter", "nextafter"),
            ("gcd", "gcd"),
            ("lcm", "lcm"),
            ("bitwise_and", "bitwise_and"),
            ("bitwise_or", "bitwise_or"),
            ("bitwise_xor", "bitwise_xor"),
            ("shift_left", "left_shift"),
            ("shift_right", "right_shift"),
        )
    },
    **{
        n: to_bool(getattr(np, m))
        for n, m in (
            ("eq", "equal"),
            ("ne", "not_equal"),
            ("lt", "less"),
            ("le", "less_equal"),
            ("gt", "greater"),
            ("ge", "greater_equal"),
        )
    },
    **{n: getattr(np, n) for n in ("isnan", "isinf", "isfinite", "signbit")},
    "abs": np.abs,
    "neg": np.negative,
    "sign": like_operand(sign),
    "round": like_operand(np.rint),
    "bitwise_not": np.invert,
    "conj": np.conj,
    "real": lambda x: x.real.copy(),
    "imag": lambda x: x.imag.copy(),
    "rsqrt": like_operand(lambda x: 1 / np.sqrt(x)),
    "reciprocal": like_operand(lambda x: 1 / x),
    "sigmoid": like_operand(sigmoid),
    "erf": like_operand(erf),
    "erfc": like_operand(erfc),
    "trunc_div": same_dtype(trunc_div),
    "where": where,
    "convert_element_type": convert,
    "bitcast": lambda x, dtype: np.ascontiguousarray(x).view(DTYPES[dtype]),
    "device_put": lambda x, device: x.copy(),
    "complex": _complex,
    "view_as_real": lambda x: np.stack([x.real, x.imag], -1),
    "view_as_complex": lambda x: _complex(x[..., 0], x[..., 1]),
    "full": lambda shape, value, dtype, device: np.full(shape, value, DTYPES[dtype]),
    "iota": lambda length, start, step, dtype, device: np.arange(length, dtype=DTYPES[dtype]) * step + start,
    "empty_strided": lambda shape, strides, dtype, device: np.zeros(shape, DTYPES[dtype]),
    "random_seed": lambda device: np.random.randint(0, 2**63 - 1, (), np.int64),
    "random_uniform": lambda seed, shape, stream=0, dtype=torch.float32: philox.uniform(
        seed, shape, stream, DTYPES[dtype]
    ),
    "random_bits": philox.bits,
    "expand": np.broadcast_to,
    "permute": np.transpose,
    "reshape": np.reshape,
    "squeeze": lambda x, dims: np.squeeze(x, tuple(dims)),
    "unsqueeze": expand_dims,
    "flip": np.flip,
    "slice": lambda x, dim, start, stop, step: x[at(x.ndim, dim, slice(start, stop, step))],
    "diagonal": np.diagonal,
    "unfold": unfold,
    "as_strided": by_strides,
    "cat": np.concatenate,
    "pad": pad,
    "copy_strided": lambda x, strides: x.copy(),
    "slice_scatter": slice_scatter,
    "as_strided_scatter": as_strided_scatter,
    "roll": np.roll,
    "sum": reduction(np.sum),
    "prod": reduction(np.prod),
    "amax": reduction(np.max),
    "amin": reduction(np.min),
    "all": reduction(np.all),
    "any": reduction(np.any),
    "argmax": position(np.argmax),
    "argmin": position(np.argmin),
    "var_mean": var_mean,
    "cumsum": like_operand(np.cumsum),
    "cumprod": like_operand(np.cumprod),
    "logcumsumexp": lambda x, dim: np.logaddexp.accumulate(x, axis=dim),
    "cummax": running(np.maximum.accumulate),
    "cummin": running(np.minimum.accumulate),
    "index": lambda x, indices, wrap: x[key(indices, wrap)],
    "index_put": index_put,
    "gather": gather,
    "scatter": scatter,
    "scatter_add": scatter_with(np.add),
    "scatter_reduce": scatter_reduce,
    "sort": sort,
    "topk": topk,
    "searchsorted": searchsorted,
    "nonzero": lambda x: np.stack(np.nonzero(x), 1),
    "max_pool": windows.max_pool,
    "avg_pool": windows.avg_pool,
    "mm": np.matmul,
    "bmm": np.matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "convolution": convolutions.convolution,
    "convolution_backward": convolutions.convolution_backward,
    "fft_c2c": fft_c2c,
    "local_scalar": lambda x: x.item(),
}


class NumpyBackend:
    """`backend.add(a, b)` computes the prim `add` on numpy arrays, and so on for all of them."""

    from_torch = staticmethod(to_numpy)

    def __getattr__(self, name):
        prim = PRIMS.get(name)
        if prim is None:
            raise AttributeError(name)
        function = TABLE.get(name)
        return arrays(function) if function is not None else whole(prim)


def arrays(function):
    """numpy gives scalars where a result has no dimensions."""

    def call(*args, **kwargs):
        with np.errstate(all="ignore"):
            result = function(*args, **kwargs)
        return (
            tuple(np.asarray(r) if r is not None else None for r in result)
            if isinstance(result, tuple)
            else (np.asarray(result) if isinstance(result, (np.ndarray, np.generic)) else result)
        )

    return call
