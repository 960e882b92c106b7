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


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of a graph's backward, which gives the gradients of one of DistributedDataParallel's buckets.

    Attributes:
        planned: the reducer had not made its buckets yet; these are those that it will make.
    """

    title: str
    stage: int
    bucket: int
    parameters: tuple[str, ...]
    nbytes: int
    planned: bool


class Journal:
    """The last `limit` compiled graphs. Safe under threads; `clear()` belongs to `torchcompile.reset()`."""

    def __init__(self, limit: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._graphs: deque[CompiledGraphRecord] = deque(maxlen=limit)
        self._stages: deque[StageRecord] = deque(maxlen=limit)
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

    def split(self, title: str, stages: Sequence[StageRecord]) -> None:
        """Keeps the stages that a graph's backward has from now on, for the parameters in them: modules that are built
        alike share a graph."""
        named = {name for stage in stages for name in stage.parameters}
        with self._lock:
            left = [r for r in self._stages if r.title != title or named.isdisjoint(r.parameters)]
            self._stages.clear()
            self._stages.extend((*left, *stages))

    @property
    def stages(self) -> Sequence[StageRecord]:
        """The stages of each backward that comes in several."""
        with self._lock:
            return tuple(self._stages)

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
            self._stages.clear()
            self._captures = 0
