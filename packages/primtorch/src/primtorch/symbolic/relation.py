"""Boolean expressions: relations between integer polynomials, and, or, not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any, TypeAlias

from primtorch.frozen import record
from primtorch.symbolic.expr import Atom, IntExpr, Program, constant
from primtorch.symbolic.float_expr import FloatExpr

SYMBOLS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE: dict[str, Callable[[object, object], bool]] = {name: getattr(operator, name) for name in SYMBOLS}
NEGATION = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


class Condition:
    """What holds or does not, for numbers in the place of its symbols. Most are of two parts, `left` and `right`."""

    __slots__ = ()
    left: Any
    right: Any

    def symbols(self) -> set[str]:
        """The names of its symbols."""
        return set(self.left.symbols() | self.right.symbols())

    def evaluate(self, values: Mapping[str, int]) -> bool:
        """Whether it holds for these values of its symbols. Raises KeyError where one is missing."""
        raise NotImplementedError

    def substitute(self, values: Mapping[Atom, IntExpr]) -> BoolExpr:
        """The same of other integers: an expression in the place of each atom."""
        raise NotImplementedError

    def program(self) -> Program:
        """The postfix program that gives 1 where it holds, else 0."""
        raise NotImplementedError

    def negated(self) -> BoolExpr:
        """What holds where this does not."""
        raise NotImplementedError


@record
class Relation(Condition):
    """`left op right`, op one of eq, ne, lt, le, gt, ge."""

    op: str
    left: IntExpr
    right: IntExpr

    def evaluate(self, values: Mapping[str, int]) -> bool:
        return COMPARE[self.op](self.left.evaluate(values), self.right.evaluate(values))

    def substitute(self, values: Mapping[Atom, IntExpr]) -> Relation:
        return Relation(self.op, self.left.substitute(values), self.right.substitute(values))

    def program(self) -> Program:
        return (*self.left.program(), *self.right.program(), (self.op, 0))

    def negated(self) -> Relation:
        return Relation(NEGATION[self.op], self.left, self.right)

    def __str__(self) -> str:
        return f"{self.left} {SYMBOLS[self.op]} {self.right}"


@record
class FloatRelation(Condition):
    """`left op right` of floats, or its opposite where `holds` is False (with NaN, `not a < b` is not `a >= b`).

    `op` is that of a Relation, or "same": equal, with nan the same as nan and 0.0 not the same as -0.0.
    """

    op: str
    left: FloatExpr
    right: FloatExpr
    holds: bool = True

    def evaluate(self, values: Mapping[str, float]) -> bool:
        left, right = self.left.evaluate(values), self.right.evaluate(values)
        truth = repr(left) == repr(right) if self.op == "same" else COMPARE[self.op](left, right)  # type: ignore[arg-type]
        return truth is self.holds

    def substitute(self, values: Mapping[Atom, IntExpr]) -> FloatRelation:
        return self

    def program(self) -> Program:
        last: Program = () if self.holds else (("not", 0),)
        return (*self.left.program(), *self.right.program(), (f"f{self.op}", 0), *last)

    def negated(self) -> FloatRelation:
        return FloatRelation(self.op, self.left, self.right, not self.holds)

    def __str__(self) -> str:
        text = f"{self.left} {SYMBOLS.get(self.op, 'is')} {self.right}"
        return text if self.holds else f"not {text}"


@record
class Defined(Condition):
    """A derived symbol has a value: the operation behind it does not raise."""

    name: str

    def symbols(self) -> set[str]:
        return {self.name}

    def evaluate(self, values: Mapping[str, float]) -> bool:
        return self.name in values

    def substitute(self, values: Mapping[Atom, IntExpr]) -> Defined:
        return self

    def program(self) -> Program:
        return (("sym", self.name), ("defined", 0))

    def negated(self) -> Truth:
        return Truth(False)

    def __str__(self) -> str:
        return f"{self.name} is defined"


@record
class Truth(Condition):
    """A known truth value."""

    value: bool

    def symbols(self) -> set[str]:
        return set()

    def evaluate(self, values: Mapping[str, int]) -> bool:
        return self.value

    def substitute(self, values: Mapping[Atom, IntExpr]) -> Truth:
        return self

    def program(self) -> Program:
        return (("const", int(self.value)),)

    def negated(self) -> Truth:
        return Truth(not self.value)

    def __str__(self) -> str:
        return str(self.value)


@record
class Connective(Condition):
    """`and` or `or` of two boolean expressions (a negation is pushed down to the relations)."""

    op: str
    left: BoolExpr
    right: BoolExpr

    def evaluate(self, values: Mapping[str, int]) -> bool:
        if self.op == "and":
            return self.left.evaluate(values) and self.right.evaluate(values)
        return self.left.evaluate(values) or self.right.evaluate(values)

    def substitute(self, values: Mapping[Atom, IntExpr]) -> BoolExpr:
        return connect(self.op, self.left.substitute(values), self.right.substitute(values))

    def program(self) -> Program:
        return (*self.left.program(), *self.right.program(), (self.op, 0))

    def negated(self) -> BoolExpr:
        return connect("or" if self.op == "and" else "and", self.left.negated(), self.right.negated())

    def __str__(self) -> str:
        return f"({self.left}) {self.op} ({self.right})"


BoolExpr: TypeAlias = Relation | Truth | Connective | FloatRelation | Defined


def connect(op: str, left: BoolExpr, right: BoolExpr) -> BoolExpr:
    """`left and right` or `left or right`, simplified where one side is known."""
    for known, other in ((left, right), (right, left)):
        if isinstance(known, Truth):
            return other if known.value == (op == "and") else known
    return left if left == right else Connective(op, left, right)


def relate(op: str, left: IntExpr, right: IntExpr) -> BoolExpr:
    """The relation, or its truth value when the two sides differ by a constant."""
    difference = (left - right).as_int()
    if difference is not None:
        return Truth(COMPARE[op](difference, 0))
    return Relation(op, left, right)


def zero_form(difference: IntExpr) -> IntExpr:
    """A canonical polynomial that is zero exactly where `difference` is: common factor and sign taken out."""
    terms = difference.ordered_terms()
    factor = gcd(*(c for _, c in terms))
    if terms[0][1] < 0:
        factor = -factor
    return IntExpr({m: c // factor for m, c in terms})


def at_least_zero(relation: Relation) -> IntExpr | None:
    """d with (d >= 0) equivalent to the relation, for the four orderings."""
    difference = relation.left - relation.right
    match relation.op:
        case "ge":
            return difference
        case "gt":
            return difference - constant(1)
        case "le":
            return -difference
        case "lt":
            return -difference - constant(1)
    return None
