"""What happened to the program: graphs, kernels, seconds, and whatever ran eagerly, twice or differently.

As text, for rich, and as one page of HTML.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from primtorch.ledger import Effect, Event, event_tables, of, total
from torchcompile import page
from torchcompile.dumps import Text
from torchcompile.journal import CapturedGraphRecord, CompiledGraphRecord, PieceRecord, Span, StageRecord
from torchcompile.page.replicas import drawn

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Report:
    """Everything since the start of the process or the last `reset()`.

    Attributes:
        captured: graphs given to a back end; one equal to an earlier one is not given to it again.
        graphs: those that became kernels.
        events: the ledger: whatever did not run as one compiled program, once.
        stages: of backwards that were cut where DistributedDataParallel's buckets end.
        pieces: of graphs that several back ends share.
        traced: what was captured, with the user's lines.
        spans: when each stage of each compilation ran.
        texts: gives the stages as text: those that were dumped, else what compiled code holds anyway.
        seconds: what `profile` measured of kernels and calls, by label.
        bandwidth: bytes a second that the machine copies, where `profile` has measured it.
    """

    captured: int
    capture_seconds: float
    graphs: Sequence[CompiledGraphRecord]
    events: Sequence[Event]
    stages: Sequence[StageRecord] = ()
    pieces: Sequence[PieceRecord] = ()
    traced: Sequence[CapturedGraphRecord] = ()
    spans: Sequence[Span] = ()
    texts: Callable[[], Sequence[Text]] = field(default=tuple, repr=False)
    seconds: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None

    @property
    def kernels(self) -> int:
        """Kernels of all compiled graphs."""
        return sum(graph.kernels for graph in self.graphs)

    @property
    def breaks(self) -> tuple[Event, ...]:
        """Detours: what broke graphs."""
        return of(self.events, Effect.BREAK)

    @property
    def fallbacks(self) -> tuple[Event, ...]:
        """Functions and graphs that ran eagerly as a whole."""
        return of(self.events, Effect.FALLBACK)

    @property
    def mended(self) -> tuple[Event, ...]:
        """What ran in another way than planned: a layout that was mended by a copy, say."""
        return of(self.events, Effect.MENDED)

    @property
    def reruns(self) -> tuple[Event, ...]:
        """Calls that ran again eagerly, after the program had raised an exception."""
        return of(self.events, Effect.RERUN)

    @property
    def recompiles(self) -> tuple[Event, ...]:
        """Functions that were compiled once more, and why no version fitted."""
        return of(self.events, Effect.RECOMPILE)

    @property
    def ran_eagerly(self) -> tuple[Event, ...]:
        """Breaks, fallbacks and reruns: all places where the program's own operations ran eagerly."""
        return of(self.events, Effect.BREAK, Effect.FALLBACK, Effect.RERUN)

    @property
    def surprises(self) -> tuple[Event, ...]:
        """All of `ran_eagerly` and `mended`: what keeps a report from being clean."""
        return (*self.ran_eagerly, *self.mended)

    @property
    def clean(self) -> bool:
        """Whether something was captured, and nothing ran eagerly, twice or differently."""
        return self.captured > 0 and not self.surprises

    def _totals(self) -> list[tuple[str, str]]:
        return [
            ("graphs captured", str(self.captured)),
            ("graph breaks", str(total(self.breaks))),
            ("fallbacks to eager", str(total(self.fallbacks))),
            ("ran differently", str(total(self.mended))),
            ("ran twice", str(total(self.reruns))),
            ("recompilations", str(total(self.recompiles))),
            ("generated kernels", str(self.kernels)),
            ("calls of PyTorch's kernels", str(sum(graph.aten_calls for graph in self.graphs))),
            ("seconds, capture", f"{self.capture_seconds:.2f}"),
            ("seconds, kernels", f"{sum(graph.seconds for graph in self.graphs):.2f}"),
        ]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, head, rows) of each part that has something to say."""
        totals = [list(row) for row in self._totals()]
        parts = [("Compilation", ["", ""], totals)]
        if self.graphs:
            head = ["graph", "kind", "prims", "kernels", "PyTorch calls", "seconds", "from cache"]
            parts.append(
                (
                    "Graphs",
                    head,
                    [
                        [
                            graph.title,
                            graph.kind,
                            str(graph.prims),
                            str(graph.kernels),
                            str(graph.aten_calls),
                            f"{graph.seconds:.2f}",
                            "yes" if graph.cache_hits else "no",
                        ]
                        for graph in self.graphs
                    ],
                )
            )
        if self.stages:
            parts.append(
                (
                    "Backward in stages: the reducer sends a bucket while the next stage runs",
                    ["graph", "stage", "bucket", "parameters", "bytes", "within the backward"],
                    [
                        [
                            s.title,
                            str(s.stage),
                            f"{s.bucket}, planned" if s.planned else str(s.bucket),
                            ", ".join(s.parameters),
                            str(s.nbytes),
                            place,
                        ]
                        for s, place in zip(self.stages, drawn(self.stages), strict=True)
                    ],
                )
            )
        if self.pieces:
            rows = [[p.title, p.kind, str(p.number), p.backend, p.listed, p.why] for p in self.pieces]
            parts.append(("Pieces", ["graph", "kind", "piece", "back end", "operators", "why"], rows))
        parts += event_tables(self.events)
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape
        from rich.table import Table

        for title, head, rows in self.tables():
            table = Table(title=title, show_header=any(head))
            for name in head:
                table.add_column(name, overflow="fold")
            for row in rows:
                table.add_row(*map(escape, row))
            yield table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def contents(self) -> page.Contents:
        """What the page shows."""
        return page.Contents(
            totals=[(what, number) for what, number in self._totals()],
            clean=self.clean,
            captured=self.traced,
            graphs=self.graphs,
            events=self.events,
            stages=self.stages,
            pieces=self.pieces,
            spans=self.spans,
            texts=self.texts(),
            seconds=self.seconds,
            bandwidth=self.bandwidth,
        )

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else: the user's source with graphs, breaks and kernels beside each line, a
        timeline of compilation, kernels, memory, and every stage as text. It is written to `path`, too, if given."""
        text = page.render(self.contents())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def html_tables(self) -> str:
        """The tables of the report alone, for a page of the caller's own."""
        cell = lambda tag, text: f"<{tag}>{html.escape(text)}</{tag}>"
        parts: list[str] = []
        for title, head, rows in self.tables():
            parts.append(f"<h3>{html.escape(title)}</h3><table>")
            if any(head):
                parts.append("<tr>" + "".join(cell("th", text) for text in head) + "</tr>")
            parts.extend("<tr>" + "".join(cell("td", text) for text in row) + "</tr>" for row in rows)
            parts.append("</table>")
        return "\n".join(parts)
