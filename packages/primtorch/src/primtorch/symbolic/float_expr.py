"""Floats of a program: a symbol f0, f1, ... or a known value. What is computed from them is again a symbol, whose
definition the environment keeps (`ShapeEnv.define`)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr, Program


@record
class FloatExpr:
    """A float by its text: a symbol's name, or `repr` of a value (which tells -0.0 from 0.0, and has one nan)."""

    text: str
    value: float | None = field(default=None, compare=False)  # None for a symbol

    def symbols(self) -> set[str]:
        """The names of its symbols: one, or none of a constant."""
        return {self.text} if self.value is None else set()

    def evaluate(self, values: Mapping[str, float]) -> float:
        """The number for these values of its symbols. Raises KeyError where it is missing."""
        return values[self.text] if self.value is None else self.value

    def program(self) -> Program:
        """The postfix program that gives the number."""
        return (("sym", self.text),) if self.value is None else (("fconst", self.value),)

    def __str__(self) -> str:
        return self.text


@record
class Definition:
    """What a derived symbol stands for: an operation of `SCALAR_OPS` on numbers of the environment."""

    op: str
    args: tuple[IntExpr | FloatExpr, ...]


def float_bits(value: float) -> int:
    """The 64 bits of a float as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """The float of these 64 bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def float_constant(value: float) -> FloatExpr:
    """The expression of a known float."""
    return FloatExpr(repr(value), value)
