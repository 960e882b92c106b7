"""The innermost loop in parts between places where a condition on its variable changes, where sizes are symbols.

The order of such places is not known before the kernel runs. It is taken for what it is of large sizes, and the kernel
asks whether it is: loops in parts, in whose lines the conditions are settled, stand beside one loop that settles
nothing. So tiny sizes take the slow loop, and none gives other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from primtorch.symbolic.expr import Call, IntExpr, intern_symbol
from torchinductor.codegen.cpp.expressions import wrapped
from torchinductor.indexing import ONE, ZERO, Ranges, coefficient_of, nonnegative, number

_LARGE = 1 << 12  # what each symbol is taken for, where places are put in order


def usual(place: IntExpr) -> int:
    """The value of a place for large sizes."""
    try:
        return place.evaluate(dict.fromkeys(place.symbols(), _LARGE))
    except ZeroDivisionError:
        return 0


@dataclass(frozen=True, slots=True)
class Part:
    """Iterations of a loop between two of its places; `earlier` are the places that none of them comes before."""

    begin: IntExpr
    end: IntExpr
    earlier: frozenset[IntExpr]

    def before(self, place: IntExpr) -> bool:
        """Whether the part lies before a place that is one of the loop's, or else behind it."""
        return place not in self.earlier

    @property
    def count(self) -> int | None:
        """Its iterations, where they are a number."""
        return (self.end - self.begin).as_int()


Line: TypeAlias = str | Callable[[Part], str]


@dataclass(slots=True)
class Places:
    """What is known of a loop 0 <= axis < size."""

    axis: str
    size: IntExpr
    found: dict[IntExpr, None] = field(default_factory=dict)
    assumed: dict[IntExpr, None] = field(default_factory=dict)  # what is at least zero where lines are shorter
    shorter: dict[str, Line] = field(default_factory=dict)  # by the line that holds anyway
    opening: list[str] = field(default_factory=list)  # before and behind all parts, beside shorter lines
    closing: list[str] = field(default_factory=list)
    bounds: list[Callable[[], None]] = field(default_factory=list)  # what else to assume, once all places are found

    def assume(self, expr: IntExpr) -> None:
        """Notes what has to be at least zero."""
        if not nonnegative(expr):
            self.assumed[expr] = None

    def parts(self) -> list[Part]:
        """The loop between its places."""
        inside = sorted(self._inside(), key=usual)
        behind = frozenset(place for place in self.found if place not in inside and usual(place) <= 0)
        ends = [ZERO, *inside, self.size]
        return [Part(a, b, behind.union(ends[: k + 1])) for k, (a, b) in enumerate(pairwise(ends))]

    def conditions(self) -> list[IntExpr]:
        """What has to be at least zero for the parts to be those, each of which can be computed where those before it
        hold."""
        for assume in self.bounds:
            assume()
        parts = self.parts()
        divisors = (atom.right for place in self.found for atom in place.atoms() if isinstance(atom, Call))
        checks = dict.fromkeys(divisor - ONE for divisor in divisors) | self.assumed
        checks |= dict.fromkeys(part.end - part.begin for part in parts)
        inside = {part.begin for part in parts}
        for place in self.found:
            if place not in inside:
                checks[-place if usual(place) <= 0 else place - self.size] = None
        return [check for check in checks if not nonnegative(check)]

    def _inside(self) -> Iterator[IntExpr]:
        size = usual(self.size)
        return (place for place in self.found if 0 < usual(place) < size)


def crossing(difference: IntExpr, axis: str) -> tuple[IntExpr, bool] | None:
    """Where along an axis a difference begins, or ceases, to be at least zero, and whether it is so before that place.
    None where its steps or the place are no whole ones."""
    step = coefficient_of(difference, axis)
    slope = None if step is None else step.as_int()
    if not slope:
        return None
    rest = difference.substitute({intern_symbol(axis): ZERO})
    known, unit = rest.as_int(), number(abs(slope))
    if known is not None:
        return (number(-(known // slope)), False) if slope > 0 else (number(known // -slope + 1), True)
    if (rest % unit).terms:
        return None
    return (-(rest // unit), False) if slope > 0 else (rest // unit + ONE, True)


class Choices:
    """What stands for an index that is chosen along an axis: the smaller or the larger of two, or one that wraps."""

    def __init__(self, places: Places, ranges: Ranges, numbers: frozenset[str]) -> None:
        self.places, self.ranges, self.numbers = places, ranges, numbers
        self._turns: dict[Call, tuple[IntExpr, IntExpr, IntExpr]] = {}  # the place, what it is before and behind it

    def note(self, expr: IntExpr) -> bool:
        """Notes the places at which the expression becomes another one, and whether it is one without choices in
        between."""
        return self._walk(expr, 0, usual(self.places.size))

    def within(self, expr: IntExpr, part: Part) -> IntExpr:
        """The expression without choices that holds in a part."""
        call = self._choice(expr)
        while call is not None:
            place, before, behind = self._turns[call]
            expr = expr.substitute({call: before if part.before(place) else behind})
            call = self._choice(expr)
        return expr

    def bound(self, expr: IntExpr, size: IntExpr) -> None:
        """Lets lines be shorter only where an expression, which was noted, is an index of a dim of `size`. In a part it
        goes evenly from its value at the first iteration to that at the last."""
        axis = intern_symbol(self.places.axis)
        for part in self.places.parts():
            for at in (part.begin, part.end - ONE):
                value = self.within(expr, part).substitute({axis: at})
                self.places.assume(value)
                self.places.assume(size - ONE - value)

    def _choice(self, expr: IntExpr) -> Call | None:
        """A choice along the axis that is made of none."""
        for atom in expr.atoms():
            if isinstance(atom, Call) and self.places.axis in atom.left.symbols() | atom.right.symbols():
                return self._choice(atom.left) or self._choice(atom.right) or atom
        return None

    def _walk(self, expr: IntExpr, begin: int, end: int) -> bool:
        call = self._choice(expr)
        if call is None or begin >= end:
            return True
        turn = self._turns.get(call) or self._turn(call)
        if turn is None:
            return False
        self._turns[call] = turn
        place, before, behind = turn
        self.places.found[place] = None
        at = min(max(usual(place), begin), end)
        sides = ((before, begin, at), (behind, at, end))
        return all(self._walk(expr.substitute({call: taken}), a, b) for taken, a, b in sides)

    def _turn(self, call: Call) -> tuple[IntExpr, IntExpr, IntExpr] | None:
        if call.op in ("min", "max"):
            larger, smaller = (call.left, call.right) if call.op == "max" else (call.right, call.left)
        else:
            left = wrapped(call, self.ranges, self.numbers)
            if left is None:
                return None
            larger, smaller = left - call.right, left
        found = crossing(call.left - call.right if call.op in ("min", "max") else larger, self.places.axis)
        if found is None:
            return None
        place, first = found
        return (place, larger, smaller) if first else (place, smaller, larger)


def settled(op: str, difference: IntExpr, places: Places) -> Callable[[Part], bool] | None:
    """What a comparison of a difference with zero is in the parts of a loop, whose places it notes."""
    if op in ("eq", "ne"):
        found = [crossing(d, places.axis) for d in (difference, difference - ONE)]
        slope = coefficient_of(difference, places.axis)
        if None in found or slope is None or slope.as_int() not in (1, -1):
            return None
        ends = [place for place, _ in found if place is not None]  # type: ignore[misc]
        places.found |= dict.fromkeys(ends)
        return lambda part: (part.before(ends[0]) != part.before(ends[1])) == (op == "eq")
    strict = op in ("gt", "le")  # a > b is a - b - 1 >= 0, and a <= b its contrary
    turn = crossing(difference - ONE if strict else difference, places.axis)
    if turn is None:
        return None
    place, first = turn
    places.found[place] = None
    return lambda part: (part.before(place) == first) == (op in ("ge", "gt"))


def substituted(lines: Iterable[str], shorter: Mapping[str, Line], part: Part | None) -> list[str]:
    """Lines of a loop as they are in a part; without one, those that hold for all of it."""
    found = []
    for line in lines:
        short = shorter.get(line, line)
        found.append(short if isinstance(short, str) else line if part is None else short(part))
    return found
