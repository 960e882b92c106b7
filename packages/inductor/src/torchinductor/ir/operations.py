"""The operations that a loop body consists of: one frozen record a kind, with what is known of it.

An operation's value has no name: others refer to it by its position in the body. `Op` is the union of all kinds, so
that a `match` over it, and the type checker, know what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, cast

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr, Symbol, intern_symbol
from torchinductor.indexing import rename
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

V = TypeVar("V")
NameT_co = TypeVar("NameT_co", covariant=True)
Renumber: TypeAlias = Callable[[int], int]
Result: TypeAlias = V | tuple[V, ...] | None
"""What an operation gives on a handler: a value, those of a `Scan`, or none."""


class Replay(Generic[V]):
    """One run of a body on a handler: the values so far, and what its variables stand for."""

    __slots__ = ("_indices", "_symbols", "handler", "values")

    def __init__(self, handler: OpsHandler[V], symbols: dict[Symbol, IntExpr]) -> None:
        self.handler, self._symbols = handler, symbols
        self._indices: dict[IntExpr, IntExpr] = {}  # in the variables of this run, as these are so far
        self.values: list[V] = []  # one for each operation so far; what has none is never asked for

    def index(self, expr: IntExpr) -> IntExpr:
        """An index expression of the body in the variables of this run."""
        if not self._symbols:
            return expr
        found = self._indices.get(expr)
        if found is None:
            found = self._indices[expr] = self.handler.simplify(rename(expr, self._symbols))
        return found

    def stands_for(self, name: str, expr: IntExpr) -> None:
        """Says what a variable of the body stands for from here on."""
        self._symbols[intern_symbol(name)] = expr
        self._indices.clear()

    def optional(self, value: int | None) -> V | None:
        """The value of a number, or None for None."""
        return None if value is None else self.values[value]


class Names(Protocol[NameT_co]):
    """What stands for the names of buffers, and of reductions."""

    def buffer(self, name: str) -> NameT_co:
        """In the place of a buffer's name."""

    def key(self, key: str) -> NameT_co:
        """In the place of a reduction's key."""


class Operation:
    """What all kinds have: the type of the value (of what is stored or reduced where there is none), and which fields
    are positions of the values that it takes (None for one that is not there) or indices."""

    __slots__ = ()
    TAKES: ClassVar[tuple[str, ...]] = ()
    EVALUATES: ClassVar[tuple[str, ...]] = ()
    dtype: torch.dtype

    @property
    def operands(self) -> tuple[int, ...]:
        """Positions of the values that it takes."""
        return tuple([at for name in self.TAKES if (at := getattr(self, name)) is not None])

    @property
    def indices(self) -> tuple[IntExpr, ...]:
        """The expressions over the axes that it evaluates."""
        return tuple([getattr(self, name) for name in self.EVALUATES])

    def renumbered(self, number: Renumber) -> Self:
        """The operation with operands that stand elsewhere."""
        moved = {name: number(at) for name in self.TAKES if (at := getattr(self, name)) is not None}
        return replace(self, **moved) if moved else self  # type: ignore[type-var]

    def unnamed(self, names: Names[int]) -> Hashable:
        """What it does, whatever the names of buffers and reductions are: with numbers in these names' place."""
        return self

    def renamed(self, names: Names[str]) -> Self:
        """The operation on buffers and reductions of other names."""
        return self

    def replay(self, run: Replay[V]) -> Result[V]:
        """Does it on the run's handler; returns what the handler gives."""
        raise NotImplementedError


@record
class Load(Operation):
    """The element of a buffer at an index; zero where the mask is false, and the memory is not touched there."""

    TAKES = ("mask",)
    EVALUATES = ("index",)
    dtype: torch.dtype
    buffer: str
    index: IntExpr
    mask: int | None = None

    def unnamed(self, names: Names[int]) -> Hashable:
        return (Load, self.dtype, names.buffer(self.buffer), self.index, self.mask)

    def renamed(self, names: Names[str]) -> Load:
        return Load(self.dtype, names.buffer(self.buffer), self.index, self.mask)

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.load(self.buffer, run.index(self.index), self.dtype, run.optional(self.mask))


@record
class Store(Operation):
    """Writes a value to a buffer, or combines it with what is there, where the mask (if any) is true."""

    TAKES = ("value", "mask")
    EVALUATES = ("index",)
    dtype: torch.dtype
    buffer: str
    index: IntExpr
    value: int
    mode: StoreMode = "set"
    mask: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the element is written whatever it was, in every iteration."""
        return self.mode == "set" and self.mask is None

    def unnamed(self, names: Names[int]) -> Hashable:
        buffer = names.buffer(self.buffer)
        return (Store, self.dtype, buffer, self.index, self.value, self.mode, self.mask)

    def renamed(self, names: Names[str]) -> Store:
        return Store(self.dtype, names.buffer(self.buffer), self.index, self.value, self.mode, self.mask)

    def replay(self, run: Replay[V]) -> Result[V]:
        value, mask = run.values[self.value], run.optional(self.mask)
        run.handler.store(self.buffer, run.index(self.index), value, self.mode, mask)
        return None


@record
class Constant(Operation):
    """A number of its dtype (float32 for what is computed in float32)."""

    dtype: torch.dtype
    value: bool | int | float

    def unnamed(self, names: Names[int]) -> Hashable:
        return (Constant, self.dtype, repr(self.value))  # 0.0 == -0.0, and nan != nan

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.constant(self.value, self.dtype)


@record
class IndexExpr(Operation):
    """An index as a value."""

    EVALUATES = ("expr",)
    dtype: torch.dtype
    expr: IntExpr

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.index_expr(run.index(self.expr), self.dtype)


@record
class Indirect(Operation):
    """A loaded integer as an index into a dimension of `size`: later indices name it by `symbol`."""

    TAKES = ("value",)
    dtype: torch.dtype
    value: int
    symbol: str
    size: IntExpr

    def replay(self, run: Replay[V]) -> Result[V]:
        run.stands_for(self.symbol, run.handler.indirect(run.values[self.value], self.size))
        return None


@record
class Require(Operation):
    """The value; the kernel meets the fault where the condition is false."""

    TAKES = ("value", "condition")
    dtype: torch.dtype
    value: int
    condition: int
    fault: Fault

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.require(run.values[self.value], run.values[self.condition], self.fault)


@record
class ToDtype(Operation):
    """A conversion from the type `source`."""

    TAKES = ("value",)
    dtype: torch.dtype
    value: int
    source: torch.dtype

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.to_dtype(run.values[self.value], self.dtype, self.source)


@record
class Bitcast(Operation):
    """The bits of a value of type `source` as another type of the same width."""

    TAKES = ("value",)
    dtype: torch.dtype
    value: int
    source: torch.dtype

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.bitcast(run.values[self.value], self.dtype, self.source)


@record
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
        """Whether it costs as much as many others: a transcendental function, say."""
        return ELEMENTWISE[self.op].heavy

    def renumbered(self, number: Renumber) -> Self:
        return replace(self, args=tuple([number(a) for a in self.args]))

    def replay(self, run: Replay[V]) -> Result[V]:
        values = run.values
        return run.handler.apply(self.op, *[values[a] for a in self.args])


@record
class RandomBits(Operation):
    """Word `index` of a stream of random numbers."""

    TAKES = ("seed",)
    EVALUATES = ("index",)
    dtype: torch.dtype
    seed: int
    index: IntExpr
    stream: int

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.random_bits(run.values[self.seed], run.index(self.index), self.stream)


@record
class Reduce(Operation):
    """Accumulates a value over the inner axes; later stages take the result by its key.

    argmax and argmin take the element's `position`; `sum_exp` and `moments` the key of the reduction that they are
    `about`.
    """

    TAKES = ("value", "position")
    dtype: torch.dtype
    kind: ReductionKind
    key: str
    value: int
    position: int | None = None
    about: str | None = None

    def unnamed(self, names: Names[int]) -> Hashable:
        about = None if self.about is None else names.key(self.about)
        return (Reduce, self.dtype, self.kind, names.key(self.key), self.value, self.position, about)

    def renamed(self, names: Names[str]) -> Reduce:
        about = None if self.about is None else names.key(self.about)
        return Reduce(self.dtype, self.kind, names.key(self.key), self.value, self.position, about)

    def replay(self, run: Replay[V]) -> Result[V]:
        value, position = run.values[self.value], run.optional(self.position)
        if self.about is None:
            run.handler.reduce(self.kind, self.key, value, position)
        else:
            run.handler.reduce(self.kind, self.key, value, position, self.about)
        return None


@record
class ReduceColumn(Operation):
    """Accumulates a value over the outer axes, for each point of the inner ones; stages of columns take the result by
    its key."""

    TAKES = ("value",)
    dtype: torch.dtype
    kind: ReductionKind
    key: str
    value: int

    def unnamed(self, names: Names[int]) -> Hashable:
        return (ReduceColumn, self.dtype, self.kind, names.key(self.key), self.value)

    def renamed(self, names: Names[str]) -> ReduceColumn:
        return ReduceColumn(self.dtype, self.kind, names.key(self.key), self.value)

    def replay(self, run: Replay[V]) -> Result[V]:
        run.handler.reduce_column(self.kind, self.key, run.values[self.value])
        return None


@record
class Carried(Operation):
    """The result of a reduction of an earlier stage."""

    dtype: torch.dtype
    key: str

    def unnamed(self, names: Names[int]) -> Hashable:
        return (Carried, self.dtype, names.key(self.key))

    def renamed(self, names: Names[str]) -> Carried:
        return Carried(self.dtype, names.key(self.key))

    def replay(self, run: Replay[V]) -> Result[V]:
        return run.handler.carried(self.key, self.dtype)


@record
class Scan(Operation):
    """The running combination along the inner axis. With a position it has two results, which `Part`s take."""

    TAKES = ("value", "position")
    dtype: torch.dtype
    kind: ScanKind
    value: int
    position: int | None = None

    def replay(self, run: Replay[V]) -> Result[V]:
        results = run.handler.scan(self.kind, run.values[self.value], run.optional(self.position))
        return results if len(results) > 1 else results[0]


@record
class Part(Operation):
    """One result of an operation with several."""

    TAKES = ("whole",)
    dtype: torch.dtype
    whole: int
    number: int

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
    | ReduceColumn
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


def closure_of(ops: Sequence[Op], roots: Sequence[int]) -> set[int]:
    """The same with what places are looked up by."""
    jumps = {op.symbol: p for p, op in enumerate(ops) if isinstance(op, Indirect)}
    keep: set[int] = set()
    while roots:
        keep |= slice_of(ops, roots)
        named = {jumps[s] for p in keep for e in ops[p].indices for s in e.symbols() if s in jumps} if jumps else ()
        roots = [p for p in named if p not in keep]
    return keep
