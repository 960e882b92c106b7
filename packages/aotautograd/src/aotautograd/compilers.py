"""What the driver is given to turn a joint graph into something that runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from aotautograd.lowering import Lowering
from aotautograd.schemas import Compiler, Dump, Partitioner, Shelf
from primtorch import graph_text


@dataclass(frozen=True, slots=True)
class Compilers:
    """What turns a joint graph into something that runs."""

    forward: Compiler
    backward: Compiler
    inference: Compiler
    partitioner: Partitioner
    lowering: Lowering | None
    dump: Dump | None
    stages: tuple[tuple[int, ...], ...] = ()
    shelf: Shelf | None = None


def example_values(module: fx.GraphModule) -> list[object]:
    """The fake value of each placeholder of a graph, in their order."""
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def show(dump: Dump | None, name: str, module: fx.GraphModule, heading: str = "") -> None:
    """Gives a graph to a dump, if there is one."""
    if dump is not None:
        dump(f"{name}.py", graph_text(module, name, heading))
