"""What the wiring of the stages writes to the ledger."""

from __future__ import annotations

from primtorch.ledger import Effect, Kind, kinds

NO_COMPILER = Kind(
    "no_compiler",
    "there is no compiler that could build the graph's kernels: the graph runs by PyTorch's own",
    "install g++ or clang++, or name one by the environment variable CXX or options={'cxx': path}",
    Effect.FALLBACK,
)
OPERATOR_BY_REFERENCE = Kind(
    "operator_by_reference",
    "the back end has neither a rule nor an ATen overload for an operator: its reference in Python is called",
    "give the operator a lowering rule",
    Effect.FALLBACK,
)
NO_CUDA_GRAPH = Kind(
    "no_cuda_graph",
    "the options ask for CUDA graphs, and this graph cannot be one: its kernels are launched one by one",
    "see the detail; keep all of the graph on one GPU, and write to no input",
    Effect.MENDED,
)

KINDS = kinds(NO_COMPILER, OPERATOR_BY_REFERENCE, NO_CUDA_GRAPH)
