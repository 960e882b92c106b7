"""What capture tells: explanations as text and HTML, the guard that fails, recompiles and their limit."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import torchdynamo
from torchdynamo import CaptureOptions


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of a function's source that holds `text`."""
    code = function.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    return next(i for i in range(code.co_firstlineno, len(lines) + 1) if text in lines[i - 1])


def breaks_once(x: torch.Tensor, s: Any) -> torch.Tensor:
    y = x * s.scale
    print(end="")
    return (y + 1).relu()


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_an_explanation_has_every_part_as_text_and_as_html() -> None:
    found = torchdynamo.explain(breaks_once)(torch.ones(2), types.SimpleNamespace(scale=2))
    assert torch.equal(found.result, torch.full((2,), 3.0))
    assert len(found.graphs) == 2 and found.op_count == 3 and found.seconds > 0
    [broke] = found.breaks
    assert broke.reason == "print" and broke.user_frames[-1].line == line_of(breaks_once, "print(")
    titles = [title for title, _, _ in found.sections()]
    assert titles == ["Capture", "Graphs", "Breaks", "Guards"]
    page = Page()
    page.feed(found.html())
    page.close()
    assert not page.open
    shown = " ".join(page.text)
    remedy = "remove the call, or move it outside of the compiled function"
    where = f"{__file__}:{broke.user_frames[-1].line} in breaks_once"
    for text in ("s.scale", "equals", "print", remedy, where, "seconds of capture", "relu"):
        assert text in shown, text
        assert text in re.sub(r"\s*│\s*|\n", " ", str(found)) or len(text) > 30 or text == "relu", text
    console = Console(width=200)
    with console.capture() as capture:
        console.print(found)
    assert "Guards" in capture.get()


def test_text_of_the_program_is_no_markup() -> None:
    found = torchdynamo.explain(lambda x, t: x * t["[bold]<b>"])(torch.ones(2), {"[bold]<b>": 2})
    assert "[bold]<b>" in str(found) and "<b>" not in found.html() and "&lt;b&gt;" in found.html()


class Box:
    def __init__(self) -> None:
        self.number, self.items, self.table, self.child = 1, [1, 2], {"a": 1}, nn.Linear(2, 2)
        self.weight = torch.ones(2)


def reads_box(x: torch.Tensor, box: Any) -> torch.Tensor:
    y = x * box.number
    y = y + len(box.items)
    y = y + box.table["a"]
    y = y + box.weight
    if hasattr(box, "extra"):
        y = y + 1
    return y if box.child.training else -y


@pytest.mark.parametrize(
    ("change", "line", "old", "new"),
    [
        (lambda b: setattr(b, "number", 5), "box.number", "1", "5"),
        (lambda b: setattr(b, "number", "z"), "box.number", "1", "'z'"),
        (lambda b: b.items.append(7), "box.items", "2", "3"),
        (lambda b: b.table.update(k=7), "box.table", "('a',)", "('a', 'k')"),
        (lambda b: setattr(b, "weight", torch.ones(1)), "box.weight", "2", "1"),
        (lambda b: setattr(b, "weight", torch.ones(2).double()), "box.weight", "float32", "float64"),
        (lambda b: setattr(b, "extra", 7), "hasattr", "now has the attribute", "'extra'"),
        (lambda b: b.child.eval(), "box.child.training", "True", "False"),
        (lambda b: setattr(b, "child", 3), "box.child.training", "Linear", "int"),
    ],
)
def test_a_failed_guard_tells_the_line_the_old_and_the_new_value(
    change: Callable[[Any], Any], line: str, old: str, new: str
) -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(reads_box)
    box, x = Box(), torch.ones(2)
    compiled(x, box)
    why = torchdynamo.explain_guards(compiled)
    assert [miss.failure for miss in why(x, box)] == [None] and "serves the call" in str(why(x, box=box)[0])
    change(box)
    [miss] = why(x, box)
    assert miss.failure is not None
    text = str(miss)
    assert f"{__file__}:{line_of(reads_box, line)} in reads_box" in text and old in text and new in text, text
    assert len(compiled.entries) == 1  # nothing was compiled by asking


def test_written_memory_is_explained() -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(writes)
    base = torch.zeros(5)
    compiled(base[:2], base[3:])
    text = str(torchdynamo.explain_guards(compiled)(base[:2], base[1:3])[0])
    assert "x, which is written, and y share memory" in text


def test_explain_guards_of_modules_and_of_what_is_not_compiled() -> None:
    module = nn.Linear(3, 2)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(module)
    compiled(torch.ones(1, 3))
    assert torchdynamo.explain_guards(compiled)(torch.ones(1, 3))[0].failure is None
    module.weight.requires_grad_(False)
    assert "requires_grad False, expected True" in str(torchdynamo.explain_guards(compiled)(torch.ones(1, 3))[0])
    with pytest.raises(TypeError, match="not a compiled callable"):
        torchdynamo.explain_guards(module)


# -- recompiles ----------------------------------------------------------------------------------


def count_compiles(function: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> int:
    """Graphs given to the back end over these calls, each of which gives what eager gives."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torchdynamo.optimize(backend, options=CaptureOptions(strict=True, **options))(function)
    for args in calls:
        torch.testing.assert_close(compiled(*args), function(*args), rtol=0, atol=0)
    return len(graphs)


SWEEPS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "size": (lambda x: x.sin().sum(0) * x.shape[0], [(torch.randn(n, 3),) for n in (4, 5, 9, 2, 17, 100)]),
    "two sizes": (lambda x: x @ x.t(), [(torch.randn(n, n + 3),) for n in (4, 5, 9, 2, 17)]),
    "size of two inputs": (lambda x, y: x + y, [(torch.randn(n), torch.randn(n)) for n in (4, 5, 9, 2, 17)]),
    "int": (lambda x, k: x * k + k // 2, [(torch.ones(3), k) for k in (3, 4, 9, -2, 100, 0, 1)]),
    "float": (lambda x, a: x * a + a**2, [(torch.ones(3), a) for a in (0.5, 0.25, -3.0, 1e6, 0.0, 2.0)]),
    "float attribute": (
        lambda x, s: x * s.rate,
        [(torch.ones(3), types.SimpleNamespace(rate=a)) for a in (0.5, 0.25, -3.0, 1e6)],
    ),
    "int in a container": (lambda x, t: x + t["step"], [(torch.ones(3), {"step": k}) for k in (1, 2, 3, 10, 50)]),
    "size and float": (
        lambda x, a: x.sum(0) * a, [(torch.randn(n, 2), a) for n, a in ((4, 0.5), (6, 0.75), (7, 0.1), (9, 3.0))]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_costs_two_compiles(name: str) -> None:
    function, calls = SWEEPS[name]
    assert count_compiles(function, calls) == 2
    assert count_compiles(function, calls, dynamic=False, recompile_limit=50) == len(calls)


def versions(x: torch.Tensor, how: str) -> torch.Tensor:
    return x + len(how)


def test_the_limit_warns_with_a_table_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    options = CaptureOptions(recompile_limit=3)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(versions)
    x = torch.ones(2)
    with caplog.at_level(logging.WARNING, logger="torchdynamo"):
        for how in ("a", "bb", "ccc", "dddd", "eeeee", "a"):
            assert torch.equal(compiled(x, how), x + len(how))
    [record] = caplog.records
    text = record.getMessage()
    assert "[recompile_limit]: versions: it has 3 compiled versions" in text
    assert f'File "{__file__}", line {versions.__code__.co_firstlineno}' in text
    for number, old in enumerate(("ccc", "bb", "a")):
        assert f"  {number}: how: equals '{old}' expected, got 'dddd' (read at {__file__}:" in text, text
    assert "mark_dynamic" in text and len(compiled.entries) == 3
    assert torchdynamo.api.owner_of(compiled).stats.recompiles == 2


def test_what_happens_on_a_recompile_is_an_option(caplog: pytest.LogCaptureFixture) -> None:
    def compiled(policy: str, **more: Any) -> Any:
        options = CaptureOptions(on_recompile=policy, **more)
        return torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(versions)

    x = torch.ones(2)
    warns = compiled("warn")
    with caplog.at_level(logging.WARNING, logger="torchdynamo"):
        for how in ("a", "bb", "a"):
            assert torch.equal(warns(x, how), x + len(how))
    assert len(caplog.records) == 1 and "how: equals 'a' expected, got 'bb'" in caplog.text and len(warns.entries) == 2
    raises = compiled("error")
    raises(x, "a")
    with pytest.raises(torchdynamo.RecompileLimitExceeded, match="how: equals 'a' expected, got 'bb'"):
        raises(x, "bb")
    assert torch.equal(raises(x, "a"), x + 1)
    eager = compiled("eager")
    for how in ("a", "bb", "a", "ccc"):
        assert torch.equal(eager(x, how), x + len(how))
    assert len(eager.entries) == 1
    whole = compiled("continue", fullgraph=True, recompile_limit=1)
    whole(x, "a")
    with pytest.raises(torchdynamo.RecompileLimitExceeded, match="mark_dynamic"):
        whole(x, "bb")


def by_three_numbers(x: torch.Tensor, way: int, settings: dict[str, int]) -> torch.Tensor:
    """Four ways, and three numbers that need not differ at first."""
    y = x * settings["a"] + settings["b"] - settings["c"]
    return (y.sin(), y.cos(), y.tan(), y.exp())[0 if way < 10 else 1 if way < 20 else 2 if way < 30 else 3]


def test_versions_that_are_outgrown_make_room() -> None:
    """A service's settings: what was compiled for the first ones counts no more, once there are versions for all."""
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=CaptureOptions(strict=True))(
        by_three_numbers
    )
    settings = {"a": 2, "b": 3, "c": 4}
    for name in ("", "a", "b", "c", "a", "b"):
        if name:
            settings[name] += 5
        for way in (3, 4, 13, 14, 23, 24, 33, 34) * 2:
            for size in (4, 6):
                x = torch.ones(size)
                torch.testing.assert_close(compiled(x, way, settings), by_three_numbers(x, way, settings))
    owner = torchdynamo.api.owner_of(compiled)
    assert not owner.stats.fallbacks and len(compiled.entries) <= 8
    graphs = owner.stats.graphs
    for way in (5, 15, 25, 35):
        settings = {name: value + 1 for name, value in settings.items()}
        torch.testing.assert_close(compiled(x, way, settings), by_three_numbers(x, way, settings))
    assert owner.stats.graphs == graphs


def test_numbers_without_end_are_no_reason_to_compile_without_end() -> None:
    table = dict.fromkeys(range(200), 1)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + sum(table.values())

    options = CaptureOptions(strict=True, recompile_limit=4)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for key in range(60):
        table[key] += 2
        assert torch.equal(compiled(torch.zeros(2)), program(torch.zeros(2)))
    owner = torchdynamo.api.owner_of(compiled)
    assert owner.stats.graphs <= 4 * 4 and owner.stats.fallbacks
