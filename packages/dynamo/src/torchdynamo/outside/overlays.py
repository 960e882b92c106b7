"""Writes of the program to external objects: kept aside during capture, read first, replayed by generated code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from torchdynamo.interpreter.protocol import MISSING, Marker
from torchdynamo.torch_compilers_marks import OF_REGIONS

__all__ = ["DELETED", "MISSING", "Overlays", "Slot"]

DELETED: Final = Marker("DELETED")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place in the outside world: an attribute of an object, a global of a module, a cell's contents.

    Where the program has deleted what was there, a value that it has written since comes last in its namespace.
    """

    owner: object
    name: str
    kind: str  # "attribute", "slot" (an attribute of `__slots__`, in no `__dict__`), "global" or "cell"
    deleted: bool = False


class Overlays:
    """The last value written to each slot, in the order of the first write since it was deleted, or at all."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str, str], tuple[Slot, object]] = {}
        self.count = 0  # of writes so far, without those that mark a function for compilers, once more or not

    def read(self, owner: object, name: str, kind: str = "attribute") -> object:
        """The value written, DELETED, or MISSING when the program did not write there."""
        entry = self._slots.get((id(owner), name, kind))
        return MISSING if entry is None else entry[1]

    def write(self, owner: object, name: str, value: object, kind: str = "attribute") -> None:
        """Keeps a write aside; DELETED deletes."""
        self.count += name not in OF_REGIONS
        key = (id(owner), name, kind)
        slot, before = self._slots.get(key, (Slot(owner, name, kind), MISSING))
        if before is DELETED:
            del self._slots[key]
        elif value is DELETED:
            slot = replace(slot, deleted=True)
        self._slots[key] = (slot, value)

    def names(self, owner: object) -> dict[str, object]:
        """What was written to the attributes of `owner` that its `__dict__` holds."""
        return {
            name: value
            for (key, name, kind), (_, value) in self._slots.items()
            if key == id(owner) and kind == "attribute"
        }

    def put(self, owner: object, table: dict[str, object]) -> None:
        """Makes a table of the attributes of `owner` what the writes have made of it."""
        for name, value in self.names(owner).items():
            if self._slots[id(owner), name, "attribute"][0].deleted:
                table.pop(name, None)
            if value is not DELETED:
                table[name] = value

    def move(self, owner: object, table: dict[str, object]) -> None:
        """The same, into a table that stands for the attributes from now on."""
        self.put(owner, table)
        for name in self.names(owner):
            del self._slots[id(owner), name, "attribute"]

    def writes(self) -> Iterator[tuple[Slot, object]]:
        """What was written, in the order of the first write to each slot."""
        return iter(list(self._slots.values()))

    def clear(self) -> None:
        """Forgets all writes."""
        self._slots.clear()

    def __len__(self) -> int:
        return len(self._slots)
