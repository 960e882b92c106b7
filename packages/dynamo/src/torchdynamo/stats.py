"""Counts of what capture did, held by the compiled callables and summed for a report."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from primtorch.schemas import UserFrame
from torchdynamo.schemas import GraphBreak


@dataclass(eq=False)
class Stats:
    """What one `optimize` did."""

    graphs: int = 0
    seconds: float = 0.0  # of capture alone
    backend_seconds: float = 0.0
    recompiles: int = 0
    break_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    break_details: list[GraphBreak] = field(default_factory=list)
    recompile_reasons: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    seen_from_inside: set[tuple[UserFrame, ...]] = field(default_factory=set)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def record_break(self, graph_break: GraphBreak) -> None:
        """Counts a break once: the frames that the broken call was inlined into break at the same place, seen from
        further out, before the call itself is captured and breaks there."""
        stack = graph_break.user_frames
        if stack in self.seen_from_inside:
            self.seen_from_inside.discard(stack)
            return
        self.seen_from_inside.update(stack[depth:] for depth in range(1, len(stack)))
        place = graph_break.user_frames[-1] if graph_break.user_frames else None
        where = f"{place.file}:{place.line}" if place is not None else "?"
        self.break_counts[graph_break.reason, where] += 1
        self.break_details.append(graph_break)

    def recompile(self, function: types.FunctionType, why: Sequence[str]) -> None:
        self.recompiles += 1
        self.recompile_reasons.append((function.__qualname__, tuple(why)))

    @property
    def breaks(self) -> tuple[tuple[int, str, str], ...]:
        """(count, reason id, "file:line") of each place that broke a graph, most frequent first."""
        return tuple((count, reason, where) for (reason, where), count in self.break_counts.most_common())


def total(parts: Sequence[Stats]) -> Stats:
    """The sum over several `optimize` calls."""
    result = Stats()
    for part in parts:
        result.graphs += part.graphs
        result.seconds += part.seconds
        result.backend_seconds += part.backend_seconds
        result.recompiles += part.recompiles
        result.break_counts.update(part.break_counts)
        result.break_details += part.break_details
        result.recompile_reasons += part.recompile_reasons
        result.fallbacks += part.fallbacks
    return result
