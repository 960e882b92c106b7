"""Indices are simplified once for each expression and the sizes of its variables: never for others' sizes."""

from __future__ import annotations

import itertools
import random

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import contiguous_strides, number, product, simplify, variable
from torchinductor.lowering.context import in_order_of, same_order

NAMES = ("i0", "i1", "i2")


def drawn(draw: random.Random, depth: int) -> IntExpr:
    """An index with divisions by numbers."""
    if not depth or draw.random() < 0.2:
        return variable(draw.choice(NAMES)) * number(draw.choice((1, 2, 3, 4, 6)))
    left = drawn(draw, depth - 1)
    match draw.randrange(4):
        case 0:
            return left // number(draw.choice((2, 3, 4, 6, 12)))
        case 1:
            return left % number(draw.choice((2, 3, 4, 6, 12)))
        case _:
            return left + drawn(draw, depth - 1)


def test_an_index_is_what_it_was_within_each_of_several_ranges() -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    exprs = [drawn(draw, 3) for _ in range(60)]
    for _ in range(6):
        for expr in exprs:
            sizes = {name: draw.choice((1, 2, 3, 4, 6, 8)) for name in NAMES}
            found = simplify(expr, {name: number(size) for name, size in sizes.items()})
            for places in itertools.product(*(range(size) for size in sizes.values())):
                values = dict(zip(NAMES, places, strict=True))
                told = f"seed {seed}: {expr} as {found} at {values} within {sizes}"
                assert found.evaluate(values) == expr.evaluate(values), told


def lines(draw: random.Random) -> IntExpr:
    """How many windows a line of some length has: a sum, or a sum with a quotient."""
    length = variable(draw.choice(("m", "n")))
    windows = length + number(draw.choice((-2, -1, 1, 3)))
    return draw.choice((windows, number(draw.choice((5, 9))) - length, (length - number(2)) // number(2) + number(1)))


def test_a_position_in_lines_of_so_many_windows_is_taken_apart() -> None:
    """The divisor is a sum of sizes, whose multiples stand in the index as products of their own."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(200):
        inner, outer = lines(draw), draw.choice((lines(draw), number(4)))
        place = (variable("i0") * outer + variable("i1")) * inner + variable("i2")
        parts = {"i2": place % inner, "i1": place // inner % outer, "i0": place // inner // outer}
        loose = (place + number(draw.choice((-1, 1, 2)))) // inner
        for m, n in itertools.product((2, 3, 4), repeat=2):
            values = {"m": m, "n": n}
            sizes = {"i0": number(2), "i1": outer, "i2": inner}
            if min(inner.evaluate(values), outer.evaluate(values)) < 1:
                continue
            for places in itertools.product(*(range(sizes[name].evaluate(values)) for name in sizes)):
                at = dict(zip(sizes, places, strict=True)) | values
                for name, expr in (*parts.items(), ("", loose)):
                    found = simplify(expr, sizes)
                    assert found.evaluate(at) == expr.evaluate(at), f"seed {seed}: {expr} as {found} at {at}"
                    assert not name or found == variable(name), f"seed {seed}: {expr} as {found}"


def test_strides_are_those_of_the_shape_and_the_order() -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(300):
        sizes = [draw.choice((1, 2, 3, 5)) for _ in range(3)]
        shape = tuple(map(number, sizes))
        told = f"seed {seed}: {sizes}"
        assert product(shape).as_int() == sizes[0] * sizes[1] * sizes[2], told
        rows = contiguous_strides(list(shape))
        assert [stride.as_int() for stride in rows] == [sizes[1] * sizes[2], sizes[2], 1], told
        others = tuple(map(number, draw.sample((1, 7, 100), 3)))
        wide = [d for d in range(3) if sizes[d] != 1]
        alike = sorted(wide, key=lambda d: others[d].as_int() or 0) == wide[::-1]
        assert same_order(shape, rows, others) == alike, (told, others)
        assert same_order(shape, in_order_of(shape, others), others), (told, others)
