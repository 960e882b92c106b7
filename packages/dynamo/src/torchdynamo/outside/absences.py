"""Guards: what the program looked for and did not find is still absent."""

from __future__ import annotations

import types

from primtorch.frozen import record


@record
class EmptySlot:
    """A guard: an object has no value in one of its class's slots."""

    member: types.MemberDescriptorType

    @property
    def __name__(self) -> str:
        return f"empty_slot_{self.member.__name__}"

    def __call__(self, obj: object) -> bool:
        try:
            self.member.__get__(obj)
        except AttributeError:
            return True
        return False


def is_empty(cell: types.CellType) -> bool:
    """A guard: a cell holds nothing."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
