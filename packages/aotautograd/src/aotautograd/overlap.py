"""Programs that write to an input whose memory another input shares.

A functional graph takes every input for memory of its own. Where that does not hold, the inputs that share memory
become views of one base, which is the graph's input in their place; functionalization then sees every write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import fx

from aotautograd.errors import UnsupportedAlias, UnsupportedMutation
from aotautograd.history import has_history
from aotautograd.schemas import Values
from aotautograd.versions import restride
from primtorch.frozen import record

_address = torch.Tensor.data_ptr


@record
class ViewOfBase:
    """Input `place` of the program is this view of base number `base`."""

    place: int
    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    detached: bool  # autograd takes it for another tensor than the base
    leaf: bool  # and needs a gradient: eager changes its sizes and strides under no_grad alone


@record
class Rebased:
    """A program whose flat inputs are bases, then the inputs of `program` that share no memory.

    `given_history` has the inputs that need no gradient before the program and need one after it. Two are filled while
    the program runs: `returned`, place among its outputs to place among its inputs of each output that is an input
    which became a view, and `restrided`, the inputs which became views and are given other sizes or strides in place.
    What those have then follows behind the outputs, as views of the bases.
    """

    program: fx.GraphModule | Callable[..., object]
    num_inputs: int
    num_bases: int
    views: tuple[ViewOfBase, ...]
    others: tuple[int, ...]
    given_history: frozenset[int]
    returned: dict[int, int]
    restrided: list[int]

    def inputs_of(self, flat: Values) -> Values:
        """The inputs of `program`, from those of this one."""
        inputs: list[object] = [None] * self.num_inputs
        for view in self.views:
            base = flat[view.base]
            # as_strided first: functionalization has no writes through a view of a view that is as_strided.
            value = base.as_strided(view.shape, view.stride, view.offset)
            inputs[view.place] = value.detach() if view.detached else value
        for place, value in zip(self.others, flat[self.num_bases :], strict=True):
            inputs[place] = value
        return inputs

    def outputs_of(self, given: Values, inputs: Values, outputs: Values) -> Values:
        """Replaces outputs that are rebased inputs themselves by None, and notes them. `given` is what `inputs_of`
        gave, `inputs` what stands for these behind the program."""
        self.restrided.clear()
        for view in self.views:
            now = inputs[view.place]
            if view.detached and now.requires_grad:
                raise HistoryOfAlias(view.place)
            if torch._functionalize_has_metadata_mutation(now):  # type: ignore[attr-defined]
                raise UnsupportedMutation(
                    f"input {view.place} shares memory with another input, the program writes to that memory, and gives"
                    " the input another shape in place under no_grad, where it needs a gradient; pass a copy of it"
                )
            if now is not given[view.place]:
                self.restrided.append(view.place)
        places = {id(inputs[v.place]): v.place for v in self.views}
        self.returned.clear()
        self.returned.update({i: places[id(o)] for i, o in enumerate(outputs) if id(o) in places})
        kept = [None if i in self.returned else o for i, o in enumerate(outputs)]
        return [*kept, *(inputs[place] for place in self.restrided)]

    def finish(self, flat: Values, outputs: Values) -> Values:
        """The program's outputs, of those of this one for the inputs `flat`, which get their sizes and strides."""
        count = len(outputs) - len(self.restrided)
        leaves = {view.place for view in self.views if view.leaf}
        for place, now in zip(self.restrided, outputs[count:], strict=True):
            restride(flat[place], now, seen=torch.is_grad_enabled() and place not in leaves)
        return [flat[self.returned[i]] if i in self.returned else output for i, output in enumerate(outputs[:count])]


Program: TypeAlias = fx.GraphModule | Callable[..., object] | Rebased
"""What is traced."""


class HistoryOfAlias(UnsupportedAlias):
    """A program gives a history to an input that is, for autograd, another tensor than the base."""

    def __init__(self, place: int) -> None:
        super().__init__(
            f"input {place} shares memory with another input but not its history, and the program writes to it a value "
            "that needs a gradient; pass a copy of it"
        )
        self.place = place


class OverlapCheck:
    """Finds, at each call, whether a written input shares memory with another input.

    Compares ranges of addresses, and only of inputs that have moved since the last call.
    """

    def __init__(self, tensors: Sequence[int], written: Sequence[int]) -> None:
        self.places = tuple(tensors)
        written_inputs = set(written)
        self.is_written = [p in written_inputs for p in self.places]
        self.written = [i for i, w in enumerate(self.is_written) if w]
        self.known: list[int] = [-1] * len(self.places)  # addresses at the last call that found no overlap

    def __call__(self, flat: Values) -> bool:
        """Whether any does."""
        places = self.places
        addresses = [_address(flat[p]) for p in places]
        if addresses == self.known:
            return False
        ends = [a + _extent(flat[p]) for a, p in zip(addresses, places, strict=True)]
        everything = range(len(places))
        for i, (now, before) in enumerate(zip(addresses, self.known, strict=True)):
            if now == before:
                continue
            for j in everything if self.is_written[i] else self.written:
                if i != j and now < ends[j] and addresses[j] < ends[i]:
                    return True
        self.known = addresses
        return False


def _extent(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    return _reach(t) * t.element_size()


def _reach(t: torch.Tensor) -> int:
    """Elements from a tensor's first to behind its last, gaps included."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def shares_memory(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Groups of (place, tensor) of the storages in which ranges meet.

    A whole storage is one group: the write-back of its base would undo what is written through another input.
    """
    ranges = sorted(((t.data_ptr(), t.data_ptr() + _extent(t), i, t) for i, t in tensors), key=lambda r: r[:3])
    members: dict[int, list[tuple[int, torch.Tensor]]] = {}
    meeting: set[int] = set()
    reach, holder = -1, -1
    for start, end, place, tensor in ranges:
        if end == start:
            continue
        storage = tensor.untyped_storage().data_ptr()
        members.setdefault(storage, []).append((place, tensor))
        if start < reach:
            if storage != holder:
                raise UnsupportedAlias(f"input {place} and another are different storages over the same memory")
            meeting.add(storage)
        if end > reach:
            reach, holder = end, storage
    return [members[s] for s in sorted(meeting)]


def rebase(
    program: fx.GraphModule | Callable[..., object],
    flat: Values,
    tensors: Sequence[int],
    given_history: frozenset[int] = frozenset(),
) -> tuple[Rebased, Values]:
    """The program on bases in place of the inputs that share memory, and its inputs made of `flat`.

    Raises UnsupportedAlias where no base can stand for a group: other dtypes, or gradients without a common base.
    """
    bases: list[torch.Tensor] = []
    views: list[ViewOfBase] = []
    for group in shares_memory([(p, flat[p]) for p in tensors]):
        number = len(bases)
        base = _base_of(group, given_history)
        bases.append(base)
        for place, t in group:
            if t.dtype != base.dtype or t.is_conj() != base.is_conj() or t.is_neg() != base.is_neg():
                raise UnsupportedAlias(
                    f"inputs {[p for p, _ in group]} share memory, the program writes to an input that shares memory, "
                    f"and they read it as different types ({t.dtype} and {base.dtype}); pass a copy of one of them"
                )
            detached = _root(t) is not base
            leaf = t.requires_grad and not has_history(t)
            views.append(ViewOfBase(place, number, tuple(t.shape), t.stride(), t.storage_offset(), detached, leaf))
    rebased = {v.place for v in views}
    others = tuple(i for i in range(len(flat)) if i not in rebased)
    result = Rebased(program, len(flat), len(bases), tuple(views), others, given_history, {}, [])
    return result, [*bases, *(flat[i] for i in others)]


def bases_of(rebased: Rebased, flat: Values) -> Values:
    """The inputs of a rebased program for another call with the same pattern."""
    groups: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(rebased.num_bases)]
    for view in rebased.views:
        groups[view.base].append((view.place, flat[view.place]))
    return [*(_base_of(group, rebased.given_history) for group in groups), *(flat[i] for i in rebased.others)]


def _root(t: torch.Tensor) -> torch.Tensor:
    """What a write to `t` gives a history. A view that was taken under no_grad is a leaf of its own."""
    return t if t._base is None or (t.requires_grad and not has_history(t)) else t._base


def _base_of(group: Sequence[tuple[int, torch.Tensor]], given_history: frozenset[int]) -> torch.Tensor:
    """A tensor that holds all of the group's memory: the root of one of its inputs where there is such a one, that of
    those with gradients if there are any. Else it is made here, and autograd takes no input for a view of it."""
    needing = [t for p, t in group if t.requires_grad or p in given_history]
    roots = [_root(t) for t in needing or [t for _, t in group]]
    for root in roots if not needing or all(r is roots[0] for r in roots) else ():
        start, size = root.storage_offset(), root.numel()
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(root)
        if dense and all(
            start <= t.storage_offset() and t.storage_offset() + _reach(t) <= start + size for _, t in group
        ):
            return root
    if needing:
        raise UnsupportedAlias(
            f"inputs {[p for p, _ in group]} share memory and need gradients, the program writes to an input that "
            "shares memory, and they are not views of one dense tensor; pass copies of them"
        )
    first = min((t for _, t in group), key=lambda t: t.storage_offset())
    start = first.storage_offset()
    end = max(t.storage_offset() + _reach(t) for _, t in group)
    return first.detach().as_strided((end - start,), (1,), start)


def pattern(flat: Values, tensors: Sequence[int]) -> object:
    """What a rebased program is compiled for: every input's metadata, with its place in its storage, and constants."""
    found = set(tensors)
    storages: dict[int, int] = {}
    key: list[object] = []
    for i, value in enumerate(flat):
        if i not in found:
            key.append((type(value), value))
            continue
        storage = storages.setdefault(value.untyped_storage().data_ptr(), len(storages))
        base = _root(value)
        facts = (value.shape, value.stride(), value.storage_offset(), value.dtype)
        histories = (value.requires_grad, has_history(value), base.requires_grad, has_history(base))
        key.append((storage, *facts, base.shape, base is value, *histories))
    return tuple(key)
