"""Fourier transforms and windows of signals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch

from primtorch import prims
from primtorch.arguments import Sizes, TensorLike, TensorOptions
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Rule, Trait
from primtorch.layout import strides_in_order, wrap_dims
from primtorch.operators.build import contiguous, strided
from primtorch.operators.refusals import is_empty, refuse
from primtorch.placement import resolved_device
from primtorch.promotion import complex_of, real_of
from primtorch.samples import after, call, matrix, reals
from primtorch.spec import Size, TensorSpec

OP = Family("fft")
OP.trait(Trait.CONVERTS_OUT, "_fft_c2c _fft_c2r _fft_r2c")
OP.trait(Trait.ROWS_OUT, "_fft_c2c _fft_c2r _fft_r2c")


# --- windows of signals ----------------------------------------------------------------------------
def _cosines(*terms: float) -> Callable[[Value], Value]:
    """sum_k (-1)^k terms[k] cos(2 pi k t), for t in [0, 1]."""

    def shape(t: Value) -> Value:
        out: Value | None = None
        for k, a in enumerate(terms):
            part = t * 0.0 + a if k == 0 else (t * (2 * math.pi * k)).map(prims.cos) * (a if k % 2 == 0 else -a)
            out = part if out is None else out + part
        assert out is not None
        return out

    return shape


def _window(b: Builder, length: Size, periodic: bool, shape: Callable[[Value], Value], options: TensorOptions) -> Value:
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = options.get("device")
    place = resolved_device(device)
    if isinstance(length, int) and length <= 1:
        return b.full((length,), 1, dtype, place)
    t = b.iota(length, place).to(torch.float64) / float(length if periodic else length - 1)
    return shape(t).to(dtype)


def _window_rule(shape: Callable[[Value], Value]) -> Rule:
    def rule(b: Builder, length: Size, periodic: bool = True, **options: Unpack[TensorOptions]) -> Value:
        return _window(b, length, periodic, shape, options)

    return rule


for _name, _shape in (
    ("hann", _cosines(0.5, 0.5)),
    ("blackman", _cosines(0.42, 0.5, 0.08)),
    ("bartlett", lambda t: 1.0 - (t * 2.0 - 1.0).map(prims.abs)),
):
    OP.rule(f"{_name}_window.|periodic")(_window_rule(_shape))


@OP.rule(
    "hamming_window", "hamming_window.periodic", "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta"
)
def _lower_hamming(
    b: Builder,
    length: Size,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    **options: Unpack[TensorOptions],
) -> Value:
    return _window(b, length, periodic, _cosines(alpha, beta), options)


@OP.rule("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def _lower_kaiser(
    b: Builder, length: Size, periodic: bool = True, beta: float = 12.0, **options: Unpack[TensorOptions]
) -> Value:
    def shape(t: Value) -> Value:
        r = t * 2.0 - 1.0
        top = ((1.0 - r * r).maximum(0.0).map(prims.sqrt) * beta).map(prims.i0)
        return top / b.full_like(t, beta).map(prims.i0)

    return _window(b, length, periodic, shape, options)


def _frequencies(b: Builder, n: Size, d: float, positive: Size, length: Size, options: TensorOptions) -> Value:
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = options.get("device")
    place = resolved_device(device)
    k = b.iota(length, place)
    return (b.where(k < positive, k, k - n).to(dtype) * float(1.0 / (n * d))).to(dtype)


@OP.rule("fft_fftfreq")
def _lower_fftfreq(b: Builder, n: Size, d: float = 1.0, **options: Unpack[TensorOptions]) -> Value:
    return _frequencies(b, n, d, (n + 1) // 2, n, options)


@OP.rule("fft_rfftfreq")
def _lower_rfftfreq(b: Builder, n: Size, d: float = 1.0, **options: Unpack[TensorOptions]) -> Value:
    return _frequencies(b, n, d, n // 2 + 1, n // 2 + 1, options)


# --- without a rule of their own ------------------------------------------------------------------
_CUFFT_DIMS = 3  # that the library transforms at once


def _by_falling_stride(dims: Sequence[int], strides: Sizes) -> list[int]:
    ordered: list[int] = []
    for d in dims:
        place = len(ordered)
        while place > 0 and strides[ordered[place - 1]] < strides[d]:
            place -= 1
        ordered.insert(place, d)
    return ordered


def _transformed(x: TensorLike, shape: Sizes, dims: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """The library transforms batches that lie one after another: batch dims, by falling stride, then the dims.

    Builds of torch without MKL have another CPU library, which writes row-major results.
    """
    if Fact.TRANSFORMS_BY_MKL.on(x.device) and not torch.backends.mkl.is_available():
        return contiguous(x, shape, dtype)
    strides = x.stride()
    batch = _by_falling_stride([d for d in range(len(shape)) if d not in dims], strides)
    return strided(x, shape, strides_in_order(shape, [*reversed(dims), *reversed(batch)]), dtype)


def _in_steps(x: TensorLike, dims: Sequence[int]) -> TensorSpec:
    """A complex transform: of all dims at once on the CPU, of three at a time on a GPU, the nearest in memory first."""
    dims = _by_falling_stride(dims, x.stride())
    now = dims if Fact.TRANSFORMS_ALL_DIMS_AT_ONCE.on(x.device) else dims[-_CUFFT_DIMS:]
    done = _transformed(x, tuple(x.shape), now, x.dtype)
    return _in_steps(done, dims[: -len(now)]) if len(now) < len(dims) else done


@OP.refuses("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _refuse_transform(x: TensorLike, dim: Sequence[int], *args: object) -> None:
    """The CPU's library makes no plan for no elements."""
    planned = Fact.TRANSFORMS_BY_MKL.on(x.device) and torch.backends.mkl.is_available() and len(dim) > 0
    refuse(planned and any(map(is_empty, x.shape)), lambda: f"MKL FFT error: no plan for the sizes {list(x.shape)}")


@OP.formula("_fft_c2c")
def _c2c(x: TensorLike, dim: Sequence[int], normalization: int, forward: bool) -> TensorSpec:
    if not dim:
        return contiguous(x, x.shape)
    return _in_steps(x, wrap_dims(dim, x.dim()))


@OP.formula("_fft_r2c")
def _r2c(x: TensorLike, dim: Sequence[int], normalization: int, onesided: bool) -> TensorSpec:
    *others, last = wrap_dims(dim, x.dim())
    shape: list[Size] = list(x.shape)
    if onesided:
        shape[last] = shape[last] // 2 + 1
    if not Fact.TRANSFORMS_ALL_DIMS_AT_ONCE.on(x.device) and (
        len(dim) > _CUFFT_DIMS or [*others, last] == [0, 1, 2]
    ):  # eager trusts cuFFT no more
        return _in_steps(_transformed(x, tuple(shape), [last], complex_of(x.dtype)), others)
    return _transformed(x, tuple(shape), [*_by_falling_stride(others, x.stride()), last], complex_of(x.dtype))


@OP.formula("_fft_c2r")
def _c2r(x: TensorLike, dim: Sequence[int], normalization: int, last_dim_size: Size) -> TensorSpec:
    *others, last = wrap_dims(dim, x.dim())
    # Several dims are transformed in two steps, the last one alone.
    source = x
    if others:
        source = _transformed(x, tuple(x.shape), _by_falling_stride(others, x.stride()), x.dtype)
    shape: list[Size] = list(x.shape)
    shape[last] = last_dim_size
    return _transformed(source, tuple(shape), [last], real_of(x.dtype))


# --- samples ---------------------------------------------------------------------------------------

_COMPLEX = reals(4, 8, dtype=torch.complex128)
OP.samples("_fft_r2c", call(matrix(3, 8), [1], 0, True), call(matrix(4, 5), [0, 1], 2, False))
OP.samples("_fft_c2r", call(after(torch.fft.rfft, matrix(3, 8)), [1], 2, 8))
OP.samples("_fft_c2c", call(_COMPLEX, [1], 0, True), call(_COMPLEX, [0, 1], 2, False))
OP.samples("fft_fftfreq fft_rfftfreq", call(5))
OP.samples("bartlett_window blackman_window hamming_window hann_window kaiser_window", call(5))
OP.samples(
    "bartlett_window.periodic blackman_window.periodic hamming_window.periodic hann_window.periodic "
    "kaiser_window.periodic",
    call(5, False),
)
OP.samples("hamming_window.periodic_alpha kaiser_window.beta", call(5, True, 0.6))
OP.samples("hamming_window.periodic_alpha_beta", call(5, True, 0.6, 0.4))
