"""Torch's operator database through the rules: a slice drawn afresh at each run, and the whole of it on demand."""

import random
import time

import pytest
from opdb_replay import DTYPES, REFUSED, op_db, replay


def test_slice_of_the_operator_database():
    seed = time.time_ns() % 2**32
    draw = random.Random(seed)
    ops = draw.sample([op for op in op_db if op.name not in REFUSED], 30)
    tally = replay(ops, draw.sample(DTYPES, 3), 3, seconds=20)
    assert not tally.wrong.total() and tally.rate >= 0.99, f"seed {seed}: {dict(tally.failures)}"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(op_db), 120))
def test_whole_operator_database(start):
    tally = replay(op_db[start : start + 120], DTYPES, 5)
    assert not tally.wrong.total() and tally.rate >= 0.985, dict(tally.failures)
