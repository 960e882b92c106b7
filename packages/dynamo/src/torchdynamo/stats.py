"""What capture did: counts, and the events of its ledger. Held by the compiled callables, summed for the process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from primtorch import forks
from primtorch.ledger import LEDGER, Effect, Event, Ledger, of, total
from primtorch.schemas import UserFrame
from torchdynamo.reasons import REASONS
from torchdynamo.schemas import GraphBreak


@dataclass(eq=False)
class Stats:
    """What one `optimize` did, or all of them; counts go on to `parent`."""

    ledger: Ledger = field(default_factory=Ledger)
    parent: Stats | None = None
    graphs: int = 0
    found: int = 0  # frames that another process captured, with a graph or without
    seconds: float = 0.0  # of capture alone
    backend_seconds: float = 0.0
    _seen_from_inside: set[tuple[UserFrame, ...]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=forks.lock)  # noqa: TID251 - its type

    def add(self, *, graphs: int = 0, found: int = 0, seconds: float = 0.0, backend_seconds: float = 0.0) -> None:
        """Adds graphs and seconds, here and to the parent."""
        with self._lock:
            self.graphs += graphs
            self.found += found
            self.seconds += seconds
            self.backend_seconds += backend_seconds
        if self.parent is not None:
            self.parent.add(graphs=graphs, found=found, seconds=seconds, backend_seconds=backend_seconds)

    def clear(self) -> None:
        """Sets all counts to zero and empties the ledger; the parent keeps what it has."""
        with self._lock:
            self.graphs, self.found, self.seconds, self.backend_seconds = 0, 0, 0.0, 0.0
            self._seen_from_inside.clear()
        self.ledger.clear()

    def copy(self) -> Stats:
        """The counts as they are now."""
        return Stats(self.ledger.copy(), None, self.graphs, self.found, self.seconds, self.backend_seconds)

    def record_break(self, function: str, graph_break: GraphBreak) -> None:
        """Counts a break once: the frames that the broken call was inlined into break at the same place, seen from
        further out, before the call itself is captured and breaks there."""
        stack = graph_break.user_frames
        with self._lock:
            if stack in self._seen_from_inside:
                self._seen_from_inside.discard(stack)
                return
            self._seen_from_inside.update(stack[depth:] for depth in range(1, len(stack)))
        self.ledger.add(Event(REASONS[graph_break.reason], function, graph_break.detail, stack))

    @property
    def events(self) -> tuple[Event, ...]:
        """All of the ledger, in the order of their first time."""
        return self.ledger.events

    @property
    def break_details(self) -> list[GraphBreak]:
        """Every break that was met, the same one as often as it was."""
        return [
            GraphBreak(event.kind.id, event.detail, event.frames)
            for event in of(self.events, Effect.BREAK)
            for _ in range(event.count)
        ]

    @property
    def breaks(self) -> tuple[tuple[int, str, str], ...]:
        """(count, reason id, "file:line") of each place that broke a graph, most frequent first."""
        counts: Counter[tuple[str, str]] = Counter()
        for event in of(self.events, Effect.BREAK):
            counts[event.kind.id, event.where] += event.count
        return tuple((count, reason, where) for (reason, where), count in counts.most_common())

    @property
    def fallbacks(self) -> tuple[Event, ...]:
        """Functions and graphs that ran eagerly as a whole."""
        return of(self.events, Effect.FALLBACK)

    @property
    def surprises(self) -> tuple[Event, ...]:
        """What ran eagerly as a whole, twice or differently: all but breaks."""
        return of(self.events, Effect.FALLBACK, Effect.RERUN, Effect.MENDED)

    @property
    def recompiles(self) -> int:
        """How often a function was compiled again."""
        return total(of(self.events, Effect.RECOMPILE))

    @property
    def recompile_reasons(self) -> list[tuple[str, tuple[str, ...]]]:
        """(function, why each version did not fit) of every recompilation."""
        return [
            (event.what, tuple(event.detail.split("\n")))
            for event in of(self.events, Effect.RECOMPILE)
            for _ in range(event.count)
        ]


# Of this process: what `torchdynamo.stats()` copies.
TOTAL = Stats(LEDGER)
