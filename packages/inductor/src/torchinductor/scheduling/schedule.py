"""Fusion: each operation joins the best kernel before it that it may join, and kernels are put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace

import torch

from primtorch.symbolic import FloatExpr
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import product
from torchinductor.ir import Kernel, Load, Stage, Store, Template, kernels_by_form, loops_of, verify_kernels
from torchinductor.lowering.context import ExternCall, Operation, ScalarRead, SeedCall, ViewRef, plain_traits
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import buffers_of
from torchinductor.scheduling.axes import aligned_along, by_rows, lies_inward, sizes_by_parts
from torchinductor.scheduling.columns import join_columns
from torchinductor.scheduling.finish import finish
from torchinductor.scheduling.groups import Group, reads_of, writes_of
from torchinductor.scheduling.memory import UNSEEN, LiveBytes, products_in_turn
from torchinductor.scheduling.unify import join
from torchinductor.schemas import DeviceTraits, InductorOptions

_LITTLE = 4  # times what else is read for a result


def schedule(
    lowered: Lowered, options: InductorOptions, traits_of: Callable[[torch.device], DeviceTraits] = plain_traits
) -> list[Operation]:
    """Live operations, fused, in an order in which everything is written before it is read. `traits_of` says what is
    cheap on an operation's device."""
    operations = products_in_turn(lowered, _ordered(lowered, options, traits_of))
    return [sizes_by_parts(o, lowered.multiples) if isinstance(o, Kernel) else o for o in operations]


def _ordered(
    lowered: Lowered, options: InductorOptions, traits_of: Callable[[torch.device], DeviceTraits]
) -> list[Operation]:
    outputs = {v.buffer for v in lowered.outputs if isinstance(v, ViewRef)}
    check_between_passes(options)(lowered.operations)
    numbers = _Numbers(lowered)
    operations = _results_early(_live(lowered.operations, outputs, numbers), outputs, numbers)
    finished, early = _fused(operations, outputs, _Fusion(options, numbers, traits_of))
    live = LiveBytes(lowered, finished)
    late = _of_inputs_alone(lowered, operations, outputs, live)
    if late:
        behind = [o for o in operations if not writes_of(o) <= late] + [o for o in operations if writes_of(o) <= late]
        other, begun = _fused(behind, outputs, _Fusion(options, numbers, traits_of, late=late))
        if _holds_less(live, other, finished):
            operations, finished, early = behind, other, begun
        else:
            late = frozenset()
    apart = live.held_early(finished, early) if early else frozenset()
    if not apart:
        return finished
    other, _ = _fused(operations, outputs, _Fusion(options, numbers, traits_of, apart, late))
    return other if _holds_less(live, other, finished) else finished


def _holds_less(live: LiveBytes, first: Sequence[Operation], second: Sequence[Operation]) -> bool:
    return max(live.during(first)) + UNSEEN < max(live.during(second))


def _of_inputs_alone(
    lowered: Lowered, operations: Sequence[Operation], outputs: set[str], live: LiveBytes
) -> frozenset[str]:
    """Results that no operation reads and that are made of inputs, which are alive anyway, and of little else: they can
    as well be computed behind everything, and be held from there on. A model that returns its embeddings gathers them
    again for its own layers."""
    alive = {item.buffer for item in lowered.inputs} - lowered.donated
    unread = _unread(operations, outputs)
    found: set[str] = set()
    for operation in operations:
        writes = writes_of(operation)
        if isinstance(operation, Kernel) and not operation.scatters and writes and writes <= unread:
            size, sources = (sum(map(live.of, names)) for names in (writes, reads_of(operation) - alive))
            if size >= UNSEEN and _LITTLE * sources <= size:
                found |= writes
    return frozenset(found)


def _unread(operations: Sequence[Operation], outputs: set[str]) -> set[str]:
    """The results that one operation writes as a whole, and none reads."""
    return outputs - _in_parts(operations) - {b for operation in operations for b in reads_of(operation)}


def _fused(operations: Sequence[Operation], outputs: set[str], fusion: _Fusion) -> tuple[list[Operation], set[str]]:
    """The operations fused and in order, and the buffers whose first part is written where it is computed."""
    check = check_between_passes(fusion.options)
    groups = fusion.run(operations)
    check(group.operation for group in groups)
    if fusion.options.fuse:
        groups = join_columns(groups, fusion.traits_of, fusion.with_columns)
    groups = _topological(groups)
    check(group.operation for group in groups)
    finished = _finished(groups, outputs, fusion.traits_of)
    check(finished)
    return finished, fusion.early


class _Numbers:
    """Numbers that only the data tells: which operations give them, and which need them, as if each were a buffer."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._given = {item.symbol for item in lowered.inputs}
        self._place = {operation.name: place for place, operation in enumerate(lowered.operations)}
        self._told: dict[str, int] = {}  # where each is given
        for place, operation in enumerate(lowered.operations):
            for name in self.given_by(operation):
                self._told.setdefault(name, place)
        self.returned = self._of(_symbols_in(tuple(lowered.outputs)))
        self._required = [self._of(condition.symbols()) for condition, _ in lowered.requirements]

    def given_by(self, operation: Operation) -> set[str]:
        if isinstance(operation, ScalarRead):
            return {f"<{operation.symbol}>"}
        if not isinstance(operation, ExternCall):
            return set()
        shapes = (self._lowered.buffers[b].shape for b in operation.outputs if b is not None)
        names = {str(size) for shape in shapes for size in shape if len(size.symbols()) == 1}
        known = self._given | self._lowered.definitions.keys()
        return {f"<{name}>" for name in names if name.isidentifier() and name not in known}

    def needed_by(self, operation: Operation) -> set[str]:
        if not self._told:
            return set()
        names: set[str] = set()
        if isinstance(operation, (Kernel, Template)):
            names |= set(loops_of(operation).symbols)
        elif isinstance(operation, ExternCall):
            names |= _symbols_in((operation.args, tuple(value for _, value in operation.kwargs)))
        buffers = (self._lowered.buffers[b] for b in writes_of(operation))
        names |= {name for buffer in buffers for size in buffer.shape for name in size.symbols()}
        return self._with_required(self._of(names), self._place[operation.name]) - self.given_by(operation)

    def _with_required(self, needed: set[str], place: int) -> set[str]:
        """What is needed, and what was given before it and is required together with it: sizes of one split, say, reach
        no further than the tensor if all of them are checked."""
        found, size = needed, -1
        while len(found) > size:
            size = len(found)
            together = set().union(*(names for names in self._required if names & found))
            found = found | {name for name in together if self._told[name] < place}
        return found

    def _of(self, names: Iterable[str]) -> set[str]:
        """The numbers of data that symbols are computed from."""
        return {f"<{name}>" for name in self._roots(names)} & self._told.keys()

    def _roots(self, names: Iterable[str]) -> set[str]:
        """The symbols that these are computed from in the end."""
        found: set[str] = set()
        for name in names:
            definition = self._lowered.definitions.get(name)
            found |= {name} if definition is None else self._roots({s for a in definition.args for s in a.symbols()})
        return found


def _symbols_in(argument: object) -> set[str]:
    if isinstance(argument, (IntExpr, FloatExpr)):
        return argument.symbols()
    if isinstance(argument, (tuple, list)):
        return {name for item in argument for name in _symbols_in(item)}
    if isinstance(argument, ViewRef):
        return _symbols_in((argument.shape, argument.strides, argument.offset))
    return set()


def check_between_passes(options: InductorOptions) -> Callable[[Iterable[Operation]], None]:
    """What is done with the operations that a pass gives to the next one: their kernels are held to their rules where
    the options ask for it."""
    return verify_kernels if options.verify else lambda operations: None


def _live(operations: Sequence[Operation], outputs: set[str], numbers: _Numbers) -> list[Operation]:
    """Without operations whose results nobody reads, which give no number that anything needs, and without loops of no
    iterations, which write nothing."""
    wanted = outputs | numbers.returned
    kept: list[Operation] = []
    for operation in reversed(operations):
        if isinstance(operation, Kernel) and any(a.size.as_int() == 0 and not a.inner for a in operation.axes):
            continue
        effect = isinstance(operation, (SeedCall, ScalarRead)) or (
            isinstance(operation, ExternCall)
            and (_draws(operation) or operation.effect or not any(o is not None for o in operation.outputs))
        )
        if effect or (writes_of(operation) | numbers.given_by(operation)) & wanted:
            kept.append(operation)
            wanted |= reads_of(operation) | numbers.needed_by(operation)
    return kept[::-1]


def _draws(operation: Operation) -> bool:
    """Whether it takes numbers from PyTorch's generator, which later draws see."""
    return isinstance(operation, ExternCall) and torch.Tag.nondeterministic_seeded in getattr(operation.op, "tags", ())


def _results_early(operations: Sequence[Operation], outputs: set[str], numbers: _Numbers) -> list[Operation]:
    """Moves what only makes a result of the graph to just behind what it reads, which can then be freed.

    Lowering computes a value where it is first stored, and many results are stored when the graph ends.
    """
    written: dict[str, int] = {}
    for i, operation in enumerate(operations):
        written.update(dict.fromkeys(writes_of(operation) | numbers.given_by(operation), i))
    movable = _unread(operations, outputs)
    moved: dict[int, list[Operation]] = {}
    for i, operation in enumerate(operations):
        writes = writes_of(operation)
        sources = [written[b] for b in reads_of(operation) | numbers.needed_by(operation) if b in written]
        if isinstance(operation, Kernel) and writes <= movable and sources and max(sources) < i:
            moved.setdefault(max(sources), []).append(operation)
        else:
            moved.setdefault(i, []).insert(0, operation)
    return [operation for i in range(len(operations)) for operation in moved.get(i, ())]


def _in_parts(operations: Iterable[Operation]) -> set[str]:
    """The buffers that several operations write, part by part."""
    written: set[str] = set()
    parts: set[str] = set()
    for operation in operations:
        parts |= writes_of(operation) & written
        written |= writes_of(operation)
    return parts


# They stand for state, as if it were a buffer: what changes it stays in its order.
_GENERATOR = "<generator>"
_OUTSIDE = "<outside>"  # whatever an operator of somebody's own may change


class _Fusion:
    """`waiting` is how many groups may come between one that reads a kernel's result and an operation that joins the
    kernel: the reader has to wait for it, and all that it would free stays in memory meanwhile.

    Of a buffer that is written part by part (a concatenation) the first part may be written by the kernel that computes
    it, and the whole buffer is held from then on: `early` says of which, and `apart` names those whose parts wait for
    the last one instead. Results in `late` are computed where they stand, by kernels of their own."""

    waiting = 6

    def __init__(
        self,
        options: InductorOptions,
        numbers: _Numbers,
        traits_of: Callable[[torch.device], DeviceTraits],
        apart: Set[str] = frozenset(),
        late: Set[str] = frozenset(),
    ) -> None:
        self.options = options
        self.numbers = numbers
        self.traits_of = traits_of
        self.apart = apart
        self.late = late
        self.early: set[str] = set()
        self.groups: list[Group] = []
        self.writers: dict[str, list[int]] = {}
        self.readers: dict[str, list[int]] = {}

    def run(self, operations: Sequence[Operation]) -> list[Group]:
        in_parts = _in_parts(operations)
        for operation in operations:
            reads = {*reads_of(operation), *self.numbers.needed_by(operation)}
            writes = {*writes_of(operation), *self.numbers.given_by(operation)}
            if isinstance(operation, SeedCall) or _draws(operation):
                writes.add(_GENERATOR)
            if isinstance(operation, ExternCall) and operation.effect:
                writes.update((_OUTSIDE, _GENERATOR))  # it may draw, and not say so
            before = {g for b in reads | writes for g in self.writers.get(b, ())}
            before |= {g for b in writes for g in self.readers.get(b, ())}
            alone = not self.options.fuse or not writes.isdisjoint(self.late)
            group = None if alone else self._fuse(operation, reads, writes, before)
            if group is not None:
                self.early |= {b for b in writes & in_parts if b not in self.writers}
            else:
                group = Group(len(self.groups), operation, reads, writes, before, self._all(before))
                self.groups.append(group)
            for b in reads:
                _add(self.readers, b, group.number)
            for b in writes:
                _add(self.writers, b, group.number)
        return self.groups

    def _all(self, before: Iterable[int]) -> int:
        bits = 0
        for g in before:
            bits |= (1 << g) | self.groups[g].ancestors
        return bits

    def _fuse(self, operation: Operation, reads: set[str], writes: set[str], before: set[int]) -> Group | None:
        if not isinstance(operation, Kernel) or operation.scatters:
            return None
        first = max((self.writers.get(b, [len(self.groups)])[0] for b in writes & self.apart), default=0)
        for number in self._candidates(operation, reads, before):
            if number < first:
                continue
            group = self.groups[number]
            rest = before - {number}
            if any(self.groups[d].ancestors >> number & 1 for d in rest):
                continue  # something between the two would have to run after the one and before the other
            if rest and len(self.groups) - self._first_waiting(group) > self.waiting:
                continue
            fused = self._joined(group, operation, reads, writes)
            if fused is None:
                continue
            group.operation = fused
            group.reads |= reads
            group.writes |= writes
            group.before |= rest
            self._put_behind(group, self._all(rest))
            return group
        return None

    def _put_behind(self, group: Group, ancestors: int) -> None:
        """A group runs behind others, and with it whatever runs behind it."""
        if not ancestors & ~group.ancestors:
            return
        group.ancestors |= ancestors
        this = 1 << group.number
        for other in self.groups:
            if other.ancestors & this:
                other.ancestors |= group.ancestors

    def _first_waiting(self, group: Group) -> int:
        """The first group behind this one that reads what it writes."""
        readers = (r for b in group.writes for r in self.readers.get(b, ()) if r > group.number)
        return min(readers, default=len(self.groups))

    def _candidates(self, operation: Kernel, reads: set[str], before: set[int]) -> list[int]:
        """Kernels that feed the operation, then kernels that read what it reads; the latest first."""
        feeding = sorted(before, reverse=True)
        size = _space(operation)
        beside = {g for b in reads for g in self.readers.get(b, ())[-8:]} - before
        near = [g for g in sorted(beside, reverse=True)[:6] if self._same_space(self.groups[g].operation, size)]
        return [g for g in (*feeding, *near) if self._open(self.groups[g].operation, operation)]

    def _same_space(self, other: Operation, size: IntExpr) -> bool:
        return isinstance(other, Kernel) and _space(other) == size

    def _open(self, other: Operation, operation: Kernel) -> bool:
        if isinstance(other, Template):  # takes what runs over its results, point by point
            return other.kind == "matmul" and not operation.inner and other.device == operation.device
        return isinstance(other, Kernel) and not other.scatters and other.device == operation.device

    def with_columns(self, group: Group, second: Group, operation: Kernel) -> Kernel | None:
        """A group's kernel with that of another, which is given turned round: its sums are of columns."""
        assert isinstance(group.operation, Kernel)
        if not self._may_join(group, operation, second.reads, second.writes):
            return None
        shared = _numbers_of(group.writes & second.reads, group.operation)
        return next(iter(_with_columns(group.operation, operation, shared)), None)

    def _may_join(self, group: Group, operation: Kernel, reads: set[str], writes: set[str]) -> bool:
        assert isinstance(group.operation, (Kernel, Template))
        first = loops_of(group.operation)
        if group.writes & writes or group.reads & writes:
            return False
        touched, most = (group.reads, group.writes, reads, writes), self.options.max_buffers
        if sum(map(len, touched)) > most and len(set().union(*touched)) > most:
            return False
        bodies = [stage.body for kernel in (first, operation) for stage in kernel.stages]
        ops, most = sum([len(body.ops) for body in bodies]), self.options.max_body
        # Two results of one operator have most of their bodies in common: the maximum of a window, and where it is.
        if ops > most and (
            ops > 4 * most or {*first.origins} != {*operation.origins} or not group.writes.isdisjoint(reads)
        ):
            return False
        return not any(body.scans for body in bodies)

    def _joined(self, group: Group, operation: Kernel, reads: set[str], writes: set[str]) -> Kernel | Template | None:
        assert isinstance(group.operation, (Kernel, Template))
        template = group.operation if isinstance(group.operation, Template) else None
        if not self._may_join(group, operation, reads, writes):
            return None
        first = loops_of(group.operation)
        shared = _numbers_of(group.writes & reads, first)
        if template is None:
            return next(iter(_one_kernel(first, operation, shared, self.traits_of(first.device))), None)
        loops = next(iter(_behind_product(first, operation, shared)), None)
        return None if loops is None else replace(template, loops=loops)


def _add(table: dict[str, list[int]], key: str, number: int) -> None:
    entries = table.setdefault(key, [])
    if number not in entries:
        entries.append(number)


def _space(kernel: Kernel) -> IntExpr:
    return product(a.size for a in kernel.axes)


def _in_orders(first: Kernel, second: Kernel, either: bool) -> Iterator[tuple[Kernel, Kernel]]:
    """Two kernels as they are; then with the loops of one as its result lies in memory, where these are in another
    order: a value that a product takes transposed is computed where it lies by rows."""
    yield first, second
    second_by_rows = by_rows(second)
    if second_by_rows is not None:
        yield first, second_by_rows
    first_by_rows = by_rows(first) if either else None
    if first_by_rows is not None:
        yield first_by_rows, second


def _numbers_of(buffers: Set[str], kernel: Kernel) -> tuple[int, ...]:
    """The numbers of these buffers in a kernel's form."""
    return tuple([number for number, name in enumerate(kernel.form.buffers) if name in buffers]) if buffers else ()


@kernels_by_form
def _one_kernel(first: Kernel, second: Kernel, shared: tuple[int, ...], traits: DeviceTraits) -> Sequence[Kernel]:
    """Two kernels as one, where they may be and it pays; `shared`: the numbers, in the first one's form, of what it
    writes for the second one."""
    for left, right in _in_orders(first, second, either=True):
        made, _ = _put_together(first, left, right, shared)
        if made is not None and _worth(first, second, made, traits):
            return (made,)
    return ()


@kernels_by_form
def _behind_product(first: Kernel, second: Kernel, shared: tuple[int, ...]) -> Sequence[Kernel]:
    """The loops of a product with those of a kernel that runs over its results, point by point."""
    for left, right in _in_orders(first, second, either=False):
        made, stages = _put_together(first, left, right, shared)
        if made is not None:
            return (made,) if all(stage.kind == "outer" for stage in stages) else ()
    return ()


@kernels_by_form
def _with_columns(rows: Kernel, sums: Kernel, shared: tuple[int, ...]) -> Sequence[Kernel]:
    """A kernel of rows with one of sums of columns, which is turned round."""
    made, _ = _put_together(rows, rows, sums, shared)
    return () if made is None else (made,)


def _put_together(
    first: Kernel, left: Kernel, right: Kernel, shared: tuple[int, ...]
) -> tuple[Kernel | None, tuple[Stage, ...]]:
    """Both kernels' stages under the first one's name, and the right one's, where they fit and it reads what `first`
    writes where that writes it."""
    joined = join(left, right)
    if joined is None:
        return None, ()
    axes, ours, theirs = joined
    made = replace(first, axes=axes, stages=(*ours, *theirs), origins=(*first.origins, *right.origins))
    names = {first.form.buffers[number] for number in shared}
    return (made if _sound(made, len(ours), names) else None), theirs


def _sound(kernel: Kernel, count: int, shared: set[str]) -> bool:
    """Whether the later stages read what the earlier ones wrote only at the very place where they wrote it."""
    if not shared:
        return True
    stored: dict[str, set[IntExpr]] = {}
    for stage in kernel.stages[:count]:
        for op in stage.body.of(Store):
            if op.buffer in shared:
                stored.setdefault(op.buffer, set()).add(op.index)
    for stage in kernel.stages[count:]:
        for load in stage.body.of(Load):
            if load.buffer in shared and stored[load.buffer] != {load.index}:
                return False
    return True


def _worth(first: Kernel, second: Kernel, made: Kernel, traits: DeviceTraits) -> bool:
    """A pointwise kernel that joins a reduction loses its own parallel loops: it must still have enough of them, and
    its rows be no worse to walk through than the reduction's. Of two reductions over as many points (the rows and the
    columns of a square matrix), each must go through memory as before."""
    if not made.inner:
        return True
    if first.inner and second.inner:
        ways = {lies_inward(first), lies_inward(second)}
        return not {True, False} <= ways
    outer = product(a.size for a in made.outer).as_int()
    total = product(a.size for a in made.axes).as_int()
    enough = outer is None or total is None or outer >= 64 or total <= 65536
    plain, reduction = (first, second) if second.inner else (second, first)
    return enough and not _slows_rows(plain, reduction, traits)


_VECTOR = 16  # bytes that a thread loads or stores at once


def _slows_rows(plain: Kernel, reduction: Kernel, traits: DeviceTraits) -> bool:
    """Whether a kernel that stores odd rows would have long aligned ones walked through number by number: on an
    H200 a loss of 8,192 tokens took 1.5 ms that stored the scores of 50,265 words beside; to copy these takes 0.5."""
    length = product(a.size for a in reduction.inner).as_int()
    if traits.held is None or length is None or length <= traits.held or not plain.axes:
        return False
    inner = reduction.inner[-1]
    return aligned_along(reduction, inner, _VECTOR) and not aligned_along(plain, plain.axes[-1], _VECTOR, stores=True)


def _topological(groups: Sequence[Group]) -> list[Group]:
    """Groups in dependency order, otherwise as they were made."""
    done: set[int] = set()
    ordered: list[Group] = []
    for root in groups:
        stack = [root.number]
        while stack:
            number = stack[-1]
            if number in done:
                stack.pop()
                continue
            waiting = sorted((b for b in groups[number].before if b not in done), reverse=True)
            if waiting:
                stack += waiting
                continue
            done.add(number)
            ordered.append(groups[number])
            stack.pop()
    return ordered


def _finished(
    groups: Sequence[Group], outputs: set[str], traits_of: Callable[[torch.device], DeviceTraits]
) -> list[Operation]:
    readers: dict[str, int] = {}
    for group in groups:
        for b in set(buffers_of(group.operation)):
            readers[b] = readers.get(b, 0) + 1
    result: list[Operation] = []
    for group in groups:
        operation = group.operation
        live = frozenset(b for b in group.writes if b in outputs or readers.get(b, 0) > 1)
        if isinstance(operation, Kernel):
            operation = finish(operation, live, traits_of(operation.device))
        elif isinstance(operation, Template) and operation.kind == "matmul":
            operation = replace(operation, loops=finish(operation.loops, live, traits_of(operation.device)))
        result.append(operation)
    return result
