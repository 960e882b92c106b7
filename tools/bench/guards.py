"""What a compiled callable costs over calling its compiled code: one operation, and a net of 300 parameters.

    python tools/bench/guards.py [--write docs/results/guards.md]

The back end runs the graph as it was captured, so that the difference to the same code called directly is binding,
guards and collecting the inputs. torch.compile with the same back end stands beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchdynamo


def microseconds(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """The least over batches of 20 calls: other programs on the machine only add to it."""
    for _ in range(100):
        call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - began) / 20)
    return min(times) * 1e6


def constant_backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiled code that costs nothing: what the graph gave once."""
    result = gm(*inputs)
    return lambda *args: result


def ours(target: Any, args: tuple[Any, ...]) -> tuple[float, float, int]:
    """Microseconds of a call, of the guards alone, and their number."""
    compiled = torchdynamo.optimize(constant_backend)(target)
    compiled(*args)
    entry = torchdynamo.api.owner_of(compiled).versions()[0]
    tree = entry.tree
    assert tree is not None
    flat = (target, args, {}) if isinstance(target, nn.Module) else args
    return microseconds(lambda: compiled(*args)), microseconds(lambda: tree.check(flat)), len(tree.guards)


def theirs(target: Any, args: tuple[Any, ...]) -> float:
    compiled = torch.compile(target, backend=constant_backend)
    return microseconds(lambda: compiled(*args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", help="write the table here as Markdown")
    options = parser.parse_args()
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(150)))
    norms = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(50)))
    x, rows_of_x = torch.randn(4), torch.randn(3, 4)

    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    rows = ["| program | us a call | of it guards | guards | torch.compile, us a call |", "|---|---|---|---|---|"]
    with torch.no_grad():
        cases: list[tuple[str, Any, torch.Tensor]] = [
            ("one fused operation", one, x),
            ("150 blocks, 300 parameters", net, x),
            ("50 blocks of linear and batch norm in training, 150 buffers written", norms, rows_of_x),
        ]
        for name, target, argument in cases:
            call, check, count = ours(target, (argument,))
            rows.append(f"| {name} | {call:.2f} | {check:.2f} | {count} | {theirs(target, (argument,)):.2f} |")
    text = "\n".join(rows)
    print(text)
    if options.write:
        head = (
            "# Cost of a compiled call\n\nThe compiled code returns a constant: what is left is binding, guards and "
            "collecting inputs. Each figure is the least of many batches of 20 calls, on a machine shared with other "
            f"programs.\nPython {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} "
            "processors. `python tools/bench/guards.py`\n"
        )
        Path(options.write).write_text(f"{head}\n{text}\n")


if __name__ == "__main__":
    main()
