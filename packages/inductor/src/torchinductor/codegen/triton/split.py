"""Splits a reduction that would keep too few programs busy into one over chunks and one over the chunks' results.

A kernel with few outer points (a column sum, a mean of everything, batch statistics) is cut at each inner stage:
one kernel reduces chunks into a workspace, a small one combines the workspace, and what only stores runs as a pointwise
kernel. The workspace is an ordinary buffer, so allocation, reuse and fusion of the rest know nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from primtorch.symbolic.expr import IntExpr, intern_symbol
from torchinductor.indexing import ZERO, contiguous_strides, dot, number, product
from torchinductor.ir import Axis, Body, Buffer, Kernel, Recorder, Reduce, Stage, compute_dtype, kernels_by_form
from torchinductor.ops import ReductionKind, StoreMode
from torchinductor.scheduling.columns import in_parts

from .expressions import REDUCTIONS
from .plan import Layout, chunks_wanted, is_heavy, planned, planned_end, walk_parts


class Cut(NamedTuple):
    """How a reduction is split: every point of `whole`, and every chunk of `axis`, is reduced by itself."""

    whole: tuple[Axis, ...]
    axis: Axis
    chunks: int

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return self.chunks * (product(a.size for a in self.whole).as_int() or 1)


@kernels_by_form
def split_reductions(kernel: Kernel) -> Sequence[Kernel]:
    """The kernel itself, or several that do its work in order, planned. Sizes must be static for a split; of a kernel
    with sums of columns, the columns'."""
    if kernel.column_reductions:
        columns, rows = (product(a.size for a in axes).as_int() for axes in (kernel.inner, kernel.outer))
        walked, ends = in_parts(kernel, number(walk_parts(rows, columns or 1, is_heavy(kernel))))
        return [planned(walked), planned_end(ends)]
    whole = planned(kernel)
    cut = _cut(whole)
    if cut is None:
        return [whole]
    joined = {op.kind for op in _reductions(whole) if op.about is not None}
    if joined - {"moments"} or (joined and (cut.axis.size.as_int() or 1) % cut.chunks):
        whole = planned(kernel, join=False)  # only moments over whole chunks have a rule for joining chunks
        cut = _cut(whole) or cut
    return [planned(part) for part in _Splitter(whole, cut).run()]


def in_chunks(kernel: Kernel, chunks: int) -> tuple[Kernel, Kernel]:
    """A kernel of sums as one that writes those over each of so many chunks of its first inner axis, whose size need
    not be known, and one that adds these up."""
    parts, ends = _Splitter(kernel, Cut((), kernel.inner[0], chunks)).run()
    return parts, ends


def _reductions(kernel: Kernel) -> list[Reduce]:
    return [op for stage in kernel.stages for op in stage.body.of(Reduce)]


def _cut(kernel: Kernel) -> Cut | None:
    """None where a split does not pay or is not known."""
    layout = kernel.laid_out(Layout)
    length, count = product(a.size for a in kernel.inner).as_int(), product(a.size for a in kernel.outer).as_int()
    if not kernel.inner or layout.persistent or length is None or count is None or not length or not count:
        return None
    if any(stage.body.scans for stage in kernel.stages) or kernel.scatters:
        return None
    if any(op.position is not None for op in _reductions(kernel)):
        return None
    wanted = chunks_wanted(layout, count, length)
    if wanted < 2:
        return None
    return _cut_axes(kernel.inner, wanted)


def _cut_axes(axes: Sequence[Axis], wanted: int) -> Cut:
    """Chunks of the first axis that is long enough; else axes as a whole, from the first one on, and chunks of the
    next."""
    sizes = [a.size.as_int() or 1 for a in axes]
    at = next((i for i, size in enumerate(sizes) if size >= wanted), None)
    whole: tuple[Axis, ...] = ()
    if at is None:
        at = 0
        while at + 1 < len(axes) and wanted // sizes[at] >= 2:
            wanted //= sizes[at]
            at += 1
        whole = tuple(axes[:at])
    wanted = min(wanted, sizes[at])
    divisors = [s for s in range(max(2, wanted // 2), min(2 * wanted, sizes[at]) + 1) if sizes[at] % s == 0]
    return Cut(whole, axes[at], min(divisors, key=lambda s: abs(s - wanted)) if divisors else wanted)


class _Rerecorder(Recorder):
    """Records a body again: results of earlier phases are loaded, and what lies past the end takes no part."""

    def __init__(
        self, axes: tuple[Axis, ...], owner: _Splitter, tail: IntExpr | None = None, limit: IntExpr = ZERO
    ) -> None:
        super().__init__({a.name: a.size for a in axes})
        self.owner = owner
        self.inside: int | None = None
        if tail is not None:
            position, known = self.index_expr(tail, torch.int64), limit.as_int()
            end = self.index_expr(limit, torch.int64) if known is None else self.constant(known, torch.int64)
            self.inside = self.apply("lt", position, end)

    def carried(self, key: str, dtype: torch.dtype) -> int:
        buffer = self.owner.finished.get(key)
        if buffer is None:
            return super().carried(key, dtype)
        return self.load(buffer.name, self.owner.outer_index(buffer), buffer.dtype)

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: int | None = None) -> int:
        return super().load(buffer, index, dtype, self._inside(mask))

    def store(self, buffer: str, index: IntExpr, value: int, mode: StoreMode = "set", mask: int | None = None) -> None:
        super().store(buffer, index, value, mode, self._inside(mask))

    def reduce(
        self, kind: ReductionKind, key: str, value: int, position: int | None = None, about: str | None = None
    ) -> None:
        if self.inside is not None:
            dtype = self.dtype(value)
            value = self.apply("where", self.inside, value, self.constant(REDUCTIONS[kind].identity(dtype), dtype))
        super().reduce(kind, key, value, position, about)

    def _inside(self, mask: int | None) -> int | None:
        if self.inside is None or mask is None:
            return self.inside if mask is None else mask
        return self.apply("bitwise_and", self.inside, mask)


@dataclass
class _Splitter:
    kernel: Kernel
    cut: Cut
    finished: dict[str, Buffer] = field(default_factory=dict)  # key -> buffer of its value for each outer point
    buffers: dict[str, Buffer] = field(default_factory=dict)
    result: list[Kernel] = field(default_factory=list)

    def run(self) -> list[Kernel]:
        self.buffers.update(self.kernel.buffers)
        stages = list(self.kernel.stages)
        position = 0
        while position < len(stages):
            stage = stages[position]
            position += 1
            following: list[Stage] = []
            if stage.kind == "inner" and stage.body.reduces:
                while position < len(stages) and stages[position].kind == "outer":
                    following.append(stages[position])
                    position += 1
                self._reduce(stage.body, following, stages[position:])
            else:
                self._pointwise(stage)
        return self.result

    def outer_index(self, buffer: Buffer) -> IntExpr:
        return dot([a.var for a in self.kernel.outer], buffer.strides)

    def _workspace(self, dtype: torch.dtype, kind: str, sizes: list[IntExpr]) -> Buffer:
        name = f"{self.kernel.name}_{kind}{len(self.buffers) - len(self.kernel.buffers)}"
        buffer = Buffer(name, dtype, self.kernel.device, tuple(sizes), contiguous_strides(sizes))
        self.buffers[name] = buffer
        return buffer

    def _add(self, axes: tuple[Axis, ...], stages: list[Stage]) -> None:
        name = f"{self.kernel.name}_{len(self.result)}"
        self.result.append(
            replace(self.kernel, name=name, axes=axes, stages=tuple(stages), buffers=self.buffers, local=frozenset())
        )

    def _pointwise(self, stage: Stage) -> None:
        axes = tuple(replace(a, inner=False) for a in self.kernel.axes) if stage.kind == "inner" else self.kernel.outer
        recorder = _Rerecorder(axes, self)
        stage.body.replay(recorder)
        self._add(axes, [Stage("outer", recorder.body())])

    def _join_moments(
        self, key: str, total: str, partial: dict[str, Buffer], index: IntExpr, splits: tuple[Axis, ...]
    ) -> Stage:
        """Squares about each part's mean, moved to the mean of all: q + (s - S / parts)^2 / count."""
        parts = self.cut.parts
        count = (product(a.size for a in self.kernel.inner).as_int() or 1) // parts
        body = _Rerecorder((*self.kernel.outer, *splits), self)
        dtype = partial[key].dtype
        share = body.apply("mul", Recorder.carried(body, total, dtype), body.constant(1 / parts, dtype))
        off = body.apply("sub", body.load(partial[total].name, index, dtype), share)
        moved = body.apply("mul", body.apply("mul", off, off), body.constant(1 / count, dtype))
        body.reduce("sum", key, body.apply("add", body.load(partial[key].name, index, dtype), moved))
        return Stage("inner", body.body())

    def _reduce(self, body: Body, following: list[Stage], later: list[Stage]) -> None:
        outer, cut = self.kernel.outer, self.cut
        splits = (*(replace(a, inner=False) for a in cut.whole), Axis("split", number(cut.chunks)))
        split = splits[-1]
        reductions = {op.key: op for op in body.of(Reduce)}
        partial = {
            key: self._workspace(compute_dtype(op.dtype), "partial", [a.size for a in (*splits, *outer)])
            for key, op in reductions.items()
        }
        # Chunks into the workspace.
        whole, known = cut.axis.size, cut.axis.size.as_int()
        chunk = Axis("chunk", (whole + number(cut.chunks - 1)) // number(cut.chunks), True)
        inner = [chunk if a is cut.axis else a for a in self.kernel.inner if a not in cut.whole]
        axes = (*splits, *outer, *inner)
        place = split.var * chunk.size + chunk.var
        recorder = _Rerecorder(axes, self, place if known is None or known % cut.chunks else None, whole)
        body.replay(recorder, {intern_symbol(cut.axis.name): place})
        write = _Rerecorder(axes, self)
        for key, buffer in partial.items():
            index = dot([a.var for a in (*splits, *outer)], buffer.strides)
            write.store(buffer.name, index, Recorder.carried(write, key, buffer.dtype))
        self._add(axes, [Stage("inner", recorder.body()), Stage("outer", write.body())])
        # The workspace into one value a point, and what is computed once a point.
        summed = tuple(replace(a, inner=True) for a in splits)
        gather = _Rerecorder((*outer, *summed), self)
        joins: list[Stage] = []
        for key, buffer in partial.items():
            reduction = reductions[key]
            index = dot([a.var for a in (*splits, *outer)], buffer.strides)
            if reduction.about is None:
                gather.reduce(reduction.kind, key, gather.load(buffer.name, index, buffer.dtype))
            else:
                joins.append(self._join_moments(key, reduction.about, partial, index, summed))
        stages = [Stage("inner", gather.body()), *joins]
        for stage in following:
            again = _Rerecorder(outer, self)
            stage.body.replay(again)
            stages.append(Stage("outer", again.body()))
        needed = {k for s in later for k in s.body.carries} & set(reductions)
        keep = _Rerecorder(outer, self)
        fresh: dict[str, Buffer] = {}
        for key in sorted(needed):
            dtype = compute_dtype(reductions[key].dtype)
            fresh[key] = self._workspace(dtype, "total", [a.size for a in outer])
            keep.store(fresh[key].name, self.outer_index(fresh[key]), Recorder.carried(keep, key, dtype))
        if fresh:
            stages.append(Stage("outer", keep.body()))
        self._add((*outer, *summed), stages)
        self.finished |= fresh
