"""Python's arithmetic on numbers of which some are symbolic: what `a + b`, `divmod(a, b)` or `math.sqrt(a)` give.

The functions return None where the result cannot be a symbol (a complex one, one beyond 62 bits, an operator of other
types): then the caller uses the numbers themselves. They raise what Python raises in the example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch

from primtorch.symbolic.expr import IntExpr, constant
from primtorch.symbolic.float_expr import FloatExpr, float_constant
from primtorch.symbolic.relation import COMPARE, SYMBOLS, FloatRelation, relate
from primtorch.symbolic.scalar_ops import FLOAT_FUNCTIONS, float_maximum, float_minimum
from primtorch.symbolic.shape_env import ShapeEnv
from primtorch.symbolic.sym_node import SymNode, node_of

Expr: TypeAlias = IntExpr | FloatExpr

_INTEGERS = {"&": "bitand", "|": "bitor", "^": "bitxor", "<<": "lshift", ">>": "rshift"}
_FLOATS = {"+": "fadd", "-": "fsub", "*": "fmul", "/": "fdiv", "%": "fmod", "//": "ffloordiv", "**": "fpow"}
_RELATIONS = {symbol: name for name, symbol in SYMBOLS.items()}
_TO_INTEGER: dict[object, str] = {
    int: "trunc",
    math.trunc: "trunc",
    math.floor: "floor",
    math.ceil: "ceil",
    round: "round",
}


def is_symbolic(value: object) -> TypeGuard[Any]:
    """Whether a value is a number that a symbol stands in: an integer or a float that is not known."""
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def binary(op: str, a: object, b: object) -> object:
    """`a op b` for an operator of Python's source."""
    env = _env_of(a, b)
    left, right = _expr(a, env), _expr(b, env)
    if left is None or right is None:
        return None
    try:
        if isinstance(left, IntExpr) and isinstance(right, IntExpr):
            result = _integers(env, op, left, right)
        else:
            name = _FLOATS.get(op)
            result = None if name is None else env.define(name, _float(env, left), _float(env, right))
    except (TypeError, OverflowError):
        return None
    return None if result is None else env.number(result)


def _integers(env: ShapeEnv, op: str, a: IntExpr, b: IntExpr) -> Expr | None:
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//" | "%":
            _divisor(env, b)
            return env.floordiv(a, b) if op == "//" else env.mod(a, b)
        case "/":
            _divisor(env, b)
            return _defined(env, "idiv", a, b)
        case "**":
            return _power(env, a, b)
    name = _INTEGERS.get(op)
    return None if name is None else _defined(env, name, a, b)


def _defined(env: ShapeEnv, name: str, a: IntExpr, b: IntExpr) -> Expr | None:
    """An operation's result; None beside a constant of more than 64 bits, which no guard can hold."""
    known = (side.as_int() for side in (a, b))
    if any(number is not None and not -(2**63) <= number < 2**63 for number in known):
        return None
    return env.define(name, a, b)


def _divisor(env: ShapeEnv, b: IntExpr) -> None:
    """Guards that a divisor stays other than zero, or raises as the division by it does."""
    hint = env.hint(b)
    if env.evaluate(relate("eq", b, constant(0)), None if hint is None else hint == 0):
        raise ZeroDivisionError("division by zero")


def _power(env: ShapeEnv, a: IntExpr, b: IntExpr) -> Expr | None:
    exponent = b.as_int()
    if exponent is not None and 0 <= exponent <= _LARGEST_POLYNOMIAL:
        return a**exponent
    hint = env.hint(b)
    if env.evaluate(relate("ge", b, constant(0)), None if hint is None else hint >= 0):
        return env.define("ipow", a, b)
    return env.define("fpow", _float(env, a), _float(env, b))


_LARGEST_POLYNOMIAL = 4


def compare(op: str, a: object, b: object) -> object:
    """`a op b` for a comparison: a bool where it is known, else a SymBool."""
    env = _env_of(a, b)
    left, right = _expr(a, env), _expr(b, env)
    if left is None or right is None:
        return None
    name = _RELATIONS[op]
    if isinstance(left, IntExpr) and isinstance(right, IntExpr):
        return _truth(env, relate(name, left, right), env.hint(left), env.hint(right), name)
    try:
        x, y = _float(env, left), _float(env, right)
    except OverflowError:
        return None
    return _truth(env, FloatRelation(name, x, y), env.hint(x), env.hint(y), name)


def _truth(env: ShapeEnv, relation: Any, a: object, b: object, name: str) -> bool | torch.SymBool:
    known: bool | None = env.decide(relation)
    if known is not None:
        return known
    hint = None if a is None or b is None else COMPARE[name](a, b)
    return torch.SymBool(SymNode(relation, hint, env))


def unary(op: str, a: object) -> object:
    """`-a`, `+a`, `~a`."""
    if op == "+":
        return a
    if op == "-":
        return binary("-", 0, a) if isinstance(a, torch.SymInt) else _call("fneg", a)
    return binary("-", -1, a) if isinstance(a, torch.SymInt) else None


def function(fn: object, args: tuple[object, ...]) -> object:
    """A builtin or a function of `math` on numbers of which one at least is symbolic; None for one not known."""
    rule = _FUNCTIONS.get(fn)
    if rule is not None:
        return rule(*args) if len(args) in _ARITY[fn] else None
    name = FLOAT_FUNCTIONS.get(fn)
    return _call(name, args[0]) if name is not None and len(args) == 1 else None


def _call(name: str, a: object) -> object:
    env = _env_of(a, a)
    expr = _expr(a, env)
    try:
        return None if expr is None else env.number(env.define(name, _float(env, expr)))
    except (TypeError, OverflowError):
        return None


def _to_integer(name: str) -> Callable[[object], object]:
    return lambda a: a if isinstance(a, torch.SymInt) else _call(name, a)


def _to_float(a: object) -> object:
    env = _env_of(a, a)
    expr = _expr(a, env)
    try:
        return None if expr is None else env.number(_float(env, expr))
    except OverflowError:
        return None


def _absolute(a: Any) -> object:
    if isinstance(a, torch.SymFloat):
        return _call("fabs", a)
    env = _env_of(a, a)
    expr = env.simplify(node_of(a)._int())
    return env.number(env.maximum(expr, -expr))


def _extreme(largest: bool) -> Callable[[object, object], object]:
    """`min` or `max` of two numbers of one type; of two types the result's type depends on the values."""

    def rule(a: object, b: object) -> object:
        env = _env_of(a, b)
        left, right = _expr(a, env), _expr(b, env)
        if isinstance(left, IntExpr) and isinstance(right, IntExpr) and bool not in (type(a), type(b)):
            return env.number(env.maximum(left, right) if largest else env.minimum(left, right))
        if isinstance(left, FloatExpr) and isinstance(right, FloatExpr):
            return env.number(env.define("fmax" if largest else "fmin", left, right))
        return None

    return rule


def _divmod(a: object, b: object) -> object:
    quotient, rest = binary("//", a, b), binary("%", a, b)
    return None if quotient is None or rest is None else (quotient, rest)


_FUNCTIONS: dict[object, Callable[..., object]] = {
    **{fn: _to_integer(name) for fn, name in _TO_INTEGER.items()},
    float: _to_float,
    abs: _absolute,
    math.fabs: lambda a: _call("fabs", a),
    min: _extreme(False),
    max: _extreme(True),
    float_minimum: _extreme(False),  # as a graph's nodes have them
    float_maximum: _extreme(True),
    divmod: _divmod,
    pow: lambda a, b: binary("**", a, b),
}
_OF_TWO = (min, max, float_minimum, float_maximum, divmod, pow)
_ARITY: dict[object, tuple[int, ...]] = {fn: (2,) if fn in _OF_TWO else (1,) for fn in _FUNCTIONS}
# Every function that `function` may know.
NUMBER_FUNCTIONS: frozenset[object] = frozenset((*_FUNCTIONS, *FLOAT_FUNCTIONS))


def _env_of(a: Any, b: Any) -> ShapeEnv:
    return node_of(a if is_symbolic(a) else b).env


def _expr(value: Any, env: ShapeEnv) -> Expr | None:
    kind = type(value)
    if kind is int or kind is bool:
        return constant(int(value))
    if kind is float:
        return float_constant(value)
    if is_symbolic(value):
        expr = node_of(value).expr
        return env.simplify(expr) if isinstance(expr, IntExpr) else expr if isinstance(expr, FloatExpr) else None
    return None


def _float(env: ShapeEnv, expr: Expr) -> FloatExpr:
    made = expr if isinstance(expr, FloatExpr) else env.define("float", expr)
    assert isinstance(made, FloatExpr)
    return made
