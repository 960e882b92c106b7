"""Sums by place: many values added to few places, as a reduction that asks of each value whether it belongs there.

The gradient of a table of few rows (a relative position's bias, a token's type) adds thousands of values to each of its
elements. Where a device adds by atomic operations these wait for one another. A reduction reads every value for some
rows at a time, compares its row with theirs, and waits for nobody; its sum is in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as combinations

import torch

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ZERO, Index, coefficient_of, dot, number, product
from torchinductor.ir import Axis, Load, Recorder, Stage, space, space_index
from torchinductor.lowering.context import Context, dense
from torchinductor.lowering.values import Ops, TensorValue
from torchinductor.schemas import AdditionRates

# Rows up to which each has a sum of its own in one kernel, so that values are read once however they lie in memory.
_UNROLLED = 4
# Rows that are compared with at one reading of the values, where these lie one after another along the sum.
_AT_ONCE = 64
# Rows above which indices that spread evenly cost less as atomic additions than to be compared with all rows.
_MOST_ROWS = 256

Source = Callable[[Index, Ops], Index]


@dataclass(frozen=True)
class _Plan:
    """How t[source(i)] += values(i), for i of a shape, becomes a reduction.

    Attributes:
        target: the index into t, by the outer axes.
        picked: t's dims whose index is compared; along the others, source and target are at the same place.
        outer: t's axes.
        inner: the axes that are summed over.
        index: the index into values.
    """

    target: Index
    picked: tuple[int, ...]
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    index: Index

    @property
    def ranges(self) -> dict[str, IntExpr]:
        return {a.name: a.size for a in (*self.outer, *self.inner)}


def sum_by_place(ctx: Context, t: TensorValue, shape: Index, values: TensorValue, source: Source) -> TensorValue | None:
    """t with values added where `source` says, as a reduction; None where additions in memory cost less."""
    rates = ctx.traits_of(t.device).additions
    if rates is None or ctx.inline or t.dtype == torch.bool or t.dtype.is_complex:
        return None
    plan = _planned(t, shape, source)
    if plan is None:
        return None
    rows = _count(t.shape[d] for d in plan.picked)
    addends = _Addends(ctx, plan, values, source)
    readings = 1 if rows <= _UNROLLED else -(-rows // _AT_ONCE) if addends.along else rows
    if rows > _MOST_ROWS or not _pays(plan, rows, readings, addends, rates):
        return None
    if readings > 1 and (values.heavy or values.cost > 2):
        ctx.realize(values)
    return _reduced(ctx, t, plan, values, source, rows <= _UNROLLED)


def _planned(t: TensorValue, shape: Index, source: Source) -> _Plan | None:
    """None where a size is not known, or no two values have one place."""
    if any(not size.as_int() for size in (*t.shape, *shape)):
        return None
    axes, index = {a.name: a for a in space(shape)}, space_index(shape)
    places = source(index, Recorder({a.name: a.size for a in axes.values()}))
    target: list[IntExpr] = []
    outer: list[Axis] = []
    picked: list[int] = []
    for d, (place, size) in enumerate(zip(places, t.shape, strict=True)):
        same = next((a for a in axes.values() if a.var == place and a.size == size), None)
        if same is not None:
            outer.append(axes.pop(same.name))
            target.append(place)
        elif size.as_int() == 1 and place == ZERO:
            target.append(ZERO)
        else:
            picked.append(d)
            own = [Axis(f"i{len(shape) + d}", size)] if size.as_int() != 1 else []
            outer += own
            target.append(own[0].var if own else ZERO)
    if not axes:
        return None
    inner = tuple(Axis(a.name, a.size, True) for a in axes.values())
    return _Plan(tuple(target), tuple(picked), tuple(outer), inner, index)


class _Addends:
    """What an inner stage loads: the bytes, and whether they lie one after another along the sum."""

    def __init__(self, ctx: Context, plan: _Plan, values: TensorValue, source: Source) -> None:
        recorder = Recorder(plan.ranges)
        source(plan.index, recorder)
        values.load(plan.index, recorder)
        summed, kept = {a.name for a in plan.inner}, {a.name for a in plan.outer}
        self.bytes = along = across = 0
        for op in recorder.body().of(Load):
            buffer = ctx.buffers[op.buffer]
            size = _count(buffer.shape) * op.dtype.itemsize
            walked = {name for name in op.index.symbols() & plan.ranges.keys() if _steps_by_one(op.index, name)}
            self.bytes += size
            along += size if walked & summed else 0
            across += size if walked & kept else 0
        self.along = along >= across


def _steps_by_one(index: IntExpr, axis: str) -> bool:
    step = coefficient_of(index, axis)
    return step is not None and step.as_int() == 1


def _pays(plan: _Plan, rows: int, readings: int, addends: _Addends, rates: AdditionRates) -> bool:
    """Whether reading and comparing takes less time than additions that wait for one another: those of one place do,
    and no more of them are under way than a device has threads."""
    meeting = _count(a.size for a in plan.inner)
    beside = _count(a.size for a in plan.outer) // rows
    # Neighbouring threads add to neighbouring places, or to one place and come to the next when they are through.
    together = min(beside, max(1, rates.under_way // meeting)) if addends.along else beside
    waiting = rates.waiting * meeting * beside / together
    reading = (readings - 1) * addends.bytes / rates.cache  # beyond the first, which either way takes
    comparing = meeting * beside * rows / rates.comparisons
    return max(reading, comparing) < waiting


def _reduced(
    ctx: Context, t: TensorValue, plan: _Plan, values: TensorValue, source: Source, unrolled: bool
) -> TensorValue:
    """The kernel: a sum for each row, or one with the rows as a loop."""
    outer = tuple(a for a in plan.outer if not unrolled or a.var not in [plan.target[d] for d in plan.picked])
    axes = (*outer, *plan.inner)
    ranges = {a.name: a.size for a in axes}
    buffer = ctx.new_buffer(t.shape, t.dtype, t.device, dense(t.shape, t.layout))
    inner, last = Recorder(ranges), Recorder(ranges)
    places = source(plan.index, inner)
    value = values.load(plan.index, inner)
    nothing = inner.constant(0, inner.dtype(value))
    for row in _rows(t, plan) if unrolled else [tuple(plan.target[d] for d in plan.picked)]:
        target = list(plan.target)
        added = value
        for d, at in zip(plan.picked, row, strict=True):
            target[d] = at
            here = inner.apply("eq", inner.index_expr(places[d], torch.int64), inner.index_expr(at, torch.int64))
            added = inner.apply("where", here, added, nothing)
        key = ctx.new_name("r")
        inner.reduce("sum", key, added)
        total = last.apply("add", t.load(tuple(target), last), last.carried(key, inner.dtype(added)))
        last.store(buffer.name, dot(target, buffer.strides), total)
    ctx.kernel(t.device, axes, [Stage("inner", inner.body()), Stage("outer", last.body())])
    return ctx.strided(buffer)


def _rows(t: TensorValue, plan: _Plan) -> Iterator[Sequence[IntExpr]]:
    sizes = [t.shape[d].as_int() or 0 for d in plan.picked]
    return ([number(at) for at in row] for row in combinations(*map(range, sizes)))


def _count(sizes: Iterator[IntExpr] | Sequence[IntExpr]) -> int:
    """The product of sizes; one that is not known counts as one."""
    return product(sizes).as_int() or 1
