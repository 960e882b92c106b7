"""Decides which operations share a kernel and in which order kernels run."""
from __future__ import annotations
from collections.abc import Sequence
from torchinductor.lowering.context import Operation
from torchinductor.lowering.graph import Lowered
from torchinductor.schemas import InductorOptions

def schedule(lowered: Lowered, options: InductorOptions) -> Sequence[Operation]:
    return lowered.operations
