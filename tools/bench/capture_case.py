"""One public model in one mode: what each compiler captures of it, with a back end that runs the graph as it is."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILERS = ("torchdynamo", "torch.compile")
REPORT = Callable[[dict[str, Any]], None]


class Program:
    """A model with its inputs, and what one step of it gives: outputs, gradients, buffers.

    Parameters, buffers and the random state are the same before each step, so layers dropped at random are too.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        import torch
        from zoo import build

        suite, name = case["model"].split("/")
        self.train = case["mode"] == "train"
        torch.manual_seed(0)
        self.model, self.args, self.kwargs = build(
            suite, name, train=self.train, batch=case["batch"], side=case["side"]
        )
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}

    def step(self, candidate: Callable[..., Any]) -> tuple[list[Any], float]:
        """(outputs, gradients and buffers; seconds of the forward call)."""
        import torch
        from torch.utils import _pytree as pytree

        for key, value in self.model.state_dict().items():
            value.copy_(self.state[key])
        self.model.zero_grad()
        torch.manual_seed(1)
        began = time.perf_counter()
        with torch.set_grad_enabled(self.train):
            out = candidate(*self.args, **self.kwargs)
        seconds = time.perf_counter() - began
        leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if self.train:
            torch.manual_seed(2)
            loss = out.loss if hasattr(out, "loss") else sum(leaf.float().pow(2).mean() for leaf in leaves)
            loss.backward()
        found = [leaf.detach() for leaf in leaves]
        found += [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        return found + [buffer.clone() for buffer in self.model.buffers()], seconds


def difference(expected: list[Any], found: list[Any]) -> float:
    """The largest relative error; infinite when shapes or dtypes differ."""
    if len(expected) != len(found):
        return float("inf")
    errors = [0.0]
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        error = float((a.double() - b.double()).norm() / (a.double().norm() + 1e-6))
        errors.append(float("inf") if math.isnan(error) else error)
    return max(errors)


def _small(x: Any) -> Any:
    return x.sin() + 1


def capture_ours(program: Program, backend: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    import torch

    import torchdynamo

    torchdynamo.optimize(lambda graph, inputs: graph.forward)(_small)(torch.ones(2))
    torchdynamo.reset()

    def counts() -> dict[str, Any]:
        stats = torchdynamo.stats()
        return {
            "breaks": sum(count for count, _, _ in stats.breaks),
            "reasons": sorted({f"{reason} ({_place(where)})" for _, reason, where in stats.breaks}),
            "fallbacks": [event.short for event in stats.surprises],
            "recompiles": [f"{what}: {'; '.join(why)}" for what, why in stats.recompile_reasons],
        }

    return torchdynamo.optimize(backend)(program.model), counts


def capture_peer(program: Program, backend: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    import torch

    torch.compile(_small, backend=lambda graph, inputs: graph.forward)(torch.ones(2))
    torch._dynamo.reset()
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()

    def counts() -> dict[str, Any]:
        found = counters["graph_break"]
        return {
            "breaks": sum(found.values()),
            "reasons": sorted(reason.strip().splitlines()[0][:80] for reason in found),
        }

    return torch.compile(program.model, backend=backend), counts


def _place(where: str) -> str:
    return "/".join(Path(where).parts[-1:])


CAPTURES = {"torchdynamo": capture_ours, "torch.compile": capture_peer}


def measure(case: dict[str, Any], report: REPORT) -> None:
    """Runs one (model, mode) under eager and each compiler in turn; `report` gets each one's findings.

    Either compiler has captured a small function before, so that what it imports and builds once is not counted.
    """
    program = Program(case)
    program.step(program.model)
    expected, eager = program.step(program.model)
    again, seconds = program.step(program.model)
    report({"eager": {"seconds": min(eager, seconds), "error": difference(expected, again)}})
    del again
    for compiler in case["compilers"]:
        graphs = [0]

        def backend(graph: Any, inputs: Any, graphs: list[int] = graphs) -> Any:
            graphs[0] += 1
            return graph.forward

        try:
            compiled, counts = CAPTURES[compiler](program, backend)
            found, first = program.step(compiled)
            row = {"seconds": max(first - min(eager, seconds), 0.0), "graphs": graphs[0], **counts()}
            row["error"] = difference(expected, found)
            row["calls"] = []
            for _ in range(case["calls"]):
                found, later = program.step(compiled)
                row["calls"].append(later)
                row["error"] = max(row["error"], difference(expected, found))
            row["graphs_after"] = graphs[0]
        except Exception as failure:
            row = {"failure": f"{type(failure).__name__}: {failure}"[:300]}
        report({compiler: row})
