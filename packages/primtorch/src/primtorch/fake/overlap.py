"""Writes that eager refuses because of shared memory: to a tensor that overlaps itself, or one that is read too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.arguments import TensorLike
from primtorch.effects import said_writes
from primtorch.families import Trait, elementwise_packets, has_trait
from primtorch.layout import is_dense

OverlapCheck: TypeAlias = Callable[[Sequence[object], Mapping[str, object]], None]


def overlap_check(op: OpOverload, restrides: bool) -> OverlapCheck | None:
    """What eager asks of the memory of an overload's arguments; None where it asks nothing.

    The check raises RuntimeError. It decides nothing about symbolic sizes that would need a guard.
    """
    schema = op._schema
    written = said_writes(op)
    name = schema.name.removeprefix("aten::")
    if not written or restrides or not schema.name.startswith("aten::"):
        return None
    if name.startswith("_") and not name.startswith(("_fft", "_linalg", "_chunk_cat")):
        return None
    itself = not has_trait(Trait.OVERLAPS, name, name.removesuffix("_"))
    name = name.removesuffix("_")
    place = has_trait(Trait.SHARES_NOTHING, name)
    part = place or name == "copy" or name in elementwise_packets()
    if not (itself or part):
        return None
    keys = [name if schema.arguments[place].kwarg_only else place for place, name in written]

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for key in keys:
            target = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            if target is None or isinstance(target, list | tuple):
                continue
            if itself and overlaps_itself(target):
                raise RuntimeError(_MESSAGE.format("more than one element of the written-to tensor refers"))
            if part and any(_shares(target, operand, place) for operand in _read(args, kwargs, keys)):
                raise RuntimeError(_MESSAGE.format("some elements of the input tensor and the written-to tensor refer"))

    return check


_MESSAGE = (
    "unsupported operation: {} to a single memory location. Please clone() the tensor before performing the operation."
)


def overlaps_itself(t: TensorLike) -> bool:
    """Whether a dim of stride 0 has more than one element, as far as is known without a guard."""
    found = False
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if type(size) is int:
            if size == 0:
                return False
            found = found or (size > 1 and type(stride) is int and stride == 0)
    return found


def _read(
    args: Sequence[object], kwargs: Mapping[str, object], written: Collection[int | str]
) -> Iterator[torch.Tensor]:
    for key, argument in (*enumerate(args), *kwargs.items()):
        if key in written:
            continue
        for one in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(one, torch.Tensor):
                yield one


def _shares(target: torch.Tensor, operand: torch.Tensor, place: bool) -> bool:
    """Whether two dense tensors meet in memory: with `place` also where they are the same part of it."""
    memory = getattr(target, "memory", None)
    if memory is None or memory is not getattr(operand, "memory", None):
        return False
    sizes = (*target.shape, *target.stride(), *operand.shape, *operand.stride())
    starts = (target.storage_offset(), operand.storage_offset())
    if any(type(n) is not int for n in (*sizes, *starts)) or not (target.numel() and operand.numel()):
        return False
    layouts = [(tuple(t.shape), t.stride()) for t in (target, operand)]
    if not all(is_dense(*layout) for layout in layouts):
        return False
    if starts[0] == starts[1] and target.numel() == operand.numel() and layouts[0][1] == layouts[1][1]:
        return place
    return bool(starts[0] < starts[1] + operand.numel() and starts[1] < starts[0] + target.numel())


def may_meet(a: Any, b: Any) -> bool:
    """Whether two tensors over one memory may have a place in common; False where it is known that they have none."""
    if a.dtype != b.dtype:
        return True  # their places have different sizes
    if _lies_before(a, b) or _lies_before(b, a):
        return False
    sizes = (*a.shape, *a.stride(), *b.shape, *b.stride(), a.storage_offset(), b.storage_offset())
    if any(type(n) is not int for n in sizes):
        return True
    if not (a.numel() and b.numel()):
        return False
    # a's place minus b's is the distance of their beginnings plus a sum of k * stride, where -reach <= k <= reach'.
    steps = [(stride, 0, size - 1) for size, stride in zip(a.shape, a.stride(), strict=True)]
    steps += [(stride, 1 - size, 0) for size, stride in zip(b.shape, b.stride(), strict=True)]
    merged: dict[int, tuple[int, int]] = {}
    for stride, low, high in steps:
        before = merged.get(stride, (0, 0))
        merged[stride] = before[0] + low, before[1] + high
    ordered = sorted(((s, *r) for s, r in merged.items() if s and r != (0, 0)), reverse=True)
    return _reaches(b.storage_offset() - a.storage_offset(), ordered, [_MOST_TRIALS])


def _lies_before(a: Any, b: Any) -> bool:
    """Whether it is known, without a guard, that the last place of one tensor is in front of another's first."""
    last = a.storage_offset()
    for size, stride in zip(a.shape, a.stride(), strict=True):
        last = last + (size - 1) * stride
    before = last < b.storage_offset()
    return before.node.statically_known_true("", 0) if isinstance(before, torch.SymBool) else bool(before)


_MOST_TRIALS = 10_000


def _reaches(distance: int, steps: Sequence[tuple[int, int, int]], trials: list[int]) -> bool:
    """Whether a sum of k * stride with low <= k <= high gives `distance`; True when it takes too long to tell."""
    if not steps:
        return distance == 0
    (stride, low, high), rest = steps[0], steps[1:]
    below = sum(s * lo for s, lo, _ in rest)
    above = sum(s * hi for s, _, hi in rest)
    first = max(low, -((above - distance) // stride))
    last = min(high, (distance - below) // stride)
    for k in range(first, last + 1):
        trials[0] -= 1
        if trials[0] < 0 or _reaches(distance - k * stride, rest, trials):
            return True
    return False
