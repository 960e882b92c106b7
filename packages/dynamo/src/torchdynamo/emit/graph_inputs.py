"""What a finished graph takes: derived numbers, then numbers read at the call, then tensors.

A number that changes between calls is an input: a symbol s0, s1, ... for an int, f0, f1, ... for a float. What the
program computes from such numbers before the graph needs it (`alpha * 0.1 ** step`) is computed by the generated
code, as Python computes it, and is an input too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from primtorch.fake import FakeTensor
from primtorch.frozen import record
from primtorch.spec import TensorSpec
from primtorch.symbolic import expr_of
from torchdynamo.emit.codegen import Codegen
from torchdynamo.graph.regions import erase_dead_nodes
from torchdynamo.outside.outside import Outside
from torchdynamo.sources import Source


@record
class GraphInput:
    """One input: what the back end sees of it, and the place that the guards read it from (None: it is computed)."""

    example: torch.Tensor | torch.SymInt | torch.SymFloat
    source: Source | None


def takes_floats(backend: Callable[..., object]) -> bool:
    """Whether a back end takes floats as inputs: it says so by an attribute `takes_floats` that is true."""
    return bool(getattr(backend, "takes_floats", False))


def finish_graph(outside: Outside, codegen: Codegen, floats: bool) -> list[GraphInput]:
    """Output node in, dead nodes out, placeholders ordered. Returns what the graph takes.

    Args:
        floats: float inputs are floats; else each is a 0-d float64 tensor on the CPU, read by `item()` in the graph.
    """
    recorder, graph = outside.recorder, outside.recorder.graph
    graph.output(tuple(codegen.outputs))
    erase_dead_nodes(graph)
    recorder.regions.finish()
    recorder.nested.outline()
    needed = _symbols_in_sizes(graph)
    for name in needed:
        if name in recorder.symbol_nodes:
            recorder.symbol_nodes[name]  # a derived one becomes an input by being asked for
    names = {node: name for name, node in recorder.symbol_nodes.items()}
    tensors = {recorder.placeholder_of(fake): (source, tensor) for source, tensor, fake in outside.tensors}
    ordered: list[tuple[int, fx.Node]] = []
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if not node.users and not {str(node.name), names.get(node), str(node.meta["val"])} & needed:
            graph.erase_node(node)
        elif node in names:
            computed = names[node] not in outside.symbol_sources or (not floats and _is_float(node))
            ordered.append((0 if computed else 1, node))
        else:
            ordered.append((2, node))
    ordered.sort(key=lambda pair: pair[0])
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    inputs: list[GraphInput] = []
    for rank, node in ordered:
        anchor.prepend(node)
        example = node.meta["val"]
        if rank == 2:
            source, example = tensors[node]
            inputs.append(GraphInput(example, source))
            continue
        if rank == 0:
            text = codegen.symbol(names[node])
            if _is_float(node) and not floats:
                example, text = _as_tensor(node, outside), f"{codegen.pin(float_tensor)}({text})"
            codegen.scalars.append(text)
        inputs.append(GraphInput(example, None if rank == 0 else outside.symbol_sources[names[node]]))
    return inputs


def _is_float(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.SymFloat)


def float_tensor(value: float) -> torch.Tensor:
    """A float as back ends take it that know no float inputs."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _as_tensor(node: fx.Node, outside: Outside) -> torch.Tensor:
    """Makes a float's placeholder one of a tensor, whose number is read in the graph. Returns the example."""
    graph, value = node.graph, node.meta["val"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        number = graph.call_method("item", (node,))
    number.meta.update(val=value, stack=node.meta["stack"])
    node.replace_all_uses_with(number, lambda user: user is not number)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        example = float_tensor(value.node.hint)
        node.meta["val"] = FakeTensor(TensorSpec.of(example), outside.mode)
    return example


def _symbols_in_sizes(graph: fx.Graph) -> set[str]:
    """Names of the symbols that occur in the sizes of any value of the graph."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        values = [node.meta.get("val")]
        while values:
            value = values.pop()
            if isinstance(value, (tuple, list)):
                values.extend(value)
            elif isinstance(value, torch.Tensor):
                for size in (*value.shape, *value.stride(), value.storage_offset()):
                    if isinstance(size, torch.SymInt):
                        found |= expr_of(size).symbols()
    return found
