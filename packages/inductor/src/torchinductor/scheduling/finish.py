"""The final form of a fused kernel: stages merged, values forwarded past memory, dead stores gone, axes merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from primtorch.symbolic.expr import IntExpr, Symbol, intern_symbol
from torchinductor.indexing import ZERO, coefficient_of
from torchinductor.ir import Axis, Body, Kernel, Op, Recorder, Stage
from torchinductor.ops import ELEMENTWISE

# What may be computed again in a later loop rather than stored and loaded.
_CHEAP = 12


@dataclass(frozen=True, slots=True)
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
            known = done[value] = self._record(op._replace(args=tuple(self._copy(source, a, done) for a in op.args)))
        return known


def finish(kernel: Kernel, live: frozenset[str]) -> Kernel:
    """`live` names the buffers that anybody but this kernel reads."""
    if kernel.scatters:
        return merge_axes(kernel)
    merged = _merge_stages(kernel)
    return merge_axes(_without_dead_stores(merged, live))


def _merge_stages(kernel: Kernel) -> Kernel:
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
        _append(stages, place, stage.body, stored, reduced)
        if stage.body.scans:
            scanned.add(place)
    return replace(kernel, stages=tuple(Stage(s.kind, s.body()) for s in stages))  # type: ignore[arg-type]


def _available(found: Stored, name: str, stage: Stage, stages: list[_Merging], reduced: Mapping[str, int]) -> int:
    """The first place of a stage that reads what was stored."""
    loads = (op for op, buffer, _ in stage.body.accesses() if buffer == name and op.name == "load")
    if found.cheap and all(not op.args and op.attr[1] == found.index for op in loads):
        return max((found.floor, *(reduced[k] + 1 for k in found.keys)))
    return found.stage if stages[found.stage].kind == stage.kind else found.stage + 1


def _append(stages: list[_Merging], place: int, body: Body, stored: dict[str, Stored], reduced: dict[str, int]) -> None:
    target = stages[place]
    values = body.replay(target)
    for op, _ in zip(body.ops, values, strict=True):
        if op.name == "reduce":
            reduced[op.attr[1]] = place
    for position, op in enumerate(target.ops):
        if op.name == "store" and op.attr[2] == "set" and len(op.args) == 1 and op.attr[0] not in stored:
            cost, keys, loaded, heavy = _slice(target, op.args[0])
            sources = [stored[b].stage for b in loaded if b in stored]
            floor = max((s if stages[s].kind == target.kind else s + 1 for s in sources), default=0)
            stored[op.attr[0]] = Stored(
                place, op.args[0], op.attr[1], cost <= _CHEAP and not heavy, keys, floor, target.kind == "outer"
            )
            del position


def _slice(recorder: _Merging, value: int) -> tuple[int, frozenset[str], set[str], bool]:
    """(operations, carried keys, loaded buffers, whether it is too heavy or not repeatable) of a value's
    computation."""
    seen: set[int] = set()
    keys: set[str] = set()
    loaded: set[str] = set()
    heavy = False
    pending = [value]
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        op = recorder.ops[at]
        pending += op.args
        if op.name == "carried":
            keys.add(op.attr)
        elif op.name == "apply":
            # Once an outer iteration is cheap whatever it is.
            heavy |= ELEMENTWISE[op.attr].heavy and recorder.kind == "inner"
        elif op.name == "load":
            loaded.add(op.attr[0])
            heavy |= _indirect(op)
        elif op.name in ("scan", "part", "random_bits"):
            heavy = True
    return len(seen), frozenset(keys), loaded, heavy


def _indirect(op: Op) -> bool:
    return any(name.startswith("j") for name in op.attr[1].symbols())


def _without_dead_stores(kernel: Kernel, live: frozenset[str]) -> Kernel:
    """Drops stores that nobody reads and everything that only they needed; names the buffers only this kernel uses."""
    loaded = {op.attr[0] for s in kernel.stages for op in s.body.ops if op.name == "load"}
    needed: set[str] = set()
    stages: list[Stage] = []
    for stage in reversed(kernel.stages):
        body = _live_body(stage.body, live | loaded, needed)
        needed |= body.carries
        if body.ops:
            stages.append(Stage(stage.kind, body))
    result = replace(kernel, stages=tuple(reversed(stages)))
    still = {op.attr[0] for s in result.stages for op in s.body.ops if op.name == "load"}
    if still != loaded:
        return _without_dead_stores(result, live)
    return replace(result, local=frozenset(w for w in result.writes if w not in live))


def _live_body(body: Body, buffers: frozenset[str] | set[str], keys: set[str]) -> Body:
    keep: set[int] = set()
    for position in range(len(body.ops) - 1, -1, -1):
        op = body.ops[position]
        root = (op.name == "store" and op.attr[0] in buffers) or (op.name == "reduce" and op.attr[1] in keys)
        if root or position in keep:
            keep.add(position)
            keep.update(op.args)
    # An indirect index is used by name.
    names = {op.attr[0]: p for p, op in enumerate(body.ops) if op.name == "indirect"}
    if names:
        _keep_indirect(body, names, keep)
    if len(keep) == len(body.ops):
        return body
    order = sorted(keep)
    number = {old: new for new, old in enumerate(order)}
    return Body(tuple(body.ops[p]._replace(args=tuple(number[a] for a in body.ops[p].args)) for p in order))


def _keep_indirect(body: Body, names: Mapping[str, int], keep: set[int]) -> None:
    pending = sorted(keep, reverse=True)
    while pending:
        position = pending.pop()
        op = body.ops[position]
        exprs = [op.attr[1]] if op.name in ("load", "store") else [op.attr] if op.name == "index_expr" else []
        wanted = list(op.args) + [names[s] for e in exprs for s in e.symbols() if s in names]
        for other in wanted:
            if other not in keep:
                keep.add(other)
                pending.append(other)


# axes ---------------------------------------------------------------------------------------------------------
def _indices(kernel: Kernel) -> set[IntExpr]:
    found: set[IntExpr] = set()
    for stage in kernel.stages:
        for op in stage.body.ops:
            match op.name:
                case "load" | "store":
                    found.add(op.attr[1])
                case "index_expr":
                    found.add(op.attr)
                case "random_bits":
                    found.add(op.attr[0])
    return found


def merge_axes(kernel: Kernel) -> Kernel:
    """One axis for two that every index walks through as one; axes named i0, i1, ... in order."""
    axes = list(kernel.axes)
    indices = list(_indices(kernel))
    steps = {a.name: [coefficient_of(e, a.name) for e in indices] for a in axes}
    mapping: dict[Symbol, IntExpr] = {}
    if not any(s.body.scans for s in kernel.stages):
        position = 0
        while position < len(axes):
            slow = axes[position]
            fast = next(
                (f for f in axes if f is not slow and f.inner == slow.inner and _one_walk(steps, slow, f)), None
            )
            if fast is None:
                position += 1
                continue
            axes[axes.index(fast)] = replace(fast, size=slow.size * fast.size)
            axes.remove(slow)
            mapping[intern_symbol(slow.name)] = ZERO
            position = 0
    final = [replace(a, name=f"i{k}") for k, a in enumerate(axes)]
    for old, new in zip(axes, final, strict=True):
        if old.name != new.name:
            mapping[intern_symbol(old.name)] = new.var
    if not mapping:
        return kernel
    ranges = {a.name: a.size for a in final}
    stages = []
    for stage in kernel.stages:
        recorder = Recorder(ranges)
        stage.body.replay(recorder, mapping)
        stages.append(Stage(stage.kind, recorder.body()))
    return replace(kernel, axes=tuple(final), stages=tuple(stages))


def _one_walk(steps: Mapping[str, list[IntExpr | None]], slow: Axis, fast: Axis) -> bool:
    for a, b in zip(steps[slow.name], steps[fast.name], strict=True):
        if a is None or b is None or a != b * fast.size:
            return False
    return True
