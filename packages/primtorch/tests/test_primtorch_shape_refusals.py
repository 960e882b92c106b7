"""What eager refuses for its sizes, dims and places, a mode that asks refuses with the same error; what eager takes, it
takes."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from refusal_calls import Asking, Call, as_a_user_calls, as_users_call, differences, drawn, forms, seed_of_now  # noqa: F401
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from primtorch.symbolic import ShapeEnv

OUTSIDE = {
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        "a kernel that reads statistics beyond their end: `batch_norm`, which calls it, checks them",
    ),
    "lu_unpack": "a kernel that reads pivots beyond their end",
    "nn.functional.embedding_bag": "a kernel that reads offsets and weights beyond their end",
    "linalg.lstsq": "a kernel that writes beyond the end of right sides without columns",
}
"""Operators that a mode does not ask about their sizes, and why."""
_EACH = 8
"""Changes of a sample in one form."""
_VALUES = re.compile(r"^(?!Dimension).*out of (bounds|range)|ZeroDivisionError|^Class values", re.IGNORECASE)
"""Places, and classes, beyond a size that is 0, which any element is."""


def calls(op: Any, draw: random.Random, most: int = _EACH) -> Iterator[Call]:
    """Two samples with one tensor of another shape, or with another number."""
    _, samples = drawn(op)
    for sample in samples if op.name not in OUTSIDE else ():
        plain, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        changes = [(place, other) for place, leaf in enumerate(plain) for other in others(leaf, draw)]
        for form in forms(op):
            for place, other in draw.sample(changes, min(most, len(changes))):
                leaves = [*plain[:place], other, *plain[place + 1 :]]
                yield Call(op, form, f"leaf {place} of {shown(plain)} as {shown([other])}", leaves, tree, plain, None)


def others(leaf: Any, draw: random.Random) -> Iterator[Any]:
    """A tensor in other shapes, or other numbers near an integer, and far."""
    if type(leaf) is int:
        yield from (leaf + 1, leaf - 1, -leaf - 1, leaf + 9)
    if not isinstance(leaf, torch.Tensor):
        return
    shape = list(leaf.shape)
    yield from (with_shape(leaf, other) for other in ([], [1, *shape], [*shape, 2], shape[1:], shape[:-1]))
    for d, size in enumerate(shape):
        yield from (with_shape(leaf, [*shape[:d], n, *shape[d + 1 :]]) for n in {size + 1, size - 1, 1, 0} - {size})


def with_shape(t: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Of the tensor's elements, over and over."""
    count = torch.Size(shape).numel()
    return t.detach().reshape(-1)[torch.arange(count) % t.numel()].reshape(shape)


def shown(leaves: list[Any]) -> str:
    return ", ".join(str(list(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def is_of_values(call: Call, error: Exception) -> bool:
    """Whether eager takes the call with tame elements."""
    if _VALUES.search(str(error)):
        return True
    return any(
        call.with_leaves(partial(tame, place=place, diagonal=diagonal)).run(None) is None
        for place, diagonal in itertools.product((0, 1), (2, 1))
    )


def tame(t: torch.Tensor, place: int, diagonal: int) -> torch.Tensor:
    """Ones, which are chances, or with twos on the diagonals of matrices, which have full rank; one place or length."""
    if not (t.is_floating_point() or t.is_complex()):
        return torch.full_like(t, place)
    made = torch.ones_like(t)
    if t.dim() > 1:
        made.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
    return made


def differences_of_slice(seed: int) -> list[str]:
    draw = random.Random(seed)
    return differences(draw.sample(op_db, 30), partial(calls, draw=draw), is_of_values, seconds=20)


def test_slice_of_the_operator_database():
    """In a process of its own, which kernels of eager's may end at operands that no program gives them."""
    seed, _ = seed_of_now()
    done = subprocess.run([sys.executable, __file__, str(seed)], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip(f"seed {seed}: signal {-done.returncode} in a kernel of eager's")
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found, "\n".join((f"seed {seed}", *found[:20]))


@pytest.mark.parametrize(
    "name", ["bernoulli_", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "random_"]
)
def test_what_a_call_leaves_out_is_what_that_operator_has_by_default(name: str) -> None:
    """`bernoulli_` has a chance of one half, and the function that gives what it writes has none."""
    with Asking(ShapeEnv()):
        getattr(torch.zeros(3), name)()


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(op_db), 110))
def test_whole_operator_database(start):
    draw = random.Random(start)
    found = differences(op_db[start : start + 110], partial(calls, draw=draw, most=100), is_of_values)
    assert not found, "\n".join((str(len(found)), *found[:40]))


if __name__ == "__main__":
    with as_users_call():
        print(json.dumps(differences_of_slice(int(sys.argv[1]))))
