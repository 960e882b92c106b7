"""The smaller and the larger of indices: what they are along a variable piece by piece, and between which numbers."""

from __future__ import annotations

import random

from primtorch.symbolic.expr import IntExpr, intern_symbol
from torchinductor.indexing import interval, number, pieces, variable

VARIABLE = intern_symbol("i0")


def _drawn(draw: random.Random, depth: int) -> IntExpr:
    if depth == 0 or draw.random() < 0.3:
        return number(draw.randint(-3, 3)) * variable("i0") + number(draw.randint(-9, 9))
    left, right = _drawn(draw, depth - 1), _drawn(draw, depth - 1)
    return draw.choice((IntExpr.maximum, IntExpr.minimum, IntExpr.__sub__, IntExpr.__add__))(left, right)


def test_pieces_are_the_expression() -> None:
    draw = random.Random(seed := random.SystemRandom().randrange(2**32))
    for _ in range(1500):
        expr, size = _drawn(draw, 3), draw.randint(1, 14)
        found, between = pieces(expr, "i0", size), interval(expr, {"i0": number(size)})
        told = f"seed {seed}: {expr} below {size}: {[(begin, str(part)) for begin, part in found]}, {between}"
        begins = [begin for begin, _ in found]
        assert begins[0] == 0 and begins == sorted(set(begins)) and between is not None, told
        for place in range(size):
            (*_, part) = (part for begin, part in found if begin <= place)
            right = expr.substitute({VARIABLE: number(place)}).as_int()
            assert right is not None and between[0] <= right <= between[1], told
            assert part.substitute({VARIABLE: number(place)}).as_int() == right and "(" not in str(part), told


def test_what_has_no_pieces() -> None:
    i0, i1 = variable("i0"), variable("i1")
    for expr in (i0.maximum(i1), (i0 // number(2)).maximum(number(1)), (i0 * i0).minimum(number(4)), i0 + i1):
        assert pieces(expr, "i0", 10) == [], str(expr)
    assert interval(i0 * i0, {"i0": number(3)}) is None and interval(i0, {"i0": variable("s0")}) is None
