"""Records that a compilation makes many of: dataclasses that only the type checker sees frozen.

At run time a frozen one pays `object.__setattr__` for each field, which is three quarters of what it takes to make one.
Nothing in these packages assigns to a field.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass with slots."""
    return dataclasses.dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def remembering_record(cls: type[T]) -> type[T]:
    """A frozen dataclass without slots, which remembers its cached properties."""
    return dataclasses.dataclass(unsafe_hash=True)(cls)
