"""Loop IR: buffers, recorded bodies, and kernels made of stages over one iteration space.

A `Kernel` iterates over `axes`. Axes that are not `inner` are its outer, parallel loops; the inner ones are looped over
inside each outer iteration (a reduction's or a scan's loops). Its `stages` run in order, each for one outer iteration:

* an "outer" stage runs its body once (pointwise over the outer axes);
* an "inner" stage runs its body for every point of the inner axes; `reduce` in it accumulates, and the result is
  `carried` to the stages after it.

So softmax is: inner(reduce amax), inner(reduce sum of exp), inner(store); layer norm the same with outer stages for
what is stored a row. A pointwise kernel is one outer stage. Loads in a stage see the stores of the stages before it in
the same outer iteration, and of the same stage at the same point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from primtorch.symbolic.expr import IntExpr, Symbol, intern_symbol
from torchinductor.errors import InductorError
from torchinductor.indexing import ONE, ZERO, Ranges, dot, number, rename, simplify, variable
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, PrintHandler, ReductionKind, ScanKind, StoreMode

V = TypeVar("V")

REDUCED_PRECISION = frozenset({torch.bfloat16, torch.float16})


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of `dtype` are computed with."""
    return torch.float32 if dtype in REDUCED_PRECISION else dtype


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor's memory: name, and the layout that kernels index it by."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[IntExpr, ...]
    strides: tuple[IntExpr, ...]

    @property
    def span(self) -> IntExpr:
        """Elements from the first to the last one: more than there are where rows are padded."""
        if any(size.as_int() == 0 for size in self.shape):
            return ZERO
        return sum(((size - ONE) * stride for size, stride in zip(self.shape, self.strides, strict=True)), ONE)

    def __str__(self) -> str:
        sizes, strides = ", ".join(map(str, self.shape)), ", ".join(map(str, self.strides))
        return f"{self.name}: {str(self.dtype)[6:]}[{sizes}] strides ({strides})"


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop over 0 <= name < size."""

    name: str
    size: IntExpr
    inner: bool = False

    @property
    def var(self) -> IntExpr:
        return variable(self.name)


class Op(NamedTuple):
    """One recorded operation; its value's id is its position in the body. `attr` is what is not a value:

    load (buffer, index), store (buffer, index, mode), constant value, index_expr expr, indirect (symbol, size),
    to_dtype/bitcast source dtype, apply op name, require fault, random_bits (index, stream), reduce (kind, key),
    carried key, scan kind, part number.
    """

    name: str
    dtype: torch.dtype
    args: tuple[int, ...]
    attr: Any


@dataclass(frozen=True)
class Body:
    """A recorded loop body: straight-line operations in order, without repetition."""

    ops: tuple[Op, ...]

    def replay(self, handler: OpsHandler[V], mapping: Mapping[Symbol, IntExpr] | None = None) -> list[V | None]:
        """Runs the operations on a handler, with variables replaced by `mapping`; returns each operation's value."""
        symbols = dict(mapping) if mapping else {}
        values: list[Any] = []
        for op in self.ops:
            values.append(_replay(op, values, handler, symbols))
        return values

    def accesses(self) -> Iterator[tuple[Op, str, IntExpr]]:
        """(op, buffer, index) of each load and store."""
        for op in self.ops:
            if op.name in ("load", "store"):
                yield op, op.attr[0], op.attr[1]

    @cached_property
    def reads(self) -> frozenset[str]:
        return frozenset(
            op.attr[0] for op in self.ops if op.name == "load" or (op.name == "store" and op.attr[2] != "set")
        )

    @cached_property
    def writes(self) -> frozenset[str]:
        return frozenset(op.attr[0] for op in self.ops if op.name == "store")

    @cached_property
    def reduces(self) -> frozenset[str]:
        """Keys that the body accumulates."""
        return frozenset(op.attr[1] for op in self.ops if op.name == "reduce")

    @cached_property
    def carries(self) -> frozenset[str]:
        """Keys that the body takes from earlier stages."""
        return frozenset(op.attr for op in self.ops if op.name == "carried")

    @cached_property
    def faults(self) -> bool:
        """Whether a run may meet a fault."""
        return any(op.name in ("indirect", "require") for op in self.ops)

    @cached_property
    def scans(self) -> bool:
        return any(op.name == "scan" for op in self.ops)


def _replay(op: Op, values: list[Any], handler: OpsHandler[V], symbols: dict[Symbol, IntExpr]) -> Any:
    name, dtype, args, attr = op
    match name:
        case "apply":
            return handler.apply(attr, *[values[a] for a in args])
        case "load":
            index = handler.simplify(rename(attr[1], symbols)) if symbols else attr[1]
            return handler.load(attr[0], index, dtype, values[args[0]] if args else None)
        case "store":
            index = handler.simplify(rename(attr[1], symbols)) if symbols else attr[1]
            return handler.store(attr[0], index, values[args[0]], attr[2], values[args[1]] if len(args) > 1 else None)
        case "constant":
            return handler.constant(attr, dtype)
        case "to_dtype":
            return handler.to_dtype(values[args[0]], dtype, attr)
        case "index_expr":
            return handler.index_expr(handler.simplify(rename(attr, symbols)) if symbols else attr, dtype)
        case "indirect":
            symbols[intern_symbol(attr[0])] = handler.indirect(values[args[0]], attr[1])
            return None
        case "require":
            return handler.require(values[args[0]], values[args[1]], attr)
        case "carried":
            return handler.carried(attr, dtype)
        case "reduce":
            return handler.reduce(attr[0], attr[1], *[values[a] for a in args])
        case "bitcast":
            return handler.bitcast(values[args[0]], dtype, attr)
        case "random_bits":
            index = handler.simplify(rename(attr[0], symbols)) if symbols else attr[0]
            return handler.random_bits(values[args[0]], index, attr[1])
        case "scan":
            results = handler.scan(attr, *[values[a] for a in args])
            return results if len(results) > 1 else results[0]
        case "part":
            return values[args[0]][attr]
    raise InductorError(f"unknown operation {name!r} in a loop body")


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
        return Body(tuple(self.ops))

    def _record(self, op: Op) -> int:
        found = self._seen.get(op)
        if found is None:
            found = self._seen[op] = len(self.ops)
            self.ops.append(op)
        return found

    def dtype(self, value: int) -> torch.dtype:
        """The type that a value is computed in."""
        op = self.ops[value]
        return compute_dtype(op.dtype)

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
        return self._record(Op("load", dtype, () if mask is None else (mask,), (buffer, index)))

    def store(self, buffer: str, index: IntExpr, value: int, mode: StoreMode = "set", mask: int | None = None) -> None:
        index = self.simplify(index)
        self.ops.append(
            Op("store", self.dtype(value), (value,) if mask is None else (value, mask), (buffer, index, mode))
        )
        if mode == "set" and mask is None:
            self._stored[buffer, index] = (value, self.dtype(value))

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> int:
        dtype = compute_dtype(dtype)
        number_ = _constant_of(value, dtype)
        # Keyed by text, because 0.0 == -0.0 and nan != nan.
        found = self._constants.get((dtype, repr(number_)))
        if found is None:
            found = self._constants[dtype, repr(number_)] = len(self.ops)
            self.ops.append(Op("constant", dtype, (), number_))
        return found

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> int:
        return self._record(Op("index_expr", dtype, (), self.simplify(expr)))

    def indirect(self, value: int, size: IntExpr) -> IntExpr:
        known = self.ops[value]
        if known.name == "index_expr":
            return known.attr  # type: ignore[no-any-return]
        found = self._indirect.get((value, size))
        if found is None:
            name = f"j{self._symbols}"
            self._symbols += 1
            self.ops.append(Op("indirect", torch.int64, (value,), (name, size)))
            found = self._indirect[value, size] = variable(name)
        return found

    def to_dtype(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        have = self.dtype(value)
        if dtype == have:
            return value
        if self.ops[value].dtype == dtype:  # a bfloat16 load is a float32 value that is exact in bfloat16
            return value
        return self._record(Op("to_dtype", dtype, (value,), have))

    def require(self, value: int, condition: int, fault: Fault) -> int:
        return self._record(Op("require", self.dtype(value), (value, condition), fault))

    def bitcast(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        return self._record(Op("bitcast", dtype, (value,), source))

    def apply(self, op: str, *args: int) -> int:
        match ELEMENTWISE[op].result:
            case "bool":
                dtype = torch.bool
            case "second":
                dtype = self.dtype(args[1])
            case "int64":
                dtype = torch.int64
            case _:
                dtype = self.dtype(args[0])
        return self._record(Op("apply", dtype, args, op))

    def random_bits(self, seed: int, index: IntExpr, stream: int) -> int:
        return self._record(Op("random_bits", torch.int64, (seed,), (self.simplify(index), stream)))

    def reduce(self, kind: ReductionKind, key: str, value: int, position: int | None = None) -> None:
        dtype = self.dtype(value) if position is None else torch.int64
        args = (value,) if position is None else (value, position)
        self.ops.append(Op("reduce", dtype, args, (kind, key)))

    def carried(self, key: str, dtype: torch.dtype) -> int:
        return self._record(Op("carried", compute_dtype(dtype), (), key))

    def scan(self, kind: ScanKind, value: int, position: int | None = None) -> tuple[int, ...]:
        whole = self._record(Op("scan", self.dtype(value), (value,) if position is None else (value, position), kind))
        if kind not in ("cummax", "cummin"):
            return (whole,)
        return (
            self._record(Op("part", self.dtype(value), (whole,), 0)),
            self._record(Op("part", torch.int64, (whole,), 1)),
        )


def _constant_of(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


StageKind = Literal["outer", "inner"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One body run for each outer iteration ("outer"), or for each point of the inner axes ("inner")."""

    kind: StageKind
    body: Body


@dataclass(frozen=True)
class Kernel:
    """A fused kernel: what a code generation back end consumes."""

    name: str
    device: torch.device
    axes: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    buffers: Mapping[str, Buffer] = field(repr=False)
    origins: tuple[str, ...] = ()
    # Buffers that no other instruction reads: only this kernel writes and reads them.
    local: frozenset[str] = frozenset()
    # A kernel with atomic or ordered stores (scatter): never fused with what reads its result.
    scatters: bool = False
    # (written, read): the written buffer lies where the read one does, which nobody needs afterwards.
    in_place: tuple[tuple[str, str], ...] = ()

    @property
    def outer(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.inner)

    @property
    def inner(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.inner)

    @cached_property
    def ranges(self) -> dict[str, IntExpr]:
        return {a.name: a.size for a in self.axes}

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers loaded (or combined into), in order of first use."""
        seen = {
            b: None for s in self.stages for op, b, _ in s.body.accesses() if op.name == "load" or op.attr[2] != "set"
        }
        return tuple(seen)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers stored to, in order of first use."""
        return tuple({b: None for s in self.stages for op, b, _ in s.body.accesses() if op.name == "store"})

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The buffers in the order in which the kernel takes their pointers: written ones first."""
        return tuple(dict.fromkeys((*self.writes, *self.reads)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Size symbols that the kernel needs, sorted: its int64 arguments."""
        found: set[str] = set()
        variables = set(self.ranges)
        for axis in self.axes:
            found |= axis.size.symbols()
        for stage in self.stages:
            for op in stage.body.ops:
                match op.name:
                    case "load" | "store":
                        found |= op.attr[1].symbols()
                    case "index_expr":
                        found |= op.attr.symbols()
                    case "random_bits":
                        found |= op.attr[0].symbols()
                    case "indirect":
                        variables.add(op.attr[0])
                        found |= op.attr[1].symbols()
        return tuple(sorted(found - variables))

    def _note(self, buffer: str) -> str:
        over = [read for written, read in self.in_place if written == buffer]
        return "  (local)" if buffer in self.local else f"  (over {over[0]})" if over else ""

    def __str__(self) -> str:
        def loops(axes: Sequence[Axis]) -> str:
            return ", ".join(f"{a.name} < {a.size}" for a in axes)

        lines = [
            f"kernel {self.name} on {self.device}"
            + (f"  # {', '.join(dict.fromkeys(self.origins))}" if self.origins else "")
        ]
        lines += [f"  {self.buffers[b]}" + self._note(b) for b in self.arguments]
        lines.append(f"  for {loops(self.outer)}:" if self.outer else "  once:")
        for stage in self.stages:
            indent = "    "
            if stage.kind == "inner":
                lines.append(f"    for {loops(self.inner)}:")
                indent = "      "
            printer = PrintHandler(indent)
            stage.body.replay(printer)
            lines += printer.lines
        return "\n".join(lines)


def verify(kernel: Kernel) -> None:
    """Raises InductorError where a kernel breaks the rules of its level."""

    def fail(text: str) -> None:
        raise InductorError(f"malformed kernel: {text}\n{kernel}")

    carried: set[str] = set()
    outer, inner = {a.name for a in kernel.outer}, {a.name for a in kernel.inner}
    for stage in kernel.stages:
        body = stage.body
        if stage.kind == "inner" and not inner:
            fail("an inner stage without an inner axis")
        if body.carries - carried:
            fail(f"{body.carries - carried} carried before they are reduced")
        if stage.kind == "outer" and (body.reduces or body.scans):
            fail("a reduction in an outer stage")
        for position, op in enumerate(body.ops):
            if any(a >= position for a in op.args):
                fail(f"operation {position} uses a later value")
            if op.name in ("load", "store"):
                if op.attr[0] not in kernel.buffers:
                    fail(f"unknown buffer {op.attr[0]}")
                if stage.kind == "outer" and op.attr[1].symbols() & inner:
                    fail(f"an outer stage indexes by an inner axis: {op.attr[1]}")
        carried |= body.reduces
    if outer & inner:
        fail("two axes of one name")


def space(shape: Sequence[IntExpr], inner: Sequence[int] = ()) -> tuple[Axis, ...]:
    """Axes i0, i1, ... for a shape; those in `inner` are inner axes. Dims of size one get no axis."""
    return tuple(Axis(f"i{d}", s, d in inner) for d, s in enumerate(shape) if s.as_int() != 1)


def space_index(shape: Sequence[IntExpr]) -> tuple[IntExpr, ...]:
    """The index that the axes of `space(shape)` run over."""
    return tuple(number(0) if s.as_int() == 1 else variable(f"i{d}") for d, s in enumerate(shape))


def record_pointwise(buffer: Buffer, body: Any, index_of_store: Any = None) -> tuple[tuple[Axis, ...], Stage]:
    """Records `buffer[i] = body(i)` over the buffer's shape."""
    axes, index = space(buffer.shape), space_index(buffer.shape)
    recorder = Recorder({a.name: a.size for a in axes})
    value = body(index, recorder)
    recorder.store(buffer.name, dot(index, buffer.strides), value)
    return axes, Stage("outer", recorder.body())


def with_stages(kernel: Kernel, stages: Sequence[Stage], **changes: Any) -> Kernel:
    """The kernel with other stages."""
    return replace(kernel, stages=tuple(stages), **changes)
