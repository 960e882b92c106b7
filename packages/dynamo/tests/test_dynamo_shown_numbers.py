"""Ways to show or to keep a number that is another one at each call.

Values are eager's, call by call; a few graphs serve all calls, and nothing runs eagerly as a whole.
"""

from __future__ import annotations

import array
import bisect
import copy
import csv
import decimal
import io
import json
import math
import pickle
import random
import statistics
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import torchdynamo
from primtorch.ledger import Effect

CALLS = 12
GRAPHS = 3
MORE_GRAPHS = {"append with the time": 4, "struct in a list": 4}  # the list's length, then what it is given, differs
PADDED, SHOWN = "%*.2f", "%s"


class Run:
    """What one run keeps beside its results."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}


Way = Callable[[float, Run], Any]

WAYS: dict[str, Way] = {
    "json": lambda n, run: json.dumps({"loss": n}),
    "json, rounded": lambda n, run: json.dumps({"loss": round(n, 3), "all": [n]}),
    "json into a file": lambda n, run: json.dump({"loss": n}, run.file),
    "warning": lambda n, run: warnings.warn(f"loss {n:.2f}", stacklevel=1),
    "warning, an object": lambda n, run: warnings.warn(UserWarning(f"loss {n:.2f}"), stacklevel=1),
    "csv": lambda n, run: csv.writer(run.file).writerow([n, round(n, 2), "a"]),
    "join": lambda n, run: ",".join([str(n), f"{n:.1f}"]),
    "struct": lambda n, run: struct.pack("<d", n),
    "struct, rounded": lambda n, run: struct.pack("<d", round(n, 2)),
    "struct in a list": lambda n, run: run.history.append(struct.pack("<d", n)),
    "nan": lambda n, run: "nan" if math.isnan(n) else "number",
    "close": lambda n, run: math.isclose(n, 1.0),
    "erf": lambda n, run: math.erf(n),
    "sum": lambda n, run: math.fsum([n, 1.0]),
    "append": lambda n, run: run.history.append(n),
    "append rounded": lambda n, run: run.history.append((round(n, 2),)),
    "append with the time": lambda n, run: run.history.append((time.perf_counter() > 0, n)),
    "update": lambda n, run: run.table.update(loss=n, text=f"{n:.2f}"),
    "mean": lambda n, run: statistics.fmean([n, 2.0]),
    "decimal": lambda n, run: decimal.Decimal(n),
    "percent": lambda n, run: SHOWN % n,
    "percent, padded": lambda n, run: PADDED % (8, n),
    "file": lambda n, run: run.file.write(f"{n}\n"),
    "print": lambda n, run: print(n, file=run.file),
    "hexadecimal": lambda n, run: n.hex(),
    "whole": lambda n, run: n.is_integer(),
    "text to number": lambda n, run: float(f"{n:.2f}"),
    "sorted": lambda n, run: sorted([n, 0.0, -n]),
    "array": lambda n, run: array.array("d", [n]),
    "text of a list": lambda n, run: repr([n]),
    "text of a dict": lambda n, run: str({"loss": n}),
    "pickle": lambda n, run: pickle.dumps(n),
    "copy": lambda n, run: copy.deepcopy([n]),
    "place": lambda n, run: bisect.bisect([0.0, 1.0], n),
}


def eager(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
    return gm.forward


def program(way: Way) -> Callable[[torch.Tensor, Run], Any]:
    def step(x: torch.Tensor, run: Run) -> Any:
        y = x * 2
        shown = way(y.mean().item(), run)
        return y + 1, shown

    return step


def observed(step: Callable[[torch.Tensor, Run], Any], inputs: list[torch.Tensor]) -> list[str]:
    """What each call gives, says, and keeps."""
    run, seen = Run(), []
    for x in inputs:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = step(x, run)
        told = [(str(one.message), one.category, one.filename, one.lineno) for one in said]
        seen.append(repr((result, told, run.file.getvalue(), run.history, run.table)))
    return seen


@pytest.mark.parametrize("name", WAYS)
def test_numbers_of_each_call_are_shown(name: str) -> None:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    inputs = [torch.randn(4, dtype=torch.float64) for _ in range(CALLS)]
    expected = observed(program(WAYS[name]), inputs)
    assert observed(torchdynamo.optimize(eager)(program(WAYS[name])), inputs) == expected, f"seed {seed}"
    stats = torchdynamo.stats()
    assert Effect.FALLBACK not in {event.kind.effect for event in stats.events}, stats.events
    recompiled = sum(event.count for event in stats.events if event.kind.effect is Effect.RECOMPILE)
    assert recompiled <= 2, stats.events
    assert stats.graphs <= MORE_GRAPHS.get(name, GRAPHS), stats.events


@pytest.mark.parametrize("action", ["error", "ignore", "always"])
@pytest.mark.parametrize("pattern", ["", "loss 1", "another"])
def test_filters_judge_a_warning_when_it_is_said(action: Any, pattern: str) -> None:
    """A filter by the text makes an exception of some calls alone, at the line of the warning."""

    def step(x: torch.Tensor, kept: list[str]) -> torch.Tensor:
        kept.append("before")
        warnings.warn(f"loss {x.sum().item():.0f}", stacklevel=1)
        kept.append("behind")
        return x + 1

    def run(function: Callable[[torch.Tensor, list[str]], torch.Tensor]) -> list[Any]:
        seen: list[Any] = []
        for value in (1.0, 2.0, 3.0, 1.0):
            kept: list[str] = []
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                warnings.filterwarnings(action, pattern)
                try:
                    seen.append(function(torch.tensor([value]), kept).tolist())
                except UserWarning as error:
                    seen.append(str(error))
            seen.append(([str(one.message) for one in said], kept))
        return seen

    assert run(torchdynamo.optimize(eager)(step)) == run(step)


def test_floats_are_guarded_where_breaks_are_errors() -> None:
    def step(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, str]:
        return x * scale, json.dumps({"scale": scale})

    compiled = torchdynamo.optimize(eager, options=torchdynamo.CaptureOptions(fullgraph=True))(step)
    x = torch.randn(3)
    for scale in (0.5, 1.5, 2.5, 0.5):
        found, text = compiled(x, scale)
        assert torch.equal(found, x * scale) and text == json.dumps({"scale": scale})
