"""Whole small scripts, eager and compiled from one seed: what they note, who shares memory, random state, ambient state,
warnings, and what the ledger tells."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from use_protocols import PROGRAMS, Program, Run

import torchcompile
from primtorch.ambient import AMBIENT

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def observed(program: Program, compile: Callable[..., Any]) -> tuple[Run, Any]:
    """The run, and what it leaves in the process."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    run = Run(compile)
    before = {state.name: state.read() for state in AMBIENT}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        program(run)
    changed = [state.name for state in AMBIENT if not state.same(before[state.name], state.read())]
    drawn = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    told = [(w.category, str(w.message)) for w in warned if not issubclass(w.category, DeprecationWarning)]
    return run, (changed, drawn, told)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, backend: str) -> None:
    program, kinds = PROGRAMS[name]
    options = {"eager_random": True} if backend == "inductor" else {}
    theirs, left = observed(program, lambda function: function)
    ours, ours_left = observed(
        program, lambda function: torchcompile.compile(function, backend=backend, options=options)
    )
    assert len(ours.notes) == len(theirs.notes)
    for (title, mine), (_, eager) in zip(ours.notes, theirs.notes, strict=True):
        assert len(mine) == len(eager), title
        for a, b in zip(mine, eager, strict=True):
            if isinstance(b, torch.Tensor) or type(b) is float:
                torch.testing.assert_close(
                    a, b, rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda m, t=title: f"{t}: {m}"
                )
            else:
                assert a == b, title
    assert ours_left == left
    report = torchcompile.report()
    told_of = {event.kind.id for event in report.events} - {"recompiled", "operator_by_reference"}
    once = {"library_code"}  # of what torch does at its first use in a process, which another test may have been
    assert report.captured and told_of <= kinds and told_of - once == kinds - once
