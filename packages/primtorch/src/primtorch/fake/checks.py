"""What operators refuse: ranks, dtypes, sizes and options that eager rejects, with the type of error that it raises.

A check has its operator's arguments and runs before the operator's formula. What a check asks of a symbolic size
becomes a guard, as it must: with another size the program would raise.
"""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake import checks_random
from primtorch.fake.build import Formula
from primtorch.fake.check_table import WHOLE, Check, CheckTable, refuse
from primtorch.fake.number_ranges import refuse_overflow
from primtorch.layout import broadcast, wrap_dim, wrap_dims
from primtorch.promotion import TENSORS, promote_number

CHECKS = CheckTable(checks_random.CHECKS)


def checked(name: str, formula: Formula) -> Formula:
    """The formula behind its operator's check, where there is one."""
    check = CHECKS.get(name)
    if check is None:
        return formula

    @functools.wraps(formula)
    def both(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return formula(*args, **kwargs)

    return both


def _empty(size: Any) -> bool:
    return type(size) is int and size == 0


# --- elementwise ---------------------------------------------------------------------------------------------
@CHECKS.of("neg")
def _neg(x: Any) -> None:
    refuse(x.dtype is torch.bool, "Negation, the `-` operator, on a bool tensor is not supported")


_LOGIC = ("and", "or", "xor", "left_shift", "right_shift")


@CHECKS.of(
    *(f"bitwise_{op}.{kind}" for op in _LOGIC for kind in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor"))
)
def _bitwise(a: Any, b: Any) -> None:
    for x in (a, b):
        whole = x.dtype in WHOLE if isinstance(x, TENSORS) else not isinstance(x, float | complex)
        refuse(not whole, "a bitwise operator is not implemented for floating point", NotImplementedError)


@CHECKS.of("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar")
def _rest(a: Any, b: Any) -> None:
    truths = all(x.dtype is torch.bool if isinstance(x, TENSORS) else type(x) is bool for x in (a, b))
    refuse(truths, "the rest of a division is not implemented for 'Bool'", NotImplementedError)


@CHECKS.of("pow.Tensor_Scalar")
def _pow(x: Any, exponent: Any) -> None:
    wrong = x.dtype in WHOLE and type(exponent) is int and exponent < 0
    refuse(wrong, "Integers to negative integer powers are not allowed.")


@CHECKS.of("softshrink")
def _softshrink(x: Any, lambd: Any = 0.5) -> None:
    refuse(not (torch.is_tensor(lambd) or lambd >= 0), lambda: f"lambda must be in range [0, inf), but found {lambd}")


@CHECKS.of("gelu", "gelu_backward")
def _gelu(*args: Any, approximate: str = "none") -> None:
    refuse(approximate not in ("none", "tanh"), "approximate argument must be either none or tanh.")


@CHECKS.of("huber_loss")
def _huber_loss(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> None:
    refuse(delta <= 0, "huber_loss does not support non-positive values for delta.")


@CHECKS.of("complex")
def _complex(real: Any, imag: Any) -> None:
    floats = (torch.float16, torch.float32, torch.float64)
    refuse(
        real.dtype not in floats or imag.dtype not in floats,
        lambda: f"Expected both inputs to be Half, Float or Double tensors but got {real.dtype} and {imag.dtype}",
    )
    refuse(real.dtype is not imag.dtype, lambda: f"Expected {real.dtype} but got {imag.dtype} for second argument")


@CHECKS.of("masked_fill.Tensor", "masked_fill.Scalar")
def _masked_fill(x: Any, mask: Any, value: Any) -> None:
    refuse(mask.dtype is not torch.bool, lambda: f"masked_fill only supports boolean masks, but got dtype {mask.dtype}")
    if isinstance(value, TENSORS):
        refuse(
            value.dim() > 0,
            lambda: f"masked_fill only supports a 0-dimensional value, but got {value.dim()} dimension(s)",
        )
        refuse(value.dtype.is_complex and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}")
    else:
        refuse(isinstance(value, complex) and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}")
        refuse_overflow(value, x.dtype)


def _filled(value: Any, dtype: torch.dtype, size: Sequence[Any], device: Any) -> None:
    """A fill. One element on the CPU is set without a check where the dtype is narrower than float."""
    single = all(type(n) is int and n == 1 for n in size)
    if not (single and dtype in (torch.float16, torch.bfloat16) and torch.device(device or "cpu").type == "cpu"):
        refuse_overflow(value, dtype)


@CHECKS.of("full")
def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    if dtype is None and type(value) is float:
        dtype = torch.get_default_dtype()
    _filled(value, dtype or torch.int64, size, device)


@CHECKS.of("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    _filled(value, dtype or torch.get_default_dtype(), (), device)


@CHECKS.of("full_like")
def _full_like(x: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    _filled(value, dtype or x.dtype, x.shape, device or x.device)


@CHECKS.of("new_full")
def _new_full(
    x: Any, size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> None:
    _filled(value, dtype or x.dtype, size, device or x.device)


@CHECKS.of("fill.Scalar")
def _fill(x: Any, value: Any) -> None:
    _filled(value, x.dtype, x.shape, x.device)


@CHECKS.of("index_fill.int_Scalar")
def _index_fill(x: Any, dim: int, index: Any, value: Any) -> None:
    refuse_overflow(value, x.dtype)


@CHECKS.of("constant_pad_nd")
def _constant_pad(x: Any, pad: Sequence[Any], value: Any = 0) -> None:
    refuse_overflow(value, x.dtype)


@CHECKS.of("clamp", "clamp_min", "clamp_max")
def _clamp(x: Any, *limits: Any, **named: Any) -> None:
    for limit in (*limits, *named.values()):
        if type(limit) in (int, float):
            refuse_overflow(limit, promote_number(x.dtype, limit))


@CHECKS.of("masked_scatter")
def _masked_scatter(x: Any, mask: Any, source: Any) -> None:
    refuse(mask.dtype is not torch.bool, lambda: f"masked_scatter_ only supports boolean masks, but got {mask.dtype}")
    refuse(
        x.dtype is not source.dtype, lambda: f"masked_scatter: expected {x.dtype} and got {source.dtype} for the source"
    )


# --- creation ------------------------------------------------------------------------------------------------
@CHECKS.of("arange", "arange.start", "arange.start_step")
def _arange(*given: Any, step: Any = 1, **options: Any) -> None:
    ends = (0, *given) if len(given) == 1 else given
    start, end, step = ends if len(ends) == 3 else (*ends, step)
    finite = all(not isinstance(v, float) or math.isfinite(v) for v in (start, end))
    refuse(not finite, lambda: f"unsupported range: {start} -> {end}")
    refuse(not isinstance(step, torch.SymInt) and step == 0, "step must be nonzero")


@CHECKS.of(*(f"{name}.{kind}" for name in ("linspace", "logspace")
       for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))  # fmt: skip
def _range_ends(start: Any, end: Any, steps: Any, *args: Any, **options: Any) -> None:
    ranks = [v.dim() for v in (start, end) if isinstance(v, TENSORS)]
    refuse(any(ranks), lambda: f"only supports 0-dimensional start and end tensors, but got {ranks} dimension(s)")


@CHECKS.of("empty_permuted")
def _empty_permuted(size: Sequence[Any], physical_layout: Sequence[int], **options: Any) -> None:
    refuse(len(size) != len(physical_layout), "Number of dimensions in size does not match the physical_layout")
    refuse(
        any(not 0 <= d < len(size) for d in physical_layout),
        lambda: f"Dimension out of range in {list(physical_layout)}",
    )
    refuse(len(set(physical_layout)) != len(size), "Duplicate dim not allowed")


# --- views and joins -----------------------------------------------------------------------------------------
@CHECKS.of("diag_embed")
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> None:
    first, second = wrap_dim(dim1, x.dim() + 1), wrap_dim(dim2, x.dim() + 1)
    refuse(first == second, lambda: f"diagonal dimensions cannot be identical {dim1}, {dim2}")


@CHECKS.of("roll")
def _roll(x: Any, shifts: Any, dims: Any = ()) -> None:
    moves = shifts if isinstance(shifts, list | tuple) else (shifts,)
    along = dims if isinstance(dims, list | tuple) else (dims,)
    refuse(not moves, "`shifts` required")
    refuse(
        len(moves) != len(along) and not (not along and len(moves) == 1),
        lambda: f"shifts and dimensions must align. shifts: {len(moves)}, dims:{len(along)}",
    )
    for dim in along:
        refuse(x.dim() == 0, lambda: f"Dimension specified as {dim} but tensor has no dimensions", IndexError)
        wrap_dim(dim, x.dim())


@CHECKS.of("flip")
def _flip(x: Any, dims: Sequence[int]) -> None:
    wrap_dims(dims, x.dim())


@CHECKS.of("pixel_shuffle")
def _pixel_shuffle(x: Any, upscale_factor: int) -> None:
    refuse(x.dim() < 3, lambda: f"pixel_shuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    refuse(upscale_factor <= 0, lambda: f"pixel_shuffle expects a positive upscale_factor, but got {upscale_factor}")
    refuse(
        x.shape[-3] % (upscale_factor * upscale_factor) != 0,
        "pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor",
    )


@CHECKS.of("pixel_unshuffle")
def _pixel_unshuffle(x: Any, downscale_factor: int) -> None:
    refuse(x.dim() < 3, lambda: f"pixel_unshuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    refuse(
        downscale_factor <= 0,
        lambda: f"pixel_unshuffle expects a positive downscale_factor, but got {downscale_factor}",
    )
    refuse(
        x.shape[-1] % downscale_factor != 0 or x.shape[-2] % downscale_factor != 0,
        "pixel_unshuffle expects height and width to be divisible by downscale_factor",
    )


@CHECKS.of("rot90")
def _rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    refuse(len(dims) != 2, lambda: f"expected total rotation dims == 2, but got dims = {len(dims)}")
    refuse(x.dim() < 2, lambda: f"expected total dims >= 2, but got total dims = {x.dim()}")
    first, second = (d + x.dim() if d < 0 else d for d in dims)
    refuse(first == second, lambda: f"expected rotation dims to be different, but got {dims[0]} and {dims[1]}")


@CHECKS.of("narrow_copy")
def _narrow_copy(x: Any, dim: int, start: Any, length: Any) -> None:
    refuse(dim >= x.dim(), lambda: f"Expected dim < {x.dim()}, but got {dim}")
    size = x.shape[wrap_dim(dim, x.dim())]
    refuse(start > size or start < -size, lambda: f"start out of range [{-size}, {size}], but got {start}", IndexError)
    begin = start + size if start < 0 else start
    refuse(
        length < 0 or begin + length > size,
        lambda: f"start ({begin}) + length ({length}) exceeds dimension size ({size}).",
    )


@CHECKS.of("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> None:
    refuse(not tensors, "torch.cat(): expected a non-empty list of Tensors", ValueError)


@CHECKS.of("_chunk_cat")
def _chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> None:
    refuse(num_chunks < 1, "_chunk_cat expects positive num_chunks")
    refuse(not tensors, "_chunk_cat expects a non-empty input tensor list")
    refuse(any(_empty(s) for t in tensors for s in t.shape), "_chunk_cat expects non-empty tensor")
    ranks = {t.dim() for t in tensors}
    refuse(dim < 0 and len(ranks) > 1, "_chunk_cat expects non-negative dim when input tensors have different ndims")
    at = dim if dim >= 0 else wrap_dim(dim, min(ranks))
    refuse(at >= min(ranks), "_chunk_cat expects dim < ndim for all input tensors")
    lead = tuple(tensors[0].shape[:at])
    refuse(any(tuple(t.shape[:at]) != lead for t in tensors), "_chunk_cat expects same sizes of 0,...,dim-1 dimensions")


@CHECKS.of("trace")
def _trace(x: Any) -> None:
    refuse(x.dim() != 2, lambda: f"trace: expected a matrix, but got tensor with dim {x.dim()}")


# --- indexing ------------------------------------------------------------------------------------------------
def _index_dtype(name: str, index: Any) -> None:
    if any(_empty(s) for s in index.shape):
        return
    refuse(index.dtype not in (torch.int64, torch.int32), lambda: f"{name}(): Expected dtype int32/int64 for index")


@CHECKS.of("gather")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> None:
    at = wrap_dim(dim, x.dim())
    _index_dtype("gather", index)
    if x.dim() != index.dim() or any(_empty(s) for s in index.shape):
        return
    for d in range(x.dim()):
        refuse(
            d != at and index.shape[d] > x.shape[d],
            lambda: (
                f"Size does not match at dimension {d} expected index {list(index.shape)} to be no larger than self "
                f"{list(x.shape)} apart from dimension {at}"
            ),
        )


@CHECKS.of("scatter.src", "scatter.reduce", "scatter_add", "scatter_reduce.two",
     "scatter.value", "scatter.value_reduce")  # fmt: skip
def _scatter(x: Any, dim: int, index: Any, src: Any, *args: Any, **options: Any) -> None:
    at = wrap_dim(dim, x.dim())
    if any(_empty(s) for s in index.shape):
        return
    _index_dtype("scatter", index)
    refuse(
        max(x.dim(), 1) != max(index.dim(), 1), "Index tensor must have the same number of dimensions as self tensor"
    )
    if isinstance(src, TENSORS):
        refuse(x.dtype is not src.dtype, "scatter(): Expected self.dtype to be equal to src.dtype")
        refuse(
            max(src.dim(), 1) != max(index.dim(), 1),
            "Index tensor must have the same number of dimensions as src tensor",
        )
    for d in range(index.dim() if x.dim() else 0):
        large = d != at and index.shape[d] > x.shape[d]
        beyond = isinstance(src, TENSORS) and src.dim() > 0 and index.shape[d] > src.shape[d]
        refuse(
            large or beyond,
            lambda: (
                f"Expected index {list(index.shape)} to be no larger than self {list(x.shape)} apart from "
                f"dimension {at} and to be no larger than src"
            ),
        )


@CHECKS.of("index_add")
def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> None:
    at = wrap_dim(dim, x.dim())
    refuse(index.dim() > 1, "index_add_(): Index is supposed to be a vector", IndexError)
    refuse(x.dtype is not source.dtype, "index_add_(): self and source must have the same scalar type")
    if not x.dim() or not source.dim():
        return
    refuse(
        index.dim() == 1 and index.shape[0] != source.shape[wrap_dim(dim, source.dim())],
        lambda: f"index_add_(): Number of indices should be equal to source.size(dim), for dim: {dim}",
    )
    own, given = list(x.shape), list(source.shape)
    refuse(
        len(own) != len(given) or any(a != b for d, (a, b) in enumerate(zip(own, given, strict=True)) if d != at),
        lambda: (
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {own} source.shape = {given}"
        ),
    )


@CHECKS.of("index_select")
def _index_select(x: Any, dim: int, index: Any) -> None:
    wrap_dim(dim, x.dim())
    refuse(index.dim() > 1, "index_select(): Index is supposed to be a vector", IndexError)
    refuse(index.dtype not in (torch.int64, torch.int32), "index_select(): Expected dtype int32 or int64 for index")


@CHECKS.of("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any], **options: Any) -> None:
    common: tuple[Any, ...] = ()
    for index in indices:
        if index is None or index.dtype in (torch.bool, torch.uint8):
            continue
        refuse(
            index.dtype not in (torch.int64, torch.int32),
            "tensors used as indices must be long, int, byte or bool tensors",
            IndexError,
        )
        try:
            common = broadcast(common, tuple(index.shape))
        except RuntimeError:
            shapes = ", ".join(str(list(i.shape)) for i in indices if i is not None)
            raise IndexError(
                f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
            ) from None


@CHECKS.of("embedding")
def _embedding(weight: Any, indices: Any, *args: Any) -> None:
    refuse(weight.dim() != 2, "'weight' must be 2-D")
    refuse(
        indices.dtype not in (torch.int64, torch.int32),
        lambda: f"Expected tensor for argument #1 'indices' to be Long or Int; but got {indices.dtype}",
    )


@CHECKS.of("bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, **options: Any) -> None:
    refuse(boundaries.dim() != 1, lambda: f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


# --- reductions and linear algebra ---------------------------------------------------------------------------
@CHECKS.of("kthvalue")
def _kthvalue(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> None:
    size = x.shape[wrap_dim(dim, x.dim())] if x.dim() else 1
    refuse(k < 1 or k > size, lambda: f"kthvalue(): selected number k out of range for dimension {dim}")


def _want_elements(x: Any, dims: Sequence[int], name: str) -> None:
    for d in dims:
        at = wrap_dim(d, x.dim())
        refuse(
            bool(x.dim()) and _empty(x.shape[at]),
            lambda: f"{name}(): Expected reduction dim {at} to have non-zero size.",
            IndexError,
        )


_OF_NOTHING = "Expected reduction dim to be specified for input.numel() == 0. Specify it with 'dim'"


@CHECKS.of("amax", "amin")
def _extremum(x: Any, dim: Any = (), keepdim: bool = False) -> None:
    refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    refuse(any(map(_empty, x.shape)) and not dims, _OF_NOTHING)
    _want_elements(x, dims, "amax or amin")


@CHECKS.of("aminmax")
def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> None:
    refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    if dim is not None:
        _want_elements(x, (dim,), "aminmax")
    else:
        refuse(any(map(_empty, x.shape)), "aminmax(): cannot compute aminmax over an empty dimension")


@CHECKS.of("max", "min")
def _extremum_of_all(x: Any) -> None:
    refuse(any(map(_empty, x.shape)), _OF_NOTHING)


@CHECKS.of("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode")
def _element_along(x: Any, dim: int = -1, keepdim: bool = False) -> None:
    _want_elements(x, (dim,), "max, min, median or mode")


@CHECKS.of("argmax", "argmin")
def _place_of_extremum(x: Any, dim: int | None = None, keepdim: bool = False) -> None:
    refuse(dim is None and any(map(_empty, x.shape)), _OF_NOTHING, IndexError)
    if dim is not None:
        _want_elements(x, (dim,), "argmax or argmin")


@CHECKS.of("linalg_vector_norm")
def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, *args: Any, **options: Any) -> None:
    if ord >= 0 and ord != math.inf:
        return  # of no elements it is zero
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim or range(x.dim())
    nothing = bool(x.dim()) and any(_empty(x.shape[wrap_dim(d, x.dim())]) for d in dims)
    refuse(nothing, lambda: f"linalg.vector_norm cannot compute the {ord} norm of no elements: it has no identity")


@CHECKS.of("dist")
def _dist(x: Any, y: Any, p: Any = 2) -> None:
    _vector_norm(x if any(map(_empty, x.shape)) else y, p)


@CHECKS.of("native_layer_norm")
def _layer_norm(x: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float) -> None:
    shape = list(normalized_shape)
    refuse(not shape, "Expected normalized_shape to be at least 1-dimensional")
    for name, given in (("weight", weight), ("bias", bias)):
        refuse(
            given is not None and list(given.shape) != shape,
            lambda: f"Expected {name} to be of same shape as normalized_shape {shape}",
        )
    refuse(
        x.dim() < len(shape) or list(x.shape[x.dim() - len(shape) :]) != shape,
        lambda: f"Given normalized_shape={shape}, expected input with shape [*, {shape}], but got {list(x.shape)}",
    )


@CHECKS.of("renorm")
def _renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> None:
    refuse(x.dim() < 2, lambda: f"renorm: input needs at least 2 dimensions, got {x.dim()} dimensions")


def _square(name: str) -> None:
    def check(a: Any, *args: Any, **options: Any) -> None:
        refuse(a.dim() < 2, lambda: f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
        refuse(
            a.shape[-1] != a.shape[-2],
            lambda: (
                f"linalg.{name}: A must be batches of square matrices, but they are {a.shape[-2]} by "
                f"{a.shape[-1]} matrices"
            ),
        )

    CHECKS[name] = check


for _name in ("linalg_cholesky_ex", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "linalg_eig",
              "linalg_matrix_exp", "linalg_ldl_factor_ex", "cholesky"):  # fmt: skip
    _square(_name)


@CHECKS.of("linalg_qr", "linalg_lu", "linalg_lu_factor_ex", "_linalg_svd")
def _matrix(a: Any, *args: Any, **options: Any) -> None:
    refuse(a.dim() < 2, lambda: f"The input tensor A must have at least 2 dimensions, but it has {a.dim()}.")


@CHECKS.of("_linalg_solve_ex")
def _solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> None:
    CHECKS["linalg_inv_ex"](a)
    # As eager has it, b is a vector, or a batch of them, where it has a's batch dims and one more.
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and list(b.shape) == list(a.shape[:-1]))
    rows = b.shape[-1] if vector or not left else b.shape[-2]
    refuse(
        rows != a.shape[-1],
        lambda: f"linalg.solve: Incompatible shapes of A and B ({list(a.shape)} and {list(b.shape)})",
    )


@CHECKS.of("linalg_cross")
def _cross(x: Any, other: Any, *, dim: int = -1) -> None:
    refuse(x.dim() != other.dim(), "linalg.cross: inputs must have the same number of dimensions.")
    at = wrap_dim(dim, x.dim())
    refuse(
        x.shape[at] != 3 or other.shape[at] != 3,
        lambda: f"linalg.cross: inputs dimension {dim} must have length 3. Got {x.shape[at]} and {other.shape[at]}",
    )


@CHECKS.of("ormqr")
def _ormqr(x: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> None:
    refuse(x.dim() < 2 or other.dim() < 2, "torch.ormqr: input and other must have at least 2 dimensions.")
    rows = other.shape[-2] if left else other.shape[-1]
    smaller = rows if rows < x.shape[-1] else x.shape[-1]
    refuse(tau.shape[-1] > x.shape[-1] or tau.shape[-1] != smaller, "torch.ormqr: tau.shape[-1] does not fit")


@CHECKS.of("linalg_lstsq")
def _lstsq(x: Any, other: Any, *args: Any, **options: Any) -> None:
    refuse(x.dim() < 2, "torch.linalg.lstsq: input must have at least 2 dimensions.")
    refuse(other.dim() < 1, "torch.linalg.lstsq: other must have at least 1 dimension.")


# --- windows -------------------------------------------------------------------------------------------------
@CHECKS.of("convolution", "convolution_overrideable")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> None:
    refuse(any(d <= 0 for d in dilation), "dilation should be greater than zero")
    refuse(any(s <= 0 for s in stride), "non-positive stride is not supported")
    refuse(any(p < 0 for p in padding), "negative padding is not supported")
    channels = weight.shape[0] if not transposed else weight.shape[1] * rest[-1]
    refuse(
        bias is not None and (bias.dim() != 1 or bias.shape[0] != channels),
        lambda: (
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {channels} elements"
        ),
    )


def _check_window(kernel: Any, padding: Any, dilation: Any) -> None:
    wide = max(len(kernel), len(padding), len(dilation))
    k, p, d = (list(v) * wide if len(v) == 1 else list(v) for v in (kernel, padding, dilation))
    for size, pad, spread in zip(k, p, d, strict=False):
        refuse(pad < 0, lambda: f"pad must be non-negative, but got pad: {pad}")
        refuse(
            pad > (spread * (size - 1) + 1) // 2,
            lambda: (
                f"pad should be at most half of effective kernel size, but got pad={pad}, kernel_size={size} and "
                f"dilation={spread}"
            ),
        )


def _check_pooled_rank(x: Any, spatial: int) -> None:
    refuse(
        x.dim() not in (spatial + 1, spatial + 2),
        lambda: f"non-empty {spatial + 1}D or {spatial + 2}D (batch mode) tensor expected for input",
    )


@CHECKS.of("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(x: Any, output_size: Sequence[Any]) -> None:
    refuse(
        any(map(_empty, x.shape[-len(output_size) :])),
        lambda: f"adaptive_avg_pool: Expected input to have non-zero size for pooled dimensions, not {list(x.shape)}",
    )


_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")


@CHECKS.of(*(f"upsample_{kind}" for kind in _UPSAMPLED), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)))
def _upsample(x: Any, output_size: Sequence[Any], *args: Any, **options: Any) -> None:
    sizes = *x.shape[2:], *output_size
    refuse(any(map(_empty, sizes)), lambda: f"Input and output sizes should be greater than 0, but got {sizes}")
    refuse(_empty(x.shape[1]), lambda: f"Non-empty data tensor expected but got a tensor with sizes {list(x.shape)}")


def _max_pool(spatial: int) -> Check:
    def check(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
    ) -> None:
        _check_pooled_rank(x, spatial)
        _check_window(kernel_size, padding, dilation)
        inner = x.shape[x.dim() - spatial - 1 :]
        refuse(any(_empty(s) for s in inner), "Expected input's non-batch dimensions to have positive length")

    return check


def _avg_pool(spatial: int) -> Check:
    def check(
        x: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        _check_pooled_rank(x, spatial)
        _check_window(kernel_size, padding, (1,))
        refuse(divisor_override == 0, "divisor must be not zero")

    return check


CHECKS.update({f"max_pool{n}d_with_indices": _max_pool(n) for n in (2, 3)})
CHECKS.update({f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)})


def _adaptive(rank: int) -> Check:
    def check(x: Any, output_size: Sequence[Any]) -> None:
        refuse(len(output_size) != rank, lambda: f"adaptive_max_pool{rank}d(): output_size must have {rank} elements")
        refuse(any(s < 0 for s in output_size), lambda: f"negative dimension in output_size {list(output_size)}")

    return check


CHECKS["adaptive_max_pool2d"] = _adaptive(2)
CHECKS["adaptive_max_pool3d"] = _adaptive(3)


@CHECKS.of("max_unpool2d", "max_unpool3d")
def _max_unpool(x: Any, indices: Any, *args: Any) -> None:
    refuse(
        indices.dtype is not torch.int64, lambda: f"elements in indices should be type int64 but got {indices.dtype}"
    )
    refuse(
        tuple(x.shape) != tuple(indices.shape),
        lambda: (
            f"Expected shape of indices to be same as that of the input tensor ({list(x.shape)}) but got "
            f"{list(indices.shape)}"
        ),
    )


# --- losses --------------------------------------------------------------------------------------------------
def _check_rows(x: Any) -> None:
    shape = x.shape
    refuse(
        x.dim() > 2 or (bool(shape) and _empty(shape[-1])),
        lambda: f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(shape)}",
    )


@CHECKS.of("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(x: Any, target: Any, *args: Any) -> None:
    refuse(
        target.dtype not in (torch.int64, torch.uint8),
        lambda: f"expected target dtype to be Long or Byte, but got {target.dtype}",
    )


@CHECKS.of("multi_margin_loss")
def _multi_margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> None:
    refuse(p not in (1, 2), "multi_margin_loss: only p == 1 and p == 2 supported")
    _check_rows(x)
    rows = x.shape[0] if x.dim() == 2 else 1
    refuse(
        target.dim() > 1 or (target.dim() == 1 and target.shape[0] != rows),
        lambda: f"multi_margin_loss: target tensor should be 1-D with one element a sample, got {list(target.shape)}",
    )
    refuse(target.dtype is not torch.int64, lambda: f"expected scalar type Long but found {target.dtype}")
    classes = x.shape[-1] if x.dim() else 1
    refuse(
        weight is not None and (weight.dim() > 1 or weight.numel() != classes),
        lambda: f"inconsistent weight size, expected {classes}",
    )


@CHECKS.of("multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> None:
    _check_rows(x)
    fits = x.numel() == target.numel() if x.dim() < 2 else tuple(x.shape) == tuple(target.shape)
    refuse(not fits, lambda: f"inconsistent target size: {list(target.shape)} for input of size: {list(x.shape)}")
