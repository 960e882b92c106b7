"""Brings two kernels' iteration spaces together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr, Symbol, intern_symbol
from torchinductor.indexing import contiguous_strides, dot, matching_groups, product
from torchinductor.ir import Axis, Kernel, Recorder, Stage, StageKind

# Common axes, the first kernel's stages, the second one's.
Joined: TypeAlias = tuple[tuple[Axis, ...], tuple[Stage, ...], tuple[Stage, ...]]


@record
class Unified:
    """Common axes, and each side's old variables in terms of them."""

    axes: tuple[Axis, ...]
    left: Mapping[Symbol, IntExpr]
    right: Mapping[Symbol, IntExpr]


def unify(left: Sequence[Axis], right: Sequence[Axis], prefix: str = "i") -> Unified | None:
    """The finer of two spaces of equal numel in row-major order, None where neither refines the other.

    The flags (`inner`) of the left side's axes count; a group of right axes that would need both kinds is refused.
    """
    if [a.size for a in left] == [a.size for a in right]:
        fresh = tuple(replace(a, name=f"{prefix}{k}") for k, a in enumerate(left))
        return Unified(fresh, _onto(left, fresh), _onto(right, fresh))
    if product(a.size for a in left) != product(a.size for a in right):
        return None
    if any(a.size.as_int() == 0 for a in left):  # no points: the product says nothing of the other sizes
        return None
    axes: list[Axis] = []
    maps: tuple[dict[Symbol, IntExpr], dict[Symbol, IntExpr]] = ({}, {})
    for lefts, rights in matching_groups([a.size for a in left], [a.size for a in right]):
        if len(lefts) != 1 and len(rights) != 1:
            return None
        fine, coarse = [left[d] for d in lefts], [right[d] for d in rights]
        fine_map, coarse_map = maps
        if len(rights) != 1:
            fine, coarse, fine_map, coarse_map = coarse, fine, coarse_map, fine_map
        flags = {left[d].inner for d in lefts}
        if len(rights) == 1 and len(lefts) > 1:
            made = [Axis(f"{prefix}{len(axes) + k}", a.size, a.inner) for k, a in enumerate(fine)]
        else:
            made = [Axis(f"{prefix}{len(axes) + k}", a.size, flags == {True}) for k, a in enumerate(fine)]
        for old, new in zip(fine, made, strict=True):
            fine_map[intern_symbol(old.name)] = new.var
        linear = dot([a.var for a in made], contiguous_strides([a.size for a in made]))
        coarse_map[intern_symbol(coarse[0].name)] = linear
        axes += made
    return Unified(tuple(axes), maps[0], maps[1])


def _onto(old: Sequence[Axis], new: Sequence[Axis]) -> dict[Symbol, IntExpr]:
    return {intern_symbol(a.name): b.var for a, b in zip(old, new, strict=True)}


def reindexed(
    stages: Sequence[Stage], mapping: Mapping[Symbol, IntExpr], axes: Sequence[Axis], kind: StageKind | None = None
) -> tuple[Stage, ...]:
    """The stages with other variables; `kind` replaces their kind."""
    ranges = {a.name: a.size for a in axes}
    identity = all(expr.terms == {(symbol,): 1} for symbol, expr in mapping.items())
    result = []
    for stage in stages:
        body = stage.body
        if not identity:
            recorder = Recorder(ranges)
            body.replay(recorder, mapping)
            body = recorder.body()
        result.append(Stage(kind or stage.kind, body))
    return tuple(result)


def join(first: Kernel, second: Kernel) -> Joined | None:
    """(axes, first's stages, second's stages) over one space, None where the spaces do not fit."""
    if first.inner and second.inner:
        return _join_reductions(first, second)
    if first.inner:
        return _join_pointwise(first, second)
    if second.inner:
        swapped = _join_pointwise(second, first)
        return None if swapped is None else (swapped[0], swapped[2], swapped[1])
    both = unify(first.axes, second.axes)
    if both is None:
        return None
    return both.axes, reindexed(first.stages, both.left, both.axes), reindexed(second.stages, both.right, both.axes)


def _join_pointwise(reduction: Kernel, pointwise: Kernel) -> Joined | None:
    """A pointwise kernel over the whole space of a reduction, or over its outer axes."""
    both = unify(reduction.axes, pointwise.axes)
    if both is not None:
        return (
            both.axes,
            reindexed(reduction.stages, both.left, both.axes),
            reindexed(pointwise.stages, both.right, both.axes, "inner"),
        )
    outer = unify(reduction.outer, pointwise.axes, "o")
    if outer is None:
        return None
    axes = _replace_outer(reduction, outer)
    mapping = {**outer.left, **{intern_symbol(a.name): a.var for a in reduction.inner}}
    return axes, reindexed(reduction.stages, mapping, axes), reindexed(pointwise.stages, outer.right, axes, "outer")


def _replace_outer(reduction: Kernel, outer: Unified) -> tuple[Axis, ...]:
    """The reduction's axes with new outer ones, in an order that is still that of its memory where it can be."""
    result: list[Axis] = []
    rest = list(outer.axes)
    for axis in reduction.axes:
        if axis.inner:
            result.append(axis)
            continue
        used = outer.left[intern_symbol(axis.name)].symbols()
        result += [a for a in rest if a.name in used]
        rest = [a for a in rest if a.name not in used]
    return (*rest, *result)


def _join_reductions(first: Kernel, second: Kernel) -> Joined | None:
    """Two reductions over the same outer and the same inner axes."""
    both = unify(first.axes, second.axes)
    if both is not None:
        flags = {n: a.inner for a in both.axes for n in (a.name,)}
        fits = all(
            flags[n] == axis.inner
            for axis in second.axes
            for n in both.right[intern_symbol(axis.name)].symbols()
            if n in flags
        )
        if fits:
            return (
                both.axes,
                reindexed(first.stages, both.left, both.axes),
                reindexed(second.stages, both.right, both.axes),
            )
    outer, inner = unify(first.outer, second.outer, "o"), unify(first.inner, second.inner, "r")
    if outer is None or inner is None:
        return None
    axes = (*outer.axes, *(replace(a, inner=True) for a in inner.axes))
    return (
        axes,
        reindexed(first.stages, {**outer.left, **inner.left}, axes),
        reindexed(second.stages, {**outer.right, **inner.right}, axes),
    )
