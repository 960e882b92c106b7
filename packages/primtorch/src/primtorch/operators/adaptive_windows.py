"""Windows that share a dim among so many places: averages and maxima of adaptive pools, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from primtorch import prims
from primtorch.arguments import PerDim, TensorLike
from primtorch.builder import Builder, Value
from primtorch.families import Family, Refusal, Rule
from primtorch.layout import product, suggests_channels_last
from primtorch.operators.build import per_dim
from primtorch.operators.refusals import is_empty, refuse, refuse_batch
from primtorch.operators.taps import Taps, spread_windows, tapped, windows
from primtorch.operators.window import (
    LAID_OUT,
    equal_windows,
    lower_avg_pool,
    max_pooled,
    pool_backward,
    pool_backward_by_rows,
    repeated,
    scatter_by_position,
    side_of,
    unpooled,
)
from primtorch.operators.window_places import flattened, numbers_along
from primtorch.prims.window import offset_dtype
from primtorch.samples import call, integers, reals
from primtorch.spec import Size, TensorSpec

OP = Family("adaptive_windows")


def _sums(b: Builder, x: Value, out: Sequence[Size]) -> Value:
    """Sums of the windows [floor(i*size/out), ceil((i+1)*size/out)) of the last dims, whatever the sizes are.

    Along one dim after the other, so that what lies beside each other in memory is added up as a whole: rows, but along
    the last dim, or channels. Each window is read by itself, and none of what lies outside of it: that may be infinite.
    """
    first = x.rank - len(out)
    behind = first == 2 and suggests_channels_last(x.shape, x.spec.strides)
    spatial = [*range(first, x.rank)]
    if behind:
        x = x.permute([0, *spatial, 1])
    for dim, n in enumerate(out, first - behind):
        along = _adaptive_windows(b, x.shape[dim], n, x.device)
        number = b.iota(along.longest, x.device)
        taken = b.emit(prims.index, x, (*(None,) * dim, along.positions(number, 1)), False)
        inside = along.first.unsqueeze(1) + number <= along.last.unsqueeze(1)
        x = b.where(inside.unsqueeze(*range(2, 1 + x.rank - dim)), taken, 0).sum((dim + 1,))
    return x.permute([0, x.rank - 1, *(dim - 1 for dim in spatial)]) if behind else x


# Elements of a window above which its rows are summed up first, and then their sums, where that goes by whole rows.
_ROWS = 16


def _window_taps(
    b: Builder, spatial: Sequence[Size], out: Sequence[Size], device: torch.device
) -> list[Taps | None] | None:
    """What sums the windows along each dim, nothing where they are single elements; None where windows are long, or
    sizes not known."""
    found: list[Taps | None] = []
    for size, n in zip(spatial, out, strict=True):
        if not (isinstance(size, int) and isinstance(n, int)):
            return None
        along = windows(b, size, n, device) if size != n else None
        if along is None and size != n:
            return None
        found.append(along)
    return found


def _lengths(b: Builder, spatial: Sequence[Size], out: Sequence[Size], like: Value) -> Value:
    """How many elements the windows have."""
    total: Value | None = None
    for d, (size, n) in enumerate(zip(spatial, out, strict=True)):
        i = b.iota(n, like.device)
        length = ((i + 1) * size + (n - 1)) // n - (i * size) // n
        length = length.unsqueeze(*range(1, len(spatial) - d))
        total = length if total is None else total * length
    assert total is not None
    return total.to(like.dtype)


def _lower_adaptive_avg_pool(rank: int) -> Rule:
    def rule(b: Builder, x: Value, output_size: PerDim) -> Value:
        first = x.rank - rank
        sizes = tuple(x.shape[first + d] if s is None else s for d, s in enumerate(per_dim(output_size, rank)))
        wide = x.compute()
        if all(isinstance(s, int) and s == 1 for s in sizes):
            return wide.mean(tuple(range(first, x.rank)), True).to(x.dtype)
        sides = equal_windows(x.shape[first:], sizes)
        by_rows = b.walks_windows(x.device) and not suggests_channels_last(x.shape, x.spec.strides)
        if sides is not None and set(sides) != {1} and not (by_rows and product(sides) > _ROWS):
            means: Value = lower_avg_pool(rank)(b, x, sides)
            return means
        taps = _window_taps(b, x.shape[first:], sizes, x.device)
        if taps is not None:
            return (tapped(b, wide, taps) / _lengths(b, x.shape[first:], sizes, wide)).to(x.dtype)
        return (_sums(b, wide, sizes) / _lengths(b, x.shape[first:], sizes, wide)).to(x.dtype)

    return rule


def _lower_adaptive_avg_pool_backward(rank: int) -> Rule:
    def rule(b: Builder, grad: Value, x: Value) -> Value:
        first = x.rank - rank
        g = grad.compute()
        if all(isinstance(grad.shape[first + d], int) and grad.shape[first + d] == 1 for d in range(rank)):
            return (g / product(x.shape[first:])).expand(x.shape).to(grad.dtype)
        sides = equal_windows(x.shape[first:], grad.shape[first:])
        if sides is not None:
            return repeated(g / product(sides), sides).to(grad.dtype)
        taps = _window_taps(b, grad.shape[first:], x.shape[first:], x.device)
        if taps is not None:
            return tapped(b, g / _lengths(b, x.shape[first:], grad.shape[first:], g), taps).to(grad.dtype)
        shares, out = g / _lengths(b, x.shape[first:], grad.shape[first:], g), x.shape[first:]
        if all(n >= size for size, n in zip(grad.shape[first:], out, strict=True)):  # none is in more than two windows
            spread = (spread_windows(b, size, n, x.device) for size, n in zip(grad.shape[first:], out, strict=True))
            return tapped(b, shares, list(spread)).to(grad.dtype)
        return _sums(b, shares, out).to(grad.dtype)

    return rule


@OP.formula("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg_pool(x: TensorLike, output_size: Sequence[Size]) -> TensorSpec:
    lead = x.dim() - len(output_size)
    return LAID_OUT[len(output_size)](x, (*x.shape[:lead], *output_size))


@OP.refuses("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _refuse_adaptive_avg_pool(x: TensorLike, output_size: Sequence[Size]) -> None:
    rank = len(output_size)
    refuse(x.dim() not in (rank + 1, rank + 2), lambda: f"Expected {rank + 1}D or {rank + 2}D tensor, not {x.dim()}D")
    refuse(
        any(map(is_empty, x.shape[-rank:])),
        lambda: f"adaptive_avg_pool: Expected input to have non-zero size for pooled dimensions, not {list(x.shape)}",
    )
    refuse(any(s < 0 for s in output_size), "elements of output_size must be greater than or equal to 0")


OP.rule("_adaptive_avg_pool2d")(_lower_adaptive_avg_pool(2))
OP.rule("_adaptive_avg_pool3d")(_lower_adaptive_avg_pool(3))
OP.rule("_adaptive_avg_pool2d_backward")(_lower_adaptive_avg_pool_backward(2))
OP.rule("_adaptive_avg_pool3d_backward")(_lower_adaptive_avg_pool_backward(3))


# --- adaptive maxima -------------------------------------------------------------------------------
class _AdaptiveWindows(NamedTuple):
    """Windows [floor(i*size/out), ceil((i+1)*size/out)) along a dim: (out) first and last positions, and how many
    elements the longest has. In a shorter one the last is repeated."""

    first: Value
    last: Value
    longest: Size

    def positions(self, number: Value | int, behind: int) -> Value:
        """Those of the elements with these numbers in their windows; `behind`: how many dims follow that of `out`."""
        first, last = (end.unsqueeze(*range(1, 1 + behind)) for end in (self.first, self.last))
        return (first + (number.to(torch.int64) if isinstance(number, Value) else number)).minimum(last)


def _adaptive_windows(b: Builder, size: Size, out: Size, device: torch.device) -> _AdaptiveWindows:
    side = side_of(size, out)
    longest = (size + out - 1) // out + 1 if side is None else side
    i = b.iota(out, device)
    return _AdaptiveWindows((i * size) // out, ((i + 1) * size + (out - 1)) // out - 1, longest)


_FEW = 64  # elements of a window that a kernel reads one after the other


def _lower_adaptive_max_pool(rank: int) -> Rule:
    def rule(b: Builder, x: Value, output_size: PerDim) -> tuple[Value, Value]:
        out = per_dim(output_size, rank)
        lead, spatial = x.shape[: x.rank - rank], x.shape[x.rank - rank :]
        if any(isinstance(n, int) and n == 0 for n in (*out, *x.shape)):
            shape = (*lead, *out)
            return b.full(shape, 0, x.dtype, x.device), b.full(shape, 0, torch.int64, x.device)
        sides = [side for s, n in zip(spatial, out, strict=True) if (side := side_of(s, n)) is not None]
        few = equal_windows(spatial, out)
        if few is not None and math.prod(few) <= _FEW:
            return max_pooled(b, x, (few, few, (0,) * rank, (1,) * rank))
        windows = [_adaptive_windows(b, size, n, x.device) for size, n in zip(spatial, out, strict=True)]
        lengths = [along.longest for along in windows]
        if len(sides) == rank:
            taken = x.reshape((*lead, *(n for pair in zip(out, sides, strict=True) for n in pair)))
        else:
            indices = []
            for d, along in enumerate(windows):
                place = along.positions(b.iota(along.longest, x.device), 1)
                # axes: out_0, window_0, out_1, window_1, ...
                indices.append(place.unsqueeze(*range(2 * d), *range(2 * d + 2, 2 * rank)))
            taken = b.emit(prims.index, x, (*(None,) * len(lead), *indices), False)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        taken = taken.permute([*range(len(lead)), *(len(lead) + d for d in order)])
        last = len(lead) + rank
        taken = taken.reshape((*lead, *out, product(lengths)))
        best = b.emit(prims.argmax, taken, (last,), True)
        offsets = best.squeeze(last).to(offset_dtype(lengths))  # all that a backward has to know
        numbers = numbers_along(b, offsets, lengths)
        places = [
            along.positions(number, rank - 1 - d)
            for d, (along, number) in enumerate(zip(windows, numbers, strict=True))
        ]
        values = b.emit(prims.amax, taken, (last,), False)  # and nothing looks for a place if nobody asks for it
        return values, flattened(places, spatial).expand((*lead, *out))

    return rule


def _lower_adaptive_max_pool_backward(rank: int) -> Rule:
    def rule(b: Builder, grad: Value, x: Value, indices: Value) -> Value:
        sides = equal_windows(x.shape[x.rank - rank :], grad.shape[grad.rank - rank :])
        if sides is None or product(sides) > _FEW:
            return scatter_by_position(b, grad, x, indices, rank)
        return unpooled(b, grad, x, (sides, sides, (0,) * rank, (1,) * rank), indices)

    return rule


for _rank in (2, 3):
    OP.rule(f"adaptive_max_pool{_rank}d")(_lower_adaptive_max_pool(_rank))
    OP.rule(f"adaptive_max_pool{_rank}d_backward")(_lower_adaptive_max_pool_backward(_rank))


@OP.formula("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: TensorLike, output_size: Sequence[Size]) -> tuple[TensorSpec, TensorSpec]:
    lead = x.dim() - len(output_size)
    shape = (*x.shape[:lead], *output_size)
    kept = LAID_OUT[len(output_size)]
    return kept(x, shape), kept(x, shape, torch.int64)


def _refuse_adaptive_max_pool(rank: int) -> Refusal:
    def check(x: TensorLike, output_size: Sequence[Size]) -> None:
        refuse(len(output_size) != rank, lambda: f"adaptive_max_pool{rank}d(): output_size must have {rank} elements")
        refuse(any(s < 0 for s in output_size), lambda: f"negative dimension in output_size {list(output_size)}")
        refuse_batch(f"adaptive_max_pool{rank}d()", x, rank, channels=False)

    return check


OP.refuses("adaptive_max_pool2d")(_refuse_adaptive_max_pool(2))
OP.refuses("adaptive_max_pool3d")(_refuse_adaptive_max_pool(3))


OP.formula("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward")(pool_backward)
OP.formula("_adaptive_avg_pool3d_backward", "adaptive_max_pool3d_backward")(pool_backward_by_rows)


# --- samples ---------------------------------------------------------------------------------------

_AREA, _VOLUME = reals(2, 3, 7, 8), reals(1, 2, 5, 6, 7)
OP.samples("_adaptive_avg_pool2d adaptive_max_pool2d", call(_AREA, [3, 5]))
OP.samples("_adaptive_avg_pool2d_backward", call(reals(2, 3, 3, 5), _AREA))
OP.samples("_adaptive_avg_pool3d adaptive_max_pool3d", call(_VOLUME, [2, 3, 4]))
OP.samples("_adaptive_avg_pool3d_backward", call(reals(1, 2, 2, 3, 4), _VOLUME))
OP.samples("adaptive_max_pool2d_backward", call(reals(2, 3, 3, 5), _AREA, integers(2, 3, 3, 5)))
OP.samples("adaptive_max_pool3d_backward", call(reals(1, 2, 2, 3, 4), _VOLUME, integers(1, 2, 2, 3, 4)))
