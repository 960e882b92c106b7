"""Which strides over symbols are known to be larger: held to all small sizes, of which none is zero."""

from __future__ import annotations

import random
from itertools import product

from primtorch.symbolic.expr import IntExpr, constant, symbol
from torchinductor.indexing import at_least, contiguous_strides, many_times
from torchinductor.lowering.context import in_order_of, same_order, without_overlaps

N, C, H, W = (symbol(name) for name in "nchw")
ONE, TWO = constant(1), constant(2)


def drawn(draw: random.Random) -> IntExpr:
    """A sum of products of sizes, halves of sizes and remainders."""
    atoms = (C, H, W, H // TWO, (W + ONE) // TWO, (W - ONE) // constant(3), H % constant(4), constant(3))
    total = constant(draw.randint(-3, 3))
    for _ in range(draw.randint(1, 3)):
        term = constant(draw.randint(-4, 4))
        for _ in range(draw.randint(1, 2)):
            term = term * draw.choice(atoms)
        total = total + term
    return total


def test_what_is_surely_larger_is_larger() -> None:
    seed, known = random.randrange(2**32), 0
    draw = random.Random(seed)
    for _ in range(400):
        left, right = drawn(draw), drawn(draw)
        sure = at_least(left, right)
        known += sure
        for c, h, w in product(range(1, 8), repeat=3) if sure else ():
            values = {"c": c, "h": h, "w": w}
            assert left.evaluate(values) >= right.evaluate(values), f"seed {seed}: {left} >= {right} for {values}"
    assert known > 10


def test_channels_last_is_an_order_of_its_own() -> None:
    for shape in ((N, C, H, W), (N, C, H // TWO, W // TWO), (N, C, (H - ONE) // TWO + ONE, TWO * W), (N, C, H, ONE)):
        _, c, h, w = shape
        last, rows = (c * h * w, ONE, w * c, c), contiguous_strides(shape)
        assert in_order_of(shape, last) == last
        assert without_overlaps(shape, last) and without_overlaps(shape, rows)
        assert same_order(shape, last, last) and not same_order(shape, last, rows)
    smaller = (N, C, H // TWO, W // TWO)
    assert in_order_of(smaller, (C * H * W, ONE, W * C, C), (N, C, H, W)) == (
        C * (H // TWO) * (W // TWO), ONE, C * (W // TWO), C,
    )  # fmt: skip


def test_an_order_that_nobody_knows_is_not_the_same() -> None:
    a, b = symbol("a"), symbol("b")
    assert not same_order((H, W), (a, b), (W, ONE))
    assert same_order((H, W), (a, b), (a, b))


def test_how_many_times_as_large() -> None:
    assert many_times(N * C * H * W, C, 8) and many_times(constant(64), constant(8), 8)
    assert many_times(C * constant(16), C, 16) and not many_times(C * constant(4), C, 8)
    assert not many_times(N * C * (H // TWO), N * C * H, 8) and not many_times(constant(63), constant(8), 8)
