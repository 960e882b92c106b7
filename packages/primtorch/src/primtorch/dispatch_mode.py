"""Modes of the dispatcher, without the compiler that torch's own class of modes imports at its first dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch


class DispatchMode:
    """Within `with mode:`, the operators of this thread come to the subclass's `__torch_dispatch__`, which has the mode
    off the stack while it runs."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """No: the dispatcher brings it the operators of the program before those of torch's own machinery."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """No: whatever arrives is the mode's."""
        return False

    def __enter__(self) -> Self:
        torch._C._push_on_torch_dispatch_stack(self)  # type: ignore[arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block without the mode, and without those that were entered within it."""
        above: list[Any] = []
        while not above or above[-1] is not self:
            above.append(torch._C._pop_torch_dispatch_stack(None))
        try:
            yield
        finally:
            for mode in reversed(above):
                torch._C._push_on_torch_dispatch_stack(mode)
