"""Writes of the program to external objects: kept aside during capture, read first, replayed by generated code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torchdynamo.interpreter.protocol import MISSING, Marker

__all__ = ["DELETED", "MISSING", "Overlays", "Slot"]

DELETED: Final = Marker("DELETED")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place in the outside world: an attribute of an object, a global of a module, a cell's contents."""

    owner: Any
    name: str
    kind: str  # "attribute", "global" or "cell"


class Overlays:
    """The last value written to each slot, in the order of the first write."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str, str], tuple[Slot, Any]] = {}
        self.count = 0  # of writes so far

    def read(self, owner: Any, name: str, kind: str = "attribute") -> Any:
        """The value written, DELETED, or MISSING when the program did not write there."""
        entry = self._slots.get((id(owner), name, kind))
        return MISSING if entry is None else entry[1]

    def write(self, owner: Any, name: str, value: Any, kind: str = "attribute") -> None:
        self.count += 1
        key = (id(owner), name, kind)
        entry = self._slots.get(key)
        self._slots[key] = (Slot(owner, name, kind) if entry is None else entry[0], value)

    def names(self, owner: Any) -> dict[str, Any]:
        """What was written to the attributes of `owner`."""
        return {
            name: value
            for (key, name, kind), (_, value) in self._slots.items()
            if key == id(owner) and kind == "attribute"
        }

    def take(self, owner: Any) -> dict[str, Any]:
        """The attribute writes to `owner`, removed from here."""
        found = self.names(owner)
        for name in found:
            del self._slots[id(owner), name, "attribute"]
        return found

    def writes(self) -> Iterator[tuple[Slot, Any]]:
        return iter(list(self._slots.values()))

    def clear(self) -> None:
        self._slots.clear()

    def __len__(self) -> int:
        return len(self._slots)
