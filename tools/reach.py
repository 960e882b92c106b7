"""What is captured of PyTorch's language, and what breaks the graph: here and by torch.compile, into docs/reach.md.

    python tools/reach.py

The programs are those of packages/compile/tests/reach_programs, whose values and gradients the tests compare with
eager's. Each is called three times here, the third time with another size, on the back end "aot_eager"; torch.compile
is asked for the first call alone, by a back end that runs the graphs as they are.
"""

from __future__ import annotations

import logging
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages" / "compile" / "tests"))

from reach_programs import PARTS, Part  # noqa: E402

import torchcompile  # noqa: E402
from primtorch.ledger import REFUSED, Effect  # noqa: E402

EXAMPLES = {
    "Higher-order operators": "control_flow.py",
    "torch.func": "function_transforms.py",
    "Training steps": "training_step.py",
    "NumPy": "gaussian_process.py",
    "Tensor subclasses": "quantized_weights.py",
    "Attention": "sliding_window.py",
    "Python": "python_in_the_graph.py",
    "Quantised": "quantized_weights.py",
}
"""A program of several parts of a group, which the tests run."""


def here(part: Part) -> str:
    """One graph a version, or the kinds of the ledger that say why not."""
    torchcompile.reset()
    part.run(lambda program: torchcompile.compile(program, backend="aot_eager"))
    kinds = {event.kind.id: event.effect for event in torchcompile.report().events if event.effect in REFUSED}
    pages = {
        kind: f"graph_breaks.md#{kind}" if effect is Effect.BREAK else "ledger.md" for kind, effect in kinds.items()
    }
    texts = [f"[{kind}]({page})" for kind, page in pages.items()]
    return ", ".join(texts) or "one graph"


def there(part: Part) -> str:
    """How many graphs torch.compile makes of the first call, or what it raises."""
    try:
        return "one graph" if len(_graphs(part, fullgraph=True)) == 1 else "no graphs"
    except Exception:
        torch.compiler.reset()  # it breaks, or cannot run it at all
    try:
        count = len(_graphs(part, fullgraph=False))
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "one graph and a break" if count == 1 else f"{count or 'no'} graphs"


def _graphs(part: Part, fullgraph: bool) -> list[torch.fx.GraphModule]:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    first = replace(part, calls=lambda: part.calls()[:1])
    first.run(lambda program: torch.compile(program, backend=backend, fullgraph=fullgraph))
    return graphs


def page() -> str:
    rows = [(part.group, name, here(part), there(part)) for name, part in track(PARTS.items(), "programs")]
    count = Counter(column for _, _, *results in rows for column, result in enumerate(results) if result == "one graph")
    lines = [
        "# What is captured",
        "",
        "The parts of PyTorch's language, a program each (packages/compile/tests/reach_programs; the tests compare "
        f"its values and gradients with eager's). `python tools/reach.py`, torch {torch.__version__}, Python "
        f"{platform.python_version()}: of {len(rows)} programs {count[0]} are one graph here, {count[1]} under "
        "torch.compile. What is in no graph here runs eagerly between graphs and is told in the report.",
    ]
    for group in dict.fromkeys(group for group, *_ in rows):
        example = f"[examples/{EXAMPLES[group]}](../examples/{EXAMPLES[group]})"
        lines += [
            "",
            f"## {group}",
            "",
            f"In use: {example}.",
            "",
            "| program | here | torch.compile |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {ours} | {theirs} |" for of, name, ours, theirs in rows if of == group]
    lines += [
        "",
        "## What is not one graph here, and why",
        "",
        "| program | why | what to write instead |",
        "|---|---|---|",
    ]
    for _, name, ours, _ in rows:
        if ours != "one graph":
            why, _, instead = PARTS[name].why.partition("; instead: ")
            lines.append(f"| {name} | {why} | {instead} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    (ROOT / "docs" / "reach.md").write_text(page())
