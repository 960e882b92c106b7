"""What was compiled in this process: the facts behind `torchcompile.report()`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "inference"]


@dataclass(frozen=True, slots=True)
class CompiledGraphRecord:
    """One graph that was turned into kernels. `seconds`: wall time of lowering, code generation and building."""

    title: str
    kind: Kind
    prims: int
    kernels: int
    aten_calls: int
    seconds: float
    cache_hits: int


@dataclass(frozen=True, slots=True)
class FallbackRecord:
    """Something that runs eagerly though it was to be compiled: what, and why."""

    title: str
    reason: str


class Journal:
    """Append-only and safe under threads; `clear()` belongs to `torchcompile.reset()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: list[CompiledGraphRecord] = []
        self._fallbacks: list[FallbackRecord] = []
        self._captures = 0

    def next_title(self) -> str:
        """`graph_N`, N counting the captured graphs of this process since the last reset."""
        with self._lock:
            self._captures += 1
            return f"graph_{self._captures - 1}"

    def add(self, record: CompiledGraphRecord | FallbackRecord) -> None:
        with self._lock:
            if isinstance(record, FallbackRecord):
                self._fallbacks.append(record)
            else:
                self._graphs.append(record)

    @property
    def graphs(self) -> Sequence[CompiledGraphRecord]:
        return tuple(self._graphs)

    @property
    def fallbacks(self) -> Sequence[FallbackRecord]:
        return tuple(self._fallbacks)

    @property
    def captures(self) -> int:
        return self._captures

    def clear(self) -> None:
        with self._lock:
            self._graphs.clear()
            self._fallbacks.clear()
            self._captures = 0
