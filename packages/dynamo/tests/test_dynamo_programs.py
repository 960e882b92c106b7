"""Programs of the kinds that users report: state changed between calls, engines and regions inside, many threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effect_programs import Picture
from reported_programs import REPORTED, Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchdynamo


def capture(target: Any, **options: Any) -> Any:
    return torchdynamo.optimize(
        lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True, **options)
    )(target)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x**2 * ctx.scale * 100, None  # 100, not 3: eager's formula must be the one that runs


def test_an_own_autograd_function_keeps_its_backward() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x * 2, 2.0) + 1

    compiled, found = capture(program), []
    for run in (program, compiled, compiled):
        x = torch.arange(4.0, requires_grad=True)
        out = run(x)
        out.sum().backward()
        found.append((out.detach(), x.grad))
    assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(net, x * 2, use_reentrant=reentrant).sum()

    compiled, found = capture(program), []
    for run in (program, compiled, compiled):
        net.zero_grad()
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        out = run(x)
        out.backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in net.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_random_state_calls() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        y = x + torch.rand(3)
        state = torch.get_rng_state()
        y = y + torch.rand(3)
        torch.set_rng_state(state)
        return y * torch.rand(3)

    compiled = capture(program)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), program(torch.ones(3)))


def test_python_random_advances_once() -> None:
    import random

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + random.randint(0, 100)

    compiled, results = capture(program), []
    for run in (program, compiled):
        random.seed(7)
        results.append([run(torch.ones(2)) for _ in range(3)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_hooks_added_and_removed_between_calls() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    compiled = capture(net)
    assert torch.equal(compiled(x), net(x))
    handle = net[0].register_forward_hook(lambda module, args, out: out * 2)
    assert torch.equal(compiled(x), net(x))
    pre = net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(compiled(x), net(x))
    handle.remove()
    assert torch.equal(compiled(x), net(x))
    pre.remove()
    assert torch.equal(compiled(x), net(x))


def test_code_replaced_between_calls() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    def program(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * 2

    def changed(x: torch.Tensor) -> torch.Tensor:
        return x * 50

    compiled = capture(program)
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([4.0]))
    helper.__code__ = other.__code__
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([0.0]))
    plain = capture(other)
    assert torch.equal(plain(torch.ones(1)), torch.tensor([0.0]))
    other.__code__ = changed.__code__
    assert torch.equal(plain(torch.ones(1)), torch.tensor([50.0]))


def test_defaults_changed_between_calls() -> None:
    def helper(x: torch.Tensor, n: int = 1, *, m: int = 2) -> torch.Tensor:
        return x * n + m

    def program(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    compiled = capture(program)
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([3.0]))
    helper.__defaults__ = (5,)
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([7.0]))
    helper.__kwdefaults__ = {"m": 10}
    assert torch.equal(compiled(torch.ones(1)), torch.tensor([15.0]))


def test_classes_changed_between_calls() -> None:
    class Base:
        gain = 2

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    class Derived(Base):
        pass

    def program(obj: Base, x: torch.Tensor) -> torch.Tensor:
        return obj.scale(x) + (1 if hasattr(obj, "extra") else 0)

    compiled, obj, x = capture(program), Derived(), torch.ones(1)
    for change in (
        lambda: None,
        lambda: setattr(Base, "gain", 3),
        lambda: setattr(Derived, "gain", 4),
        lambda: setattr(Derived, "scale", lambda self, x: x - 1),
        lambda: setattr(Base, "extra", True),
        lambda: delattr(Derived, "scale"),
        lambda: setattr(obj, "gain", 9),
    ):
        change()
        assert torch.equal(compiled(obj, x), program(obj, x))


def test_copies_of_compiled_things() -> None:
    net, x = nn.Linear(3, 3), torch.randn(2, 3)
    compiled = capture(net)
    compiled(x)
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        other.__self__.weight.zero_()
    assert torch.equal(compiled(x), net(x)) and not torch.equal(other(x), net(x))
    function = capture(lambda x: x + 1)
    assert torch.equal(copy.deepcopy(function)(x), x + 1)


def test_eight_threads_call_one_function() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        y = net(x) * n
        if y.sum() > 0:
            y = y + 1
        return y

    compiled, wrong = capture(program), []
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        barrier.wait()
        for step in range(6):
            x = torch.randn(2 + step % 3, 4, generator=generator)
            try:
                if not torch.equal(compiled(x, seed % 3), program(x, seed % 3)):
                    wrong.append((seed, step, "differs"))
            except Exception as error:
                wrong.append((seed, step, repr(error)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- programs after public reports of wrong results -------------------------------------------


def outcomes(case: Callable[[], Case], wrap: Callable[[Any], Any]) -> list[Any]:
    """What each call of a fresh world gives and leaves."""
    program, calls, watched = case()
    run, found = wrap(program), []
    for prepare in calls:
        args, picture = prepare(), Picture()
        try:
            result: Any = ("returned", picture.of(run(*args)))
        except Exception as error:
            result = ("raised", type(error).__name__, str(error), getattr(error, "__notes__", []))
            result += (repr(error.__cause__), repr(error.__context__))
        found.append((result, picture.of(args), picture.of(watched), torch.is_grad_enabled()))
    return found


@pytest.mark.parametrize("case", REPORTED, ids=lambda case: case.__name__)
def test_reported_programs(case: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    expected = outcomes(case, lambda program: program)
    torch.manual_seed(0)
    found = outcomes(case, capture)
    for call, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert repr(mine) == repr(theirs), f"call {call}"


def test_an_argument_passed_twice() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    compiled = capture(program)
    for same in (False, True, False):
        a, c = torch.ones(2), torch.ones(2)
        b, d = (a, c) if same else (torch.ones(2), torch.ones(2))
        assert torch.equal(compiled(c, d), program(a, b)) and torch.equal(a, c)


def test_an_optimizers_step_is_right() -> None:
    results = []
    for wrap in (lambda f: f, capture):
        torch.manual_seed(0)
        net = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        step = wrap(lambda: optimizer.step())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).pow(2).sum().backward()
            step()
        results.append([p.detach().clone() for p in net.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
