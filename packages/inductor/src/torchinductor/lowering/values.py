"""What a graph value is during lowering: a strided view of a buffer, or a computation that nobody has stored yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ONE, ZERO, Index, dot
from torchinductor.ir import Load as LoadOp
from torchinductor.ir import Recorder
from torchinductor.ops import Fault, OpsHandler, StoreMode

Ops: TypeAlias = OpsHandler[int]
"""What a rule computes with: it records, so that a value is a position in a body."""
Load: TypeAlias = Callable[[Index, Ops], int]
Size: TypeAlias = int | IntExpr
Sizes: TypeAlias = Sequence[Size]


@record
class Strided:
    """Elements at offset + sum(index * strides) of a buffer."""

    buffer: str
    strides: Index
    offset: IntExpr = ZERO


@record
class Lazy:
    """A computation by index. `cost` counts its operations, `reads` the buffers it loads, `heavy` says that it calls a
    transcendental function: these decide whether it is worth storing. `narrower` is the value that this one is a
    conversion of, where that takes fewer bytes: it is stored in this one's place."""

    load: Load
    cost: int
    reads: frozenset[str]
    heavy: bool = False
    narrower: TensorValue | None = None


class TensorValue:
    """A tensor of the graph. `data` turns from Lazy to Strided when the value is realised."""

    __slots__ = ("data", "device", "dtype", "hint", "order", "shape")

    def __init__(
        self, shape: Index, dtype: torch.dtype, device: torch.device, data: Strided | Lazy, hint: Index | None = None
    ) -> None:
        self.shape, self.dtype, self.device, self.data = shape, dtype, device, data
        self.hint = hint  # eager's strides, to realise it with
        self.order: Index | None = None  # strides in whose order to realise it where nobody asks for eager's

    @property
    def layout(self) -> Index | None:
        """The strides that it has, or would be realised with the order of."""
        return self.data.strides if isinstance(self.data, Strided) else self.order or self.hint

    @property
    def cost(self) -> int:
        """Operations that reading an element takes; one where it is stored."""
        return 1 if isinstance(self.data, Strided) else self.data.cost

    @property
    def reads(self) -> frozenset[str]:
        """Buffers that reading an element touches."""
        return frozenset((self.data.buffer,)) if isinstance(self.data, Strided) else self.data.reads

    @property
    def heavy(self) -> bool:
        """Whether reading an element calls a transcendental function."""
        return isinstance(self.data, Lazy) and self.data.heavy

    @property
    def narrower(self) -> TensorValue | None:
        """The value of fewer bytes that this one is computed from by a conversion alone, if it is not stored itself."""
        return self.data.narrower if isinstance(self.data, Lazy) else None

    def load(self, index: Index, ops: Ops) -> int:
        """The element at an index."""
        data = self.data
        if isinstance(data, Strided):
            return ops.load(data.buffer, dot(index, data.strides, data.offset), self.dtype)
        return data.load(index, ops)


def recorder_of(ops: Ops) -> Recorder | None:
    """Who records, behind the masks that loads are made under."""
    while isinstance(ops, Masked):
        ops = ops.ops
    return ops if isinstance(ops, Recorder) else None


class Masked(OpsHandler[int]):
    """Passes everything on, with loads made only where `mask` holds."""

    def __init__(self, ops: Ops, mask: int) -> None:
        self.ops, self.mask = ops, mask

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: int | None = None) -> int:
        both = self.mask if mask is None else self.ops.apply("bitwise_and", self.mask, mask)
        return self.ops.load(buffer, index, dtype, both)

    def store(self, buffer: str, index: IntExpr, value: int, mode: StoreMode = "set", mask: int | None = None) -> None:
        both = self.mask if mask is None else self.ops.apply("bitwise_and", self.mask, mask)
        self.ops.store(buffer, index, value, mode, both)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> int:
        return self.ops.constant(value, dtype)

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> int:
        return self.ops.index_expr(expr, dtype)

    def indirect(self, value: int, size: IntExpr) -> IntExpr:
        """Outside the mask what is computed may be no place at all; what is loaded is zero there. Where there are no
        places, zero is none either: there nothing is looked up outside, and all that would be inside is at fault."""
        recorder = recorder_of(self.ops)
        if recorder is not None and recorder.within(value, size) is not None:
            return self.ops.indirect(value, size)
        zero = self.ops.constant(0, torch.int64)
        if recorder is None or not isinstance(recorder.ops[value], LoadOp):
            value = self.ops.apply("where", self.mask, value, zero)
        if (size.as_int() or 0) < 1:
            some = self.ops.apply("gt", self.ops.index_expr(size, torch.int64), zero)
            value = self.require(value, some, Fault.INDEX)
            self.mask = self.ops.apply("bitwise_and", self.mask, some)
            size = size.maximum(ONE)
        return self.ops.indirect(value, size)

    def require(self, value: int, condition: int, fault: Fault) -> int:
        """Outside the mask nothing is read, and nothing is required."""
        outside = self.ops.apply("logical_not", self.mask)
        return self.ops.require(value, self.ops.apply("bitwise_or", condition, outside), fault)

    def to_dtype(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        return self.ops.to_dtype(value, dtype, source)

    def bitcast(self, value: int, dtype: torch.dtype, source: torch.dtype) -> int:
        return self.ops.bitcast(value, dtype, source)

    def apply(self, op: str, *args: int) -> int:
        return self.ops.apply(op, *args)

    def random_bits(self, seed: int, index: IntExpr, stream: int) -> int:
        return self.ops.random_bits(seed, index, stream)

    def simplify(self, expr: IntExpr) -> IntExpr:
        return self.ops.simplify(expr)


Rule: TypeAlias = Callable[..., TensorValue | tuple[TensorValue, ...]]
"""A prim's rule: takes the lowering's context and the prim's arguments, sizes as integers or expressions."""
