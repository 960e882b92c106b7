"""Postfix programs over numbers, as SHAPE guards hold them, and when two constants are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from primtorch.symbolic import SCALAR_OPS, UNARY_OPS
from primtorch.symbolic.relation import COMPARE


def same_constant(a: Any, b: Any) -> bool:
    """Same exact type and equal; nan equals nan, 0.0 is not -0.0, recursively in tuples and frozensets."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_constant, a, b))
    return bool(a == b)


STRIDE = "stride"  # the symbol of the stride that a relation of a tensor's strides speaks of


def run_program(program: Iterable[tuple[str, object]], symbols: Mapping[str, int | float]) -> object:
    """Evaluates a postfix program of `primtorch.symbolic` over numbers; False where its arithmetic raises."""
    try:
        return _run_program(program, symbols)
    except (ArithmeticError, ValueError, TypeError):
        return False


def _run_program(program: Iterable[tuple[str, Any]], symbols: Mapping[str, int | float]) -> object:
    stack: list[Any] = []
    kept: dict[int, object] = {}
    for op, operand in program:
        if op in ("const", "fconst"):
            stack.append(operand)
        elif op == "keep":
            kept[operand] = stack[-1]
        elif op == "kept":
            stack.append(kept[operand])
        elif op == "sym":
            stack.append(symbols[operand])
        elif op in _UNARY:
            stack.append(_UNARY[op](stack.pop()))
        else:
            right = stack.pop()
            stack.append(_BINARY[op](stack.pop(), right))
    return stack.pop()


_UNARY: dict[str, Callable[[Any], object]] = {
    **{op.name: op.function for op in SCALAR_OPS.values() if op.name in UNARY_OPS},
    "neg": lambda a: -a,
    "not": lambda a: not a,
    "defined": lambda a: not isinstance(a, complex),
}
_BINARY: dict[str, Callable[[Any, Any], object]] = {
    **{op.name: op.function for op in SCALAR_OPS.values() if op.name not in UNARY_OPS},
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    **COMPARE,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
}
_BINARY |= {f"f{op}": _BINARY[op] for op in COMPARE} | {"fsame": same_constant}
