"""How much memory an order of operations holds while each of them runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import accumulate

from torchinductor.cost import value_of
from torchinductor.ir import Buffer, Bundle, Kernel
from torchinductor.lowering.context import Operation, ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of, last_uses
from torchinductor.scheduling.groups import writes_of

UNSEEN = 1 << 20  # bytes more that no allocator's peak shows


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


def _bytes(buffer: Buffer) -> int:
    return (value_of(buffer.span, {}) or 0) * buffer.dtype.itemsize
