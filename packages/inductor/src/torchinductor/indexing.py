"""Index expressions: integer polynomials over loop variables, simplified by what is known of their ranges.

A loop variable v of size n satisfies 0 <= v < n, and a size is at least zero. That is enough to undo what `reshape`
does to indices: `(4*i + j) // 4 == i` and `(4*i + j) % 4 == j` for j < 4, and `(a // b)*b + a % b == a`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import TypeAlias

import torch

from primtorch.symbolic import expr_of
from primtorch.symbolic.expr import Call, IntExpr, Symbol, atom_expr, constant, intern_symbol, symbol

Ranges: TypeAlias = Mapping[str, IntExpr]
Index: TypeAlias = tuple[IntExpr, ...]

ZERO = constant(0)
ONE = constant(1)
_MOST_DIVISORS = 4  # of quotients in what is compared
MOST_SHAPES = 4096  # of which answers are remembered: the layers of a model have the same few


@lru_cache(maxsize=4096)
def number(value: int) -> IntExpr:
    """The shared constant polynomial of a number."""
    return constant(value)


@lru_cache(maxsize=1024)
def variable(name: str) -> IntExpr:
    """The shared polynomial of one variable."""
    return symbol(name)


def as_expr(size: int | torch.SymInt | IntExpr) -> IntExpr:
    """Any kind of size as an expression."""
    if type(size) is int:
        return number(size)
    if isinstance(size, IntExpr):
        return size
    return expr_of(size)


def exprs(sizes: Iterable[int | torch.SymInt | IntExpr]) -> Index:
    """Any kind of sizes as expressions."""
    return tuple(map(as_expr, sizes))


def is_one(expr: IntExpr) -> bool:
    """Whether the expression is the number one."""
    return expr.as_int() == 1


def product(sizes: Iterable[IntExpr]) -> IntExpr:
    """The product of sizes; one for none."""
    return _product(tuple(sizes))


@lru_cache(maxsize=MOST_SHAPES)
def _product(sizes: Index) -> IntExpr:
    result, factor = ONE, 1
    for size in sizes:
        known = size.as_int()
        if known is None:
            result = result * size
        else:
            factor *= known
    return number(factor) if result is ONE else result * number(factor)


def many_times(whole: IntExpr, part: IntExpr, least: int) -> bool:
    """Whether a number of elements is so many times another one: for choices, which take a symbol for large."""
    known, own = whole.as_int(), part.as_int()
    if known is not None and own is not None:
        return known >= own * least
    if own == 0 or (whole % part).terms:
        return own == 0
    times = (whole // part).as_int()
    return times is None or times >= least


def contiguous_strides(shape: Sequence[IntExpr]) -> Index:
    """Row-major strides of a shape, in elements. A size of zero counts as one, as in torch."""
    return _contiguous_strides(tuple(shape))


@lru_cache(maxsize=MOST_SHAPES)
def _contiguous_strides(shape: Index) -> Index:
    strides: list[IntExpr] = []
    step = ONE
    for size in reversed(shape):
        strides.append(step)
        if size.as_int() != 0:
            step = step * size
    return tuple(reversed(strides))


def dot(index: Sequence[IntExpr], strides: Sequence[IntExpr], offset: IntExpr = ZERO) -> IntExpr:
    """offset + sum(index * strides)."""
    result = offset
    for i, s in zip(index, strides, strict=True):
        if i.terms and s.terms:
            result = result + (i if is_one(s) else i * s)
    return result


def delinearize(linear: IntExpr, shape: Sequence[IntExpr], ranges: Ranges) -> Index:
    """The row-major index into `shape` of a linear position."""
    result: list[IntExpr] = []
    rest = linear
    for size in reversed(shape[1:]):
        if is_one(size):
            result.append(ZERO)
            continue
        result.append(simplify(rest % size, ranges))
        rest = simplify(rest // size, ranges)
    if shape:
        result.append(ZERO if is_one(shape[0]) else rest)
    return tuple(reversed(result))


def reshape_index(index: Index, old: Sequence[IntExpr], new: Sequence[IntExpr], ranges: Ranges) -> Index:
    """The index into shape `old` of the element that has `index` in the row-major reshape to `new`.

    Works group by group: dims of both shapes are cut where their running products agree, so that a division appears
    only inside a group that really merges or splits.
    """
    result: list[IntExpr] = [ZERO] * len(old)
    for olds, news in matching_groups(old, new):
        if len(olds) == 1 and len(news) == 1:
            result[olds[0]] = index[news[0]]
            continue
        sizes = [new[d] for d in news]
        linear = dot([index[d] for d in news], contiguous_strides(sizes))
        for d, e in zip(olds, delinearize(linear, [old[d] for d in olds], ranges), strict=True):
            result[d] = e
    return tuple(result)


def matching_groups(old: Sequence[IntExpr], new: Sequence[IntExpr]) -> list[tuple[list[int], list[int]]]:
    """Cuts two shapes of equal numel into the shortest runs of dims whose products agree, without dims of size one."""
    a = [d for d, s in enumerate(old) if not is_one(s)]
    b = [d for d, s in enumerate(new) if not is_one(s)]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        run_a, run_b = [a[i]], [b[j]]
        left, right = old[a[i]], new[b[j]]
        i, j = i + 1, j + 1
        while left != right:
            if i < len(a) and (j >= len(b) or _divides(left, right)):
                left, i = left * old[a[i]], i + 1
                run_a.append(a[i - 1])
            elif j < len(b):
                right, j = right * new[b[j]], j + 1
                run_b.append(b[j - 1])
            elif i < len(a):
                left, i = left * old[a[i]], i + 1
                run_a.append(a[i - 1])
            else:
                break
        groups.append((run_a, run_b))
    if (i < len(a) or j < len(b)) and not groups:
        groups.append(([], []))
    if groups:
        groups[-1][0].extend(a[i:])
        groups[-1][1].extend(b[j:])
    return groups


def _divides(left: IntExpr, right: IntExpr) -> bool:
    """Whether the left product is the shorter one."""
    x, y = left.as_int(), right.as_int()
    if x is not None and y is not None:
        return x < y
    return (len(left.terms) == 1 and not (right % left).terms) or (x is not None and y is None)


def rename(expr: IntExpr, mapping: Mapping[Symbol, IntExpr]) -> IntExpr:
    """The expression with variables replaced."""
    return expr.substitute(mapping) if mapping else expr  # type: ignore[arg-type]


def upper_bound(expr: IntExpr, ranges: Ranges) -> IntExpr | None:
    """The largest value that the expression takes, None when it is not known to be bounded (or may be negative)."""
    total = ZERO
    for monomial, coefficient in expr.terms.items():
        if coefficient < 0:
            return None
        term = number(coefficient)
        for atom in monomial:
            bound = _atom_bound(atom, ranges)
            if bound is None:
                return None
            term = term * bound
        total = total + term
    return total


def _atom_bound(atom: Symbol | Call, ranges: Ranges) -> IntExpr | None:
    if isinstance(atom, Symbol):
        size = ranges.get(atom.key)
        # A symbol that is no loop variable is a size (or a bound-checked index): at least zero, and its own bound.
        return size - ONE if size is not None else atom_expr(atom)
    if atom.op == "mod":
        return atom.right - ONE
    if atom.op == "floordiv":
        above, divisor = upper_bound(atom.left, ranges), atom.right.as_int()
        if above is None or (divisor is not None and divisor <= 0):
            return None
        if divisor is not None:
            return above // atom.right
        whole = above + ONE  # of as many as a size goes into, the quotient is less than how often
        return None if (whole % atom.right).terms else whole // atom.right - ONE
    return None


def nonnegative(expr: IntExpr) -> bool:
    """Whether a polynomial over sizes is surely at least zero: no negative coefficient."""
    return all(c > 0 for c in expr.terms.values())


def at_least(expr: IntExpr, limit: IntExpr, sizes: Iterable[IntExpr] = ()) -> bool:
    """Whether expr >= limit surely holds wherever there is anything to compute: for symbols of at least one, and for
    `sizes`, which are of at least one too. A remainder takes away at most its divisor less one, a quotient at most what
    is divided."""
    number, least = expr.as_int(), limit.as_int()
    if number is not None and least is not None:
        return number >= least
    difference = expr - limit
    if nonnegative(difference) or _from_one_on(difference):
        return True
    # Of a size that is a quotient nothing need be known but that it is at least one, as a symbol is.
    calls = {call for size in sizes for call in _factors(size)}
    return bool(calls) and _from_one_on(difference.substitute({call: symbol(f"~{call.key}") for call in calls}))


def _factors(size: IntExpr) -> list[Call]:
    """The quotients, and what else is no polynomial, of which a size is the product."""
    ((factors, coefficient),) = size.terms.items() if len(size.terms) == 1 else (((), 0),)
    return [factor for factor in factors if isinstance(factor, Call)] if coefficient > 0 else []


def _from_one_on(expr: IntExpr) -> bool:
    """Whether a polynomial is surely at least zero where its symbols are at least one."""
    quotients = (atom for atom in expr.atoms() if isinstance(atom, Call) and atom.op == "floordiv")
    divisors = {number for atom in quotients if (number := atom.right.as_int() or 0) > 0}
    if len(divisors) > _MOST_DIVISORS:
        return False
    bound = ZERO
    for monomial, coefficient in (expr * constant(prod(divisors))).terms.items():
        bound = bound + _least_of(monomial, coefficient)
    return nonnegative(bound.substitute({intern_symbol(name): symbol(name) + ONE for name in bound.symbols()}))


def _least_of(monomial: tuple[Symbol | Call, ...], coefficient: int) -> IntExpr:
    """A bound of a term from below, without the one quotient by a number or remainder that it takes away."""
    calls = [atom for atom in monomial if isinstance(atom, Call)]
    if coefficient > 0 or len(calls) != 1:
        return IntExpr({monomial: coefficient})
    (call,), rest = calls, IntExpr({tuple(atom for atom in monomial if isinstance(atom, Symbol)): coefficient})
    if call.op == "mod":
        return rest * (call.right - ONE)
    divisor = call.right.as_int() or 0
    if call.op == "floordiv" and divisor > 0 and coefficient % divisor == 0:
        return IntExpr({factors: c // divisor for factors, c in rest.terms.items()}) * call.left
    return IntExpr({monomial: coefficient})


def below(expr: IntExpr, limit: IntExpr, ranges: Ranges) -> bool:
    """Whether 0 <= expr < limit surely holds."""
    above = upper_bound(expr, ranges)
    return above is not None and nonnegative(limit - ONE - above)


def interval(expr: IntExpr, ranges: Ranges) -> tuple[int, int] | None:
    """Numbers between which the values of a sum of multiples lie; None where it is no such sum, or a size no number."""
    low = high = 0
    for monomial, coefficient in expr.terms.items():
        one = _atom_interval(monomial[0], ranges) if len(monomial) == 1 else (1, 1) if not monomial else None
        if one is None:
            return None
        ends = (coefficient * one[0], coefficient * one[1])
        low, high = low + min(ends), high + max(ends)
    return low, high


def _atom_interval(atom: Symbol | Call, ranges: Ranges) -> tuple[int, int] | None:
    if isinstance(atom, Symbol):
        size = ranges[atom.key].as_int() if atom.key in ranges else None
        return None if size is None or size < 1 else (0, size - 1)
    left, right = interval(atom.left, ranges), interval(atom.right, ranges)
    if left is None or right is None:
        return None
    if atom.op in ("floordiv", "mod"):
        if right[0] != right[1] or right[0] <= 0:
            return None
        return (left[0] // right[0], left[1] // right[0]) if atom.op == "floordiv" else (0, right[0] - 1)
    if atom.op == "max" and atom.left == -atom.right:  # the distance from zero
        return max(0, left[0], -left[1]), max(left[1], -left[0])
    among = min if atom.op == "min" else max
    return among(left[0], right[0]), among(left[1], right[1])


def pieces(expr: IntExpr, axis: str, size: int) -> list[tuple[int, IntExpr]]:
    """A sum of multiples of a variable below `size`, and of the smaller and the larger of such sums, as what it is
    along the variable: where each part begins, and the sum without a choice that it is from there on. Empty where it is
    no such sum."""
    choice = _innermost_call(expr)
    if choice is None:
        return [(0, expr)] if expr.symbols() <= {axis} else []
    difference = choice.left - choice.right
    step, rest = coefficient_of(difference, axis), difference.substitute({intern_symbol(axis): ZERO}).as_int()
    slope = None if step is None else step.as_int()
    if choice.op not in ("min", "max") or rest is None or slope is None:
        return []
    # Where the left one begins to be the larger, or the smaller.
    turn = -(rest // slope) if slope > 0 else rest // -slope + 1 if slope < 0 else 0 if rest >= 0 else size
    turn = min(max(turn, 0), size)
    parts: list[tuple[int, IntExpr]] = []
    for begin, end, larger in ((0, turn, slope < 0), (turn, size, slope >= 0)):
        taken = choice.left if larger == (choice.op == "max") else choice.right
        found = pieces(expr.substitute({choice: taken}), axis, size) if begin < end else []
        if begin < end and not found:
            return []
        ends = [*(start for start, _ in found[1:]), size]
        parts += [(max(a, begin), part) for (a, part), b in zip(found, ends, strict=False) if a < end and b > begin]
    return [part for n, part in enumerate(parts) if n == 0 or part[1] != parts[n - 1][1]]


def _innermost_call(expr: IntExpr) -> Call | None:
    """A call in the expression without calls in its operands."""
    call = next((atom for atom in expr.atoms() if isinstance(atom, Call)), None)
    if call is None:
        return None
    return _innermost_call(call.left) or _innermost_call(call.right) or call


def simplify(expr: IntExpr, ranges: Ranges) -> IntExpr:
    """The expression without the divisions that the ranges make superfluous."""
    for monomial in expr.terms:
        for atom in monomial:
            if type(atom) is Call:
                own = tuple([(name, ranges[name]) for name in sorted(expr.symbols()) if name in ranges])
                return _simplified(expr, own)
    return expr


@lru_cache(maxsize=MOST_SHAPES)
def _simplified(expr: IntExpr, own: tuple[tuple[str, IntExpr], ...]) -> IntExpr:
    """`own`: the sizes of the loop variables in it, which alone say anything of it."""
    ranges = dict(own)
    calls = [a for m in expr.terms for a in m if isinstance(a, Call)]
    replaced = {}
    for atom in calls:
        if atom not in replaced:
            new = _simplify_call(atom, ranges)
            if new.terms != {(atom,): 1}:
                replaced[atom] = new
    if replaced:
        result = ZERO
        for monomial, coefficient in expr.terms.items():
            term = number(coefficient)
            for factor in monomial:
                known = replaced.get(factor) if isinstance(factor, Call) else None
                term = term * (known if known is not None else atom_expr(factor))
            result = result + term
        expr = result
    return _recombine(expr)


def _simplify_call(atom: Call, ranges: Ranges) -> IntExpr:
    left, right = simplify(atom.left, ranges), simplify(atom.right, ranges)
    if atom.op == "floordiv":
        return _floordiv(left, right, ranges)
    if atom.op == "mod":
        return _mod(left, right, ranges)
    if atom.op == "min":
        return left.minimum(right)
    return left.maximum(right)


def _split_multiple(left: IntExpr, right: IntExpr) -> tuple[IntExpr, IntExpr]:
    """(multiple of right, the rest), by the same division as the operators of IntExpr."""
    rest = left % right
    if len(rest.terms) == 1:
        (monomial,) = rest.terms
        if (
            len(monomial) == 1
            and isinstance(monomial[0], Call)
            and monomial[0].op == "mod"
            and monomial[0].right == right
        ):
            rest = monomial[0].left
    return left - rest, rest


def _floordiv(left: IntExpr, right: IntExpr, ranges: Ranges) -> IntExpr:
    whole, rest = _split_multiple(left, right)
    if below(rest, right, ranges):
        return whole // right
    divided = _divided_by_sum(left, right, ranges)
    if divided is not None:
        return divided[0]
    factored = _common_factor(rest, right, ranges)
    if factored is not None:
        quotient, _, divisor, _ = factored
        return whole // right + simplify(quotient // divisor, ranges)
    return left // right


def _mod(left: IntExpr, right: IntExpr, ranges: Ranges) -> IntExpr:
    _, rest = _split_multiple(left, right)
    if below(rest, right, ranges):
        return rest
    divided = _divided_by_sum(left, right, ranges)
    if divided is not None:
        return divided[1]
    factored = _common_factor(rest, right, ranges)
    if factored is not None:
        quotient, small, divisor, factor = factored
        return number(factor) * simplify(quotient % divisor, ranges) + small
    return rest % right


def _divided_by_sum(left: IntExpr, right: IntExpr, ranges: Ranges) -> tuple[IntExpr, IntExpr] | None:
    """left = q*right + r with 0 <= r < right, where `right` is a sum, such as how many windows of a line there are:
    (q, r). None where neither is found: both are divided as polynomials in an atom that is a term of `right` by itself.
    """
    for monomial, sign in right.terms.items() if len(right.terms) > 1 else ():
        if len(monomial) == 1 and sign in (1, -1) and sum(monomial[0] in other for other in right.terms) == 1:
            quotient, rest = _divided_in(monomial[0], left, number(sign) * right)
            if quotient.terms and below(rest, right, ranges):
                return number(sign) * quotient, rest
    return None


def _divided_in(atom: Symbol | Call, left: IntExpr, right: IntExpr) -> tuple[IntExpr, IntExpr]:
    """left = q*right + r, where right is the atom less what it has not: (q, r), r without the atom (Horner's rule)."""
    powers: dict[int, dict[tuple[Symbol | Call, ...], int]] = {0: {}}
    for monomial, coefficient in left.terms.items():
        power = monomial.count(atom)
        powers.setdefault(power, {})[tuple([a for a in monomial if a is not atom])] = coefficient
    one = atom_expr(atom)
    root, quotient, carried = one - right, ZERO, ZERO
    for power in range(max(powers), 0, -1):
        carried = carried * root + IntExpr(powers.get(power, {}))
        quotient = quotient + carried * one ** (power - 1)
    return quotient, carried * root + IntExpr(powers[0])


def _common_factor(left: IntExpr, right: IntExpr, ranges: Ranges) -> tuple[IntExpr, IntExpr, IntExpr, int] | None:
    """left = g*q + r with 0 <= r < g, right = g*d, for a number g > 1: then left // right == q // d."""
    coefficients = list(right.terms.values())
    base = gcd(*coefficients) if coefficients else 1
    if base <= 1:
        return None
    for g in sorted({gcd(base, abs(c)) for c in left.terms.values()}, reverse=True):
        if g <= 1:
            break
        small = IntExpr({m: c for m, c in left.terms.items() if c % g})
        if below(small, number(g), ranges):
            quotient = IntExpr({m: c // g for m, c in left.terms.items() if not c % g})
            return quotient, small, IntExpr({m: c // g for m, c in right.terms.items()}), g
    return None


def _recombine(expr: IntExpr) -> IntExpr:
    """(a // b)*b*c + (a % b)*c -> a*c."""
    for _ in range(8):
        if not any(isinstance(a, Call) and a.op == "mod" for m in expr.terms for a in m):
            return expr
        changed = False
        for monomial, coefficient in expr.terms.items():
            for position, atom in enumerate(monomial):
                if not (isinstance(atom, Call) and atom.op == "mod"):
                    continue
                factor = IntExpr({monomial[:position] + monomial[position + 1 :]: coefficient})
                wanted = (atom.left // atom.right) * atom.right * factor
                if wanted.terms and all(expr.terms.get(m) == c for m, c in wanted.terms.items()):
                    expr = expr - wanted - IntExpr({monomial: coefficient}) + atom.left * factor
                    changed = True
                    break
            if changed:
                break
        if not changed:
            return expr
    return expr


@lru_cache(maxsize=16384)
def coefficient_of(expr: IntExpr, name: str) -> IntExpr | None:
    """The stride of a variable in an index: its coefficient when it occurs only linearly, None otherwise."""
    wanted = intern_symbol(name)
    found: dict[tuple[Symbol | Call, ...], int] = {}
    for monomial, coefficient in expr.terms.items():
        hits = 0
        for atom in monomial:
            if atom is wanted:
                hits += 1
            elif isinstance(atom, Call) and (name in atom.left.symbols() or name in atom.right.symbols()):
                return None
        if hits > 1:
            return None
        if hits:
            found[tuple(a for a in monomial if a is not wanted)] = coefficient
    return IntExpr(found)


@lru_cache(maxsize=MOST_SHAPES)
def broadcast_strides(shape: Index, strides: Index, new: Index) -> Index | None:
    """Strides of a reshape of a strided tensor that needs no copy, None when it needs one (or it is not provable)."""
    result: list[IntExpr] = [ZERO] * len(new)
    for olds, news in matching_groups(shape, new):
        for a, b in pairwise(olds):
            if strides[a] != strides[b] * shape[b]:
                return None
        if not news:
            continue
        step = strides[olds[-1]] if olds else ONE
        for d in reversed(news):
            result[d] = step
            step = step * new[d]
    # A dim of size one may have any stride: the row-major one keeps later contiguity checks simple.
    for d in range(len(new) - 1, -1, -1):
        if is_one(new[d]):
            result[d] = result[d + 1] * new[d + 1] if d + 1 < len(new) else ONE
    return tuple(result)
