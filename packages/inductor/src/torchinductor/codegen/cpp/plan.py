"""The loops of a kernel in C++. Pure decisions on axes; no text but bounds of loops.

Loops are of three kinds. The *frame* runs over outer axes and is parallel. Inside it each stage has its own loops. The
innermost loop of all is over the *vector axis*, the one along which most accesses are contiguous:

* no inner axes: the frame, then the vector axis (`simd`); where some accesses are contiguous along another axis, the
  frame goes over tiles of the two, in which these accesses are turned over;
* the vector axis is an inner one: reductions are `simd reduction` along it;
* the vector axis is an outer one (column sums): the frame goes over blocks of it, accumulators are arrays with a lane
  for each element of the block, and each stage ends in a loop over lanes.

float32 sums go in blocks: at most about a thousand additions into one float32, the blocks' sums into a double.

`planned` gives a kernel its `Layout`, once; all that writes it reads it there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import Call, IntExpr
from torchinductor.codegen.cpp.expressions import index_text
from torchinductor.codegen.cpp.phases import in_phases
from torchinductor.indexing import below, coefficient_of, product
from torchinductor.ir import Apply, Axis, Body, Indirect, Kernel, Load, RandomBits, Reduce, Scan, Stage, Store
from torchinductor.scheduling.axes import split_axes
from torchinductor.scheduling.online import join_passes

_LANES = 64  # elements of a block of the vector axis when accumulators are arrays
_TILE = (16, 64)  # elements of a tile along the axis that some accesses are contiguous in, and along the vector axis
_LEAST_TILE = 8  # of either
_MOST_TURNED = 1 << 14  # elements of a tile of lanes
_BLOCK = 4096  # elements of a block of the vector axis when it is the only loop to share among threads
_SUM_BLOCK = 512  # additions of one vector loop into float32 accumulators (each of 8 or 16 SIMD lanes takes a share)
_FAR = 1 << 22  # elements of a kernel with lanes from which on one pass over memory is better than two
_NARROW = 32  # elements of an innermost loop of sums within other loops, up to which each place has its own
_OFTEN = 64  # what a size is taken for that nobody knows, where two are compared
_SUM_LANES = 256  # places of their own, of an innermost loop of sums within other loops whose length nobody knows
_LANE_SUM_BLOCK = 32  # the same where each accumulator takes every addition


@record
class Loop:
    """`for (i64 var = start; var < stop; var += step)`; `axis` is None for a loop over blocks."""

    var: str
    stop: str
    start: str = "0"
    step: int = 1
    axis: str | None = None
    most: int | None = None  # how many iterations it has at most

    @property
    def head(self) -> str:
        """The `for (...)` of it."""
        increment = f"{self.var}++" if self.step == 1 else f"{self.var} += {self.step}"
        return f"for (i64 {self.var} = {self.start}; {self.var} < {self.stop}; {increment})"


@record
class Tile:
    """What one iteration of the frame covers where some accesses are contiguous along one axis and others along
    another: they are turned over in a buffer of the tile, so that all of them go by whole vectors."""

    cross: Loop  # along the axis that is not the vector axis
    vector: Loop

    @property
    def elements(self) -> int:
        """How many elements the tile has room for."""
        return (self.cross.most or 0) * (self.vector.most or 0)

    @property
    def place(self) -> str:
        """The place of the current element in a buffer of the tile."""
        return f"({self.cross.var} - {self.cross.start})*{self.vector.most} + {self.vector.var} - {self.vector.start}"


@record
class Layout:
    """The loops of a kernel."""

    frame: tuple[Loop, ...]
    inner: tuple[Loop, ...]  # loops of an inner stage
    outer: tuple[Loop, ...] = ()  # loops of an outer stage
    lanes: str | None = None  # the vector axis when accumulators have lanes
    lane_count: int = 0
    simd: bool = True  # whether the innermost loop may be vectorised
    parallel: str | None = None  # the condition under which the frame runs in parallel, None for never
    chunked: bool = False  # whether float32 sums go in blocks
    tile: Tile | None = None
    running: bool = False  # whether sums that run along the inner axis go in blocks
    narrow: int = 0  # at most so long is an innermost loop whose sums are arrays: a vector at a time may be all of it
    ascending: bool = True  # whether there is one inner axis, so that positions along it only grow


def planned(kernel: Kernel, grain: int) -> Kernel:
    """The kernel with its layout; a scatter's loops along which iterations may meet become inner ones.

    `grain`: elements of a cheap pointwise kernel from which on it is worth running in parallel.
    """
    kernel = split_axes(kernel, _LEAST_TILE)
    kernel = _ordered_scatter(kernel) if kernel.scatters else kernel
    vector = _vector_axis(kernel)
    apart = in_phases(kernel, vector) if vector is not None and not kernel.inner else None
    if apart is not None and vector is not None:
        kernel, vector = apart, next(axis for axis in apart.axes if axis.name == vector.name)
    layout = _loops(kernel, vector)
    if _is_far(kernel, layout):
        joined = join_passes(kernel, _joins)
        if _loops(joined, _vector_axis(joined)) == layout:
            kernel = joined
    parallel = _parallel(kernel, layout.frame, grain)
    return replace(kernel, layout=replace(layout, parallel=parallel, ascending=len(kernel.inner) <= 1))


def _is_far(kernel: Kernel, layout: Layout) -> bool:
    """Whether lanes run over more than caches keep, in blocks of rows that are worth some divisions."""
    if not layout.chunked or layout.lanes is None:
        return False
    rows = next(axis.size.as_int() for axis in kernel.inner if axis.name == layout.inner[-2].axis)
    return (product(a.size for a in kernel.axes).as_int() or 0) >= _FAR and (rows or 0) >= 4 * _LANE_SUM_BLOCK


def _joins(body: Body, joined: Reduce) -> bool:
    """Whether the body can sum up squares about the mean too: it is run over each block twice."""
    alone = not body.writes and not body.faults and all(op.about is None for op in body.of(Reduce))
    return alone and joined.kind == "moments" and joined.dtype == torch.float32


def _ordered_scatter(kernel: Kernel) -> Kernel:
    """A scatter with the axes along which two iterations may meet as inner, sequential loops."""
    (stage,) = kernel.stages
    stores = list(stage.body.of(Store))
    axes = []
    for axis in kernel.axes:
        free = all(_conflict_free(op.index, axis, kernel) for op in stores)
        axes.append(replace(axis, inner=not free))
    if not any(a.inner for a in axes):
        return replace(kernel, axes=tuple(axes), scatters=False)
    return replace(kernel, axes=tuple(axes), stages=(Stage("inner", stage.body),))


def _conflict_free(index: IntExpr, axis: Axis, kernel: Kernel) -> bool:
    """Whether different values of the axis surely store to different elements."""
    step = coefficient_of(index, axis.name)
    if step is None or not step.terms:
        return False
    rest = index - step * axis.var
    whole = step * axis.size
    remainder = rest % whole
    if isinstance(remainder, IntExpr) and len(remainder.terms) == 1:
        (monomial,) = remainder.terms
        if len(monomial) == 1 and isinstance(monomial[0], Call) and monomial[0].op == "mod":
            remainder = monomial[0].left
    return below(remainder, step, kernel.ranges)


def _strides(kernel: Kernel, axis: Axis) -> list[tuple[IntExpr | None, int]]:
    """(stride, weight) of the axis in each access; a store counts twice, an inner stage eight times, and what is small
    beside what is looked up by it not at all."""
    found = []
    for stage in kernel.stages:
        factor = 8 if stage.kind == "inner" else 1
        large = _looked_up(stage.body) & kernel.ranges.keys()
        for op in stage.body.accesses:
            weight = factor * (2 if isinstance(op, Store) else 1)
            small = isinstance(op, Load) and bool(large) and not op.index.symbols() & large
            found.append((coefficient_of(op.index, axis.name), 0 if small else weight))
    return found


def _looked_up(body: Body) -> set[str]:
    """The symbols in indices of what is read at places that tables tell: of axes along which it lies, and of places."""
    places = {op.symbol for op in body.of(Indirect)}
    indices = [op.index.symbols() for op in body.of(Load)] if places else []
    return {name for names in indices if names & places for name in names}


def _score(kernel: Kernel, axis: Axis) -> int:
    """How well the axis does as the vector axis."""
    total = 0
    for stride, weight in _strides(kernel, axis):
        if stride is None:
            total -= 2 * weight
        elif stride.as_int() == 1:
            total += 4 * weight
        elif stride.terms:
            total -= 2 * weight
    size = axis.size.as_int()
    return total if size is None or size >= 8 else total // 2 - 4


def _extent(kernel: Kernel, axis: Axis) -> float:
    """The largest stride of the axis, for the order of loops: of symbols, at sizes as they often are."""
    result = 0.0
    for stride, _ in _strides(kernel, axis):
        if stride is not None:
            result = max(result, _often(stride))
    return result


def _often(stride: IntExpr) -> float:
    """What it is at sizes as they often are; infinite where it is none there."""
    try:
        return abs(stride.evaluate(dict.fromkeys(stride.symbols(), _OFTEN)))
    except ZeroDivisionError:  # a size over another one less `_OFTEN`
        return math.inf


def _order(kernel: Kernel, axes: list[Axis]) -> list[Axis]:
    """Outermost first: by decreasing stride, then as they stand."""
    return sorted(axes, key=lambda a: -_extent(kernel, a))


def _work(kernel: Kernel) -> int:
    """The weight of one iteration: heavy functions count more."""
    heavy = sum(op.heavy for stage in kernel.stages for op in stage.body.of(Apply))
    return max(1, len(kernel.stages)) + 4 * heavy


def _parallel(kernel: Kernel, frame: tuple[Loop, ...], grain: int) -> str | None:
    if not frame:
        return None
    total = product(a.size for a in kernel.axes)
    limit = max(1, grain // _work(kernel))
    known = total.as_int()
    if known is not None:
        return "" if known >= limit else None
    return f"{index_text(total, {})} >= {limit}"


# The innermost loop, and those around it -----------------------------------------------------------------------


def _ordered(kernel: Kernel) -> bool:
    """Whether the inner axes are walked in order, one after the other."""
    return kernel.scatters or any(stage.body.scans for stage in kernel.stages)


def _vector_axis(kernel: Kernel) -> Axis | None:
    ordered = _ordered(kernel)
    candidates = [axis for axis in kernel.axes if not (ordered and axis.inner)]
    vector = max(candidates, key=lambda axis: (_score(kernel, axis), kernel.axes.index(axis)), default=None)
    if vector is None or _score(kernel, vector) > 0:
        return vector
    if ordered:
        return None
    # Nothing is contiguous along an outer axis: sums along an inner one need no room for lanes.
    return max(kernel.inner or candidates, key=lambda axis: (_score(kernel, axis), kernel.axes.index(axis)))


def _loops(kernel: Kernel, vector: Axis | None) -> Layout:
    inner = kernel.inner
    if not _ordered(kernel):
        inner = tuple(_order(kernel, [axis for axis in inner if axis is not vector]))
    frame = tuple(map(_full, _order(kernel, [axis for axis in kernel.outer if axis is not vector])))
    around = tuple(map(_full, inner))
    if vector is None and _runs_in_blocks(kernel):
        return Layout(frame, _split(around[-1], _SUM_BLOCK, kernel.ranges[around[-1].var]), running=True)
    if vector is None:
        return Layout(frame, around, simd=False)
    if vector.inner:
        return _along_inner(kernel, vector, frame, around)
    if kernel.inner:
        return _over_lanes(kernel, vector, frame, around)
    cross = _crossing(kernel, vector)
    if cross is not None:
        return _in_tiles(cross, vector, frame)
    return _pointwise(kernel, vector, frame)


def _runs_in_blocks(kernel: Kernel) -> bool:
    """Whether the kernel's scan is a sum with no order of additions to keep: of integers, or of float32 in float64."""
    scans = [op for stage in kernel.stages for op in stage.body.of(Scan)]
    if len(scans) != 1 or len(kernel.inner) != 1 or any(stage.body.faults for stage in kernel.stages):
        return False
    return scans[0].kind == "sum" and scans[0].dtype not in (torch.float64, torch.bool)


def _along_inner(kernel: Kernel, vector: Axis, frame: tuple[Loop, ...], around: tuple[Loop, ...]) -> Layout:
    reduced, last = product(axis.size for axis in kernel.inner).as_int(), vector.size.as_int()
    if around and last is not None and last <= _NARROW and (reduced is None or reduced > _SUM_BLOCK) and _sums(kernel):
        rows = _split(around[-1], _LANE_SUM_BLOCK, kernel.ranges[around[-1].var])
        return Layout(frame, (*around[:-1], *rows, _full(vector)), chunked=True, narrow=last)
    if around and last is None and _sums(kernel):  # it may be as short as a vector, and all of it within another loop
        rows = _split(around[-1], _LANE_SUM_BLOCK, kernel.ranges[around[-1].var])
        block, lane = _split(_full(vector), _SUM_LANES, vector.size)
        return Layout(frame, (*around[:-1], block, *rows, lane), chunked=True, narrow=_SUM_LANES)
    long = last is None or last > _SUM_BLOCK
    loops = _split(_full(vector), _SUM_BLOCK, vector.size) if long else (_full(vector),)
    return Layout(frame, (*around, *loops), chunked=reduced is None or reduced > _SUM_BLOCK)


def _sums(kernel: Kernel) -> bool:
    """Whether all that the kernel's inner stages find are sums of float32."""
    found = [op for stage in kernel.stages for op in stage.body.of(Reduce)]
    return all(op.kind == "sum" and op.about is None and op.dtype == torch.float32 for op in found)


def _over_lanes(kernel: Kernel, vector: Axis, frame: tuple[Loop, ...], around: tuple[Loop, ...]) -> Layout:
    known = vector.size.as_int()
    count = _LANES if known is None else max(min(known, _LANES), 1)
    blocks, lane = _blocks(vector, count)
    reduced = product(axis.size for axis in kernel.inner).as_int()
    chunked = not _ordered(kernel) and (reduced is None or reduced > 2 * _LANE_SUM_BLOCK) and bool(around)
    if chunked:
        around = (*around[:-1], *_split(around[-1], _LANE_SUM_BLOCK, kernel.ranges[around[-1].var]))
    tile = _turned_lanes(kernel, vector, lane)
    return Layout((*frame, blocks), (*around, lane), (lane,), vector.name, count, chunked=chunked, tile=tile)


def _turned_lanes(kernel: Kernel, vector: Axis, lane: Loop) -> Tile | None:
    """All of the inner axis beside a block of lanes, where some accesses are contiguous along that axis: what one
    iteration of the frame reads so is turned over once for all of its stages."""
    if len(kernel.inner) != 1 or _ordered(kernel):
        return None
    (axis,) = kernel.inner
    size = axis.size.as_int()
    if size is None or size < _LEAST_TILE or size * (lane.most or 0) > _MOST_TURNED or (lane.most or 0) < _LEAST_TILE:
        return None
    return Tile(_full(axis), lane) if _crosses(kernel, axis, vector) else None


def _in_tiles(cross: Axis, vector: Axis, frame: tuple[Loop, ...]) -> Layout:
    frame = tuple(loop for loop in frame if loop.axis != cross.name)
    rows, columns = (
        _split(_full(axis), min(tile, axis.size.as_int() or tile), axis.size)
        for axis, tile in zip((cross, vector), _TILE, strict=True)
    )
    # Tiles follow one another along the rows of what is turned over.
    return Layout((*frame, columns[0], rows[0]), (), (rows[1], columns[1]), tile=Tile(rows[1], columns[1]))


def _pointwise(kernel: Kernel, vector: Axis, frame: tuple[Loop, ...]) -> Layout:
    known = vector.size.as_int()
    lone = not frame or _known_small([axis for axis in kernel.outer if axis is not vector])
    if lone and (known is None or known > _BLOCK):
        blocks, lane = _blocks(vector, _BLOCK)
        return Layout((*frame, blocks), (lane,), (lane,))
    draws = any(True for stage in kernel.stages for _ in stage.body.of(RandomBits))
    long = draws and (known is None or known > _BLOCK)  # a block's random numbers are made together
    loops = _split(_full(vector), _BLOCK, vector.size) if long else (_full(vector),)
    return Layout(frame, loops, loops)


def _full(axis: Axis) -> Loop:
    return Loop(axis.name, index_text(axis.size, {}), axis=axis.name, most=axis.size.as_int())


def _blocks(axis: Axis, count: int) -> tuple[Loop, Loop]:
    """The loop over blocks of an axis, and the one within a block."""
    name, size, known = f"{axis.name}_b", index_text(axis.size, {}), axis.size.as_int()
    whole = known is not None and known % count == 0
    stop = f"{name} + {count}" if whole else f"imin<i64>({name} + {count}, {size})"
    return Loop(name, size, step=count), Loop(axis.name, stop, name, axis=axis.name, most=count)


def _crossing(kernel: Kernel, vector: Axis) -> Axis | None:
    """The axis along which some accesses are contiguous that jump along the vector axis: a transposition, done in
    tiles so that every cache line that is fetched is used up while it is near."""
    for axis in kernel.axes:
        sizes = (axis.size.as_int(), vector.size.as_int())
        if axis is vector or any(n is not None and n < _LEAST_TILE for n in sizes):
            continue
        if _crosses(kernel, axis, vector):
            return axis
    return None


def _crosses(kernel: Kernel, axis: Axis, vector: Axis) -> bool:
    """Whether an access is contiguous along an axis and jumps along the vector axis."""
    for stage in kernel.stages:
        for op in stage.body.accesses:
            along, across = coefficient_of(op.index, axis.name), coefficient_of(op.index, vector.name)
            if along is not None and along.as_int() == 1 and across is not None and across.terms:
                return True
    return False


def _known_small(axes: list[Axis]) -> bool:
    known = product(a.size for a in axes).as_int()
    return known is not None and known < 8


def _split(loop: Loop, count: int, size: IntExpr) -> tuple[Loop, Loop]:
    """A loop over blocks of `count`, and the loop within a block."""
    block, known = f"{loop.var}_c", size.as_int()
    stop = f"{block} + {count}"
    if known is None or known % count:
        stop = f"imin<i64>({stop}, {loop.stop})"
    return Loop(block, loop.stop, step=count), Loop(loop.var, stop, block, axis=loop.axis, most=count)
