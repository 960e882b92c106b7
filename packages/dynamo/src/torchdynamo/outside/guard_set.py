"""The guards of one capture, collected without repeats."""

from __future__ import annotations

from typing import Any

from primtorch.schemas import UserFrame
from torchdynamo.schemas import Guard, GuardKind
from torchdynamo.sources import Source


class GuardSet:
    """Guards in the order in which the program asked; the first mention of each wins."""

    def __init__(self) -> None:
        self._guards: dict[tuple[Any, ...], Guard] = {}

    def add(self, source: Source | None, kind: GuardKind, payload: Any, user_frames: tuple[UserFrame, ...]) -> None:
        key = (source, kind, _payload_key(payload))
        if key not in self._guards:
            self._guards[key] = Guard(source, kind, payload, user_frames)

    def guards(self) -> tuple[Guard, ...]:
        return tuple(self._guards.values())

    def __len__(self) -> int:
        return len(self._guards)


def _payload_key(payload: Any) -> Any:
    """Equal keys only for payloads that check the same thing (1, 1.0 and True differ)."""
    if isinstance(payload, (str, int, float, complex, bytes)):
        return (type(payload), repr(payload))
    if isinstance(payload, frozenset):
        return (type(payload), frozenset(map(_payload_key, frozenset.__iter__(payload))))
    if isinstance(payload, tuple):
        return (type(payload), tuple(map(_payload_key, tuple.__iter__(payload))))
    return id(payload)
