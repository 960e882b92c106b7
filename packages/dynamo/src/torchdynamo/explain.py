"""What capture makes of a call: its graphs, breaks and guards, as records and as text; and one graph to take away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchdynamo._C import CompiledCallable
from torchdynamo.api import optimize, owner_of
from torchdynamo.errors import TorchDynamoError
from torchdynamo.guards import print_guards
from torchdynamo.reasons import describe
from torchdynamo.schemas import CaptureOptions, GraphBreak, Guard
from torchdynamo.sources import Source


@dataclass(slots=True)
class Explanation:
    """Everything that one call compiled."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    result: Any = None

    @property
    def op_count(self) -> int:
        return sum(node.op.startswith("call") for graph in self.graphs for node in graph.graph.nodes)

    def __str__(self) -> str:
        lines = [
            f"graphs: {len(self.graphs)}, calls in them: {self.op_count}",
            f"breaks: {len(self.breaks)}, guards: {len(self.guards)}",
        ]
        lines += [describe(graph_break) for graph_break in self.breaks]
        lines += [f"ran eagerly: {what}: {why}" for what, why in self.fallbacks]
        return "\n".join(lines)


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """`explain(f)(*args)` runs the call with every graph executed as it was captured, and tells what was captured."""

    def run(*args: Any, **kwargs: Any) -> Explanation:
        found = Explanation()

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            found.graphs.append(graph)
            return graph.forward

        compiled = optimize(backend)(function)
        found.result = compiled(*args, **kwargs)
        owner = owner_of(compiled)
        found.breaks += owner.stats.break_details
        found.fallbacks += owner.stats.fallbacks
        for entry in owner.versions():
            found.guards += entry.info.guards
        return found

    return run


@dataclass(slots=True)
class Exported:
    """One whole graph of a function, with what it relies on.

    Attributes:
        graph: torch-level FX graph; placeholders are symbolic sizes first, then tensors.
        inputs: where each placeholder's value comes from in a call.
        guards: conditions under which the graph stands for the function.
    """

    graph: fx.GraphModule
    inputs: tuple[Source, ...]
    guards: tuple[Guard, ...]
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph as the function; raises ValueError when a guard does not hold."""
        return self.call(*args, **kwargs)

    def print_guards(self) -> str:
        return print_guards(self.guards)


def export(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Exported]:
    """`export(f)(*args)` captures the call as one graph.

    Raises:
        Unsupported: the call leaves the graph; the message tells where, why and what to do.
        TorchDynamoError: the call has no tensor operation.
    """

    def run(*args: Any, **kwargs: Any) -> Exported:
        graphs: list[fx.GraphModule] = []

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        compiled = optimize(backend, options=CaptureOptions(fullgraph=True, dynamic=dynamic, strict=True))(function)
        compiled(*args, **kwargs)
        if not graphs:
            raise TorchDynamoError(f"{function!r}: the call has no tensor operation to export")
        target = owner_of(compiled).compiled()
        assert target is not None
        tree = target.entries[0].tree
        assert tree is not None

        def missed(_: CompiledCallable, flat: tuple[Any, ...]) -> None:
            index = tree.explain(flat)
            failed = tree.guards[index] if index is not None and index < len(tree.guards) else None
            raise ValueError(f"the exported graph does not fit this call: {failed or 'an input is missing'}")

        target.miss = missed
        return Exported(graphs[0], tree.inputs, tree.guards, compiled)

    return run
