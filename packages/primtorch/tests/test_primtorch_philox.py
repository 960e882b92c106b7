"""The random prims' words against the published known answers of Philox4x32-10."""

from __future__ import annotations

import pytest
import torch

from primtorch.prims import philox


def words(seed: int, count: int, stream: int = 0) -> list[int]:
    return [int(w) for w in philox.bits(torch.tensor(seed), (count,), stream)]


def test_known_answer_of_the_zero_key() -> None:
    assert words(0, 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_shape_that_ends_inside_a_block_is_a_prefix() -> None:
    long = words(2**40 + 7, 64, 3)
    for count in (0, 1, 2, 3, 5, 63):
        assert words(2**40 + 7, count, 3) == long[:count]
    assert philox.bits(torch.tensor(5), (3, 5)).flatten().tolist() == words(5, 15)


def test_64_bits_are_two_words() -> None:
    narrow = words(11, 14, 2)
    wide = philox.bits(torch.tensor(11), (7,), 2, 64).tolist()
    assert [w % 2**64 for w in wide] == [
        low + (high << 32) for low, high in zip(narrow[::2], narrow[1::2], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_have_the_digits_of_their_dtype(dtype: torch.dtype) -> None:
    drawn = philox.uniform(torch.tensor(1), (10000,), dtype=dtype)
    assert drawn.dtype is dtype and 0 <= float(drawn.min()) and float(drawn.max()) < 1
    assert abs(float(drawn.double().mean()) - 0.5) < 0.02
    steps = drawn.double() * 2.0 ** philox.digits(dtype)
    assert torch.equal(steps, steps.round()), "a multiple of the smallest step"
    assert abs(float((steps % 2).mean()) - 0.5) < 0.02, "every other one is odd"
