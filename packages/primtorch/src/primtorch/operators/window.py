"""Pooling."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product as cartesian

import torch
import torch.nn.functional as F

from primtorch import prims
from primtorch.arguments import PerDim, Sizes, TensorLike
from primtorch.builder import Builder, Value, same_size
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Formula, Refusal, Rule
from primtorch.layout import channels_last_strides, contiguous_strides, product, suggests_channels_last
from primtorch.operators.build import per_dim, strided
from primtorch.operators.refusals import refuse, refuse_batch
from primtorch.operators.volumes import by_first_plane, channels_last_volume, names_first_plane, reads_channels_last
from primtorch.operators.window_places import (
    certainly_alike,
    offsets_in_blocks,
    positions_in_blocks,
    positions_of,
)
from primtorch.prims.window import pooled_size
from primtorch.promotion import compute_dtype
from primtorch.samples import after, call, integers, listed, reals
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import expr_of, shape_env_of

OP = Family("window")


def _batched(x: Value, rank: int) -> tuple[Value, bool]:
    return (x, False) if x.rank == rank + 2 else (x.unsqueeze(0), True)


# --- pooling -------------------------------------------------------------------------------------
def max_pooled(b: Builder, x: Value, window: tuple[Sizes, ...], ceil_mode: bool = False) -> tuple[Value, Value]:
    """Maxima over windows (kernel, stride, padding, dilation of each dim) and the position of each in the image."""
    rank = len(window[0])
    image, single = _batched(x, rank)
    values, offsets = b.emit_several(prims.max_pool, image, *window, ceil_mode)
    if single:
        values, offsets = values.squeeze(0), offsets.squeeze(0)
    spatial = x.shape[x.rank - rank :]
    indices = positions_of(b, offsets, window, spatial)
    b.offsets[indices.node] = (offsets, (*window, spatial))
    return values, indices


def _lower_max_pool(rank: int) -> Rule:
    def rule(
        b: Builder,
        x: Value,
        kernel: PerDim,
        stride: PerDim = (),
        padding: PerDim = 0,
        dilation: PerDim = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        window = _window(rank, kernel, stride, padding, dilation)
        values, indices = max_pooled(b, x, window, ceil_mode)
        if rank == 3 and names_first_plane(b, 0, x):
            indices = by_first_plane(b, values, indices, window, x.shape[x.rank - rank :])
        return values, indices

    return rule


def _window(rank: int, kernel: PerDim, stride: PerDim, padding: PerDim, dilation: PerDim) -> tuple[Sizes, ...]:
    """Kernel, stride, padding and dilation for each dim; a stride that is not given is the kernel's size."""
    kernel = per_dim(kernel, rank)
    return kernel, per_dim(stride, rank, kernel), per_dim(padding, rank), per_dim(dilation, rank)


def scatter_by_position(b: Builder, grad: Value, x: Value, indices: Value, rank: int) -> Value:
    """Add each element of `grad` to the element of x's spatial dims whose flat position `indices` gives."""
    lead, windows = x.shape[: x.rank - rank], product(grad.shape[grad.rank - rank :])
    compute = compute_dtype(grad.dtype)
    zeros = b.full((*lead, product(x.shape[x.rank - rank :])), 0, compute, grad.device)
    place, given = (t.reshape((*lead, windows)) for t in (indices, grad.to(compute)))
    return b.emit(prims.scatter_add, zeros, len(lead), place, given).reshape(x.shape).to(grad.dtype)


def laid_out(x: TensorLike, shape: Sizes, dtype: torch.dtype | None = None) -> TensorSpec:
    """A result of this shape in x's memory format."""
    keeps = suggests_channels_last(tuple(x.shape), x.stride())
    return strided(x, shape, channels_last_strides(shape) if keeps else contiguous_strides(shape), dtype)


def laid_out_as_volume(x: TensorLike, shape: Sizes, dtype: torch.dtype | None = None) -> TensorSpec:
    """A result of this shape, of a volume with a batch or without, in x's memory format."""
    strides = channels_last_volume(shape) if reads_channels_last(x) else contiguous_strides(shape)
    return strided(x, shape, strides, dtype)


def laid_out_on_cpu(x: TensorLike, shape: Sizes) -> TensorSpec:
    """A result of this shape in x's memory format where the CPU's kernels make it; those of other devices write by
    rows: shuffles, pads with what is there, unpooling."""
    return laid_out(x, shape) if Fact.KEEPS_MEMORY_FORMATS.on(x.device) else by_rows(x, shape)


def by_rows(x: TensorLike, shape: Sizes, dtype: torch.dtype | None = None) -> TensorSpec:
    """A contiguous result of this shape."""
    return strided(x, shape, contiguous_strides(shape), dtype)


# Of the pools over volumes, those that average and those that adapt forget channels_last.
LAID_OUT = {1: laid_out, 2: laid_out, 3: by_rows}


def _pooled_shape(
    x: TensorLike,
    spatial: int,
    kernel: Sequence[Size],
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    ceil_mode: bool,
) -> Sizes:
    k = per_dim(kernel, spatial)
    s = per_dim(stride, spatial) if len(stride) else k
    p, d = per_dim(padding, spatial), per_dim(dilation, spatial)
    lead = x.dim() - spatial
    sizes = [pooled_size(x.shape[lead + i], k[i], s[i], p[i], d[i], ceil_mode) for i in range(spatial)]
    if any(size <= 0 for size in sizes):
        raise RuntimeError(
            f"Given input size: {list(x.shape)}. Calculated output size: {sizes}. Output size is too small"
        )
    return (*x.shape[:lead], *sizes)


def _max_pool(spatial: int) -> Formula:
    def formula(
        x: TensorLike,
        kernel_size: Sequence[Size],
        stride: Sequence[Size] = (),
        padding: Sequence[Size] = (0,),
        dilation: Sequence[Size] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[TensorSpec, TensorSpec]:
        shape = _pooled_shape(x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        kept = laid_out if spatial == 2 else laid_out_as_volume
        return kept(x, shape), kept(x, shape, torch.int64)

    return formula


OP.formula("max_pool2d_with_indices")(_max_pool(2))


def _check_window(
    kernel: Sequence[Size], stride: Sequence[Size], padding: Sequence[Size], dilation: Sequence[Size]
) -> None:
    for name, values in (("kernel size", kernel), ("stride", stride), ("dilation", dilation)):
        refuse(any(v <= 0 for v in values), lambda: f"{name} should be greater than zero, but got {list(values)}")
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


def _refuse_max_pool(spatial: int) -> Refusal:
    def check(
        x: TensorLike,
        kernel_size: Sequence[Size],
        stride: Sequence[Size] = (),
        padding: Sequence[Size] = (0,),
        dilation: Sequence[Size] = (1,),
        ceil_mode: bool = False,
    ) -> None:
        refuse_batch(f"max_pool{spatial}d", x, spatial)
        _check_window(kernel_size, stride, padding, dilation)

    return check


OP.refuses("max_pool2d_with_indices")(_refuse_max_pool(2))
OP.rule("max_pool2d_with_indices")(_lower_max_pool(2))
OP.formula("max_pool3d_with_indices")(_max_pool(3))
OP.refuses("max_pool3d_with_indices")(_refuse_max_pool(3))
OP.rule("max_pool3d_with_indices")(_lower_max_pool(3))


@OP.formula("max_pool2d_with_indices_backward", "avg_pool2d_backward")
def pool_backward(grad: TensorLike, x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    """A gradient as the image, in eager's layout for images."""
    return laid_out(x, tuple(x.shape))


@OP.formula("max_pool3d_with_indices_backward")
def _max_pool3d_backward(grad: TensorLike, x: TensorLike, *args: object) -> TensorSpec:
    # Without a batch it is the gradient that says how.
    return laid_out_as_volume(x if x.dim() == 5 else grad, tuple(x.shape))


@OP.refuses("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _refuse_max_pool_backward(
    grad: TensorLike,
    x: TensorLike,
    kernel_size: Sequence[Size],
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    *args: object,
) -> None:
    _check_window(kernel_size, stride, padding, dilation)


@OP.formula("avg_pool3d_backward")
def pool_backward_by_rows(grad: TensorLike, x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    """A gradient as the image, by rows, as eager lays volumes out."""
    return by_rows(x, tuple(x.shape))


# Of how many windows a position may be part for its gradient to be gathered from them; from more it is scattered.
_GATHERED = 9


def _overlap(kernel: Size, stride: Size, dilation: Size) -> int | None:
    """How many windows along a dim reach over one position at most; None where the sizes are not known."""
    if not (isinstance(kernel, int) and isinstance(stride, int) and isinstance(dilation, int)):
        return None
    return dilation * (kernel - 1) // stride + 1


def unpooled(b: Builder, grad: Value, x: Value, window: tuple[Sizes, ...], indices: Value) -> Value:
    """The gradient of max pools whose maxima lie in their windows (kernel, stride, padding and dilation of each dim).
    Where few windows overlap, each position looks at those over it, and takes the gradients of those whose maximum it
    was; else they are scattered."""
    kernel, stride, padding, dilation = window
    rank = len(kernel)
    overlaps = [_overlap(*sizes) for sizes in zip(kernel, stride, dilation, strict=True)]
    known = [n for n in overlaps if n is not None]
    # Where windows are walked, neighbouring positions are computed together only as the channels of one position.
    walked = b.walks_windows(indices.device) and not suggests_channels_last(indices.shape, indices.spec.strides)
    if len(known) < rank or math.prod(known) > _GATHERED or walked:
        return scatter_by_position(b, grad, x, indices, rank)
    first = x.rank - rank
    spatial = x.shape[first:]
    # The windows over position i are number (i + padding) // stride and the `overlap - 1` before: positions are
    # counted as (block, place in the block), a block being as long as the stride and the first one in the padding.
    blocks = [(size + p + s - 1) // s for size, s, p in zip(spatial, stride, padding, strict=True)]
    compute = compute_dtype(grad.dtype)
    offsets, windows = b.offsets.get(indices.node, (None, ()))
    if offsets is not None and not certainly_alike(windows, (*window, spatial)):
        offsets = None
    places = tuple(range(first + 1, first + 2 * rank, 2))
    total: Value | None = None
    for before in cartesian(*map(range, known)):
        low = (0,) * first + before
        high = (0,) * first + tuple(
            n - taken - back for n, taken, back in zip(blocks, grad.shape[first:], before, strict=True)
        )
        # A window that there is none of gives zero, whatever its maximum is taken to be.
        largest, given = (b.emit(prims.pad, t, low, high, 0).unsqueeze(*places) for t in (offsets or indices, grad))
        if offsets is None:
            own = positions_in_blocks(b, spatial, blocks, stride, padding, x.device)
        else:
            own = offsets_in_blocks(b, kernel, stride, dilation, before, x.device)
            largest = largest.to(own.dtype)
        part = b.where(largest.eq(own), given.to(compute), 0)
        total = part if total is None else total + part
    assert total is not None
    lengths = [n * s for n, s in zip(blocks, stride, strict=True)]
    total = total.reshape((*x.shape[:first], *lengths))
    for d, size in enumerate(spatial):
        total = total.slice(first + d, padding[d], padding[d] + size)
    return total.to(grad.dtype)


def _lower_max_pool_backward(rank: int) -> Rule:
    def rule(
        b: Builder,
        grad: Value,
        x: Value,
        kernel: PerDim,
        stride: PerDim,
        padding: PerDim,
        dilation: PerDim,
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        if rank == 3 and names_first_plane(b, 1, x):  # of which no window over it may know
            return scatter_by_position(b, grad, x, indices, rank)
        return unpooled(b, grad, x, _window(rank, kernel, stride, padding, dilation), indices)

    return rule


for _rank in (2, 3):
    OP.rule(f"max_pool{_rank}d_with_indices_backward")(_lower_max_pool_backward(_rank))


def equal_windows(spatial: Sequence[Size], out: Sequence[Size]) -> tuple[int, ...] | None:
    """The sides of the windows of one size that cover these dims without overlap, one for each element of `out`; None
    where they are not known, or no such windows are."""
    sides = [side_of(s, n) for s, n in zip(spatial, out, strict=True)]
    known = tuple([side for side in sides if isinstance(side, int)])
    return known if len(known) == len(sides) else None


def side_of(size: Size, out: Size) -> Size | None:
    """How many elements of a dim each of `out` windows has that share it alike, whatever symbols stand for; None where
    this is not certain."""
    if isinstance(size, int) and isinstance(out, int):
        return size // out if out and size and size % out == 0 else None
    env = shape_env_of(size) or shape_env_of(out)
    whole, parts = expr_of(size), expr_of(out)
    if env is None or not parts.terms or (whole % parts).terms:
        return None
    return env.size(whole // parts)


def repeated(x: Value, sides: Sequence[int]) -> Value:
    """Each element of the last dims as a block of these sides."""
    lead, spatial = x.shape[: x.rank - len(sides)], x.shape[x.rank - len(sides) :]
    apart = x.reshape((*lead, *(n for size in spatial for n in (size, 1))))
    blocks = apart.expand((*lead, *(n for pair in zip(spatial, sides, strict=True) for n in pair)))
    return blocks.reshape((*lead, *(size * side for size, side in zip(spatial, sides, strict=True))))


def lower_avg_pool(rank: int) -> Rule:
    """The rule of averages of windows over so many dims."""

    def rule(
        b: Builder,
        x: Value,
        kernel: PerDim,
        stride: PerDim = (),
        padding: PerDim = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        kernel = per_dim(kernel, rank)
        image, single = _batched(x, rank)
        out = b.emit(
            prims.avg_pool,
            image.compute(),
            kernel,
            per_dim(stride, rank, kernel),
            per_dim(padding, rank),
            ceil_mode,
            count_include_pad,
            divisor_override,
        ).to(x.dtype)
        return out.squeeze(0) if single else out

    return rule


def _window_counts(
    b: Builder,
    size: Size,
    out: Size,
    kernel: Size,
    stride: Size,
    padding: Size,
    include_pad: bool,
    device: torch.device,
) -> Value:
    """(out,) number of elements that each window along one dimension counts."""
    start = b.iota(out, device, start=-padding, step=stride)
    stop = (start + kernel).minimum(size + padding)
    if not include_pad:
        start, stop = start.maximum(0), stop.minimum(size)
    return stop - start


def _spread(b: Builder, grad: Value, dim: int, size: Size, kernel: Size, stride: Size, padding: Size) -> Value:
    """Sum over the windows along `dim` that cover each input position: dilate by the stride, then add k shifts."""
    out = grad.shape[dim]
    length = out * stride
    if not same_size(stride, 1):
        spaced = grad.unsqueeze(dim + 1)
        low = (0,) * spaced.rank
        high = tuple(stride - 1 if d == dim + 1 else 0 for d in range(spaced.rank))
        spaced = b.emit(prims.pad, spaced, low, high, b.number(0, grad))
        grad = spaced.reshape((*grad.shape[:dim], length, *grad.shape[dim + 1 :]))
    before = kernel - 1
    after = size + padding - length  # position i reads padded[i + padding : i + padding + kernel]
    low = tuple(before if d == dim else 0 for d in range(grad.rank))
    high = tuple(torch.sym_max(after, 0) if d == dim else 0 for d in range(grad.rank))
    padded = b.emit(prims.pad, grad, low, high, b.number(0, grad))
    total: Value | None = None
    for k in range(kernel):
        part = padded.slice(dim, padding + k, padding + k + size)
        total = part if total is None else total + part
    assert total is not None
    return total


def _grid(kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool) -> tuple[int, ...] | None:
    """The sides of windows that lie side by side, each within the image; None for others."""
    sides = tuple([size for size in kernel if isinstance(size, int)])
    numbers = all(isinstance(size, int) for size in (*stride, *padding)) and len(sides) == len(kernel)
    return sides if numbers and sides == tuple(stride) and not any(padding) and not ceil_mode else None


def _lower_avg_pool_backward(rank: int) -> Rule:
    def rule(
        b: Builder,
        grad: Value,
        x: Value,
        kernel: PerDim,
        stride: PerDim,
        padding: PerDim,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        kernel = per_dim(kernel, rank)
        stride, padding = per_dim(stride, rank, kernel), per_dim(padding, rank)
        first = x.rank - rank
        g = grad.compute()
        sides = equal_windows(x.shape[first:], grad.shape[first:])
        if sides is not None and tuple(kernel) == tuple(stride) == sides and not any(padding):
            return repeated(g / (divisor_override or product(sides)), sides).to(grad.dtype)
        grid = _grid(kernel, stride, padding, ceil_mode)
        if grid is not None:
            blocks = repeated(g / (divisor_override or math.prod(grid)), grid)
            behind = [size - length for size, length in zip(x.shape[first:], blocks.shape[first:], strict=True)]
            low, high = (0,) * x.rank, (*(0,) * first, *behind)
            return b.emit(prims.pad, blocks, low, high, b.number(0, blocks)).to(grad.dtype)
        if divisor_override is not None:
            g = g / divisor_override
        else:
            for d in range(rank):
                counts = _window_counts(
                    b,
                    x.shape[first + d],
                    grad.shape[first + d],
                    kernel[d],
                    stride[d],
                    padding[d],
                    count_include_pad,
                    x.device,
                )
                g = g / counts.to(g.dtype).unsqueeze(*range(1, rank - d))
        for d in range(rank):
            g = _spread(b, g, first + d, x.shape[first + d], kernel[d], stride[d], padding[d])
        return g.to(grad.dtype)

    return rule


def _avg_pool(spatial: int) -> Formula:
    kept = LAID_OUT[spatial]

    def formula(
        x: TensorLike,
        kernel_size: Sequence[Size],
        stride: Sequence[Size] = (),
        padding: Sequence[Size] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TensorSpec:
        return kept(x, _pooled_shape(x, spatial, kernel_size, stride, padding, (1,), ceil_mode))

    return formula


OP.formula("avg_pool1d")(_avg_pool(1))


def _refuse_avg_pool(spatial: int) -> Refusal:
    def check(
        x: TensorLike,
        kernel_size: Sequence[Size],
        stride: Sequence[Size] = (),
        padding: Sequence[Size] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        refuse_batch(f"avg_pool{spatial}d", x, spatial)
        _check_window(kernel_size, stride, padding, (1,))
        if spatial == 3:
            sides = zip(x.shape[-3:], per_dim(kernel_size, 3), strict=True)
            refuse(any(size < side for size, side in sides), "input image is smaller than the kernel")
        refuse(divisor_override == 0, "divisor must be not zero")

    return check


OP.refuses("avg_pool1d")(_refuse_avg_pool(1))
OP.rule("avg_pool1d")(lower_avg_pool(1))
OP.formula("avg_pool2d")(_avg_pool(2))
OP.refuses("avg_pool2d")(_refuse_avg_pool(2))
OP.rule("avg_pool2d")(lower_avg_pool(2))
OP.formula("avg_pool3d")(_avg_pool(3))
OP.refuses("avg_pool3d")(_refuse_avg_pool(3))
OP.rule("avg_pool3d")(lower_avg_pool(3))
OP.rule("avg_pool2d_backward")(_lower_avg_pool_backward(2))
OP.rule("avg_pool3d_backward")(_lower_avg_pool_backward(3))


# --- unpooling -----------------------------------------------------------------------------------
def _lower_max_unpool(rank: int) -> Rule:
    def rule(b: Builder, x: Value, indices: Value, output_size: Sequence[Size], *geometry: object) -> Value:
        lead = x.shape[: x.rank - rank]
        windows = product(x.shape[x.rank - rank :])
        zeros = b.full((*lead, product(output_size)), 0, x.dtype, x.device)
        out = b.emit(prims.scatter, zeros, len(lead), indices.reshape((*lead, windows)), x.reshape((*lead, windows)))
        return out.reshape((*lead, *output_size))

    return rule


@OP.formula("max_unpool2d")
def _max_unpool2d(x: TensorLike, indices: TensorLike, output_size: Sequence[Size]) -> TensorSpec:
    return laid_out_on_cpu(x, (*x.shape[:-2], *output_size))


@OP.refuses("max_unpool2d", "max_unpool3d")
def _refuse_max_unpool(x: TensorLike, indices: TensorLike, *args: object) -> None:
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


OP.rule("max_unpool2d")(_lower_max_unpool(2))


@OP.formula("max_unpool3d")
def _max_unpool3d(x: TensorLike, indices: TensorLike, output_size: Sequence[Size], *args: object) -> TensorSpec:
    shape = (*x.shape[:-3], *output_size)
    return by_rows(x, shape)


OP.rule("max_unpool3d")(_lower_max_unpool(3))


# --- windows at random ------------------------------------------------------------------------------
for _rank in (2, 3):
    OP.rule(f"fractional_max_pool{_rank}d_backward")(
        lambda b, grad, x, kernel, out, indices, rank=_rank: scatter_by_position(b, grad, x, indices, rank)
    )


@OP.formula("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional_max_pool(
    x: TensorLike, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: TensorLike
) -> tuple[TensorSpec, TensorSpec]:
    shape = (*x.shape[: x.dim() - len(output_size)], *output_size)
    strides = contiguous_strides(shape)
    return strided(x, shape, strides), strided(x, shape, strides, torch.int64)


@OP.refuses("fractional_max_pool2d", "fractional_max_pool3d")
def _refuse_fractional_max_pool(
    x: TensorLike, kernel_size: Sequence[int], output_size: Sequence[int], random_samples: TensorLike
) -> None:
    rank = len(output_size)
    refuse_batch(f"fractional_max_pool{rank}d()", x, rank, channels=False)
    refuse(any(n <= 0 for n in (*kernel_size, *output_size)), "kernel size and output size should be positive")
    least = 1 if rank == 3 else 0
    room = [size - k - o + 1 for size, k, o in zip(x.shape[-rank:], kernel_size, output_size, strict=True)]
    refuse(any(n < least for n in room), lambda: f"pool too large relative to input {list(x.shape)}")
    dims = random_samples.dim()
    refuse(dims != 3, lambda: f"Expect _random_samples to have 3 dimensions, got {dims}")
    images, channels, numbers = random_samples.shape
    batch = x.shape[0] if x.dim() == rank + 2 else 1
    refuse(images < batch, "Expect _random_samples.size(0) no less then input batch size.")
    refuse(channels != x.shape[-rank - 1], "Expect _random_samples.size(1) equals to input channel size.")
    refuse(numbers != rank, lambda: f"Expect _random_samples.size(2) equals to {rank}; got {numbers}.")


@OP.formula("fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def _fractional_max_pool_backward(grad: TensorLike, x: TensorLike, *args: object) -> TensorSpec:
    shape = tuple(x.shape)
    return by_rows(x, shape)


# --- samples ---------------------------------------------------------------------------------------

_AREA, _VOLUME = reals(2, 3, 7, 8), reals(1, 2, 5, 6, 7)
OP.samples("avg_pool1d", call(reals(2, 3, 7), [2], [2]))
OP.samples("avg_pool2d", call(_AREA, [3, 3], [2, 2], [1, 1], True), call(_AREA, [3, 2], [1, 2], [1, 0], False, False))
OP.samples("avg_pool2d_backward", call(reals(2, 3, 4, 4), _AREA, [3, 3], [2, 2], [1, 1], False, True, None))
OP.samples("avg_pool3d", call(_VOLUME, [2, 2, 2]))
OP.samples("avg_pool3d_backward", call(reals(1, 2, 2, 3, 3), _VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, 5))
OP.samples("fractional_max_pool2d", call(_AREA, [2, 2], [3, 4], reals(2, 3, 2, low=0.0, high=1.0)))
OP.samples("fractional_max_pool2d_backward", call(reals(2, 3, 3, 4), _AREA, [2, 2], [3, 4], integers(2, 3, 3, 4)))
OP.samples("fractional_max_pool3d", call(_VOLUME, [2, 2, 2], [2, 3, 3], reals(1, 2, 3, low=0.0, high=1.0)))
OP.samples(
    "fractional_max_pool3d_backward", call(reals(1, 2, 2, 3, 3), _VOLUME, [2, 2, 2], [2, 3, 3], integers(1, 2, 2, 3, 3))
)
# The places of maxima: each lies in its window, wherever that is.
_places_2d = lambda t: F.max_pool2d(t, 3, 2, 1, return_indices=True)[1]
_places_3d = lambda t: F.max_pool3d(t, 2, return_indices=True)[1]
OP.samples("max_pool2d_with_indices", call(_AREA, [3, 3], [2, 2], [1, 1]), call(_AREA, [3, 2], ceil_mode=True))
OP.samples(
    "max_pool2d_with_indices_backward",
    call(reals(2, 3, 4, 4), _AREA, [3, 3], [2, 2], [1, 1], [1, 1], False, after(_places_2d, _AREA)),
)
OP.samples("max_pool3d_with_indices", call(_VOLUME, [2, 2, 2]))
OP.samples(
    "max_pool3d_with_indices_backward",
    call(reals(1, 2, 2, 3, 3), _VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, after(_places_3d, _VOLUME)),
)
OP.samples("max_unpool2d", call(reals(3, 3, 4), after(lambda t: t.reshape(3, 3, 4), listed(*range(0, 72, 2))), [8, 9]))
OP.samples("max_unpool3d", call(reals(2, 2, 2, 2), integers(2, 2, 2, 2, below=1), [4, 4, 4], [2, 2, 2], [0, 0, 0]))
