"""Data makes an operator raise before the program comes to an error of its own, which is all that capture sees."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile

ZERO, FAR, TABLE = torch.tensor(0), torch.tensor([9]), torch.nn.Embedding(3, 2)
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quotient": lambda x: x + 1 // ZERO,
    "index": lambda x: x.index_select(0, FAR),
    "remainder": lambda x: x.long() % ZERO,
    "embedding": lambda x: torch.nn.functional.embedding(FAR, x[:, None]),
    "module": lambda x: TABLE(FAR) + x.sum(),
}


def _within(context: contextlib.AbstractContextManager[Any], run: Callable[[], Any]) -> Any:
    with context:
        return run()


def _finally(run: Callable[[], Any]) -> Any:
    try:
        return run()
    finally:
        torch.ones(2)


def _handled(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except KeyError:
        return None


def _generated(run: Callable[[], Any]) -> Any:
    yield run()


class Nothing:
    pass


PLACES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "here": lambda run: run(),
    "no_grad": lambda run: torch.no_grad()(run)(),
    "suppress": lambda run: _within(contextlib.suppress(ZeroDivisionError), run),
    "finally": _finally,
    "handler": _handled,
    "generator": lambda run: next(_generated(run)),
    "behind a break": lambda run: torchcompile.graph_break() or run(),
}
ERRORS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda o: o.missing,
    "key": lambda o: {}[1],
    "type": lambda o: o + 1,
    "raised": lambda o: (_ for _ in ()).throw(OSError("own")),
}


@pytest.mark.expected_eager("program_raised", "exception", "generator", "graph_raised", "graph_break")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("operator", "place"), itertools.product(OPERATORS, PLACES))
def test_the_operator_raises_first_and_capture_is_not_at_fault(operator: str, place: str, backend: str) -> None:
    for name, error in ERRORS.items():

        def program(x: torch.Tensor, good: bool, error: Callable[[Any], Any] = error) -> Any:
            def run() -> Any:
                y = x * 2 if good else OPERATORS[operator](x)
                return y, error(Nothing())

            return PLACES[place](run)

        compiled = torchcompile.compile(program, backend=backend)
        for good in (False, True, False, True):  # and later calls, when eager has shown that the program raises
            assert _outcome(compiled, good) == _outcome(program, good), (name, good)


def _outcome(call: Callable[[torch.Tensor, bool], Any], good: bool) -> tuple[type, str] | None:
    try:
        return call(torch.ones(3), good)  # nothing, where a handler has met the program's error
    except Exception as raised:
        return type(raised), str(raised)
