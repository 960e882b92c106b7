"""Weighted sums of neighbours along dims: averages of windows, interpolation, and the gradients of both.

A row of such a matrix has few elements that are not zero, and where they are is arithmetic of whole numbers. So nothing
is multiplied by zeros, looked up in tables or scattered: each place takes what lies at its taps. The gradient has the
transposed matrix, whose rows are as short: few windows have a place in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

from primtorch import prims
from primtorch.builder import Builder, Value
from primtorch.frozen import record
from primtorch.layout import suggests_channels_last
from primtorch.spec import Size

# How many taps a place adds up one after the other: along one dim, and over all dims with nothing stored in between.
_UNROLLED = 64
_AT_ONCE = 16
# Ratios of sizes beyond which positions are not counted in whole parts of an element.
_LARGEST = 1 << 12


@record
class Taps:
    """A matrix along one dim, of whose rows the elements that are not zero lie side by side.

    Attributes:
        rows: how many places there are afterwards.
        count: how many of them a row has at most. A tap is known by its number among these.
        place: of a tap, the int64 element that each row takes, which is always one that there is.
        weight: of a tap, what each row multiplies that by; None for one.
        inside: of a tap, which rows have it; None for all. What a row does not have may be infinite, and is not
            multiplied by zero.
    """

    rows: Size
    count: int
    place: Callable[[int], Value]
    weight: Callable[[int], Value | None]
    inside: Callable[[int], Value | None]


def tapped(b: Builder, x: Value, taps: Sequence[Taps | None]) -> Value:
    """The last dims of x, each times its matrix; None leaves a dim as it is."""
    first = x.rank - len(taps)
    given = [(first + d, one) for d, one in enumerate(taps) if one is not None]
    # Where neighbouring places of a row are computed together, what is stored between the dims is read in order. The
    # channels of a place lie side by side wherever it is.
    by_rows = b.walks_windows(x.device) and not suggests_channels_last(x.shape, x.spec.strides)
    if len(given) == len(taps) and math.prod(one.count for _, one in given) <= _AT_ONCE and not by_rows:
        return _sum(b, x, first, [one for _, one in given])
    # The last dim, whose neighbours are taken from anywhere, where the image is smallest: what shrinks comes first.
    shrink = [(dim, one) for dim, one in given if one.rows < x.shape[dim]]
    grow = [(dim, one) for dim, one in reversed(given) if one.rows >= x.shape[dim]]
    for dim, one in (*shrink, *grow):
        x = _sum(b, x, dim, [one])
    return x


def _sum(b: Builder, x: Value, dim: int, taps: Sequence[Taps], places: tuple[Value, ...] = ()) -> Value:
    """Over the taps of the dims from `dim` on, of what lies at `places` of the dims before."""
    if not taps:
        first = dim - len(places)
        indices = (place.unsqueeze(*range(1, len(places) - d)) for d, place in enumerate(places))
        return b.emit(prims.index, x, (*(None,) * first, *indices), False)
    one, *others = taps
    beside = range(1, x.rank - dim)
    total: Value | None = None
    for tap in range(one.count):
        part = _sum(b, x, dim + 1, others, (*places, one.place(tap)))
        weight, inside = one.weight(tap), one.inside(tap)
        part = part if weight is None else part * weight.unsqueeze(*beside)
        part = part if inside is None else b.where(inside.unsqueeze(*beside), part, 0)
        total = part if total is None else total + part
    assert total is not None
    return total


# --- windows ---------------------------------------------------------------------------------------
def windows(b: Builder, size: int, out: int, device: torch.device) -> Taps | None:
    """Sums of the windows [floor(i*size/out), ceil((i+1)*size/out)); None where they are long.

    The windows in which an element lies are such windows too, of the sizes exchanged.
    """
    lengths = [-(-(i + 1) * size // out) - i * size // out for i in range(out)]
    if not lengths or max(lengths) > _UNROLLED:
        return None
    i = b.iota(out, device)
    first, last = (i * size) // out, ((i + 1) * size + (out - 1)) // out - 1
    return Taps(
        out,
        max(lengths),
        lambda tap: first + tap if tap < min(lengths) else (first + tap).minimum(last),
        lambda tap: None,
        lambda tap: None if tap < min(lengths) else first + tap <= last,
    )


def spread_windows(b: Builder, size: Size, out: Size, device: torch.device) -> Taps:
    """Such windows where there are at least as many of them as elements: of one or two."""
    i = b.iota(out, device)
    first, last = (i * size) // out, ((i + 1) * size + (out - 1)) // out - 1
    return Taps(out, 2, lambda tap: last if tap else first, lambda tap: None, lambda tap: last > first if tap else None)


# --- interpolation ---------------------------------------------------------------------------------
@record
class Positions:
    """Where the places of a resampled dim lie in the dim that they are taken from: place o at
    (o * step + start) / parts, and not outside of [0, size - 1]."""

    size: int
    out: int
    step: int
    start: int
    parts: int

    def before(self, out: int) -> int:
        """The element before a place, which may lie in front of the first one or behind the last."""
        return (out * self.step + self.start) // self.parts

    def interpolation(self, b: Builder, like: Value) -> Taps:
        """Between the two elements on both sides: at an element that one, and the next with a weight of 0, which shows
        what is infinite there. Where no size changes, eager takes each element twice, with weights of 1 and 0."""
        device, last = like.device, self.size - 1
        if self.size == self.out:
            return self._twice(b, like)
        position = b.iota(self.out, device, self.start, self.step)
        low, most = position // self.parts, max(self.before(self.out - 1), 0)
        low = low.maximum(0) if self.start < 0 else low
        low = low.minimum(last) if most > last else low
        high = low + 1 if most < last else (low + 1).minimum(last)
        beyond = position - low * self.parts
        beyond = beyond.maximum(0) if self.start < 0 else beyond
        beyond = beyond.minimum(self.parts) if most > last else beyond
        second = beyond.to(like.dtype) / self.parts
        return Taps(self.out, 2, (low, high).__getitem__, (1.0 - second, second).__getitem__, lambda tap: None)

    def gradient(self, b: Builder, like: Value) -> Taps | None:
        """From the places of which an element is one of the two; None where these are many.

        These lie at most one element before it, and less than one behind it. There are a few more of a weight of 0, at
        the borders: `_beside`.
        """
        if self.size == self.out:
            return self._twice(b, like)
        if self.step == 0 or self.before(self.out - 1) >= self.size or self.start <= -self.parts:
            return None
        count = min(-(-2 * self.parts // self.step), self.out)
        beside = self._beside()
        if count + len(beside) > _UNROLLED:
            return None
        device, end = like.device, (self.size - 1) * self.parts
        element = b.iota(self.size, device)
        own = b.iota(self.size, device, 0, self.parts)
        # The least place whose position is not less than that of the element before.
        first = b.iota(self.size, device, self.step - 1 - self.parts - self.start, self.parts) // self.step
        first = first.maximum(0)

        def behind(tap: int) -> Value:
            """In parts of an element, how far the place lies behind the element."""
            return ((first + tap) * self.step + self.start).maximum(0).minimum(end) - own

        def place(tap: int) -> Value:
            if tap < count:
                return (first + tap).minimum(self.out - 1)
            return b.full((self.size,), beside[tap - count][1], torch.int64, device)

        def weight(tap: int) -> Value:
            if tap < count:
                return (self.parts - behind(tap).map(prims.abs)).to(like.dtype) / self.parts
            return b.full((self.size,), 0, like.dtype, device)

        def inside(tap: int) -> Value:
            if tap < count:
                far = behind(tap)
                return (first + tap < self.out) & (far >= -self.parts) & (far < self.parts)
            return element.eq(beside[tap - count][0])

        return Taps(self.size, count + len(beside), place, weight, inside)

    def _beside(self) -> list[tuple[int, int]]:
        """Elements that are a place's second one with a weight of 0, and the place: the second element, of places in
        front of the first, and the last, of those at the last."""
        last = self.size - 1
        places = [out * self.step + self.start for out in range(self.out)]
        in_front = [(min(1, last), out) for out, place in enumerate(places) if place < 0]
        return [*in_front, *((last, out) for out, place in enumerate(places) if place == last * self.parts)]

    def _twice(self, b: Builder, like: Value) -> Taps:
        own = b.iota(self.size, like.device)
        none = b.full((self.size,), 0, like.dtype, like.device)
        return Taps(self.size, 2, lambda tap: own, lambda tap: none if tap else None, lambda tap: None)


def positions(size: Size, out: Size, align_corners: bool, scale: float | None) -> Positions | None:
    """Those of an interpolation along a dim; None where a size is not known, or the ratio is of no small numbers."""
    if not (isinstance(size, int) and isinstance(out, int) and size > 0 and out > 0):
        return None
    if align_corners:
        return Positions(size, out, size - 1, 0, out - 1) if out > 1 else Positions(size, out, 0, 0, 1)
    ratio = 1 / Fraction(scale) if scale is not None and scale > 0 else Fraction(size, out)
    p, q = ratio.as_integer_ratio()
    return Positions(size, out, 2 * p, p - q, 2 * q) if max(p, q) <= _LARGEST else None
