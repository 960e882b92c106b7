"""Pooling: windows as views of the padded image."""

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def _count(size, kernel, stride, padding, dilation, ceil_mode):
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def _windows(x, kernel, stride, padding, dilation, ceil_mode, fill):
    """(N, C, *out, prod(kernel)) view of x padded with `fill`, also past the end where windows reach there."""
    sizes = x.shape[2:]
    geometry = list(zip(sizes, kernel, stride, padding, dilation, strict=True))
    out = [_count(*g, ceil_mode) for g in geometry]
    needed = [(n - 1) * s + d * (k - 1) + 1 for n, (_, k, s, _, d) in zip(out, geometry, strict=True)]
    ends = [(p, max(p, need - size - p)) for (size, _, _, p, _), need in zip(geometry, needed, strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *ends], constant_values=fill)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    axes = tuple(range(2, x.ndim))
    view = sliding_window_view(padded, reach, axes)
    starts = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(out, stride, strict=True))
    taps = tuple(slice(None, None, d) for d in dilation)
    view = view[(slice(None), slice(None), *starts, *taps)]
    return view.reshape(*x.shape[:2], *out, math.prod(kernel))


def max_pool(x, kernel, stride, padding, dilation, ceil_mode):
    low = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
    shown = _windows(x, kernel, stride, padding, dilation, ceil_mode, low)
    inside = _windows(np.ones((1, 1, *x.shape[2:]), bool), kernel, stride, padding, dilation, ceil_mode, False)
    inside = np.broadcast_to(inside, shown.shape)
    best = np.argmax(np.where(inside, shown, low), -1)[..., None]
    best = np.where(np.take_along_axis(inside, best, -1), best, np.argmax(inside, -1)[..., None])
    places = np.uint8 if math.prod(kernel) <= 256 else np.int32  # where in its window the maximum is
    return np.take_along_axis(shown, best, -1)[..., 0], best[..., 0].astype(places)


def avg_pool(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor):
    ones = (1,) * len(kernel)
    total = _windows(x, kernel, stride, padding, ones, ceil_mode, 0).sum(-1)
    if divisor is None:
        inside = np.ones((1, 1, *x.shape[2:]), x.dtype)
        if count_include_pad:
            inside = np.pad(inside, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=1)
            padding = (0,) * len(kernel)
            divisor = _windows_of_padded(inside, x, kernel, stride, ceil_mode, total)
        else:
            divisor = _windows(inside, kernel, stride, padding, ones, ceil_mode, 0).sum(-1)
    return (total / divisor).astype(x.dtype)


def _windows_of_padded(inside, x, kernel, stride, ceil_mode, total):
    """Elements of each window inside the padded image."""
    counts = np.ones((1, 1, *(1,) * len(kernel)), x.dtype)
    for d, (k, s) in enumerate(zip(kernel, stride, strict=True)):
        start = np.arange(total.shape[2 + d]) * s
        length = np.minimum(start + k, inside.shape[2 + d]) - start
        counts = counts * length.reshape([-1 if e == 2 + d else 1 for e in range(2 + len(kernel))])
    return counts
