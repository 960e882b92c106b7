"""Whole training steps, and derivatives that the program takes itself: in one graph, and exactly eager's.

A table of programs: each makes its tensors anew, is called several times, and is told by the names of its break
reasons, none of which means one graph. What is compared after each call: results, the leaves, their `.grad` by value,
strides, identity and shared memory, and what a later derivative of the results gives or raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from training_programs import BACKENDS, CASES, Made, Step, drawn

import torchcompile

# -- the judge -----------------------------------------------------------------------------------


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        text = str(error).partition("\n")[0]
        return type(error).__name__, text


def plain(value: Any) -> Any:
    return pytree.tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, value)


def flags(value: Any) -> Any:
    return [(t.requires_grad, t.is_leaf, t.stride()) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def sharing(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """Which of them lie in whose memory."""
    places = [None if t is None else t.untyped_storage().data_ptr() for t in tensors]
    return [
        (i, j) for i, a in enumerate(places) for j, b in enumerate(places[:i]) if a is not None and a == b and a != 0
    ]


def later(results: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """What a derivative of each result gives behind the call, or raises."""
    found = []
    for result in pytree.tree_leaves(results):
        if isinstance(result, torch.Tensor) and result.requires_grad:
            of = lambda result=result: torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
            found.append(plain(outcome(of)))
    return found


def observe(made: Made, step: Step, again: bool) -> list[Any]:
    seen: list[Any] = []
    kept: list[torch.Tensor | None] = [None] * len(made.leaves)
    for number, call in enumerate(made.calls):
        if made.between is not None:
            made.between(number)
        result = outcome(lambda call=call: step(*call))
        grads = [p.grad for p in made.leaves]
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        seen.append(
            {
                "result": plain(result),
                "flags": flags(result),
                "leaves": plain(list(made.leaves)),
                "versions": [p._version for p in made.leaves],
                "grads": plain(grads),
                "of grads": flags(grads),
                "same grads": [a is b for a, b in zip(grads, kept, strict=True)],
                "sharing": sharing([*grads, *made.leaves, *tensors]),
                "later": later(result, made.leaves) if again else None,
                "state": plain(made.optimizer.state_dict()["state"]) if made.optimizer is not None else None,
            }
        )
        kept = grads
    return seen


def alike(ours: list[Any], theirs: list[Any]) -> None:
    for number, (mine, eager) in enumerate(zip(ours, theirs, strict=True)):
        for name in eager:
            a, b = pytree.tree_flatten(mine[name]), pytree.tree_flatten(eager[name])
            assert a[1] == b[1], (number, name, mine[name], eager[name])
            for x, y in zip(a[0], b[0], strict=True):
                if isinstance(y, torch.Tensor):
                    torch.testing.assert_close(
                        x, y, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m, n=name: f"{number} {n}: {m}"
                    )
                else:
                    assert x == y, (number, name, mine[name], eager[name])


@pytest.mark.expected_eager(...)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str, backend: str) -> None:
    case = CASES[name]
    if backend not in case.backends:
        pytest.skip("not of this back end's business")
    eager, made = case.make(), case.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = observe(eager, eager.step, case.again)
        ours = observe(made, torchcompile.compile(made.step, backend=backend), case.again)
    alike(ours, theirs)
    report = torchcompile.report()
    told = {event.kind.id for event in report.events} - {"recompiled", "program_raised"}
    assert told == case.breaks
    if case.graphs is not None and not case.breaks:
        assert report.captured == case.graphs


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("seed", (*range(4), 11, 14, 24, 28))
def test_drawn_programs(seed: int, backend: str) -> None:
    """Who gets the memory of a gradient, who a copy, and which strides it has."""
    for number in range(seed * 10, seed * 10 + 10):
        torchcompile.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            eager, made = drawn(number), drawn(number)
            theirs = observe(eager, eager.step, again=True)
            ours = observe(made, torchcompile.compile(made.step, backend=backend), again=True)
        alike(ours, theirs)
        told = {event.kind.id for event in torchcompile.report().events}
        assert told <= {"recompiled", "backward", "overlapping_inputs", "program_raised"}, (number, told)
