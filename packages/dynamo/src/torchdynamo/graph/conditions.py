"""Conditions on data that keep the program from a `raise`: a graph takes each for met, and what runs it asks.

`assert mask.any()` and `if not valid.all(): raise ValueError(...)` branch on a tensor's value, but one side of the
branch is only the way into an exception. The graph goes on with the other side, and has the condition among its
results. Where it is not met after all, nothing that the program does has been done yet: the call begins anew, eagerly,
and raises what the program raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from primtorch.fake import FakeTensor
from primtorch.schemas import UserFrame
from torchdynamo.graph import known_tensors
from torchdynamo.graph.tensor_classes import class_of

Place = tuple[UserFrame, ...]


class ConditionNotMet(Exception):
    """Raised by generated code behind a graph that took conditions for met, before anything else is done.

    Args:
        places: the user's stack at each, one or more.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(", ".join(dict.fromkeys(str(place[-1]) for place in places if place)))
        self.places = tuple(places)


class Conditions:
    """Those of one capture.

    Attributes:
        met: for each device, whether all conditions there are met: a tensor of one element.
        places: the user's stack at each.
        can_begin_anew: the graph does nothing that would be done twice where the call begins anew.
    """

    def __init__(self, user_frames: Callable[[], Place]) -> None:
        self._user_frames = user_frames
        self._allowed = True
        self.met: dict[torch.device, torch.Tensor] = {}
        self.places: list[Place] = []
        self.can_begin_anew = True

    @contextmanager
    def refused(self) -> Iterator[None]:
        """A block in which a branch on data breaks the graph: of a body whose values stay within it."""
        before, self._allowed = self._allowed, False
        try:
            yield
        finally:
            self._allowed = before

    def refuse(self) -> None:
        """From here on a branch on data breaks the graph."""
        self._allowed = False

    def take_for_granted(self, condition: FakeTensor, expected: bool) -> bool:
        """Records that a tensor is true (or false). Not where eager raises, or its value is known."""
        if class_of(condition) is not None:  # which may say what its truth is
            return False
        one = all(type(size) is int and size == 1 for size in condition.spec.shape)
        if not self._allowed or not one or known_tensors.answer("__bool__", (condition,)) is not None:
            return False
        value = condition.detach().reshape(())
        met = torch.ne(value, 0) if expected else torch.logical_not(value)
        earlier = self.met.get(met.device)
        self.met[met.device] = met if earlier is None else torch.logical_and(earlier, met)
        self.places.append(self._user_frames())
        return True

    def release(self) -> None:
        """Lets go of the tensors."""
        self.met.clear()
