"""Generated programs, run natively and interpreted."""

import importlib.util
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_SPEC = importlib.util.spec_from_file_location(
    "interpreter_random_programs", pathlib.Path(__file__).with_name("interpreter_random_programs.py")
)
programs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(programs)


@pytest.mark.parametrize("start", range(0, 4000, 400))
def test_random_programs(start):
    assert sum(programs.check(seed) for seed in range(start, start + 400)) > 100


@settings(max_examples=200, deadline=None)
@given(st.integers(min_value=10_000, max_value=2**48))
def test_generated_programs(seed):
    programs.check(seed)
