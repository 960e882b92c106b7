"""The user's source with graphs, breaks and kernels beside each line."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from primtorch.ledger import Effect, Event
from primtorch.schemas import UserFrame
from torchcompile.journal import CapturedGraphRecord
from torchcompile.page.contents import IMPORTED
from torchcompile.page.tables import PartRow

MOST_LINES = 6000  # of all files together
_AROUND = 3  # lines shown above and below one of which something is said
_HIDDEN = frozenset({Effect.PLAIN})
_OURS = str(Path(__file__).parents[1]) + os.sep  # where a compiled module's call is


@dataclass
class Notes:
    """What is said of one line."""

    graphs: dict[str, int] = field(default_factory=dict)  # title -> number, by which it is coloured
    parts: list[PartRow] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """A line of source as HTML; of `number` 0, lines that are left out."""

    number: int
    html: str
    notes: Notes | None = None


@dataclass(frozen=True)
class Listing:
    """One file."""

    file: str
    lines: Sequence[Line]

    @property
    def changed(self) -> bool:
        """Whether the file was written to since torchcompile was imported: what was compiled may be older."""
        try:
            return any(line.html for line in self.lines) and os.stat(self.file).st_mtime > IMPORTED
        except OSError:
            return False

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return os.path.basename(self.file)

    @property
    def broken(self) -> int:
        """Breaks and the like in it."""
        return sum(len(line.notes.events) for line in self.lines if line.notes is not None)


def listings(
    captured: Iterable[CapturedGraphRecord], events: Iterable[Event], rows: Iterable[PartRow]
) -> tuple[list[Listing], int]:
    """The files of which something is said, those with most to say first, and how many lines are left out."""
    notes: dict[str, dict[int, Notes]] = {}

    def of(frame: UserFrame) -> Notes:
        return notes.setdefault(frame.file, {}).setdefault(frame.line, Notes())

    for number, graph in enumerate(captured):
        for frame in graph.lines:
            of(frame).graphs[graph.title] = number
    for row in rows:
        for frame in row.part.frames:
            of(frame).parts.append(row)
    for event in events:
        if event.effect not in _HIDDEN and event.line is not None and not event.line.file.startswith(_OURS):
            of(event.line).events.append(event)
    found, room, left_out = [], MOST_LINES, 0
    for file in sorted(notes, key=lambda name: -len(notes[name])):
        listing = _listing(file, notes[file])
        if len(listing.lines) > room:
            left_out += len(listing.lines)
            continue
        room -= len(listing.lines)
        found.append(listing)
    return found, left_out


def _listing(file: str, notes: Mapping[int, Notes]) -> Listing:
    source = linecache.getlines(file)
    if not source:  # text that nobody keeps: code of exec, say
        return Listing(file, [Line(number, "", note) for number, note in sorted(notes.items())])
    text = "".join(source)
    html = highlight(text, PythonLexer(stripnl=False, ensurenl=True), HtmlFormatter(nowrap=True)).split("\n")
    wanted = _wanted(text, len(source), notes)
    lines: list[Line] = []
    last = 0
    for number in wanted:
        if number != last + 1:
            lines.append(Line(0, ""))
        lines.append(Line(number, html[number - 1] if number <= len(html) else "", notes.get(number)))
        last = number
    if last < len(source):
        lines.append(Line(0, ""))
    return Listing(file, lines)


def _wanted(text: str, count: int, notes: Mapping[int, Notes]) -> list[int]:
    """Lines of which something is said, those around them, and the heads of the functions that they are in."""
    wanted = {near for line in notes for near in range(line - _AROUND, line + _AROUND + 1) if 1 <= near <= count}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return sorted(wanted)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in notes):
            wanted.add(node.lineno)
    return sorted(wanted | {line for line in notes if 1 <= line <= count})
