"""Torch's operator database through the rules: a slice drawn afresh at each run, and the whole of it on demand."""

import random
import time

import pytest
from opdb_replay import DTYPES, op_db, replay

OUTSIDE = {
    "nn.functional.linear_cross_entropy",  # an operator of torch's own Python library, not of ATen
    "histogramdd",  # lists of tensors of computed lengths
    "resize_as_",  # a functional graph has no memory to resize
    "nn.functional.ctc_loss",  # with lengths in tensors, a result's size depends on their values
    "nn.functional.interpolate",
    "nn.functional.upsample_bilinear",
    "_upsample_bilinear2d_aa",  # bytes: fixed point
}


def test_slice_of_the_operator_database():
    seed = time.time_ns() % 2**32
    draw = random.Random(seed)
    ops = draw.sample([op for op in op_db if op.name not in OUTSIDE], 60)
    tally = replay(ops, draw.sample(DTYPES, 3), 3, seconds=40)
    assert tally.passed >= 0.99 * tally.taken, f"seed {seed}: {dict(tally.failures)}"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(op_db), 120))
def test_whole_operator_database(start):
    tally = replay(op_db[start : start + 120], DTYPES, 5)
    assert tally.passed >= 0.985 * tally.taken, dict(tally.failures)
