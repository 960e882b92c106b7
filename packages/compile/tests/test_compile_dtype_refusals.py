"""A program that eager refuses for its dtypes raises eager's error at eager's line; its handlers see that error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile

x, wide, half, whole = torch.ones(3, 3), torch.ones(3, 3).double(), torch.ones(3, 3).half(), torch.ones(3, 3).long()
truths, complexes, bits = whole.bool(), wide.cfloat(), torch.ones(3, 3).bfloat16()
image, large = torch.ones(2, 3, 40, 40).int(), torch.ones(300, 400).short()

REFUSED: dict[str, Callable[..., Any]] = {
    "addmm": lambda: torch.addmm(whole, x, x),
    "bitwise": lambda: torch.bitwise_and(x, x),
    "softmax": lambda: (whole + 1).softmax(-1),
    "abs": lambda: truths.abs(),
    "layer norm": lambda: F.layer_norm(x * 2, (3,), weight=whole[0]),
    "inverse of half": lambda: torch.linalg.inv(half + half),
    "product of float and bfloat16": lambda: x @ bits,
    "convolution of ints": lambda: F.conv2d(image, torch.ones(4, 3, 3, 3), padding=1),
    "convolution of bools": lambda: F.conv2d(image.bool(), torch.ones(4, 3, 3, 3).bool()),
    "out": lambda: torch.add(x, x, out=whole.clone()),
    "out of complex": lambda: torch.mul(complexes, 2, out=x.clone()),
    "in place": lambda: whole.clone().div_(2),
    "in place with reals": lambda: complexes.clone().abs_(),
    "comparison": lambda: complexes < x,
    "two devices": lambda: (x + 1) * torch.ones(3, 3, device="meta"),
    "a whole number's gradient": lambda: (whole + 1).requires_grad_(),
    "many elements": lambda: large.logcumsumexp(1),
    "grid": lambda: F.grid_sample(image.float(), torch.zeros(2, 5, 5, 2).double(), align_corners=False),
}  # fmt: skip


def told(call: Callable[[], Any]) -> tuple[type, str, int]:
    """The class and the text of what a call raises, and the line of this file that it comes from."""
    try:
        call()
    except Exception as error:  # of any type: it is what is compared
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
        return type(error), str(error), lines[-1]
    raise AssertionError("it was taken")


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", REFUSED)
def test_the_error_is_eagers(name):
    program = REFUSED[name]
    compiled = torchcompile.compile(program)
    expected = told(program)
    assert told(compiled) == expected
    assert told(compiled) == expected


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", REFUSED)
def test_handlers_meet_what_eager_raises(name):
    program = REFUSED[name]

    def handled() -> torch.Tensor:
        try:
            program()
        except NotImplementedError:
            return torch.zeros(2) + 1
        except RuntimeError as error:
            return torch.zeros(len(str(error))) + 2
        except Exception:
            return torch.zeros(2) + 3
        return torch.zeros(2)

    torch.testing.assert_close(torchcompile.compile(handled)(), handled())


TAKEN: dict[str, Callable[..., Any]] = {
    "the sum of one bool in place": lambda: torch.tensor(True).cumsum_(0),
    "targets of another dtype": lambda: F.binary_cross_entropy_with_logits(wide, x),
    "margins of another dtype": lambda: F.soft_margin_loss(bits, x),
    "a fill of a complex number": lambda: x.masked_fill(truths, torch.tensor(2 + 0j)),
    "a triangle of another dtype": lambda: torch.linalg.solve_triangular(x, whole, upper=True),
}


@pytest.mark.expected_eager("operator_without_meta", "nothing_to_compile")
@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_taken(name):
    program = TAKEN[name]
    got, expected = torchcompile.compile(program)(), program()
    torch.testing.assert_close(got, expected)
    assert got.dtype is expected.dtype
