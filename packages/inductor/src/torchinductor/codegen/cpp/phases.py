"""Loops over every k-th element, of which an iteration does k: the phases of an axis that indices divide.

A shuffle of channels, an enlarged image, the gradient of a slice by steps: along their innermost axis places are
quotients and remainders by small numbers. No vector loads by such indices. Of elements that are k apart each phase is a
loop whose places go by steps, and whose conditions are known; the k stores of an iteration lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from primtorch.symbolic.expr import Call, IntExpr, constant, intern_symbol
from torchinductor.indexing import number, simplify
from torchinductor.ir import Axis, Kernel, RandomBits, Recorder, Stage

_PHASES = (2, 3, 4, 5, 6, 7, 8)
_LEAST = 8  # iterations that are left
_MOST_OPS = 400  # of all phases


def in_phases(kernel: Kernel, axis: Axis) -> Kernel | None:
    """A pointwise kernel with the phases of an axis in one iteration; None where indices do not divide it, or each
    phase would still."""
    size = axis.size.as_int()
    if size is None or kernel.inner or kernel.scatters or kernel.part is not None or not _plain(kernel):
        return None
    indices = {index for stage in kernel.stages for index in stage.body.indices if _divided(index, axis)}
    if not indices:
        return None
    ops = sum(len(stage.body.ops) for stage in kernel.stages)
    for count in (n for n in _PHASES if not size % n and size // n >= _LEAST and ops * n <= _MOST_OPS):
        short = replace(axis, size=constant(size // count))
        ranges = {**kernel.ranges, axis.name: short.size}
        phases = [short.var * number(count) + number(phase) for phase in range(count)]
        if all(_linear(index, axis, phase, ranges) for index in indices for phase in phases):
            axes = tuple(short if one is axis else one for one in kernel.axes)
            stages = tuple(_repeated(stage, axis, phases, axes) for stage in kernel.stages)
            return replace(kernel, axes=axes, stages=stages)
    return None


def _plain(kernel: Kernel) -> bool:
    """Whether what is done for an element is done in any order, and by vectors."""
    bodies = [stage.body for stage in kernel.stages]
    return not any(body.scans or body.faults or any(True for _ in body.of(RandomBits)) for body in bodies)


def _divisions(expr: IntExpr) -> Iterable[Call]:
    for atom in expr.atoms():
        if isinstance(atom, Call):
            if atom.op in ("floordiv", "mod"):
                yield atom
            yield from _divisions(atom.left)
            yield from _divisions(atom.right)


def _divided(expr: IntExpr, axis: Axis) -> bool:
    return any(axis.name in call.left.symbols() | call.right.symbols() for call in _divisions(expr))


def _linear(expr: IntExpr, axis: Axis, phase: IntExpr, ranges: dict[str, IntExpr]) -> bool:
    return not _divided(simplify(expr.substitute({intern_symbol(axis.name): phase}), ranges), axis)


def _repeated(stage: Stage, axis: Axis, phases: list[IntExpr], axes: tuple[Axis, ...]) -> Stage:
    recorder = Recorder({one.name: one.size for one in axes})
    for phase in phases:
        stage.body.replay(recorder, {intern_symbol(axis.name): phase})
    return Stage(stage.kind, recorder.body())
