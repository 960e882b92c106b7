"""Operators that programs seldom spell themselves: fused and unsafe variants, windows of signals, counted positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.activations import chance
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.creation import linspace
from primtorch.decompose.table import RuleTable
from primtorch.placement import resolved_device
from primtorch.promotion import result_type

aten = torch.ops.aten
RULES = RuleTable()


# --- fused ---------------------------------------------------------------------------------------
@RULES(aten._add_relu.Tensor, aten._add_relu.Scalar)
def _add_relu(b: Builder, x: Value, y: Any, alpha: Any = 1) -> Value:
    dtype = result_type((x, y))
    wide = x.to(dtype).compute()
    other = y.to(wide.dtype) if isinstance(y, Value) else y
    other = other if alpha == 1 else other * alpha
    return (wide + other).maximum(0).to(dtype)


@RULES(aten._masked_scale.default)
def _masked_scale(b: Builder, x: Value, mask: Value, scale: float) -> Value:
    wide = x.compute()
    return (wide * mask.to(wide.dtype) * scale).to(x.dtype)


@RULES(aten._fused_dropout.default)
def _fused_dropout(b: Builder, x: Value, p: float, generator: Any = None) -> tuple[Value, Value]:
    """Keeps each element with probability p, unlike dropout."""
    if generator is not None:
        raise NotImplementedError("_fused_dropout with a generator of its own: draws come from the device's generator")
    keep = chance(b, x.shape, x.device, float(p))
    return b.where(keep, x.compute() / float(p), 0.0).to(x.dtype), keep.to(torch.uint8)


@RULES(aten._masked_softmax.default)
def _masked_softmax(b: Builder, x: Value, mask: Value, dim: int | None = None, mask_type: int | None = None) -> Value:
    """Softmax over the elements whose mask is false."""
    dim = x.rank - 1 if dim is None else x.dim(dim)
    if mask_type == 0:
        mask = mask.unsqueeze(0, 1)
    elif mask_type == 1:
        mask = mask.unsqueeze(1, 2)
    wide = b.where(mask.expand(x.shape), -math.inf, x.compute())
    top = wide.reduce(prims.amax, (dim,), True)
    e = (wide - b.where(top.eq(-math.inf), 0.0, top)).map(prims.exp)
    total = e.sum((dim,), True)
    return b.where(total.eq(0.0), 0.0, e / b.where(total.eq(0.0), 1.0, total)).to(x.dtype)


@RULES(aten._stack.default)
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = result_type(tensors)
    dim = dim + tensors[0].rank + 1 if dim < 0 else dim
    return b.cat([t.to(dtype).unsqueeze(dim) for t in tensors], dim)


@RULES("aten::_chunk_cat.default")
def _chunk_cat(b: Builder, tensors: Sequence[Value], dim: int, num_chunks: int) -> Value:
    """Each tensor's `dim` padded to a multiple of the chunks, each chunk flattened, chunks of all tensors joined."""
    parts = []
    for t in tensors:
        axis = t.dim(dim)
        size = (t.shape[axis] + num_chunks - 1) // num_chunks
        high = tuple(size * num_chunks - t.shape[axis] if d == axis else 0 for d in range(t.rank))
        padded = b.emit(prims.pad, t, (0,) * t.rank, high, b.number(0, t)) if not same_size(high[axis], 0) else t
        rest: Any = size
        for s in t.shape[axis + 1 :]:
            rest = rest * s
        parts.append(padded.reshape((*t.shape[:axis], num_chunks, rest)))
    return b.cat(parts, parts[0].rank - 1)


@RULES(aten.narrow_copy.default)
def _narrow_copy(b: Builder, x: Value, dim: int, start: Any, length: Any) -> Value:
    dim = x.dim(dim)
    start = start + x.shape[dim] if start < 0 else start
    return x.slice(dim, start, start + length)


@RULES(aten._is_all_true.default)
def _is_all_true(b: Builder, x: Value) -> Value:
    return x.reduce(prims.all, tuple(range(x.rank)))


@RULES(aten._is_any_true.default)
def _is_any_true(b: Builder, x: Value) -> Value:
    return x.reduce(prims.any, tuple(range(x.rank)))


@RULES(aten._conv_depthwise2d.default, aten.conv_depthwise3d.default)
def _conv_depthwise(
    b: Builder, x: Value, weight: Value, kernel_size: Any, bias: Value | None, stride: Any, padding: Any, dilation: Any
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation, groups=x.shape[1])


@RULES(aten._slow_conv2d_forward.default, aten.slow_conv3d_forward.default)
def _slow_conv(
    b: Builder, x: Value, weight: Value, kernel_size: Any, bias: Value | None, stride: Any, padding: Any
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, (1,) * (weight.rank - 2))


@RULES(aten.slow_conv_dilated2d.default, aten.slow_conv_dilated3d.default)
def _slow_conv_dilated(
    b: Builder,
    x: Value,
    weight: Value,
    kernel_size: Any,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation)


@RULES(aten.slow_conv_transpose2d.default, aten.slow_conv_transpose3d.default)
def _slow_conv_transpose(
    b: Builder,
    x: Value,
    weight: Value,
    kernel_size: Any,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
) -> Value:
    return _plain_convolution(b, x, weight, bias, stride, padding, dilation, extra=output_padding)


def _plain_convolution(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    *,
    groups: Any = 1,
    extra: Any = None,
) -> Value:
    rank = weight.rank - 2
    each = [
        tuple(v) if isinstance(v, (tuple, list)) else (v,) * rank
        for v in (stride, padding, dilation, 0 if extra is None else extra)
    ]
    single = x.rank == rank + 1
    out = b.emit(
        prims.convolution, x.unsqueeze(0) if single else x, weight, bias, *each[:3], extra is not None, each[3], groups
    )
    return out.squeeze(0) if single else out  # type: ignore[no-any-return]


@RULES(aten._convolution.default)
def _convolution(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *flags: bool,
) -> Value:
    return _plain_convolution(
        b, x, weight, bias, stride, padding, dilation, groups=groups, extra=output_padding if transposed else None
    )


# --- positions -----------------------------------------------------------------------------------
def _rank_among_true(b: Builder, mask: Value) -> tuple[Value, Value]:
    """(how many true elements come before each, flat int64; their number)."""
    ones = mask.reshape((mask.numel(),)).to(torch.int64)
    return b.emit(prims.cumsum, ones, 0) - ones, ones.sum((0,))


@RULES(aten.nonzero_static.default)
def _nonzero_static(b: Builder, x: Value, *, size: Any, fill_value: int = -1) -> Value:
    if x.rank == 0:
        return b.full((size, 0), 0, torch.int64, x.device)
    mask = x if x.dtype is torch.bool else x.ne(0)
    before, count = _rank_among_true(b, mask)
    kept = mask.reshape((mask.numel(),)) & (before < size)
    slots = b.where(kept, before, size)
    flat = b.emit(
        prims.scatter, b.full((size + 1,), 0, torch.int64, x.device), 0, slots, b.iota(x.numel(), x.device)
    ).slice(0, 0, size)
    columns = []
    for length in reversed(x.shape):
        columns.append(flat % length)
        flat = flat // length
    places = b.cat([c.unsqueeze(1) for c in reversed(columns)], 1)
    return b.where((b.iota(size, x.device) < count).unsqueeze(1), places, fill_value)


@RULES(aten.masked_scatter_backward.default)
def _masked_scatter_backward(b: Builder, grad: Value, mask: Value, sizes: Sequence[Any]) -> Value:
    total: Any = 1
    for s in sizes:
        total = total * s
    mask = mask.expand(grad.shape)
    before, _ = _rank_among_true(b, mask)
    slots = b.where(mask.reshape((mask.numel(),)), before, total)
    zeros = b.full((total + 1,), 0, grad.dtype, grad.device)
    out = b.emit(prims.scatter, zeros, 0, slots, grad.reshape((grad.numel(),)))
    return out.slice(0, 0, total).reshape(sizes)  # type: ignore[no-any-return]


def _triangle_indices(lower: bool) -> Callable[..., Value]:
    def rule(
        b: Builder,
        rows: int,
        columns: int,
        offset: int = 0,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Value:
        place = resolved_device(device)
        kind = dtype or torch.int64

        def span(i: int) -> tuple[int, int]:
            edge = min(max(i + offset + (1 if lower else 0), 0), columns)
            return (0, edge) if lower else (edge, columns)

        total = sum(span(i)[1] - span(i)[0] for i in range(rows))
        i = b.iota(rows, place)
        edge = (i + (offset + (1 if lower else 0))).maximum(0).minimum(columns)
        lengths = edge if lower else columns - edge
        ends = b.emit(prims.cumsum, lengths, 0)
        k = b.iota(total, place)
        if total == 0:
            return b.full((2, 0), 0, kind, place)
        row = b.emit(prims.searchsorted, ends, k, True)
        start = b.emit(prims.index, ends - lengths, (row,), False)
        column = k - start
        if not lower:
            column = column + b.emit(prims.index, edge, (row,), False)
        return b.cat([row.unsqueeze(0), column.unsqueeze(0)], 0).to(kind)

    return rule


RULES.add(aten.tril_indices.default, _triangle_indices(True))
RULES.add(aten.triu_indices.default, _triangle_indices(False))


# --- histograms ----------------------------------------------------------------------------------
def _histogram(b: Builder, x: Value, edges: Value, weight: Value | None, density: bool) -> tuple[Value, Value]:
    """Counts in [e_i, e_i+1), the last interval closed."""
    flat = x.reshape((x.numel(),))
    bins = edges.shape[0] - 1
    inside = (flat >= edges.select(0, 0)) & (flat <= edges.select(0, bins))
    place = (b.emit(prims.searchsorted, edges, flat, True) - 1).maximum(0).minimum(bins - 1)
    ones = b.full_like(flat, 1) if weight is None else weight.reshape((x.numel(),))
    counts = b.emit(prims.scatter_add, b.full((bins,), 0, x.dtype, x.device), 0, place, b.where(inside, ones, 0))
    if density:
        widths = edges.slice(0, 1, bins + 1) - edges.slice(0, 0, bins)
        counts = counts / (counts.sum((0,)) * widths)
    return counts, edges


@RULES(aten.histogram.bins_tensor)
def _histogram_by_edges(
    b: Builder, x: Value, bins: Value, *, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    return _histogram(b, x, bins, weight, density)


@RULES(aten.histogram.bin_ct)
def _histogram_by_count(
    b: Builder,
    x: Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    if range is not None:
        low, high = (b.full((), float(v), x.dtype, x.device) for v in range)
    elif any(isinstance(size, int) and size == 0 for size in x.shape):
        low, high = b.full((), 0.0, x.dtype, x.device), b.full((), 1.0, x.dtype, x.device)
    else:
        flat = x.reshape((x.numel(),))
        low, high = flat.reduce(prims.amin, (0,)), flat.reduce(prims.amax, (0,))
    point = low.eq(high)
    low, high = b.where(point, low - 0.5, low), b.where(point, high + 0.5, high)
    edges = linspace(b, low, high, bins + 1, dtype=x.dtype, device=x.device)
    return _histogram(b, x, edges, weight, density)


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


def _window(b: Builder, length: Any, periodic: bool, shape: Callable[[Value], Value], options: Any) -> Value:
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = options.get("device")
    place = resolved_device(device)
    if isinstance(length, int) and length <= 1:
        return b.full((length,), 1, dtype, place)
    t = b.iota(length, place).to(torch.float64) / float(length if periodic else length - 1)
    return shape(t).to(dtype)


def _window_rule(shape: Callable[[Value], Value]) -> Any:
    def rule(b: Builder, length: Any, periodic: bool = True, **options: Any) -> Value:
        return _window(b, length, periodic, shape, options)

    return rule


for _name, _shape in (
    ("hann", _cosines(0.5, 0.5)),
    ("blackman", _cosines(0.42, 0.5, 0.08)),
    ("bartlett", lambda t: 1.0 - (t * 2.0 - 1.0).map(prims.abs)),
):
    for _overload in ("default", "periodic"):
        RULES.add(getattr(getattr(aten, f"{_name}_window"), _overload), _window_rule(_shape))


@RULES(
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
)
def _hamming(
    b: Builder, length: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any
) -> Value:
    return _window(b, length, periodic, _cosines(alpha, beta), options)


@RULES(aten.kaiser_window.default, aten.kaiser_window.periodic, aten.kaiser_window.beta)
def _kaiser(b: Builder, length: Any, periodic: bool = True, beta: float = 12.0, **options: Any) -> Value:
    def shape(t: Value) -> Value:
        r = t * 2.0 - 1.0
        top = ((1.0 - r * r).maximum(0.0).map(prims.sqrt) * beta).map(prims.i0)
        return top / b.full_like(t, beta).map(prims.i0)

    return _window(b, length, periodic, shape, options)


@RULES(aten.fft_fftfreq.default)
def _fftfreq(b: Builder, n: Any, d: float = 1.0, **options: Any) -> Value:
    return _frequencies(b, n, d, (n + 1) // 2, n, options)


@RULES(aten.fft_rfftfreq.default)
def _rfftfreq(b: Builder, n: Any, d: float = 1.0, **options: Any) -> Value:
    return _frequencies(b, n, d, n // 2 + 1, n // 2 + 1, options)


def _frequencies(b: Builder, n: Any, d: float, positive: Any, length: Any, options: Any) -> Value:
    dtype = options.get("dtype") or torch.get_default_dtype()
    device = options.get("device")
    place = resolved_device(device)
    k = b.iota(length, place)
    return (b.where(k < positive, k, k - n).to(dtype) * float(1.0 / (n * d))).to(dtype)


# --- older names and helpers -----------------------------------------------------------------------
@RULES("aten::_aminmax.default", "aten::_aminmax.dim")
def _aminmax(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = tuple(d for d in (range(x.rank) if dim is None else (x.dim(dim),))) if x.rank else ()
    return x.reduce(prims.amin, dims, keepdim), x.reduce(prims.amax, dims, keepdim)


@RULES("aten::_logcumsumexp.default")
def _logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    return b.emit(prims.logcumsumexp, x.compute(), x.dim(dim)).to(x.dtype) if x.rank else x  # type: ignore[no-any-return]


@RULES(aten.conv_tbc.default)
def _conv_tbc(b: Builder, x: Value, weight: Value, bias: Value, pad: int = 0) -> Value:
    """Convolution over (time, batch, channels) with a (width, in, out) weight."""
    out = b.emit(
        prims.convolution, x.permute((1, 2, 0)), weight.permute((2, 1, 0)), bias, (1,), (pad,), (1,), False, (0,), 1
    )
    return out.permute((2, 0, 1))  # type: ignore[no-any-return]


@RULES("aten::_unique.default")
def _unique(b: Builder, x: Value, sorted: bool = True, return_inverse: bool = False) -> tuple[Value, Value]:
    if b.val is not None:
        b.val = (*b.val, b.contiguous_spec((0,), torch.int64, x.device))
    values, inverse, _ = b.emit(prims.unique2, x, sorted, return_inverse, False)
    return values, inverse


@RULES(aten._masked_softmax_backward.default)
def _masked_softmax_backward(b: Builder, grad: Value, output: Value, mask: Value, dim: int | None = None) -> Value:
    dim = output.rank - 1 if dim is None else output.dim(dim)
    y, g = output.compute(), grad.compute()
    g = b.where(mask.expand(grad.shape), 0.0, g)
    product = g * y
    return (product - y * product.sum((dim,), True)).to(grad.dtype)


@RULES("aten::linalg__powsum.default")
def _powsum(
    b: Builder, x: Value, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """sum |x|^p."""
    out_dtype = dtype or (x.dtype.to_real() if x.dtype.is_complex else x.dtype)
    size = x.compute().map(prims.abs)
    dims = tuple(range(x.rank)) if dim is None else tuple(x.dim(d) for d in ((dim,) if isinstance(dim, int) else dim))
    term = size * size if order == 2 else size if order == 1 else size ** float(order)
    return term.sum(dims, keepdim).to(out_dtype)


@RULES(aten.batch_norm_gather_stats_with_counts.default)
def _gathered_statistics(
    b: Builder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: float,
    eps: float,
    counts: Value,
) -> tuple[Value, Value]:
    """Mean and rstd of the union of batches of (world,) counts with (world, C) statistics (Chan et al. 1979)."""
    wide = counts.to(mean.dtype).unsqueeze(1)
    total = wide.sum((0,))
    var = (invstd * invstd).map(prims.reciprocal) - eps
    joint = (mean * wide).sum((0,)) / total
    apart = mean - joint
    joint_var = ((var + apart * apart) * wide).sum((0,)) / total
    return joint, (joint_var + eps).map(prims.rsqrt)


@RULES(aten.batch_norm_gather_stats.default)
def _gathered_equal_statistics(
    b: Builder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Value, Value]:
    counts = b.full((mean.shape[0],), count, mean.dtype, mean.device)
    return _gathered_statistics(b, x, mean, invstd, running_mean, running_var, momentum, eps, counts)  # type: ignore[no-any-return]
