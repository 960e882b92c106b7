"""How eager's max pools read volumes: in which layout, and what their CPU kernel over channels-last volumes names where
a window holds nothing larger than the lowest value of its dtype.

No element of such a window is larger than what the kernel begins with, so the result is the place that it begins at:
the window's first element inside of the volume. Channels are read in vectors, and in those at the end that fill none
the kernel leaves that element's plane out, and names the one of the first plane, which need not be in the window.
"""

from __future__ import annotations

import functools

import torch

from primtorch.arguments import Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.layout import channels_last_strides, is_channels_last, is_contiguous, product, suggests_channels_last
from primtorch.spec import Size


def reads_channels_last(x: TensorLike) -> bool:
    """Whether eager reads a volume (N, C, D, H, W) or (C, D, H, W) channels last: one without a batch only where it is
    dense in that order."""
    shape, strides = tuple(x.shape), tuple(x.stride())
    if len(shape) == 5:
        return suggests_channels_last(shape, strides)
    batch, steps = (1, *shape), (product(shape), *strides)
    return is_channels_last(batch, steps) and not is_contiguous(batch, steps)


def channels_last_volume(shape: Sizes) -> Sizes:
    """The dense strides of a volume, of a batch or of none, that is channels last."""
    return channels_last_strides(shape) if len(shape) == 5 else channels_last_strides((1, *shape))[1:]


def names_first_plane(b: Builder, operand: int, x: Value) -> bool:
    """Whether there may be channels of a volume for which eager names the first plane. `operand` says which of the
    operator's the volume is."""
    if not (Fact.NAMES_FIRST_PLANE.on(x.device) and reads_channels_last(b.traced(operand, x))):
        return False
    channels = x.shape[x.rank - 4]
    return not (isinstance(channels, int) and channels % _lanes(x.dtype) == 0)


def by_first_plane(b: Builder, values: Value, indices: Value, window: tuple[Sizes, ...], spatial: Sizes) -> Value:
    """The positions of maxima as eager names them where `names_first_plane`."""
    _, (stride, *_), (padding, *_), (dilation, *_) = window
    channels, planes = values.shape[values.rank - 4 : values.rank - 2]
    dtype = values.dtype
    lowest = -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    first = b.iota(planes, values.device, -padding, stride)
    first = first + ((dilation - 1 - first) // dilation).maximum(0) * dilation  # that is inside
    behind = b.iota(channels, values.device) >= _in_vectors(channels, dtype)
    begun = values.eq(lowest) & behind.unsqueeze(1, 2, 3)
    return b.where(begun, indices - (first * product(spatial[1:])).unsqueeze(1, 2), indices)


def _in_vectors(channels: Size, dtype: torch.dtype) -> Size:
    return channels // _lanes(dtype) * _lanes(dtype)


def _lanes(dtype: torch.dtype) -> int:
    return max(_vector_bytes() // dtype.itemsize, 1)


@functools.cache
def _vector_bytes() -> int:
    """How wide the kernel's vectors are, as it tells itself: machines differ, and a release may name the right plane
    (which counts as vectors of one byte). 63 channels of a byte leave some over behind vectors of any length."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        volume = torch.zeros((1, 63, 2, 1, 1), dtype=torch.uint8, device="cpu")
        volume = volume.contiguous(memory_format=torch.channels_last_3d)
        _, indices = torch.ops.aten.max_pool3d_with_indices.default(volume, [1, 1, 1])
        right = int((indices[0, :, 1] == 1).sum())
    return 64 - right
