"""Axes: those that every index walks through as one become one, and loops run as memory lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from primtorch.symbolic.expr import Call, IntExpr, Symbol, atom_expr, constant, intern_symbol
from torchinductor.indexing import ZERO, coefficient_of, variable
from torchinductor.ir import Axis, Kernel, Recorder, Stage, Store
from torchinductor.scheduling.unify import reindexed


def merge_axes(kernel: Kernel) -> Kernel:
    """One axis for two that every index walks through as one; axes named i0, i1, ... in order."""
    axes = list(kernel.axes)
    indices = list(dict.fromkeys(expr for stage in kernel.stages for expr in stage.body.indices))
    steps = {a.name: [coefficient_of(e, a.name) for e in indices] for a in axes}
    mapping: dict[Symbol, IntExpr] = {}
    if not any(s.body.scans for s in kernel.stages):
        position = 0
        while position < len(axes):
            slow = axes[position]
            fast = next((f for f in axes if f is not slow and _alike(f, slow) and _one_walk(steps, slow, f)), None)
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


def split_axes(kernel: Kernel, least: int) -> Kernel:
    """Two axes for one that indices take apart by one number, as channels by their groups: `i//8` and `i%8`. What
    belongs to a group is then read once for all of it. Groups smaller than `least` stay in one axis. So it is where a
    symbol takes them apart, by which each iteration would divide otherwise."""
    if any(stage.body.scans for stage in kernel.stages):
        return kernel
    parts = _parts(kernel)
    axes: list[Axis] = []
    mapping: dict[Symbol, IntExpr] = {}
    for axis in kernel.axes:
        (part,) = sizes if len(sizes := parts.get(axis.name, ())) == 1 else (None,)
        count = None if part is None else _count(axis.size, part, least)
        if part is None or count is None or (kernel.scatters and count.as_int() is not None):
            axes.append(axis)
            continue
        slow = replace(axis, name=f"{axis.name}_s", size=count)
        fast = replace(axis, name=f"{axis.name}_f", size=part)
        axes += (slow, fast)
        mapping[intern_symbol(axis.name)] = slow.var * fast.size + fast.var
    return replace(kernel, axes=tuple(axes), stages=reindexed(kernel.stages, mapping, axes)) if mapping else kernel


def sizes_by_parts(kernel: Kernel, multiples: frozenset[tuple[IntExpr, IntExpr]]) -> Kernel:
    """A kernel whose axes have their sizes as so many times the part by which indices take them apart, where that fills
    them: channels `c`, known to be eight times a number, and groups of `c//8` of them. `split_axes` sees it then."""
    if not multiples:
        return kernel
    axes = []
    for axis, sizes in ((axis, _parts(kernel).get(axis.name, set())) for axis in kernel.axes):
        (part,) = sizes if len(sizes) == 1 else (None,)
        atoms = list(part.atoms()) if part is not None else []
        quotient = atoms[0] if len(atoms) == 1 and isinstance(atoms[0], Call) and part == atom_expr(atoms[0]) else None
        if quotient is not None and quotient.op == "floordiv" and quotient.left == axis.size:
            times = quotient.right if (quotient.left, quotient.right) in multiples else None
            axis = axis if part is None or times is None else replace(axis, size=part * times)
        axes.append(axis)
    return replace(kernel, axes=tuple(axes)) if tuple(axes) != kernel.axes else kernel


def _count(size: IntExpr, part: IntExpr, least: int) -> IntExpr | None:
    """How many groups of a size an axis has, if it is to be taken apart: they fill it."""
    length, width = size.as_int(), part.as_int()
    if length is not None and width is not None:
        return constant(length // width) if least <= width < length and not length % width else None
    if (size % part).terms or (width is not None and width < least):
        return None
    return size // part


def _parts(kernel: Kernel) -> dict[str, set[IntExpr | None]]:
    """By what each axis is divided; None where that is no size, or what is divided is more than the axis."""
    found: dict[str, set[IntExpr | None]] = {}
    for atom in (atom for stage in kernel.stages for index in stage.body.indices for atom in index.atoms()):
        if isinstance(atom, Call):
            for name in {*atom.left.symbols(), *atom.right.symbols()}:
                alone = atom.op in ("floordiv", "mod") and atom.left == variable(name)
                fixed = alone and not atom.right.symbols() & kernel.ranges.keys()
                found.setdefault(name, set()).add(atom.right if fixed else None)
    return found


def _alike(one: Axis, other: Axis) -> bool:
    return (one.inner, one.part) == (other.inner, other.part)


def by_rows(kernel: Kernel) -> Kernel | None:
    """A pointwise kernel with its loops in the order of its first store's steps, None where that is theirs or they are
    in no order."""
    store = next((op for stage in kernel.stages for op in stage.body.of(Store)), None)
    if kernel.inner or store is None:
        return None
    steps = [coefficient_of(store.index, axis.name) for axis in kernel.axes]
    known = [step.as_int() for step in steps if step is not None]
    if len(known) < len(kernel.axes) or None in known:
        return None
    order = sorted(range(len(known)), key=lambda d: -(known[d] or 0))
    return None if order == list(range(len(known))) else replace(kernel, axes=tuple(kernel.axes[d] for d in order))


def _one_walk(steps: Mapping[str, list[IntExpr | None]], slow: Axis, fast: Axis) -> bool:
    for a, b in zip(steps[slow.name], steps[fast.name], strict=True):
        if a is None or b is None or a != b * fast.size:
            return False
    return True


def lies_inward(kernel: Kernel) -> bool | None:
    """Whether neighbours in memory are neighbours along a reduction's inner axes, or along its outer ones; None where
    there is no telling."""
    inner = {axis.name for axis in kernel.inner}
    found: set[bool] = set()
    for op in (op for stage in kernel.stages for op in stage.body.accesses):
        names = op.index.symbols()
        if names & inner and any(axis.name in names for axis in kernel.outer):
            steps = {axis: coefficient_of(op.index, axis.name) for axis in kernel.axes if axis.name in names}
            found |= {axis.inner for axis, step in steps.items() if step is not None and step.as_int() == 1}
    return found.pop() if len(found) == 1 else None


def aligned_along(kernel: Kernel, axis: Axis, nbytes: int, stores: bool = False) -> bool:
    """Whether what is walked through along an axis begins at multiples of so many bytes, wherever the other axes
    stand; of what is stored alone, or of everything."""
    for stage in kernel.stages:
        for op in stage.body.of(Store) if stores else stage.body.accesses:
            step = coefficient_of(op.index, axis.name)
            if step is None or step.as_int() != 1:
                continue
            size = kernel.buffers[op.buffer].dtype.itemsize
            if any(c * size % nbytes for factors, c in (op.index - step * axis.var).ordered_terms() if factors):
                return False
    return True
