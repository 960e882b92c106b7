"""Symbolic integers and floats: polynomials, relations, ranges, guards, and what is computed from them."""

from __future__ import annotations

from typing import Any

import torch

from primtorch.symbolic.expr import IntExpr, Program, constant, symbol
from primtorch.symbolic.float_expr import Definition, FloatExpr, float_constant
from primtorch.symbolic.learnt import Given, Learnt, Mark, learn, learnt_since, mark_of
from primtorch.symbolic.materialize import materialize
from primtorch.symbolic.relation import BoolExpr, Connective, Relation, Truth, relate
from primtorch.symbolic.scalar_ops import SCALAR_FUNCTIONS, SCALAR_OPS, UNARY_OPS
from primtorch.symbolic.shape_env import ShapeEnv, ShapeGuard, SymbolInfo, TakenForGranted
from primtorch.symbolic.sym_node import SymNode, node_of

__all__ = [
    "SCALAR_FUNCTIONS",
    "SCALAR_OPS",
    "UNARY_OPS",
    "BoolExpr",
    "Connective",
    "Definition",
    "FloatExpr",
    "Given",
    "IntExpr",
    "Learnt",
    "Mark",
    "Program",
    "Relation",
    "ShapeEnv",
    "ShapeGuard",
    "SymNode",
    "SymbolInfo",
    "TakenForGranted",
    "Truth",
    "bound",
    "constant",
    "depends_on_data",
    "expected",
    "expr_as_given",
    "expr_of",
    "float_expr_of",
    "hint_of",
    "learn",
    "learnt_since",
    "mark_of",
    "materialize",
    "relate",
    "settled",
    "shape_env_of",
    "size_of_data",
    "spelt",
    "symbol",
    "text_of",
]


def expr_of(size: int | torch.SymInt) -> IntExpr:
    """The polynomial of a size, simplified by the equalities that its environment has learnt."""
    if isinstance(size, int):
        return constant(size)
    node = node_of(size)
    return node.env.simplify(node._int())


def expr_as_given(size: torch.SymInt) -> IntExpr:
    """The polynomial of a size, simplified by what is known of inputs; numbers that only the data tells keep their
    names, under which a run reads them."""
    node = node_of(size)
    return node.env.under_given_names(node._int())


def settled(size: int | torch.SymInt) -> int | torch.SymInt:
    """A number for a size whose symbols cancel, or have been fixed: rules ask of an int whether it is 1."""
    if type(size) is not torch.SymInt:
        return size
    number = expr_of(size).as_int()
    return size if number is None else number


def expected(relation: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes holds: guarded, or of data's numbers a fact to check at run time."""
    return relation if isinstance(relation, bool) else node_of(relation).expect_true("", 0)


def size_of_data(env: ShapeEnv, least: int | torch.SymInt, most: int | torch.SymInt | None) -> torch.SymInt:
    """A new symbol for a size that depends on data, between these bounds as far as they are known."""
    made = env.unbacked(min=least if type(least) is int else 0, max=most if type(most) is int else None)
    if type(least) is torch.SymInt:
        relation: Any = made >= least
        relation.node.expect_true("", 0)
    return made


def float_expr_of(value: float | torch.SymFloat) -> FloatExpr:
    """The expression of a float: a symbol, or a known value."""
    if isinstance(value, float):
        return float_constant(value)
    expr = node_of(value).expr
    if not isinstance(expr, FloatExpr):
        raise TypeError(f"a float is expected, not {expr}")
    return expr


def hint_of(size: int | torch.SymInt, unbacked: int | None = None) -> int:
    """The size in the example; for one that depends on data, `unbacked`.

    Raises:
        ValueError: the size depends on data and has no value in the example, and `unbacked` is not given.
    """
    if isinstance(size, int):
        return size
    hint = node_of(size).hint
    if hint is None:
        hint = unbacked
    if hint is None:
        raise ValueError(f"{size} depends on data and has no example value")
    return int(hint)


def text_of(number: object) -> str:
    """The expression of a size or a number, also where texts of a program show numbers in the place of symbols."""
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return node_of(number).str()
    return str(number)


def depends_on_data(number: object) -> bool:
    """Whether a number is one that only the data tells, or is computed from one, and has not come to be known since."""
    return isinstance(number, (torch.SymInt, torch.SymFloat)) and node_of(number).hint is None


def shape_env_of(size: int | torch.SymInt | torch.SymFloat) -> ShapeEnv | None:
    """The environment of a symbolic number; None for an int."""
    return None if isinstance(size, int) else node_of(size).env


def spelt(number: Any) -> Any:
    """The expression that a symbolic number stands for, which belongs to no environment; anything else as it is."""
    if isinstance(number, torch.SymInt):
        return expr_of(number)
    return float_expr_of(number) if isinstance(number, torch.SymFloat) else number


def bound(number: Any, env: ShapeEnv) -> Any:
    """What `spelt` spelt out, as a number of an environment that knows the symbols."""
    if isinstance(number, IntExpr):
        return torch.SymInt(SymNode(number, env.hint(number), env))
    return torch.SymFloat(SymNode(number, env.hint(number), env)) if isinstance(number, FloatExpr) else number
