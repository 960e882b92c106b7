"""Modules that several tests share stand beside them. With TRITON_INTERPRET=1, CPU graphs run as interpreted Triton kernels."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primtorch.testing import double_precision
from torchinductor.schemas import InductorOptions

sys.path.insert(0, str(Path(__file__).resolve().parent))

*_others, _verify = InductorOptions.__init__.__defaults__ or ()
assert _verify is False  # the last field: in tests, kernels are held to their rules after every pass
InductorOptions.__init__.__defaults__ = (*_others, True)

if os.environ.get("TRITON_INTERPRET") == "1":
    from dataclasses import replace

    from triton_interpreter import InterpreterBackend

    import torchinductor

    class Interpreted(InterpreterBackend):
        """Products are calls, as those of ordinary sizes are: the tests' own are tiny."""

        traits = replace(InterpreterBackend.traits, tiny_product=0)

    torchinductor.register_codegen("cpu", Interpreted())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--in-place-programs", type=int, default=None, help="random programs of kernels that share memory")


@pytest.fixture
def double() -> Iterator[None]:
    """Float64 unless a dtype is named: a difference from eager that shows is no rounding's, on whatever processor."""
    with double_precision():
        yield
