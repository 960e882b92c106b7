"""What happened to the program: graphs, breaks, kernels, recompilations, seconds, fallbacks. As text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from torchcompile.journal import CompiledGraphRecord, FallbackRecord


@dataclass(frozen=True)
class Report:
    """`captured`: graphs given to a back end; `breaks`: (count, reason, user's file:line)."""

    captured: int
    breaks: Sequence[tuple[int, str, str]]
    recompiles: int
    capture_seconds: float
    graphs: Sequence[CompiledGraphRecord]
    fallbacks: Sequence[FallbackRecord]

    @property
    def kernels(self) -> int:
        return sum(graph.kernels for graph in self.graphs)

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, head, rows) of each part that has something to say."""
        totals = [
            ["graphs captured", str(self.captured)],
            ["graph breaks", str(sum(count for count, _, _ in self.breaks))],
            ["recompilations", str(self.recompiles)],
            ["generated kernels", str(self.kernels)],
            ["calls of PyTorch's kernels", str(sum(graph.aten_calls for graph in self.graphs))],
            ["fallbacks to eager", str(len(self.fallbacks))],
            ["seconds, capture", f"{self.capture_seconds:.2f}"],
            ["seconds, kernels", f"{sum(graph.seconds for graph in self.graphs):.2f}"],
        ]
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
        if self.breaks:
            rows = [[str(count), reason, where] for count, reason, where in self.breaks]
            parts.append(("Graph breaks", ["count", "reason", "where"], rows))
        if self.fallbacks:
            parts.append(("Fallbacks", ["what", "why"], [[f.title, f.reason] for f in self.fallbacks]))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for title, head, rows in self.tables():
            table = Table(*head, title=title, show_header=any(head))
            for row in rows:
                table.add_row(*row)
            yield table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def html(self) -> str:
        """The same as HTML tables, for a page of the caller's own."""
        cell = lambda tag, text: f"<{tag}>{html.escape(text)}</{tag}>"
        parts: list[str] = []
        for title, head, rows in self.tables():
            parts.append(f"<h3>{html.escape(title)}</h3><table>")
            if any(head):
                parts.append("<tr>" + "".join(cell("th", text) for text in head) + "</tr>")
            parts.extend("<tr>" + "".join(cell("td", text) for text in row) + "</tr>" for row in rows)
            parts.append("</table>")
        return "\n".join(parts)
