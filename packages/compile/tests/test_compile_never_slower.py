"""`never_slower`: what is timed, what is not, and what is kept. Clocks are the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from primtorch.ledger import Effect
from torchcompile import never_slower

EAGER, COMPILED = 1e-6, 3e-6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What each side is to take; measuring runs nothing."""
    times = {"eager": EAGER, "compiled": COMPILED, "measured": 0}

    def seconds(run: Callable[..., Any], inputs: Any, backward: bool) -> float:
        times["measured"] += 1
        return times["eager" if getattr(run, "__name__", "") == "forward" else "compiled"]

    monkeypatch.setattr(never_slower, "_seconds", seconds)
    monkeypatch.setattr(never_slower, "BUDGET", 600.0)
    torchcompile.reset()
    return times


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    options = {"never_slower": True, "strict": True, "eager_random": True}
    return torchcompile.compile(program, fullgraph=True, options=options)


def kept_eager() -> list[str]:
    """The details of the graphs that are."""
    report = torchcompile.report()
    assert report.clean
    return [event.detail for event in report.events if event.effect is Effect.CHOSEN]


@pytest.mark.parametrize(("eager", "kept"), [(EAGER, 1), (0.9 * COMPILED, 0), (2 * COMPILED, 0)])
def test_eager_is_kept_where_it_is_clearly_faster(clock: dict[str, float], eager: float, kept: int) -> None:
    clock["eager"] = eager
    program = compiled(lambda x: x.sin() + 1)
    for _ in range(4):
        x = torch.randn(3, dtype=torch.float64)
        torch.testing.assert_close(program(x), x.sin() + 1)
    assert clock["measured"] == 2 * never_slower.ROUNDS
    assert kept_eager() == ["1 us in eager, 3 us compiled (forward, best of 5)"] * kept


def test_it_is_asked_for(clock: dict[str, float]) -> None:
    program = torchcompile.compile(lambda x: x + 1)
    for _ in range(3):
        program(torch.ones(2))
    assert clock["measured"] == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.add_(1),
        lambda x: x.t().mul_(2) * 1,
        lambda x: torch.rand_like(x) + x,
        lambda x: F.dropout(x, 0.5),
        lambda x: F.relu(x, inplace=True) * 2,
        lambda x: F.batch_norm(x, RUNNING[0], RUNNING[1], training=True),
        lambda x: x.sin().cos().exp().tanh().sigmoid().sqrt().abs().neg().square().sin(),
    ],
    ids=["write", "view", "draw", "dropout", "inplace", "statistics", "fused"],
)
def test_what_is_not_timed(clock: dict[str, float], program: Callable[..., Any]) -> None:
    run, results = compiled(program), []
    for function in (run, program):
        torch.manual_seed(0)
        RUNNING[:] = [torch.zeros(3), torch.ones(3)]
        x = torch.ones(4, 3)
        results.append([*(function(x) for _ in range(3)), x, *RUNNING])
    torch.testing.assert_close(results[0], results[1])
    assert clock["measured"] == 0 and not kept_eager()


RUNNING = [torch.zeros(3), torch.ones(3)]


def test_training_goes_on_with_the_same_gradients(clock: dict[str, float]) -> None:
    module = torch.nn.Linear(4, 2).double()
    program, seen = compiled(module), []
    handle = module.weight.register_hook(seen.append)
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(3):
        module.zero_grad()
        program(x).square().sum().backward()
        expected = torch.autograd.grad(module(x).square().sum(), module.weight)[0]
        torch.testing.assert_close(module.weight.grad, expected)
    handle.remove()
    assert kept_eager() == ["1 us in eager, 3 us compiled (forward and backward, best of 5)"]


def test_timing_by_the_real_clock_leaves_no_trace() -> None:
    torchcompile.reset()
    module = torch.nn.Linear(4, 2)
    hooked: list[torch.Tensor] = []
    module.weight.register_post_accumulate_grad_hook(lambda p: hooked.append(p))
    program, x = compiled(module), torch.randn(3, 4)
    state = torch.get_rng_state()
    for _ in range(3):
        program(x).sum().backward()
    assert len(hooked) == 3 and torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(module.weight.grad, 3 * x.sum(0).expand(2, 4))


def test_an_error_while_timing_is_not_the_users(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> float:
        raise MemoryError

    monkeypatch.setattr(never_slower, "_seconds", fail)
    program = compiled(lambda x: x + 1)
    for _ in range(3):
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))
    assert not kept_eager()
