"""When each stage of each compilation ran: lanes of bars on one axis, from which time with no compilation is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primtorch.frozen import record
from torchcompile.journal import Span
from torchcompile.page.tables import seconds_text

MOST_LANES = 200
_REST = 0.05  # seconds without a compilation that are cut out
_CUT = 0.02  # what is left of them, as a part of the whole

STAGES = (
    "capture", "trace", "partition", "lower", "schedule", "generate", "build", "emit", "prepare",
)  # fmt: skip


@record
class Bar:
    """A stage; places are parts of a thousand of the axis."""

    stage: str
    color: int
    left: float
    width: float
    told: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes by name, and where the axis leaves time out: (place, how much)."""

    lanes: Sequence[tuple[str, float, Sequence[Bar]]]
    cuts: Sequence[tuple[float, str]]
    busy: float
    stages: Sequence[tuple[str, int, str]]
    left_out: int = 0


def timeline(spans: Sequence[Span]) -> Timeline | None:
    """The lanes in the order in which they began; None where nothing was compiled."""
    spans = sorted(spans, key=lambda span: (span.began, span.ended))
    if not spans:
        return None
    pieces = _busy(spans)
    busy = sum(ended - began for began, ended in pieces) or 1e-9
    gap = busy * _CUT
    starts, place = [], 0.0
    for began, ended in pieces:
        starts.append(place)
        place += ended - began + gap
    whole = place - gap
    scale = 1000 / whole

    def at(moment: float) -> float:
        number = max(i for i, (began, _) in enumerate(pieces) if began <= moment or i == 0)
        return (starts[number] + moment - pieces[number][0]) * scale

    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    shown = [
        (name, sum(s.ended - s.began for s in found), [_bar(s, at) for s in found]) for name, found in lanes.items()
    ]
    cuts = [
        ((start - gap / 2) * scale, seconds_text(began - before))
        for start, (began, _), (_, before) in zip(starts[1:], pieces[1:], pieces, strict=False)
    ]
    totals = {
        stage: sum(s.ended - s.began for s in spans if s.stage == stage)
        for stage in dict.fromkeys(s.stage for s in spans)
    }
    stages = [(stage, _color(stage), seconds_text(total)) for stage, total in totals.items()]
    return Timeline(shown[:MOST_LANES], cuts, busy, stages, max(0, len(shown) - MOST_LANES))


def _busy(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The stretches of time in which something was compiled."""
    found: list[tuple[float, float]] = []
    for span in spans:
        if found and span.began <= found[-1][1] + _REST:
            found[-1] = found[-1][0], max(found[-1][1], span.ended)
        else:
            found.append((span.began, span.ended))
    return found


def _bar(span: Span, at: object) -> Bar:
    left, right = at(span.began), at(span.ended)  # type: ignore[operator]
    told = f"{span.lane}, {span.stage}: {seconds_text(span.ended - span.began)}"
    return Bar(span.stage, _color(span.stage), round(left, 2), round(max(right - left, 0.8), 2), told)


def _color(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
