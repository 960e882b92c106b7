"""Functional collectives: calls of torch that give new tensors are nodes of the graph, each waited for at once.

Their Python comes down to an operator, which takes the group's name, and one that waits. So the group is named here,
and guarded; the rest is interpreted. Operators that communicate have an effect: none is dropped, merged or moved past
another. A program that calls the operators itself waits when it likes.
"""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from primtorch.communication import begins, is_wait
from primtorch.fake import FakeTensor
from torchdynamo.graph.recorder import tensors_in
from torchdynamo.graph.view_writes import memory_of
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

FUNCTIONAL = "torch.distributed._functional_collectives"

# By name, with the operator (the module is imported by programs that call it).
_NODES = {
    "all_gather_into_tensor_coalesced": "_c10d_functional::all_gather_into_tensor_coalesced",
    "all_gather_single": "_c10d_functional::all_gather_into_tensor",
    "all_gather_single_autograd": "_c10d_functional_autograd::all_gather_into_tensor",
    "all_gather_tensor": "_c10d_functional::all_gather_into_tensor",
    "all_gather_tensor_autograd": "_c10d_functional_autograd::all_gather_into_tensor",
    "all_gather_single_coalesced": "_c10d_functional::all_gather_into_tensor_coalesced",
    "all_reduce": "_c10d_functional::all_reduce",
    "all_reduce_coalesced": "_c10d_functional::all_reduce_coalesced",
    "all_to_all_single": "_c10d_functional::all_to_all_single",
    "all_to_all_single_autograd": "_c10d_functional_autograd::all_to_all_single",
    "broadcast": "_c10d_functional::broadcast",
    "reduce_scatter_single": "_c10d_functional::reduce_scatter_tensor",
    "reduce_scatter_single_autograd": "_c10d_functional_autograd::reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "_c10d_functional::reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor": "_c10d_functional::reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd": "_c10d_functional_autograd::reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "_c10d_functional::reduce_scatter_tensor_coalesced",
    "wait_tensor": "_c10d_functional::wait_tensor",
}
_PARTS = frozenset({"_group_or_group_name", "_maybe_wrap_tensor", "_resolve_group", "_resolve_group_name"})


def inlines(function: types.FunctionType) -> bool:
    """Whether a function of the module, or one written within such a function, stays in the graph."""
    name = function.__qualname__.partition(".")[0]
    return name in _NODES or name in _PARTS


def with_group_named(
    outside: Outside, function: types.FunctionType, args: Args, kwargs: Kwargs
) -> inspect.BoundArguments | None:
    """The call with its group by name, where the program gives the group itself."""
    operator = _NODES.get(function.__name__)
    if operator is None:
        return None
    derived = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs)))
    if derived and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Autograd"):
        # Eager hands its result on in a tensor of a class that ends the history.
        raise BreakGraph(
            "distributed", f"{function.__name__}() of a tensor with a history, which it has no derivative for"
        )
    bound = inspect.signature(function).bind(*args, **kwargs)
    group = bound.arguments.get("group")
    if group is None or isinstance(group, str):
        return None
    for part in group if isinstance(group, tuple) else (group,):
        if not isinstance(part, int) and outside.externals.lookup(part) is None:
            raise BreakGraph("distributed", f"{function.__name__}() in a group that the program makes")
        outside.identity(part)
    tag: object = bound.arguments.pop("tag", "")
    resolve: Callable[..., object] = sys.modules[FUNCTIONAL]._resolve_group_name
    bound.arguments["group"] = outside.ambient(resolve, (group, tag))
    return bound


def wait(outside: Outside, run: Callable[[], object], args: Args, kwargs: Kwargs) -> object:
    """`wait_tensor(tensor)`, which `run` calls, gives the tensor itself, as in eager. In the graph that is another node
    from there on, so that whoever reads the tensor later has waited."""
    recorder = outside.recorder
    tensor: object = (*args, *kwargs.values())[0]
    node = recorder.node_of(tensor) if isinstance(tensor, FakeTensor) else None
    if node is None or not isinstance(tensor, FakeTensor):
        return run()
    if node.op == "placeholder":
        raise BreakGraph("distributed", "wait_tensor() of what was begun outside of the graph")
    known = _is_in_flight(node)
    others = (n for n in recorder.graph.nodes if n is not node and memory_of(n.meta.get("val")) is memory_of(tensor))
    if any(_is_in_flight(other) != known for other in others):  # of what was read when, a graph would know nothing
        raise BreakGraph("distributed", "wait_tensor() where there is a view of what it waits for")
    result: Any = run()
    waited = recorder.node_of(result)
    if waited is None or not known or recorder.regions.open or tensor.requires_grad:
        return result
    recorder.replace_node(tensor, waited)
    return tensor


def _is_in_flight(node: fx.Node) -> bool:
    """Whether a node gives what a collective has begun to write, or has been waited for."""
    maker: object = node.args[0] if node.target is operator.getitem else node
    return isinstance(maker, fx.Node) and (begins(maker.target) or is_wait(maker.target))
