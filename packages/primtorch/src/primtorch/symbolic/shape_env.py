"""What is known about symbols: hints, ranges, guards asked so far, and what follows from them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch

from primtorch import forks
from primtorch.errors import DataDependentValue
from primtorch.frozen import record
from primtorch.schemas import UserFrame
from primtorch.symbolic.expr import Atom, Call, IntExpr, Program, Symbol, atom_expr, constant, intern_symbol, symbol
from primtorch.symbolic.float_expr import Definition, FloatExpr, float_constant
from primtorch.symbolic.relation import (
    BoolExpr,
    Connective,
    Defined,
    FloatRelation,
    Relation,
    Truth,
    at_least_zero,
    connect,
    relate,
    zero_form,
)
from primtorch.symbolic.scalar_ops import SCALAR_OPS
from primtorch.symbolic.sym_node import Expr, SymNode

Range = tuple[int | None, int | None]


@record
class SymbolInfo:
    """A symbol as it was made: its value in the example (None for a data-dependent one), origin and range."""

    name: str
    hint: int | float | None
    source: str
    min: int | None
    max: int | None

    @property
    def backed(self) -> bool:
        """Whether an example's number is known."""
        return self.hint is not None


ExprT = TypeVar("ExprT", IntExpr, BoolExpr)
Number = TypeVar("Number", int, float)


@record
class ShapeGuard:
    """A boolean expression that was assumed true, and the user's frames that asked."""

    expr: BoolExpr
    stack: tuple[UserFrame, ...]

    def __str__(self) -> str:
        where = f"  # {self.stack[-1]}" if self.stack else ""
        return f"{self.expr}{where}"


class TakenForGranted(NamedTuple):
    """What a trial takes for granted: guards, what it has found of the data's numbers, and the values of symbols."""

    guards: Sequence[ShapeGuard]
    facts: Sequence[ShapeGuard]
    values: Mapping[str, int | float]


def _no_frames() -> tuple[UserFrame, ...]:
    return ()


class ShapeEnv:
    """Symbols of one capture. Decides relations statically where it can; records a guard where it cannot.

    Args:
        user_frame: gives the user's current frames, outermost first; stored with each guard.
    """

    def __init__(self, user_frame: Callable[[], tuple[UserFrame, ...]] | None = None) -> None:
        self.user_frame = user_frame or _no_frames
        self.symbols: dict[str, SymbolInfo] = {}
        self.shows_numbers = False
        """Whether the text of a symbolic number is its value, guarded from then on, as it is where a program asks."""
        self.in_formulas = False
        """Whether the questions of torch's C++ are those of its formulas of derivatives."""
        self.guards: list[ShapeGuard] = []
        self.assumptions: list[ShapeGuard] = []
        """What the program asserts of data-dependent sizes: to be checked at run time, not before the call."""
        self.layouts: dict[object, object] = {}
        """Results of rules on symbolic layouts, by the rule and the sizes' expressions: what is known only grows."""
        self.definitions: dict[str, Definition] = {}
        """Derived symbols, in the order in which they were made: each is computed from symbols before it."""
        self._defined: dict[Definition, IntExpr | FloatExpr] = {}
        self._ranges: dict[str, Range] = {}
        self._substitutions: dict[Atom, IntExpr] = {}
        self._simplified: dict[IntExpr, IntExpr] = {}
        self._decided: dict[BoolExpr, bool | None] = {}
        self._zero: set[IntExpr] = set()
        self._nonzero: set[IntExpr] = set()
        self._facts: set[FloatRelation | Defined] = set()
        self._lower: dict[IntExpr, int] = {}
        """p (without constant term) -> the largest known k with p >= k."""
        self._values: dict[str, int | float] = {}
        """Of symbols during a trial, where they are not the example's."""
        self._trials = forks.rlock()
        self._before: list[tuple[int, Mapping[str, Any]]] = []
        """What was known before the trials that are under way, with the threads that they are of."""
        forks.in_child(self._forked)

    # making symbols -------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Lets go of the program: what is asked from now on is asked by no line of it."""
        self.user_frame = _no_frames

    @contextlib.contextmanager
    def asked_by(self, user_frame: Callable[[], tuple[UserFrame, ...]]) -> Iterator[None]:
        """A stage behind capture: what is asked within is asked by these lines."""
        before, self.user_frame = self.user_frame, user_frame
        try:
            yield
        finally:
            self.user_frame = before

    @contextlib.contextmanager
    def formulas(self) -> Iterator[None]:
        """A block in which derivatives are made by torch's formulas."""
        before, self.in_formulas = self.in_formulas, True
        try:
            yield
        finally:
            self.in_formulas = before

    def symbol(self, hint: int, source: str, *, min: int = 2, max: int | None = None) -> torch.SymInt:
        """A new symbol s0, s1, ... with the example's value; `min` and `max` are promises that the caller guards."""
        return self._new(SymbolInfo(self._fresh("s"), hint, source, min, max))

    def float_symbol(self, hint: float, source: str) -> torch.SymFloat:
        """A new symbol f0, f1, ... for a float that the program is given, with the example's value."""
        name = self._fresh("f")
        self.symbols[name] = SymbolInfo(name, hint, source, None, None)
        return torch.SymFloat(SymNode(FloatExpr(name), hint, self))

    def _fresh(self, letter: str) -> str:
        return f"{letter}{sum(1 for s in self.symbols if s.startswith(letter))}"

    def unbacked(self, *, min: int = 0, max: int | None = None) -> torch.SymInt:
        """A new symbol u0, u1, ... for a size that depends on data."""
        return self._new(SymbolInfo(self._fresh("u"), None, "", min, max))

    def unbacked_float(self) -> torch.SymFloat:
        """A new symbol uf0, uf1, ... for a float that depends on data."""
        name = self._fresh("uf")
        self.symbols[name] = SymbolInfo(name, None, "", None, None)
        return torch.SymFloat(SymNode(FloatExpr(name), None, self))

    def define(self, op: str, *args: IntExpr | FloatExpr) -> IntExpr | FloatExpr:
        """The result of an operation of `SCALAR_OPS`: a derived symbol, or the value where all operands are known.

        An operation that some operands make raise is guarded not to. Raises what it raises in the example.

        Raises:
            TypeError: the result is no real number (a negative number to a fraction).
            OverflowError: an integer result does not fit in 62 bits.
        """
        record = SCALAR_OPS[op]
        definition = Definition(op, tuple(self.simplify(a) if isinstance(a, IntExpr) else a for a in args))
        found = self._defined.get(definition)
        if found is not None:
            return found
        hints = [self.hint(a) for a in definition.args]
        hint = None if None in hints else record.function(*hints)
        if isinstance(hint, complex):
            raise TypeError(f"{record.text(tuple(map(str, args)))} is complex")
        if isinstance(hint, int) and abs(hint) > _LARGEST:
            raise OverflowError(f"{record.text(tuple(map(str, args)))} does not fit in 62 bits")
        result: IntExpr | FloatExpr
        if hint is not None and not any(a.symbols() for a in definition.args):
            result = constant(hint) if isinstance(hint, int) else float_constant(hint)
        else:
            name = self._fresh("s" if record.gives == "int" else "f")
            low, high = _result_range(op, definition.args) if record.gives == "int" else (None, None)
            self.symbols[name] = SymbolInfo(name, hint, record.text(tuple(map(str, definition.args))), low, high)
            self.definitions[name] = definition
            self._ranges[name] = (low, high)
            if hint is not None and self._values:
                self._values[name] = hint
            result = symbol(name) if record.gives == "int" else FloatExpr(name)
            if hint is not None and record.partial and not _always_defined(definition):
                self.assume(Defined(name), self.guards)
        self._defined[definition] = result
        return result

    def spelt_out(self, program: Program) -> Program:
        """A program that computes derived symbols where it reads them first, and keeps them: ("keep", k) leaves the
        value on the stack as the k-th kept one, ("kept", k) reads it again."""
        steps: list[tuple[str, int | str | float]] = []
        kept: dict[str, int] = {}
        self._spell_out(program, steps, kept)
        return tuple(steps)

    def _spell_out(self, program: Program, steps: list[tuple[str, int | str | float]], kept: dict[str, int]) -> None:
        for op, argument in program:
            name = str(argument)
            definition = self.definitions.get(name) if op == "sym" else None
            if definition is None:
                steps.append((op, argument))
            elif name in kept:
                steps.append(("kept", kept[name]))
            else:
                for arg in definition.args:
                    self._spell_out(arg.program(), steps, kept)
                kept[name] = len(kept)
                steps += [(definition.op, 0), ("keep", kept[name])]

    def roots(self, names: set[str], *, simplified: bool = True) -> set[str]:
        """The symbols that these are computed from in the end: as they are known under the equalities learnt so far, or
        as `spelt_out` reads them."""
        found: set[str] = set()
        for name in names:
            definition = self.definitions.get(name)
            if definition is None:
                found.add(name)
                continue
            for arg in definition.args:
                known = self.simplify(arg) if simplified and isinstance(arg, IntExpr) else arg
                found |= self.roots(known.symbols(), simplified=simplified)
        return found

    def named(self, name: str) -> torch.SymInt | torch.SymFloat:
        """The symbol of this name as a program holds it."""
        hint = self.symbols[name].hint
        if name.startswith(("f", "uf")):
            return torch.SymFloat(SymNode(FloatExpr(name), hint, self))
        return torch.SymInt(SymNode(symbol(name), hint, self))

    def number(self, expr: IntExpr | FloatExpr) -> int | float | torch.SymInt | torch.SymFloat:
        """What a program holds for an expression: the number itself where it is known."""
        if isinstance(expr, IntExpr):
            return self.size(expr)
        return torch.SymFloat(SymNode(expr, self.hint(expr), self)) if expr.value is None else expr.value

    def _new(self, info: SymbolInfo) -> torch.SymInt:
        self.symbols[info.name] = info
        self._ranges[info.name] = (info.min, info.max)
        return torch.SymInt(SymNode(symbol(info.name), info.hint, self))

    def size(self, expr: IntExpr) -> int | torch.SymInt:
        """The size that an expression over this environment's symbols stands for."""
        expr = self.simplify(expr)
        value = expr.as_int()
        return torch.SymInt(SymNode(expr, self.hint(expr), self)) if value is None else value

    @overload
    def hint(self, expr: IntExpr) -> int | None: ...
    @overload
    def hint(self, expr: FloatExpr) -> float | None: ...
    @overload
    def hint(self, expr: IntExpr | FloatExpr) -> int | float | None: ...
    @overload
    def hint(self, expr: Expr) -> int | float | bool | None: ...
    def hint(self, expr: Expr) -> int | float | bool | None:
        """The expression's value in the example, or in the trial; None when it involves a data-dependent symbol."""
        hints: dict[str, Any] = {}
        for name in expr.symbols():
            value = self._values.get(name, self.symbols[name].hint)
            if value is None:
                return None
            hints[name] = value
        return expr.evaluate(hints)

    # what is taken for granted of one thing that is made ---------------------------------------------------------
    @contextlib.contextmanager
    def trial(
        self,
        values: Mapping[str, int | float],
        known: Sequence[ShapeGuard] = (),
        facts: Sequence[ShapeGuard] = (),
    ) -> Iterator[list[ShapeGuard]]:
        """A block whose guards hold for what is made in it alone: behind it the environment knows what it knew before.

        Yields the guards: `known`, then those that are asked, which whoever uses what was made has to check. Symbols
        that the block makes stay, so that no name comes twice. Blocks of several threads wait for each other.

        Args:
            values: of the symbols, where they are others than the example's or than those of a trial around this one.
            known: what holds already, as an earlier block asked it.
            facts: what that block has found of the data's numbers.
        """
        with self._trials:
            self._before.append((threading.get_ident(), {name: getattr(self, name) for name in _KNOWLEDGE}))
            for name, state in self._before[-1][1].items():
                setattr(self, name, state.copy())
            self.guards, self._values = [], {}
            for guard in known:
                self.assume(guard.expr, self.guards)
            held = {fact.expr for fact in self.assumptions}
            for fact in facts:
                if fact.expr not in held:
                    self.assume(fact.expr, self.assumptions)
            self._values = self.with_derived({**self._before[-1][1]["_values"], **values})
            try:
                yield self.guards
            finally:
                self._know(self._before.pop()[1])

    def _know(self, before: Mapping[str, Any]) -> None:
        for name, state in before.items():
            setattr(self, name, state)
        for name, info in self.symbols.items():
            self._ranges.setdefault(name, (info.min, info.max))

    def _forked(self) -> None:
        """Ends the trial of a thread that is not in this process."""
        if self._before and self._before[0][0] != threading.get_ident():
            self._know(self._before[0][1])
            self._before.clear()

    @property
    def taken(self) -> TakenForGranted:
        """What the trial that this is within takes for granted, of which more may come; nothing outside."""
        here = (self.guards, self.assumptions, self._values)
        return TakenForGranted(*here) if self._before else TakenForGranted((), (), {})

    def with_derived(self, values: Mapping[str, int | float]) -> dict[str, int | float]:
        """Values of symbols, with those of the symbols that follow from them."""
        found = dict(values)
        for name, value in values.items():
            known = str(self.value_of(name))
            if known in self.symbols:
                found.setdefault(known, value)
        for name, definition in self.definitions.items():
            if name not in found and all(arg.symbols() <= found.keys() for arg in definition.args):
                with contextlib.suppress(ArithmeticError, TypeError, ValueError):  # guarded not to, where it is asked
                    found[name] = SCALAR_OPS[definition.op].function(*(a.evaluate(found) for a in definition.args))  # type: ignore[arg-type]
        return found

    @property
    def on_trial(self) -> bool:
        """Whether symbols have other values than the example's: those of the trial that this is within."""
        return bool(self._values)

    def now(self, expr: Expr, hint: int | float | bool) -> int | float | bool:
        """What a value of the example, `hint`, is for the sizes of the trial."""
        found = self.hint(expr)
        return hint if found is None else found

    def come_to(self, expr: Expr) -> int | float | bool | None:
        """The value of what was made of data, where it has come to be known in terms of what the example has."""
        if not self._substitutions or isinstance(expr, FloatExpr):
            return None
        return self.hint(expr.substitute(self._substitutions))

    # what follows from what is known --------------------------------------------------------------------------
    def simplify(self, expr: IntExpr) -> IntExpr:
        """The expression under the equalities learnt so far."""
        if not self._substitutions:
            return expr
        found = self._simplified.get(expr)
        if found is None:
            found = self._simplified[expr] = expr.substitute(self._substitutions)
        return found

    def found(self) -> dict[Atom, IntExpr]:
        """What is known by now of numbers that only the data tells, and of what is computed from such."""
        known = self._substitutions.items()
        return {atom: value for atom, value in known if self._of_data(atom_expr(atom))}

    def _of_data(self, expr: IntExpr | BoolExpr) -> bool:
        return not all(self.symbols[name].backed for name in expr.symbols())

    def multiples(self) -> frozenset[tuple[IntExpr, IntExpr]]:
        """(expression, what it is known to be a whole number of times)."""
        known = ((atom, value) for atom, value in self._substitutions.items() if isinstance(atom, Call))
        return frozenset((a.left, a.right) for a, value in known if a.op == "mod" and value.as_int() == 0)

    def under_given_names(self, expr: ExprT) -> ExprT:
        """The expression with what is known by now of the numbers that inputs give. Those that only the data tells keep
        the names that they were given, whatever they turn out to be equal to: each is read by itself."""
        known = [name for name in sorted(expr.symbols()) if name in self.symbols and self.symbols[name].backed]
        values: dict[Atom, IntExpr] = {intern_symbol(name): self.simplify(symbol(name)) for name in known}
        found: ExprT = expr.substitute(values)  # type: ignore[assignment]
        return found

    def range_of(self, expr: IntExpr) -> Range:
        """Bounds by interval arithmetic; None is unbounded."""
        low: int | None = 0
        high: int | None = 0
        for monomial, coefficient in expr.terms.items():
            term: Range = (coefficient, coefficient)
            for atom in monomial:
                term = _product(term, self._atom_range(atom))
            low = None if low is None or term[0] is None else low + term[0]
            high = None if high is None or term[1] is None else high + term[1]
        return low, high

    def _atom_range(self, atom: Atom) -> Range:
        if isinstance(atom, Symbol):
            return self._ranges.get(atom.key, (None, None))
        (a, b), (c, d) = self.range_of(atom.left), self.range_of(atom.right)
        if atom.op == "floordiv" and c is not None and c > 0:
            low = None if a is None else (a // c if a < 0 else (0 if d is None else a // d))
            high = None if b is None else (b // c if b >= 0 else (-1 if d is None else b // d))
            return low, high
        if atom.op == "mod" and c is not None and c > 0:
            high = None if d is None else d - 1
            return 0, (b if a is not None and a >= 0 and b is not None and (high is None or b < high) else high)
        if atom.op == "min":
            return (None if a is None or c is None else min(a, c)), (d if b is None else b if d is None else min(b, d))
        if atom.op == "max":
            return (c if a is None else a if c is None else max(a, c)), (None if b is None or d is None else max(b, d))
        return None, None

    def decide(self, expr: BoolExpr) -> bool | None:
        """The truth value when it follows from ranges and guards; None when it does not."""
        if isinstance(expr, Truth):
            return expr.value
        if expr in self._decided:
            return self._decided[expr]
        if isinstance(expr, Connective):
            absorbing = expr.op == "or"
            left, right = self.decide(expr.left), self.decide(expr.right)
            if left is absorbing or right is absorbing:
                result: bool | None = absorbing
            else:
                result = None if left is None or right is None else not absorbing
        elif isinstance(expr, Relation):
            result = self._decide_relation(expr)
        else:
            result = self._decide_float(expr)
        self._decided[expr] = result
        return result

    def _decide_float(self, expr: FloatRelation | Defined) -> bool | None:
        if isinstance(expr, Defined):
            return True if expr in self._facts else None
        if expr in self._facts:
            return True
        if expr.negated() in self._facts:
            return False
        return None if expr.symbols() else expr.evaluate({})

    def _decide_relation(self, relation: Relation) -> bool | None:
        relation = Relation(relation.op, self.simplify(relation.left), self.simplify(relation.right))
        bound = at_least_zero(relation)
        if bound is not None:
            if self._known_at_least_zero(bound):
                return True
            return False if self._known_at_least_zero(-bound - constant(1)) else None
        difference = relation.left - relation.right
        equal = self._decide_zero(difference)
        return equal if equal is None or relation.op == "eq" else not equal

    def _decide_zero(self, difference: IntExpr) -> bool | None:
        value = difference.as_int()
        if value is not None:
            return value == 0
        form = zero_form(difference)
        if form in self._zero:
            return True
        if form in self._nonzero:
            return False
        one = constant(1)
        if self._known_at_least_zero(difference - one) or self._known_at_least_zero(-difference - one):
            return False
        factor = 0
        for monomial, coefficient in difference.terms.items():
            if monomial:
                factor = _gcd(factor, coefficient)
        return False if difference.terms.get((), 0) % factor else None

    def _known_at_least_zero(self, expr: IntExpr) -> bool:
        low, _ = self.range_of(expr)
        if low is not None and low >= 0:
            return True
        offset = expr.terms.get((), 0)
        known = self._lower.get(expr - constant(offset) if offset else expr)
        if known is not None and known + offset >= 0:
            return True
        return len(expr.terms) > 1 and self._nonnegative_after_shift(expr)

    def _nonnegative_after_shift(self, expr: IntExpr) -> bool:
        """Whether every coefficient is >= 0 once each atom is written as its lower bound plus something >= 0.

        This sees what term-by-term bounds cannot, as s0*s1 - s1 >= 0 for s0 >= 1.
        """
        shift: dict[Atom, IntExpr] = {}
        for atom in expr.atoms():
            low, _ = self._atom_range(atom)
            if low is None:
                return False
            shift[atom] = atom_expr(atom) + constant(low)
        shifted = constant(0)
        for monomial, coefficient in expr.terms.items():
            term = constant(coefficient)
            for atom in monomial:
                term = term * shift[atom]
            shifted = shifted + term
        return all(c >= 0 for c in shifted.terms.values())

    # guards ---------------------------------------------------------------------------------------------------
    def evaluate(self, expr: BoolExpr, hint: bool | None) -> bool:
        """The truth value; where it is not known, the example's, with a guard.

        Raises:
            DataDependentValue: the value is not known and involves a data-dependent symbol.
        """
        known = self.decide(expr)
        if known is not None:
            return known
        if hint is None:
            raise DataDependentValue(
                f"the truth of {expr}",
                "it depends on a size that is known only when the program runs",
                "Assert what you know of it (torch._check), or keep this part out of the compiled region.",
                self.user_frame(),
                expr.symbols(),
            )
        if self._values:
            hint = bool(self.now(expr, hint))
        if self._of_data(expr):  # known in terms of others
            expr = expr.substitute(self._substitutions)
        self.assume(expr if hint else expr.negated(), self.guards)
        return hint

    # Torch's own Python meta kernels, which C++ functionalization runs for in-place operators, ask by these two names.
    def evaluate_sym_node(
        self, node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> int | bool | float:
        """The node's value in the example, guarded; for a boolean that depends on data, the fallback where given."""
        if not node.is_bool():
            return node.int_() if node.is_int() else node.guard_float("", 0)
        if fallback_value is not None:
            return node.guard_or_true("", 0) if fallback_value else node.guard_or_false("", 0)
        return node.guard_size_oblivious("", 0) if size_oblivious else node.bool_()

    def _maybe_evaluate_static(self, expr: BoolExpr | IntExpr) -> int | bool | None:
        """The value that follows from what is known, without a guard; None where it does not."""
        return self.simplify(expr).as_int() if isinstance(expr, IntExpr) else self.decide(expr)

    def assume(self, expr: BoolExpr, record: list[ShapeGuard]) -> None:
        """Record a fact and learn from it."""
        record.append(ShapeGuard(expr, self.user_frame()))
        self._learn(expr)

    def specialize(self, expr: IntExpr, hint: int | None) -> int:
        """The integer value, with a guard that fixes it."""
        expr = self.simplify(expr)
        value = expr.as_int()
        if value is not None:
            return value
        hint = self._example(expr, hint, "symbolic")
        self.evaluate(relate("eq", expr, constant(hint)), True)
        return hint

    def _example(self, expr: IntExpr | FloatExpr, hint: Number | None, kept: str) -> Number:
        """The value that the example has, or that is known by now. Raises where only data tells it."""
        if hint is None:
            raise DataDependentValue(
                f"the value of {expr}",
                "it is known only when the program runs",
                f"Keep it {kept}, or keep this part out of the compiled region.",
                self.user_frame(),
                expr.symbols(),
            )
        now = self.hint(expr) if self._values else None
        return hint if now is None else now  # type: ignore[return-value]

    def specialize_float(self, expr: FloatExpr, hint: float | None) -> float:
        """The float's value, with a guard that fixes it."""
        if expr.value is not None:
            return expr.value
        hint = self._example(expr, hint, "in a tensor")
        self.evaluate(FloatRelation("same", expr, float_constant(hint)), True)
        return hint

    def _learn(self, expr: BoolExpr) -> None:
        if isinstance(expr, (FloatRelation, Defined)):
            self._facts.add(expr)
        elif isinstance(expr, Connective):
            if expr.op == "and":
                self._learn(expr.left)
                self._learn(expr.right)
        elif isinstance(expr, Relation):
            left, right = self.simplify(expr.left), self.simplify(expr.right)
            difference = left - right
            if difference.as_int() is None:
                bound = at_least_zero(Relation(expr.op, left, right))
                if bound is not None:
                    self._learn_at_least_zero(bound)
                elif expr.op == "ne":
                    self._nonzero.add(zero_form(difference))
                else:
                    self._learn_zero(difference)
        self._decided.clear()

    def _learn_at_least_zero(self, bound: IntExpr) -> None:
        offset = bound.terms.get((), 0)
        rest = bound - constant(offset)
        self._lower[rest] = least = max(self._lower.get(rest, -offset), -offset)
        if len(rest.terms) == 1:
            ((monomial, coefficient),) = rest.terms.items()
            if len(monomial) == 1 and isinstance(monomial[0], Symbol):
                self._bound_symbol(monomial[0].key, coefficient, offset)
        if self._known_at_least_zero(constant(least) - rest):  # it is no more, either
            self._learn_zero(rest - constant(least))

    def _bound_symbol(self, name: str, coefficient: int, offset: int) -> None:
        low, high = self._ranges[name]
        if coefficient > 0:
            limit = -(offset // coefficient)
            self._ranges[name] = (limit if low is None else max(low, limit), high)
        else:
            limit = offset // -coefficient
            self._ranges[name] = (low, limit if high is None else min(high, limit))

    def _learn_zero(self, difference: IntExpr) -> None:
        form = zero_form(difference)
        self._zero.add(form)
        for atom in min(form.terms, key=len):  # what is surely positive and a factor of all
            if (self._atom_range(atom)[0] or 0) > 0 and all(atom in monomial for monomial in form.terms):
                form = form // atom_expr(atom)
        solved = self._solve(form)
        if solved is None:
            return
        atom, value = solved
        step = {atom: value}
        self._substitutions = {a: v.substitute(step) for a, v in self._substitutions.items()}
        self._substitutions[atom] = value
        self._simplified.clear()
        low, high = self._atom_range(atom)
        self._zero = {zero_form(p) for p in (z.substitute(step) for z in self._zero) if p.as_int() is None}
        self._nonzero = {zero_form(p) for p in (z.substitute(step) for z in self._nonzero) if p.as_int() is None}
        facts = [p - constant(k) for p, k in self._lower.items()]
        if low is not None:
            facts.append(value - constant(low))
        if high is not None:
            facts.append(constant(high) - value)
        self._lower = {}
        for fact in facts:
            bound = self.simplify(fact)
            if bound.as_int() is None:
                self._learn_at_least_zero(bound)

    def _solve(self, difference: IntExpr) -> tuple[Atom, IntExpr] | None:
        """An atom that `difference == 0` gives in terms of others: the youngest symbol that occurs once, before all of
        them those that only the data tells."""
        best: tuple[tuple[bool, bool, int], Atom, int] | None = None
        for monomial, coefficient in difference.terms.items():
            if len(monomial) != 1:
                continue
            atom = monomial[0]
            rest = difference - IntExpr({monomial: coefficient})
            if isinstance(atom, Symbol):
                whole = rest.as_int() is not None and rest.terms.get((), 0) % coefficient == 0
                if not whole and (abs(coefficient) != 1 or atom.key in rest.symbols()):
                    continue
                info = self.symbols[atom.key]
                if info.name in self.definitions and rest.as_int() is None:  # graphs and guards read it as it is
                    continue
                if info.backed and self._of_data(rest):  # what an input gives is not read of the data
                    continue
                rank = (True, not info.backed, int(info.name[1:]))
            elif abs(coefficient) == 1 and self._of_data(atom_expr(atom)) and not self._of_data(rest):
                rank = (True, True, -1)  # not what the example has in terms of what only the data tells
            elif abs(coefficient) == 1 and self._of_data(atom_expr(atom)) and rest.substitute({atom: rest}) == rest:
                rank = (False, False, -1)  # `min(1, u0)` of a size of `u0 - min(1, u0)`
            elif rest.as_int() is not None and rest.terms.get((), 0) % coefficient == 0:
                rank = (False, False, 0)
            else:
                continue
            if best is None or rank > best[0]:
                best = (rank, atom, coefficient)
        if best is None:
            return None
        _, atom, coefficient = best
        rest = difference - IntExpr({(atom,): coefficient})
        return atom, IntExpr({m: -c // coefficient for m, c in rest.terms.items()})

    # operations that need ranges ------------------------------------------------------------------------------
    def floordiv(self, left: IntExpr, right: IntExpr) -> IntExpr:
        """`left // right`, with `r // b == 0` for 0 <= r < b."""
        return self._drop_small(left // right, "floordiv")

    def mod(self, left: IntExpr, right: IntExpr) -> IntExpr:
        """`left % right`, with `r % b == r` for 0 <= r < b."""
        return self._drop_small(left % right, "mod")

    def _drop_small(self, expr: IntExpr, op: str) -> IntExpr:
        for atom in list(expr.atoms()):
            if isinstance(atom, Call) and atom.op == op:
                inside = connect("and", relate("ge", atom.left, constant(0)), relate("lt", atom.left, atom.right))
                if self.decide(inside):
                    expr = expr.substitute({atom: constant(0) if op == "floordiv" else atom.left})
        return expr

    def minimum(self, left: IntExpr, right: IntExpr) -> IntExpr:
        """The smaller, when that is known; else an opaque `min`."""
        if self.decide(relate("le", left, right)):
            return left
        return right if self.decide(relate("le", right, left)) else left.minimum(right)

    def maximum(self, left: IntExpr, right: IntExpr) -> IntExpr:
        """The larger, when that is known; else an opaque `max`."""
        if self.decide(relate("ge", left, right)):
            return left
        return right if self.decide(relate("ge", right, left)) else left.maximum(right)

    def value_of(self, name: str) -> IntExpr:
        """What a symbol is known to equal: itself, another expression or a constant."""
        return self._substitutions.get(intern_symbol(name), atom_expr(intern_symbol(name)))


# What an environment learns, in attributes that a trial puts back.
_KNOWLEDGE = (
    "guards", "assumptions", "layouts", "_defined", "_ranges", "_substitutions", "_simplified", "_decided", "_zero",
    "_nonzero", "_facts", "_lower", "_values",
)  # fmt: skip

# Derived integers stay within these bounds, as those that programs are given do.
_LARGEST = 1 << 62


def _result_range(op: str, args: tuple[IntExpr | FloatExpr, ...]) -> Range:
    """Bounds of an integer operation's result that hold for all operands."""
    if op == "bitand":
        masks = [k for a in args if isinstance(a, IntExpr) and (k := a.as_int()) is not None and k >= 0]
        if masks:
            return 0, min(masks)
    return None, None


def _always_defined(definition: Definition) -> bool:
    """Division and modulo by a known number other than zero, and shifts by a known small one."""
    last = definition.args[-1]
    known = last.as_int() if isinstance(last, IntExpr) else last.value
    if known is None or len(definition.args) < 2:
        return False
    match definition.op:
        case "fdiv" | "fmod" | "ffloordiv":
            return known != 0
        case "rshift":
            return known >= 0
    return False


def _product(a: Range, b: Range) -> Range:
    if None not in a and None not in b:
        corners = [x * y for x in a for y in b if x is not None and y is not None]
        return min(corners), max(corners)
    if a == (0, 0) or b == (0, 0):
        return 0, 0
    # One side is unbounded: keep what signs alone tell.
    if _sign(a) and _sign(b):
        sign = _sign(a) * _sign(b)
        nearest = _near(a) * _near(b)
        return (
            (nearest, _far_product(a, b))
            if sign > 0
            else (_negate(_far_product(_magnitude(a), _magnitude(b))), -nearest)
        )
    return None, None


def _sign(r: Range) -> int:
    if r[0] is not None and r[0] >= 0:
        return 1
    return -1 if r[1] is not None and r[1] <= 0 else 0


def _magnitude(r: Range) -> Range:
    return r if _sign(r) > 0 else (_negate(r[1]), _negate(r[0]))


def _near(r: Range) -> int:
    return _magnitude(r)[0] or 0


def _far_product(a: Range, b: Range) -> int | None:
    x, y = _magnitude(a)[1], _magnitude(b)[1]
    return None if x is None or y is None else x * y


def _negate(value: int | None) -> int | None:
    return None if value is None else -value


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return abs(a)
