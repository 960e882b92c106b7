"""What eager refuses for its dtypes, a mode that asks refuses with the same error; what eager takes, it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from refusal_calls import DTYPES, Asking, Call, as_a_user_calls, differences, drawn, forms, seed_of_now  # noqa: F401
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from primtorch.symbolic import ShapeEnv

OUTSIDE = {
    "_unsafe_masked_index": "indices of another shape where they are masks, of an operator that eager alone calls",
    "native_dropout_backward": "a derivative with a complex mask, which no forward makes",
}
"""Operators that a mode does not ask about their dtypes, and why."""


def calls(op: Any, draw: random.Random) -> Iterator[Call]:
    """Two samples in every dtype, and with one tensor of another dtype than the others."""
    base, samples = drawn(op)
    for sample in samples if op.name not in OUTSIDE else ():
        plain, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [i for i, leaf in enumerate(plain) if isinstance(leaf, torch.Tensor)]
        alike = [i for i in tensors if plain[i].dtype is base]
        changes = [(alike, dtype) for dtype in DTYPES]
        changes += [([i], dtype) for i in tensors for dtype in draw.sample(DTYPES, 4) if len(tensors) > 1]
        for form in forms(op):
            for places, dtype in changes:
                leaves = [as_dtype(leaf, dtype) if i in places else leaf for i, leaf in enumerate(plain)]
                what = f"{dtype} at {places} of {tensors}"
                yield Call(op, form, what, leaves, tree, plain, draw.choice((dtype, *DTYPES)))


def as_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same place in memory of another dtype."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(dtype)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def is_of_values(call: Call, error: Exception) -> bool:
    return "ZeroDivisionError" in str(error)  # of elements, when the program runs


def test_slice_of_the_operator_database():
    seed, draw = seed_of_now()
    found = differences(draw.sample(op_db, 30), partial(calls, draw=draw), is_of_values, seconds=20)
    assert not found, "\n".join((f"seed {seed}", *found[:20]))


@pytest.mark.parametrize("shape", [(4,), (4, 2), (400, 2), (2, 900)])
def test_masks_beside_indices_of_as_many_elements(shape: tuple[int, ...]) -> None:
    """How many elements a mask selects is no matter of dtypes: it is not what it is in a mask that is made up."""
    with Asking(ShapeEnv()):
        x, mask, places = torch.zeros(*shape, 3), torch.ones(shape, dtype=torch.bool), torch.zeros(shape).long()
        chosen = places[mask]
        x[mask, chosen] = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(op_db), 110))
def test_whole_operator_database(start):
    draw = random.Random(start)
    found = differences(op_db[start : start + 110], partial(calls, draw=draw), is_of_values)
    assert not found, "\n".join((str(len(found)), *found[:40]))
