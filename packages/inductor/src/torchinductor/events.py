"""What compiling and running graphs writes to the ledger."""

from __future__ import annotations

from collections.abc import Callable

from primtorch.ledger import LEDGER, Effect, Event, Kind, Ledger, kinds, warn_of
from torchinductor.program import Expect

OPERATOR_BY_REFERENCE = Kind(
    "operator_by_reference",
    "an operator that has neither a lowering rule for its dtype nor an ATen overload: as PyTorch's kernels are, its"
    " reference in Python is called from within the compiled program",
    "use real numbers where complex ones are not needed",
    Effect.PLAIN,
)
MENDED_LAYOUT = Kind(
    "mended_layout",
    "an operator's result has other strides than those that its readers were compiled for, as they may depend on the"
    " library's version, on the machine, or on an operator's own code: the result is copied into those",
    "for an operator of your own let its fake implementation return the strides that it does; else report it",
    Effect.MENDED,
)
NO_CUDA_GRAPH = Kind(
    "no_cuda_graph",
    "the options ask for CUDA graphs, and this graph cannot be one: its kernels are launched one by one",
    "see the detail; keep all of the graph on one GPU, and write to no input",
    Effect.MENDED,
)
NOT_REPLAYED = Kind(
    "not_replayed",
    "a call of a program that is replayed as a CUDA graph launched its kernels one by one",
    "see the detail; drop results before the next call, and keep inputs where they are",
    Effect.PLAIN,
)

KINDS = kinds(OPERATOR_BY_REFERENCE, MENDED_LAYOUT, NO_CUDA_GRAPH, NOT_REPLAYED)

Mended = Callable[[Expect, str], None]


def tell_mended(ledger: Ledger, title: str) -> Mended:
    """What an executor calls with the `Expect` that did not hold, and with what was found in its place."""

    def tell(expected: Expect, detail: str) -> None:
        event = Event(MENDED_LAYOUT, title, f"{expected.source} {detail}", expected.frames)
        ledger.add(event)
        warn_of(event)

    return tell


def passed_by(ledger: Ledger, title: str, reason: str) -> None:
    """Tells of a call that ran without the CUDA graph there is, or could be."""
    ledger.add(Event(NOT_REPLAYED, title, reason))


# For a program that nobody gave a title.
TELL_PROCESS = tell_mended(LEDGER, "program")
