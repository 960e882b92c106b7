"""What a captured graph says of values that come of no input: positions, what compares them, what is chosen by that.

Libraries make a mask of positions for each call that is captured, since they cannot look at one's elements then, where
they would see in eager that none is needed, or that it is the causal one. Here it is seen from how the mask was made.
A value is known by its position, as a sum of the index's parts times numbers; a condition as a list of such sums that
are to be at least zero. What no rule knows is unknown, which is always a right answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from primtorch.effects import writes_first
from primtorch.frozen import record

_OPERANDS = frozenset({"input", "self", "other", "condition", "mask", "value"})
Number: TypeAlias = int | float
_WHOLE = (torch.int64, torch.int32)  # of positions and sums of them, which do not wrap


@record
class Affine:
    """Numbers: at index i, base + sum(slope * i[d]). A float is one only where all slopes are zero."""

    base: Number
    slopes: tuple[int, ...]

    @property
    def constant(self) -> bool:
        """Whether all elements are one number."""
        return not any(self.slopes)

    def minus(self, other: Affine) -> Affine | None:
        """The difference, broadcast; None where it would not be exact."""
        rank = max(len(self.slopes), len(other.slopes))
        left, right = (_widened(value.slopes, rank) for value in (self, other))
        if not (isinstance(self.base, int) and isinstance(other.base, int)):
            return None
        return Affine(self.base - other.base, tuple(a - b for a, b in zip(left, right, strict=True)))

    def holds(self, shape: tuple[Any, ...]) -> bool | None:
        """Whether the values are at least zero at all indices, or at none; None where at some, or nobody knows."""
        if self.constant:
            return self.base >= 0
        sizes = [size if isinstance(size, int) else None for size in shape]
        ends = [None if size is None else slope * (size - 1) for slope, size in zip(self.slopes, sizes, strict=True)]
        least, most = self.base, self.base
        for slope, end in zip(self.slopes, ends, strict=True):
            least += min(0, end) if end is not None else 0 if slope >= 0 else -math.inf
            most += max(0, end) if end is not None else 0 if slope <= 0 else math.inf
        return True if least >= 0 else False if most < 0 else None


@record
class Condition:
    """Booleans: true where each of the sums is at least zero."""

    sums: tuple[Affine, ...]
    rank: int

    def of_rank(self, rank: int) -> Condition:
        """Broadcast to more dims."""
        return Condition(tuple(replace(one, slopes=_widened(one.slopes, rank)) for one in self.sums), rank)


@record
class Chosen:
    """Numbers: one where a condition holds, the other elsewhere."""

    where: Condition
    inside: Number
    outside: Number


Value: TypeAlias = Affine | Condition | Chosen
Rule: TypeAlias = Callable[["KnownValues", fx.Node, list[Any], dict[str, Any]], Value | None]


def _widened(slopes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(slopes)) + slopes


def _of_rank(value: Value, rank: int) -> Value:
    """A value broadcast to more dims."""
    if isinstance(value, Affine):
        return replace(value, slopes=_widened(value.slopes, rank))
    if isinstance(value, Chosen):
        return replace(value, where=value.where.of_rank(rank))
    return value.of_rank(rank)


def _indexed(value: Value, change: Callable[[Affine], Affine | None]) -> Value | None:
    """The value with its sums at other indices."""
    if isinstance(value, Affine):
        return change(value)
    if isinstance(value, Chosen):
        where = _indexed(value.where, change)
        return replace(value, where=where) if isinstance(where, Condition) else None
    sums = [change(one) for one in (*value.sums, Affine(0, (0,) * value.rank))]
    if any(one is None for one in sums):
        return None
    *changed, shape = [one for one in sums if one is not None]
    return Condition(tuple(changed), len(shape.slopes))


def always(rank: int) -> Condition:
    """What is true everywhere."""
    return Condition((), rank)


def never(rank: int) -> Condition:
    """What is true nowhere."""
    return Condition((Affine(-1, (0,) * rank),), rank)


def negated(value: Condition) -> Condition | None:
    """What is true elsewhere; None where that is no list of sums."""
    if not value.sums:
        return never(value.rank)
    if len(value.sums) > 1:
        return None
    (one,) = value.sums
    return Condition((Affine(-one.base - 1, tuple(-slope for slope in one.slopes)),), value.rank)


class KnownValues:
    """The known values of a graph's nodes, found as they are asked for.

    Attributes:
        written: what may be written to, and what may be the same memory as that: nothing is known of it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        written = [made for node in graph.nodes if _may_write(node) for made in node.all_input_nodes]
        self.written: set[fx.Node] = set()
        while written:
            node = written.pop()
            if node not in self.written:
                self.written.add(node)
                written += () if _name(node) in FRESH else node.all_input_nodes
        self._found: dict[fx.Node, Value | None] = dict.fromkeys(self.written)

    def of(self, node: object) -> Value | None:
        """What is known of a node, or of a number."""
        if isinstance(node, bool):
            return always(0) if node else never(0)
        if isinstance(node, (int, float)):
            return _number(node)
        if not isinstance(node, fx.Node):
            return None
        pending = [node]  # the nodes that one is made of come first: a graph may be deeper than Python's stack
        while pending:
            last = pending[-1]
            missing = [made for made in last.all_input_nodes if made not in self._found]
            if missing and last not in self._found and _rule(last) is not None:
                pending += missing
                continue
            pending.pop()
            if last not in self._found:
                self._found[last] = self._derived(last)
        return self._found[node]

    def _derived(self, node: fx.Node) -> Value | None:
        rule, made = _rule(node), node.meta.get("val")
        if rule is None or not isinstance(made, torch.Tensor) or made.requires_grad or _may_write(node):
            return None
        if not _OPERANDS.isdisjoint(node.kwargs):  # rules read operands by their places
            return None
        value = rule(self, node, list(node.args), dict(node.kwargs))
        return None if value is None else self._settled(_of_rank(value, made.dim()), made)

    def _settled(self, value: Value, made: torch.Tensor) -> Value:
        """The value without sums that hold everywhere; false everywhere where one holds nowhere."""
        if isinstance(value, Chosen):
            where = self._settled(value.where, made)
            assert isinstance(where, Condition)
            if not where.sums or where == never(where.rank):
                return Affine(value.outside if where.sums else value.inside, (0,) * where.rank)
            return replace(value, where=where)
        single = [isinstance(size, int) and size == 1 for size in made.shape]  # where nothing ever moves

        def at_rest(one: Affine) -> Affine:
            return replace(one, slopes=tuple(0 if s else slope for s, slope in zip(single, one.slopes, strict=True)))

        if isinstance(value, Affine):
            return at_rest(value)
        verdicts = [one.holds(tuple(made.shape)) for one in map(at_rest, value.sums)]
        if False in verdicts:
            return never(value.rank)
        sums = [at_rest(one) for one, holds in zip(value.sums, verdicts, strict=True) if holds is None]
        return Condition(tuple(dict.fromkeys(sums)), value.rank)

    def numbers(self, *nodes: object) -> list[Affine] | None:
        """What is known of all of these, where that is sums."""
        found = [self.of(node) for node in nodes]
        return [one for one in found if isinstance(one, Affine)] if all(isinstance(o, Affine) for o in found) else None

    def condition(self, node: object) -> Condition | None:
        """What is known of a boolean."""
        found = self.of(node)
        return found if isinstance(found, Condition) else None


# Where functions come from that write to an argument only by a name, a flag or an `out` that says so.
_TORCHS_OWN = frozenset({"torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator"})


def _may_write(node: fx.Node) -> bool:
    """Whether a node may write to what it is given."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    if "out" in node.kwargs or writes_first(node.target, node.args, node.kwargs):
        return True
    return node.op != "call_method" and getattr(node.target, "__module__", None) not in _TORCHS_OWN


def _number(value: Number) -> Affine | None:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**24:
        return Affine(int(value), ())
    return None if math.isnan(value) else Affine(value, ())


RULES: dict[str, Rule] = {}
# Functions whose results are memory of their own: nothing that is written to these is written to what they were given.
FRESH = frozenset(
    {"scaled_dot_product_attention", "linear", "matmul", "bmm", "baddbmm", "addmm", "conv1d", "conv2d", "embedding",
     "layer_norm", "softmax", "gelu", "add", "sub", "mul", "div", "truediv", "where", "masked_fill", "cumsum", "diff",
     "ge", "le", "gt", "lt", "eq", "ne", "and_", "or_", "invert", "logical_and", "logical_or", "logical_not", "tril",
     "triu"}
)  # fmt: skip


def _name(node: fx.Node) -> str:
    """Of the method, or of the function of torch's or Python's, that a node calls; "" of what is somebody else's."""
    if node.op == "call_method":
        return str(node.target)
    own = not isinstance(node.target, OpOverload) and getattr(node.target, "__module__", None) in _TORCHS_OWN
    return getattr(node.target, "__name__", "") if node.op == "call_function" and own else ""


def _rule(node: fx.Node) -> Rule | None:
    """The rule of what a node calls: a tensor's method, a function of torch or an operator, by its name."""
    return RULES.get(_name(node))


def _rules(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# -- what is made ----------------------------------------------------------------------------------------------------
@_rules("arange")
def _arange(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    start, step = kwargs.get("start", 0), kwargs.get("step", args[2] if len(args) > 2 else 1)
    if len(args) > 1 or (args and "end" in kwargs):
        start = args[0]
    whole = type(start) is int and type(step) is int and node.meta["val"].dtype in _WHOLE
    return Affine(start, (step,)) if whole else None


def _full_of(place: int) -> Rule:
    def rule(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        value = args[place] if len(args) > place else kwargs.get("fill_value")
        return _as(known.of(value), node.meta["val"].dtype)

    return rule


def _filled(value: int) -> Rule:
    return lambda known, node, args, kwargs: _as(_number(value), node.meta["val"].dtype)


_rules("full", "full_like")(_full_of(1))
_rules("new_full")(_full_of(2))
_rules("ones", "ones_like", "new_ones")(_filled(1))
_rules("zeros", "zeros_like", "new_zeros")(_filled(0))


def _as(value: Value | None, dtype: torch.dtype) -> Value | None:
    """A value as another dtype, where that keeps it."""
    if dtype is torch.bool:
        if isinstance(value, Affine) and value.constant:
            return always(len(value.slopes)) if value.base else never(len(value.slopes))
        if isinstance(value, Chosen) and bool(value.inside) != bool(value.outside):
            return value.where if value.inside else negated(value.where)
        return value if isinstance(value, Condition) else None
    if isinstance(value, Condition):
        alike = _are_all_one(value)
        value = Affine(0 if value.sums else 1, (0,) * value.rank) if alike else Chosen(value, 1, 0)
    if dtype in _WHOLE:
        return value if isinstance(value, Affine) and isinstance(value.base, int) else _exact(value, dtype)
    return _exact(value, dtype)


def _exact(value: Value | None, dtype: torch.dtype) -> Value | None:
    numbers: tuple[Number, ...] = (value.base,) if isinstance(value, Affine) and value.constant else ()
    numbers = (value.inside, value.outside) if isinstance(value, Chosen) else numbers
    return value if numbers and all(_fits(one, dtype) for one in numbers) else None


def _fits(one: Number, dtype: torch.dtype) -> bool:
    """Whether a dtype has a number."""
    if dtype.is_floating_point:
        return math.isinf(one) or torch.tensor(one, dtype=dtype).item() == one
    return dtype in _WHOLE and isinstance(one, int) and torch.iinfo(dtype).min <= one <= torch.iinfo(dtype).max


@_rules(
    "to",
    "type",
    "type_as",
    "long",
    "int",
    "float",
    "double",
    "half",
    "bfloat16",
    "bool",
    "contiguous",
    "clone",
    "detach",
)
def _converted(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    return _as(known.of(args[0]), node.meta["val"].dtype)


# -- arithmetic ------------------------------------------------------------------------------------------------------
def _whole(node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation of two is on integers that do not wrap, and has no further arguments."""
    return len(args) == 2 and not kwargs and node.meta["val"].dtype in _WHOLE


@_rules("sub")
def _sub(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    both = known.numbers(*args) if _whole(node, args, kwargs) else None
    return both[0].minus(both[1]) if both else None


@_rules("add")
def _add(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    both = known.numbers(*args) if _whole(node, args, kwargs) else None
    negative = Affine(0, ()).minus(both[1]) if both else None
    return both[0].minus(negative) if both and negative else None


@_rules("diff")
def _diff(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    """Of numbered positions the step, if what stands in front of the first is as far from it."""
    if len(args) != 1 or set(kwargs) - {"dim", "prepend"}:
        return None
    whole, dim = known.of(args[0]), kwargs.get("dim", -1)
    if not isinstance(whole, Affine) or not isinstance(whole.base, int) or node.meta["val"].dtype is torch.bool:
        return None
    dim %= len(whole.slopes)
    step = Affine(whole.slopes[dim], (0,) * len(whole.slopes))
    if "prepend" not in kwargs:
        return step
    before, given = known.of(kwargs["prepend"]), kwargs["prepend"].meta["val"]
    first = replace(whole, slopes=tuple(0 if d == dim else slope for d, slope in enumerate(whole.slopes)))
    away = first.minus(before) if isinstance(before, Affine) and given.shape[dim] == 1 else None
    return step if away == step else None


@_rules("cumsum")
def _cumsum(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    """Of nothing but zeros, which stay zeros."""
    value = _as(known.of(args[0]), torch.int64)
    return value if isinstance(value, Affine) and value.constant and value.base == 0 else None


# -- conditions ------------------------------------------------------------------------------------------------------
def _compared(*signs: int, least: int = 0) -> Rule:
    """True where sign * (left - right) >= least, for each sign."""

    def rule(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        both = known.numbers(*args[:2])
        if both is None:
            return _compared_choice(known, args) if len(signs) > 1 else None
        sums = []
        for sign in signs:
            away = both[0].minus(both[1]) if sign > 0 else both[1].minus(both[0])
            if away is None:
                return None
            sums.append(replace(away, base=away.base - least))
        return Condition(tuple(sums), len(sums[0].slopes))

    return rule


def _compared_choice(known: KnownValues, args: list[Any]) -> Value | None:
    """Whether what was chosen equals a number."""
    chosen, number = known.of(args[0]), known.of(args[1])
    if not (isinstance(chosen, Chosen) and isinstance(number, Affine) and number.constant):
        return None
    inside, outside = chosen.inside == number.base, chosen.outside == number.base
    if inside == outside:
        return always(chosen.where.rank) if inside else never(chosen.where.rank)
    return chosen.where if inside else negated(chosen.where)


_rules("ge", "__ge__")(_compared(1))
_rules("le", "__le__")(_compared(-1))
_rules("gt", "__gt__")(_compared(1, least=1))
_rules("lt", "__lt__")(_compared(-1, least=1))
_rules("eq", "__eq__")(_compared(1, -1))


@_rules("ne", "__ne__")
def _ne(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    equal = RULES["eq"](known, node, args, kwargs)
    if not isinstance(equal, Condition):
        return None
    both = known.numbers(*args[:2])
    away = both[0].minus(both[1]) if both else None
    if away is None:
        return negated(equal)
    return (always(equal.rank) if away.base else never(equal.rank)) if away.constant else None


@_rules("and_", "__and__", "bitwise_and", "logical_and")
def _and(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    left, right = (known.condition(arg) for arg in args[:2])
    if left is None or right is None:
        return None
    rank = max(left.rank, right.rank)
    return Condition((*left.of_rank(rank).sums, *right.of_rank(rank).sums), rank)


@_rules("or_", "__or__", "bitwise_or", "logical_or")
def _or(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    left, right = (known.condition(arg) for arg in args[:2])
    if left is None or right is None:
        return None
    if not left.sums or right == never(right.rank):
        return left
    return right if not right.sums or left == never(left.rank) else None


@_rules("invert", "__invert__", "logical_not", "bitwise_not")
def _not(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    found = known.condition(args[0])
    return negated(found) if found is not None else None


@_rules("tril", "triu")
def _triangle(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    value = known.of(args[0])
    rank = node.meta["val"].dim()
    if type(diagonal) is not int:
        return None
    lower = str(getattr(node.target, "__name__", node.target)) == "tril"
    sign = 1 if lower else -1
    where = Condition((Affine(sign * diagonal, (*(0,) * (rank - 2), sign, -sign)),), rank)
    if isinstance(value, Condition) and not value.sums:
        return where
    return Chosen(where, value.base, 0) if isinstance(value, Affine) and value.constant else None


def _choice(known: KnownValues, of: tuple[object, object, object], dtype: torch.dtype) -> Value | None:
    """By a condition between two, which become of this dtype."""
    where, first, second = known.condition(of[0]), known.of(of[1]), known.of(of[2])
    if where is None:
        return None
    if _are_all_one(where):
        return _as(second if where.sums else first, dtype)
    if not all(isinstance(one, Affine) and one.constant for one in (first, second)):
        return None
    assert isinstance(first, Affine)
    assert isinstance(second, Affine)
    return _exact(Chosen(where, first.base, second.base), dtype)


@_rules("where")
def _where(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    return _choice(known, (args[0], args[1], args[2]), node.meta["val"].dtype) if len(args) == 3 else None


@_rules("masked_fill")
def _masked_fill(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    return _choice(known, (args[1], args[2], args[0]), node.meta["val"].dtype) if len(args) == 3 else None


# -- views -----------------------------------------------------------------------------------------------------------
@_rules("expand", "expand_as", "broadcast_to")
def _same(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    return known.of(args[0])


def _are_all_one(value: Value) -> bool:
    return (isinstance(value, Affine) and value.constant) or value in (
        (always(value.rank), never(value.rank)) if isinstance(value, Condition) else ()
    )


def _one_for_all(value: Value, rank: int) -> Value:
    if isinstance(value, Affine):
        return Affine(value.base, (0,) * rank)
    assert isinstance(value, Condition)
    return never(rank) if value.sums else always(rank)


@_rules("view", "reshape", "flatten", "squeeze", "select", "index_select", "gather", "repeat", "unflatten")
def _rearranged(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    """Of elements that are all one: wherever they are taken from."""
    value, made = known.of(args[0]), node.meta["val"]
    if value is None or not _are_all_one(value) or args[0].meta["val"].dtype != made.dtype:  # a view as another dtype
        return None
    return _one_for_all(value, made.dim())


@_rules("unsqueeze")
def _unsqueeze(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    value, rank = known.of(args[0]), node.meta["val"].dim()
    if type(dim) is not int or value is None:
        return None
    place = dim % rank
    return _indexed(value, lambda one: replace(one, slopes=(*one.slopes[:place], 0, *one.slopes[place:])))


@_rules("transpose", "swapaxes", "swapdims")
def _transpose(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    value, rank = known.of(args[0]), node.meta["val"].dim()
    if value is None or len(args) != 3 or kwargs:
        return None
    order = list(range(rank))
    a, b = args[1] % rank, args[2] % rank
    order[a], order[b] = b, a
    return _indexed(value, lambda one: replace(one, slopes=tuple(one.slopes[d] for d in order)))


@_rules("getitem", "__getitem__")
def _getitem(known: KnownValues, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
    value, source = known.of(args[0]), args[0]
    if value is None or not isinstance(source, fx.Node):
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if _are_all_one(value):
        return _one_for_all(value, node.meta["val"].dim())
    if any(not isinstance(part, (int, slice, EllipsisType, type(None))) or isinstance(part, bool) for part in index):
        return None
    if sum(part is ... for part in index) > 1:
        return None
    taken = sum(part is not None and part is not ... for part in index)
    rest = source.meta["val"].dim() - taken
    parts: list[Any] = []
    for part in index if ... in index else (*index, ...):
        parts += [slice(None)] * rest if part is ... else [part]
    return _indexed(value, lambda one: _at(one, parts))


def _at(value: Affine, parts: list[Any]) -> Affine | None:
    """The sum where it is indexed by these, a part for each dim and each new one."""
    base, slopes, kept = value.base, iter(value.slopes), []
    for part in parts:
        if part is None:
            kept.append(0)
            continue
        slope = next(slopes)
        first, step = (part, 1) if isinstance(part, int) else (part.start or 0, part.step or 1)
        if type(first) is not int or type(step) is not int or ((first < 0 or step < 0) and slope):
            return None  # from the end, which may be anywhere
        base += slope * first
        if isinstance(part, slice):
            kept.append(slope * step)
    return Affine(base, tuple(kept))
