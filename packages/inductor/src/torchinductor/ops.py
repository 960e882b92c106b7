"""The op protocol: the scalar operations that a loop body is written in, and the handlers that give them a meaning.

A body is a Python function over an index and a handler, or a recorded `ir.Body` that replays itself on a handler.
The same body is printed, counted, searched for its buffers, interpreted on tensors, and turned into C++ or Triton.

Values are what the handler makes them: names in generated code, tensors in the interpreter. A value of a reduced
precision type (bfloat16, float16) is a float32 while it is being computed with; it is rounded by `store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import Generic, Literal, TypeVar

import torch

from primtorch.frozen import record
from primtorch.prims import PRIMS
from primtorch.symbolic.expr import IntExpr, symbol

V = TypeVar("V")

ResultType = Literal["same", "bool", "second", "int64", "int32"]


@record
class ElementwiseOp:
    """A scalar operation of `apply`: how many operands it has, and how its result's type follows from theirs."""

    name: str
    arity: int
    result: ResultType = "same"
    heavy: bool = False  # costs much more than an addition: worth storing rather than computing twice


def _table() -> dict[str, ElementwiseOp]:
    """The elementwise prims that loops compute: not those that one ATen operator is, nor parts of complex numbers."""
    entries = [ElementwiseOp("relu", 1), ElementwiseOp("logical_not", 1, "bool"), ElementwiseOp("fma", 3)]
    for prim in PRIMS.values():
        result = _RESULTS.get(prim.family)
        if result is not None and prim.aten is None and prim.name not in ("conj", "real", "imag"):
            entries.append(ElementwiseOp(prim.name, prim.operands, result, "heavy" in prim.tags))
    return {entry.name: entry for entry in entries}


_RESULTS: Mapping[str, ResultType] = {
    "elementwise unary": "same",
    "elementwise binary": "same",
    "predicate": "bool",
    "comparison": "bool",
    "ternary": "second",
}
ELEMENTWISE: Mapping[str, ElementwiseOp] = _table()


class Fault(IntFlag):
    """What a kernel may meet at run time. A kernel's result tells which it met; each has its own exception."""

    INDEX = 1  # an index outside the dimension that it indexes: IndexError
    DIVISION = 2  # an integer division by zero: RuntimeError, as eager on the CPU


ReductionKind = Literal["sum", "prod", "amax", "amin", "any", "all", "argmax", "argmin", "sum_exp", "moments"]
ScanKind = Literal["sum", "prod", "cummax", "cummin", "logcumsumexp"]
StoreMode = Literal["set", "add", "prod", "amax", "amin"]


class OpsHandler(Generic[V]):
    """The protocol. Indices are `IntExpr`s over the loop variables, size symbols, and what `indirect` returned."""

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: V | None = None) -> V:
        """The element at `index`; zero where `mask` is false, and the memory is not touched there.

        `dtype` is the buffer's; a bfloat16 or float16 element becomes a float32 value.
        """
        raise NotImplementedError

    def store(self, buffer: str, index: IntExpr, value: V, mode: StoreMode = "set", mask: V | None = None) -> None:
        """Writes (or combines) the value, converted to the buffer's type. Other modes than "set" are atomic."""
        raise NotImplementedError

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> V:
        """A number, in the type that `dtype` is computed in."""
        raise NotImplementedError

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> V:
        """An index as a value."""
        raise NotImplementedError

    def indirect(self, value: V, size: IntExpr) -> IntExpr:
        """An integer value as an index into a dimension of `size`; 0 <= value < size is the program's promise."""
        raise NotImplementedError

    def require(self, value: V, condition: V, fault: Fault) -> V:
        """The value; the kernel's call raises `fault` where the condition is false."""
        raise NotImplementedError

    def to_dtype(self, value: V, dtype: torch.dtype, source: torch.dtype) -> V:
        """Converts a value. `dtype` may be bfloat16 or float16: then the value is rounded to it and stays a float32."""
        raise NotImplementedError

    def bitcast(self, value: V, dtype: torch.dtype, source: torch.dtype) -> V:
        """The same bits as another type of the same width."""
        raise NotImplementedError

    def apply(self, op: str, *args: V) -> V:
        """An elementwise operation of `ELEMENTWISE`, named as the prim."""
        raise NotImplementedError

    def random_bits(self, seed: V, index: IntExpr, stream: int) -> V:
        """Word index mod 4 of Philox4x32-10 with key `seed` and counter (index // 4, stream), int64 in [0, 2^32)."""
        raise NotImplementedError

    def reduce(
        self, kind: ReductionKind, key: str, value: V, position: V | None = None, about: str | None = None
    ) -> None:
        """Accumulates `value` over the inner loops into `key`, which later stages read by `carried`.

        `argmax` and `argmin` take the element's `position` too and carry the position (first one wins, NaN first).
        `sum_exp` and `moments` are `about` the result of a reduction of the same values in the same loops, which they
        need not wait for: the sum of exp(value - the maximum `about`), the sum of (value - mean)^2 where `about` is
        the sum. Only a back end that asks `scheduling.online` for them meets them.
        """
        raise NotImplementedError

    def reduce_column(self, kind: ReductionKind, key: str, value: V) -> None:
        """Accumulates `value` over the outer loops into `key`, for each point of the inner ones; stages of columns read
        it by `carried`."""
        raise NotImplementedError

    def carried(self, key: str, dtype: torch.dtype) -> V:
        """The result of a reduction of an earlier stage."""
        raise NotImplementedError

    def scan(self, kind: ScanKind, value: V, position: V | None = None) -> tuple[V, ...]:
        """The running combination along the (one, sequential) inner axis, the current element included.

        cummax and cummin give (value, position); the others one value.
        """
        raise NotImplementedError

    def simplify(self, expr: IntExpr) -> IntExpr:
        """An equal index expression, simpler if the handler knows the loop ranges."""
        return expr


class PrintHandler(OpsHandler[str]):
    """Writes one line an operation; values are names."""

    def __init__(self, indent: str = "") -> None:
        self.lines: list[str] = []
        self.indent = indent
        self.names = 0

    def _emit(self, text: str) -> str:
        name = f"t{self.names}"
        self.names += 1
        self.lines.append(f"{self.indent}{name} = {text}")
        return name

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: str | None = None) -> str:
        return self._emit(f"load({buffer}[{index}], {_short(dtype)}" + (f", mask={mask})" if mask else ")"))

    def store(self, buffer: str, index: IntExpr, value: str, mode: StoreMode = "set", mask: str | None = None) -> None:
        sign = "=" if mode == "set" else f"{mode}="
        guard = f" if {mask}" if mask else ""
        self.lines.append(f"{self.indent}{buffer}[{index}] {sign} {value}{guard}")

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return self._emit(f"constant({value}, {_short(dtype)})")

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> str:
        return self._emit(f"index_expr({expr}, {_short(dtype)})")

    def indirect(self, value: str, size: IntExpr) -> IntExpr:
        name = self._emit(f"indirect({value}, size={size})")
        return symbol(name)

    def require(self, value: str, condition: str, fault: Fault) -> str:
        return self._emit(f"require({value}, {condition}, {fault.name})")

    def to_dtype(self, value: str, dtype: torch.dtype, source: torch.dtype) -> str:
        return self._emit(f"to_dtype({value}, {_short(dtype)})")

    def bitcast(self, value: str, dtype: torch.dtype, source: torch.dtype) -> str:
        return self._emit(f"bitcast({value}, {_short(dtype)})")

    def apply(self, op: str, *args: str) -> str:
        return self._emit(f"{op}({', '.join(args)})")

    def random_bits(self, seed: str, index: IntExpr, stream: int) -> str:
        return self._emit(f"random_bits({seed}, {index}, stream={stream})")

    def reduce(
        self, kind: ReductionKind, key: str, value: str, position: str | None = None, about: str | None = None
    ) -> None:
        operands = [value, *([position] if position else []), *([f"about {about}"] if about else [])]
        self.lines.append(f"{self.indent}{key} = reduce_{kind}({', '.join(operands)})")

    def reduce_column(self, kind: ReductionKind, key: str, value: str) -> None:
        self.lines.append(f"{self.indent}{key} = reduce_column_{kind}({value})")

    def carried(self, key: str, dtype: torch.dtype) -> str:
        return self._emit(f"carried({key})")

    def scan(self, kind: ScanKind, value: str, position: str | None = None) -> tuple[str, ...]:
        name = self._emit(f"scan_{kind}({value}" + (f", {position})" if position else ")"))
        return (f"{name}.0", f"{name}.1") if kind in ("cummax", "cummin") else (name,)


def _short(dtype: torch.dtype) -> str:
    return str(dtype)[6:]
