"""What torch warns of in a compiled function: told once, at the line of eager's, as an exception where filters ask."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchcompile


def no_freedom(x: torch.Tensor) -> torch.Tensor:
    return x[:1, 0].var() + x.sum()


def reversed_dims(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return y[None].T + y.T[..., None]


def grid(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.meshgrid(x[0], x[:, 0])
    return a * b


def twice_in_a_line(x: torch.Tensor) -> torch.Tensor:
    return x[None].T + x[None].T


def within(x: torch.Tensor) -> torch.Tensor:
    return no_freedom(x) + reversed_dims(x).sum()


PROGRAMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    no_freedom,
    reversed_dims,
    grid,
    twice_in_a_line,
    within,
)


@pytest.fixture(autouse=True)
def each_time() -> Iterator[None]:
    """C++ warns at each call, and not at the first one of the process alone."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def told(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, action: Any) -> tuple[set[Any], int]:
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter(action)
        call(x)
    return {(one.filename, one.lineno, one.category, str(one.message)) for one in log}, len(log)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_once_at_the_line(program: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """Operators whose results are known without running them warn of nothing; what is told is eager's."""
    x = torch.randn(3, 3)
    for action in ("default", "ignore"):
        torchcompile.reset()
        expected = told(program, x, action)
        found = told(torchcompile.compile(program, backend=backend), x, action)
        assert found[0] <= expected[0] and len(found[0]) == found[1], f"{found} beside {expected}"
        asked = program in (reversed_dims, twice_in_a_line)  # what torch itself runs, whatever the tensor
        assert not asked or found == expected


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("program", [reversed_dims, twice_in_a_line], ids=lambda program: program.__name__)
def test_as_an_exception(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(3, 3)
    compiled = torchcompile.compile(program)
    for action, fails in (("error", True), ("ignore", False)):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            if not fails:
                torch.testing.assert_close(compiled(x), program(x))
                continue
            with pytest.raises(UserWarning) as expected:
                program(x)
            with pytest.raises(UserWarning) as found:
                compiled(x)
            assert str(found.value) == str(expected.value)
