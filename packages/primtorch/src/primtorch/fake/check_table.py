"""The table of checks: what refuses an operator's arguments before its formula runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch

Check: TypeAlias = Callable[..., None]
C = TypeVar("C", bound=Check)

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                   torch.uint16, torch.uint32, torch.uint64})  # fmt: skip


class CheckTable(dict[str, Check]):
    """Checks by operator name, as the tables of formulas."""

    def of(self, *names: str) -> Callable[[C], C]:
        """Registers a check under the names of its operators."""

        def register(check: C) -> C:
            self.update(dict.fromkeys(names, check))
            return check

        return register


def refuse(wrong: bool, message: str | Callable[[], str], error: type[Exception] = RuntimeError) -> None:
    """Raises where `wrong` holds; a message that is a function is made only then."""
    if wrong:
        raise error(message if isinstance(message, str) else message())
