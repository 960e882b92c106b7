"""`min`, `max` and `sorted` by tensors of one number, which Python compares one by one: the graph chooses by
`torch.where`, and puts in order by a stable sort.

A result is one of the operands to Python, and memory of its own in the graph. So where the program writes to any of
them, or hands the result out, capture begins anew, and the graph ends before the choice.
"""

from __future__ import annotations

import operator
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

Place = tuple[UserFrame, ...]
Pair = tuple[Any, Any]


class Choices:
    """Those of one capture, by the memory that their results and operands lie in."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._results: dict[int, Place] = {}
        self._operands: dict[int, Place] = {}

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
        for chosen in (value, key):
            self._results[id(memory_of(chosen))] = place
        self._operands |= {id(memory_of(tensor)): place for tensor in (*values, *keys)}
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
        self._results |= {id(memory_of(tensor)): place for tensor in found}
        self._operands |= {id(memory_of(tensor)): place for tensor in (*values, *keys)}
        return found

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises NumberAsked where a write would have gone to the operand, or would have been read by the result."""
        memories = {id(memory_of(tensor)) for tensor in tensors}
        self._refuse(memories, {**self._results, **self._operands})

    def leaves(self, tensor: torch.Tensor) -> None:
        """Raises NumberAsked where what leaves the graph would be the operand itself."""
        self._refuse({id(memory_of(tensor))}, self._results)

    def _refuse(self, memories: Iterable[int], of: dict[int, Place]) -> None:
        places = {of[memory] for memory in memories if memory in of}
        if places:
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
