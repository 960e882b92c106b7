"""The min-cut partitioner: keeps the fewest bytes from which the backward can compute the rest cheaply, and what is
dearer to compute again than to keep."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence, Set

import torch
from torch import fx

from aotautograd.analysis import is_view
from aotautograd.max_flow import INFINITE, FlowNetwork
from aotautograd.partitioners import is_backward, is_symbol, is_tensor, mark_phases, nbytes, split, unsafe_inputs
from aotautograd.passes import has_effect, output_values
from aotautograd.schemas import JointGraph, Partition, Partitioner
from primtorch import prims
from primtorch.memory import memory_of, path_of_views, viewed

aten = torch.ops.aten

# Prims by family (see primtorch.prims) and ATen operators by packet that cost about as much as reading their result.
_CHEAP_FAMILIES = ("elementwise", "comparison", "ternary", "conversion", "creation", "view", "shape")
_CHEAP_PACKETS = frozenset(
    {
        aten._to_copy, aten.clone, aten.expand, aten.cat, aten.full, aten.full_like, aten.zeros, aten.zeros_like,
        aten.ones, aten.ones_like, aten.arange, aten.scalar_tensor, aten.constant_pad_nd, aten.copy, aten.where,
        aten.masked_fill, aten.tril, aten.triu, aten._unsafe_view, aten.empty, aten.empty_like, aten.repeat, aten.stack,
    }
)  # fmt: skip
# Families of prims that kernels are generated of, too, and that cost more.
_GENERATED_FAMILIES = frozenset({"reduction", "scan", "indexing", "window", "random"})
_REORDERS = frozenset({prims.copy_strided, aten.clone.default})
_LARGE_COPY = 10 << 20  # bytes: a GPU copies less in the time that a launch takes
# Of the bytes that eager's autograd keeps: at its peak a backward may hold more gradients than eager's.
_PART_OF_EAGERS = 31 / 32


def is_cheap(node: fx.Node) -> bool:
    """Pointwise operators, views, conversions and creation: to compute them again costs one pass over memory."""
    if node.op != "call_function":
        return node.op == "get_attr"
    if has_effect(node):
        return False
    target = node.target
    if target is operator.getitem or is_view(node):
        return True
    family = getattr(target, "family", None)
    if family is not None:
        return str(family).startswith(_CHEAP_FAMILIES)
    return (
        torch.Tag.pointwise in getattr(target, "tags", ()) or getattr(target, "overloadpacket", None) in _CHEAP_PACKETS
    )


def is_call(node: fx.Node) -> bool:
    """Operators that a library computes: they read their operands from memory, where generated kernels compute cheap
    operators as they read them."""
    if node.op != "call_function" or is_symbol(node) or is_cheap(node):
        return False
    family = getattr(node.target, "family", None)
    if family is not None:
        return family not in _GENERATED_FAMILIES
    return torch.Tag.reduction not in getattr(node.target, "tags", ())


def source_bytes(node: fx.Node) -> int:
    """Of the results of costly operators and the inputs from which cheap ones compute a value: at most as many as the
    value has. A mask is made of next to nothing."""
    most, total = nbytes(node), 0
    work, seen = [node], {node}
    while work and total < most:
        source = work.pop()
        made = source.args[0] if source.target is operator.getitem else source
        if source.op == "call_function" and isinstance(made, fx.Node) and is_cheap(made):
            read = source.all_input_nodes
            work += [n for n in read if n not in seen]
            seen.update(read)
        elif is_tensor(source):
            total += nbytes(source)
    return min(total, most)


def min_cut(memory_budget: float = 1.0) -> Partitioner:
    """A partitioner that keeps a minimum of bytes.

    With `memory_budget` 1 only cheap operators are computed again, and not where that moves more bytes than to keep
    their values, as long as eager's autograd keeps more: see `_read_by_calls` and `_long_sums`. Below 1 it also
    recomputes these, and then costly operators (never random draws), the ones with the largest results first, until at
    most that part of the bytes is kept; 0 keeps only inputs and random values.

    Raises:
        ValueError: a budget that is not between 0 and 1.
    """
    if not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget is a fraction between 0 and 1, not {memory_budget}")

    def partitioner(joint: JointGraph) -> Partition:
        mark_phases(joint)
        cuts = _Cuts(joint)
        given_up = cuts.fewest(0, len(cuts.held), cuts.limit, _held_memory)
        if memory_budget < 1:
            limit = int(memory_budget * _kept_bytes(cuts.saved(given_up)))
            given_up = cuts.fewest(given_up, len(cuts.held) + len(cuts.costly), limit, _kept_bytes)
        return split(joint, cuts.saved(given_up))

    partitioner.__name__ = f"min_cut({memory_budget:g})"
    return partitioner


class _Cuts:
    """The cuts of a joint graph by how many values are given up: first of `held`, then of `costly`.

    Attributes:
        held: values of cheap operators that are kept all the same, since to compute them again moves more bytes.
        costly: results of other operators.
        limit: as many bytes may be kept with some of `held`.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.values = _values_to_place(joint)
        costly = [n for n in self.values if not is_cheap(n) and n.op != "placeholder"]
        self.draws = {n for n in costly if has_effect(n)}
        self.costly = sorted((n for n in costly if not has_effect(n)), key=_result_bytes, reverse=True)
        read = sorted(_read_by_calls(joint), key=nbytes)
        self.network = _Network(joint, self.values)
        first = self.network.cut(set(costly), set(read))
        sums = sorted(_long_sums(joint, self.values, first), key=nbytes)
        self.held = [*sums, *read]
        self.found = {len(sums): first}
        self.limit = math.inf if joint.kept_bytes is None else _PART_OF_EAGERS * joint.kept_bytes

    def saved(self, given_up: int) -> list[fx.Node]:
        """What is kept."""
        if given_up not in self.found:
            costly = self.costly[max(0, given_up - len(self.held)) :]
            self.found[given_up] = self.network.cut({*self.draws, *costly}, set(self.held[given_up:]))
        return self.found[given_up]

    def fewest(self, low: int, high: int, limit: float, measure: Callable[[Sequence[fx.Node]], int]) -> int:
        """The fewest values to give up, between these bounds, to keep no more than `limit`; else all."""
        if measure(self.saved(low)) <= limit:
            return low
        while low < high:
            middle = (low + high) // 2
            if measure(self.saved(middle)) <= limit:
                high = middle
            else:
                low = middle + 1
        return low


def _read_by_calls(joint: JointGraph) -> list[fx.Node]:
    """Values of cheap operators that a call of the forward and one of the backward read.

    The forward writes such a value to memory in any case. To compute it again takes a kernel that reads its sources and
    writes it a second time, and eager keeps it, too. What is spread out of less, as masks are, is not worth its memory;
    nor is an input in another order, of which eager keeps the input alone, which is alive anyway.
    """
    paths: dict[fx.Node, list[tuple[fx.Node, ...]]] = defaultdict(list)  # to what calls read, by whose memory it is
    halves: dict[fx.Node, set[bool]] = defaultdict(set)
    for node in joint.module.graph.nodes:
        if is_call(node):
            for source in node.all_input_nodes:
                path = path_of_views(source)
                paths[path[0]].append(path)
                halves[path[0]].add(is_backward(node))
    in_both = (n for n, read in halves.items() if len(read) == 2 and n.op == "call_function" and not is_backward(n))
    cheap = (n for n in in_both if is_tensor(n) and is_cheap(n) and source_bytes(n) >= nbytes(n))
    unsafe = unsafe_inputs(joint)
    return [_last_in_common(paths[n]) for n in cheap if nbytes(n) < _LARGE_COPY or not _reorders_input(n, unsafe)]


def _reorders_input(node: fx.Node, unsafe: Set[fx.Node]) -> bool:
    """Whether a value is that of an input which eager keeps, as it lies or in another order."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        if not (node.target in _REORDERS or is_view(node)) or not isinstance(source, fx.Node):
            return False
        node = source
    return node.op == "placeholder" and node not in unsafe


def _last_in_common(paths: Sequence[tuple[fx.Node, ...]]) -> fx.Node:
    """Where the views of one memory part, as far as they show all of it and nothing else reads that. A reshape of the
    prims is the value that the reader has in memory, in the place of what it is a view of; one of ATen is a view of
    memory that is there."""
    last = paths[0][0]
    for node, *others in itertools.islice(zip(*paths, strict=False), 1, None):
        if {node} != {*others, *last.users, node} or is_view(node) or is_backward(node) or nbytes(node) != nbytes(last):
            break
        last = node
    return last


def _long_sums(joint: JointGraph, values: Sequence[fx.Node], saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Values that several places of the backward would compute again from more bytes than they have.

    Where each layer adds to a sum that goes through all of them, its value at a layer is computed from what all layers
    before it have added.
    """
    kept = set(saved)
    places = _places(joint, kept)
    leaves: list[fx.Node] = []
    behind: dict[fx.Node, int] = {}  # the leaves that a value is computed from, a bit each
    found: list[fx.Node] = []
    for node in values:
        is_leaf = node in kept or node.op == "placeholder"
        if not is_leaf:
            behind[node] = functools.reduce(operator.or_, (behind.get(n, 0) for n in node.all_input_nodes), 0)
            if _moves_less_kept(node, places.get(node, 0).bit_count(), leaves, behind[node]):
                found.append(node)
                is_leaf = True
        if is_leaf and is_tensor(node):
            behind[node] = 1 << len(leaves)
            leaves.append(node)
    return found


def _moves_less_kept(node: fx.Node, places: int, leaves: Sequence[fx.Node], behind: int) -> bool:
    """Whether to write a value and to read it in each place moves less than to compute it there from leaves."""
    if places < 2 or not (node.op == "call_function" and is_tensor(node) and is_cheap(node)) or viewed(node):
        return False
    kept, again = (places + 1) * nbytes(node), 0
    while behind and again <= kept:
        lowest = behind & -behind
        again += places * nbytes(leaves[lowest.bit_length() - 1])
        behind ^= lowest
    return kept < again


def _places(joint: JointGraph, kept: Set[fx.Node]) -> dict[fx.Node, int]:
    """For each value of the forward, where in the backward it would be computed again. A place is what kernels may
    compute between two calls: behind as many calls of the backward. It is a bit."""
    calls: dict[fx.Node, int] = {}  # before each node that depends on tangents
    first = joint.metadata.num_placeholders
    for i, node in enumerate(joint.module.graph.nodes):
        if node.op == "placeholder":
            if i >= first:
                calls[node] = 0
        elif before := [calls[n] + is_call(n) for n in node.all_input_nodes if n in calls]:
            calls[node] = max(before)
    places: dict[fx.Node, int] = defaultdict(int)
    for node in reversed(joint.module.graph.nodes):
        if node in kept or node.op == "output":
            continue
        mine = 1 << calls[node] if node in calls else places[node]
        for source in node.all_input_nodes:
            if source not in calls:
                places[source] |= mine
    return places


def _values_to_place(joint: JointGraph) -> list[fx.Node]:
    """Forward nodes with tensor results (or tuples of them), in order."""
    return [n for n in joint.module.graph.nodes if n.op != "output" and not is_backward(n) and not is_symbol(n)]


def _kept_bytes(saved: Sequence[fx.Node]) -> int:
    return sum(nbytes(n) for n in saved if n.op != "placeholder")


def _held_memory(saved: Sequence[fx.Node]) -> int:
    """The same, where a part of a memory may hold all of it."""
    parts: dict[fx.Node, int] = defaultdict(int)
    for node in saved:
        parts[memory_of(node)] += nbytes(node)
    return sum(max(nbytes(memory), size) for memory, size in parts.items() if memory.op != "placeholder")


def _result_bytes(node: fx.Node) -> int:
    if is_tensor(node):
        return nbytes(node)
    return sum(nbytes(u) for u in node.users if is_tensor(u) and u.target is operator.getitem)


class _Network:
    """The flow network of a joint graph's forward. Each value is an edge whose capacity is its size; what the backward
    reads leads to the sink."""

    def __init__(self, joint: JointGraph, values: Sequence[fx.Node]) -> None:
        self.values = values
        self.source, self.sink = 2 * len(values), 2 * len(values) + 1
        self.flow = FlowNetwork(2 * len(values) + 2)
        place = {n: 2 * i for i, n in enumerate(values)}
        outputs = output_values(joint.module.graph)[joint.num_forward_outputs :]
        gradients = {n for n in outputs if isinstance(n, fx.Node)}
        unsafe = unsafe_inputs(joint)
        for node, v in place.items():  # two edges for each, whose capacities depend on the cut, then all others
            self.flow.add(v, v + 1, _size(node, unsafe))
            self.flow.add(self.source, v, INFINITE if node.op == "placeholder" else 0)
        for node, v in place.items():
            for user in node.users:
                if user in place:
                    self.flow.add(v + 1, place[user], INFINITE)
            if node in gradients or any(is_backward(u) and u.op != "output" for u in node.users):
                self.flow.add(v + 1, self.sink, INFINITE)

    def cut(self, costly: Set[fx.Node], held: Set[fx.Node]) -> list[fx.Node]:
        """The nodes to keep, those in `held` among them."""
        flow = self.flow.unused()
        for i, node in enumerate(self.values):
            if node in held:
                flow.capacity[4 * i] = 0  # kept anyway
            if node in costly:
                flow.capacity[4 * i + 2] = INFINITE
        flow.run(self.source, self.sink)
        side = flow.sink_side(self.sink)
        return [n for i, n in enumerate(self.values) if 2 * i not in side and 2 * i + 1 in side]


def _size(node: fx.Node, unsafe: Set[fx.Node]) -> int:
    """What it takes to keep a value."""
    if node.op == "placeholder" and node not in unsafe:
        return 1  # alive anyway
    return 2 * nbytes(node) + 1 if is_tensor(node) and not is_view(node) else INFINITE
