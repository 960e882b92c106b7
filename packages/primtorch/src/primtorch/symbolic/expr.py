"""Integer polynomials over symbols, floor division, modulo, minimum and maximum; relations between them.

An expression is a sum of terms `coefficient * atom * atom * ...`. An atom is a symbol or a call of one of the four
operators that do not distribute over sums. Atoms are interned, so equal polynomials have equal terms and comparing
or hashing them costs no tree walk. Building an expression applies only rules that hold for all integers; rules that
need to know a symbol's range belong to `ShapeEnv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import EllipsisType
from typing import TypeAlias
from weakref import WeakValueDictionary

Program: TypeAlias = tuple[tuple[str, "int | str | float"], ...]


class Symbol:
    """A named unknown integer."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, name: str) -> None:
        self.key = name

    @property
    def name(self) -> str:
        """The symbol's name, "s0"."""
        return self.key

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Callable[[str], Symbol], tuple[str]]:
        return intern_symbol, (self.key,)


class Call:
    """`floordiv`, `mod`, `min` or `max` of two expressions that no rule could simplify."""

    __slots__ = ("__weakref__", "key", "left", "op", "right")

    def __init__(self, op: str, left: IntExpr, right: IntExpr) -> None:
        self.op, self.left, self.right = op, left, right
        if op in ("min", "max"):
            self.key = f"{op}({left}, {right})"
        else:
            self.key = f"({left.as_operand()}{'//' if op == 'floordiv' else '%'}{right.as_operand()})"

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Callable[[str, IntExpr, IntExpr], Call], tuple[str, IntExpr, IntExpr]]:
        return intern_call, (self.op, self.left, self.right)


Atom: TypeAlias = Symbol | Call
Monomial: TypeAlias = tuple[Atom, ...]
_order = attrgetter("key")
_symbols: WeakValueDictionary[str, Symbol] = WeakValueDictionary()
_calls: WeakValueDictionary[tuple[str, IntExpr, IntExpr], Call] = WeakValueDictionary()


def intern_symbol(name: str) -> Symbol:
    """The one Symbol of this name."""
    found = _symbols.get(name)
    if found is None:
        found = _symbols[name] = Symbol(name)
    return found


def intern_call(op: str, left: IntExpr, right: IntExpr) -> Call:
    """The one Call of this operator on these."""
    key = (op, left, right)
    found = _calls.get(key)
    if found is None:
        found = _calls[key] = Call(op, left, right)
    return found


class IntExpr:
    """A frozen integer polynomial. `str()` gives a Python expression over the symbols' names."""

    __slots__ = ("__weakref__", "_hash", "_symbols", "_value", "terms")
    terms: Mapping[Monomial, int]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = terms
        self._hash: int | None = None
        self._symbols: frozenset[str] | None = None
        self._value: int | EllipsisType | None = ...  # not asked for

    # identity -------------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, IntExpr) and self.terms == other.terms)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __reduce__(self) -> tuple[type[IntExpr], tuple[dict[Monomial, int]]]:
        return IntExpr, (dict(self.terms),)

    def as_int(self) -> int | None:
        """The value when the expression is a constant."""
        value = self._value
        if value is ...:
            terms = self.terms
            value = self._value = (terms.get(()) if len(terms) == 1 else None) if terms else 0
        return value

    def atoms(self) -> Iterator[Atom]:
        """The atoms of every term, with repetition."""
        for monomial in self.terms:
            yield from monomial

    def symbols(self) -> set[str]:
        """Names of all symbols, those inside calls included."""
        if self._symbols is None:
            found: set[str] = set()
            for atom in self.atoms():
                if isinstance(atom, Symbol):
                    found.add(atom.key)
                else:
                    found |= atom.left.symbols() | atom.right.symbols()
            self._symbols = frozenset(found)
        return set(self._symbols)

    # arithmetic -----------------------------------------------------------------------------------------------
    def __add__(self, other: IntExpr) -> IntExpr:
        return _combine(self.terms, other.terms, 1)

    def __sub__(self, other: IntExpr) -> IntExpr:
        return _combine(self.terms, other.terms, -1)

    def __neg__(self) -> IntExpr:
        return IntExpr({m: -c for m, c in self.terms.items()})

    def __mul__(self, other: IntExpr) -> IntExpr:
        factor, rest = self.as_int(), other
        if factor is None:
            factor, rest = other.as_int(), self
        if factor is not None:  # sizes are numbers nearly everywhere
            return rest if factor == 1 else IntExpr({m: c * factor for m, c in rest.terms.items()} if factor else {})
        terms: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                k = tuple(sorted(m + n, key=_order)) if m and n else m + n
                value = terms.get(k, 0) + c * d
                if value:
                    terms[k] = value
                else:
                    del terms[k]
        return IntExpr(terms)

    def __pow__(self, exponent: int) -> IntExpr:
        result = constant(1)
        for _ in range(exponent):
            result = result * self
        return result

    def __floordiv__(self, other: IntExpr) -> IntExpr:
        """Floor division. `(q*b + r) // b == q + r // b` for all integers with b != 0."""
        divisor = other.as_int()
        if divisor == 0:
            raise ZeroDivisionError(f"({self}) // 0")
        quotient, rest = _divide(self, other)
        value = rest.as_int()
        if value == 0:
            return quotient
        if value is not None and divisor is not None:
            return quotient + constant(value // divisor)
        return quotient + _nested_floordiv(rest, other)

    def __mod__(self, other: IntExpr) -> IntExpr:
        """Modulo with the sign of the divisor, as in Python."""
        divisor = other.as_int()
        if divisor == 0:
            raise ZeroDivisionError(f"({self}) % 0")
        _, rest = _divide(self, other)
        value = rest.as_int()
        if value == 0:
            return rest
        if value is not None and divisor is not None:
            return constant(value % divisor)
        return _call("mod", rest, other)

    def minimum(self, other: IntExpr) -> IntExpr:
        """The smaller of two: one of them where their difference is known, else a term."""
        difference = (self - other).as_int()
        if difference is not None:
            return self if difference <= 0 else other
        a, b = sorted((self, other), key=str)
        return _call("min", a, b)

    def maximum(self, other: IntExpr) -> IntExpr:
        """The larger of two, as `minimum`."""
        difference = (self - other).as_int()
        if difference is not None:
            return self if difference >= 0 else other
        a, b = sorted((self, other), key=str)
        return _call("max", a, b)

    # evaluation -----------------------------------------------------------------------------------------------
    def evaluate(self, values: Mapping[str, int]) -> int:
        """The value for the given symbols; KeyError names a symbol that has none."""
        total = 0
        for monomial, coefficient in self.terms.items():
            product = coefficient
            for atom in monomial:
                product *= _evaluate_atom(atom, values)
            total += product
        return total

    def substitute(self, values: Mapping[Atom, IntExpr]) -> IntExpr:
        """The expression with atoms replaced, inside calls too."""
        terms: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms.items():
            term = _ONE
            for atom in monomial:
                term = term * _substitute_atom(atom, values)
            _add(terms, term.terms, coefficient)
        return IntExpr(terms)

    def program(self) -> Program:
        """A postfix program: `const k`, `sym name`, and binary operators on the two topmost values."""
        return tuple(_int_program(self))

    # text -----------------------------------------------------------------------------------------------------
    def ordered_terms(self) -> list[tuple[Monomial, int]]:
        """Terms from the highest degree to the constant, then by name."""
        return sorted(self.terms.items(), key=lambda t: (-len(t[0]), [a.key for a in t[0]]))

    def __str__(self) -> str:
        parts: list[str] = []
        for monomial, coefficient in self.ordered_terms():
            factors = [a.key for a in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            parts.append((" " + sign + " " if parts else ("-" if sign == "-" else "")) + "*".join(factors))
        return "".join(parts) or "0"

    def as_operand(self) -> str:
        """The text, in parentheses where a surrounding operator would bind tighter."""
        text = str(self)
        single = len(self.terms) <= 1 and all(
            len(m) + (abs(c) != 1 or not m) <= 1 and c > 0 for m, c in self.terms.items()
        )
        return text if single else f"({text})"

    __repr__ = __str__


def constant(value: int) -> IntExpr:
    """The polynomial of a number."""
    return IntExpr({(): value} if value else {})


_ONE = constant(1)


def symbol(name: str) -> IntExpr:
    """The polynomial of one symbol."""
    return IntExpr({(intern_symbol(name),): 1})


def atom_expr(atom: Atom) -> IntExpr:
    """The polynomial of one atom."""
    return IntExpr({(atom,): 1})


def _add(terms: dict[Monomial, int], more: Mapping[Monomial, int], factor: int) -> None:
    """Adds a multiple of a polynomial to another one's terms."""
    for monomial, coefficient in more.items():
        value = terms.get(monomial, 0) + factor * coefficient
        if value:
            terms[monomial] = value
        else:
            del terms[monomial]


def _combine(left: Mapping[Monomial, int], right: Mapping[Monomial, int], sign: int) -> IntExpr:
    if not left and sign > 0:
        return IntExpr(right)
    terms = dict(left)
    _add(terms, right, sign)
    return IntExpr(terms)


def _call(op: str, left: IntExpr, right: IntExpr) -> IntExpr:
    return atom_expr(intern_call(op, left, right))


def _nested_floordiv(left: IntExpr, right: IntExpr) -> IntExpr:
    """`(a // m) // n == a // (m*n)` for positive constants; a common positive factor cancels."""
    n = right.as_int()
    if n is not None and n > 0 and len(left.terms) == 1:
        ((monomial, coefficient),) = left.terms.items()
        if coefficient == 1 and len(monomial) == 1:
            inner = monomial[0]
            if isinstance(inner, Call) and inner.op == "floordiv":
                m = inner.right.as_int()
                if m is not None and m > 0:
                    return inner.left // constant(m * n)
    return _call("floordiv", left, right)


def _monomial_quotient(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    rest = list(monomial)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _divide(left: IntExpr, right: IntExpr) -> tuple[IntExpr, IntExpr]:
    """(q, r) with left == q*right + r, taking out of `left` what is an exact multiple of `right`."""
    if len(right.terms) == 1:
        ((divisor, factor),) = right.terms.items()
        quotient: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for monomial, coefficient in left.terms.items():
            q = _monomial_quotient(monomial, divisor)
            if q is None:
                rest[monomial] = coefficient
                continue
            whole = coefficient // factor
            if whole:
                quotient[q] = whole
            if coefficient - whole * factor:
                rest[monomial] = coefficient - whole * factor
        return IntExpr(quotient), IntExpr(rest)
    # Long division by a sum: used only when it leaves nothing, because a partial quotient has no canonical form.
    lead, factor = right.ordered_terms()[0]
    result, rest_expr = constant(0), left
    for _ in range(len(left.terms) + 4):
        if not rest_expr.terms:
            return result, rest_expr
        found = None
        for monomial, coefficient in rest_expr.ordered_terms():
            q = _monomial_quotient(monomial, lead)
            if q is not None and coefficient % factor == 0:
                found = IntExpr({q: coefficient // factor})
                break
        if found is None:
            break
        result, rest_expr = result + found, rest_expr - found * right
    return (result, rest_expr) if not rest_expr.terms else (constant(0), left)


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}
_REBUILD: dict[str, Callable[[IntExpr, IntExpr], IntExpr]] = {
    "floordiv": IntExpr.__floordiv__,
    "mod": IntExpr.__mod__,
    "min": IntExpr.minimum,
    "max": IntExpr.maximum,
}


def _evaluate_atom(atom: Atom, values: Mapping[str, int]) -> int:
    if isinstance(atom, Symbol):
        return values[atom.key]
    return _OPERATORS[atom.op](atom.left.evaluate(values), atom.right.evaluate(values))


def _substitute_atom(atom: Atom, values: Mapping[Atom, IntExpr]) -> IntExpr:
    replacement = values.get(atom)
    if replacement is not None:
        return replacement
    if isinstance(atom, Symbol):
        return atom_expr(atom)
    left, right = atom.left.substitute(values), atom.right.substitute(values)
    if left == atom.left and right == atom.right:
        return atom_expr(atom)
    return _REBUILD[atom.op](left, right)


def _int_program(expr: IntExpr) -> Iterable[tuple[str, int | str | float]]:
    terms = expr.ordered_terms()
    if not terms:
        yield ("const", 0)
    for position, (monomial, coefficient) in enumerate(terms):
        size = abs(coefficient)
        pending = 0
        if size != 1 or not monomial:
            yield ("const", size)
            pending = 1
        for atom in monomial:
            if isinstance(atom, Symbol):
                yield ("sym", atom.key)
            else:
                yield from _int_program(atom.left)
                yield from _int_program(atom.right)
                yield (atom.op, 0)
            if pending:
                yield ("mul", 0)
            pending = 1
        if position:
            yield ("sub" if coefficient < 0 else "add", 0)
        elif coefficient < 0:
            yield ("neg", 0)
