"""What operators refuse: ranks, dtypes, sizes and options that eager rejects, with the type of error that it raises.

A check has its operator's arguments and runs before the operator's formula. What a check asks of a symbolic size
becomes a guard, as it must: with another size the program would raise.
"""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from primtorch.fake.build import Formula
from primtorch.fake.layout import broadcast, wrap_dim, wrap_dims
from primtorch.fake.number_ranges import refuse_overflow
from primtorch.fake.promotion import TENSORS, promote_number

Check: TypeAlias = Callable[..., None]
C = TypeVar("C", bound=Check)
CHECKS: dict[str, Check] = {}
"""By operator name, as the tables of formulas."""


_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                    torch.uint16, torch.uint32, torch.uint64})  # fmt: skip


def _of(*names: str) -> Callable[[C], C]:
    def register(check: C) -> C:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


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


def _refuse(wrong: bool, message: str | Callable[[], str], error: type[Exception] = RuntimeError) -> None:
    if wrong:
        raise error(message if isinstance(message, str) else message())


def _empty(size: Any) -> bool:
    return type(size) is int and size == 0


# --- elementwise ---------------------------------------------------------------------------------------------
@_of("neg")
def _neg(x: Any) -> None:
    _refuse(x.dtype is torch.bool, "Negation, the `-` operator, on a bool tensor is not supported")


_LOGIC = ("and", "or", "xor", "left_shift", "right_shift")


@_of(*(f"bitwise_{op}.{kind}" for op in _LOGIC for kind in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor")))
def _bitwise(a: Any, b: Any) -> None:
    for x in (a, b):
        whole = x.dtype in _WHOLE if isinstance(x, TENSORS) else not isinstance(x, float | complex)
        _refuse(not whole, "a bitwise operator is not implemented for floating point", NotImplementedError)


@_of("softshrink")
def _softshrink(x: Any, lambd: Any = 0.5) -> None:
    _refuse(not (torch.is_tensor(lambd) or lambd >= 0), lambda: f"lambda must be in range [0, inf), but found {lambd}")


@_of("gelu", "gelu_backward")
def _gelu(*args: Any, approximate: str = "none") -> None:
    _refuse(approximate not in ("none", "tanh"), "approximate argument must be either none or tanh.")


@_of("huber_loss")
def _huber_loss(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> None:
    _refuse(delta <= 0, "huber_loss does not support non-positive values for delta.")


@_of("complex")
def _complex(real: Any, imag: Any) -> None:
    floats = (torch.float16, torch.float32, torch.float64)
    _refuse(
        real.dtype not in floats or imag.dtype not in floats,
        lambda: f"Expected both inputs to be Half, Float or Double tensors but got {real.dtype} and {imag.dtype}",
    )
    _refuse(real.dtype is not imag.dtype, lambda: f"Expected {real.dtype} but got {imag.dtype} for second argument")


@_of("masked_fill.Tensor", "masked_fill.Scalar")
def _masked_fill(x: Any, mask: Any, value: Any) -> None:
    _refuse(
        mask.dtype is not torch.bool, lambda: f"masked_fill only supports boolean masks, but got dtype {mask.dtype}"
    )
    if isinstance(value, TENSORS):
        _refuse(
            value.dim() > 0,
            lambda: f"masked_fill only supports a 0-dimensional value, but got {value.dim()} dimension(s)",
        )
        _refuse(value.dtype.is_complex and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}")
    else:
        _refuse(
            isinstance(value, complex) and not x.dtype.is_complex, lambda: f"value cannot be converted to {x.dtype}"
        )
        refuse_overflow(value, x.dtype)


def _filled(value: Any, dtype: torch.dtype, size: Sequence[Any], device: Any) -> None:
    """A fill. One element on the CPU is set without a check where the dtype is narrower than float."""
    single = all(type(n) is int and n == 1 for n in size)
    if not (single and dtype in (torch.float16, torch.bfloat16) and torch.device(device or "cpu").type == "cpu"):
        refuse_overflow(value, dtype)


@_of("full")
def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    if dtype is None and type(value) is float:
        dtype = torch.get_default_dtype()
    _filled(value, dtype or torch.int64, size, device)


@_of("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    _filled(value, dtype or torch.get_default_dtype(), (), device)


@_of("full_like")
def _full_like(x: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    _filled(value, dtype or x.dtype, x.shape, device or x.device)


@_of("new_full")
def _new_full(
    x: Any, size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> None:
    _filled(value, dtype or x.dtype, size, device or x.device)


@_of("fill.Scalar")
def _fill(x: Any, value: Any) -> None:
    _filled(value, x.dtype, x.shape, x.device)


@_of("index_fill.int_Scalar")
def _index_fill(x: Any, dim: int, index: Any, value: Any) -> None:
    refuse_overflow(value, x.dtype)


@_of("constant_pad_nd")
def _constant_pad(x: Any, pad: Sequence[Any], value: Any = 0) -> None:
    refuse_overflow(value, x.dtype)


@_of("clamp", "clamp_min", "clamp_max")
def _clamp(x: Any, *limits: Any, **named: Any) -> None:
    for limit in (*limits, *named.values()):
        if type(limit) in (int, float):
            refuse_overflow(limit, promote_number(x.dtype, limit))


@_of("masked_scatter")
def _masked_scatter(x: Any, mask: Any, source: Any) -> None:
    _refuse(mask.dtype is not torch.bool, lambda: f"masked_scatter_ only supports boolean masks, but got {mask.dtype}")
    _refuse(
        x.dtype is not source.dtype, lambda: f"masked_scatter: expected {x.dtype} and got {source.dtype} for the source"
    )


# --- draws ---------------------------------------------------------------------------------------------------
def _draw(name: str, default: Sequence[float], right: Callable[..., bool], message: str) -> None:
    def check(x: Any, *given: float, generator: Any = None, **named: float) -> None:
        values = [*given, *named.values()]
        _refuse(not right(*values, *default[len(values) :]), lambda: f"{name} expects {message}")

    CHECKS[name] = check


_draw("cauchy", (0.0, 1.0), lambda median, sigma: sigma > 0, "sigma > 0.0")
_draw("log_normal", (1.0, 2.0), lambda mean, std: std > 0, "std > 0.0")
_draw("exponential", (1.0,), lambda rate: rate > 0, "lambda > 0.0")
_draw("geometric", (), lambda p: 0 < p < 1, "p to be in (0, 1)")
_draw("uniform", (0.0, 1.0), lambda low, high: low <= high, "from <= to")
_draw("normal_functional", (0.0, 1.0), lambda mean, std: std >= 0, "std >= 0.0")


@_of("normal.Tensor_float", "normal.float_float")
def _normal(mean: Any, std: Any = 1.0, *args: Any, **options: Any) -> None:
    _refuse(std < 0, lambda: f"normal expects std >= 0.0, but found std {std}")


@_of("multinomial")
def _multinomial(x: Any, num_samples: Any, replacement: bool = False, *, generator: Any = None) -> None:
    _refuse(x.dim() not in (1, 2), "prob_dist must be 1 or 2 dim")
    _refuse(
        not x.dtype.is_floating_point,
        lambda: f"multinomial only supports floating-point dtypes for input, got {x.dtype}",
    )
    _refuse(num_samples <= 0, "cannot sample n_sample <= 0 samples")
    _refuse(
        not replacement and num_samples > x.shape[-1],
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )
    _refuse(type(x.shape[-1]) is int and x.shape[-1] > 2**24, "number of categories cannot exceed 2^24")


# --- creation ------------------------------------------------------------------------------------------------
@_of("arange", "arange.start", "arange.start_step")
def _arange(*given: Any, step: Any = 1, **options: Any) -> None:
    ends = (0, *given) if len(given) == 1 else given
    start, end, step = ends if len(ends) == 3 else (*ends, step)
    finite = all(not isinstance(v, float) or math.isfinite(v) for v in (start, end))
    _refuse(not finite, lambda: f"unsupported range: {start} -> {end}")
    _refuse(not isinstance(step, torch.SymInt) and step == 0, "step must be nonzero")


@_of(*(f"{name}.{kind}" for name in ("linspace", "logspace")
       for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))  # fmt: skip
def _range_ends(start: Any, end: Any, steps: Any, *args: Any, **options: Any) -> None:
    ranks = [v.dim() for v in (start, end) if isinstance(v, TENSORS)]
    _refuse(any(ranks), lambda: f"only supports 0-dimensional start and end tensors, but got {ranks} dimension(s)")


@_of("empty_permuted")
def _empty_permuted(size: Sequence[Any], physical_layout: Sequence[int], **options: Any) -> None:
    _refuse(len(size) != len(physical_layout), "Number of dimensions in size does not match the physical_layout")
    _refuse(
        any(not 0 <= d < len(size) for d in physical_layout),
        lambda: f"Dimension out of range in {list(physical_layout)}",
    )
    _refuse(len(set(physical_layout)) != len(size), "Duplicate dim not allowed")


# --- views and joins -----------------------------------------------------------------------------------------
@_of("diag_embed")
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> None:
    first, second = wrap_dim(dim1, x.dim() + 1), wrap_dim(dim2, x.dim() + 1)
    _refuse(first == second, lambda: f"diagonal dimensions cannot be identical {dim1}, {dim2}")


@_of("roll")
def _roll(x: Any, shifts: Any, dims: Any = ()) -> None:
    moves = shifts if isinstance(shifts, list | tuple) else (shifts,)
    along = dims if isinstance(dims, list | tuple) else (dims,)
    _refuse(not moves, "`shifts` required")
    _refuse(
        len(moves) != len(along) and not (not along and len(moves) == 1),
        lambda: f"shifts and dimensions must align. shifts: {len(moves)}, dims:{len(along)}",
    )
    for dim in along:
        _refuse(x.dim() == 0, lambda: f"Dimension specified as {dim} but tensor has no dimensions", IndexError)
        wrap_dim(dim, x.dim())


@_of("flip")
def _flip(x: Any, dims: Sequence[int]) -> None:
    wrap_dims(dims, x.dim())


@_of("pixel_shuffle")
def _pixel_shuffle(x: Any, upscale_factor: int) -> None:
    _refuse(x.dim() < 3, lambda: f"pixel_shuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    _refuse(upscale_factor <= 0, lambda: f"pixel_shuffle expects a positive upscale_factor, but got {upscale_factor}")
    _refuse(
        x.shape[-3] % (upscale_factor * upscale_factor) != 0,
        "pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor",
    )


@_of("pixel_unshuffle")
def _pixel_unshuffle(x: Any, downscale_factor: int) -> None:
    _refuse(x.dim() < 3, lambda: f"pixel_unshuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    _refuse(
        downscale_factor <= 0,
        lambda: f"pixel_unshuffle expects a positive downscale_factor, but got {downscale_factor}",
    )
    _refuse(
        x.shape[-1] % downscale_factor != 0 or x.shape[-2] % downscale_factor != 0,
        "pixel_unshuffle expects height and width to be divisible by downscale_factor",
    )


@_of("rot90")
def _rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    _refuse(len(dims) != 2, lambda: f"expected total rotation dims == 2, but got dims = {len(dims)}")
    _refuse(x.dim() < 2, lambda: f"expected total dims >= 2, but got total dims = {x.dim()}")
    first, second = (d + x.dim() if d < 0 else d for d in dims)
    _refuse(first == second, lambda: f"expected rotation dims to be different, but got {dims[0]} and {dims[1]}")


@_of("narrow_copy")
def _narrow_copy(x: Any, dim: int, start: Any, length: Any) -> None:
    _refuse(dim >= x.dim(), lambda: f"Expected dim < {x.dim()}, but got {dim}")
    size = x.shape[wrap_dim(dim, x.dim())]
    _refuse(start > size or start < -size, lambda: f"start out of range [{-size}, {size}], but got {start}", IndexError)
    begin = start + size if start < 0 else start
    _refuse(
        length < 0 or begin + length > size,
        lambda: f"start ({begin}) + length ({length}) exceeds dimension size ({size}).",
    )


@_of("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> None:
    _refuse(not tensors, "torch.cat(): expected a non-empty list of Tensors", ValueError)


@_of("_chunk_cat")
def _chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> None:
    _refuse(num_chunks < 1, "_chunk_cat expects positive num_chunks")
    _refuse(not tensors, "_chunk_cat expects a non-empty input tensor list")
    _refuse(any(_empty(s) for t in tensors for s in t.shape), "_chunk_cat expects non-empty tensor")
    ranks = {t.dim() for t in tensors}
    _refuse(dim < 0 and len(ranks) > 1, "_chunk_cat expects non-negative dim when input tensors have different ndims")
    at = dim if dim >= 0 else wrap_dim(dim, min(ranks))
    _refuse(at >= min(ranks), "_chunk_cat expects dim < ndim for all input tensors")
    lead = tuple(tensors[0].shape[:at])
    _refuse(
        any(tuple(t.shape[:at]) != lead for t in tensors), "_chunk_cat expects same sizes of 0,...,dim-1 dimensions"
    )


@_of("trace")
def _trace(x: Any) -> None:
    _refuse(x.dim() != 2, lambda: f"trace: expected a matrix, but got tensor with dim {x.dim()}")


# --- indexing ------------------------------------------------------------------------------------------------
def _index_dtype(name: str, index: Any) -> None:
    if any(_empty(s) for s in index.shape):
        return
    _refuse(index.dtype not in (torch.int64, torch.int32), lambda: f"{name}(): Expected dtype int32/int64 for index")


@_of("gather")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> None:
    at = wrap_dim(dim, x.dim())
    _index_dtype("gather", index)
    if x.dim() != index.dim() or any(_empty(s) for s in index.shape):
        return
    for d in range(x.dim()):
        _refuse(
            d != at and index.shape[d] > x.shape[d],
            lambda: (
                f"Size does not match at dimension {d} expected index {list(index.shape)} to be no larger than self "
                f"{list(x.shape)} apart from dimension {at}"
            ),
        )


@_of("scatter.src", "scatter.reduce", "scatter_add", "scatter_reduce.two",
     "scatter.value", "scatter.value_reduce")  # fmt: skip
def _scatter(x: Any, dim: int, index: Any, src: Any, *args: Any, **options: Any) -> None:
    at = wrap_dim(dim, x.dim())
    if any(_empty(s) for s in index.shape):
        return
    _index_dtype("scatter", index)
    _refuse(
        max(x.dim(), 1) != max(index.dim(), 1), "Index tensor must have the same number of dimensions as self tensor"
    )
    if isinstance(src, TENSORS):
        _refuse(x.dtype is not src.dtype, "scatter(): Expected self.dtype to be equal to src.dtype")
        _refuse(
            max(src.dim(), 1) != max(index.dim(), 1),
            "Index tensor must have the same number of dimensions as src tensor",
        )
    for d in range(index.dim() if x.dim() else 0):
        large = d != at and index.shape[d] > x.shape[d]
        beyond = isinstance(src, TENSORS) and src.dim() > 0 and index.shape[d] > src.shape[d]
        _refuse(
            large or beyond,
            lambda: (
                f"Expected index {list(index.shape)} to be no larger than self {list(x.shape)} apart from "
                f"dimension {at} and to be no larger than src"
            ),
        )


@_of("index_add")
def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> None:
    at = wrap_dim(dim, x.dim())
    _refuse(index.dim() > 1, "index_add_(): Index is supposed to be a vector", IndexError)
    _refuse(x.dtype is not source.dtype, "index_add_(): self and source must have the same scalar type")
    if not x.dim() or not source.dim():
        return
    _refuse(
        index.dim() == 1 and index.shape[0] != source.shape[wrap_dim(dim, source.dim())],
        lambda: f"index_add_(): Number of indices should be equal to source.size(dim), for dim: {dim}",
    )
    own, given = list(x.shape), list(source.shape)
    _refuse(
        len(own) != len(given) or any(a != b for d, (a, b) in enumerate(zip(own, given, strict=True)) if d != at),
        lambda: (
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {own} source.shape = {given}"
        ),
    )


@_of("index_select")
def _index_select(x: Any, dim: int, index: Any) -> None:
    wrap_dim(dim, x.dim())
    _refuse(index.dim() > 1, "index_select(): Index is supposed to be a vector", IndexError)
    _refuse(index.dtype not in (torch.int64, torch.int32), "index_select(): Expected dtype int32 or int64 for index")


@_of("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any], **options: Any) -> None:
    common: tuple[Any, ...] = ()
    for index in indices:
        if index is None or index.dtype in (torch.bool, torch.uint8):
            continue
        _refuse(
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


@_of("embedding")
def _embedding(weight: Any, indices: Any, *args: Any) -> None:
    _refuse(weight.dim() != 2, "'weight' must be 2-D")
    _refuse(
        indices.dtype not in (torch.int64, torch.int32),
        lambda: f"Expected tensor for argument #1 'indices' to be Long or Int; but got {indices.dtype}",
    )


@_of("bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, **options: Any) -> None:
    _refuse(boundaries.dim() != 1, lambda: f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


# --- reductions and linear algebra ---------------------------------------------------------------------------
@_of("kthvalue")
def _kthvalue(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> None:
    size = x.shape[wrap_dim(dim, x.dim())] if x.dim() else 1
    _refuse(k < 1 or k > size, lambda: f"kthvalue(): selected number k out of range for dimension {dim}")


@_of("amax", "amin")
def _extremum(x: Any, dim: Any = (), keepdim: bool = False) -> None:
    _refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    dims = dim if isinstance(dim, list | tuple) else (dim,)
    empty = any(_empty(s) for s in x.shape)
    _refuse(empty and not dims, "Expected reduction dim to be specified for input.numel() == 0. Specify it with 'dim'")
    for d in dims:
        at = wrap_dim(d, x.dim())
        _refuse(
            bool(x.dim()) and _empty(x.shape[at]),
            lambda: f"Expected reduction dim {at} to have non-zero size.",
            IndexError,
        )


@_of("aminmax")
def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> None:
    _refuse(x.dim() > 64, "only tensors with up to 64 dims are supported")
    if dim is not None:
        _extremum(x, (dim,))
    else:
        _refuse(any(_empty(s) for s in x.shape), "aminmax(): cannot compute aminmax over an empty dimension")


@_of("native_layer_norm")
def _layer_norm(x: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float) -> None:
    shape = list(normalized_shape)
    _refuse(not shape, "Expected normalized_shape to be at least 1-dimensional")
    for name, given in (("weight", weight), ("bias", bias)):
        _refuse(
            given is not None and list(given.shape) != shape,
            lambda: f"Expected {name} to be of same shape as normalized_shape {shape}",
        )
    _refuse(
        x.dim() < len(shape) or list(x.shape[x.dim() - len(shape) :]) != shape,
        lambda: f"Given normalized_shape={shape}, expected input with shape [*, {shape}], but got {list(x.shape)}",
    )


@_of("renorm")
def _renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> None:
    _refuse(x.dim() < 2, lambda: f"renorm: input needs at least 2 dimensions, got {x.dim()} dimensions")


def _square(name: str) -> None:
    def check(a: Any, *args: Any, **options: Any) -> None:
        _refuse(a.dim() < 2, lambda: f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
        _refuse(
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


@_of("linalg_qr", "linalg_lu", "linalg_lu_factor_ex", "_linalg_svd")
def _matrix(a: Any, *args: Any, **options: Any) -> None:
    _refuse(a.dim() < 2, lambda: f"The input tensor A must have at least 2 dimensions, but it has {a.dim()}.")


@_of("_linalg_solve_ex")
def _solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> None:
    CHECKS["linalg_inv_ex"](a)
    # As eager has it, b is a vector, or a batch of them, where it has a's batch dims and one more.
    vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and list(b.shape) == list(a.shape[:-1]))
    rows = b.shape[-1] if vector or not left else b.shape[-2]
    _refuse(
        rows != a.shape[-1],
        lambda: f"linalg.solve: Incompatible shapes of A and B ({list(a.shape)} and {list(b.shape)})",
    )


@_of("linalg_cross")
def _cross(x: Any, other: Any, *, dim: int = -1) -> None:
    _refuse(x.dim() != other.dim(), "linalg.cross: inputs must have the same number of dimensions.")
    at = wrap_dim(dim, x.dim())
    _refuse(
        x.shape[at] != 3 or other.shape[at] != 3,
        lambda: f"linalg.cross: inputs dimension {dim} must have length 3. Got {x.shape[at]} and {other.shape[at]}",
    )


@_of("ormqr")
def _ormqr(x: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> None:
    _refuse(x.dim() < 2 or other.dim() < 2, "torch.ormqr: input and other must have at least 2 dimensions.")
    rows = other.shape[-2] if left else other.shape[-1]
    smaller = rows if rows < x.shape[-1] else x.shape[-1]
    _refuse(tau.shape[-1] > x.shape[-1] or tau.shape[-1] != smaller, "torch.ormqr: tau.shape[-1] does not fit")


@_of("linalg_lstsq")
def _lstsq(x: Any, other: Any, *args: Any, **options: Any) -> None:
    _refuse(x.dim() < 2, "torch.linalg.lstsq: input must have at least 2 dimensions.")
    _refuse(other.dim() < 1, "torch.linalg.lstsq: other must have at least 1 dimension.")


# --- windows -------------------------------------------------------------------------------------------------
@_of("convolution", "convolution_overrideable")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> None:
    _refuse(any(d <= 0 for d in dilation), "dilation should be greater than zero")
    _refuse(any(s <= 0 for s in stride), "non-positive stride is not supported")
    _refuse(any(p < 0 for p in padding), "negative padding is not supported")
    channels = weight.shape[0] if not transposed else weight.shape[1] * rest[-1]
    _refuse(
        bias is not None and (bias.dim() != 1 or bias.shape[0] != channels),
        lambda: (
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with {channels} elements"
        ),
    )


def _check_window(kernel: Any, padding: Any, dilation: Any) -> None:
    wide = max(len(kernel), len(padding), len(dilation))
    k, p, d = (list(v) * wide if len(v) == 1 else list(v) for v in (kernel, padding, dilation))
    for size, pad, spread in zip(k, p, d, strict=False):
        _refuse(pad < 0, lambda: f"pad must be non-negative, but got pad: {pad}")
        _refuse(
            pad > (spread * (size - 1) + 1) // 2,
            lambda: (
                f"pad should be at most half of effective kernel size, but got pad={pad}, kernel_size={size} and "
                f"dilation={spread}"
            ),
        )


def _check_pooled_rank(x: Any, spatial: int) -> None:
    _refuse(
        x.dim() not in (spatial + 1, spatial + 2),
        lambda: f"non-empty {spatial + 1}D or {spatial + 2}D (batch mode) tensor expected for input",
    )


def _max_pool(spatial: int) -> Check:
    def check(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
    ) -> None:
        _check_pooled_rank(x, spatial)
        _check_window(kernel_size, padding, dilation)
        inner = x.shape[x.dim() - spatial - 1 :]
        _refuse(any(_empty(s) for s in inner), "Expected input's non-batch dimensions to have positive length")

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
        _refuse(divisor_override == 0, "divisor must be not zero")

    return check


CHECKS.update({f"max_pool{n}d_with_indices": _max_pool(n) for n in (2, 3)})
CHECKS.update({f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)})


def _adaptive(rank: int) -> Check:
    def check(x: Any, output_size: Sequence[Any]) -> None:
        _refuse(len(output_size) != rank, lambda: f"adaptive_max_pool{rank}d(): output_size must have {rank} elements")
        _refuse(any(s < 0 for s in output_size), lambda: f"negative dimension in output_size {list(output_size)}")

    return check


CHECKS["adaptive_max_pool2d"] = _adaptive(2)
CHECKS["adaptive_max_pool3d"] = _adaptive(3)


@_of("max_unpool2d", "max_unpool3d")
def _max_unpool(x: Any, indices: Any, *args: Any) -> None:
    _refuse(
        indices.dtype is not torch.int64, lambda: f"elements in indices should be type int64 but got {indices.dtype}"
    )
    _refuse(
        tuple(x.shape) != tuple(indices.shape),
        lambda: (
            f"Expected shape of indices to be same as that of the input tensor ({list(x.shape)}) but got "
            f"{list(indices.shape)}"
        ),
    )


# --- losses --------------------------------------------------------------------------------------------------
def _check_rows(x: Any) -> None:
    shape = x.shape
    _refuse(
        x.dim() > 2 or (bool(shape) and _empty(shape[-1])),
        lambda: f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {list(shape)}",
    )


@_of("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(x: Any, target: Any, *args: Any) -> None:
    _refuse(
        target.dtype not in (torch.int64, torch.uint8),
        lambda: f"expected target dtype to be Long or Byte, but got {target.dtype}",
    )


@_of("multi_margin_loss")
def _multi_margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> None:
    _refuse(p not in (1, 2), "multi_margin_loss: only p == 1 and p == 2 supported")
    _check_rows(x)
    rows = x.shape[0] if x.dim() == 2 else 1
    _refuse(
        target.dim() > 1 or (target.dim() == 1 and target.shape[0] != rows),
        lambda: f"multi_margin_loss: target tensor should be 1-D with one element a sample, got {list(target.shape)}",
    )
    _refuse(target.dtype is not torch.int64, lambda: f"expected scalar type Long but found {target.dtype}")
    classes = x.shape[-1] if x.dim() else 1
    _refuse(
        weight is not None and (weight.dim() > 1 or weight.numel() != classes),
        lambda: f"inconsistent weight size, expected {classes}",
    )


@_of("multilabel_margin_loss_forward")
def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> None:
    _check_rows(x)
    fits = x.numel() == target.numel() if x.dim() < 2 else tuple(x.shape) == tuple(target.shape)
    _refuse(not fits, lambda: f"inconsistent target size: {list(target.shape)} for input of size: {list(x.shape)}")
