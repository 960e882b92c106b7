"""Operations under fusion: which run as one, and what each touches."""

from __future__ import annotations

from dataclasses import dataclass

from torchinductor.ir import Bundle, Kernel, Template
from torchinductor.lowering.context import ExternCall, Operation, ScalarRead, SeedCall


@dataclass(slots=True)
class Group:
    """Operations that run as one: a kernel, or one other operation."""

    number: int
    operation: Operation
    reads: set[str]
    writes: set[str]
    before: set[int]  # groups that must have run
    ancestors: int  # bit set of all groups before it, near and far


def reads_of(operation: Operation) -> frozenset[str]:
    """Buffers that an operation reads."""
    if isinstance(operation, Kernel):
        return operation.read_set
    match operation:
        case Template() | Bundle() | ExternCall():
            return frozenset(operation.reads)
        case SeedCall():
            return frozenset()
        case ScalarRead():
            return frozenset((operation.source.buffer,))


def writes_of(operation: Operation) -> frozenset[str]:
    """Buffers that an operation writes."""
    if isinstance(operation, Kernel):
        return operation.write_set
    match operation:
        case Template() | Bundle():
            return frozenset(operation.writes)
        case ExternCall():
            return frozenset(o for o in operation.outputs if o is not None)
        case SeedCall():
            return frozenset((operation.output,))
        case ScalarRead():
            return frozenset()
