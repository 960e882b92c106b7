"""Patches of images as columns, and images from these."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import PerDim, TensorLike
from primtorch.builder import Builder, Value
from primtorch.families import Family
from primtorch.layout import product
from primtorch.operators.build import per_dim
from primtorch.operators.refusals import refuse, refuse_batch
from primtorch.operators.window import by_rows
from primtorch.samples import call, reals
from primtorch.spec import Size, TensorSpec

OP = Family("patches")


def _patch_positions(b: Builder, out: Size, kernel: Size, dilation: Size, stride: Size, device: torch.device) -> Value:
    """(kernel, out) positions in the padded image."""
    tap = b.iota(kernel, device, step=dilation).unsqueeze(1)
    return tap + b.iota(out, device, step=stride).unsqueeze(0)


def _patch_count(size: Size, kernel: Size, dilation: Size, padding: Size, stride: Size) -> Size:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@OP.formula("im2col")
def _im2col(
    x: TensorLike, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> TensorSpec:
    *lead, channels, height, width = x.shape
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip((height, width), kernel_size, dilation, padding, stride, strict=True)
    )
    shape = (*lead, channels * kernel_size[0] * kernel_size[1], rows * columns)
    return by_rows(x, shape)


@OP.refuses("im2col")
def _refuse_im2col(
    x: TensorLike,
    kernel_size: Sequence[Size],
    dilation: Sequence[Size],
    padding: Sequence[Size],
    stride: Sequence[Size],
) -> None:
    _check_patches(kernel_size, dilation, padding, stride)
    refuse_batch("im2col", x, 2)
    out = [_patch_count(*v) for v in zip(x.shape[-2:], kernel_size, dilation, padding, stride, strict=True)]
    refuse(any(n < 1 for n in out), lambda: f"the shape of the array of sliding blocks is {out}, but must be positive")


def _check_patches(
    kernel_size: Sequence[Size], dilation: Sequence[Size], padding: Sequence[Size], stride: Sequence[Size]
) -> None:
    for name, values in (
        ("kernel_size", kernel_size),
        ("dilation", dilation),
        ("padding", padding),
        ("stride", stride),
    ):
        refuse(len(values) != 2, lambda: f"It is expected {name} equals to 2, but got size {len(values)}")
        least = 0 if name == "padding" else 1
        refuse(any(v < least for v in values), lambda: f"{name} should be at least {least}, but got {list(values)}")


@OP.rule("im2col")
def _lower_im2col(
    b: Builder, x: Value, kernel_size: PerDim, dilation: PerDim, padding: PerDim, stride: PerDim
) -> Value:
    kernel, dilation, padding, stride = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    image = x if x.rank == 4 else x.unsqueeze(0)
    n, c, *spatial = image.shape
    out = [_patch_count(*v) for v in zip(spatial, kernel, dilation, padding, stride, strict=True)]
    if any(not isinstance(p, int) or p != 0 for p in padding):
        image = b.emit(prims.pad, image, (0, 0, *padding), (0, 0, *padding), b.number(0, image))
    rows, columns = (_patch_positions(b, out[d], kernel[d], dilation[d], stride[d], x.device) for d in range(2))
    patches = b.emit(prims.index, image, (None, None, rows.unsqueeze(2, 3), columns.unsqueeze(0, 1)), False)
    result = patches.permute((0, 1, 2, 4, 3, 5)).reshape((n, c * kernel[0] * kernel[1], out[0] * out[1]))
    return result if x.rank == 4 else result.squeeze(0)


@OP.formula("col2im")
def _col2im(x: TensorLike, output_size: Sequence[Size], kernel_size: Sequence[int], *args: object) -> TensorSpec:
    *lead, rows, _ = x.shape
    shape = (*lead, rows // (kernel_size[0] * kernel_size[1]), *output_size)
    return by_rows(x, shape)


@OP.refuses("col2im")
def _refuse_col2im(
    x: TensorLike,
    output_size: Sequence[Size],
    kernel_size: Sequence[Size],
    dilation: Sequence[Size],
    padding: Sequence[Size],
    stride: Sequence[Size],
) -> None:
    _check_patches(kernel_size, dilation, padding, stride)
    refuse_batch("col2im", x, 1)
    refuse(len(output_size) != 2, lambda: f"It is expected output_size equals to 2, but got size {len(output_size)}")
    rows, columns = x.shape[-2:]
    elements = product(kernel_size)
    refuse(rows // elements * elements != rows, "size of input's dimension 1 must be divisible by the kernel's")
    out = [_patch_count(*v) for v in zip(output_size, kernel_size, dilation, padding, stride, strict=True)]
    refuse(
        any(n < 1 for n in out) or columns != out[0] * out[1],
        lambda: f"expected size of input's dimension 2 to match the calculated number of sliding blocks {out}",
    )


@OP.rule("col2im")
def _lower_col2im(
    b: Builder, x: Value, output_size: PerDim, kernel_size: PerDim, dilation: PerDim, padding: PerDim, stride: PerDim
) -> Value:
    kernel, dilation, padding, stride = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    size = per_dim(output_size, 2)
    columns = x if x.rank == 3 else x.unsqueeze(0)
    n = columns.shape[0]
    c = columns.shape[1] // (kernel[0] * kernel[1])
    out = [_patch_count(*v) for v in zip(size, kernel, dilation, padding, stride, strict=True)]
    patches = columns.compute().reshape((n, c, *kernel, *out)).permute((0, 1, 2, 4, 3, 5))
    padded = [s + 2 * p for s, p in zip(size, padding, strict=True)]
    zeros = b.full((n, c, *padded), 0, patches.dtype, x.device)
    rows, cols = (_patch_positions(b, out[d], kernel[d], dilation[d], stride[d], x.device) for d in range(2))
    places = (None, None, rows.unsqueeze(2, 3), cols.unsqueeze(0, 1))
    image = b.emit(prims.index_put, zeros, places, patches, True, False)
    for d in range(2):
        image = image.slice(2 + d, padding[d], padding[d] + size[d])
    image = image.to(x.dtype)
    return image if x.rank == 3 else image.squeeze(0)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("im2col", call(reals(2, 3, 7, 8), [3, 2], [1, 2], [1, 0], [2, 1]))
OP.samples("col2im", call(reals(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]))
