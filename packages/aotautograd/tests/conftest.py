"""Options of this package's tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=None, help="how many random programs the fuzzer runs")
