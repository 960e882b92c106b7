"""What was compiled in this process: the facts behind `torchcompile.report()` beside those of the ledger."""

from __future__ import annotations

import threading
from collections import deque
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


class Journal:
    """The last `limit` compiled graphs. Safe under threads; `clear()` belongs to `torchcompile.reset()`."""

    def __init__(self, limit: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._graphs: deque[CompiledGraphRecord] = deque(maxlen=limit)
        self._captures = 0

    def next_title(self) -> str:
        """`graph_N`, N counting the captured graphs of this process since the last reset."""
        with self._lock:
            self._captures += 1
            return f"graph_{self._captures - 1}"

    def add(self, record: CompiledGraphRecord) -> None:
        """Keeps what became of a graph."""
        with self._lock:
            self._graphs.append(record)

    @property
    def graphs(self) -> Sequence[CompiledGraphRecord]:
        """What became of each compiled graph, in order."""
        with self._lock:
            return tuple(self._graphs)

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._captures

    def clear(self) -> None:
        """Forgets all of it."""
        with self._lock:
            self._graphs.clear()
            self._captures = 0
