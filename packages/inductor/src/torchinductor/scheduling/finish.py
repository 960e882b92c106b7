"""The final form of a fused kernel: stages merged, values forwarded past memory, dead stores gone, axes merged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr, intern_symbol
from torchinductor.indexing import product, rename
from torchinductor.ir import (
    Apply,
    Body,
    Carried,
    Constant,
    Indirect,
    Kernel,
    Load,
    Op,
    Part,
    RandomBits,
    Recorder,
    Reduce,
    ReduceColumn,
    Scan,
    Stage,
    Store,
    closure_of,
    kernels_by_form,
)
from torchinductor.scheduling.axes import merge_axes
from torchinductor.schemas import DeviceTraits


@record
class Stored:
    """What a stage stored: where to find the value again."""

    stage: int
    value: int
    index: IntExpr
    cheap: bool
    keys: frozenset[str]
    floor: int  # the first stage in which the computation can load what it loads
    scalar: bool  # stored by an outer stage: one value an outer iteration


class _Merging(Recorder):
    """Records a merged stage; loads of what other stages stored become the computation, when that is cheap."""

    def __init__(self, kernel: Kernel, stages: list[_Merging], stored: dict[str, Stored], kind: str) -> None:
        super().__init__(kernel.ranges)
        self.kernel, self.stages, self.stored, self.kind = kernel, stages, stored, kind

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: int | None = None) -> int:
        found = self.stored.get(buffer) if mask is None else None
        if (
            found is not None
            and self.stages[found.stage] is not self
            and found.cheap
            and found.index == self.simplify(index)
        ):
            source = self.stages[found.stage]
            return self.to_dtype(self._copy(source, found.value, {}), dtype, source.dtype(found.value))
        return super().load(buffer, index, dtype, mask)

    def _copy(self, source: _Merging, value: int, done: dict[int, int]) -> int:
        """A value of another stage, computed here again."""
        known = done.get(value)
        if known is None:
            op = source.ops[value]
            if isinstance(op, Constant):
                known = self.constant(op.value, op.dtype)
            else:
                made = op.renumbered(lambda a: self._copy(source, a, done))
                known = self.record(self._placed(made, source, done))
            done[value] = known
        return known

    def _placed(self, op: Op, source: _Merging, done: dict[int, int]) -> Op:
        """The operation with this stage's names for the places that it computes."""
        if not isinstance(op, (Load, RandomBits)) or not any(map(_computed, op.index.symbols())):
            return op
        names = op.index.symbols()
        places = {
            intern_symbol(jump.symbol): self.indirect(self._copy(source, jump.value, done), jump.size)
            for jump in source.ops
            if isinstance(jump, Indirect) and jump.symbol in names
        }
        return replace(op, index=self.simplify(rename(op.index, places)))


def finish(kernel: Kernel, live: frozenset[str], traits: DeviceTraits) -> Kernel:
    """`live` names the buffers that anybody but this kernel reads."""
    numbers = tuple(number for number, name in enumerate(kernel.form.buffers) if name in live)
    (finished,) = _finished(kernel, numbers, traits)
    return finished


@kernels_by_form
def _finished(kernel: Kernel, numbers: tuple[int, ...], traits: DeviceTraits) -> Sequence[Kernel]:
    """The same with the numbers of these buffers in the kernel's form."""
    if kernel.scatters:
        return (merge_axes(kernel),)
    live = frozenset(kernel.form.buffers[number] for number in numbers)
    merged = _merge_stages(kernel, live, traits)
    return (merge_axes(_without_dead_stores(merged, live)),)


@record
class _Choice:
    """What a kernel computes again in a later stage, and what it stores and loads."""

    kernel: Kernel
    live: frozenset[str]
    traits: DeviceTraits

    def traits_for(self, buffer: str) -> DeviceTraits:
        """A device may compute again what would go to memory for this kernel alone; what goes there anyway is loaded
        from there unless that is plainly dearer."""
        return _STORED if buffer in self.live else self.traits

    def again(self, store: Store, made: _Computation) -> bool:
        """Whether a later stage computes what this one stores. What goes to memory anyway is loaded where that moves
        fewer bytes, unless all that the stage loads is still at hand."""
        if made.cost > self.traits_for(store.buffer).recomputed:
            return False
        if store.buffer not in self.live or self.traits.held is None:
            return True
        rows = product(a.size for a in self.kernel.inner).as_int()
        walked = {a.name for a in self.kernel.inner}
        moved = sum(load.dtype.itemsize for load in made.loads if walked & load.index.symbols())
        stored = self.kernel.buffers[store.buffer].dtype.itemsize
        return (rows is not None and rows <= self.traits.held) or moved <= stored


_STORED = DeviceTraits()


class _Computation(NamedTuple):
    """How a value is made; without end where it is not to be made again."""

    cost: float
    keys: frozenset[str]  # of the reductions it takes
    loads: frozenset[Load]

    @property
    def loaded(self) -> set[str]:
        return {load.buffer for load in self.loads}


def _merge_stages(kernel: Kernel, live: frozenset[str], traits: DeviceTraits) -> Kernel:
    """Each stage joins the earliest one of its kind that its operands allow."""
    if len(kernel.stages) == 1:
        return kernel
    stages: list[_Merging] = []
    stored: dict[str, Stored] = {}
    reduced: dict[str, int] = {}
    scanned: set[int] = set()
    for stage in kernel.stages:
        first = 0
        for key in stage.body.carries:
            first = max(first, reduced[key] + 1)
        for name in stage.body.reads:
            found = stored.get(name)
            if found is not None:
                first = max(first, _available(found, name, stage, stages, reduced))
        place = next((p for p in range(first, len(stages)) if stages[p].kind == stage.kind), None)
        if place is None:
            place = len(stages)
            stages.append(_Merging(kernel, stages, stored, stage.kind))
        _append(stages, place, stage.body, stored, reduced, _Choice(kernel, live, traits))
        if stage.body.scans:
            scanned.add(place)
    return replace(kernel, stages=tuple(Stage(s.kind, s.body()) for s in stages))  # type: ignore[arg-type]


def _available(found: Stored, name: str, stage: Stage, stages: list[_Merging], reduced: Mapping[str, int]) -> int:
    """The first place of a stage that reads what was stored."""
    loads = (op for op in stage.body.of(Load) if op.buffer == name)
    if found.cheap and all(op.mask is None and op.index == found.index for op in loads):
        return max((found.floor, *(reduced[k] + 1 for k in found.keys)))
    return found.stage if stages[found.stage].kind == stage.kind else found.stage + 1


def _append(
    stages: list[_Merging],
    place: int,
    body: Body,
    stored: dict[str, Stored],
    reduced: dict[str, int],
    choice: _Choice,
) -> None:
    target = stages[place]
    body.replay(target)
    reduced.update(dict.fromkeys(body.reduces, place))
    for op in target.ops:
        if isinstance(op, Store) and op.plain and op.buffer not in stored:
            made = _computation(target, op.value, choice.traits_for(op.buffer))
            sources = [stored[b].stage for b in made.loaded if b in stored]
            floor = max((s if stages[s].kind == target.kind else s + 1 for s in sources), default=0)
            stored[op.buffer] = Stored(
                place, op.value, op.index, choice.again(op, made), made.keys, floor, target.kind == "outer"
            )


def _computation(recorder: _Merging, value: int, traits: DeviceTraits) -> _Computation:
    needed = closure_of(recorder.ops, [value])
    heavy = math.inf if traits.heavy is None else traits.heavy
    cost: float = len(needed)
    keys: set[str] = set()
    loads: set[Load] = set()
    for op in map(recorder.ops.__getitem__, needed):
        match op:
            case Carried():
                keys.add(op.key)
            case Apply() if op.heavy and recorder.kind == "inner":
                cost += heavy  # once an outer iteration is cheap whatever it is
            case Load():
                # Of several places of one buffer, as of windows that overlap, memory gives one and caches the others.
                beside = any(op.buffer == load.buffer and op.index != load.index for load in loads)
                loads.add(op)
                cost += heavy if _indirect(op) else (traits.heavy or 0) if beside else 0
            case RandomBits():
                cost += heavy
            case Scan() | Part():
                cost = math.inf
    return _Computation(cost, frozenset(keys), frozenset(loads))


def _indirect(op: Load) -> bool:
    return any(map(_computed, op.index.symbols()))


def _computed(name: str) -> bool:
    """Whether a variable of an index stands for a value that the body computes."""
    return name.startswith("j")


def _without_dead_stores(kernel: Kernel, live: frozenset[str]) -> Kernel:
    """Drops stores that nobody reads and everything that only they needed; names the buffers only this kernel uses."""
    loaded = {op.buffer for s in kernel.stages for op in s.body.of(Load)}
    needed: set[str] = set()
    stages: list[Stage] = []
    for stage in reversed(kernel.stages):
        body = _live_body(stage.body, live | loaded, needed)
        needed |= body.carries
        if body.ops:
            stages.append(Stage(stage.kind, body))
    result = replace(kernel, stages=tuple(reversed(stages)))
    still = {op.buffer for s in result.stages for op in s.body.of(Load)}
    if still != loaded:
        return _without_dead_stores(result, live)
    return replace(result, local=frozenset(w for w in result.writes if w not in live))


def _live_body(body: Body, buffers: frozenset[str] | set[str], keys: set[str]) -> Body:
    """The operations that these buffers' stores and these keys' reductions need, by operands or by indirect indices."""
    roots = [p for p, op in enumerate(body.ops) if _is_root(op, buffers, keys)]
    keep = closure_of(body.ops, roots)
    if len(keep) == len(body.ops):
        return body
    order = sorted(keep)
    number = {old: new for new, old in enumerate(order)}
    return Body(tuple(body.ops[p].renumbered(number.__getitem__) for p in order))


def _is_root(op: Op, buffers: frozenset[str] | set[str], keys: set[str]) -> bool:
    return (isinstance(op, Store) and op.buffer in buffers) or (
        isinstance(op, (Reduce, ReduceColumn)) and op.key in keys
    )
