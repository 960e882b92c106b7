"""Writes of which autograd records nothing: under no_grad, through `.data` or a detached alias.

A derivative of the backward runs the nodes of the forward again under autograd. What such a write gives, and every view
of that memory, has the history of the values before, which those nodes do not tell: derivatives of that backward are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree

from primtorch.effects import written_by
from primtorch.functionalize import unwrap
from primtorch.schemas import UserFrame

_DETACHING: tuple[object, ...] = ("detach", torch.detach)


class UnseenWrites:
    """Watches the calls of a program.

    Attributes:
        first: the user's lines of the first such write; None where there is none.
    """

    def __init__(self) -> None:
        self.first: tuple[UserFrame, ...] | None = None
        self.recorded: set[int] = set()  # memories of tensors that have a history
        self.uncounted: set[int] = set()  # memories of tensors that `.data` gave: autograd may keep what they change
        self.shared: set[int] = set()  # memories of tensors with a history that are no views, and of others

    @contextmanager
    def watching(
        self,
        function: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        stack: tuple[UserFrame, ...],
    ) -> Iterator[None]:
        """Around a call, which is at `stack` in the user's program: notes what it writes unseen."""
        reads_data = function is getattr and args[1] == "data"
        looked_at = reads_data or function in _DETACHING or bool(written_by(function, args, kwargs))
        given = [(t, unwrap(t), _has_history(t)) for t in _tensors((args, kwargs))] if looked_at else []
        self.recorded.update(_memory(t) for t, _, recorded in given if recorded)
        self.uncounted.update(_memory(t) for t, _, _ in given if reads_data)
        yield
        for t, before, recorded in given:
            unseen = not torch.is_grad_enabled() or not recorded
            known = self.shared | (self.recorded | self.uncounted if unseen else set())
            if unwrap(t) is not before and _memory(t) in known:
                self.first = self.first or stack

    def applied(self, value: object, args: Sequence[object]) -> None:
        """A function that may be autograd's gave a value: a tensor in an argument's memory that is no view of it has
        another history than what is written there."""
        memories = {_memory(t) for t in _tensors(args)}
        apart = (t for t in _tensors(value) if t.requires_grad and not t._is_view())
        self.shared.update(memories.intersection(map(_memory, apart)))

    def handed_on(self, t: torch.Tensor, stack: tuple[UserFrame, ...]) -> None:
        """A call gave a tensor without a history that stands for the very node of one that has it (`.data`)."""
        if not _has_history(t) and _memory(t) in self.recorded:
            self.first = self.first or stack


def _has_history(t: torch.Tensor) -> bool:
    return t.requires_grad or (t._base is not None and t._base.requires_grad)


def _memory(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and torch._is_functional_tensor(value):
            yield value
