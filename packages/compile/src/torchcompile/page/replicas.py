"""Where backwards were cut for DistributedDataParallel, drawn: what stages compute, and beside the next one what the
reducer sends. Lengths are bytes of gradients, not seconds, which nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchcompile.journal import StageRecord
from torchcompile.page.tables import bytes_text
from torchcompile.page.timeline import Bar

_COLUMNS = 32  # of the picture in a terminal
_NARROWEST = 4.0  # of a thousand


@dataclass(frozen=True, slots=True)
class Cut:
    """The backward of one graph: its stages, and its buckets on their way."""

    title: str
    computed: Sequence[Bar]
    sent: Sequence[Bar]


def cuts(stages: Sequence[StageRecord]) -> list[Cut]:
    """One for each graph, in the order in which they were cut. Modules that share a graph come one behind the other."""
    found = []
    for title in dict.fromkeys(stage.title for stage in stages):
        records = [stage for stage in stages if stage.title == title]
        last = max(1, records[-1].nbytes)  # nothing is computed while it is sent
        scale = 1000 / (sum(max(1, stage.nbytes) for stage in records) + last)
        computed, sent, place = [], [], 0.0
        for number, stage in enumerate(records):
            width = max(1, stage.nbytes) * scale
            names = ", ".join(stage.parameters)
            told = f"stage {stage.stage}: the gradients of {names}"
            computed.append(Bar("stage", number % 9, round(place, 2), round(max(width - 1, _NARROWEST), 2), told))
            place += width
            told = f"bucket {stage.bucket}: {bytes_text(stage.nbytes)} of gradients are sent"
            sent.append(Bar("bucket", number % 9, round(place, 2), round(max(width - 1, _NARROWEST), 2), told))
        found.append(Cut(title, computed, sent))
    return found


def why_cut(stage: StageRecord) -> str:
    """Why a stage ends where it does."""
    bucket = f"bucket {stage.bucket}" + (", as the reducer is expected to fill it," if stage.planned else "")
    many = f"{len(stage.parameters)} parameters" if len(stage.parameters) > 1 else "1 parameter"
    return f"{bucket} has all that it holds of this graph: {many}, {bytes_text(stage.nbytes)}"


def drawn(stages: Sequence[StageRecord]) -> list[str]:
    """For each stage, its place within the backward of its graph, in characters."""
    found = []
    for stage in stages:
        records = [other for other in stages if other.title == stage.title]
        whole = sum(max(1, other.nbytes) for other in records)
        before = sum(max(1, other.nbytes) for other in records[: records.index(stage)])
        begin, end = (round(_COLUMNS * part / whole) for part in (before, before + max(1, stage.nbytes)))
        end = max(end, begin + 1)
        found.append("." * begin + "#" * (end - begin) + "." * (_COLUMNS - end))
    return found
