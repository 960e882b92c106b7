"""Where a backward comes to: the inputs that lead to the results it begins with, as eager's autograd has it."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aotautograd import aot_function, min_cut, run_graph

Outputs = tuple[torch.Tensor, ...]
INPUTS = 4


class Passes(torch.autograd.Function):
    """Gives no gradient to its second argument, an input, to which it leads nevertheless."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2, None


OPERATORS: tuple[Callable[..., torch.Tensor], ...] = (
    lambda a, b: a * b,
    lambda a, b: a + b,
    lambda a, b: (a @ b).tanh(),
    lambda a, b: a.sin(),
    lambda a, b: a.exp().t(),
    lambda a, b: a.detach() * b,
    lambda a, b: torch.cat([a, b])[1:3] + a.sum(),
    lambda a, b: torch.where(b > 0, a, a.square()),
    lambda a, b: a * 3,
    Passes.apply,
)


def drawn(seed: int) -> Callable[..., Outputs]:
    """A program of few operators and several results, so that most results leave some input out, and some are computed
    from others."""
    draw = random.Random(seed)
    steps: list[tuple[Callable[..., torch.Tensor], int, int]] = []
    for n in range(draw.randint(4, 8)):
        operator = draw.choice(OPERATORS)
        others = INPUTS if operator == Passes.apply else INPUTS + n
        steps.append((operator, draw.randrange(INPUTS + n), draw.randrange(others)))
    results = draw.sample(range(INPUTS, INPUTS + len(steps)), draw.randint(2, min(4, len(steps))))

    def program(*inputs: torch.Tensor) -> Outputs:
        values = list(inputs)
        for operator, a, b in steps:
            values.append(operator(values[a], values[b]))
        return tuple(values[place] for place in results)

    return program


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, 2, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(INPUTS)]


class Notes:
    """What hooks were called with, and what came of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def hook(self, name: str, factor: float = 1) -> Callable[..., Any]:
        def called(gradient: torch.Tensor | None) -> Any:
            self.events.append((name, None if gradient is None else gradient.detach().clone()))
            return None if gradient is None or factor == 1 else gradient * factor

        return called

    def seen(self, name: str) -> Callable[..., None]:
        return lambda *_: self.events.append((name, True))

    def take(self) -> list[tuple[str, Any]]:
        events, self.events = sorted(self.events, key=lambda event: event[0]), []
        return events


def run(program: Callable[..., Outputs], seed: int) -> list[Any]:
    """Hooks on inputs, on nodes that accumulate and on results; then losses of some of the results, one after the other."""
    draw, notes, seen = random.Random(-seed), Notes(), []
    inputs = start()
    for place, t in enumerate(inputs):
        if draw.random() < 0.8:
            t.register_hook(notes.hook(f"input {place}", draw.choice([1, 3])))
        if draw.random() < 0.5:
            t.register_post_accumulate_grad_hook(notes.seen(f"accumulated {place}"))
    behind = [t * 1 if draw.random() < 0.3 else t for t in inputs]  # an input with a history
    for place, t in enumerate(behind):
        if not t.is_leaf:
            t.grad_fn.register_hook(notes.seen(f"node behind {place}"))
    results = list(program(*behind))
    for place, t in enumerate(results):
        if t.requires_grad:
            t.register_hook(notes.hook(f"result {place}", draw.choice([1, 2])))
            if draw.random() < 0.5:
                t.retain_grad()
    freed = False
    for _ in range(draw.randint(1, 4)):
        used = draw.sample(range(len(results)), draw.randint(1, len(results)))
        retain, graph = draw.random() < 0.6, draw.random() < 0.2
        asked = draw.choice([None, None, draw.sample([*inputs, *(t for t in results if t.requires_grad)], 2)])
        if asked is not None and freed:
            continue  # a graph frees as if all gradients were asked for
        retain |= asked is not None
        freed |= not (retain or graph)
        if not any(results[i].requires_grad for i in used):
            continue
        loss = sum((results[i] * (i + 1)).sum() for i in used)
        try:
            if asked is None:
                loss.backward(retain_graph=retain or graph, create_graph=graph)
                found = []
            else:
                found = torch.autograd.grad(
                    loss, asked, allow_unused=True, retain_graph=retain or graph, create_graph=graph
                )
        except RuntimeError as error:
            seen.append("second time" if "second time" in str(error) else str(error))
            break
        seen.append(notes.take())
        seen.append([None if g is None else g.detach() for g in found])
        seen.append(
            [
                None if t.grad is None else t.grad.detach().clone()
                for t in (*inputs, *results)
                if t.is_leaf or t.retains_grad
            ]
        )
    for t in inputs:
        t.grad = None  # under create_graph it leads back to the input
    return seen


def assert_same(ours: Any, eager: Any, where: str) -> None:
    if isinstance(eager, (list, tuple)):
        assert isinstance(ours, (list, tuple)) and len(ours) == len(eager), f"{where}: {ours} instead of {eager}"
        for place, (a, b) in enumerate(zip(ours, eager, strict=True)):
            assert_same(a, b, f"{where}, {place}")
    elif isinstance(eager, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{where}: {ours} instead of {eager}"
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12, msg=lambda text: f"{where}: {text}")
    else:
        assert ours == eager, where


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("settings", [{}, {"partitioner": min_cut(), "decompositions": "prims"}], ids=["aten", "prims"])
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_drawn_programs(first: int, settings: dict[str, Any]) -> None:
    """Which hooks ran, with what, and which gradients are None."""
    for seed in range(first, first + 20):
        program = drawn(seed)
        compiled = aot_function(program, fw_compiler=run_graph, **settings)
        for turn in range(3):
            eager, ours = run(program, 10 * seed + turn), run(compiled, 10 * seed + turn)
            assert_same(ours, eager, f"seed {seed}, turn {turn}")


def heads(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Outputs:
    trunk = (x @ x).exp()
    return (trunk * a).sin(), (trunk * b).tanh(), c.exp()


def gradients(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [t.grad for t in inputs]


def test_one_backward_computes_what_two_results_share() -> None:
    runs: list[int] = []

    def counting(gm: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        return lambda *args: runs.append(1) or gm(*args)

    inputs = start()
    compiled = aot_function(heads, fw_compiler=run_graph, bw_compiler=counting)
    sum(t.sum() for t in compiled(*inputs)).backward()
    assert len(runs) == 1
    twins = start()
    sum(t.sum() for t in heads(*twins)).backward()
    assert_same(gradients(inputs), gradients(twins), "heads")


@pytest.mark.parametrize("retain", [False, True])
def test_a_loss_of_a_thread_that_counts_nodes_anew(retain: bool) -> None:
    """Autograd's engine runs younger nodes first, and a thread counts its nodes by itself: here those of the loss look
    older than the program's, so that one of the results' gradients comes behind the first set of gradients."""
    found = []
    for program in (heads, aot_function(heads, fw_compiler=run_graph)):
        inputs = start()
        for _ in range(50):
            torch.ones(1, requires_grad=True) * 2  # this thread's nodes are old
        results = program(*inputs)

        def lose(results: Outputs = results, inputs: list[torch.Tensor] = inputs) -> None:
            late = results[0]
            for _ in range(5):
                late = late * 1.5
            loss = results[1].sum() + results[2].sum() + late.sum()
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()

        raised: list[BaseException] = []
        thread = threading.Thread(target=lambda lose=lose, raised=raised: _noting(lose, raised))
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and not raised, raised
        found.append(gradients(inputs))
    assert_same(found[1], found[0], "heads")


def _noting(work: Callable[[], None], raised: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        raised.append(error)


class Stop(Exception):
    pass


def test_a_hook_that_raises_and_a_run_behind_it() -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise Stop

    inputs = start()
    results = aot_function(heads, fw_compiler=run_graph)(*inputs)
    loss = sum(t.sum() for t in results)
    for place in range(INPUTS):
        handle = inputs[place].register_hook(stop)
        with pytest.raises(Stop):
            loss.backward(retain_graph=True)
        handle.remove()
        for t in inputs:
            t.grad = None
    loss.backward()
    twins = start()
    sum(t.sum() for t in heads(*twins)).backward()
    assert_same(gradients(inputs), gradients(twins), "heads")


def test_nothing_of_a_run_is_left() -> None:
    """Neither of one that came to its end nor of one that raised, and nothing leads back to itself."""
    gc.collect()
    gc.disable()
    try:
        compiled = aot_function(heads, fw_compiler=run_graph)
        for raises in (False, True):
            inputs = start()
            results = compiled(*inputs)
            loss = (results[0] * 2).sum() + (results[1] * 3).sum()
            came: list[Any] = []
            results[0].register_hook(lambda g, came=came: came.append(weakref.ref(g)))
            if raises:
                inputs[0].register_hook(lambda g: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
            assert came[0]() is None
            held = [weakref.ref(t) for t in (*inputs, *results)]
            del inputs, results, loss
            assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_results_that_were_dropped_are_not_waited_for() -> None:
    inputs = start()
    loss = aot_function(heads, fw_compiler=run_graph)(*inputs)[1].sum()
    gc.collect()
    loss.backward()
    assert [t.grad is None for t in inputs] == [False, True, False, True]


def test_threads_run_the_backward_of_one_call() -> None:
    inputs = start()
    loss = sum(t.sum() for t in aot_function(heads, fw_compiler=run_graph)(*inputs))
    threads = [threading.Thread(target=lambda: loss.backward(retain_graph=True)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    twins = start()
    sum(t.sum() for t in heads(*twins)).backward()
    assert_same(gradients(inputs), [6 * g for g in gradients(twins)], "six times")
