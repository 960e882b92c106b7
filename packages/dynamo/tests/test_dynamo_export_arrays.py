"""Exported functions of NumPy arrays: what they take, give and refuse, and the same from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchdynamo import export, load, save

TABLE = np.arange(3.0)


def written(a: Any) -> Any:
    a += 1
    return a * 2


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "of an array": (lambda a: np.sin(a) + 1, (np.arange(6.0).reshape(2, 3),)),
    "with tensors": (lambda a, x: {"a": a @ a.T, "x": torch.from_numpy(a) * x}, (np.ones((2, 2)), torch.ones(2))),
    "of a tensor": (lambda x: (x.numpy() * 2, x + 1), (torch.arange(3.0),)),
    "a scalar": (lambda a: (a.sum(), a[0]), (np.arange(3.0),)),
    "views": (lambda a: (a.T, a[:, 1:], a[::-1], a[:, None]), (np.arange(6.0).reshape(2, 3),)),
    "the array itself": (lambda a: (a, a + 1), (np.arange(3),)),
    "backwards": (lambda a: (a * 2, a[::-1]), (np.arange(4.0)[::-1],)),
    "written to": (written, (np.arange(3.0),)),
    "of no elements": (lambda a: a.sum(0), (np.ones((0, 3)),)),
    "of no dims": (lambda a: a * 2, (np.array(3.0),)),
    "a global": (lambda a: a * TABLE, (np.ones(3),)),
    "another dtype": (lambda a: (a.mean(), a > 1, a.astype(np.float32)), (np.arange(4, dtype=np.int32),)),
}


def outcome(program: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """What a call gives, and the arguments behind it."""
    given = [_copy(a) for a in arguments]
    return [*pytree.tree_leaves(program(*given)), *given]


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # laid out as it is
        return value[::-1].copy()[::-1] if any(step < 0 for step in value.strides) else value.copy()
    return value.clone()


@pytest.mark.parametrize("aten", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_kinds_and_layouts(name: str, aten: bool, tmp_path: Path) -> None:
    program, arguments = PROGRAMS[name]
    exported = export(program, aten_graph=aten)(*map(_copy, arguments))
    save(exported, tmp_path / "program")
    wanted = outcome(program, arguments)
    for found in (outcome(exported, arguments), outcome(load(tmp_path / "program"), arguments)):
        assert [type(value) for value in found] == [type(value) for value in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs)
            else:
                np.testing.assert_array_equal(mine, theirs, strict=True)
                assert getattr(mine, "strides", None) == getattr(theirs, "strides", None)


def test_a_view_that_is_given_lies_in_the_array() -> None:
    exported = export(lambda a: (a[1:], a[::-1]))(np.arange(4.0))
    array = np.arange(4.0)
    tail, backwards = exported(array)
    array[3] = 9
    assert tail[2] == backwards[0] == 9


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (np.arange(4.0), "has size 4 at dim 0, expected 3"),
        (np.arange(3), "has dtype torch.int64, expected torch.float64"),
        (np.arange(6.0)[::2], "has stride 2 at dim 0, expected 1"),
        (np.arange(3.0)[::-1], "a is a ndarray, expected an array of writable memory, laid out as it was"),
        (torch.arange(3.0, dtype=torch.float64), "a is a Tensor, expected an array"),
        (2.0, "a is a float, expected an array"),
    ],
)
def test_another_array_is_refused(argument: Any, why: str) -> None:
    exported = export(lambda a: a * 2)(np.arange(3.0))
    with pytest.raises(ValueError, match=why):
        exported(argument)
