"""The judge of rounded results: what it lets pass and what it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primtorch.testing import assert_as_accurate, double_precision

EXACT = torch.linspace(-2, 3, 100, dtype=torch.float64).exp()
EAGER = EXACT.float()
ULP = torch.finfo(torch.float32).eps * float(EXACT.max())
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])

PASSES: dict[str, tuple[Any, Any, Any]] = {
    "equal": (EAGER, EAGER, EXACT),
    "a few ulps": (EAGER + 4 * ULP, EAGER, EXACT),
    "twice eager's error": (EAGER + 1.9e-3, EAGER + 1e-3, EXACT),
    "infinities and NaNs at the same places": (SPECIAL, SPECIAL, SPECIAL.double()),
    "eager overflows where the truth does not": (SPECIAL[1:2], SPECIAL[1:2], torch.tensor([1e39]).double()),
    "integers, numbers, nothing": ((torch.arange(3), 2, None), (torch.arange(3), 2, None), (torch.arange(3), 2, None)),
    "empty": (EAGER[:0], EAGER[:0], EXACT[:0]),
    "doubles that were added up in another order": (EXACT * (1 + 1e-13), EXACT, EXACT),
    "complex": (torch.complex(EAGER, EAGER), torch.complex(EAGER, EAGER), torch.complex(EXACT, EXACT)),
}
FAILS: dict[str, tuple[Any, Any, Any]] = {
    "many ulps": (EAGER + 20 * ULP, EAGER, EXACT),
    "three times eager's error": (EAGER + 3e-3, EAGER + 1e-3, EXACT),
    "doubles of which a part was computed in less": (EXACT.float().double(), EXACT, EXACT),
    "another dtype": (EXACT, EAGER, EXACT),
    "another shape": (EAGER[None], EAGER, EXACT),
    "a NaN": (torch.where(EAGER > 1, EAGER, torch.nan), EAGER, EXACT),
    "another infinity": (-SPECIAL, SPECIAL, SPECIAL.double()),
    "an integer": (torch.arange(3) + 1, torch.arange(3), torch.arange(3)),
    "a number": (2, 3, 3),
}


@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str) -> None:
    assert_as_accurate(*PASSES[name])


@pytest.mark.parametrize("name", FAILS)
def test_fails(name: str) -> None:
    with pytest.raises(AssertionError, match="gradient of x result 0"):
        assert_as_accurate(*FAILS[name], what="gradient of x")


def test_double_precision_ends() -> None:
    before = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError), double_precision():
        assert torch.ones(()).dtype == torch.float64
        raise ZeroDivisionError
    assert torch.get_default_dtype() == before
