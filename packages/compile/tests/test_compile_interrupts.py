"""What a handler of a signal raises while a function is compiled reaches whoever called it, and nothing is learnt of it."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import torchcompile
from primtorch.ledger import LEDGER


class TimeIsUp(Exception):
    pass


def up(number: int, frame: object) -> None:
    raise TimeIsUp


class Alarm:
    def __call__(self, number: int, frame: object) -> None:
        raise TimeIsUp

    def up(self, number: int, frame: object) -> None:
        self(number, frame)


def end(number: int, frame: object) -> None:
    raise SystemExit(3)


HANDLERS: dict[str, tuple[Callable[..., object], type[BaseException]]] = {
    "function": (up, TimeIsUp),
    "method": (Alarm().up, TimeIsUp),
    "object": (Alarm(), TimeIsUp),
    "partial": (functools.partial(lambda word, number, frame: up(number, frame), "word"), TimeIsUp),
    "exit": (end, SystemExit),
    "interrupt": (signal.default_int_handler, KeyboardInterrupt),
}


@pytest.fixture(params=HANDLERS)
def interrupt(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    handler, error = HANDLERS[request.param]
    before = signal.signal(signal.SIGALRM, handler)
    ARMED.clear()
    yield error
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


ARMED: list[int] = []


def strike() -> None:
    """Where it is armed, the signal comes here."""
    if ARMED:
        ARMED.pop()
        signal.raise_signal(signal.SIGALRM)


@torch.library.custom_op("interrupts::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    strike()
    return torch.empty_like(x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return twice(x.sin())


def handled(x: torch.Tensor) -> torch.Tensor:
    try:
        y = twice(x)
    except Exception:
        y = x - 1
    return y.cos()


def handled_whole(x: torch.Tensor) -> torch.Tensor:
    try:
        y = twice(x)
    except:  # noqa: E722
        y = x - 1
    finally:
        z = x + 1
    return y.cos() + z


def nested(x: torch.Tensor) -> torch.Tensor:
    def body() -> torch.Tensor:
        yield_of = (twice(x * k) for k in range(2))
        return sum(yield_of, x)

    return body().sin()


def behind_break(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.sum() > -1e9:
        y = handled(y)
    return y


BREAKS = pytest.mark.expected_eager("data_dependent_branch")


@pytest.mark.parametrize("program", [plain, handled, handled_whole, nested, pytest.param(behind_break, marks=BREAKS)])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_capture_lets_an_interrupt_pass(
    program: Callable[[torch.Tensor], torch.Tensor], fullgraph: bool, interrupt: type[BaseException]
) -> None:
    if fullgraph and program is behind_break:
        pytest.skip("it breaks")
    torchcompile.reset()
    compiled = torchcompile.compile(program, fullgraph=fullgraph)
    x = torch.randn(3, dtype=torch.float64)
    ARMED.append(1)
    with pytest.raises(interrupt):
        compiled(x)
    assert not ARMED
    for y in (x, x + 1, torch.randn(4, dtype=torch.float64)):
        torch.testing.assert_close(compiled(y), program(y))
    assert not torchcompile.report().fallbacks


def test_a_back_end_lets_an_interrupt_pass(interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU()).double()
    for part in ("forward", "backward"):
        torchcompile.reset()
        compiled = torchcompile.compile(model)
        inner = torchcompile.backends.record

        def record(job: object, kind: str, *rest: object, part: str = part, inner: Callable = inner) -> object:
            if kind == part:
                strike()
            return inner(job, kind, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(torchcompile.backends, "record", record)
            ARMED.append(1)
            with pytest.raises(interrupt):
                compiled(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
        assert not ARMED
        x = torch.randn(2, 3, dtype=torch.float64)
        model.zero_grad()
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, list(expected))
        assert not torchcompile.report().fallbacks


@torch.library.custom_op("interrupts::struck", mutates_args=())
def struck(x: torch.Tensor) -> torch.Tensor:
    strike()
    return x * 2


@struck.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def runs(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return struck(x.sin()).cos()


def runs_and_draws(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return struck(x.sin()) + torch.rand(3).double()


def runs_and_writes(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total += struck(x.sin())
    return x.cos()


def runs_behind_break(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.sum() > -1e9:
        y = struck(y).cos()
    return y


@pytest.mark.parametrize(
    "program", [runs, runs_and_draws, runs_and_writes, pytest.param(runs_behind_break, marks=BREAKS)]
)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_that_runs_lets_an_interrupt_pass(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], backend: str, interrupt: type[BaseException]
) -> None:
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend, options={"eager_random": True})
    x = torch.randn(3, dtype=torch.float64)

    def state(called: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], arm: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        total, out = torch.zeros_like(x), x
        if arm:
            ARMED.append(1)
            with pytest.raises(interrupt):
                called(x, total)
            assert not ARMED
        else:
            out = called(x, total)
        return [out, total]

    for arm in (False, True, False):
        torch.testing.assert_close(state(compiled, arm), state(program, arm))
    assert not torchcompile.report().fallbacks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_learnt_of_a_call_that_a_time_limit_ends(interrupt: type[BaseException]) -> None:
    """Wherever it ends: libraries and destructors handle errors of their own, so that not every limit is seen."""
    x = torch.randn(3, dtype=torch.float64)

    def slow(x: torch.Tensor) -> torch.Tensor:
        for i in range(30):
            x = torch.where(x > i, x.sin() + i, x.softmax(0))
        return x

    expected = slow(x)
    delay, ended = 0.0005, 0
    while delay < 0.2:
        torchcompile.reset()
        compiled = torchcompile.compile(slow, backend="eager" if delay < 0.02 else "inductor")
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            compiled(x)
        except interrupt:
            ended += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        torch.testing.assert_close(compiled(x), expected)
        kinds = {event.kind.id for event in LEDGER.events}
        assert not kinds & {"capture_fault", "graph_not_compiled", "kernels_not_built", "graph_raised"}, f"{delay} s"
        delay *= 1.3
    assert ended


@pytest.mark.expected_eager("program_raised")
def test_an_error_is_no_interrupt_for_having_come_after_one() -> None:
    """The program handles a time limit, and what it calls then is compiled as ever."""
    before = signal.signal(signal.SIGALRM, up)
    try:
        compiled = torchcompile.compile(lambda x: x.sin() @ x)
        try:
            signal.raise_signal(signal.SIGALRM)
            time.sleep(1)
        except TimeIsUp:
            with pytest.raises(RuntimeError, match=r"[Ss]ize|shape"):
                compiled(torch.randn(2, 3))
        assert compiled(torch.ones(2)).shape == ()
    finally:
        signal.signal(signal.SIGALRM, before)
