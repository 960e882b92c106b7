"""The guards of one capture, collected without repeats."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from primtorch.schemas import UserFrame
from torchdynamo.schemas import Guard, GuardKind
from torchdynamo.sources import Source


class GuardSet:
    """Guards in the order in which the program asked; the first mention of each wins."""

    def __init__(self) -> None:
        self._guards: dict[tuple[object, ...], Guard] = {}

    def add(
        self,
        source: Source | None,
        kind: GuardKind,
        payload: object,
        user_frames: Callable[[], tuple[UserFrame, ...]] = tuple,
    ) -> None:
        """A guard, where it is the first mention: only then `user_frames` is asked where the program is."""
        key = (source, kind, _payload_key(payload))
        if key not in self._guards:
            self._guards[key] = Guard(source, kind, payload, user_frames())

    def keep(self, guard: Guard) -> None:
        """The same of a guard that is made."""
        self._guards.setdefault((guard.source, guard.kind, _payload_key(guard.payload)), guard)

    def refuse_hooks(self, sources: Collection[Source]) -> None:
        """What is known of the tensors at these sources holds of tensors without hooks on their gradients alone."""
        guards, self._guards = self._guards.values(), {}
        for guard in guards:
            if guard.kind is GuardKind.TENSOR and guard.source in sources:
                guard = replace(guard, payload=replace(guard.payload, no_hooks=True))
            self.keep(guard)

    def guards(self) -> tuple[Guard, ...]:
        """In the order in which they were added."""
        return tuple(self._guards.values())

    def __len__(self) -> int:
        return len(self._guards)


def _payload_key(payload: object) -> object:
    """Equal keys only for payloads that check the same thing (1, 1.0 and True differ)."""
    if type(payload) in _TOLD_BY_VALUE:
        return (type(payload), payload)
    if isinstance(payload, _SHOWN_BY_VALUE):
        base = next(base for base in _SHOWN_BY_VALUE if isinstance(payload, base))
        return (type(payload), base.__repr__(payload))
    if isinstance(payload, frozenset):
        return (type(payload), frozenset(map(_payload_key, frozenset.__iter__(payload))))
    if isinstance(payload, tuple):
        return (type(payload), tuple(map(_payload_key, tuple.__iter__(payload))))
    return id(payload)


_SHOWN_BY_VALUE: tuple[Any, ...] = (str, int, float, complex, bytes)  # by these: a subclass may show what it likes
# What is equal and of one type of these is the same; of floats, -0.0 is not 0.0.
_TOLD_BY_VALUE = frozenset({str, bytes, int, bool})
