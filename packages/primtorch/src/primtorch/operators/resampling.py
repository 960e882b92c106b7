"""Resizing, grids, antialiased resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Value, same_size
from primtorch.families import Family, Refusal, Rule, Trait
from primtorch.layout import suggests_channels_last
from primtorch.operators.refusals import is_empty, refuse
from primtorch.operators.taps import Positions, positions, tapped
from primtorch.operators.window import by_rows, equal_windows, laid_out, repeated
from primtorch.samples import call, reals
from primtorch.spec import Size, TensorSpec

OP = Family("resampling")
OP.trait(Trait.ONE_DEVICE, "grid_sampler_2d grid_sampler_3d")


# --- resampling ----------------------------------------------------------------------------------
def _nearest_index(b: Builder, size: Size, out: Size, scale: float | None, exact: bool, device: torch.device) -> Value:
    ratio = 1 / scale if scale is not None and scale > 0 else size / out
    position = b.iota(out, device).to(torch.float32)
    place = (position + 0.5) * ratio if exact else position * ratio
    return place.map(prims.floor).to(torch.int64).minimum(size - 1)


def _nearest_indices(
    b: Builder,
    spatial: Sequence[Size],
    out: Sequence[Size],
    scales: Sequence[float | None],
    exact: bool,
    device: torch.device,
) -> list[Value]:
    rank = len(out)
    return [
        _nearest_index(b, spatial[d], out[d], scales[d], exact, device).unsqueeze(*range(1, rank - d))
        for d in range(rank)
    ]


def _enlarged(spatial: Sequence[Size], out: Sequence[Size], scales: Sequence[float | None]) -> tuple[int, ...] | None:
    """How many places of each dim take one element, where each is a power of two: then no index is rounded."""
    sides = equal_windows(out, spatial)
    if sides is None or any(side & (side - 1) for side in sides):
        return None
    asked = all(scale is None or scale == side for scale, side in zip(scales, sides, strict=True))
    return sides if asked else None


def _nearest(rank: int, exact: bool) -> Rule:
    def rule(b: Builder, x: Value, output_size: Sequence[Size], *scales: float | None) -> Value:
        sides = _enlarged(x.shape[2:], output_size, scales or (None,) * rank)
        if sides is not None:
            return repeated(x, sides)
        indices = _nearest_indices(b, x.shape[2:], output_size, scales or (None,) * rank, exact, x.device)
        return b.emit(prims.index, x, (None, None, *indices), False)

    return rule


def _nearest_backward(rank: int, exact: bool) -> Rule:
    def rule(
        b: Builder, grad: Value, output_size: Sequence[Size], input_size: Sequence[Size], *scales: float | None
    ) -> Value:
        g = grad.compute()
        sides = _enlarged(input_size[2:], output_size, scales or (None,) * rank)
        if sides is not None:
            return b.emit(prims.avg_pool, g, sides, sides, (0,) * rank, False, True, 1).to(grad.dtype)  # their sums
        indices = _nearest_indices(b, input_size[2:], output_size, scales or (None,) * rank, exact, grad.device)
        zeros = b.full(input_size, 0, g.dtype, g.device)
        return b.emit(prims.index_put, zeros, (None, None, *indices), g, True, False).to(grad.dtype)

    return rule


def _linear_weights(
    b: Builder, size: Size, out: Size, align_corners: bool, scale: float | None, like: Value
) -> tuple[Value, Value, Value]:
    """For each output position the two source positions and the weight of the second."""
    if same_size(size, out):  # eager takes each element twice, and shows in the second what is infinite
        own = b.iota(out, like.device)
        return own, own, b.full((out,), 0, like.dtype, like.device)
    position = b.iota(out, like.device).to(like.dtype)
    if align_corners:
        place = position * ((size - 1) / (out - 1) if not same_size(out, 1) else 0.0)
    else:
        ratio = 1 / scale if scale is not None and scale > 0 else size / out
        place = ((position + 0.5) * ratio - 0.5).maximum(0.0)
    low = place.map(prims.floor).to(torch.int64).minimum(size - 1)
    high = (low + 1).minimum(size - 1)
    return low, high, (place - low.to(like.dtype)).maximum(0.0).minimum(1.0)


def _positions(
    spatial: Sequence[Size], out: Sequence[Size], align_corners: bool, scales: Sequence[float | None]
) -> list[Positions] | None:
    """Along each dim; None where they are not known of one."""
    given = scales or (None,) * len(spatial)
    found = [positions(size, n, align_corners, scale) for size, n, scale in zip(spatial, out, given, strict=True)]
    known = [along for along in found if along is not None]
    return known if len(known) == len(found) else None


def refuse_bytes(x: Value) -> None:
    """Raises NotImplementedError for an image of integers."""
    if not x.dtype.is_floating_point:
        raise NotImplementedError(
            f"interpolating an image of {x.dtype}: eager computes these in fixed point with a "
            "rounding of its own; convert the image to float32 first"
        )


def _linear(rank: int) -> Rule:
    def rule(b: Builder, x: Value, output_size: Sequence[Size], align_corners: bool, *scales: float | None) -> Value:
        refuse_bytes(x)
        out = x.compute()
        known = _positions(x.shape[2:], output_size, align_corners, scales)
        if known is not None:
            return tapped(b, out, [along.interpolation(b, out) for along in known]).to(x.dtype)
        for d in range(rank):
            dim = 2 + d
            low, high, weight = _linear_weights(
                b, x.shape[dim], output_size[d], align_corners, scales[d] if scales else None, out
            )
            lead = (None,) * dim
            weight = weight.unsqueeze(*range(1, out.rank - dim)) if out.rank - dim > 1 else weight
            first = b.emit(prims.index, out, (*lead, low), False)
            second = b.emit(prims.index, out, (*lead, high), False)
            out = first * (1.0 - weight) + second * weight
        return out.to(x.dtype)

    return rule


def _linear_backward(rank: int) -> Rule:
    def rule(
        b: Builder,
        grad: Value,
        output_size: Sequence[Size],
        input_size: Sequence[Size],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        g = grad.compute()
        known = _positions(input_size[2:], output_size, align_corners, scales)
        taps = [along.gradient(b, g) for along in known or ()]
        if taps and None not in taps:
            return tapped(b, g, taps).to(grad.dtype)
        for d in reversed(range(rank)):
            dim = 2 + d
            low, high, weight = _linear_weights(
                b, input_size[dim], output_size[d], align_corners, scales[d] if scales else None, g
            )
            lead = (None,) * dim
            weight = weight.unsqueeze(*range(1, g.rank - dim)) if g.rank - dim > 1 else weight
            shape = (*g.shape[:dim], input_size[dim], *g.shape[dim + 1 :])
            zeros = b.full(shape, 0, g.dtype, g.device)
            out = b.emit(prims.index_put, zeros, (*lead, low), g * (1.0 - weight), True, False)
            g = b.emit(prims.index_put, out, (*lead, high), g * weight, True, False)
        return g.to(grad.dtype)

    return rule


_KEYS = -0.75  # Keys (1981), the parameter that eager uses
_KEYS_ANTIALIASED = -0.5


def _ratio(size: Size, out: Size, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (size - 1) / (out - 1) if not same_size(out, 1) and out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else size / out


def _cubic(t: Value, a: float) -> Value:
    """The cubic convolution kernel at distance t >= 0."""
    near = ((t * (a + 2) - (a + 3)) * t) * t + 1.0
    far = ((t * a - 5 * a) * t + 8 * a) * t - 4 * a
    return t.b.where(t < 1.0, near, t.b.where(t < 2.0, far, 0.0))


def _cubic_taps(
    b: Builder, size: Size, out: Size, align_corners: bool, scale: float | None, like: Value
) -> list[tuple[Value, Value]]:
    """Four (position, weight) pairs of shape (out,)."""
    ratio = _ratio(size, out, align_corners, scale)
    i = b.iota(out, like.device).to(like.dtype)
    real = i * ratio if align_corners else (i + 0.5) * ratio - 0.5
    floor = real.map(prims.floor)
    t, low = real - floor, floor.to(torch.int64)
    distances = (t + 1.0, t, 1.0 - t, 2.0 - t)
    return [((low + (k - 1)).maximum(0).minimum(size - 1), _cubic(d, _KEYS)) for k, d in enumerate(distances)]


@OP.formula(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_upsample_lanczos2d_aa?"
)
def _upsample(x: TensorLike, output_size: Sequence[Size], *args: object, **kwargs: object) -> TensorSpec:
    shape = (*x.shape[:2], *output_size)
    if len(output_size) == 1:
        return by_rows(x, shape)
    return laid_out(x, shape)


@OP.rule("upsample_bicubic2d")
def _lower_bicubic(
    b: Builder, x: Value, output_size: Sequence[Size], align_corners: bool, *scales: float | None
) -> Value:
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


@OP.formula(
    "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward "
    "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward"
)
def _upsample_backward(
    grad: TensorLike, output_size: Sequence[Size], input_size: Sequence[Size], *args: object, **kwargs: object
) -> TensorSpec:
    return laid_out(grad, tuple(input_size))


@OP.formula(
    "upsample_nearest1d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
    "_upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bicubic2d_backward "
    "_upsample_bicubic2d_aa_backward _upsample_lanczos2d_aa_backward?"
)
def _upsample_backward_by_rows(
    grad: TensorLike, output_size: Sequence[Size], input_size: Sequence[Size], *args: object, **kwargs: object
) -> TensorSpec:
    return by_rows(grad, tuple(input_size))


@OP.rule("upsample_bicubic2d_backward")
def _lower_bicubic_backward(
    b: Builder,
    grad: Value,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    align_corners: bool,
    *scales: float | None,
) -> Value:
    if all(map(same_size, input_size[2:], output_size)):  # eager's forward has no such case
        return grad
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


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A dim resampled by a filter, which is stretched by the scale where the image shrinks. Each place has the elements
    of a window, and none beside it: what lies there may be infinite."""

    size: Size
    out: Size
    ratio: float
    reach: float
    kernel: Callable[[Value], Value]

    @property
    def stretch(self) -> float:
        return max(self.ratio, 1.0)

    @property
    def support(self) -> float:
        return self.reach * self.stretch

    def window(self, place: Value) -> tuple[Value, Value, Value]:
        """Of places, as whole numbers: the centre, the first element, and where the elements end."""
        centre = (place + 0.5) * self.ratio
        first = (centre - self.support + 0.5).map(prims.trunc).maximum(0.0)
        return centre, first, (centre + self.support + 0.5).map(prims.trunc).minimum(float(self.size))

    def weight(self, element: Value, centre: Value) -> Value:
        """Before a place's weights are divided by their sum."""
        return self.kernel(((element - centre + 0.5) * (1.0 / self.stretch)).map(prims.abs))

    def windows(self, b: Builder, like: Value) -> tuple[Value, Value, Value]:
        """Of each element of each place's window: the element, which is always one that there is, whether the window
        has it, and the weight, all (length of the longest, out)."""
        place = b.iota(self.out, like.device).to(like.dtype).unsqueeze(0)
        number = b.iota(2 * math.ceil(self.support) + 1, like.device).to(like.dtype).unsqueeze(1)
        centre, first, stop = self.window(place)
        element = first + number
        inside = element < stop
        weight = b.where(inside, self.weight(element, centre), 0.0)
        return element.to(torch.int64).minimum(self.size - 1), inside, weight

    def filtered(self, b: Builder, x: Value, dim: int) -> Value:
        """`x` with this dim resampled."""
        element, inside, weight = self.windows(b, x)
        return _window_sum(b, x, dim, element, inside, weight / weight.sum((0,), True))

    def gradient(self, b: Builder, g: Value, dim: int) -> Value:
        """That of what was resampled: of each element, from the places whose windows have it."""
        total = self.windows(b, g)[2].sum((0,))
        element = b.iota(self.size, g.device).to(g.dtype).unsqueeze(0)
        # Their centres are at most the support away. (A place that rounding leaves out has no weight.)
        most = self.out if self.ratio == 0 else min(math.floor(2 * self.support / self.ratio + 1e-6) + 1, self.out)
        place = b.iota(most, g.device).to(g.dtype).unsqueeze(1)
        if self.ratio:
            nearest = ((element + (0.5 - self.support)) / self.ratio - 0.5).map(prims.ceil)
            place = nearest.maximum(0.0).minimum(float(self.out - most)) + place
        else:
            place = place + element * 0.0
        centre, first, stop = self.window(place)
        inside = (element >= first) & (element < stop)
        own = place.to(torch.int64)
        weight = b.where(inside, self.weight(element, centre), 0.0) / b.emit(prims.index, total, (own,), False)
        return _window_sum(b, g, dim, own, inside, weight)


def _window_sum(b: Builder, x: Value, dim: int, place: Value, inside: Value, weight: Value) -> Value:
    """Along a dim: the sum of what lies at (n, rows) places, times its weights, where it is inside."""
    beside = range(2, 1 + x.rank - dim)
    # Whatever is read at places is computed once, and not for each element of an image.
    weight = b.emit(prims.index, weight, (b.iota(weight.shape[0], x.device),), False).transpose(0, 1)
    place, inside = place.transpose(0, 1), inside.transpose(0, 1)
    taken = b.emit(prims.index, x, (*(None,) * dim, place), False) * weight.unsqueeze(*beside)
    return b.where(inside.unsqueeze(*beside), taken, 0).sum((dim + 1,))


def _filters(
    name: str, spatial: Sequence[Size], out: Sequence[Size], align_corners: bool, scales: Sequence[float | None]
) -> list[_Filtered]:
    """Of each spatial dim."""
    reach, kernel = _FILTERS[name]
    given = zip(spatial, out, scales or (None,) * len(spatial), strict=True)
    return [_Filtered(n, m, float(_ratio(n, m, align_corners, scale)), reach, kernel) for n, m, scale in given]


def _along_both(x: Value, rows_first: bool, along: Callable[[Value, int, int], Value]) -> Value:
    """An image resampled along both dims, by `along(image, 0 or 1, the image's dim)`. What lies beside each other in
    memory is added up as a whole: channels where they do, else rows; so the columns' turn comes where the image is
    smallest."""
    turns = (0, 1) if rows_first else (1, 0)
    if not suggests_channels_last(x.shape, x.spec.strides):
        return reduce(lambda x, d: along(x, d, 2 + d), turns, x)
    return reduce(lambda x, d: along(x, d, 1 + d), turns, x.permute((0, 2, 3, 1))).permute((0, 3, 1, 2))


def _antialiased(name: str) -> Rule:
    def rule(b: Builder, x: Value, output_size: Sequence[Size], align_corners: bool, *scales: float | None) -> Value:
        refuse_bytes(x)
        if all(map(same_size, x.shape[2:], output_size)):  # eager copies; its gradient is that of the filter
            return x
        filters = _filters(name, x.shape[2:], output_size, align_corners, scales)
        wide, shrinks = x.compute(), filters[0].ratio > 1
        return _along_both(wide, shrinks, lambda x, d, dim: filters[d].filtered(b, x, dim)).to(x.dtype)

    return rule


def _antialiased_backward(name: str) -> Rule:
    def rule(
        b: Builder,
        grad: Value,
        output_size: Sequence[Size],
        input_size: Sequence[Size],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        filters = _filters(name, input_size[2:], output_size, align_corners, scales)
        wide, grows = grad.compute(), filters[0].ratio > 1
        return _along_both(wide, not grows, lambda g, d, dim: filters[d].gradient(b, g, dim)).to(grad.dtype)

    return rule


for _name in _FILTERS:
    OP.rule(f"_upsample_{_name}2d_aa?")(_antialiased(_name))
    OP.rule(f"_upsample_{_name}2d_aa_backward?")(_antialiased_backward(_name))


# --- affine grids ----------------------------------------------------------------------------------
@OP.rule("affine_grid_generator")
def _lower_affine_grid(b: Builder, theta: Value, size: Sequence[Size], align_corners: bool) -> Value:
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
    points: Size = 1
    for length in spatial:
        points = points * length
    flat = base.reshape((points, rank + 1)).unsqueeze(0).expand((n, points, rank + 1))
    grid = b.emit(prims.bmm, flat, wide.transpose(1, 2))
    return grid.reshape((n, *spatial, rank)).to(theta.dtype)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(x: TensorLike, grid: TensorLike, *args: object) -> TensorSpec:
    shape = (*x.shape[:2], *grid.shape[1:-1])
    return by_rows(x, shape)


def _refuse_grid_sampler(rank: int) -> Refusal:
    def check(x: TensorLike, grid: TensorLike, *args: object) -> None:
        refuse(x.dim() == 0 or grid.dim() == 0, "Dimension specified as 0 but tensor has no dimensions", IndexError)
        shapes = f"input with sizes {list(x.shape)} and grid with sizes {list(grid.shape)}"
        refuse(
            x.dim() != rank + 2 or grid.dim() != rank + 2, f"grid_sampler(): expected {rank + 2}D tensors, got {shapes}"
        )
        refuse(x.shape[0] != grid.shape[0], f"grid_sampler(): expected one batch size, but got {shapes}")
        refuse(
            grid.shape[-1] != rank, f"grid_sampler(): expected grid to have size {rank} in last dimension, got {shapes}"
        )
        refuse(any(map(is_empty, x.shape[2:])), f"grid_sampler(): expected non-empty spatial dimensions, got {shapes}")

    return check


OP.refuses("grid_sampler_2d")(_refuse_grid_sampler(2))
OP.refuses("grid_sampler_3d")(_refuse_grid_sampler(3))


@OP.formula("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _grid_sampler_backward(
    grad: TensorLike,
    x: TensorLike,
    grid: TensorLike,
    interpolation: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, TensorSpec]:
    return by_rows(x, tuple(x.shape)) if output_mask[0] else None, by_rows(grid, tuple(grid.shape))


_UPSAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")


@OP.refuses(*(f"upsample_{kind}" for kind in _UPSAMPLED), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
            "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa?")  # fmt: skip
def _refuse_upsample(x: TensorLike, output_size: Sequence[Size], *args: object, **options: object) -> None:
    rank = len(output_size) + 2
    refuse(x.dim() != rank, lambda: f"It is expected input_size equals to {rank}, but got size {x.dim()}")
    sizes = *x.shape[2:], *output_size
    refuse(any(map(is_empty, sizes)), lambda: f"Input and output sizes should be greater than 0, but got {sizes}")
    refuse(is_empty(x.shape[1]), lambda: f"Non-empty data tensor expected but got a tensor with sizes {list(x.shape)}")


for _rank in (1, 2, 3):
    for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
        OP.rule(f"{_name}{_rank}d")(_nearest(_rank, _exact))
        OP.rule(f"{_name}{_rank}d_backward")(_nearest_backward(_rank, _exact))


for _rank, _name in ((1, "upsample_linear1d"), (2, "upsample_bilinear2d"), (3, "upsample_trilinear3d")):
    OP.rule(_name)(_linear(_rank))
    OP.rule(f"{_name}_backward")(_linear_backward(_rank))


# --- samples ---------------------------------------------------------------------------------------

_LINE, _AREA, _VOLUME = reals(2, 3, 5), reals(2, 3, 5, 6), reals(2, 3, 5, 6, 4)
OP.samples(
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa upsample_bicubic2d upsample_bilinear2d",
    call(_AREA, [7, 4], False),
)
OP.samples(
    "_upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa_backward "
    "upsample_bicubic2d_backward upsample_bilinear2d_backward",
    call(reals(2, 3, 7, 4), [7, 4], [2, 3, 5, 6], False),
)
OP.samples("upsample_nearest1d _upsample_nearest_exact1d", call(_LINE, [7]))
OP.samples("upsample_nearest1d_backward _upsample_nearest_exact1d_backward", call(reals(2, 3, 7), [7], [2, 3, 5]))
OP.samples("upsample_nearest2d _upsample_nearest_exact2d", call(_AREA, [7, 4]))
OP.samples(
    "upsample_nearest2d_backward _upsample_nearest_exact2d_backward", call(reals(2, 3, 7, 4), [7, 4], [2, 3, 5, 6])
)
OP.samples("upsample_nearest3d _upsample_nearest_exact3d", call(_VOLUME, [7, 4, 4]))
OP.samples(
    "upsample_nearest3d_backward _upsample_nearest_exact3d_backward",
    call(reals(2, 3, 7, 4, 4), [7, 4, 4], [2, 3, 5, 6, 4]),
)
OP.samples("upsample_linear1d", call(_LINE, [7], True))
OP.samples("upsample_linear1d_backward", call(reals(2, 3, 7), [7], [2, 3, 5], True))
OP.samples("upsample_trilinear3d", call(_VOLUME, [7, 4, 4], False))
OP.samples("upsample_trilinear3d_backward", call(reals(2, 3, 7, 4, 4), [7, 4, 4], [2, 3, 5, 6, 4], False))
OP.samples("affine_grid_generator", call(reals(2, 2, 3), [2, 3, 4, 5], False))
OP.samples("grid_sampler_2d", call(_AREA, reals(2, 3, 4, 2, low=-1.0, high=1.0), 0, 0, False))
OP.samples("grid_sampler_3d", call(_VOLUME, reals(2, 3, 4, 2, 3, low=-1.0, high=1.0), 0, 1, True))
OP.samples(
    "grid_sampler_2d_backward",
    call(reals(2, 3, 3, 4), _AREA, reals(2, 3, 4, 2, low=-1.0, high=1.0), 0, 0, False, [True, True]),
)
OP.samples(
    "grid_sampler_3d_backward",
    call(reals(2, 3, 3, 4, 2), _VOLUME, reals(2, 3, 4, 2, 3, low=-1.0, high=1.0), 0, 0, False, [True, True]),
)
