"""Pooling and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Table, strided
from primtorch.layout import Sizes, channels_last_strides, contiguous_strides, suggests_channels_last
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def _each(values: Sequence[int], count: int) -> list[int]:
    return [values[0]] * count if len(values) == 1 else list(values)


def pooled_size(size: Size, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Size:
    """Output length of a pooling window; with ceil_mode a last window that starts inside the input or left padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    length = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (length - 1) * stride >= size + padding:
        length = length - 1
    return length


def _laid_out(x: Any, shape: Sizes, dtype: torch.dtype | None = None) -> TensorSpec:
    keeps = suggests_channels_last(tuple(x.shape), x.stride())
    return strided(x, shape, channels_last_strides(shape) if keeps else contiguous_strides(shape), dtype)


def _by_rows(x: Any, shape: Sizes, dtype: torch.dtype | None = None) -> TensorSpec:
    return strided(x, shape, contiguous_strides(shape), dtype)


def _pooled_shape(
    x: Any, spatial: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Sizes:
    k = _each(kernel, spatial)
    s = _each(stride, spatial) if len(stride) else k
    p, d = _each(padding, spatial), _each(dilation, spatial)
    lead = x.dim() - spatial
    sizes = [pooled_size(x.shape[lead + i], k[i], s[i], p[i], d[i], ceil_mode) for i in range(spatial)]
    if any(size <= 0 for size in sizes):
        raise RuntimeError(
            f"Given input size: {list(x.shape)}. Calculated output size: {sizes}. Output size is too small"
        )
    return (*x.shape[:lead], *sizes)


def _max_pool(spatial: int) -> Any:
    def formula(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
    ) -> tuple[TensorSpec, TensorSpec]:
        shape = _pooled_shape(x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        return _laid_out(x, shape), _laid_out(x, shape, torch.int64)

    return formula


TABLE.op("max_pool2d_with_indices")(_max_pool(2))
TABLE.op("max_pool3d_with_indices")(_max_pool(3))


# Of the pools over volumes, those that average and those that adapt forget channels_last.
_LAID_OUT = {1: _laid_out, 2: _laid_out, 3: _by_rows}


def _avg_pool(spatial: int) -> Any:
    kept = _LAID_OUT[spatial]

    def formula(
        x: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TensorSpec:
        return kept(x, _pooled_shape(x, spatial, kernel_size, stride, padding, (1,), ceil_mode))

    return formula


TABLE.op("avg_pool1d")(_avg_pool(1))
TABLE.op("avg_pool2d")(_avg_pool(2))
TABLE.op("avg_pool3d")(_avg_pool(3))


@TABLE.op(
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
)
def _pool_backward(grad: Any, x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return _laid_out(x, tuple(x.shape))


@TABLE.op("avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d_backward")
def _pool_backward_by_rows(grad: Any, x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return _by_rows(x, tuple(x.shape))


@TABLE.op("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(x: Any, output_size: Sequence[Size]) -> TensorSpec:
    lead = x.dim() - len(output_size)
    return _LAID_OUT[len(output_size)](x, (*x.shape[:lead], *output_size))


@TABLE.op("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Any, output_size: Sequence[Size]) -> tuple[TensorSpec, TensorSpec]:
    lead = x.dim() - len(output_size)
    shape = (*x.shape[:lead], *output_size)
    kept = _LAID_OUT[len(output_size)]
    return kept(x, shape), kept(x, shape, torch.int64)


@TABLE.op(
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
def _upsample(x: Any, output_size: Sequence[Size], *args: Any, **kwargs: Any) -> TensorSpec:
    shape = (*x.shape[:2], *output_size)
    if len(output_size) == 1:
        return _by_rows(x, shape)
    return _laid_out(x, shape)


@TABLE.op(
    "upsample_nearest2d_backward",
    "_upsample_nearest_exact2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_trilinear3d_backward",
    "_upsample_bilinear2d_aa_backward",
)
def _upsample_backward(
    grad: Any, output_size: Sequence[Size], input_size: Sequence[Size], *args: Any, **kwargs: Any
) -> TensorSpec:
    return _laid_out(grad, tuple(input_size))


@TABLE.op(
    "upsample_nearest1d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact1d_backward",
    "_upsample_nearest_exact3d_backward",
    "upsample_linear1d_backward",
    "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward",
)
def _upsample_backward_by_rows(
    grad: Any, output_size: Sequence[Size], input_size: Sequence[Size], *args: Any, **kwargs: Any
) -> TensorSpec:
    return _by_rows(grad, tuple(input_size))


def _padded(spatial: int) -> Any:
    def formula(x: Any, padding: Sequence[Size]) -> TensorSpec:
        shape = list(x.shape)
        for i in range(spatial):
            shape[-1 - i] = shape[-1 - i] + padding[2 * i] + padding[2 * i + 1]
        return _laid_out(x, tuple(shape))

    return formula


for _spatial in (1, 2, 3):
    TABLE.op(f"reflection_pad{_spatial}d", f"replication_pad{_spatial}d")(_padded(_spatial))


@TABLE.op("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
          "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")  # fmt: skip
def _pad_backward(grad: Any, x: Any, padding: Sequence[Size]) -> TensorSpec:
    return _laid_out(x, tuple(x.shape))


@TABLE.op("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(x: Any, grid: Any, *args: Any) -> TensorSpec:
    shape = (*x.shape[:2], *grid.shape[1:-1])
    return _by_rows(x, shape)


@TABLE.op("pixel_shuffle")
def _pixel_shuffle(x: Any, upscale_factor: int) -> TensorSpec:
    *lead, c, h, w = x.shape
    r = upscale_factor
    return _laid_out(x, (*lead, c // (r * r), h * r, w * r))


@TABLE.op("pixel_unshuffle")
def _pixel_unshuffle(x: Any, downscale_factor: int) -> TensorSpec:
    *lead, c, h, w = x.shape
    r = downscale_factor
    return _laid_out(x, (*lead, c * r * r, h // r, w // r))


@TABLE.op("channel_shuffle")
def _channel_shuffle(x: Any, groups: Size) -> TensorSpec:
    return _laid_out(x, tuple(x.shape))


@TABLE.op("max_unpool2d")
def _max_unpool2d(x: Any, indices: Any, output_size: Sequence[Size]) -> TensorSpec:
    return _laid_out(x, (*x.shape[:-2], *output_size))


@TABLE.op("max_unpool3d")
def _max_unpool3d(x: Any, indices: Any, output_size: Sequence[Size], *args: Any) -> TensorSpec:
    shape = (*x.shape[:-3], *output_size)
    return _by_rows(x, shape)


@TABLE.op("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional_max_pool(
    x: Any, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: Any
) -> tuple[TensorSpec, TensorSpec]:
    shape = (*x.shape[: x.dim() - len(output_size)], *output_size)
    strides = contiguous_strides(shape)
    return strided(x, shape, strides), strided(x, shape, strides, torch.int64)


@TABLE.op("fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def _fractional_max_pool_backward(grad: Any, x: Any, *args: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return _by_rows(x, shape)


@TABLE.op("im2col")
def _im2col(
    x: Any, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> TensorSpec:
    *lead, channels, height, width = x.shape
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip((height, width), kernel_size, dilation, padding, stride, strict=True)
    )
    shape = (*lead, channels * kernel_size[0] * kernel_size[1], rows * columns)
    return _by_rows(x, shape)


@TABLE.op("col2im")
def _col2im(x: Any, output_size: Sequence[Size], kernel_size: Sequence[int], *args: Any) -> TensorSpec:
    *lead, rows, _ = x.shape
    shape = (*lead, rows // (kernel_size[0] * kernel_size[1]), *output_size)
    return _by_rows(x, shape)
