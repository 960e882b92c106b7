"""What a graph value is during lowering: a strided view of a buffer, or a computation that nobody has stored yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ZERO, Index, dot
from torchinductor.ops import Fault, OpsHandler, StoreMode

Load: TypeAlias = Callable[[Index, OpsHandler[Any]], Any]


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements at offset + sum(index * strides) of a buffer."""

    buffer: str
    strides: Index
    offset: IntExpr = ZERO


@dataclass(frozen=True, slots=True)
class Lazy:
    """A computation by index. `cost` counts its operations, `reads` the buffers it loads, `heavy` says that it calls a
    transcendental function: these decide whether it is worth storing."""

    load: Load
    cost: int
    reads: frozenset[str]
    heavy: bool = False


class TensorValue:
    """A tensor of the graph. `data` turns from Lazy to Strided when the value is realised."""

    __slots__ = ("data", "device", "dtype", "hint", "shape")

    def __init__(
        self, shape: Index, dtype: torch.dtype, device: torch.device, data: Strided | Lazy, hint: Index | None = None
    ) -> None:
        self.shape, self.dtype, self.device, self.data = shape, dtype, device, data
        self.hint = hint  # eager's strides, to realise it with

    @property
    def cost(self) -> int:
        return 1 if isinstance(self.data, Strided) else self.data.cost

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((self.data.buffer,)) if isinstance(self.data, Strided) else self.data.reads

    @property
    def heavy(self) -> bool:
        return isinstance(self.data, Lazy) and self.data.heavy

    def load(self, index: Index, ops: OpsHandler[Any]) -> Any:
        """The element at an index."""
        data = self.data
        if isinstance(data, Strided):
            return ops.load(data.buffer, dot(index, data.strides, data.offset), self.dtype)
        return data.load(index, ops)


class Masked(OpsHandler[Any]):
    """Passes everything on, with loads made only where `mask` holds."""

    def __init__(self, ops: OpsHandler[Any], mask: Any) -> None:
        self.ops, self.mask = ops, mask

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: Any = None) -> Any:
        both = self.mask if mask is None else self.ops.apply("bitwise_and", self.mask, mask)
        return self.ops.load(buffer, index, dtype, both)

    def store(self, buffer: str, index: IntExpr, value: Any, mode: StoreMode = "set", mask: Any = None) -> None:
        both = self.mask if mask is None else self.ops.apply("bitwise_and", self.mask, mask)
        self.ops.store(buffer, index, value, mode, both)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Any:
        return self.ops.constant(value, dtype)

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> Any:
        return self.ops.index_expr(expr, dtype)

    def indirect(self, value: Any, size: IntExpr) -> IntExpr:
        return self.ops.indirect(value, size)

    def require(self, value: Any, condition: Any, fault: Fault) -> Any:
        """Outside the mask nothing is read, and nothing is required."""
        outside = self.ops.apply("logical_not", self.mask)
        return self.ops.require(value, self.ops.apply("bitwise_or", condition, outside), fault)

    def to_dtype(self, value: Any, dtype: torch.dtype, source: torch.dtype) -> Any:
        return self.ops.to_dtype(value, dtype, source)

    def bitcast(self, value: Any, dtype: torch.dtype, source: torch.dtype) -> Any:
        return self.ops.bitcast(value, dtype, source)

    def apply(self, op: str, *args: Any) -> Any:
        return self.ops.apply(op, *args)

    def random_bits(self, seed: Any, index: IntExpr, stream: int) -> Any:
        return self.ops.random_bits(seed, index, stream)

    def simplify(self, expr: IntExpr) -> IntExpr:
        return self.ops.simplify(expr)
