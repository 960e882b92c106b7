"""Shape propagation with every size a symbol, over shapes drawn at random, for operators of torch's database."""

from __future__ import annotations

import random
import time
import warnings

from symbolic_check import CASES, Tally, check, resized, samples_of

SECONDS = 20


def test_every_size_symbolic() -> None:
    """Shapes at the example's sizes are those of the real run, guards hold there, and nearly nothing is refused.

    Each draw is independent of the others: one that went on from what it drew before would have a part of them be of
    one operator, and a share of all say nothing.
    """
    number = time.time_ns() % 2**32
    draw, tally = random.Random(number), Tally()
    end = time.monotonic() + SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1500):
            if time.monotonic() > end:
                break
            which, swapped = draw.randrange(len(CASES)), draw.random() < 0.5
            growth = [draw.randint(0, 6) for _ in range(4)]
            made = samples_of(which)
            if made:
                one = draw.choice(made)
                sizes = {size: size + growth[size % 4] for size in range(2, 40)}
                args, kwargs = resized(((one.input, *one.args), one.kwargs), sizes, swapped)
                check(tally, *CASES[which], args, kwargs)
    taken, good = tally.taken.total(), tally.good.total()
    assert not tally.wrong(), f"seed {number}: {tally.wrong()}"
    assert taken > 100 and good >= 0.97 * taken, f"seed {number}: {dict(tally.failures)}"
