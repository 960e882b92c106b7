"""Fills the templates."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jinja2
from pygments.formatters import HtmlFormatter

from primtorch.ledger import Effect, Event, of
from torchcompile.dumps import Text
from torchcompile.page.contents import Contents
from torchcompile.page.listing import listings
from torchcompile.page.replicas import cuts, why_cut
from torchcompile.page.tables import PartRow, bytes_text, part_rows, seconds_text, share_text, short
from torchcompile.page.timeline import timeline

MOST_ROWS = 2000  # kernels
MOST_TEXT = 8_000_000  # characters of dumped stages
COLORS = 8  # of graphs


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("torchcompile.page", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.loopcontrols"],
    )
    found.filters |= {"bytes": bytes_text, "seconds": seconds_text, "share": share_text, "short": short}
    return found


def _code_style() -> str:
    """Colours of code by the screen's own choice of light or dark."""
    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    plain = [line for line in dark.splitlines() if "background" not in line and line.startswith(".code .")]
    kept = [line for line in light.splitlines() if "background" not in line and line.startswith(".code .")]
    return "\n".join((*kept, "@media (prefers-color-scheme: dark) {", ".code span { color: inherit }", *plain, "}"))


def render(contents: Contents) -> str:
    """The page."""
    rows = part_rows(contents.graphs, contents.seconds, contents.bandwidth)
    files, left_out = listings(contents.captured, contents.events, rows)
    numbers = {graph.title: number for number, graph in enumerate(contents.captured)}
    texts, missing = _fitting(contents.texts)
    return _environment().get_template("page.html.j2").render(
        contents=contents,
        code_style=_code_style(),
        files=files,
        lines_left_out=left_out,
        effects=[(effect, found) for effect in Effect if (found := of(contents.events, effect))],
        rows=rows[:MOST_ROWS],
        rows_left_out=max(0, len(rows) - MOST_ROWS),
        timeline=timeline(contents.spans),
        cuts=cuts(contents.stages),
        why_cut=why_cut,
        texts=texts,
        texts_left_out=missing,
        color=lambda title: numbers.get(title, 0) % COLORS,
        anchors=_anchors(contents.events),
    )  # fmt: skip


def _anchors(events: Sequence[Event]) -> dict[Event, str]:
    return {event: f"event-{number}" for number, event in enumerate(events)}


def _fitting(texts: Sequence[Text]) -> tuple[list[Text], int]:
    """The texts that there is room for, and how many there is none for."""
    room, found = MOST_TEXT, []
    for text in texts:
        if len(text.text) <= room:
            room -= len(text.text)
            found.append(text)
    return found, len(texts) - len(found)


def render_profile(title: str, notes: Sequence[str], rows: Sequence[PartRow], other: float) -> str:
    """A page of measured kernels alone."""
    longest = max([row.seconds or 0.0 for row in rows] + [other, 1e-12])
    template = _environment().get_template("profile.html.j2")
    return template.render(title=title, notes=notes, rows=rows, other=other, longest=longest)
