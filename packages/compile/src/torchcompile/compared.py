"""A compiled graph held to eager's: values, gradients and what is left in its inputs, judged by float64.

Where it differs, the first of its operators is found up to which the graph, compiled by itself, differs already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.ambient import unset
from primtorch.testing import assert_as_accurate
from torchcompile.errors import WrongResult
from torchcompile.passes import plain_graph

Run = Callable[..., Sequence[object]]
Compile = Callable[[fx.GraphModule, list[Any]], Run]

_WIDE = {
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
}  # fmt: skip


def hold_to_eager(gm: fx.GraphModule, inputs: Sequence[Any], run: Run, compile: Compile, title: str) -> None:
    """Runs a compiled graph and eager on copies of the inputs. Graphs that draw random numbers are not compared.

    Args:
        compile: makes a part of the graph run.

    Raises:
        WrongResult: they differ.
    """
    with _numbers_of_its_own():
        difference = _difference(gm, run, inputs)
        if difference is None:
            return
        found = _first_operator(gm, inputs, compile)
    raise WrongResult(f"{title}: {difference}\n{found}")


@contextmanager
def _numbers_of_its_own() -> Iterator[None]:
    """A block that draws no random numbers of the program's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), unset(torch.get_default_dtype()):
        yield


def _difference(gm: fx.GraphModule, run: Run, inputs: Sequence[Any]) -> str | None:
    """What differs from eager; None where nothing does, or where that cannot be said."""
    state = torch.get_rng_state()
    eager = _results(gm.forward, inputs, wide=False)
    if not torch.equal(state, torch.get_rng_state()):
        return None
    try:
        exact = _results(gm.forward, inputs, wide=True)
        comparable = all(map(_judges, pytree.tree_leaves(exact), pytree.tree_leaves(eager)))
    except (RuntimeError, TypeError):  # a dtype that the program names meets the wide one
        comparable = False
    if not comparable:
        exact = pytree.tree_map_only(torch.Tensor, _widened, eager)
    for what, mine, other, judge in zip(_PARTS, _results(run, inputs, wide=False), eager, exact, strict=True):
        try:
            assert_as_accurate(mine, other, judge, what)
        except AssertionError as error:
            return str(error)
    return None


_PARTS = ("output,", "input after the call,", "gradient of an input,")


def _judges(exact: object, eager: object) -> bool:
    if not isinstance(exact, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return not isinstance(eager, torch.Tensor)
    return exact.dtype == _WIDE.get(eager.dtype, eager.dtype) and exact.shape == eager.shape


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def _results(run: Run, inputs: Sequence[Any], wide: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, the inputs after the call, and gradients of the inputs."""
    leaves = [_copied(value, wide) for value in inputs]
    taken = [
        leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not value.is_leaf else leaf
        for leaf, value in zip(leaves, inputs, strict=True)
    ]
    outputs = list(run(*taken))
    roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients: list[Any] = []
    if roots and wanted:
        tangents = [torch.ones_like(root) for root in roots]
        gradients = list(torch.autograd.grad(roots, wanted, tangents, allow_unused=True))
    return outputs, [value for value in taken if isinstance(value, torch.Tensor)], gradients


def _copied(value: Any, wide: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    return (_widened(copy) if wide else copy).requires_grad_(value.requires_grad)


def _first_operator(gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile) -> str:
    """A sentence that names it."""
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        return "its sizes are symbols: compile with dynamic=False to have the operator named"
    nodes = [node for node in gm.graph.nodes if _is_value(node)]
    low, high = 0, len(nodes)  # the parts up to `low` are right, that up to `high` is not
    while low < high:
        middle = (low + high) // 2
        part = _part(gm, nodes[: middle + 1])
        if _difference(part, compile(part, list(inputs)), inputs) is None:
            low = middle + 1
        else:
            high = middle
    if low == len(nodes):
        return "none of its parts differs where every value is given out: it is an effect of what is fused"
    node = nodes[low]
    stack = node.meta.get("stack", ())
    where = f"\n  {stack[-1].file}:{stack[-1].line} in {stack[-1].function}" if stack else ""
    return f"the first operator that differs is {node.name} = {node._pretty_print_target(node.target)}(...){where}"


def _is_value(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op.startswith("call") and isinstance(value, torch.Tensor)


def _part(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph up to the last of these nodes, which gives out all of them."""
    part = plain_graph(gm)
    names = {node.name for node in nodes}
    (end,) = part.graph.find_nodes(op="output")
    end.args = (tuple(node for node in part.graph.nodes if node.name in names),)
    for node in reversed(part.graph.nodes):
        if node.op.startswith("call") and not node.users and node.name not in names:
            part.graph.erase_node(node)
    part.recompile()
    return part
