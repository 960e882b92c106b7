"""How much memory an order of operations holds while each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchinductor.cost import value_of
from torchinductor.ir import Buffer, Bundle, Kernel
from torchinductor.lowering.context import Operation, ViewRef
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import last_uses
from torchinductor.scheduling.groups import writes_of


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


def _buffers(lowered: Lowered, operations: Sequence[Operation]) -> dict[str, Buffer]:
    """What is known of each buffer, also of those that planning a kernel has added."""
    known = dict(lowered.buffers)
    for operation in operations:
        if isinstance(operation, (Kernel, Bundle)):
            known.update((name, operation.buffers[name]) for name in operation.arguments)
    return known
