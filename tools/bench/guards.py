"""What a compiled callable costs over calling its compiled code: one operation, and a net of 300 parameters.

    python tools/bench/guards.py [--write docs/results/guards.md]

The back end runs the graph as it was captured, so that the difference to the same code called directly is binding,
guards and collecting the inputs. torch.compile with the same back end stands beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchdynamo


def microseconds(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median over batches of 20 calls."""
    for _ in range(100):
        call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - began) / 20)
    return statistics.median(times) * 1e6


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
    x = torch.randn(4)

    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    rows = ["| program | us a call | of it guards | guards | torch.compile, us a call |", "|---|---|---|---|---|"]
    with torch.no_grad():
        for name, target in (("one fused operation", one), ("150 blocks, 300 parameters", net)):
            call, check, count = ours(target, (x,))
            rows.append(f"| {name} | {call:.2f} | {check:.2f} | {count} | {theirs(target, (x,)):.2f} |")
    text = "\n".join(rows)
    print(text)
    if options.write:
        head = (
            "# Cost of a compiled call\n\nThe compiled code returns a constant: what is left is binding, guards and "
            f"collecting inputs.\nPython {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} "
            "processors. `python tools/bench/guards.py`\n"
        )
        Path(options.write).write_text(f"{head}\n{text}\n")


if __name__ == "__main__":
    main()
