"""The operations that a loop body consists of: one frozen record a kind, with what is known of it.

An operation's value has no name: others refer to it by its position in the body. `Op` is the union of all kinds, so
that a `match` over it, and the type checker, know what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

import torch

from primtorch.symbolic.expr import IntExpr, Symbol, intern_symbol
from torchinductor.indexing import rename
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

V = TypeVar("V")
Renumber: TypeAlias = Callable[[int], int]
Result: TypeAlias = V | tuple[V, ...] | None
"""What an operation gives on a handler: a value, those of a `Scan`, or none."""

NO_INDICES: tuple[IntExpr, ...] = ()


class Replay(Generic[V]):
    """One run of a body on a handler: the values so far, and what its variables stand for."""

    __slots__ = ("handler", "symbols", "values")

    def __init__(self, handler: OpsHandler[V], symbols: dict[Symbol, IntExpr]) -> None:
        self.handler, self.symbols = handler, symbols
        self.values: list[V] = []  # one for each operation so far; what has none is never asked for

    def index(self, expr: IntExpr) -> IntExpr:
        """An index expression of the body in the variables of this run."""
        return self.handler.simplify(rename(expr, self.symbols)) if self.symbols else expr

    def optional(self, value: int | None) -> V | None:
        return None if value is None else self.values[value]


class Operation:
    """What all kinds have: the type of the value (of what is stored or reduced where there is none), `operands`
    (positions of the values that it takes), `indices` (the expressions over the axes that it evaluates)."""

    __slots__ = ()
    dtype: torch.dtype

    @property
    def operands(self) -> tuple[int, ...]:
        """Positions of the values that it takes."""
        return ()

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        """The expressions over the axes that it evaluates."""
        return NO_INDICES

    def renumbered(self, number: Renumber) -> Op:
        """The operation with operands that stand elsewhere."""
        return self  # type: ignore[return-value]

    def replay(self, run: Replay[V]) -> Result[V]:
        """Does it on the run's handler; returns what the handler gives."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Load(Operation):
    """The element of a buffer at an index; zero where the mask is false, and the memory is not touched there."""

    dtype: torch.dtype
    buffer: str
    index: IntExpr
    mask: int | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        return () if self.mask is None else (self.mask,)

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        return (self.index,)

    def renumbered(self, number: Renumber) -> Op:
        return self if self.mask is None else Load(self.dtype, self.buffer, self.index, number(self.mask))

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.load(self.buffer, run.index(self.index), self.dtype, run.optional(self.mask))


@dataclass(frozen=True, slots=True)
class Store(Operation):
    """Writes a value to a buffer, or combines it with what is there, where the mask (if any) is true."""

    dtype: torch.dtype
    buffer: str
    index: IntExpr
    value: int
    mode: StoreMode = "set"
    mask: int | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,) if self.mask is None else (self.value, self.mask)

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        return (self.index,)

    @property
    def plain(self) -> bool:
        """Whether the element is written whatever it was, in every iteration."""
        return self.mode == "set" and self.mask is None

    def renumbered(self, number: Renumber) -> Op:
        mask = None if self.mask is None else number(self.mask)
        return Store(self.dtype, self.buffer, self.index, number(self.value), self.mode, mask)

    def replay(self, run: Replay[V]) -> Result[V]:
        value, mask = run.values[self.value], run.optional(self.mask)
        run.handler.store(self.buffer, run.index(self.index), value, self.mode, mask)
        return None


@dataclass(frozen=True, slots=True)
class Constant(Operation):
    """A number of its dtype (float32 for what is computed in float32)."""

    dtype: torch.dtype
    value: bool | int | float

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.constant(self.value, self.dtype)


@dataclass(frozen=True, slots=True)
class IndexExpr(Operation):
    """An index as a value."""

    dtype: torch.dtype
    expr: IntExpr

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        return (self.expr,)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.index_expr(run.index(self.expr), self.dtype)


@dataclass(frozen=True, slots=True)
class Indirect(Operation):
    """A loaded integer as an index into a dimension of `size`: later indices name it by `symbol`."""

    dtype: torch.dtype
    value: int
    symbol: str
    size: IntExpr

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,)

    def renumbered(self, number: Renumber) -> Op:
        return Indirect(self.dtype, number(self.value), self.symbol, self.size)

    def replay(self, run: Replay[V]) -> Result[V]:
        run.symbols[intern_symbol(self.symbol)] = run.handler.indirect(run.values[self.value], self.size)
        return None


@dataclass(frozen=True, slots=True)
class Require(Operation):
    """The value; the kernel meets the fault where the condition is false."""

    dtype: torch.dtype
    value: int
    condition: int
    fault: Fault

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value, self.condition)

    def renumbered(self, number: Renumber) -> Op:
        return Require(self.dtype, number(self.value), number(self.condition), self.fault)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.require(run.values[self.value], run.values[self.condition], self.fault)


@dataclass(frozen=True, slots=True)
class ToDtype(Operation):
    """A conversion from the type `source`."""

    dtype: torch.dtype
    value: int
    source: torch.dtype

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,)

    def renumbered(self, number: Renumber) -> Op:
        return ToDtype(self.dtype, number(self.value), self.source)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.to_dtype(run.values[self.value], self.dtype, self.source)


@dataclass(frozen=True, slots=True)
class Bitcast(Operation):
    """The bits of a value of type `source` as another type of the same width."""

    dtype: torch.dtype
    value: int
    source: torch.dtype

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,)

    def renumbered(self, number: Renumber) -> Op:
        return Bitcast(self.dtype, number(self.value), self.source)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.bitcast(run.values[self.value], self.dtype, self.source)


@dataclass(frozen=True, slots=True)
class Apply(Operation):
    """An elementwise operation of `ELEMENTWISE`."""

    dtype: torch.dtype
    op: str
    args: tuple[int, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return self.args

    @property
    def heavy(self) -> bool:
        return ELEMENTWISE[self.op].heavy

    def renumbered(self, number: Renumber) -> Op:
        return Apply(self.dtype, self.op, tuple([number(a) for a in self.args]))

    def replay(self, run: Replay[V]) -> Result[V]:
        values = run.values
        return run.handler.apply(self.op, *[values[a] for a in self.args])


@dataclass(frozen=True, slots=True)
class RandomBits(Operation):
    """Word `index` of a stream of random numbers."""

    dtype: torch.dtype
    seed: int
    index: IntExpr
    stream: int

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.seed,)

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        return (self.index,)

    def renumbered(self, number: Renumber) -> Op:
        return RandomBits(self.dtype, number(self.seed), self.index, self.stream)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.random_bits(run.values[self.seed], run.index(self.index), self.stream)


@dataclass(frozen=True, slots=True)
class Reduce(Operation):
    """Accumulates a value over the inner axes; later stages take the result by its key.

    argmax and argmin take the element's `position`; `sum_exp` and `moments` the key of the reduction that they are
    `about`.
    """

    dtype: torch.dtype
    kind: ReductionKind
    key: str
    value: int
    position: int | None = None
    about: str | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,) if self.position is None else (self.value, self.position)

    def renumbered(self, number: Renumber) -> Op:
        position = None if self.position is None else number(self.position)
        return Reduce(self.dtype, self.kind, self.key, number(self.value), position, self.about)

    def replay(self, run: Replay[V]) -> Result[V]:
        value, position = run.values[self.value], run.optional(self.position)
        if self.about is None:
            run.handler.reduce(self.kind, self.key, value, position)
        else:
            run.handler.reduce(self.kind, self.key, value, position, self.about)
        return None


@dataclass(frozen=True, slots=True)
class Carried(Operation):
    """The result of a reduction of an earlier stage."""

    dtype: torch.dtype
    key: str

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.carried(self.key, self.dtype)


@dataclass(frozen=True, slots=True)
class Scan(Operation):
    """The running combination along the inner axis. With a position it has two results, which `Part`s take."""

    dtype: torch.dtype
    kind: ScanKind
    value: int
    position: int | None = None

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.value,) if self.position is None else (self.value, self.position)

    def renumbered(self, number: Renumber) -> Op:
        position = None if self.position is None else number(self.position)
        return Scan(self.dtype, self.kind, number(self.value), position)

    def replay(self, run: Replay[V]) -> Result[V]:
        results = run.handler.scan(self.kind, run.values[self.value], run.optional(self.position))
        return results if len(results) > 1 else results[0]


@dataclass(frozen=True, slots=True)
class Part(Operation):
    """One result of an operation with several."""

    dtype: torch.dtype
    whole: int
    number: int

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.whole,)

    def renumbered(self, number: Renumber) -> Op:
        return Part(self.dtype, number(self.whole), self.number)

    def replay(self, run: Replay[V]) -> Result[V]:
        return cast("tuple[V, ...]", run.values[self.whole])[self.number]


Op: TypeAlias = (
    Load
    | Store
    | Constant
    | IndexExpr
    | Indirect
    | Require
    | ToDtype
    | Bitcast
    | Apply
    | RandomBits
    | Reduce
    | Carried
    | Scan
    | Part
)


def slice_of(ops: Sequence[Op], roots: Sequence[int]) -> set[int]:
    """The positions of the roots and of everything that they are computed from, by operands."""
    found: set[int] = set()
    pending = list(roots)
    while pending:
        at = pending.pop()
        if at not in found:
            found.add(at)
            pending += ops[at].operands
    return found
