"""The object behind a `torch.SymInt`, `SymBool` or `SymFloat`: an expression, its value in the example, its ShapeEnv.

Torch calls these methods by name, from C++ and from Python; their names and signatures are torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from primtorch.symbolic.expr import IntExpr, constant
from primtorch.symbolic.float_expr import FloatExpr, float_constant
from primtorch.symbolic.relation import (
    COMPARE,
    BoolExpr,
    Connective,
    Defined,
    FloatRelation,
    Relation,
    Truth,
    connect,
    relate,
)

if TYPE_CHECKING:
    from primtorch.symbolic.shape_env import ShapeEnv

Expr: TypeAlias = IntExpr | Relation | Connective | Truth | FloatRelation | Defined | FloatExpr
Text: TypeAlias = str
"""`str` by a name that SymNode's method of that name does not hide."""


class SymNode:
    """One symbolic value."""

    __slots__ = ("_example", "env", "expr")

    def __init__(self, expr: Expr, hint: int | bool | float | None, env: ShapeEnv) -> None:
        self.expr = expr
        self._example = hint
        self.env = env

    @property
    def hint(self) -> int | bool | float | None:
        """The value in the example or, within a trial, for the sizes of the trial; None where it depends on data that
        nothing is known of."""
        if self._example is None:
            return self.env.come_to(self.expr)
        return self.env.now(self.expr, self._example) if self.env.on_trial else self._example

    @property
    def of_data(self) -> bool:
        """Whether it was made of what only the data tells, whatever has come to be known of that since."""
        return self._example is None

    # kind -----------------------------------------------------------------------------------------------------
    def is_int(self) -> bool:
        """Whether it stands for an integer."""
        return isinstance(self.expr, IntExpr)

    def is_float(self) -> bool:
        """Whether it stands for a float."""
        return isinstance(self.expr, FloatExpr)

    def is_bool(self) -> bool:
        """Whether it stands for a truth value."""
        return not isinstance(self.expr, IntExpr | FloatExpr)

    def is_nested_int(self) -> bool:
        """No: a ragged length is of a class of its own."""
        return False

    def nested_int(self) -> None:
        """None: it is no ragged length."""
        return None

    def is_symbolic(self) -> bool:
        """Yes, also of a number that has come to be known."""
        return True

    def is_constant(self) -> bool:
        """No: C++ asks `maybe_as_int` for numbers that are known."""
        return False

    def constant_int(self) -> None:
        """None, as it is no constant."""
        return None

    def constant_bool(self) -> None:
        """None, as it is no constant."""
        return None

    def maybe_as_int(self) -> int | None:
        """The integer where it is known, without a guard."""
        expr = self.expr
        return expr.as_int() if isinstance(expr, IntExpr) else None

    def maybe_as_bool(self) -> bool | None:
        """The truth value where it is known, without a guard."""
        return self.expr.value if isinstance(self.expr, Truth) else None

    def maybe_as_float(self) -> float | None:
        """The float where it is known, without a guard."""
        return self.expr.value if isinstance(self.expr, FloatExpr) else None

    def has_hint(self) -> bool:
        """Whether the example's number is known."""
        return self.hint is not None

    def require_hint(self, fallback: int | None = None) -> int | bool | float | None:
        """The example's number, or the fallback."""
        return self.hint if self.hint is not None else fallback

    @property
    def shape_env(self) -> ShapeEnv:
        """Where its symbols and guards are."""
        return self.env

    @property
    def pytype(self) -> type:
        """int, float or bool."""
        return int if self.is_int() else float if self.is_float() else bool

    def str(self) -> Text:
        """Its text: an expression over the names of symbols."""
        return str(self.env.simplify(self.expr) if isinstance(self.expr, IntExpr) else self.expr)

    __str__ = str
    __repr__ = str

    def _graph_repr(self) -> Text:
        if not self.env.shows_numbers:
            return self.str()
        return repr(self.int_() if self.is_int() else self.guard_float("", 0) if self.is_float() else self.bool_())

    def clone(self) -> SymNode:
        """Itself, as it never changes."""
        return self

    def wrap_int(self, value: int) -> SymNode:
        """A known integer among symbolic ones."""
        return SymNode(constant(value), value, self.env)

    def wrap_bool(self, value: bool) -> SymNode:
        """A known truth value among symbolic ones."""
        return SymNode(Truth(value), value, self.env)

    def wrap_float(self, value: float) -> SymNode:
        """A known float among symbolic ones."""
        return SymNode(float_constant(value), value, self.env)

    # integer arithmetic ---------------------------------------------------------------------------------------
    def _int(self) -> IntExpr:
        if isinstance(self.expr, IntExpr):
            return self.expr
        raise TypeError(f"an integer is expected, not {self.expr}")

    def _made(self, expr: IntExpr, hint: int | None) -> SymNode:
        return SymNode(expr, hint, self.env)

    def _polynomial(self, op: Callable[..., IntExpr], of_floats: Text, other: SymNode) -> SymNode:
        a, b = self.expr, other.expr
        if isinstance(a, IntExpr) and isinstance(b, IntExpr):
            return self._made(op(a, b), _both(op, self, other))
        return self._float(of_floats, other)

    def _settled(
        self, make: Callable[[IntExpr, IntExpr], IntExpr], op: Callable[..., int], of_floats: Text, other: SymNode
    ) -> SymNode:
        if self.is_float() or other.is_float():
            return self._float(of_floats, other)
        a, b = self.env.simplify(self._int()), self.env.simplify(other._int())
        return self._made(make(a, b), _both(op, self, other))

    def add(self, other: SymNode) -> SymNode:
        """`self + other`, a polynomial of integers, else a derived float."""
        return self._polynomial(operator.add, "fadd", other)

    def sub(self, other: SymNode) -> SymNode:
        """`self - other`, a polynomial of integers, else a derived float."""
        return self._polynomial(operator.sub, "fsub", other)

    def mul(self, other: SymNode) -> SymNode:
        """`self * other`, a polynomial of integers, else a derived float."""
        return self._polynomial(operator.mul, "fmul", other)

    def neg(self) -> SymNode:
        """`-self`"""
        hint = None if self.of_data else -self.hint  # type: ignore[operator]  # there is one
        if isinstance(self.expr, IntExpr):
            return SymNode(-self.expr, hint, self.env)
        return self._define("fneg", self._as_float())

    def pos(self) -> SymNode:
        """`+self`"""
        return self

    def abs(self) -> SymNode:
        """`abs(self)`, of integers max(self, -self)."""
        return self._define("fabs", self._as_float()) if self.is_float() else self.sym_max(self.neg())

    def int_floordiv(self, other: SymNode) -> SymNode:
        """`self // other` of integers, toward minus infinity."""
        a, b = self.env.simplify(self._int()), self.env.simplify(other._int())
        return self._made(self.env.floordiv(a, b), _both(operator.floordiv, self, other))

    floordiv = int_floordiv

    def mod(self, other: SymNode) -> SymNode:
        """`self % other`, with the sign of `other`."""
        return self._settled(self.env.mod, operator.mod, "fmod", other)

    def sym_min(self, other: SymNode) -> SymNode:
        """The smaller one, as `torch.sym_min`."""
        return self._settled(self.env.minimum, min, "fmin", other)

    def sym_max(self, other: SymNode) -> SymNode:
        """The larger one, as `torch.sym_max`."""
        return self._settled(self.env.maximum, max, "fmax", other)

    def sym_sum(self, others: Sequence[SymNode]) -> SymNode:
        """The sum of all, as `torch.sym_sum`."""
        result = others[0]
        for other in others[1:]:
            result = result.add(other)
        return result

    def pow_by_natural(self, other: SymNode) -> SymNode:
        """`self ** other` of integers; the exponent is guarded to be the example's."""
        exponent = self.env.specialize(other._int(), other._hint_int())
        return self._made(self._int() ** exponent, None if self.of_data else int(self.hint) ** exponent)  # type: ignore[arg-type]  # there is one

    def pow(self, other: SymNode) -> SymNode:
        """`self ** other`: an integer where the exponent is a known natural number, else a float."""
        exponent = other.maybe_as_int()
        return (
            self.pow_by_natural(other)
            if self.is_int() and exponent is not None and exponent >= 0
            else self.float_pow(other)
        )

    def lshift(self, other: SymNode) -> SymNode:
        """`self << other` of integers."""
        return self._define("lshift", self._int(), other._int())

    def rshift(self, other: SymNode) -> SymNode:
        """`self >> other` of integers."""
        return self._define("rshift", self._int(), other._int())

    def bitwise_and(self, other: SymNode) -> SymNode:
        """`self & other` of integers."""
        return self._define("bitand", self._int(), other._int())

    def bitwise_or(self, other: SymNode) -> SymNode:
        """`self | other` of integers."""
        return self._define("bitor", self._int(), other._int())

    def bitwise_xor(self, other: SymNode) -> SymNode:
        """`self ^ other` of integers."""
        return self._define("bitxor", self._int(), other._int())

    def _hint_int(self) -> int | None:
        return None if self.hint is None else int(self.hint)

    # floats ---------------------------------------------------------------------------------------------------
    def _define(self, op: Text, *args: IntExpr | FloatExpr) -> SymNode:
        result = self.env.define(op, *args)
        return SymNode(result, self.env.hint(result), self.env)

    def _as_float(self) -> FloatExpr:
        if isinstance(self.expr, FloatExpr):
            return self.expr
        result = self.env.define("float", self._int())
        assert isinstance(result, FloatExpr)
        return result

    def _float(self, op: Text, other: SymNode) -> SymNode:
        return self._define(op, self._as_float(), other._as_float())

    def int_truediv(self, other: SymNode) -> SymNode:
        """`self / other` of integers, a float rounded once."""
        return self._define("idiv", self._int(), other._int())

    def truediv(self, other: SymNode) -> SymNode:
        """`self / other`"""
        return self.int_truediv(other) if self.is_int() and other.is_int() else self._float("fdiv", other)

    def float_truediv(self, other: SymNode) -> SymNode:
        """`self / other` of floats."""
        return self._float("fdiv", other)

    def float_pow(self, other: SymNode) -> SymNode:
        """`self ** other` of floats."""
        return self._float("fpow", other)

    def sym_float(self) -> SymNode:
        """`float(self)`"""
        return self if self.is_float() else self._define("float", self._int())

    def is_integer(self) -> SymNode:
        """Whether it is whole; of a float, guarded to be the example's."""
        return self.wrap_bool(self.is_int() or float(self.guard_float("", 0)).is_integer())

    # relations ------------------------------------------------------------------------------------------------
    def _relation(self, op: Text, other: SymNode) -> SymNode:
        a, b = self.expr, other.expr
        if isinstance(a, IntExpr) and isinstance(b, IntExpr):
            return SymNode(relate(op, a, b), _both(COMPARE[op], self, other), self.env)
        if self.is_bool() and other.is_bool():
            return self.wrap_bool(COMPARE[op](self.bool_(), other.bool_()))
        relation = FloatRelation(op, self._as_float(), other._as_float())
        return SymNode(relation, _both(COMPARE[op], self, other), self.env)

    def eq(self, other: SymNode) -> SymNode:
        """`self == other`; a ragged length answers for itself."""
        return other.eq(self) if other.is_nested_int() else self._relation("eq", other)

    def ne(self, other: SymNode) -> SymNode:
        """`self != other`; a ragged length answers for itself."""
        return other.ne(self) if other.is_nested_int() else self._relation("ne", other)

    def lt(self, other: SymNode) -> SymNode:
        """`self < other`"""
        return self._relation("lt", other)

    def le(self, other: SymNode) -> SymNode:
        """`self <= other`"""
        return self._relation("le", other)

    def gt(self, other: SymNode) -> SymNode:
        """`self > other`"""
        return self._relation("gt", other)

    def ge(self, other: SymNode) -> SymNode:
        """`self >= other`"""
        return self._relation("ge", other)

    def _truth(self) -> BoolExpr:
        if isinstance(self.expr, Relation | Connective | Truth | FloatRelation | Defined):
            return self.expr
        raise TypeError(f"a boolean is expected, not {self.expr}")

    def sym_and(self, other: SymNode) -> SymNode:
        """`self and other` of truth values, without a guard."""
        hint = _both(lambda a, b: a and b, self, other)
        return SymNode(connect("and", self._truth(), other._truth()), hint, self.env)

    def sym_or(self, other: SymNode) -> SymNode:
        """`self or other` of truth values, without a guard."""
        hint = _both(lambda a, b: a or b, self, other)
        return SymNode(connect("or", self._truth(), other._truth()), hint, self.env)

    and_ = sym_and
    or_ = sym_or

    def sym_not(self) -> SymNode:
        """`not self` of a truth value, without a guard."""
        return SymNode(self._truth().negated(), None if self.of_data else not self.hint, self.env)

    def sym_ite(self, then: SymNode, otherwise: SymNode) -> SymNode:
        """`then` or `otherwise`: the condition is guarded."""
        return then if self.bool_() else otherwise

    # making values concrete -----------------------------------------------------------------------------------
    def bool_(self) -> bool:
        """The truth value, guarded to be the example's. Raises DataDependent where there is no example."""
        if isinstance(self.expr, IntExpr):
            return not self._relation("eq", self.wrap_int(0)).bool_()
        if isinstance(self.expr, FloatExpr):
            return self._relation("ne", self.wrap_float(0.0)).bool_()
        return self.env.evaluate(self.expr, None if self.hint is None else bool(self.hint))

    def guard_bool(self, file: Text, line: int) -> bool:
        """The same; the place in C++ is not noted. A formula of a derivative gives its gradient as it is where there is
        no element, or but one: of a number that only the data tells it takes the long way, which comes to the same."""
        if self.env.in_formulas and self.hint is None and isinstance(self.expr, Relation):
            asks_for_few = (self.expr.op, self.expr.right.as_int()) in (("eq", 0), ("eq", 1), ("le", 1))
            if asks_for_few and self.env.decide(self.expr) is None:
                return False
        return self.bool_()

    def guard_int(self, file: Text, line: int) -> int:
        """The integer, guarded to be the example's. Raises DataDependent where there is none."""
        return self.env.specialize(self._int(), self._hint_int())

    def int_(self) -> int:
        """The integer, guarded to be the example's. Raises DataDependent where there is none."""
        return self.env.specialize(self._int(), self._hint_int())

    def guard_float(self, file: Text, line: int) -> float:
        """The float, guarded to be the example's."""
        if isinstance(self.expr, FloatExpr):
            return self.env.specialize_float(self.expr, None if self.hint is None else float(self.hint))
        return float(self.int_() if self.is_int() else self.bool_())

    def trunc(self) -> SymNode:
        """`int` of a float."""
        return self._define("trunc", self._as_float())

    def floor(self) -> SymNode:
        """`math.floor` of a float."""
        return self._define("floor", self._as_float())

    def ceil(self) -> SymNode:
        """`math.ceil` of a float."""
        return self._define("ceil", self._as_float())

    def sqrt(self) -> SymNode:
        """`math.sqrt`, as of the other functions below."""
        return self._define("sqrt", self._as_float())

    def guard_size_oblivious(self, file: Text, line: int) -> bool:
        """As `guard_bool`, but a data-dependent size that is neither known nor excluded counts as at least 2."""
        expr = self._truth()
        known = self.env.decide(expr)
        if known is None and self.hint is None and isinstance(expr, Relation):
            value = (expr.right if expr.left.as_int() is None else expr.left).as_int()
            if value in (0, 1) and expr.op in ("eq", "ne"):
                return expr.op == "ne"
        return self.bool_() if known is None else known

    def guard_or_false(self, file: Text, line: int) -> bool:
        """The truth value where it can be told, guarded; False where only the data tells."""
        return self._guard_or(False)

    def guard_or_true(self, file: Text, line: int) -> bool:
        """The truth value where it can be told, guarded; True where only the data tells."""
        return self._guard_or(True)

    def _guard_or(self, default: bool) -> bool:
        known = self.env.decide(self._truth())
        if known is not None:
            return known
        return default if self.hint is None else self.bool_()

    def statically_known_true(self, file: Text, line: int) -> bool:
        """Whether it holds whatever the symbols are, by what is known of them; nothing is guarded."""
        return self.env.decide(self._truth()) is True

    def expect_true(self, file: Text, line: int) -> bool:
        """An assertion of the program: a guard when its value is known, else a fact to check at run time."""
        if self.hint is not None or self.env.decide(self._truth()) is not None:
            return self.bool_()
        self.env.assume(self._truth(), self.env.assumptions)
        return True

    def expect_size(self, file: Text, line: int) -> bool:
        """Takes it for a size: not negative."""
        return self.ge(self.wrap_int(0)).expect_true(file, line)

    # layout predicates ----------------------------------------------------------------------------------------
    def is_contiguous(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether strides are those of the sizes in row-major order, guarded."""
        return self.wrap_bool(_in_order(self, sizes, strides, range(len(sizes) - 1, -1, -1)))

    def is_channels_last_contiguous_2d(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether four strides are dense in channels_last order, guarded."""
        return self.wrap_bool(len(sizes) == 4 and _in_order(self, sizes, strides, (1, 3, 2, 0)))

    def is_channels_last_contiguous_3d(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether five strides are dense in channels_last order, guarded."""
        return self.wrap_bool(len(sizes) == 5 and _in_order(self, sizes, strides, (1, 4, 3, 2, 0)))

    def is_channels_last_strides_2d(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether four strides suggest channels_last, dense or not."""
        return self.wrap_bool(len(sizes) == 4 and _looks_channels_last(self, sizes, strides, (1, 3, 2, 0)))

    def is_channels_last_strides_3d(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether five strides suggest channels_last, dense or not."""
        return self.wrap_bool(len(sizes) == 5 and _looks_channels_last(self, sizes, strides, (1, 4, 3, 2, 0)))

    def is_non_overlapping_and_dense(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """Whether the elements fill a block of memory once, in the order of the example's strides."""

        def key(i: int) -> tuple[int | float, int]:
            hint = strides[i].hint
            return (float("inf") if hint is None else hint), -i

        innermost_first = sorted(range(len(sizes)), key=key)
        return self.wrap_bool(_in_order(self, sizes, strides, innermost_first))

    def is_non_overlapping_and_dense_indicator(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        """The same as 1 or 0."""
        return self.wrap_int(int(self.is_non_overlapping_and_dense(sizes, strides).bool_()))


def _both(fn: Callable[..., Any], a: SymNode, b: SymNode) -> Any:
    """The example's value of what is computed from both; None where one was made of data."""
    return None if a.of_data or b.of_data else fn(a.hint, b.hint)


def _in_order(node: SymNode, sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Sequence[int]) -> bool:
    """Whether the strides are those of a dense tensor with the dims, innermost first, in this order."""
    env = node.env
    expected = constant(1)
    matches = True
    for i in order:
        size, stride = env.simplify(sizes[i]._int()), env.simplify(strides[i]._int())
        if stride != expected and not _same_or_one(node, sizes[i], strides[i], stride, expected):
            matches = False
            break
        expected = expected * size
    if matches:
        return True
    # A tensor without elements is contiguous whatever its strides; sizes of at least 1 need no question.
    return any(_oblivious(node, relate("eq", env.simplify(s._int()), constant(0)), s.hint) for s in sizes)


def _same_or_one(node: SymNode, size: SymNode, stride_node: SymNode, stride: IntExpr, expected: IntExpr) -> bool:
    env = node.env
    if _oblivious(node, relate("eq", env.simplify(size._int()), constant(1)), size.hint):
        return True
    relation = relate("eq", stride, expected)
    known = env.decide(relation)
    if known is not None:
        return known
    hint = env.hint(expected)
    if stride_node.hint is None or hint is None:
        return False
    return env.evaluate(relation, stride_node.hint == hint)


def _oblivious(node: SymNode, relation: BoolExpr, hint: int | bool | float | None) -> bool:
    """Truth of `size == 0` or `size == 1`; a data-dependent size that may be either counts as larger."""
    known = node.env.decide(relation)
    if known is not None:
        return known
    if hint is None or not isinstance(relation, Relation):
        return False
    return node.env.evaluate(relation, hint == relation.right.as_int())


def _looks_channels_last(
    node: SymNode, sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Sequence[int]
) -> bool:
    """ATen's looser predicate: strides grow along the order, with its tie breaks for sizes of 1."""

    def less(a: SymNode, b: SymNode) -> bool:
        return (
            a.lt(b).bool_() if a.hint is not None and b.hint is not None else node.env.decide(a.lt(b)._truth()) is True
        )

    minimum = node.wrap_int(0)
    channel = strides[1]
    if _oblivious(node, relate("eq", channel._int(), constant(0)), channel.hint):
        return False
    for i in order:
        if _oblivious(node, relate("eq", sizes[i]._int(), constant(0)), sizes[i].hint):
            return False
        if less(strides[i], minimum):
            return False
        # (N, 1, H, W) contiguous is ambiguous: ATen calls it contiguous.
        if i == 0 and minimum.expr == channel.expr:
            return False
        minimum = strides[i]
        if not _oblivious(node, relate("eq", sizes[i]._int(), constant(1)), sizes[i].hint):
            minimum = strides[i].mul(sizes[i])
    return True


def node_of(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> SymNode:
    """Our node behind a symbolic value."""
    node = size.node
    if isinstance(node, SymNode):
        return node
    raise TypeError(f"{size!r} is a symbol of another library")
