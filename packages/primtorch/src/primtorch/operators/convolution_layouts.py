"""How results of convolutions lie in memory: as the library that PyTorch gives the call to lays them out.

Which library that is depends on the processor, the number of threads, the dtype and the sizes, and PyTorch is asked
(`_select_conv_backend`), with tensors of the call's sizes that have one element. To all of them images of one dim are
images of two, of height 1, and contiguous. Each looks at the order of dims that the image and the filters suggest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from primtorch.arguments import Sizes, TensorLike
from primtorch.eager_kernels import Fact
from primtorch.frozen import record
from primtorch.layout import (
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
    is_contiguous,
    suggests_channels_last,
)
from primtorch.spec import Size
from primtorch.symbolic import hint_of

_BY_GROUPS = frozenset({"Slow2d", "SlowDilated2d", "SlowTranspose2d"})
"""ATen's own, which compute a group at a time and join what comes of it."""
_ONEDNN = frozenset({"Mkldnn", "???"})
"""The binding has no name for oneDNN's transposed convolutions."""
_KEEP_CHANNELS_LAST = _BY_GROUPS | _ONEDNN | {"Cudnn"}
_SOME = 16
"""What a size that only the data tells is taken for."""


@record
class Convolution:
    """What a convolution is given beside its tensors."""

    stride: Sequence[Size]
    padding: Sequence[Size]
    dilation: Sequence[Size]
    transposed: bool
    output_padding: Sequence[Size]
    groups: Size

    def library(self, image: TensorLike, filters: TensorLike) -> str:
        """The name of what PyTorch computes it by."""
        if not Fact.CONVOLVES_BY_SEVERAL_LIBRARIES.on(image.device):
            return "Cudnn"
        sizes = (_hints(values) for values in (image.shape, filters.shape, self.stride, self.padding, self.dilation))
        threads = torch.get_num_threads(), torch.backends.mkldnn.enabled
        rest = self.transposed, _hints(self.output_padding), hint_of(self.groups, _SOME)
        return _chosen(image.dtype, *sizes, *rest, *threads)


def result_strides(image: TensorLike, filters: TensorLike, shape: Sizes, call: Convolution) -> Sizes:
    """Strides of what a convolution gives, or of the gradient of its image, in `shape`."""
    library = call.library(image, filters)
    last, planes = _keeps_channels_last(image, filters, library), _as_planes(shape)
    if library in _BY_GROUPS and call.groups > 1:
        part = planes[0], planes[1] // call.groups, *planes[2:]
        last = last and suggests_channels_last(part, channels_last_strides(part))
    return _without_height(shape, _strides(planes, last))


def filter_gradient_strides(image: TensorLike, filters: TensorLike, call: Convolution) -> Sizes:
    """Strides of the gradient of a convolution's filters."""
    library, shape = call.library(image, filters), tuple(filters.shape)
    last, planes = _keeps_channels_last(image, filters, library), _as_planes(shape)
    if library in _BY_GROUPS:
        part = planes[0] // call.groups, *planes[1:]
        given = _plane_strides(shape, filters.stride())
        both = is_contiguous(part, given) and is_channels_last(part, given)
        # Those that copy the filters, and keep the copy's order, copy none that are in both.
        by_rows = library != "SlowDilated2d" and both and not suggests_channels_last(part, given)
        last = last and not by_rows
        if call.groups > 1:  # parts are joined in the order that they suggest
            last = last and suggests_channels_last(part, channels_last_strides(part))
    return _without_height(shape, _strides(planes, last))


def _keeps_channels_last(image: TensorLike, filters: TensorLike, library: str) -> bool:
    if library not in _KEEP_CHANNELS_LAST or (library == "Cudnn" and image.dtype is torch.float64):
        return False
    shape, strides = tuple(image.shape), image.stride()
    if len(shape) == 3 and not is_contiguous(shape, strides):
        strides = contiguous_strides(shape)
    return any(
        suggests_channels_last(_as_planes(shape), _plane_strides(shape, strides))
        for shape, strides in ((shape, strides), (tuple(filters.shape), filters.stride()))
    )


def _as_planes(shape: Sizes) -> Sizes:
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def _plane_strides(shape: Sizes, strides: Sizes) -> Sizes:
    return (*strides[:2], shape[2] * strides[2], strides[2]) if len(shape) == 3 else tuple(strides)


def _without_height(shape: Sizes, strides: Sizes) -> Sizes:
    return (*strides[:2], strides[3]) if len(shape) == 3 else strides


def _strides(shape: Sizes, channels_last: bool) -> Sizes:
    return channels_last_strides(shape) if channels_last else contiguous_strides(shape)


def _hints(sizes: Sequence[Size]) -> tuple[int, ...]:
    return tuple(hint_of(size, _SOME) for size in sizes)


@functools.lru_cache(maxsize=4096)
def _chosen(
    dtype: torch.dtype,
    image: tuple[int, ...],
    filters: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
    threads: int,
    onednn: bool,
) -> str:
    """The name of the library for a call on the CPU. The last two are what else its choice depends on."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        one = torch.empty((), dtype=dtype, device="cpu")
        call = list(stride), list(padding), list(dilation), transposed, list(output_padding), groups
        chosen = torch._C._select_conv_backend(one.expand(image), one.expand(filters), None, *call, None)
    return str(chosen.name)
