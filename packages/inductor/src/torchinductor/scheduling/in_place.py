"""Kernels that write a result over an operand that nobody reads again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from primtorch.symbolic.expr import IntExpr
from torchinductor.emit import buffers_of, new_memory
from torchinductor.ir import Buffer, Kernel
from torchinductor.lowering.context import Operation, ViewRef
from torchinductor.lowering.graph import Lowered


def write_in_place(lowered: Lowered, operations: Sequence[Operation]) -> list[Operation]:
    """Gives kernels their `in_place` pairs. Where a gradient is summed up, or a value goes through a chain of pointwise
    kernels, one buffer is then enough."""
    last = {b: i for i, operation in enumerate(operations) for b in buffers_of(operation)}
    kept = {v.buffer for v in lowered.outputs if isinstance(v, ViewRef)}
    owned: set[str] = set()  # buffers whose memory is surely no other's
    result: list[Operation] = []
    for position, operation in enumerate(operations):
        if isinstance(operation, Kernel):
            fresh = [b for b in operation.writes if b not in owned]
            dying = [b for b in operation.reads if b in owned and last[b] == position and b not in kept]
            operation = replace(operation, in_place=_pairs(operation, fresh, dying))
        owned.update(new_memory(operation))
        result.append(operation)
    return result


def _pairs(kernel: Kernel, fresh: Sequence[str], dying: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if kernel.scatters:
        return ()
    free = list(dying)
    pairs: list[tuple[str, str]] = []
    for written in fresh:
        place = _only_place(kernel, written) if written not in kernel.local else None
        if place is None:
            continue
        found = next((b for b in free if _fits(kernel, written, b) and _read_before(kernel, b, written, place)), None)
        if found is not None:
            free.remove(found)
            pairs.append((written, found))
    return tuple(pairs)


def _fits(kernel: Kernel, written: str, read: str) -> bool:
    a, b = kernel.buffers[written], kernel.buffers[read]
    return (a.dtype, a.device) == (b.dtype, b.device) and _layout(a) == _layout(b)


def _layout(buffer: Buffer) -> list[tuple[IntExpr, IntExpr]]:
    return sorted(
        ((s, st) for s, st in zip(buffer.shape, buffer.strides, strict=True) if s.as_int() != 1),
        key=lambda p: str(p[1]),
    )


def _only_place(kernel: Kernel, buffer: str) -> IntExpr | None:
    """Where a buffer is stored to, if by one plain store that each iteration makes to another place."""
    stores = [
        (stage.kind, op)
        for stage in kernel.stages
        for op in stage.body.ops
        if op.name == "store" and op.attr[0] == buffer
    ]
    if len(stores) != 1:
        return None
    kind, op = stores[0]
    walked = kernel.axes if kind == "inner" else kernel.outer
    moves = op.attr[1].symbols()
    plain = op.attr[2] == "set" and len(op.args) == 1 and all(a.name in moves or a.size.as_int() == 1 for a in walked)
    return op.attr[1] if plain else None


def _read_before(kernel: Kernel, read: str, written: str, place: IntExpr) -> bool:
    """Whether every load of `read` is from `place`, and no later than the store of `written`."""
    stored = False
    for stage in kernel.stages:
        for op, buffer, index in stage.body.accesses():
            if buffer == read and (stored or op.name != "load" or index != place):
                return False
            stored |= buffer == written and op.name == "store"
    return True
