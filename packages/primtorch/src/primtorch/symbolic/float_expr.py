"""Floats computed from sizes (true division, float(n)): carried lazily, made concrete by a guard on the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from primtorch.symbolic.expr import IntExpr


@dataclass(frozen=True, slots=True)
class FloatExpr:
    """An operator of `operator` applied to polynomials, floats and other FloatExprs; `op` "value" wraps one operand."""

    op: str
    args: tuple[FloatOperand, ...]

    def symbols(self) -> set[str]:
        return {s for part in self.sizes() for s in part.symbols()}

    def sizes(self) -> list[IntExpr]:
        """The integer expressions that the value depends on."""
        found: list[IntExpr] = []
        for arg in self.args:
            if isinstance(arg, IntExpr):
                found.append(arg)
            elif isinstance(arg, FloatExpr):
                found.extend(arg.sizes())
        return found

    def evaluate(self, values: Mapping[str, int]) -> float:
        numbers = [a.evaluate(values) if isinstance(a, IntExpr | FloatExpr) else a for a in self.args]
        match self.op:
            case "value":
                return float(numbers[0])
            case "truediv":
                return numbers[0] / numbers[1]
            case "add":
                return numbers[0] + numbers[1]
            case "sub":
                return numbers[0] - numbers[1]
            case "mul":
                return numbers[0] * numbers[1]
            case "pow":
                return float(numbers[0] ** numbers[1])
            case "neg":
                return -numbers[0]
        raise AssertionError(self.op)

    def __str__(self) -> str:
        signs = {"truediv": "/", "add": "+", "sub": "-", "mul": "*", "pow": "**"}
        if self.op in signs:
            return f"({self.args[0]} {signs[self.op]} {self.args[1]})"
        return f"{'-' if self.op == 'neg' else 'float'}({self.args[0]})"


FloatOperand: TypeAlias = "IntExpr | FloatExpr | float"
