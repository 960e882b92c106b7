"""Kernels that write a result over an operand that nobody reads again, or over the input that the result replaces.

The result takes the operand's memory where both span as many elements of one type, and where each element of the
operand is read at the place that the same iteration writes afterwards: no iteration then reads what another has
written, in whichever order they run. The shapes need not agree: a batch's gradient goes over the rows of a product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from torch._ops import OpOverload

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import number
from torchinductor.ir import Attention, Buffer, Bundle, Indirect, Kernel, Load, Require, Store, Template
from torchinductor.lowering.context import ExternCall, Flat, Operation, ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of, last_uses, lent_by, owned_by_graph


def write_in_place(lowered: Lowered, operations: Sequence[Operation]) -> list[Operation]:
    """Gives kernels their `in_place` pairs. Where a gradient is summed up, or a value goes through a chain of kernels,
    one buffer is then enough; the caller need not copy what an input is replaced by (running statistics) into it.

    An input is written over only where nothing can raise any more: a call that raises leaves inputs as they were."""
    last = last_uses(operations)
    kept = {v.buffer for v in lowered.outputs if isinstance(v, ViewRef)}
    lent = lent_by(operations)
    donated = lowered.donated - lent
    owned = (owned_by_graph(operations) | donated) - kept
    replaced = {made: given for made, given in lowered.updates.items() if given not in lent}
    sure = 1 + max((i for i, operation in enumerate(operations) if _may_raise(operation)), default=-1)
    begun = set(donated)

    def placed(loops: Kernel, position: int, others: frozenset[str] = frozenset()) -> Kernel:
        """`others` are touched by what runs beside the kernel."""
        fresh = [b for b in loops.writes if b not in begun and b not in loops.local]
        dying = [b for b in loops.reads if last[b] == position and b not in others]
        given = {made: replaced[made] for made in fresh if made in replaced and replaced[made] in dying}
        given = given if position >= sure else {}
        free = [b for b in dying if b in begun and b in owned]
        return replace(loops, in_place=_pairs(loops, fresh, free, given, donated))

    result: list[Operation] = []
    for position, operation in enumerate(operations):
        match operation:
            case Kernel():
                operation = placed(operation, position)
            case Template(loops=loops):
                operation = replace(operation, loops=placed(loops, position))
            case Bundle(parts=parts):
                users = Counter(b for part in parts for b in part.arguments)
                shared = frozenset(b for b, count in users.items() if count > 1)
                operation = Bundle(tuple([placed(part, position, shared) for part in parts]))
        begun.update(buffers_of(operation))
        result.append(operation)
    return result


# Operators that look at no value: what they refuse was refused when their shapes were propagated.
_BLIND = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "matmul", "odd_product", "convolution", "convolution_backward",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_to_copy", "clone", "copy_", "view", "cat",
))  # fmt: skip


def _may_raise(operation: Operation) -> bool:
    """Whether values can make it raise. A GPU's kernels cannot: there an assertion ends the process's context."""
    match operation:
        case Kernel(device=device):
            asked = (op for stage in operation.stages for op in stage.body.ops)
            return device.type == "cpu" and any(isinstance(op, (Indirect, Require)) for op in asked)
        case Attention():
            on_cpu = operation.device.type == "cpu"
            return on_cpu and any(True for function in operation.functions for _ in function.body.of(Indirect))
        case Template(loops=loops):
            return _may_raise(loops)
        case Bundle(parts=parts):
            return any(map(_may_raise, parts))
        case ExternCall():
            op = operation.op.op if isinstance(operation.op, Flat) else operation.op
            return not (
                isinstance(op, OpOverload) and op.namespace in ("aten", "torchinductor") and op._opname in _BLIND
            )
    return False


def _pairs(
    kernel: Kernel, fresh: Sequence[str], dying: Sequence[str], given: Mapping[str, str], donated: Set[str]
) -> tuple[tuple[str, str], ...]:
    """Pairs in the order of the stores: what an earlier store may go over, a later one may too. `given` says of a
    result which input it replaces."""
    if kernel.scatters:
        return ()
    free = list(dying)
    pairs: list[tuple[str, str]] = []
    for written in fresh:
        store = _only_store(kernel, written)
        if store is None:
            continue
        wanted = [given[written]] if written in given else free
        fits = (b for b in wanted if _fits(kernel.buffers[written], kernel.buffers[b], b in donated))
        found = next((b for b in fits if _read_before(kernel, b, store)), None)
        if found is not None:
            wanted.remove(found)
            pairs.append((written, found))
    return tuple(pairs)


def _fits(written: Buffer, read: Buffer, donated: bool) -> bool:
    """Whether a result has the length of an operand; of one that was donated its rows may have been made as a whole, as
    whoever claims it sees."""
    if (written.dtype, written.device) != (read.dtype, read.device):
        return False
    return written.span == read.span or (donated and written.span == _whole_rows(read))


def _whole_rows(buffer: Buffer) -> IntExpr | None:
    """The length of a buffer where the last of its rows is followed by what is between the others."""
    extents = [(size * stride).as_int() for size, stride in zip(buffer.shape, buffer.strides, strict=True)]
    known = [extent for extent in extents if extent is not None]
    return number(max(known)) if known and len(known) == len(extents) else None


class _Place(NamedTuple):
    stage: int
    position: int  # in the stage's body
    op: Store


def _only_store(kernel: Kernel, buffer: str) -> _Place | None:
    """The store to a buffer, if there is one, and each iteration makes it to another place."""
    stores = [
        _Place(at, position, op)
        for at, stage in enumerate(kernel.stages)
        for position, op in enumerate(stage.body.ops)
        if isinstance(op, Store) and op.buffer == buffer
    ]
    if len(stores) != 1:
        return None
    (store,) = stores
    walked = kernel.walked(kernel.stages[store.stage].kind)
    moves = store.op.index.symbols()
    apart = all(a.name in moves or a.size.as_int() == 1 for a in walked)
    return store if store.op.mode == "set" and apart else None


def _read_before(kernel: Kernel, read: str, store: _Place) -> bool:
    """Whether every load of `read` is from the place of the store, and earlier. Where a mask holds a store back, the
    place may be another iteration's: then it has to hold back the loads too."""
    place, mask, own = store.op.index, store.op.mask, (store.stage, store.position)
    for at, stage in enumerate(kernel.stages):
        for position, op in enumerate(stage.body.ops):
            if not isinstance(op, (Load, Store)) or op.buffer != read:
                continue
            if isinstance(op, Store) or op.index != place or (at, position) > own:
                return False
            if mask is not None and (at != store.stage or op.mask != mask):
                return False
    return True
