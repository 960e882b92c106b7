"""Small kernels that need not wait for each other become one launch: the casts of parameters, the sums of a layer's
gradients.

A kernel waits until somebody needs it, and then takes along what follows and could run already. Both cost memory: what
waits keeps its operands, what runs early its results. So a bundle is of few kernels, and these of few bytes; and none
reaches over the moment at which the graph holds the most, where it would hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate

from torchinductor.cost import bytes_of
from torchinductor.ir import Bundle, Kernel
from torchinductor.lowering.context import ExternCall, Operation
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of
from torchinductor.scheduling.groups import writes_of
from torchinductor.scheduling.memory import UNSEEN, LiveBytes

KeyOf = Callable[[Kernel], "Hashable | None"]
"""Kernels of equal keys may share a launch; None for one that is launched alone."""

_MOST = 16  # kernels
_POINTERS = 128  # a launch's parameters have a limit of their own
_BYTES = 64 << 20  # that a bundle's kernels move together, and half of it one of them
_AHEAD = 48  # operations that are looked through for what could run already


@dataclass
class _Open:
    """Kernels that wait for a launch."""

    parts: list[Kernel] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    moved: int = 0

    def takes(self, kernel: Kernel, moved: int) -> bool:
        pointers = sum(len(part.arguments) for part in (*self.parts, kernel))
        fits = len(self.parts) < _MOST and pointers <= _POINTERS and self.moved + moved <= _BYTES
        return fits and not self.meets(kernel)

    def meets(self, operation: Operation) -> bool:
        """Whether an operation has to run after what waits."""
        return not self.written.isdisjoint(buffers_of(operation)) or not self.touched.isdisjoint(writes_of(operation))

    def add(self, kernel: Kernel, moved: int) -> None:
        self.parts.append(kernel)
        self.touched.update(kernel.arguments)
        self.written.update(kernel.writes)
        self.moved += moved


def bundle(lowered: Lowered, operations: Sequence[Operation], key_of: KeyOf) -> list[Operation]:
    """The operations with small kernels put together, in an order that is as good as the one given: no more memory is
    held at once."""
    small = {i: found for i, o in enumerate(operations) if (found := _small(o, key_of)) is not None}
    places = {operation.name: place for place, operation in enumerate(operations)}
    live, measures = LiveBytes(lowered, operations), (False, True)
    most = [max(live.during(operations, given), default=0) + UNSEEN for given in measures]
    while True:
        bundled = _Bundler(operations, small).run()
        above = {
            place
            for given, limit in zip(measures, most, strict=True)
            for place, held in enumerate(live.during(bundled, given))
            if held > limit
        }
        over = _moved_over(bundled, places, above) & small.keys()
        if not over:
            return bundled
        heavy = max(small[place][1] for place in over) / 2  # the largest stay where they were: few cost most
        small = {place: found for place, found in small.items() if place not in over or found[1] < heavy}


def _moved_over(bundled: Sequence[Operation], places: Mapping[str, int], moments: Set[int]) -> set[int]:
    """What runs in front of one of these moments and ran behind it, or the other way round, and what runs at one and
    ran earlier or later: places in the order before."""
    before = [places[operation.name] for operation in bundled]
    none = len(places)
    earliest = _behind([place if i in moments else none for i, place in enumerate(before)])
    latest = list(accumulate((place if i in moments else -1 for i, place in enumerate(before)), max))
    over = {
        places[part.name]
        for i, operation in enumerate(bundled)
        for part in (operation.parts if isinstance(operation, Bundle) else (operation,))
        if earliest[i] < places[part.name] or places[part.name] < latest[i]
    }
    passed, to_come = list(accumulate(before, max)), _behind(before)
    return over | {before[i] for i in moments if not passed[i] == before[i] == to_come[i]}


def _behind(places: Sequence[int]) -> list[int]:
    """The least of each place and all that follow."""
    return list(accumulate(reversed(places), min))[::-1]


class _Bundler:
    def __init__(self, operations: Sequence[Operation], small: Mapping[int, tuple[Hashable, int]]) -> None:
        self.operations = operations
        self.small = small
        self.taken: set[int] = set()
        self.open: dict[Hashable, _Open] = {}
        self.result: list[Operation] = []

    def run(self) -> list[Operation]:
        for position, operation in enumerate(self.operations):
            if position in self.taken:
                continue
            for key in [key for key, waiting in self.open.items() if waiting.meets(operation)]:
                self._close(key, position)
            if position in self.taken:  # it needs one that waited, and another bundle took it along
                continue
            found = self.small.get(position)
            if found is None:
                self.result.append(operation)
                continue
            key, moved = found
            assert isinstance(operation, Kernel)
            if not self.open.setdefault(key, _Open()).takes(operation, moved):
                self._close(key, position)
            self.open.setdefault(key, _Open()).add(operation, moved)
        for key in list(self.open):
            self._close(key, len(self.operations))
        return self.result

    def _close(self, key: Hashable, position: int) -> None:
        """Launches what waits, with what comes from `position` on and could run already."""
        waiting = self.open.pop(key)
        if not waiting.parts:
            return
        ahead: set[str] = set().union(*(w.touched for w in self.open.values()))  # others that wait come later
        changed: set[str] = set().union(*(w.written for w in self.open.values()))
        for place in range(position, min(position + _AHEAD, len(self.operations))):
            if place in self.taken:
                continue
            operation = self.operations[place]
            if isinstance(operation, ExternCall) and operation.effect:
                break
            found = self.small.get(place)
            free = changed.isdisjoint(buffers_of(operation)) and ahead.isdisjoint(writes_of(operation))
            if found is not None and found[0] == key and free and self._joins(waiting, operation, found[1]):
                self.taken.add(place)
                continue
            ahead.update(buffers_of(operation))
            changed.update(writes_of(operation))
        self.result.append(waiting.parts[0] if len(waiting.parts) == 1 else Bundle(tuple(waiting.parts)))

    @staticmethod
    def _joins(waiting: _Open, operation: Operation, moved: int) -> bool:
        if not isinstance(operation, Kernel) or not waiting.takes(operation, moved):
            return False
        waiting.add(operation, moved)
        return True


def _small(operation: Operation, key_of: KeyOf) -> tuple[Hashable, int] | None:
    """The key and the bytes of a kernel that may be bundled."""
    if not isinstance(operation, Kernel) or operation.scatters or operation.symbols or operation.in_place:
        return None
    if any(stage.body.faults for stage in operation.stages):  # what stops at an index that is wrong stays in its place
        return None
    moved = sum(bytes_of(operation).values())
    key = key_of(operation) if moved <= _BYTES // 2 else None
    return None if key is None else ((operation.device, key), moved)
