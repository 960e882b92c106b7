"""How much memory an order of operations holds while each of them runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise

from torch._ops import OpOverload

from torchinductor.cost import value_of
from torchinductor.ir import Buffer, Bundle, Kernel
from torchinductor.lowering.context import ExternCall, Operation, ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.lowering.padding import FACTORS
from torchinductor.ownership import buffers_of, last_uses
from torchinductor.scheduling.groups import writes_of

UNSEEN = 1 << 20  # bytes more that no allocator's peak shows
_PASSES = 8  # through a program: as far as a product moves among others


class LiveBytes:
    """The memory of a graph's operations in one order or another, to compare orders by: views count as memory of their
    own, and sizes that are symbols as nothing."""

    def __init__(self, lowered: Lowered, operations: Iterable[Operation]) -> None:
        self._results = {value.buffer for value in lowered.outputs if isinstance(value, ViewRef)}
        self._bytes = {name: _bytes(buffer) for name, buffer in lowered.buffers.items()}
        for operation in operations:  # planning a kernel adds buffers
            if isinstance(operation, (Kernel, Bundle)):
                self._bytes.update(
                    (b, _bytes(operation.buffers[b])) for b in operation.arguments if b not in self._bytes
                )

    def of(self, name: str) -> int:
        """A buffer's bytes."""
        return self._bytes[name]

    def during(self, operations: Sequence[Operation], given: bool = False) -> list[int]:
        """Bytes alive while each operation runs: of a buffer from its first write to its last use, of a result to the
        end. With `given` also what the graph is given, up to its last use, as if nobody else kept it."""
        begins: dict[str, int] = {}
        for place, operation in enumerate(operations):
            for name in writes_of(operation):
                begins.setdefault(name, place)
        change = [0] * (len(operations) + 1)
        for name, last in last_uses(operations).items():
            if not given and name not in begins:
                continue
            change[begins.get(name, 0)] += self._bytes[name]
            if name not in self._results and last < len(operations):
                change[last + 1] -= self._bytes[name]
        return list(accumulate(change[:-1]))

    def held_early(self, operations: Sequence[Operation], early: Set[str]) -> frozenset[str]:
        """Of buffers that are held from where their first part is computed, those without which the most that is held
        at once would be less: were they held from where somebody reads them."""
        held = self.during(operations)
        begins: dict[str, int] = {}
        read: dict[str, int] = {}
        for place, operation in enumerate(operations):
            for name in early & set(buffers_of(operation)):
                (begins if name in writes_of(operation) else read).setdefault(name, place)
        # Not all are: a kernel that writes every part and is the only reader has the buffer to itself.
        waiting = {name: range(place, read.get(name, len(operations))) for name, place in begins.items()}
        apart: set[str] = set()
        while waiting:
            most = held.index(max(held))
            covering = [name for name, places in waiting.items() if most in places]
            if not covering:
                break
            for name in covering:
                for place in waiting.pop(name):
                    held[place] -= self._bytes[name]
            apart.update(covering)
        return frozenset(apart)


def products_in_turn(lowered: Lowered, operations: Sequence[Operation]) -> list[Operation]:
    """The operations with products beside each other, of which neither needs the other's result, in the order that
    holds less: the gradient of a weight, which frees what the forward kept, goes before that of the layer's input,
    which is as large as that."""
    live, ordered = LiveBytes(lowered, operations), list(operations)
    ours = {name for operation in operations for name in writes_of(operation)} | lowered.donated
    ours -= {value.buffer for value in lowered.outputs if isinstance(value, ViewRef)}
    last = last_uses(operations)

    def held(first: ExternCall, second: ExternCall, place: int) -> int:
        """The most that the two hold, above what is held before them."""
        own = {name for name in buffers_of(first) if name in ours and place <= last[name] <= place + 1}
        begun, other = (sum(map(live.of, writes_of(call))) for call in (first, second))
        return max(begun, begun - sum(map(live.of, own - set(buffers_of(second)))) + other)

    for _ in range(_PASSES):
        moved = False
        for place, (first, second) in enumerate(pairwise(tuple(ordered))):
            if ordered[place] is not first or not (_is_product(first) and _is_product(second)):
                continue
            assert isinstance(first, ExternCall) and isinstance(second, ExternCall)
            if not writes_of(first).isdisjoint(second.reads):
                continue
            if held(second, first, place) + UNSEEN < held(first, second, place):
                ordered[place : place + 2] = second, first
                last.update((name, place) for name in buffers_of(second) if last[name] == place + 1)
                last.update((name, place + 1) for name in buffers_of(first) if last[name] in (place, place + 1))
                moved = True
        if not moved:
            break
    return ordered


def _is_product(operation: Operation) -> bool:
    op = operation.op if isinstance(operation, ExternCall) else None
    return isinstance(op, OpOverload) and op.namespace == "aten" and op._opname in FACTORS


def _bytes(buffer: Buffer) -> int:
    return (value_of(buffer.span, {}) or 0) * buffer.dtype.itemsize
