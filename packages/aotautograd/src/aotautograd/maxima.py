"""Masks of gradients behind max pools, taken at the maxima.

The gradient of `max_pool(relu(x))` is scattered to the places of the maxima, and is then zero where the result of relu
is: for that the forward would keep all of the result. But the gradient is zero already wherever there is no maximum,
and where there is one, the pool's result has the same value. So the mask is taken of the pool's result, before the
gradient is scattered, and what was pooled need not be kept. A masked sum is the sum of masked values to the bit.

Where relu is of a normalisation, the backward reads what was normalised in any case, and has relu's result from that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set

import torch
from torch import fx

from aotautograd.partitioners import is_backward, is_tensor, nbytes
from aotautograd.passes import same_layout
from aotautograd.recompute import is_cheap
from aotautograd.schemas import HISTORY, PHASE, STAND_IN, JointGraph
from primtorch.layout import written_alike
from primtorch.printing import made_by

aten = torch.ops.aten

_NUMBERS = (int, float)
_LOWEST = -float("inf")  # a window of it alone may name an element outside of it, whose value is another

# Backwards of pools -> the pools. The gradient comes first, then what was pooled; last the places of the maxima, the
# pool's second result.
_POOLS: Mapping[object, object] = {
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d_backward.default: aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d_backward.default: aten.adaptive_max_pool3d.default,
    aten.fractional_max_pool2d_backward.default: aten.fractional_max_pool2d.default,
    aten.fractional_max_pool3d_backward.default: aten.fractional_max_pool3d.default,
}
# They give the elements in the order in which they take them.
_IN_ORDER = frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default),
    }
)


def _same(node: fx.Node, pooled: fx.Node) -> bool:
    """The mask reads the result that was pooled, as relu's does."""
    return node.args[1] is pooled


def _of_threshold(node: fx.Node, pooled: fx.Node) -> bool:
    """The mask reads what `threshold` was of, which is at most the threshold where the result is."""
    if pooled.target is not aten.threshold.default:
        return _same(node, pooled)
    source, limit, value = pooled.args
    if not isinstance(limit, _NUMBERS) or not isinstance(value, _NUMBERS):
        return False
    return node.args[1:] == (source, limit) and _LOWEST < value <= limit


def _of_clipped(node: fx.Node, pooled: fx.Node) -> bool:
    """The mask reads what `hardtanh` was of: it is outside of the bounds, or at one, where the result is at one."""
    if pooled.target is not aten.hardtanh.default:
        return False
    source, *bounds = pooled.args
    low, high = (*bounds, *(-1, 1)[len(bounds) :])
    if not isinstance(low, _NUMBERS) or not isinstance(high, _NUMBERS):
        return False
    return node.args[1:] == (source, low, high) and _LOWEST < low <= high


# Their results are computed again from their operands, of which their backwards read the first.
_NORMALISATIONS = frozenset(
    {
        *(aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional),
        *(aten._native_batch_norm_legit_no_training, aten.native_layer_norm, aten.native_group_norm),
    }
)

# Operators (gradient, value, *numbers) that keep a gradient or make it zero, by a comparison of the value with the
# numbers -> whether the value may be replaced by what was pooled.
_MASKS: Mapping[object, Callable[[fx.Node, fx.Node], bool]] = {
    aten.threshold_backward.default: _of_threshold,
    aten.hardtanh_backward.default: _of_clipped,
}


def mask_at_maxima(joint: JointGraph) -> int:
    """Masks gradients before max pools scatter them, wherever nothing else is added to them; returns how many."""
    graph, changed = joint.module.graph, 0
    for mask in list(graph.nodes):
        applies = _MASKS.get(mask.target) if mask.op == "call_function" else None
        scattered = _scattered(mask.args[0]) if applies is not None else None
        if applies is None or scattered is None:
            continue
        pool = scattered.args[-1].args[0]  # type: ignore[union-attr]
        assert isinstance(pool, fx.Node)
        pooled = _behind_views(pool.args[0])
        result = mask.args[0]
        if not applies(mask, pooled) or not _corresponds(mask, pooled, result, scattered):
            continue
        if _has_anyway(pooled, {mask, scattered}):
            continue
        _move(graph, mask, scattered, pool)
        mask.replace_all_uses_with(result)
        mask.meta[STAND_IN] = result
        graph.erase_node(mask)
        changed += 1
    if changed:
        joint.module.recompile()
        made_by(joint.module, "mask at maxima")
    return changed


def _scattered(gradient: object) -> fx.Node | None:
    """The backward of a pool whose result the gradient is, and that nobody else reads."""
    node = gradient
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target in _POOLS:
            places = node.args[-1]
            from_pool = (
                isinstance(places, fx.Node)
                and places.target is operator.getitem
                and places.args[1] == 1
                and places.args[0].target is _POOLS[node.target]  # type: ignore[union-attr]
                and not node.kwargs
            )
            return node if from_pool else None
        if node.target not in _IN_ORDER:
            return None
        node = node.args[0]
    return None


def _behind_views(node: object) -> fx.Node:
    while isinstance(node, fx.Node) and node.target in _IN_ORDER:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _corresponds(mask: fx.Node, pooled: fx.Node, result: object, scattered: fx.Node) -> bool:
    """Whether the gradient's elements are those of what was pooled, in its shape and dtype, and laid out as the mask's
    result; and all of it has one history."""
    if not isinstance(result, fx.Node) or not same_layout(mask, result):
        return False
    a, b = pooled.meta.get("val"), mask.meta.get("val")
    if a is None or b is None or a.dtype != b.dtype or not written_alike(a.shape, b.shape):
        return False
    kinds = {(node.meta.get(PHASE), node.meta.get(HISTORY)) for node in (mask, result, scattered)}
    return len(kinds) == 1


def _has_anyway(value: fx.Node, apart: Set[fx.Node]) -> bool:
    """Whether the backward has a value of what nodes that are not `apart` read, or of little."""
    size, work, seen = nbytes(value), [value], {value}
    while work:
        node = work.pop()
        if nbytes(node) * 8 <= size or any(is_backward(user) and user not in apart for user in node.users):
            continue
        source = node.args[0] if node.target is operator.getitem else node
        if not isinstance(source, fx.Node) or source.op != "call_function":
            return False
        if not (is_cheap(source) or getattr(source.target, "overloadpacket", None) in _NORMALISATIONS):
            return False
        work += [n for n in source.all_input_nodes if n not in seen and is_tensor(n)]
        seen.update(source.all_input_nodes)
    return True


def _move(graph: fx.Graph, mask: fx.Node, scattered: fx.Node, pool: fx.Node) -> None:
    """The mask of the gradient that is scattered, by the pool's values."""
    gradient = scattered.args[0]
    assert isinstance(gradient, fx.Node)
    values = next((user for user in pool.users if user.target is operator.getitem and user.args[1] == 0), None)
    if values is None:
        with graph.inserting_after(pool):
            values = graph.call_function(operator.getitem, (pool, 0))
        values.meta.update(pool.meta, val=pool.meta["val"][0])
    with graph.inserting_before(scattered):
        masked = graph.call_function(mask.target, (gradient, values, *mask.args[2:]), mask.kwargs)  # type: ignore[arg-type]
    masked.meta.update(mask.meta, val=gradient.meta["val"])
    scattered.update_arg(0, masked)
