"""Options of this package's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # programs that several tests run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=None, help="how many random programs the fuzzer runs")
