"""Tensors that are written part by part along a dim, as borders are that a program copies from the other side.

A chain of `slice_scatter`s chooses at each element between all that was written, and what is copied within a tensor is
computed by the chain again. So a slice is taken of what was written there, and a tensor whose parts are known is their
concatenation. Comparisons of sizes are decided by what is known of them, without a guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from primtorch import prims
from primtorch.builder import Builder, Value
from primtorch.spec import Size
from primtorch.symbolic import expr_of, relate, shape_env_of

_MOST = 8  # parts
_DEEPEST = 4  # nodes that are looked through, one behind the other: programs write a thousand rows in a loop


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) along a dim, which are those of `value` from `offset` on."""

    start: Size
    stop: Size
    value: Value
    offset: Size

    def cut(self, start: Size, stop: Size) -> Part:
        """The elements from `start` to `stop` of it."""
        return replace(self, start=start, stop=stop, offset=self.offset + (start - self.start))


def part_of(b: Builder, x: Value, dim: int, start: Size, stop: Size, left: int = _DEEPEST) -> Value:
    """A slice of what was written there, if that is one thing; `left`: how many nodes may be looked through."""
    found = _found(b, x, dim, start, stop, left)
    return x.slice(dim, start, stop) if found is None else found


def _found(b: Builder, x: Value, dim: int, start: Size, stop: Size, left: int) -> Value | None:
    """What was written there, None where nothing was; also through what was sliced and joined along another dim."""
    if not left:
        return None
    parts, node = _parts(b, x, dim, left) or (), x.node
    args: Any = node.args
    if len(parts) > 1:
        one = next((p for p in parts if _at_most(p.start, start) and _at_most(stop, p.stop)), None)
        if one is None:
            return None
        first = one.offset + (start - one.start)
        return part_of(b, one.value, dim, first, first + (stop - start), left - 1)
    if node.target is prims.slice and args[1] != dim and args[4] == 1:
        inner = _found(b, _value(b, args[0]), dim, start, stop, left - 1)
        return None if inner is None else inner.slice(args[1], _size(args[2]), _size(args[3]))
    if node.target is prims.cat and args[1] != dim and len(args[0]) <= _MOST:
        sliced = (_found(b, _value(b, value), dim, start, stop, left - 1) for value in args[0])
        joined = [value for value in sliced if value is not None]
        return b.cat(joined, args[1]) if len(joined) == len(args[0]) else None
    return None


def with_part(b: Builder, x: Value, src: Value, dim: int, start: Size, stop: Size) -> Value:
    """x with the elements [start, stop) along a dim from `src`."""
    parts = _parts(b, x, dim, _DEEPEST)
    written = _overlaid(parts, Part(start, stop, src, 0)) if parts and len(parts) > 1 else None
    if written is None or any(p.value.node.op == "placeholder" and p.value.shape == x.shape for p in written):
        return b.emit(prims.slice_scatter, x, src, dim, start, stop, 1)  # an input may be written where it lies
    return b.cat([part_of(b, p.value, dim, p.offset, p.offset + (p.stop - p.start)) for p in written], dim)


def _parts(b: Builder, x: Value, dim: int, left: int) -> Sequence[Part] | None:
    """What a tensor was written of along a dim, in order; None where there is no telling, or of too many."""
    node = x.node
    if node.target is prims.slice_scatter and node.args[2] == dim and node.args[5] == 1:
        base, src = (_value(b, arg) for arg in node.args[:2])
        before = _parts(b, base, dim, left - 1) if left else None
        return None if before is None else _overlaid(before, Part(_size(node.args[3]), _size(node.args[4]), src, 0))
    if node.target is prims.cat and node.args[1] == dim:
        parts: list[Part] = []
        start: Size = 0
        for value in (_value(b, arg) for arg in node.args[0]):  # type: ignore[union-attr]
            parts.append(Part(start, start + value.shape[dim], value, 0))
            start = parts[-1].stop
        return parts if len(parts) <= _MOST else None
    return [Part(0, x.shape[dim], x, 0)]


def _overlaid(parts: Sequence[Part], new: Part) -> Sequence[Part] | None:
    """Parts with another one over them; None where it is not known what that covers. That one size is not known to be
    at most another says nothing: each step stands on what is known."""
    made: list[Part] = []
    placed = False
    for part in parts:
        if _at_most(part.stop, new.start):
            made.append(part)
            continue
        if not placed:
            if not (_at_most(part.start, new.start) and _at_most(new.start, part.stop)):
                return None
            if not _at_most(new.start, part.start):
                made.append(part.cut(part.start, new.start))
            made.append(new)
            placed = True
        if _at_most(new.stop, part.start):
            made.append(part)
        elif not _at_most(part.stop, new.stop):
            if not (_at_most(part.start, new.stop) and _at_most(new.stop, part.stop)):
                return None
            made.append(part.cut(new.stop, part.stop))
    return made if placed and len(made) <= _MOST else None


def _value(b: Builder, node: object) -> Value:
    assert isinstance(node, fx.Node)
    return Value(b, node, node.meta["val"])


def _size(argument: object) -> Size:
    found = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    assert isinstance(found, (int, torch.SymInt))
    return found


def _at_most(left: Size, right: Size) -> bool:
    """Whether it is known that one size is not more than the other."""
    if isinstance(left, int) and isinstance(right, int):
        return left <= right
    env = shape_env_of(left) or shape_env_of(right)
    assert env is not None
    return env.decide(relate("le", expr_of(left), expr_of(right))) is True
