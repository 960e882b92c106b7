"""Makes this folder's own modules importable from its tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primtorch.testing import double_precision

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 unless a dtype is named: a difference from eager that shows is no rounding's, on whatever processor."""
    with double_precision():
        yield
