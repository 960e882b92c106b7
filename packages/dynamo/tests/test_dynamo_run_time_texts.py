"""What training loops say of numbers that differ at each call: printed, logged, kept, joined, compared.

Results and output are eager's, call by call, and a few compiled versions serve them all.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import torchdynamo
from primtorch.ledger import Effect

CALLS = 24
TWO, NAMED, WHOLE, TEMPLATE = "%.2f %s", "%(loss)5.1f", "%d of %d", " {:.1f} {n:>4}"
_log = logging.getLogger(__name__)
_clock = itertools.count().__next__


class Bar:
    """Shows what a loop tells, as progress bars do."""

    def __init__(self) -> None:
        self.shown = ""
        self.best = 1e9

    def set_postfix(self, **values: float) -> None:
        self.shown = ", ".join(name + "=" + text for name, text in {k: f"{v:.3g}" for k, v in values.items()}.items())

    def __str__(self) -> str:
        return f"<{self.shown}>"


class Run:
    """What one run keeps beside its results."""

    def __init__(self) -> None:
        self.bar = Bar()
        self.history: list[Any] = []
        self.file = io.StringIO()
        self.table: dict[str, Any] = {}


def printed(x: torch.Tensor, run: Run) -> torch.Tensor:
    print(f"loss {x.mean().item():.3f}", x.sum().item())
    return x.sin()


def printed_number(x: torch.Tensor, run: Run) -> torch.Tensor:
    loss = x.mean().item()
    print(loss, end=";")
    return x.cos() * loss


def written(x: torch.Tensor, run: Run) -> torch.Tensor:
    run.file.write(str(x.mean().item()))
    return x.cos()


def rounded(x: torch.Tensor, run: Run) -> torch.Tensor:
    loss = x.mean().item()
    run.history.append(round(loss, 3))
    print(f"{round(loss, 2)}")
    return x.cos()


def kept(x: torch.Tensor, run: Run) -> dict[str, Any]:
    loss = x.mean().item()
    run.table["last"] = f"{loss:.2f}"
    return {"y": x.cos(), "text": f"{loss:.2f}", "both": [f"{loss:e}", repr(loss)]}


def branched(x: torch.Tensor, run: Run) -> torch.Tensor:
    return x * 2 if x.mean().item() > 0 else x


def loops(x: torch.Tensor, run: Run) -> float:
    total = 0.0
    for epoch in range(2):
        for batch in range(3):
            loss = (x + batch).square().mean()
            total += loss.item()
            run.bar.set_postfix(loss=loss.item(), mean=total / (batch + 1))
        print("epoch", epoch, total / 3, run.bar.shown)
    return total


def logged(x: torch.Tensor, run: Run) -> torch.Tensor:
    loss = x.mean().item()
    _log.info("%.3f", loss)
    _log.info(f"loss {loss:.2f}")
    _log.info("as text: " + str(loss))
    return x.cos()


def timed(x: torch.Tensor, run: Run) -> torch.Tensor:
    began = _clock()
    y = x.exp()
    print(f"{(_clock() - began) / 2:.2f} s")
    return y


def built(x: torch.Tensor, run: Run) -> torch.Tensor:
    loss, count = x.mean().item(), int((x > 0).sum())
    text = "loss=" + str(loss) + " " + TWO % (loss, count) + TEMPLATE.format(loss, n=count)
    text += "!"
    print(text, NAMED % {"loss": loss}, WHOLE % (count, x.numel()))
    run.history.append(" | ".join([text, "end"]))
    return x.cos()


def behind_a_break(x: torch.Tensor, run: Run) -> torch.Tensor:
    loss = x.mean().item()
    text = f"{loss:.2f}"
    torchdynamo.graph_break()
    print("after", text, f"{loss:.3f}")
    run.history.append({"loss": loss, "text": text})
    return x * loss


def shown_by_an_object(x: torch.Tensor, run: Run) -> torch.Tensor:
    run.bar.set_postfix(loss=x.mean().item())
    print(f"{run.bar} {run.bar!s:>20}", str(run.bar))
    return x.cos()


LOOPS: dict[Callable[..., Any], int] = {
    printed: 1, printed_number: 1, written: 3, rounded: 2, kept: 3, branched: 2, loops: 1, logged: 1, timed: 3, built: 2,
    behind_a_break: 4, shown_by_an_object: 2,
}  # fmt: skip


def compared(x: torch.Tensor, run: Run) -> Any:
    text = f"{x.mean().item():.1f}"
    return text == "0.5", text != "0.5", len(text), text[:3], text.strip("0"), "5" in text, bool(text), text < "1"


def looked_up(x: torch.Tensor, run: Run) -> Any:
    name = f"n{int(x.sum().item())}"
    run.table[name] = run.table.get(name, 0) + 1
    return (
        sorted([name, "b"]),
        {name},
        name in run.table,
        getattr(run, name, "none"),
        list(name),
        hash(name) == hash(name),
    )


def handed_to_c(x: torch.Tensor, run: Run) -> Any:
    text, number = f"{x.mean().item():.2f}", x.mean().item()
    parts = (word for word in [text, "b"])
    rounded_twice = round(round(number, 3), 1) + round(number, 2) * 2
    return float(text), int(number * 8), "-".join(parts), text.encode(), text * 2, rounded_twice, max(text, "0.1")


def is_a_text(x: torch.Tensor, run: Run) -> Any:
    text = f"{x.mean().item():.2f}"
    match text:
        case str():
            matched = True
        case _:
            matched = False
    return isinstance(text, str), type(text) is str, isinstance(text, float), text is None, callable(text), matched


def raised(x: torch.Tensor, run: Run) -> Any:
    number = x.mean().item()
    try:
        raise ValueError(f"bad loss {number:.2f}")
    except ValueError as error:
        return str(error)


def refused(x: torch.Tensor, run: Run) -> Any:
    told = []
    for spec in ("q", "d", "c"):
        try:
            told.append(format(x.mean().item(), spec))
        except ValueError as error:
            told.append(str(error))
    for text in ("%d", "%c", "%s %s"):
        try:
            told.append(text % (x.mean().item() / 0.0 if False else x.mean().item()))
        except (TypeError, ValueError, OverflowError) as error:
            told.append(str(error))
    return told


def of_a_size(x: torch.Tensor, run: Run) -> Any:
    run.table[f"{x.shape[0]}"] = f"{x.shape[0]:>5}"
    return f"{tuple(x.shape)} {x.shape[0]!r}", str(x.shape[0] * 2)


LOOKED_AT = (compared, looked_up, handed_to_c, is_a_text, raised, refused, of_a_size)


def eager(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
    return gm.forward


def sent(value: object) -> Any:
    """A break where a generator's method is at hand."""

    def generator() -> Any:
        yield (yield 1)

    made = generator()
    return next(made), made.send((torchdynamo.graph_break(), value)[1])


# Ways to ask for a value that only the data tells.
QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "text": lambda x: f"{x.sum().item():.2f}".partition("."),
    "branch": lambda x: 1 if x.sum().item() > 0 else 2,
    "whole": lambda x: list(range(int(x.square().sum().item()))),
    "key": lambda x: {x.sum().item(): 1},
    "size": lambda x: 1 if x.nonzero().shape[0] > 2 else 2,
    "truth": lambda x: bool(x.sum() > 0),
    "sorted": lambda x: sorted(x.flatten()[:3].tolist()),
    "raised": lambda x: (_ for _ in ()).throw(ValueError(f"{x.sum().item():.1f}")),
    "digits": lambda x: WHOLE % (x.sum().item(), 3),
    "condition": lambda x: int(x.sum().item() > 0),
    "sent": lambda x: sent(x.sum().item() > 0),
}


def observed(program: Callable[..., Any], inputs: list[torch.Tensor], told: pytest.LogCaptureFixture) -> list[Any]:
    """What each call gives, says, and keeps."""
    global _clock
    _clock = itertools.count().__next__
    run, seen = Run(), []
    for x in inputs:
        said = io.StringIO()
        told.clear()
        with contextlib.redirect_stdout(said):
            result = program(x, run)
        logs = [record.getMessage() for record in told.records]
        state = (run.bar.shown, list(run.history), run.file.getvalue(), dict(run.table))
        seen.append(repr((result, said.getvalue(), logs, state)))
    return seen


def inputs_of(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_loops_tell_what_eager_tells(program: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inputs = inputs_of(CALLS)
    expected = observed(program, inputs, caplog)
    compiled = torchdynamo.optimize(eager)(program)
    assert observed(compiled, inputs, caplog) == expected
    kinds = {event.kind.effect for event in torchdynamo.stats().events}
    assert Effect.FALLBACK not in kinds, torchdynamo.stats().events
    assert torchdynamo.stats().graphs <= LOOPS[program], torchdynamo.stats().events


@pytest.mark.parametrize("program", LOOKED_AT, ids=lambda program: program.__name__)
def test_texts_that_are_looked_at(program: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    inputs = [*inputs_of(3), torch.full((5, 2), 0.5, dtype=torch.float64), torch.full((6, 1), 0.5, dtype=torch.float64)]
    expected = observed(program, inputs, caplog)
    assert observed(torchdynamo.optimize(eager)(program), inputs, caplog) == expected
    assert not torchdynamo.stats().fallbacks


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e300, 1e-320])
def test_numbers_of_every_kind_as_texts(value: float, caplog: pytest.LogCaptureFixture) -> None:
    inputs = [torch.full((1,), number, dtype=torch.float64) for number in (0.5, value, 2.5)]
    for program in (printed, rounded, kept, logged, compared):
        expected = observed(program, inputs, caplog)
        assert observed(torchdynamo.optimize(eager)(program), inputs, caplog) == expected


def test_texts_of_each_call_that_change(caplog: pytest.LogCaptureFixture) -> None:
    """Texts among the arguments, that the program hands on or looks at."""

    def program(x: torch.Tensor, name: str, run: Run) -> Any:
        run.table["name"] = name + "!"
        print("step", name)
        return x.sin() if run.history or name == "a" else x.cos(), f"<{name}>"

    names = iter([*"abcdefghijk"] * 2)
    compiled = torchdynamo.optimize(eager)(
        lambda x, run, name: (print("step", name), run.table.update(name=name + "!"), x.sin(), f"<{name}>")
    )
    run, x = Run(), torch.ones(2)
    for name in itertools.islice(names, 11):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            result = compiled(x, run, name)
        assert said.getvalue() == f"step {name}\n" and run.table == {"name": name + "!"} and result[-1] == f"<{name}>"
    assert not torchdynamo.stats().fallbacks
    looks = torchdynamo.optimize(eager)(program)
    for name in "abca":
        run = Run()
        with contextlib.redirect_stdout(io.StringIO()):
            got, text = looks(x, name, run)
        assert torch.equal(got, x.sin() if name == "a" else x.cos()) and text == f"<{name}>"


@pytest.mark.parametrize("ask", QUESTIONS)
def test_no_handler_sees_what_capture_asks(ask: str, caplog: pytest.LogCaptureFixture) -> None:
    question = QUESTIONS[ask]

    def program(x: torch.Tensor, run: Run) -> Any:
        try:
            return question(x.sin())
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            run.history.append("left")

    inputs = [*inputs_of(3), torch.zeros(2, 2, dtype=torch.float64), torch.full((1, 1), float("nan"))]
    expected = observed(program, inputs, caplog)
    assert observed(torchdynamo.optimize(eager)(program), inputs, caplog) == expected


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reflected_operators_of_two_tensors(name: str, dtype: torch.dtype) -> None:
    """The method that the program names, not the other operand's: one multiplies by a reciprocal."""
    torch.manual_seed(0)
    x, y = torch.rand(50, 4).to(dtype) + 0.5, torch.rand(50, 4).to(dtype)
    method = f"__r{name}__"
    compiled = torchdynamo.optimize(eager)(lambda x, y: (getattr(x, method)(y), getattr(x, method)(3)))
    for found, wanted in zip(compiled(x, y), (getattr(x, method)(y), getattr(x, method)(3)), strict=True):
        assert torch.equal(found, wanted)


def repeats(x: torch.Tensor, n: int, name: str) -> Any:
    return x + n, "-" * n, n * "ab" + "|", (f"{n}: " * 2, name * 2)


def repeats_a_number_of_data(x: torch.Tensor, n: int, name: str) -> Any:
    return x + 1, "=" * int(x.sum().item() * n)


def encodes(x: torch.Tensor, n: int, name: str) -> Any:
    return x + n, f"{n}".encode(), ("é" * n).encode("utf-8", "strict"), f"<{n:>5}>".encode("ascii")


def shows_digits(x: torch.Tensor, n: int, name: str) -> Any:
    return x + n, hex(n), oct(n), bin(-n)


def refuses_to_encode(x: torch.Tensor, n: int, name: str) -> Any:
    try:
        return x + n, f"é{n}".encode("ascii")
    except UnicodeEncodeError as error:
        return x - n, str(error)


def encodes_what_it_is_given(x: torch.Tensor, n: int, name: str) -> Any:
    try:
        return x + n, f"{name}{n}".encode("ascii")
    except UnicodeEncodeError as error:
        return x - n, str(error)


@pytest.mark.parametrize(
    ("program", "graphs"),
    [
        (repeats, 2), (repeats_a_number_of_data, 2), (encodes, 2), (shows_digits, 2), (refuses_to_encode, 20),
        (encodes_what_it_is_given, 20),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)  # fmt: skip
def test_texts_that_are_repeated_or_encoded(program: Callable[..., Any], graphs: int) -> None:
    compiled = torchdynamo.optimize(eager, options=torchdynamo.CaptureOptions(strict=True, recompile_limit=30))(program)
    for n, name in ((3, "a"), (4, "b"), (0, "\udc80"), (-2, "é"), (1, "c"), (17, "d"), (250, "e")):
        found, expected = compiled(torch.ones(2), n, name), program(torch.ones(2), n, name)
        assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]
        assert [type(part) for part in found] == [type(part) for part in expected]
    assert torchdynamo.stats().graphs <= graphs, torchdynamo.stats().events
