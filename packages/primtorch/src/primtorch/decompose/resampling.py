"""Cubic and antialiased resampling, affine grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.table import RuleTable
from primtorch.decompose.windows import refuse_bytes, times

aten = torch.ops.aten
RULES = RuleTable()
_KEYS = -0.75  # Keys (1981), the parameter that eager uses
_KEYS_ANTIALIASED = -0.5


def _ratio(size: Any, out: Any, align_corners: bool, scale: float | None) -> Any:
    if align_corners:
        return (size - 1) / (out - 1) if not same_size(out, 1) and out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else size / out


def _cubic(t: Value, a: float) -> Value:
    """The cubic convolution kernel at distance t >= 0."""
    near = ((t * (a + 2) - (a + 3)) * t) * t + 1.0
    far = ((t * a - 5 * a) * t + 8 * a) * t - 4 * a
    return t.b.where(t < 1.0, near, t.b.where(t < 2.0, far, 0.0))


def _cubic_taps(
    b: Builder, size: Any, out: Any, align_corners: bool, scale: float | None, like: Value
) -> list[tuple[Value, Value]]:
    """Four (position, weight) pairs of shape (out,)."""
    ratio = _ratio(size, out, align_corners, scale)
    i = b.iota(out, like.device).to(like.dtype)
    real = i * ratio if align_corners else (i + 0.5) * ratio - 0.5
    floor = real.map(prims.floor)
    t, low = real - floor, floor.to(torch.int64)
    distances = (t + 1.0, t, 1.0 - t, 2.0 - t)
    return [((low + (k - 1)).maximum(0).minimum(size - 1), _cubic(d, _KEYS)) for k, d in enumerate(distances)]


@RULES(aten.upsample_bicubic2d.default)
def _bicubic(b: Builder, x: Value, output_size: Sequence[Any], align_corners: bool, *scales: Any) -> Value:
    refuse_bytes(x)
    out = x.compute()
    for d in (1, 0):
        dim = 2 + d
        total: Value | None = None
        for place, weight in _cubic_taps(
            b, x.shape[dim], output_size[d], align_corners, scales[d] if scales else None, out
        ):
            weight = weight.unsqueeze(1) if d == 0 else weight
            part = b.emit(prims.index, out, (*(None,) * dim, place), False) * weight
            total = part if total is None else total + part
        assert total is not None
        out = total
    return out.to(x.dtype)


@RULES(aten.upsample_bicubic2d_backward.default)
def _bicubic_backward(
    b: Builder, grad: Value, output_size: Sequence[Any], input_size: Sequence[Any], align_corners: bool, *scales: Any
) -> Value:
    g = grad.compute()
    for d in (0, 1):
        dim = 2 + d
        total = b.full((*g.shape[:dim], input_size[dim], *g.shape[dim + 1 :]), 0, g.dtype, g.device)
        for place, weight in _cubic_taps(
            b, input_size[dim], output_size[d], align_corners, scales[d] if scales else None, g
        ):
            weight = weight.unsqueeze(1) if d == 0 else weight
            total = b.emit(prims.index_put, total, (*(None,) * dim, place), g * weight, True, False)
        g = total
    return g.to(grad.dtype)


# --- antialiased -----------------------------------------------------------------------------------
def _triangle(t: Value) -> Value:
    return (1.0 - t).maximum(0.0)


def _lanczos(t: Value) -> Value:
    angle = t * math.pi
    safe = t.b.where(angle.eq(0.0), 1.0, angle)
    value = safe.map(prims.sin) / safe * ((safe / 3.0).map(prims.sin) / (safe / 3.0))
    return t.b.where(t < 3.0, t.b.where(angle.eq(0.0), 1.0, value), 0.0)


_FILTERS: dict[str, tuple[float, Callable[[Value], Value]]] = {
    "bilinear": (1.0, _triangle),
    "bicubic": (2.0, lambda t: _cubic(t, _KEYS_ANTIALIASED)),
    "lanczos": (3.0, _lanczos),
}


def _antialiasing(
    b: Builder, size: Any, out: Any, align_corners: bool, scale: float | None, name: str, like: Value
) -> Value:
    """(out, size) matrix: a filter stretched by the scale where the image shrinks, each row summing to 1."""
    reach, kernel = _FILTERS[name]
    ratio = _ratio(size, out, align_corners, scale)
    stretch = max(ratio, 1.0)
    support = reach * stretch
    centre = (b.iota(out, like.device).to(like.dtype) + 0.5) * ratio
    first = (centre - support + 0.5).map(prims.trunc).maximum(0.0)
    stop = (centre + support + 0.5).map(prims.trunc).minimum(float(size))
    j = b.iota(size, like.device).to(like.dtype).unsqueeze(0)
    distance = ((j - centre.unsqueeze(1) + 0.5) * (1.0 / stretch)).map(prims.abs)
    inside = (j >= first.unsqueeze(1)) & (j < stop.unsqueeze(1))
    weights = b.where(inside, kernel(distance), 0.0)
    return weights / weights.sum((1,), True)


def _antialiased(name: str) -> Any:
    def rule(b: Builder, x: Value, output_size: Sequence[Any], align_corners: bool, *scales: Any) -> Value:
        refuse_bytes(x)
        out = x.compute()
        for d in (1, 0):
            matrix = _antialiasing(
                b, x.shape[2 + d], output_size[d], align_corners, scales[d] if scales else None, name, out
            )
            out = times(b, out, 2 + d, matrix)
        return out.to(x.dtype)

    return rule


def _antialiased_backward(name: str) -> Any:
    def rule(
        b: Builder,
        grad: Value,
        output_size: Sequence[Any],
        input_size: Sequence[Any],
        align_corners: bool,
        *scales: Any,
    ) -> Value:
        g = grad.compute()
        for d in (0, 1):
            matrix = _antialiasing(
                b, input_size[2 + d], output_size[d], align_corners, scales[d] if scales else None, name, g
            )
            g = times(b, g, 2 + d, matrix.transpose(0, 1))
        return g.to(grad.dtype)

    return rule


for _name in _FILTERS:
    RULES.add(f"aten::_upsample_{_name}2d_aa.default", _antialiased(_name))
    RULES.add(f"aten::_upsample_{_name}2d_aa_backward.default", _antialiased_backward(_name))


# --- affine grids ----------------------------------------------------------------------------------
@RULES(aten.affine_grid_generator.default)
def _affine_grid(b: Builder, theta: Value, size: Sequence[Any], align_corners: bool) -> Value:
    """Homogeneous pixel coordinates in [-1, 1], x first, times theta (N, rank, rank + 1)."""
    n, _, *spatial = size
    rank = len(spatial)
    wide = theta.compute()
    axes = []
    for d, length in enumerate(spatial):
        step = 2.0 / (length - 1) if align_corners and not same_size(length, 1) else 2.0 / length
        start = (-1.0 if not same_size(length, 1) else 0.0) if align_corners else step / 2 - 1.0
        axis = b.iota(length, theta.device).to(wide.dtype) * step + start
        axes.append(axis.unsqueeze(*(e for e in range(rank) if e != d)).expand(spatial))
    ones = b.full(spatial, 1, wide.dtype, theta.device)
    base = b.cat([a.unsqueeze(rank) for a in (*reversed(axes), ones)], rank)
    points: Any = 1
    for length in spatial:
        points = points * length
    flat = base.reshape((points, rank + 1)).unsqueeze(0).expand((n, points, rank + 1))
    grid = b.emit(prims.bmm, flat, wide.transpose(1, 2))
    return grid.reshape((n, *spatial, rank)).to(theta.dtype)  # type: ignore[no-any-return]
