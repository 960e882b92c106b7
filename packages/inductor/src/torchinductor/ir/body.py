"""Loop bodies: straight-line operations, recorded once and replayed on any handler."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from primtorch.frozen import remembering_record
from primtorch.once import cached_property
from primtorch.promotion import compute_dtype
from primtorch.symbolic.expr import IntExpr, Symbol
from torchinductor.indexing import Ranges, below, interval, number, simplify, variable
from torchinductor.ir.operations import (
    Apply,
    Bitcast,
    Carried,
    Constant,
    IndexExpr,
    Indirect,
    Load,
    Op,
    Operation,
    Part,
    RandomBits,
    Reduce,
    ReduceColumn,
    Replay,
    Require,
    Scan,
    Store,
    ToDtype,
)
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

V = TypeVar("V")
Kind = TypeVar("Kind", bound=Operation)


@remembering_record
class Body:
    """A recorded loop body: operations in order, without repetition."""

    ops: tuple[Op, ...]

    def replay(self, handler: OpsHandler[V], mapping: Mapping[Symbol, IntExpr] | None = None) -> list[V]:
        """Runs the operations on a handler, with variables replaced by `mapping`; returns what each gave, in order."""
        run = Replay(handler, dict(mapping) if mapping else {})
        keep = run.values.append
        for op in self.ops:
            keep(op.replay(run))  # type: ignore[arg-type]
        return run.values

    def of(self, kind: type[Kind]) -> Iterator[Kind]:
        """The operations of one kind, in order."""
        return (op for op in self.ops if type(op) is kind)  # type: ignore[misc]

    @cached_property
    def accesses(self) -> tuple[Load | Store, ...]:
        """Its loads and stores, in order."""
        return tuple(op for op in self.ops if isinstance(op, (Load, Store)))

    @cached_property
    def places(self) -> Mapping[tuple[str, IntExpr], frozenset[str]]:
        """The axes and sizes that each place depends on that it loads or stores, those of computed places included."""
        computed: dict[str, frozenset[str]] = {}
        depends: list[frozenset[str]] = []
        for op in self.ops if self.faults else ():
            names = {name for expr in op.indices for name in expr.symbols()}
            own = frozenset().union(*(computed.get(name, (name,)) for name in names))
            depends.append(own.union(*(depends[a] for a in op.operands)))
            if isinstance(op, Indirect):
                computed[op.symbol] = depends[-1]
        return {
            (op.buffer, op.index): frozenset().union(*(computed.get(name, (name,)) for name in op.index.symbols()))
            for op in self.accesses
        }

    @cached_property
    def reads(self) -> frozenset[str]:
        """Buffers that the body loads from, or combines with."""
        return frozenset(op.buffer for op in self.accesses if isinstance(op, Load) or op.mode != "set")

    @cached_property
    def writes(self) -> frozenset[str]:
        """Buffers that the body stores to, or combines with."""
        return frozenset(op.buffer for op in self.of(Store))

    @cached_property
    def indices(self) -> tuple[IntExpr, ...]:
        """Every expression over the axes that the body evaluates, once."""
        return tuple(dict.fromkeys(expr for op in self.ops for expr in op.indices))

    @cached_property
    def reduces(self) -> frozenset[str]:
        """Keys that the body accumulates."""
        return frozenset(op.key for op in self.ops if isinstance(op, (Reduce, ReduceColumn)))

    @cached_property
    def carries(self) -> frozenset[str]:
        """Keys that the body takes from earlier stages."""
        return frozenset(op.key for op in self.of(Carried))

    @cached_property
    def faults(self) -> bool:
        """Whether a run may meet a fault."""
        return any(isinstance(op, (Indirect, Require)) for op in self.ops)

    @cached_property
    def scans(self) -> bool:
        """Whether it has a running combination, so that the inner axis is walked in order."""
        return any(True for _ in self.of(Scan))


def _multiple(a: IntExpr, b: IntExpr) -> IntExpr | None:
    """Of a number: a product of two places is more than the loops' ranges say."""
    return a * b if a.as_int() is not None or b.as_int() is not None else None


def _share(a: IntExpr, b: IntExpr) -> IntExpr | None:
    """By a number: where each of several windows begins."""
    divisor = b.as_int()
    return a // b if divisor is not None and divisor > 0 else None


OF_PLACES: Mapping[str, Callable[..., IntExpr | None]] = {
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "abs": lambda a: a.maximum(-a),
    "maximum": IntExpr.maximum,
    "minimum": IntExpr.minimum,
    "mul": _multiple,
    "floor_div": _share,
}
"""What is computed of indices and is one again."""


class Recorder(OpsHandler[int]):
    """Records a body; values are ids. Repeated operations are shared, a load of what was just stored is that value."""

    def __init__(self, ranges: Ranges, first_symbol: int = 0) -> None:
        self.ranges = ranges
        self.ops: list[Op] = []
        self._seen: dict[Op, int] = {}
        self._stored: dict[tuple[str, IntExpr], tuple[int, torch.dtype]] = {}
        self._simplified: dict[IntExpr, IntExpr] = {}
        self._symbols = first_symbol
        self._constants: dict[tuple[torch.dtype, str], int] = {}
        self._indirect: dict[tuple[int, IntExpr], IntExpr] = {}

    def body(self) -> Body:
        """What was recorded."""
        return Body(tuple(self.ops))

    def record(self, op: Op) -> int:
        """The position of an operation without effects: that of an equal one, where there is one."""
        found = self._seen.get(op)
        if found is None:
            found = self._seen[op] = len(self.ops)
            self.ops.append(op)
        return found

    def dtype(self, value: int) -> torch.dtype:
        """The type that a value is computed in."""
        return compute_dtype(self.ops[value].dtype)

    def simplify(self, expr: IntExpr) -> IntExpr:
        found = self._simplified.get(expr)
        if found is None:
            found = self._simplified[expr] = simplify(expr, self.ranges)
        return found

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: int | None = None) -> int:
        index = self.simplify(index)
        stored = self._stored.get((buffer, index)) if mask is None else None
        if stored is not None:
            value, source = stored
            return self.to_dtype(value, dtype, source)
        return self.record(Load(dtype, buffer, index, mask))

    def store(self, buffer: str, index: IntExpr, value: int, mode: StoreMode = "set", mask: int | None = None) -> None:
        index = self.simplify(index)
        made = Store(self.dtype(value), buffer, index, value, mode, mask)
        self.ops.append(made)
        if made.plain:
            self._stored[buffer, index] = (value, made.dtype)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> int:
        dtype = compute_dtype(dtype)
        number = _constant_of(value, dtype)
        # Keyed by text, because 0.0 == -0.0 and nan != nan.
        found = self._constants.get((dtype, repr(number)))
        if found is None:
            found = self._constants[dtype, repr(number)] = len(self.ops)
            self.ops.append(Constant(dtype, number))
        return found

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> int:
        return self.record(IndexExpr(dtype, self.simplify(expr)))

    def within(self, value: int, size: IntExpr) -> IntExpr | None:
        """What a value is as an index, where that surely lies in a dimension of `size`: nobody has to look."""
        place = self.place(value)
        if place is None or below(place, size, self.ranges):
            return place
        most, found = size.as_int(), interval(place, self.ranges)
        return place if most is not None and found is not None and found[0] >= 0 and found[1] < most else None

    def place(self, value: int) -> IntExpr | None:
        """What a value is as an index, where it is computed from indices and numbers alone: of reflected borders."""
        match self.ops[value]:
            case IndexExpr(_, expr):
                return expr
            case Constant(dtype, constant) if dtype == torch.int64:
                return number(int(constant))
            case Apply(dtype, op, args) if dtype == torch.int64 and op in OF_PLACES:
                places = [place for arg in args if (place := self.place(arg)) is not None]
                return OF_PLACES[op](*places) if len(places) == len(args) else None
        return None

    def indirect(self, value: int, size: IntExpr) -> IntExpr:
        known = self.within(value, size)
        if known is not None:
            return known
        found = self._indirect.get((value, size))
        if found is None:
            name = f"j{self._symbols}"
            self._symbols += 1
            self.ops.append(Indirect(torch.int64, value, name, size))
            found = self._indirect[value, size] = variable(name)
        return found

    def lookup(self, index: IntExpr) -> int | None:
        """The operation that made an index of a value, if one did."""
        names = index.symbols()
        made = (p for p, op in enumerate(self.ops) if isinstance(op, Indirect) and op.symbol in names)
        return next(made, None)

    def to_dtype(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        have = self.dtype(value)
        if dtype == have:
            return value
        if self.ops[value].dtype == dtype:  # a bfloat16 load is a float32 value that is exact in bfloat16
            return value
        return self.record(ToDtype(dtype, value, have))

    def require(self, value: int, condition: int, fault: Fault) -> int:
        return self.record(Require(self.dtype(value), value, condition, fault))

    def bitcast(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        return self.record(Bitcast(dtype, value, source))

    def apply(self, op: str, *args: int) -> int:
        if op == "where" and self._zero_outside(*args):
            return args[1]
        match ELEMENTWISE[op].result:
            case "bool":
                dtype = torch.bool
            case "second":
                dtype = self.dtype(args[1])
            case "int64":
                dtype = torch.int64
            case _:
                dtype = self.dtype(args[0])
        return self.record(Apply(dtype, op, args))

    def _zero_outside(self, mask: int, value: int, other: int) -> bool:
        """Whether `value` is `other` wherever the mask does not hold: what is loaded under a mask is zero there."""
        loaded, constant = self.ops[value], self.ops[other]
        return (
            isinstance(loaded, Load)
            and loaded.mask == mask
            and isinstance(constant, Constant)
            and constant.dtype == self.dtype(value)
            and constant.value == 0
            and math.copysign(1, constant.value) > 0
        )

    def random_bits(self, seed: int, index: IntExpr, stream: int) -> int:
        return self.record(RandomBits(torch.int64, seed, self.simplify(index), stream))

    def reduce(
        self, kind: ReductionKind, key: str, value: int, position: int | None = None, about: str | None = None
    ) -> None:
        dtype = self.dtype(value) if position is None else torch.int64
        self.ops.append(Reduce(dtype, kind, key, value, position, about))

    def reduce_column(self, kind: ReductionKind, key: str, value: int) -> None:
        self.ops.append(ReduceColumn(self.dtype(value), kind, key, value))

    def carried(self, key: str, dtype: torch.dtype) -> int:
        return self.record(Carried(compute_dtype(dtype), key))

    def scan(self, kind: ScanKind, value: int, position: int | None = None) -> tuple[int, ...]:
        whole = self.record(Scan(self.dtype(value), kind, value, position))
        if position is None:
            return (whole,)
        return self.record(Part(self.dtype(value), whole, 0)), self.record(Part(torch.int64, whole, 1))


def _constant_of(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)
