"""`min` and `max` of tensors of one number, which Python chooses by comparing: the graph chooses by `torch.where`.

The result is one of the operands to Python, and memory of its own in the graph. So where the program writes to any of
them, or hands the result out, capture begins anew, and the graph ends before the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from torchdynamo.graph.taken_numbers import NumberAsked
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter.protocol import MISSING

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder

Place = tuple[UserFrame, ...]


class Choices:
    """Those of one capture, by the memory that their results and operands lie in."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._results: dict[int, Place] = {}
        self._operands: dict[int, Place] = {}

    def choose(self, smallest: bool, items: Sequence[object]) -> object:
        """The smallest or largest as Python compares them, one after another; MISSING where the graph cannot tell."""
        place, recorder = self.recorder.user_frames(), self.recorder
        tensors = [item for item in items if isinstance(item, FakeTensor) and _is_number(item)]
        if len(tensors) < 2 or len(tensors) < len(items) or place in recorder.taken.refused:
            return MISSING
        kinds = {(t.dtype, t.device, tuple(t.spec.shape)) for t in tensors}
        if len(kinds) > 1 or recorder.regions.open or recorder.modes or tensors[0].is_complex():
            return MISSING
        chosen: torch.Tensor = tensors[0]
        for tensor in tensors[1:]:
            chosen = torch.where(tensor < chosen if smallest else tensor > chosen, tensor, chosen)
        self._results[id(memory_of(chosen))] = place
        self._operands |= {id(memory_of(tensor)): place for tensor in tensors}
        return chosen

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


def _is_number(tensor: FakeTensor) -> bool:
    return class_of(tensor) is None and all(type(size) is int and size == 1 for size in tensor.spec.shape)
