"""Random programs read and write state of every kind; between calls any of it changes. Compiled equals eager on every call.

`soundness_run.py` draws many more of the same programs, in processes side by side.
"""

from __future__ import annotations

import os
import random

import soundness_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soundness_programs import disagreement
from soundness_statements import CHANGES, STATEMENTS

COUNT = int(os.environ.get("SOUNDNESS_PROGRAMS", "2000"))


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=5),
    st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4),
)
def test_state_that_changes_between_calls_is_seen(statements: list[str], changes: list[str]) -> None:
    assert disagreement(statements, changes) is None


def test_the_runner_of_many_programs() -> None:
    assert soundness_run.check_slice((random.randrange(1 << 40), 20)) == (20, [])
