"""Kernels: stages of loop bodies over one iteration space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Literal, TypeVar

import torch

from primtorch.frozen import record, remembering_record
from primtorch.once import cached_property
from primtorch.symbolic.expr import IntExpr
from torchinductor.errors import InductorError
from torchinductor.indexing import ONE, ZERO, number, variable
from torchinductor.ir.body import Body
from torchinductor.ir.forms import Form, form_of
from torchinductor.ir.operations import Indirect, Load, ReduceColumn, Store
from torchinductor.ops import PrintHandler

Layout = TypeVar("Layout")


@record
class Buffer:
    """A tensor's memory: name, and the layout that kernels index it by."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[IntExpr, ...]
    strides: tuple[IntExpr, ...]

    @property
    def span(self) -> IntExpr:
        """Elements from the first to the last one: more than there are where rows are padded."""
        return _span(self.shape, self.strides)

    def __str__(self) -> str:
        sizes, strides = ", ".join(map(str, self.shape)), ", ".join(map(str, self.strides))
        return f"{self.name}: {str(self.dtype)[6:]}[{sizes}] strides ({strides})"


@lru_cache(maxsize=4096)
def _span(shape: tuple[IntExpr, ...], strides: tuple[IntExpr, ...]) -> IntExpr:
    if any(size.as_int() == 0 for size in shape):
        return ZERO
    return sum(((size - ONE) * stride for size, stride in zip(shape, strides, strict=True)), ONE)


@record
class Axis:
    """A loop over 0 <= name < size."""

    name: str
    size: IntExpr
    inner: bool = False
    # No loop: the outer iterations are dealt out to so many parts, and stages of columns run once for each.
    part: bool = False

    @property
    def var(self) -> IntExpr:
        """The axis's value as an index expression."""
        return variable(self.name)


StageKind = Literal["outer", "inner", "columns"]


@record
class Stage:
    """One body run for each outer iteration ("outer"), for each point of the inner axes in it ("inner"), or for each of
    these points behind all iterations ("columns")."""

    kind: StageKind
    body: Body


@remembering_record
class Kernel:
    """A fused kernel: what a code generation back end consumes."""

    name: str
    device: torch.device
    axes: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    buffers: Mapping[str, Buffer] = field(repr=False)
    origins: tuple[str, ...] = ()
    # Buffers that no other instruction reads: only this kernel writes and reads them.
    local: frozenset[str] = frozenset()
    # Those of them that are no memory: what one outer iteration stores there, it alone loads.
    rows: tuple[str, ...] = ()
    # A kernel with atomic or ordered stores (scatter): never fused with what reads its result.
    scatters: bool = False
    # (written, read): the written buffer lies where the read one does, which nobody needs afterwards.
    in_place: tuple[tuple[str, str], ...] = ()
    # How the device's back end lays it over loops or threads: what its `legalize` found out, for its `generate`.
    layout: object = field(default=None, repr=False, compare=False)

    def laid_out(self, kind: type[Layout]) -> Layout:
        """The layout that the back end planned, of its own class. Raises InductorError where there is none yet."""
        if not isinstance(self.layout, kind):
            raise InductorError(f"kernel {self.name} is written before it is planned")
        return self.layout

    @property
    def outer(self) -> tuple[Axis, ...]:
        """The parallel loops."""
        return tuple(a for a in self.axes if not a.inner and not a.part)

    @property
    def inner(self) -> tuple[Axis, ...]:
        """The loops within each outer iteration."""
        return tuple(a for a in self.axes if a.inner)

    @property
    def part(self) -> Axis | None:
        """The parts that the outer iterations are dealt out to, where they are."""
        return next((a for a in self.axes if a.part), None)

    @property
    def column_reductions(self) -> tuple[ReduceColumn, ...]:
        """What is accumulated over the outer axes."""
        return tuple(op for stage in self.stages for op in stage.body.of(ReduceColumn))

    def walked(self, kind: StageKind) -> tuple[Axis, ...]:
        """The axes that a stage runs over."""
        if kind == "columns":
            return tuple(a for a in self.axes if a.inner or a.part)
        return self.outer if kind == "outer" else (*self.outer, *self.inner)

    @cached_property
    def ranges(self) -> dict[str, IntExpr]:
        """The axes' sizes by name."""
        return {a.name: a.size for a in self.axes}

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers in memory that are loaded (or combined into), in order of first use."""
        accesses = (op for stage in self.stages for op in stage.body.accesses if op.buffer not in self.rows)
        return tuple({op.buffer: None for op in accesses if isinstance(op, Load) or op.mode != "set"})

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers in memory that are stored to, in order of first use."""
        stores = (op for stage in self.stages for op in stage.body.of(Store) if op.buffer not in self.rows)
        return tuple({op.buffer: None for op in stores})

    @cached_property
    def read_set(self) -> frozenset[str]:
        """Buffers that are loaded: asked for wherever operations are put in an order."""
        return frozenset(self.reads)

    @cached_property
    def write_set(self) -> frozenset[str]:
        """Buffers that are stored to."""
        return frozenset(self.writes)

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The buffers in the order in which the kernel takes their pointers: written ones first."""
        return tuple(dict.fromkeys((*self.writes, *self.reads)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Size symbols that the kernel needs, sorted: its int64 arguments."""
        found: set[str] = set()
        variables = set(self.ranges)
        for axis in self.axes:
            found |= axis.size.symbols()
        for stage in self.stages:
            for expr in stage.body.indices:
                found |= expr.symbols()
            for op in stage.body.of(Indirect):
                variables.add(op.symbol)
                found |= op.size.symbols()
        return tuple(sorted(found - variables))

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The symbols that are no size of anything in it: they may be negative (how far a tensor is rolled)."""
        shapes = (size for name in self.arguments for size in self.buffers[name].shape)
        return frozenset(self.symbols) - {str(size) for size in (*shapes, *(axis.size for axis in self.axes))}

    @cached_property
    def form(self) -> Form:
        """What it does, apart from its names."""
        return form_of(self)

    def _note(self, buffer: str) -> str:
        over = [read for written, read in self.in_place if written == buffer]
        if buffer in self.rows:
            return "  (local, a row at a time)"
        return "  (local)" if buffer in self.local else f"  (over {over[0]})" if over else ""

    def __str__(self) -> str:
        def loops(axes: Sequence[Axis]) -> str:
            return ", ".join(f"{a.name} < {a.size}" for a in axes)

        lines = [
            f"kernel {self.name} on {self.device}"
            + (f"  # {', '.join(dict.fromkeys(self.origins))}" if self.origins else "")
        ]
        lines += [f"  {self.buffers[b]}" + self._note(b) for b in (*self.arguments, *self.rows)]
        lines.append(f"  for {loops(self.outer)}:" if self.outer else "  once:")
        for stage in self.stages:
            indent = "    "
            if stage.kind != "outer":
                indent = "      "
                behind = stage.kind == "columns"
                lines.append(
                    f"  then for {loops(self.walked('columns'))}:" if behind else f"    for {loops(self.inner)}:"
                )
            printer = PrintHandler(indent)
            stage.body.replay(printer)
            lines += printer.lines
        return "\n".join(lines)


def space(shape: Sequence[IntExpr], inner: Sequence[int] = ()) -> tuple[Axis, ...]:
    """Axes i0, i1, ... for a shape; those in `inner` are inner axes. Dims of size one get no axis."""
    return tuple(Axis(f"i{d}", s, d in inner) for d, s in enumerate(shape) if s.as_int() != 1)


def space_index(shape: Sequence[IntExpr]) -> tuple[IntExpr, ...]:
    """The index that the axes of `space(shape)` run over."""
    return tuple(number(0) if s.as_int() == 1 else variable(f"i{d}") for d, s in enumerate(shape))
