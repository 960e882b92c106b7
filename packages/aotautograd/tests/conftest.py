"""Options of this package's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primtorch.testing import double_precision

sys.path.insert(0, str(Path(__file__).parent))  # programs that several tests run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=None, help="how many random programs the fuzzer runs")


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 unless a dtype is named: a difference from eager that shows is no rounding's, on whatever processor."""
    with double_precision():
        yield
