"""Random programs of side effects, with breaks and exceptions in random places: compiled leaves what eager leaves.

`effect_programs.py` draws many more of the same programs, in processes side by side. Below: the order of names.
"""

from __future__ import annotations

import os
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effect_programs import check, show

import torchdynamo

COUNT = int(os.environ.get("EFFECT_PROGRAMS", "80"))


def test_effects_are_replayed_in_order_across_breaks_and_exceptions() -> None:
    first = random.randrange(1 << 40)
    wrong = [seed for seed, report in map(check, range(first, first + COUNT)) if report is not None]
    assert not wrong, f"seeds {wrong}\n{show(wrong[0])}"


def deletes_and_sets(held: Any) -> None:
    del held.b
    held.left = True
    held.b = 1


def deletes_its_own(held: Any) -> None:
    held.left = 1
    held.right = 2
    del held.left
    held.left = 3


def deletes_again(held: Any) -> None:
    held.b = 1
    del held.b
    held.last = 2
    held.b = 3
    del held.b
    held.b = 4


def reads_in_between(held: Any) -> None:
    del held.a
    held.left = 1
    held.a = 2
    held.names = list(vars(held))
    del held.left
    held.left = 3


def breaks_in_between(held: Any) -> None:
    del held.b
    held.left = 1
    print(end="")
    held.b = 2
    del held.left
    held.left = 3


class Plain:
    pass


@pytest.mark.parametrize("kind", [Plain, types.SimpleNamespace])
@pytest.mark.parametrize(
    "write", [deletes_and_sets, deletes_its_own, deletes_again, reads_in_between, breaks_in_between]
)
def test_a_name_that_was_deleted_comes_last(write: Callable[[Any], None], kind: Callable[[], Any]) -> None:
    def program(x: torch.Tensor, held: Any) -> torch.Tensor:
        write(held)
        return x + 1

    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for _ in range(2):
        found = []
        for run in (program, compiled):
            held = kind()
            held.a, held.b, held.c = 1, 2, 3
            run(torch.ones(2), held)
            found.append(list(vars(held).items()))
        assert found[1] == found[0]
