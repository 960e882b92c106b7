"""What a training step becomes on a GPU, counted without one: for tests, and for tools/bench/gpu_traffic.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

import torchcompile
import torchinductor
from torchinductor.codegen.base import traits_of
from torchinductor.convolutions import arrange_convolutions
from torchinductor.cost import Traffic, traffic_of
from torchinductor.kept_rows import align_kept_rows
from torchinductor.lowering.context import Operation
from torchinductor.source import planned_operations

CUDA = torch.device("cuda")
Show = Callable[[Sequence[Operation]], object]


class Stand(SimpleNamespace):
    """In the place of a compiled graph; unlike its base it can be referred to weakly."""


def memory_for(value: object) -> object:
    """A result's place, with nothing in it."""
    if not hasattr(value, "shape"):
        return value
    shape, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))  # type: ignore[attr-defined]
    return torch.empty_strided(shape, strides, dtype=value.dtype)  # type: ignore[attr-defined]


def counted(found: dict[str, Traffic], show: Show | None = None) -> Callable[..., Any]:
    """Stands for `compile_graph`: adds a graph's traffic under "forward", "backward" or "inference"."""

    def compile_graph(
        graph: fx.GraphModule, inputs: Sequence[Any], settings: Any, account: torchinductor.Account
    ) -> Any:
        operations = planned_operations(graph, CUDA)
        kind = account.title.rpartition(" ")[2]
        found[kind] = found.get(kind, Traffic()) + traffic_of(operations)
        if show is not None:
            show(operations)
        names = [node for node in graph.graph.nodes if node.op == "placeholder"]
        returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]

        def run(values: Sequence[Any]) -> list[Any]:
            given = dict(zip(names, values, strict=True))
            return [
                given[o] if o in given else memory_for(o.meta["val"]) if hasattr(o, "meta") else o for o in returned
            ]

        return Stand(consume=run, stats=torchinductor.GraphStats(0, 0, 0), kept=None)

    return compile_graph


@contextmanager
def planning(compile_graph: Callable[..., Any]) -> Iterator[None]:
    """Graphs go to `compile_graph`, which is to plan them for a GPU; rules that ask whether a value is on the CPU hear
    that it is not."""
    traits = lambda _: traits_of(CUDA)
    planned = {
        (torchinductor, "compile_graph"): compile_graph,
        (torchinductor, "choose_layouts"): lambda gm: arrange_convolutions(gm, traits),
        (torchinductor, "choose_kept_layouts"): lambda kept: align_kept_rows(kept, traits),
        (torchinductor, "walks_windows"): lambda device: traits(device).walks_windows,
    }
    own = {place: getattr(*place) for place in planned}
    try:
        for place, function in planned.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in own.items():
            setattr(*place, function)


def traffic_of_step(
    net: torch.nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    train: bool = True,
    show: Show | None = None,
) -> dict[str, Traffic]:
    """The traffic of a step under bf16 autocast, by kind of graph; `show` is given the planned operations."""
    found: dict[str, Traffic] = {}
    with planning(counted(found, show)):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(train):
            out = torchcompile.compile(net, fullgraph=True)(*args, **kwargs)
        if train:
            value = out if isinstance(out, torch.Tensor) else out.loss
            (value if value.dim() == 0 else value.float().sum()).backward()
    return found
