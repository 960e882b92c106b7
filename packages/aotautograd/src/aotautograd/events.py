"""What compiling a backward writes to the ledger."""

from __future__ import annotations

from primtorch.higher_order import REGION_IN_PLACE
from primtorch.ledger import LEDGER, Effect, Event, Kind, kinds
from primtorch.schemas import UserFrame

BACKWARD_NOT_CUT = Kind(
    "backward_not_cut",
    "the gradients of some inputs were to be handed on before the others are computed (a reducer waits for them), and"
    " the backward stays one graph: all are handed on once it has ended, and nothing overlaps with it",
    "keep sizes that only the data tells (selections by a mask, nonzero) out of what both parts compute, or do without"
    " the overlap",
    Effect.MENDED,
)

MADE_FOR_OTHER_SIZES = Kind(
    "made_for_other_sizes",
    "what is made when a program asks for it first (a derivative of the backward, a backward) took something for"
    " granted of symbolic sizes that does not hold for those of a later call, and was made again for them: torch's"
    " formula of a second derivative of batch normalisation or of a convolution reads sizes as plain numbers",
    "call the program with few different sizes where it is differentiated twice, or pad them",
    Effect.RECOMPILE,
)

KINDS = kinds(BACKWARD_NOT_CUT, MADE_FOR_OTHER_SIZES, REGION_IN_PLACE)


def tell_not_cut(reason: str) -> None:
    """Tells of a backward that stays whole."""
    LEDGER.add(Event(BACKWARD_NOT_CUT, "backward", reason))


def tell_other_sizes(what: str, broken: str) -> None:
    """Tells of something that is made once more; `broken`: the guard that does not hold."""
    LEDGER.add(Event(MADE_FOR_OTHER_SIZES, what, f"it was made for {broken}" if broken else "its sizes are others"))


def tell_in_place(reason: str, frames: tuple[UserFrame, ...]) -> None:
    """Tells of a region's call that is traced as a part of the program around it."""
    LEDGER.add(Event(REGION_IN_PLACE, "nested_compile_region", reason, frames))
