"""`min`, `max` and `sorted` by tensors of one number, which Python compares one by one: the graph chooses by
`torch.where`, and puts in order by a stable sort.

A result is one of the operands to Python, and memory of its own in the graph. So where the program writes to any of
them, or hands the result out beside an operand (or an operand was handed in), capture begins anew, and the graph ends
before the choice. The same goes for what a function keeps between calls, and the graph computes at each.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from torchdynamo.graph.taken_numbers import NumberAsked
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.graph.view_writes import memory_of

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder

# Functions with a cache, of which some program has written to what they keep, or has handed it out.
KEPT: weakref.WeakSet[Any] = weakref.WeakSet()

Place = tuple[UserFrame, ...]
Pair = tuple[Any, Any]


class Choices:
    """Those of one capture, by the memory that their results and operands lie in."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._results: dict[int, Place] = {}
        self._operands: dict[int, Place] = {}
        self._stands_for: dict[int, frozenset[int]] = {}  # results that may leave, where none of these does
        self._left: set[int] = set()
        self._caches: dict[int, object] = {}  # whose results they are

    def choose(self, op: str, values: Pair, keys: Pair) -> Pair | None:
        """The value, and its key, whose key comes first by `op`; None where the graph cannot tell."""
        place, recorder = self.recorder.user_frames(), self.recorder
        if place in recorder.taken.refused or recorder.regions.open or recorder.modes:
            return None
        if not _alike(keys) or not _alike(values) or not all(map(_is_number, keys)) or keys[0].is_complex():
            return None
        met = (keys[0] > keys[1] if op == ">" else keys[0] < keys[1]).reshape(())
        key = torch.where(met, *keys)
        value = key if all(map(operator.is_, values, keys)) else torch.where(met, *values)
        self._note([value], values, place)
        self._note([key], keys, place)
        return value, key

    def order(self, values: list[object], keys: list[object], reverse: bool) -> list[Any] | None:
        """The values as `sorted` has them by these keys; None where the graph cannot tell. Python orders keys that are
        no number by how it happens to compare them: that there are none is taken for granted."""
        place, recorder = self.recorder.user_frames(), self.recorder
        if len(values) < 2 or place in recorder.taken.refused or recorder.regions.open or recorder.modes:
            return None
        if not _alike(keys) or not _alike(values) or not all(map(_is_number, keys)) or keys[0].is_complex():
            return None
        stacked: Any = torch.stack([key.reshape(()) for key in keys])
        if keys[0].is_floating_point():
            known: Any = stacked.isnan().any().logical_not()
            if not recorder.conditions.take_for_granted(known, True):
                return None
        places = stacked.argsort(stable=True, descending=bool(reverse))
        found = [value.clone() for value in torch.stack(list(values)).index_select(0, places).unbind(0)]
        self._note(found, values, place)
        self._operands |= {id(memory_of(tensor)): place for tensor in keys}
        return found

    def keep(self, tensors: Iterable[torch.Tensor], cache: object) -> None:
        """Notes what the program takes to be kept by a cache, where the graph computes it at each call."""
        place = self.recorder.user_frames()
        memories = {id(memory_of(tensor)) for tensor in tensors}
        self._results |= dict.fromkeys(memories, place)
        self._caches |= dict.fromkeys(memories, cache)

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises NumberAsked where a write would have gone to the operand, or would have been read by the result."""
        memories = {id(memory_of(tensor)) for tensor in tensors}
        self._refuse(memories, {**self._results, **self._operands})

    def leaves(self, tensor: torch.Tensor) -> None:
        """Raises NumberAsked where what leaves the graph would be the operand itself, and somebody can tell."""
        self._left.add(id(memory_of(tensor)))
        chosen = self._left & self._results.keys()
        if chosen:
            nodes = self.recorder.graph.nodes
            seen = {id(memory_of(node.meta.get("val"))) for node in nodes if node.op in ("placeholder", "get_attr")}
            seen |= self._left
            self._refuse({m for m in chosen if m not in self._stands_for or self._stands_for[m] & seen}, self._results)

    def _note(self, results: Sequence[Any], operands: Sequence[Any], place: Place) -> None:
        memories = {id(memory_of(tensor)) for tensor in operands}
        self._operands |= dict.fromkeys(memories, place)
        behind = frozenset().union(*(self._stands_for.get(memory, ()) for memory in memories), memories)
        told_apart = len({tensor.requires_grad for tensor in operands}) > 1 or not memories.isdisjoint(
            self._results.keys() - self._stands_for.keys()
        )
        for result in results:
            self._results[id(memory_of(result))] = place
            if not told_apart:
                self._stands_for[id(memory_of(result))] = behind

    def _refuse(self, memories: Iterable[int], of: dict[int, Place]) -> None:
        asked = [memory for memory in memories if memory in of]
        places = {of[memory] for memory in asked}
        if places:
            KEPT.update(self._caches[memory] for memory in asked if memory in self._caches)
            raise NumberAsked(places, as_size=False)


def _alike(pair: Sequence[Any]) -> TypeGuard[Sequence[FakeTensor]]:
    """Whether values are tensors that Python tells apart by nothing but their elements."""
    if not all(isinstance(t, FakeTensor) and class_of(t) is None and t.layout is torch.strided for t in pair):
        return False
    kinds = {(t.dtype, t.device, tuple(t.spec.shape)) for t in pair}
    known = all(type(size) is int for t in pair for size in t.spec.shape)
    return known and len(kinds) == 1 and all(_is_number(t) or t.is_contiguous() for t in pair)


def _is_number(tensor: FakeTensor) -> bool:
    return all(size == 1 for size in tensor.spec.shape)
