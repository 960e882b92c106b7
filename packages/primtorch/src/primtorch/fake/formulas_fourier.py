"""Fourier transforms: shapes as the schema says, strides as the transforming library leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Table, contiguous, strided
from primtorch.layout import Sizes, strides_in_order, wrap_dims
from primtorch.promotion import complex_of, real_of
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def _transformed(x: TensorSpec, shape: Sizes, dims: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """The library transforms batches that lie one after another: batch dims, by falling stride, then the dims.

    Builds of torch without MKL have another CPU library, which writes row-major results.
    """
    if x.device.type == "cpu" and not torch.backends.mkl.is_available():
        return contiguous(x, shape, dtype)
    strides = x.stride()
    batch = _by_falling_stride([d for d in range(len(shape)) if d not in dims], strides)
    return strided(x, shape, strides_in_order(shape, [*reversed(dims), *reversed(batch)]), dtype)


def _by_falling_stride(dims: Sequence[int], strides: Sizes) -> list[int]:
    ordered: list[int] = []
    for d in dims:
        place = len(ordered)
        while place > 0 and strides[ordered[place - 1]] < strides[d]:
            place -= 1
        ordered.insert(place, d)
    return ordered


@TABLE.op("_fft_c2c")
def _c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> TensorSpec:
    if not dim:
        return contiguous(x, x.shape)
    dims = _by_falling_stride(wrap_dims(dim, x.dim()), x.stride())
    return _transformed(x, tuple(x.shape), dims, x.dtype)


@TABLE.op("_fft_r2c")
def _r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> TensorSpec:
    *others, last = wrap_dims(dim, x.dim())
    shape: list[Size] = list(x.shape)
    if onesided:
        shape[last] = shape[last] // 2 + 1
    return _transformed(x, tuple(shape), [*_by_falling_stride(others, x.stride()), last], complex_of(x.dtype))


@TABLE.op("_fft_c2r")
def _c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: Size) -> TensorSpec:
    *others, last = wrap_dims(dim, x.dim())
    # Several dims are transformed in two steps, the last one alone.
    source = _transformed(x, tuple(x.shape), _by_falling_stride(others, x.stride()), x.dtype) if others else x
    shape: list[Size] = list(x.shape)
    shape[last] = last_dim_size
    return _transformed(source, tuple(shape), [last], real_of(x.dtype))
