"""Convolutions with a filter for each channel: an element of the result looks at its window, unrolled.

Such a convolution computes little and moves memory, as a pooling does, so that a kernel of ours is as fast as a
library's: of five of MobileNetV3's, channels last, 64 images, on an H100, 52, 37, 32, 15 and 17 us, and 59, 34, 28, 15
and 17 by cuDNN, which compiles most of its kernels at their first call, for 0.3 to 1 s each. Filters lie tap by tap for
it, so that neighbouring channels find theirs beside each other. The gradient of the images is such a window again, of
the gradient. That of the filters is a template (`ir.filter_gradient`) where the device's back end has a design for it,
whatever the images' sizes: its kernel reads what a library's does, once, and is there from the first call on. All of a
step of MobileNetV3 with 128 images take 0.63 ms of an H200, and 1.61 by cuDNN; of EfficientNet-B0 0.94 and 2.00. Left
to the library are images by rows, where neighbouring threads would read each channel's windows by themselves, and
filters that several results of a channel have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from primtorch.spec import TensorSpec
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ONE, ZERO, Index, contiguous_strides, dot, exprs, number
from torchinductor.ir import Axis, FilterGradient, Kernel, Recorder, Region, Stage
from torchinductor.lowering.context import Context, same_strides
from torchinductor.lowering.pointwise import convert_element_type
from torchinductor.lowering.values import Load, Masked, Ops, TensorValue
from torchinductor.lowering.views import permute, squeeze
from torchinductor.lowering.window import Windows

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32)
_TAPS = 25  # that are unrolled: a kernel of more takes long to compile


def depthwise(ctx: Context, image: TensorValue, filters: TensorValue, *settings: object) -> TensorValue | None:
    """The convolution of channels-last images, without a bias; None where the filters are others, or the device has
    better. `settings`: what `primtorch.prims.convolution` takes behind the bias."""
    assert ctx.node is not None
    if not _fits(ctx, ctx.node.args[0], filters, settings):
        return None
    stride, padding, dilation = _geometry(settings)
    made = cast("TensorSpec", ctx.node.meta["val"])
    windows = Windows(image, _kernel(filters), stride, padding, dilation, exprs(made.shape))
    taps = _by_taps(ctx, filters)
    wide = _stored(ctx, image)

    def element(index: Index, ops: Ops) -> int:
        total: int | None = None
        for place in windows.places():
            spatial = windows.at(index[2:], exprs(place))
            mask = windows.inside(ops, spatial, place)
            part = wide.load((*index[:2], *spatial), ops if mask is None else Masked(ops, mask))
            total = _added(ops, total, part, taps.load((*exprs(place), index[1]), ops))
        assert total is not None
        return total

    return _of_kind(ctx, element, exprs(made.shape), image, windows.count)


def image_gradient(
    ctx: Context, gradient: TensorValue, image: TensorValue, filters: TensorValue, *settings: object
) -> TensorValue | None:
    """The gradient of the images of such a convolution: each element gathers what it was multiplied for."""
    assert ctx.node is not None
    if not _fits(ctx, ctx.node.args[1], filters, settings) or not _is_channels_last(ctx.node.args[0]):
        return None
    stride, padding, dilation = _geometry(settings)
    taps = _by_taps(ctx, filters)
    wide = _stored(ctx, gradient)
    sizes = gradient.shape[2:]
    kernel = _kernel(filters)

    def element(index: Index, ops: Ops) -> int:
        total: int | None = None
        for y in range(kernel[0]):
            for x in range(kernel[1]):
                mask: int | None = None
                at: list[IntExpr] = []
                for dim, tap in enumerate((y, x)):
                    reach = padding[dim] - tap * dilation[dim]
                    place = index[2 + dim] + number(reach)
                    at.append(place // number(stride[dim]))
                    for test in _tests(ops, place, image.shape[2 + dim], reach, stride[dim], sizes[dim]):
                        mask = test if mask is None else ops.apply("bitwise_and", mask, test)
                part = wide.load((*index[:2], *at), ops if mask is None else Masked(ops, mask))
                total = _added(ops, total, part, taps.load((number(y), number(x), index[1]), ops))
        assert total is not None
        return total

    return _of_kind(ctx, element, image.shape, image, kernel[0] * kernel[1])


def filter_gradient(
    ctx: Context, gradient: TensorValue, image: TensorValue, filters: TensorValue, *settings: object
) -> TensorValue | None:
    """The gradient of the filters of such a convolution, summed up in float32; None where the device's back end has no
    design for it either."""
    assert ctx.node is not None
    if not _fits(ctx, ctx.node.args[1], filters, settings) or not _is_channels_last(ctx.node.args[0]):
        return None
    stride, padding, dilation = _geometry(settings)
    regions = {"gradient": _region(ctx, gradient), "image": _region(ctx, image)}
    high, wide = kernel = _kernel(filters)
    batch, channels, height, width = gradient.shape
    sizes = (number(high), number(wide), channels, batch * height, width)
    axes = tuple(Axis(f"i{at}", size, at >= 3) for at, size in enumerate(sizes))
    y, x, channel, line, column = (axis.var for axis in axes)
    result = ctx.new_buffer(filters.shape, filters.dtype, filters.device, exprs(ctx.node.meta["val"][1].stride()))

    inner, key = Recorder({a.name: a.size for a in axes}), ctx.new_name("r")
    windows = Windows(image, kernel, stride, padding, dilation, gradient.shape)
    place = (line // height, channel, line % height, column)
    spatial = windows.at(place[2:], (y, x))
    mask = windows.inside(inner, spatial, None)
    part = image.load((*place[:2], *spatial), inner if mask is None else Masked(inner, mask))
    inner.reduce("sum", key, inner.apply("mul", gradient.load(place, inner), part))
    outer = Recorder({a.name: a.size for a in axes})
    outer.store(result.name, dot((channel, ZERO, y, x), result.strides), outer.carried(key, torch.float32))

    stages = (Stage("inner", inner.body()), Stage("outer", outer.body()))
    template = FilterGradient(
        kind="filter_gradient",
        loops=Kernel(ctx.new_name("op"), filters.device, axes, stages, ctx.buffers, ctx.origin()),
        kernel=kernel,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        **regions,
    )
    if not ctx.takes(template):
        return None
    ctx.operations.append(template)
    return ctx.strided(result)


def _region(ctx: Context, value: TensorValue) -> Region:
    data = ctx.realize(value)
    return Region(data.buffer, value.shape, data.strides, data.offset)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return height, width


def _tests(ops: Ops, place: IntExpr, size: IntExpr, reach: int, stride: int, made: IntExpr) -> list[int]:
    """Whether a window's element at a place of the padded image, in units of the stride, belongs to an output."""
    found = []
    if stride != 1:
        found.append(ops.apply("eq", ops.index_expr(place % number(stride), torch.int64), ops.constant(0, torch.int64)))
    if reach < 0:
        found.append(ops.apply("ge", ops.index_expr(place, torch.int64), ops.constant(0, torch.int64)))
    end = made * number(stride)
    last = (size - ONE + number(reach) - end).as_int()
    if last is None or last >= 0:
        found.append(ops.apply("lt", ops.index_expr(place, torch.int64), ops.index_expr(end, torch.int64)))
    return found


def _geometry(settings: Sequence[object]) -> tuple[list[int], list[int], list[int]]:
    """Strides, paddings and dilations of a convolution that fits."""
    stride, padding, dilation = (list(cast("Sequence[int]", part)) for part in settings[:3])
    return stride, padding, dilation


def _is_known(settings: Sequence[object]) -> bool:
    """Whether strides, paddings and dilations are numbers: what a program computes of sizes may be symbols."""
    return all(isinstance(one, int) for part in settings[:3] for one in cast("Sequence[object]", part))


def _kernel(filters: TensorValue) -> tuple[int, int]:
    height, width = (size.as_int() for size in filters.shape[2:])
    assert height is not None and width is not None
    return height, width


def _fits(ctx: Context, image: object, filters: TensorValue, settings: Sequence[object]) -> bool:
    """Whether each channel of channels-last images has a filter of few taps, on a device that wants it so."""
    *_, transposed, _, groups = settings
    kernel = [size.as_int() for size in filters.shape[2:]]
    if len(kernel) != 2 or None in kernel or transposed or not ctx.traits_of(filters.device).channels_last:
        return False
    if not _is_known(settings):
        return False
    value = cast("fx.Node", image).meta["val"]
    alike = filters.shape[0].as_int() == groups == value.shape[1] and filters.shape[1] == ONE
    few = 1 < cast("int", kernel[0]) * cast("int", kernel[1]) <= _TAPS
    return alike and few and value.dtype in _NUMBERS and _is_channels_last(image)


def _is_channels_last(image: object) -> bool:
    """How many images there are need not be known, and nobody is asked."""
    value = cast("fx.Node", image).meta["val"]
    batch, channels, height, width = shape = exprs(value.shape)
    if batch.as_int() == 0 or any((size.as_int() or 0) < 1 for size in shape[1:]):
        return False
    images, rows, columns, step = contiguous_strides((batch, height, width, channels))
    return same_strides(shape, exprs(value.stride()), (images, step, rows, columns))


def _by_taps(ctx: Context, filters: TensorValue) -> TensorValue:
    """The filters as (height, width, channels), in memory, as float32."""
    taps = squeeze(ctx, permute(ctx, filters, (2, 3, 0, 1)), (3,))
    return convert_element_type(ctx, ctx.realize_exactly(taps, contiguous_strides(taps.shape)), torch.float32)


def _stored(ctx: Context, image: TensorValue) -> TensorValue:
    """Images in memory, which each element is read of several times, as float32."""
    ctx.store(image)
    return convert_element_type(ctx, image, torch.float32)


def _added(ops: Ops, total: int | None, value: int, tap: int) -> int:
    part = ops.apply("mul", value, tap)
    return part if total is None else ops.apply("add", total, part)


def _of_kind(ctx: Context, element: Load, shape: Index, like: TensorValue, taps: int) -> TensorValue:
    """The result, rounded once."""
    wide = ctx.lazy(shape, torch.float32, like.device, element, of=[like], cost=3 * taps, heavy=True)
    return convert_element_type(ctx, wide, like.dtype)
