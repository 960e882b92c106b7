"""Random programs of side effects, with breaks and exceptions in random places: compiled leaves what eager leaves.

`effect_programs.py` draws many more of the same programs, in processes side by side.
"""

from __future__ import annotations

import os
import random

from effect_programs import check, show

COUNT = int(os.environ.get("EFFECT_PROGRAMS", "80"))


def test_effects_are_replayed_in_order_across_breaks_and_exceptions() -> None:
    first = random.randrange(1 << 40)
    wrong = [seed for seed, report in map(check, range(first, first + COUNT)) if report is not None]
    assert not wrong, f"seeds {wrong}\n{show(wrong[0])}"
