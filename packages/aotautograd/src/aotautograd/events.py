"""What compiling a backward writes to the ledger."""

from __future__ import annotations

from primtorch.ledger import LEDGER, Effect, Event, Kind, kinds

BACKWARD_NOT_CUT = Kind(
    "backward_not_cut",
    "the gradients of some inputs were to be handed on before the others are computed (a reducer waits for them), and"
    " the backward stays one graph: all are handed on once it has ended, and nothing overlaps with it",
    "keep sizes that only the data tells (selections by a mask, nonzero) out of what both parts compute, or do without"
    " the overlap",
    Effect.MENDED,
)

KINDS = kinds(BACKWARD_NOT_CUT)


def tell_not_cut(reason: str) -> None:
    """Tells of a backward that stays whole."""
    LEDGER.add(Event(BACKWARD_NOT_CUT, "backward", reason))
