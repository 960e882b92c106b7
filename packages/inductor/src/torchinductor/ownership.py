"""Which buffers an operation touches, and whose memory they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch

from primtorch.communication import begins, is_wait
from torchinductor.ir import Bundle, Kernel, Template
from torchinductor.lowering.context import ExternCall, Flat, Operation, ScalarRead, SeedCall


def buffers_of(operation: Operation) -> tuple[str, ...]:
    """Every buffer that an operation touches."""
    if isinstance(operation, Kernel):
        return operation.arguments
    match operation:
        case Template() | Bundle():
            return operation.arguments
        case ExternCall():
            return (*operation.reads, *(o for o in operation.outputs if o is not None))
        case SeedCall():
            return (operation.output,)
        case ScalarRead():
            return (operation.source.buffer,)


def last_uses(operations: Sequence[Operation]) -> dict[str, int]:
    """The place of the last operation that uses each buffer. What a collective reads and gives is in use until its
    results are waited for; where one of them is not, behind the last operation."""
    last = {b: i for i, operation in enumerate(operations) for b in buffers_of(operation)}
    waits = {b: i for i, operation in enumerate(operations) if _is_call(operation, is_wait) for b in operation.reads}
    for operation in operations:
        if _is_call(operation, begins):
            end = max((waits.get(o or "", len(operations)) for o in operation.outputs), default=len(operations))
            last.update((buffer, max(last[buffer], end)) for buffer in buffers_of(operation))
    return last


def _is_call(operation: Operation, kind: Callable[[object], bool]) -> TypeGuard[ExternCall]:
    if not isinstance(operation, ExternCall):
        return False
    return kind(operation.op.op if isinstance(operation.op, Flat) else operation.op)


def owned_by_graph(operations: Iterable[Operation]) -> frozenset[str]:
    """The buffers whose memory an operation made, beginning where the allocation does, and no other buffer looks at."""
    operations = list(operations)
    made: set[str] = set()
    for operation in operations:
        made.update(_new_memory(operation))
    return frozenset(made - lent_by(operations))


def lent_by(operations: Iterable[Operation]) -> frozenset[str]:
    """The buffers at whose memory the result of a call may look."""
    lent: set[str] = set()
    for operation in operations:
        if isinstance(operation, ExternCall) and _may_return_operand(operation.op):
            lent.update(operation.reads)
    return frozenset(lent)


def _new_memory(operation: Operation) -> tuple[str, ...]:
    match operation:
        case Kernel() | Template() | Bundle():
            return operation.writes
        case ExternCall() if _makes_memory(operation.op):
            return tuple(o for o in operation.outputs if o is not None)
        case _:
            return ()


def _makes_memory(op: object) -> bool:
    """Whether each result is an allocation of its own: several results may be parts of one."""
    if (
        not isinstance(op, torch._ops.OpOverload)
        or _may_return_operand(op)
        or any(str(r.type) != "Tensor" for r in op._schema.returns)
    ):
        return False
    return len(op._schema.returns) == 1 or op is torch.ops.aten.convolution_backward.default


def _may_return_operand(op: object) -> bool:
    """Whether a result may look at an operand's memory. Composite operators and plain functions do so unannounced."""
    return not isinstance(op, torch._ops.OpOverload) or _shares(op)


@functools.lru_cache(maxsize=4096)  # overloads are torch's to keep; graphs that are called are not
def _shares(op: torch._ops.OpOverload) -> bool:
    if "unsafe" in op._schema.name or is_wait(op) or any(r.alias_info is not None for r in op._schema.returns):
        return True
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))
