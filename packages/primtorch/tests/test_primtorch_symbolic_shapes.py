"""Shape propagation with every size a symbol, over shapes drawn at random, for operators of torch's database."""

from __future__ import annotations

import time
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from symbolic_check import CASES, Tally, check, resized, samples_of

SECONDS = 20


def test_every_size_symbolic() -> None:
    """Shapes at the example's sizes are those of the real run, guards hold there, and nearly nothing is refused."""
    number = time.time_ns() % 2**32
    tally = Tally()
    end = time.monotonic() + SECONDS

    @seed(number)
    @settings(
        max_examples=1500,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        which=st.integers(0, len(CASES) - 1),
        sample=st.integers(0, 50),
        growth=st.lists(st.integers(0, 6), min_size=4, max_size=4),
        swapped=st.booleans(),
    )
    def draw(which: int, sample: int, growth: list[int], swapped: bool) -> None:
        if time.monotonic() > end:
            return
        op, dtype = CASES[which]
        made = samples_of(which)
        if not made:
            return
        one = made[sample % len(made)]
        sizes = {size: size + growth[size % 4] for size in range(2, 40)}
        args, kwargs = resized(((one.input, *one.args), one.kwargs), sizes, swapped)
        check(tally, op, dtype, args, kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw()
    taken, good = tally.taken.total(), tally.good.total()
    assert not tally.wrong(), f"seed {number}: {tally.wrong()}"
    assert taken > 100 and good >= 0.97 * taken, f"seed {number}: {dict(tally.failures)}"
