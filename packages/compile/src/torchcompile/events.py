"""What the wiring of the stages writes to the ledger."""

from __future__ import annotations

from primtorch.ledger import Effect, Kind, kinds

NO_COMPILER = Kind(
    "no_compiler",
    "there is no compiler that could build the graph's kernels: the graph runs by PyTorch's own",
    "install g++ or clang++, or name one by the environment variable CXX or options={'cxx': path}",
    Effect.FALLBACK,
)

KINDS = kinds(NO_COMPILER)
