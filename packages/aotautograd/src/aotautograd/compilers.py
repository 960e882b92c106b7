"""What the driver is given to turn a joint graph into something that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import fx

from aotautograd.lowering import Lowering
from aotautograd.schemas import BeginningCompiler, Begun, Compiled, Compiler, Dump, Partitioner, Shelf
from primtorch import graph_text
from primtorch.frozen import record


@record
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
    of_wrappers: bool = False  # they compile graphs whose values may be wrappers


def example_values(module: fx.GraphModule) -> list[object]:
    """The fake value of each placeholder of a graph, in their order."""
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


@record
class _AtOnce:
    """Of a compiler that begins nothing ahead: it compiles when it is waited for."""

    finish: Callable[[], Compiled]
    apart: bool = False

    def __call__(self) -> Compiled:
        return self.finish()


def begin(compiler: Compiler, module: fx.GraphModule) -> Begun:
    """Lets a compiler begin with a graph, if it can. Raises what it does."""
    values = example_values(module)
    if isinstance(compiler, BeginningCompiler):
        return compiler.begin(module, values)
    return _AtOnce(partial(compiler, module, values))


def show(dump: Dump | None, name: str, module: fx.GraphModule, heading: Callable[[], str] = str) -> None:
    """Gives a graph to a dump, if there is one, under a heading."""
    if dump is not None:
        dump(f"{name}.py", graph_text(module, name, heading()))
