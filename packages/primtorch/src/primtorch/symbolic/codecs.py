"""Expressions and conditions as records (`primtorch.records`): each is read as the very one that was written."""

from __future__ import annotations

from collections.abc import Sequence

from primtorch.records import Codec
from primtorch.symbolic.expr import Atom, Call, IntExpr, Symbol, intern_call, intern_symbol
from primtorch.symbolic.float_expr import Definition, FloatExpr
from primtorch.symbolic.learnt import Learnt, NewSymbol
from primtorch.symbolic.relation import Connective, Defined, FloatRelation, Relation, Truth

RECORDS: tuple[type, ...] = (
    FloatExpr, Definition, Relation, FloatRelation, Defined, Truth, Connective, NewSymbol, Learnt,
)  # fmt: skip


def _symbol(name: object) -> Symbol:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a symbol")
    return intern_symbol(name)


def _call(op: str, left: object, right: object) -> Call:
    """As it was: rules that would simplify it have been applied before it was written."""
    if op not in ("floordiv", "mod", "min", "max") or not isinstance(left, IntExpr) or not isinstance(right, IntExpr):
        raise ValueError(f"{op!r} of {left!r} and {right!r} is no atom")
    return intern_call(op, left, right)


def _polynomial(terms: Sequence[tuple[tuple[Atom, ...], int]]) -> IntExpr:
    for atoms, coefficient in terms:
        ordered = all(isinstance(atom, Symbol | Call) for atom in atoms) and list(atoms) == sorted(
            atoms, key=lambda atom: atom.key
        )
        if not ordered or type(coefficient) is not int or not coefficient:
            raise ValueError(f"{coefficient!r} times {atoms!r} is no term")
    return IntExpr(dict(terms))


CODECS = (
    Codec(Symbol, lambda symbol: (symbol.name,), _symbol),
    Codec(Call, lambda call: (call.op, call.left, call.right), _call),
    Codec(IntExpr, lambda expr: (tuple(expr.ordered_terms()),), _polynomial),
)
