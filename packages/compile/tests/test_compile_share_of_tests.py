"""`tools/check/share_of_tests.py`: a run of some cases of each test."""

from __future__ import annotations

import random

from share_of_tests import FEW, chosen


def drawn_cases(draw: random.Random) -> dict[str, list[str]]:
    functions = {f"tests/test_{k}.py::test_{k}": draw.choice([1, 2, 3, 4, 5, 9, 40]) for k in range(20)}
    return {name: [f"{name}[{i}-a[b]]" for i in range(n)] if n > 1 else [name] for name, n in functions.items()}


def test_a_share_has_cases_of_each_test_and_all_are_taken_at_last() -> None:
    seed = random.randrange(2**32)
    of = drawn_cases(random.Random(seed))
    cases = [case for own in of.values() for case in own]
    for share in (1, 2, 3, 7):
        runs = [chosen(cases, share, seed + run) for run in range(300)]
        assert all(run == chosen(reversed(cases), share, seed + k) for k, run in enumerate(runs[:5])), seed
        for own in of.values():
            count = len(own) if len(own) < FEW else -(-len(own) // share)
            assert all(len(run.intersection(own)) == count for run in runs), seed
        assert set().union(*runs) == set(cases), seed


def test_one_in_one_is_all_of_them() -> None:
    cases = [f"t.py::test[{i}]" for i in range(50)]
    assert chosen(cases, 1, 0) == set(cases)
