"""Clean-ups of functional graphs. Each pass takes a joint (or any functional) graph and edits it in place."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import Argument

from aotautograd.inputs import dense_spec
from aotautograd.schemas import HISTORY, PHASE, STAND_IN, FunctionResult, JointGraph
from primtorch import effects
from primtorch.higher_order import HigherOrder
from primtorch.layout import written_alike
from primtorch.memory import memory_of, returns_alias, viewed
from primtorch.nodes import copy_nodes
from primtorch.prims import Prim
from primtorch.printing import made_by
from primtorch.spec import TensorSpec

aten = torch.ops.aten


def output_values(graph: fx.Graph) -> tuple[Argument, ...]:
    """What the graph returns, flat."""
    return tuple(output_node(graph).args[0])  # type: ignore[arg-type]


def output_node(graph: fx.Graph) -> fx.Node:
    """The last node of a graph, whose argument is what the graph returns."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def returning(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """A copy of a graph that returns these nodes of it. Its nodes have the same names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copy_nodes(graph, module.graph, copies)
    graph.output(tuple(copies[node] for node in nodes))
    return _LazyGraphModule(module, graph, module.__class__.__name__)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers or has another effect, so that two of them are not one."""
    tags = getattr(node.target, "tags", ())
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in tags
    return "random" in tags or "effect" in tags


# What the first operand holds is nothing to them: its size is, and the like.
_LIKE_THE_FIRST = frozenset(
    {
        *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
        *(aten.randint_like, aten.bernoulli.p, aten.fill, aten.zero),
        *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
    }
)


def read_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads, not their metadata alone."""
    read = node.all_input_nodes
    target = node.target
    if getattr(target, "overloadpacket", None) in _LIKE_THE_FIRST or target in _LIKE_THE_FIRST:
        return [n for n in read if n is not node.args[0]]
    return read


def has_effect(node: fx.Node) -> bool:
    """Nodes that must run although nobody uses their value, and once: draws from a generator, calls with an effect."""
    if node.op == "call_function":
        target = node.target
        return _must_run(target) if isinstance(target, OpOverload) else is_random(node) or is_effect(node)
    return node.op in ("placeholder", "output")


@functools.lru_cache(maxsize=4096)
def _must_run(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or effects.has_effect(op)


def is_effect(node: fx.Node) -> bool:
    """Calls of operators that do something beside giving results: assertions, operators that are not torch's own."""
    if isinstance(node.target, HigherOrder | Prim):
        return "effect" in node.target.tags
    return isinstance(node.target, OpOverload) and effects.has_effect(node.target)


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Removes nodes whose values nobody uses; returns how many. What a result's history is that of a call of stays:
    derivatives of the backward make the call again."""
    removed = 0
    given: set[fx.Node | None] = set()
    for node in reversed(graph.nodes):
        if not node.users and node not in given and not has_effect(node):
            graph.erase_node(node)
            removed += 1
        elif isinstance(history := node.meta.get(HISTORY), FunctionResult):
            read = (*history.call.args, *history.call.given)
            given.update(present(a) for a in read if isinstance(a, fx.Node))
    return removed


def present(node: fx.Node | None) -> fx.Node | None:
    """A node, or what stands for it in the graph as it is now; None where nothing does."""
    while node is not None and node._erased:
        node = node.meta.get(STAND_IN)
    return node


def keep_refusals(graph: fx.Graph) -> None:
    """What the program computes for nothing is computed all the same where eager may refuse it for its data: something
    reads it. Of a derivative no more is there than is asked for."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in live and not is_effect(node):
            if node.meta.get(PHASE) != "backward" and _may_refuse(node):
                _read(graph, node)
            elif not has_effect(node):
                continue
        live.update(read_by(node))


def _may_refuse(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and effects.may_refuse(
        node.target, fx.map_arg(node.args, lambda n: n.meta.get("val"))
    )


def _read(graph: fx.Graph, node: fx.Node) -> None:
    """A call that needs the node's value, or the first of its values, and does nothing with it."""
    meta = {key: value for key, value in node.meta.items() if key in ("stack", PHASE)}
    with graph.inserting_after(node):
        if isinstance(node.meta.get("val"), (tuple, list)):
            whole, node = node, graph.call_function(operator.getitem, (node, 0))
            node.meta.update(meta, val=whole.meta["val"][0])
    with graph.inserting_after(node):
        graph.call_function(aten._assert_tensor_metadata.default, (node,)).meta.update(meta, val=None)


def eliminate_common_subexpressions(graph: fx.Graph, distinct: Sequence[object] = ()) -> int:
    """Merges nodes that compute the same value in the same phase.

    Phases stay apart: a forward operator repeated in the backward is a recomputation that the program asked for, as is
    one of a checkpoint in a derivative that the program takes itself.
    Two nodes of `distinct` (outputs that the caller may write to) are never merged, nor are two that read one
    number of a tensor: each of them is a symbol of its own in the sizes behind it.
    """
    apart = {m for n in distinct if isinstance(n, fx.Node) for m in (n, memory_of(n), _maker(memory_of(n)))}
    seen: dict[object, fx.Node] = {}
    removed = 0
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr") or has_effect(node):
            continue
        kind = ("autocast" in node.meta, node.meta.get(HISTORY))
        phase = (node.meta.get(PHASE), node.meta.get(PHASE) == "forward" and "recomputed" in node.meta)
        key = (node.op, node.target, phase, kind, _key(node.args), _key(node.kwargs))
        first = seen.setdefault(key, node)
        if first is node or (first in apart and node in apart) or not _same_sizes(node, first):
            continue
        if node in apart:
            apart.add(first)
        node.replace_all_uses_with(first)
        node.meta[STAND_IN] = first
        graph.erase_node(node)
        removed += 1
    return removed


def _maker(node: fx.Node) -> fx.Node:
    """The call that made a tensor, also where that is one of several."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) else node


def _key(a: object) -> object:
    """A hashable form that keeps 1, 1.0 and True apart."""
    kind = type(a)
    if kind is fx.Node:
        return a
    if kind in _AS_THEY_ARE:
        return (kind, a)
    if isinstance(a, (tuple, list)):
        return (isinstance(a, tuple), *[_key(x) for x in a])
    if isinstance(a, dict):
        return tuple((k, _key(v)) for k, v in sorted(a.items()))
    if isinstance(a, slice):
        return ("slice", _key(a.start), _key(a.stop), _key(a.step))
    if isinstance(a, float):
        return (float, a.hex())
    return (kind, a)


_AS_THEY_ARE = frozenset((int, bool, str, type(None), torch.dtype, torch.device))


def same_layout(node: fx.Node, source: fx.Node) -> bool:
    """Same sizes and strides, decided without asking a symbolic question."""
    a, b = node.meta.get("val"), source.meta.get("val")
    if a is None or b is None or not (hasattr(a, "shape") and hasattr(b, "shape")):  # a number has none
        return False
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    return written_alike(a.shape, b.shape) and written_alike(a.stride(), b.stride())


def _same_sizes(node: fx.Node, other: fx.Node) -> bool:
    """Whether two equal calls are described by the same symbols."""
    return bool(_sizes(node.meta.get("val")) == _sizes(other.meta.get("val")))


def _sizes(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_sizes, value))
    return str(getattr(value, "shape", value))


def _source(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None


def _identity(node: fx.Node) -> fx.Node | None:
    return _source(node)


def _if_same_layout(node: fx.Node) -> fx.Node | None:
    source = _source(node)
    return source if source is not None and same_layout(node, source) else None


def _if_memory_is_dense(node: fx.Node) -> fx.Node | None:
    """A copy stands for its source where that is known to have no gaps. What is laid out as a tensor with gaps has
    them when it is run by eager's operators, and its description has none."""
    source = _source(node)
    laid_out = source
    while laid_out is not None and (laid_out := memory_of(laid_out)).target in _LAID_OUT_ALIKE:
        laid_out = _source(laid_out)
        if laid_out is not None and not _is_dense(laid_out.meta.get("val")):
            return None
    return _if_same_layout(node)


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor | TensorSpec):
        return True
    return written_alike(value.stride(), dense_spec(value).strides)


def _double_transpose(node: fx.Node) -> fx.Node | None:
    source = _source(node)
    if source is None or source.target is not node.target or source.args[1:] != node.args[1:]:
        return None
    return _source(source)


def _copy_source(node: fx.Node) -> fx.Node | None:
    """copy(destination, source) is the source, where no conversion or broadcast happens."""
    source = node.args[1]
    return source if isinstance(source, fx.Node) and same_layout(node, source) else None


# Operators that may be the identity -> the node that can stand in for their result, or None.
_NO_OPS: dict[object, Callable[[fx.Node], fx.Node | None]] = {
    aten.detach.default: _identity,
    aten.alias.default: _identity,
    aten.lift_fresh.default: _identity,
    aten.lift.default: _identity,
    aten.view.default: _if_same_layout,
    aten._unsafe_view.default: _if_same_layout,
    aten.reshape.default: _if_same_layout,
    aten.expand.default: _if_same_layout,
    aten.clone.default: _if_memory_is_dense,
    aten._to_copy.default: _if_memory_is_dense,
    aten.slice.Tensor: _if_same_layout,
    aten.copy.default: _copy_source,
    aten.t.default: _double_transpose,
    aten.transpose.int: _double_transpose,
}


# Their results take over the layout of the first argument, and its offset.
_LAID_OUT_ALIKE = frozenset(
    {
        aten.copy.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)


def remove_no_ops(graph: fx.Graph, distinct: Sequence[object] = ()) -> int:
    """Replaces operators that return their argument's value by the argument.

    A node of `distinct` stays if its stand-in is a placeholder or another of `distinct`: the caller gets it as memory
    of its own.
    """
    apart = {n for n in distinct if isinstance(n, fx.Node)}
    owner = {memory_of(n): n for n in apart}
    removed = 0
    for node in graph.nodes:
        rule = _NO_OPS.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        source = rule(node)
        if source is None or node.meta.get(HISTORY) != source.meta.get(HISTORY):
            continue
        if _may_be_a_part(source) and _lays_out_another(node):
            continue
        mine = owner.get(node, node if node in apart else None)
        if mine is not None:
            memory = memory_of(source)
            if not returns_alias(node.target) and (memory is not source or _may_be_a_part(source)):
                continue  # a part of a larger memory is no stand-in for a copy of it
            if source in apart or memory.op in ("placeholder", "get_attr") or owner.get(memory, mine) is not mine:
                continue
            owner[memory] = mine
            if node in apart:
                apart.add(source)
                owner = {m: source if o is node else o for m, o in owner.items()}
        node.replace_all_uses_with(source)
        node.meta[STAND_IN] = source
        graph.erase_node(node)
        removed += 1
    return removed


def _may_be_a_part(node: fx.Node) -> bool:
    """Whether the node's value may begin behind the beginning of its memory."""
    while (memory := memory_of(node)) is node and node.op == "call_function" and node.target in _LAID_OUT_ALIKE:
        like = _source(node)
        if like is None:
            return True
        node = like  # a loop writes a thousand of these
    return memory is not node or memory.op in ("placeholder", "get_attr")


def _lays_out_another(node: fx.Node) -> bool:
    """Whether another tensor is laid out as this one or as a view of it."""
    return any(
        u.args[:1] == (node,) and (u.target in _LAID_OUT_ALIKE or (viewed(u) is not None and _lays_out_another(u)))
        for u in node.users
        if u.op == "call_function"
    )


# operator -> (place of `train`, arguments then unused)
_UNUSED_IN_TRAINING: dict[object, tuple[int, tuple[int, ...]]] = {
    aten.native_batch_norm_backward.default: (7, (3, 4)),
}


def drop_unused_statistics(graph: fx.Graph) -> int:
    """The backward of batch norm in training mode does not read the running statistics."""
    changed = 0
    for node in graph.nodes:
        place, unused = _UNUSED_IN_TRAINING.get(node.target, (-1, ()))
        if unused and node.args[place] is True:
            node.args = tuple(None if i in unused else a for i, a in enumerate(node.args))
            changed += 1
    return changed


def simplify(joint: JointGraph) -> JointGraph:
    """Removes what the program does not need: dead code, no-ops, repeated work."""
    graph = joint.module.graph
    drop_unused_statistics(graph)
    eliminate_dead_code(graph)
    remove_no_ops(graph, output_values(graph))
    eliminate_common_subexpressions(graph, output_values(graph))
    eliminate_dead_code(graph)
    joint.module.recompile()
    made_by(joint.module, "simplify")
    return joint
