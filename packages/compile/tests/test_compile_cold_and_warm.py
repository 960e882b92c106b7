"""A process that finds programs and frames behaves as one that finds none: the same results, errors and report.

A run stands for a process: nothing that was compiled before it is known, but what lies in the cache folder. Any test file
can be run so: twice with `TEST_CACHE=FOLDER`, the second run being of warm processes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # a first look at it imports it, which is told once
from condition_programs import PROGRAMS, Program
from test_compile_conditions import BAD, GOOD, assert_same, observed
from test_compile_training_steps import alike, observe
from training_programs import CASES

import torchcompile
import torchdynamo


@pytest.fixture(autouse=True)
def keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHCOMPILE_KEEP_FRAMES", "1")


def told() -> dict[str, Any]:
    """What the report says, but for seconds, and for what was read from a folder."""
    report = torchcompile.report()
    return {
        "captured": report.captured,
        "events": [(e.kind.id, e.what, e.detail, e.frames, e.count) for e in report.events],
        "graphs": [(g.title, g.kind, g.prims, g.kernels, g.aten_calls, g.parts, g.memory) for g in report.graphs],
        "traced": report.traced,
        "breaks": [str(event) for event in report.breaks],
    }


def cold_and_warm(run: Callable[[], Any], same: Callable[[Any, Any], None]) -> int:
    """Runs twice over one folder; how many frames the second run found."""
    torchcompile.reset()
    cold, report = run(), told()
    torchcompile.reset()
    warm = run()
    assert told() == report
    same(warm, cold)
    return torchdynamo.stats().found


@pytest.mark.expected_eager(...)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "inductor" in case.backends])
def test_training_steps(name: str) -> None:
    case = CASES[name]

    def run() -> Any:
        made = case.make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return observe(made, torchcompile.compile(made.step), case.again)

    cold_and_warm(run, alike)


@pytest.mark.expected_eager("condition_not_met", "raise_was_handled", "graph_break")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_conditions_on_data(program: Program) -> None:
    def run() -> Any:
        found = []
        for order in itertools.permutations((GOOD, BAD)):
            compiled = torchcompile.compile(program, options={"eager_random": True})
            found += [observed(compiled, x) for x in (*order, *order)]
        return found

    cold_and_warm(run, lambda warm, cold: [assert_same(*pair) for pair in zip(warm, cold, strict=True)] and None)


def recompiles(x: torch.Tensor) -> list[torch.Tensor]:
    """Another size, and then any; another dtype."""
    run = torchcompile.compile(lambda v: (v * v.shape[0]).sin())
    return [run(x[:rows]) for rows in (3, 5, 7)] + [run(x.float())]


def breaks(x: torch.Tensor) -> list[torch.Tensor]:
    def program(v: torch.Tensor) -> torch.Tensor:
        y = (v * 2).relu()
        torch._dynamo.graph_break()
        return y.cos()

    return [torchcompile.compile(program)(x) for _ in range(2)]


def refuses(x: torch.Tensor) -> list[torch.Tensor]:
    """`fullgraph` refuses a branch on data, each time."""

    def program(v: torch.Tensor) -> torch.Tensor:
        return v.sin() if v.sum() > 0 else v.cos()

    run = torchcompile.compile(program, fullgraph=True)
    for _ in range(2):
        with pytest.raises(torchdynamo.Unsupported):
            run(x)
    return []


def is_limited(x: torch.Tensor) -> list[torch.Tensor]:
    """More versions than the limit: runs as it is written from then on."""
    run = torchcompile.compile(lambda v, by: v * len(by), options={"recompile_limit": 2})
    return [run(x, "a" * length) for length in (1, 2, 3, 4)]


def in_layers(x: torch.Tensor) -> list[torch.Tensor]:
    """A module whose training flag changes between calls, one graph found by two functions of the same code."""
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0)).double() for _ in range(2)]
    for layer in layers:
        torch.nn.init.constant_(layer[0].weight, 0.5)
        torch.nn.init.zeros_(layer[0].bias)
    found = []
    for training in (True, False, True):
        for layer in layers:
            found.append(torchcompile.compile(layer.train(training))(x).detach())
    return found


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize(
    "program", [recompiles, breaks, refuses, is_limited, in_layers], ids=lambda program: program.__name__
)
def test_versions_and_breaks(program: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)
    found = cold_and_warm(lambda: program(x), lambda warm, cold: torch.testing.assert_close(warm, cold, rtol=0, atol=0))
    assert bool(found) == (program is not refuses)
