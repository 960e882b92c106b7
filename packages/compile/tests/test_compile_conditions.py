"""Conditions on data that only keep the program from a `raise`: one graph, and eager's exception where they are not met."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import pytest
import torch
from condition_programs import (
    LOG,
    PROGRAMS,
    Bounded,
    Program,
    Written,
    before_a_break,
    contrary,
    handled,
    raised,
    raised_within,
)

import torchcompile

pytestmark = pytest.mark.warm

BACKENDS = ("eager", "aot_eager", "inductor")


def observed(call: Program, x: torch.Tensor) -> list[Any]:
    """What a call gives: values and a gradient, or an exception; then the random state and what it did outside."""
    LOG.clear()
    torch.manual_seed(0)
    x = x.detach().requires_grad_()
    try:
        out = call(x)
        out.sum().backward()
        seen: list[Any] = [out.detach(), x.grad]
    except Exception as error:
        seen = [type(error), str(error.args), x.grad]
    return [*seen, torch.get_rng_state(), list(LOG)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b


GOOD = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
BAD = GOOD + 2e3


@pytest.mark.expected_eager("condition_not_met", "raise_was_handled", "graph_break")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_eager(program: Program, backend: str) -> None:
    options = {"eager_random": True} if backend == "inductor" else {}
    for order in itertools.permutations((GOOD, BAD)):
        compiled = torchcompile.compile(program, backend=backend, options=options)
        for x in (*order, *order):
            assert_same(observed(compiled, x), observed(program, x))
    report = torchcompile.report()
    assert [event.kind.id for event in report.breaks] == ["graph_break"] * (program is before_a_break)
    told = {event.kind.id for event in report.events} - {"graph_break"}
    assert told == {"raise_was_handled" if program is handled else "condition_not_met"}


@pytest.mark.expected_eager("tensor_subclass", "data_dependent_branch", "program_raised")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_that_says_its_own_truth_is_asked(backend: str) -> None:
    compiled = torchcompile.compile(contrary, backend=backend)
    for x in (GOOD, BAD, GOOD):
        assert_same(observed(compiled, x), observed(contrary, x))


@pytest.mark.expected_eager("condition_not_met")
def test_the_report_names_the_condition() -> None:
    compiled = torchcompile.compile(raised_within)
    with pytest.raises(OverflowError):
        compiled(BAD)
    (event,) = torchcompile.report().events
    assert event.line is not None and "if not (y < 1e3)" in linecache.getline(event.line.file, event.line.line)


@pytest.mark.expected_eager("condition_not_met")
def test_under_fullgraph_the_exception_is_the_programs() -> None:
    compiled = torchcompile.compile(raised, fullgraph=True)
    compiled(GOOD)
    with pytest.raises(ValueError, match="too large") as caught:
        compiled(BAD)
    assert caught.traceback[-1].name == "raised"


@pytest.mark.expected_eager("data_dependent_branch", "program_raised")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_writes_asks_first(backend: str) -> None:
    module, plain = Written(), Written()
    compiled = torchcompile.compile(module, backend=backend)
    for x in (GOOD, BAD, GOOD):
        assert_same(observed(compiled, x), observed(plain, x))
        assert module.steps == plain.steps
    assert {event.kind.id for event in torchcompile.report().breaks} == {"data_dependent_branch"}


@pytest.mark.expected_eager("autograd_function")
@pytest.mark.parametrize("backend", BACKENDS)
def test_conditions_of_a_backward_are_asked_when_it_runs(backend: str) -> None:
    program = lambda x: Bounded.apply(x) * x.detach()
    compiled = torchcompile.compile(program, backend=backend)
    for x in (GOOD, BAD):
        assert_same(observed(compiled, x), observed(program, x))


@pytest.mark.expected_eager("condition_not_met")
def test_what_a_loss_of_torch_asks_of_its_data_is_a_condition() -> None:
    program = lambda x: torch.nn.functional.gaussian_nll_loss(x, x + 1, x * x - 1e3)
    compiled = torchcompile.compile(program, fullgraph=True)
    x = torch.full((3,), 40.0, requires_grad=True)
    assert_same(observed(compiled, x), observed(program, x))
    assert_same(observed(compiled, x.detach() * 0), observed(program, x.detach() * 0))
