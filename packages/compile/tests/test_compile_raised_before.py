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
def test_eager_s_error_is_the_operator_s_and_no_fault_of_capture(operator: str, place: str, backend: str) -> None:
    for name, error in ERRORS.items():
        outcomes = []
        for good in (False, True):

            def program(x: torch.Tensor, good: bool, error: Callable[[Any], Any] = error) -> Any:
                def run() -> Any:
                    y = x * 2 if good else OPERATORS[operator](x)
                    return y, error(Nothing())

                return PLACES[place](run)

            for call in (program, torchcompile.compile(program, backend=backend)):
                try:
                    outcomes.append((call(torch.ones(3), good), None))
                except Exception as raised:
                    outcomes.append((type(raised), str(raised)))
        assert outcomes[0] == outcomes[1], name
        assert outcomes[2] == outcomes[3], name
