"""Rows of kernels and calls, and numbers as a person reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from torchcompile.journal import CompiledGraphRecord
from torchinductor import Part

NOT_COUNTED: Mapping[str, float] = MappingProxyType({})


@record
class PartRow:
    """A kernel or a call of a compiled graph.

    Attributes:
        seconds: of one run, where it was measured.
        share: of what the machine's memory allows: the time that a copy of as many bytes takes, through this time. More
            than one where the bytes came out of a cache.
        runs: in a call of what was measured.
    """

    label: str
    graph: str
    part: Part
    seconds: float | None
    share: float | None
    runs: float = 1.0

    @property
    def lines(self) -> str:
        """The user's lines that the part computes, each as file and line."""
        return ", ".join(short(frame) for frame in self.part.frames)

    @property
    def rate(self) -> float | None:
        """Bytes a second."""
        return self.part.moved / self.seconds if self.seconds else None

    @property
    def anchor(self) -> str:
        """The id of the part's place on the page."""
        return f"part-{self.label}"


def part_rows(
    graphs: Iterable[CompiledGraphRecord],
    seconds: Mapping[str, float],
    bandwidth: float | None,
    runs: Mapping[str, float] = NOT_COUNTED,
) -> list[PartRow]:
    """A row for each part, in the order in which they run."""
    rows = []
    for graph in graphs:
        for part in graph.parts:
            label = graph.label(part)
            took = seconds.get(label)
            share = part.moved / bandwidth / took if took and bandwidth else None
            rows.append(PartRow(label, f"{graph.title} {graph.kind}", part, took, share, runs.get(label, 1.0)))
    return rows


def short(frame: UserFrame) -> str:
    """`model.py:12`."""
    return f"{os.path.basename(frame.file)}:{frame.line}"


def bytes_text(count: float | None) -> str:
    """`1.5 MB`; powers of ten."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return ""


def seconds_text(seconds: float | None) -> str:
    """`12.3 µs`."""
    if seconds is None:
        return ""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def share_text(share: float | None) -> str:
    """`85 %`."""
    return "" if share is None else f"{share:.0%}".replace("%", " %")
