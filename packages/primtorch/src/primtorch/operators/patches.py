"""Patches of images as columns, and images from these."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Windows:
    """Where the patches of an image lie: one number for each of its two dims."""

    kernel_size: Sequence[Size]
    dilation: Sequence[Size]
    padding: Sequence[Size]
    stride: Sequence[Size]

    @staticmethod
    def of(*given: PerDim) -> _Windows:
        return _Windows(*(per_dim(values, 2) for values in given))

    def check(self) -> None:
        for name in self.__slots__:
            values, least = getattr(self, name), 0 if name == "padding" else 1
            refuse(len(values) != 2, lambda: f"It is expected {name} equals to 2, but got size {len(values)}")
            refuse(any(v < least for v in values), lambda: f"{name} should be at least {least}, but got {list(values)}")

    def counts(self, sizes: Sequence[Size]) -> list[Size]:
        """How many patches there are along each dim of an image."""
        windows = zip(sizes, self.kernel_size, self.dilation, self.padding, self.stride, strict=True)
        return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, d, p, s in windows]

    def index(self, b: Builder, counts: Sequence[Size], device: torch.device) -> tuple[Value | None, ...]:
        """The index of the patches in a padded image of four dims, as (kernel, count) of rows, then of columns."""
        rows, columns = (
            b.iota(kernel, device, step=dilation).unsqueeze(1) + b.iota(count, device, step=stride).unsqueeze(0)
            for kernel, dilation, stride, count in zip(
                self.kernel_size, self.dilation, self.stride, counts, strict=True
            )
        )
        return None, None, rows.unsqueeze(2, 3), columns.unsqueeze(0, 1)


@OP.formula("im2col")
def _im2col(x: TensorLike, *windows: PerDim) -> TensorSpec:
    *lead, channels, height, width = x.shape
    patches = _Windows.of(*windows)
    return by_rows(x, (*lead, channels * product(patches.kernel_size), product(patches.counts((height, width)))))


@OP.refuses("im2col")
def _refuse_im2col(x: TensorLike, *windows: Sequence[Size]) -> None:
    patches = _Windows(*windows)
    patches.check()
    refuse_batch("im2col", x, 2)
    out = patches.counts(x.shape[-2:])
    refuse(any(n < 1 for n in out), lambda: f"the shape of the array of sliding blocks is {out}, but must be positive")


@OP.rule("im2col")
def _lower_im2col(b: Builder, x: Value, *windows: PerDim) -> Value:
    patches = _Windows.of(*windows)
    kernel, padding = patches.kernel_size, patches.padding
    image = x if x.rank == 4 else x.unsqueeze(0)
    n, c, *spatial = image.shape
    out = patches.counts(spatial)
    if any(not isinstance(p, int) or p != 0 for p in padding):
        image = b.emit(prims.pad, image, (0, 0, *padding), (0, 0, *padding), b.number(0, image))
    taken = b.emit(prims.index, image, patches.index(b, out, x.device), False)
    result = taken.permute((0, 1, 2, 4, 3, 5)).reshape((n, c * kernel[0] * kernel[1], out[0] * out[1]))
    return result if x.rank == 4 else result.squeeze(0)


@OP.formula("col2im")
def _col2im(x: TensorLike, output_size: Sequence[Size], kernel_size: Sequence[int], *args: object) -> TensorSpec:
    *lead, rows, _ = x.shape
    shape = (*lead, rows // (kernel_size[0] * kernel_size[1]), *output_size)
    return by_rows(x, shape)


@OP.refuses("col2im")
def _refuse_col2im(x: TensorLike, output_size: Sequence[Size], *windows: Sequence[Size]) -> None:
    patches = _Windows(*windows)
    patches.check()
    refuse_batch("col2im", x, 1)
    refuse(len(output_size) != 2, lambda: f"It is expected output_size equals to 2, but got size {len(output_size)}")
    rows, columns = x.shape[-2:]
    elements = product(patches.kernel_size)
    refuse(rows // elements * elements != rows, "size of input's dimension 1 must be divisible by the kernel's")
    out = patches.counts(output_size)
    refuse(
        any(n < 1 for n in out) or columns != out[0] * out[1],
        lambda: f"expected size of input's dimension 2 to match the calculated number of sliding blocks {out}",
    )


@OP.rule("col2im")
def _lower_col2im(b: Builder, x: Value, output_size: PerDim, *windows: PerDim) -> Value:
    patches, size = _Windows.of(*windows), per_dim(output_size, 2)
    kernel, padding = patches.kernel_size, patches.padding
    columns = x if x.rank == 3 else x.unsqueeze(0)
    n = columns.shape[0]
    c = columns.shape[1] // (kernel[0] * kernel[1])
    out = patches.counts(size)
    added = columns.compute().reshape((n, c, *kernel, *out)).permute((0, 1, 2, 4, 3, 5))
    padded = [s + 2 * p for s, p in zip(size, padding, strict=True)]
    zeros = b.full((n, c, *padded), 0, added.dtype, x.device)
    image = b.emit(prims.index_put, zeros, patches.index(b, out, x.device), added, True, False)
    for d in range(2):
        image = image.slice(2 + d, padding[d], padding[d] + size[d])
    image = image.to(x.dtype)
    return image if x.rank == 3 else image.squeeze(0)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("im2col", call(reals(2, 3, 7, 8), [3, 2], [1, 2], [1, 0], [2, 1]))
OP.samples("col2im", call(reals(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]))
