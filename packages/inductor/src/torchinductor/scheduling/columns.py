"""Sums of columns in the kernel that goes through the rows: the gradients of a norm's weight and bias, of a bias.

A kernel of row reductions and one that sums up columns of the same values would each read these. As one, a program goes
through many rows, keeps a sum for each column in its registers, and writes these once; a small kernel adds up what the
programs have. The sums are made in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from primtorch.symbolic.expr import IntExpr
from torchinductor.cost import bytes_of
from torchinductor.indexing import contiguous_strides, dot, product
from torchinductor.ir import (
    Axis,
    Body,
    Buffer,
    Kernel,
    RandomBits,
    Recorder,
    Reduce,
    ReduceColumn,
    Stage,
    compute_dtype,
)
from torchinductor.scheduling.groups import Group
from torchinductor.schemas import ColumnSums, DeviceTraits

Join = Callable[[Group, Group, Kernel], Kernel | None]
"""What is made of a group's kernel and a second group's, whose kernel is given as it is to be joined; None where they
do not fit."""


def join_columns(groups: Sequence[Group], traits_of: Callable[[torch.device], DeviceTraits], join: Join) -> list[Group]:
    """The groups with sums of columns in the kernels of rows that touch what they read, where that moves less."""
    left = {group.number: group for group in groups}
    touching = _Touching(groups)
    for sums in groups:
        kernel = sums.operation
        limits = traits_of(kernel.device).columns if isinstance(kernel, Kernel) else None
        turned = _turned(kernel) if isinstance(kernel, Kernel) and limits is not None else None
        if turned is None or limits is None:
            continue
        for rows in _beside(sums, [left[number] for number in touching.any_of(sums.reads)]):
            if _apart(rows, sums, left) or not _early(rows, sums, touching):
                continue
            made = join(rows, sums, turned)
            if made is not None and _worth(rows, sums, made, limits):
                _merge(rows, sums, made, left)
                touching.merge(sums, rows)
                break
    numbers = {old: new for new, old in enumerate(left)}
    return [
        replace(group, number=numbers[group.number], before={numbers[b] for b in group.before})
        for group in left.values()
    ]


class _Touching:
    """Which groups touch a buffer, and which read it, by their numbers."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._touching: dict[str, set[int]] = {}
        self._reading: dict[str, set[int]] = {}
        for group in groups:
            self._add(group, group.number)

    def _add(self, group: Group, number: int) -> None:
        for buffer in group.reads:
            self._reading.setdefault(buffer, set()).add(number)
        for buffer in group.reads | group.writes:
            self._touching.setdefault(buffer, set()).add(number)

    def any_of(self, buffers: Iterable[str]) -> list[int]:
        """The groups that touch one of these, in order."""
        return sorted(set().union(*(self._touching[buffer] for buffer in buffers)))

    def readers(self, buffers: Iterable[str]) -> set[int]:
        """The groups that read one of these."""
        return set().union(*(self._reading.get(buffer, ()) for buffer in buffers))

    def merge(self, gone: Group, into: Group) -> None:
        """A group has become part of another."""
        for table in (self._touching, self._reading):
            for buffer in gone.reads | gone.writes:
                table.get(buffer, set()).discard(gone.number)
        self._add(gone, into.number)


def _turned(kernel: Kernel) -> Kernel | None:
    """A kernel that does nothing with its inner axes but to sum up over them, with inner and outer axes exchanged."""
    inner = [stage.body for stage in kernel.stages if stage.kind == "inner"]
    behind = [stage.body for stage in kernel.stages if stage.kind == "outer"]
    if not inner or not kernel.outer or kernel.scatters or kernel.column_reductions:
        return None
    for body in inner:
        sums = all(op.kind == "sum" and op.position is None and op.about is None for op in body.of(Reduce))
        if not sums or body.carries or body.scans or any(body.reads & other.writes for other in behind):
            return None
    stages = [
        Stage("inner", _over_rows(stage.body)) if stage.kind == "inner" else Stage("columns", stage.body)
        for stage in kernel.stages
    ]
    axes = tuple(replace(axis, inner=not axis.inner) for axis in kernel.axes)
    return replace(kernel, axes=axes, stages=tuple(stages))


def _over_rows(body: Body) -> Body:
    return Body(
        tuple(ReduceColumn(op.dtype, op.kind, op.key, op.value) if isinstance(op, Reduce) else op for op in body.ops)
    )


def _beside(sums: Group, groups: Iterable[Group]) -> list[Group]:
    """Row reductions of groups that touch what the sums read; those that share most of it first."""
    assert isinstance(sums.operation, Kernel)
    read = bytes_of(sums.operation)
    found: list[tuple[int, Group]] = []
    for group in groups:
        kernel = group.operation
        if (
            group is sums
            or not isinstance(kernel, Kernel)
            or not kernel.inner
            or kernel.device != sums.operation.device
        ):
            continue
        shared = sum(read[b] for b in sums.reads & (group.reads | group.writes) if b in read)
        if shared and not kernel.scatters:
            found.append((shared, group))
    return [group for _, group in sorted(found, key=lambda pair: -pair[0])]


def _apart(rows: Group, sums: Group, groups: dict[int, Group]) -> bool:
    """Whether something has to run after the one and before the other, or the rows after the sums."""
    if sums.number in rows.before:
        return True
    for one, other in ((rows, sums), (sums, rows)):
        if any(groups[b].ancestors >> one.number & 1 for b in other.before - {one.number}):
            return True
    return False


def _early(rows: Group, sums: Group, touching: _Touching) -> bool:
    """Whether nobody who waits for the one has to wait for what the other waits for."""
    latest = max((*(rows.before - {sums.number}), *(sums.before - {rows.number})), default=-1)
    readers = touching.readers(rows.writes | sums.writes) - {rows.number, sums.number}
    return latest < min(readers, default=latest + 1)


def _worth(rows: Group, sums: Group, made: Kernel, limits: ColumnSums) -> bool:
    """Whether a program has room for a row and its sums, and the bytes that are read once less are more than those of
    what the programs have summed up."""
    columns, count = product(a.size for a in made.inner).as_int(), product(a.size for a in made.outer).as_int()
    if columns is None or columns > limits.columns or (count is not None and count < limits.rows) or _draws(made):
        return False
    room = 1 << max(columns - 1, 0).bit_length()
    if sum(room * max(compute_dtype(op.dtype).itemsize // 4, 1) for op in made.column_reductions) > limits.sums:
        return False
    if count is None:
        return True
    assert isinstance(sums.operation, Kernel)
    read = bytes_of(sums.operation)
    saved = sum(read[b] for b in sums.reads & (rows.reads | rows.writes) if b in read)
    added = sum(1 for stage in sums.operation.stages for _ in stage.body.of(Reduce))
    return saved >= max(limits.least, 2 * added * columns * 4 * min(limits.programs, count))


def _draws(kernel: Kernel) -> bool:
    """Whether it makes random numbers: programs that hold sums are few, and compute less at a time."""
    return any(True for stage in kernel.stages for _ in stage.body.of(RandomBits))


def _merge(rows: Group, sums: Group, made: Kernel, groups: dict[int, Group]) -> None:
    """The sums' group goes into that of the rows."""
    del groups[sums.number]
    rows.operation = made
    rows.reads |= sums.reads
    rows.writes |= sums.writes
    rows.before = (rows.before | sums.before) - {rows.number, sums.number}
    both = 1 << rows.number | 1 << sums.number
    rows.ancestors = (rows.ancestors | sums.ancestors) & ~both
    for group in groups.values():
        if sums.number in group.before:
            group.before = (group.before - {sums.number}) | {rows.number}
        if group.ancestors & both:
            group.ancestors |= rows.ancestors | both


# ---- for back ends --------------------------------------------------------------------------------------------------


def in_parts(kernel: Kernel, parts: IntExpr) -> tuple[Kernel, Kernel]:
    """A kernel with sums of columns as one that writes a sum for each part of the rows, and one that adds these up."""
    part = Axis("part", parts, part=True)
    sizes = (part.size, *(a.size for a in kernel.inner))
    strides = contiguous_strides(sizes)
    place = dot([part.var, *(a.var for a in kernel.inner)], strides)
    buffers = dict(kernel.buffers)
    loops = (part, *kernel.axes)
    ends = (*(replace(a, inner=False) for a in kernel.inner), replace(part, part=False, inner=True))
    partial, total = Recorder({a.name: a.size for a in loops}), Recorder({a.name: a.size for a in ends})
    for place_of, op in enumerate(kernel.column_reductions):
        dtype = compute_dtype(op.dtype)
        name = f"{kernel.name}_partial{place_of}"
        buffers[name] = Buffer(name, dtype, kernel.device, sizes, strides)
        partial.store(name, place, partial.carried(op.key, dtype))
        total.reduce(op.kind, op.key, total.load(name, place, dtype))
    stages = [stage for stage in kernel.stages if stage.kind != "columns"]
    last = [Stage("outer", stage.body) for stage in kernel.stages if stage.kind == "columns"]
    return (
        replace(
            kernel,
            name=f"{kernel.name}_0",
            axes=loops,
            stages=(*stages, Stage("columns", partial.body())),
            buffers=buffers,
            local=kernel.local - {b for stage in last for b in stage.body.writes},
        ),
        replace(
            kernel,
            name=f"{kernel.name}_1",
            axes=ends,
            stages=(Stage("inner", total.body()), *last),
            buffers=buffers,
            local=frozenset(),
        ),
    )
