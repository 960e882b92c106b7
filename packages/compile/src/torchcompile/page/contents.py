"""What the page is made of: records of the journal and events of the ledger, as they were when the report was asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primtorch.ledger import Event
from torchcompile.dumps import Text
from torchcompile.journal import CapturedGraphRecord, CompiledGraphRecord, PieceRecord, Span, StageRecord

IMPORTED = time.time()


@dataclass(frozen=True)
class Contents:
    """Everything that the page shows.

    Attributes:
        totals: (what, number) of the whole process.
        clean: whether nothing ran eagerly, twice or differently.
        seconds: what parts were measured to take, by label; those that were not measured are missing.
        bandwidth: bytes a second that the machine copies, where it was measured.
    """

    totals: Sequence[tuple[str, str]]
    clean: bool
    captured: Sequence[CapturedGraphRecord]
    graphs: Sequence[CompiledGraphRecord]
    events: Sequence[Event]
    stages: Sequence[StageRecord]
    pieces: Sequence[PieceRecord]
    spans: Sequence[Span]
    texts: Sequence[Text]
    seconds: Mapping[str, float]
    bandwidth: float | None
