"""Arithmetic on numbers that polynomials over integers do not have: one record an operation.

An operation's name is also its name in guard programs, where a float travels as its 64 bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal

from primtorch.frozen import record


@record
class ScalarOp:
    """`function` on Python numbers. `partial`: it raises for some operands, so that its use must be guarded."""

    name: str
    function: Callable[..., Any]
    takes: Literal["int", "float"]
    gives: Literal["int", "float"]
    symbol: str = ""  # its operator in Python source, else it is called
    partial: bool = False

    def text(self, args: tuple[str, ...]) -> str:
        """Python source of the operation on the given operands."""
        if not self.symbol:
            return f"{self.function.__name__}({', '.join(args)})"
        return f"({args[0]} {self.symbol} {args[1]})" if len(args) == 2 else f"({self.symbol}{args[0]})"


def float_minimum(a: float, b: float) -> float:
    """`min(a, b)` of two floats: the first unless the second is smaller."""
    return b if b < a else a


def float_maximum(a: float, b: float) -> float:
    """`max(a, b)` of two floats: the first unless the second is larger."""
    return b if b > a else a


SCALAR_OPS: dict[str, ScalarOp] = {
    op.name: op
    for op in (
        # floats
        ScalarOp("fadd", operator.add, "float", "float", "+"),
        ScalarOp("fsub", operator.sub, "float", "float", "-"),
        ScalarOp("fmul", operator.mul, "float", "float", "*"),
        ScalarOp("fdiv", operator.truediv, "float", "float", "/", partial=True),
        ScalarOp("fmod", operator.mod, "float", "float", "%", partial=True),
        ScalarOp("ffloordiv", operator.floordiv, "float", "float", "//", partial=True),
        ScalarOp("fpow", operator.pow, "float", "float", "**", partial=True),
        ScalarOp("fmin", float_minimum, "float", "float"),
        ScalarOp("fmax", float_maximum, "float", "float"),
        ScalarOp("fneg", operator.neg, "float", "float", "-"),
        ScalarOp("fabs", abs, "float", "float"),
        ScalarOp("sqrt", math.sqrt, "float", "float", partial=True),
        ScalarOp("exp", math.exp, "float", "float", partial=True),
        ScalarOp("expm1", math.expm1, "float", "float", partial=True),
        ScalarOp("log", math.log, "float", "float", partial=True),
        ScalarOp("log1p", math.log1p, "float", "float", partial=True),
        ScalarOp("log2", math.log2, "float", "float", partial=True),
        ScalarOp("log10", math.log10, "float", "float", partial=True),
        ScalarOp("sin", math.sin, "float", "float", partial=True),
        ScalarOp("cos", math.cos, "float", "float", partial=True),
        ScalarOp("tan", math.tan, "float", "float", partial=True),
        ScalarOp("tanh", math.tanh, "float", "float"),
        ScalarOp("atan", math.atan, "float", "float"),
        # between floats and integers
        ScalarOp("float", float, "int", "float"),
        ScalarOp("idiv", operator.truediv, "int", "float", "/", partial=True),
        ScalarOp("trunc", int, "float", "int", partial=True),
        ScalarOp("floor", math.floor, "float", "int", partial=True),
        ScalarOp("ceil", math.ceil, "float", "int", partial=True),
        ScalarOp("round", round, "float", "int", partial=True),
        # integers
        ScalarOp("bitand", operator.and_, "int", "int", "&"),
        ScalarOp("bitor", operator.or_, "int", "int", "|"),
        ScalarOp("bitxor", operator.xor, "int", "int", "^"),
        ScalarOp("lshift", operator.lshift, "int", "int", "<<", partial=True),
        ScalarOp("rshift", operator.rshift, "int", "int", ">>", partial=True),
        ScalarOp("ipow", operator.pow, "int", "int", "**", partial=True),
    )
}
# Operations of one operand.
UNARY_OPS = frozenset(
    op.name
    for op in SCALAR_OPS.values()
    if op.name in ("fneg", "float") or (not op.symbol and op.name not in ("fmin", "fmax"))
)
# Functions of one float, by the function that a program calls.
FLOAT_FUNCTIONS: dict[object, str] = {
    op.function: op.name for op in SCALAR_OPS.values() if op.takes == "float" and op.function.__module__ == "math"
}
# What nodes of a graph compute numbers with.
SCALAR_FUNCTIONS: frozenset[object] = frozenset(op.function for op in SCALAR_OPS.values())
