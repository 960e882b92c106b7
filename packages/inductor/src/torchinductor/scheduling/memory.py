"""How much memory an order of operations holds while each of them runs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

from torchinductor.cost import value_of
from torchinductor.ir import Buffer, Bundle, Kernel
from torchinductor.lowering.context import Operation, ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of, last_uses
from torchinductor.scheduling.groups import writes_of

UNSEEN = 1 << 20  # bytes more that no allocator's peak shows


def live_bytes(lowered: Lowered, operations: Sequence[Operation], given: bool = False) -> list[int]:
    """Bytes alive while each operation runs: of a buffer from its first write to its last use, of a result to the end.

    With `given` also what the graph is given, up to its last use, as if nobody else kept it. Views count as memory of
    their own, and sizes that are symbols as nothing: orders of the same operations are compared by this.
    """
    results = {value.buffer for value in lowered.outputs if isinstance(value, ViewRef)}
    begins: dict[str, int] = {}
    for place, operation in enumerate(operations):
        for name in writes_of(operation):
            begins.setdefault(name, place)
    change = [0] * (len(operations) + 1)
    known = _buffers(lowered, operations)
    for name, last in last_uses(operations).items():
        if not given and name not in begins:
            continue
        span = value_of(known[name].span, {}) or 0
        change[begins.get(name, 0)] += span * known[name].dtype.itemsize
        if name not in results and last < len(operations):
            change[last + 1] -= span * known[name].dtype.itemsize
    return list(accumulate(change[:-1]))


def held_early(lowered: Lowered, operations: Sequence[Operation], early: Set[str]) -> frozenset[str]:
    """Of buffers that are held from where their first part is computed, those without which the most that is held at
    once would be less: were they held from where somebody reads them."""
    held = live_bytes(lowered, operations)
    known = _buffers(lowered, operations)
    begins: dict[str, int] = {}
    read: dict[str, int] = {}
    for place, operation in enumerate(operations):
        for name in early & set(buffers_of(operation)):
            (begins if name in writes_of(operation) else read).setdefault(name, place)
    waiting = {name: range(begins[name], read.get(name, len(operations))) for name in early}
    apart: set[str] = set()
    while waiting:
        most = held.index(max(held))
        covering = [name for name, places in waiting.items() if most in places]
        if not covering:
            break
        for name in covering:
            size = (value_of(known[name].span, {}) or 0) * known[name].dtype.itemsize
            for place in waiting.pop(name):
                held[place] -= size
        apart.update(covering)
    return frozenset(apart)


def _buffers(lowered: Lowered, operations: Sequence[Operation]) -> dict[str, Buffer]:
    """What is known of each buffer, also of those that planning a kernel has added."""
    known = dict(lowered.buffers)
    for operation in operations:
        if isinstance(operation, (Kernel, Bundle)):
            known.update((name, operation.buffers[name]) for name in operation.arguments)
    return known
