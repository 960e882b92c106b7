"""Rules for indexing: loads at computed places, and scatters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from primtorch import prims
from primtorch.arguments import Sizes
from primtorch.layout import view_strides
from primtorch.prims import Prim
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import ZERO, Index, broadcast_strides, dot, exprs, is_one, many_times, product
from torchinductor.ir import Recorder, closure_of, space, space_index
from torchinductor.lowering.context import Context, dense, order_like
from torchinductor.lowering.placed_sums import sum_by_place
from torchinductor.lowering.values import Lazy, Ops, Rule, Strided, TensorValue, recorder_of
from torchinductor.ops import Fault, StoreMode


def _place(ops: Ops, value: int, size: IntExpr, wraps: bool) -> IntExpr:
    """A loaded index as an index expression; negative ones count from the end."""
    recorder = recorder_of(ops)
    if wraps and (recorder is None or recorder.within(value, size) is None):
        negative = ops.apply("lt", value, ops.constant(0, torch.int64))
        wrapped = ops.apply("add", value, ops.index_expr(size, torch.int64))
        value = ops.apply("where", negative, wrapped, value)
    return ops.indirect(value, size)


def _taken(t: TensorValue, at: Index, ops: Ops) -> int:
    """The element at places that were looked up. The kernel looks whether they are any, as it does at each place that
    it goes to, also where it goes nowhere: where t is expanded along a dim, or made of one number."""
    value = t.load(at, ops)
    recorder = recorder_of(ops)
    if recorder is None or (isinstance(t.data, Strided) and ZERO not in t.data.strides):
        return value
    known = closure_of(recorder.ops, [value])
    for looked_up in dict.fromkeys(at):
        place = recorder.lookup(looked_up)
        if place is not None and place not in known:
            position = ops.index_expr(looked_up, torch.int64)
            value = ops.require(value, ops.apply("ge", position, ops.constant(0, torch.int64)), Fault.INDEX)
    return value


# Of how many of a value's elements one may be read at a computed place, for the value to be computed there alone.
_FEW = 16


def _readable(ctx: Context, t: TensorValue, places: Index | None = None) -> None:
    """A value that is read at computed places is stored when computing it there again would cost more than a load,
    unless the places are few: the loss of a softmax reads one element of each row. So is what tells the places, unless
    it is made of indices alone: where these surely lie is known, and there is nothing to look up."""
    if ctx.inline or not isinstance(t.data, Lazy) or not (t.heavy or t.cost > 2) or (places is None and _counted(t)):
        return
    if places is None or not many_times(product(t.shape), product(places), _FEW):
        ctx.store(t)


def _counted(t: TensorValue) -> bool:
    """Whether a value's elements are indices that only their places tell."""
    if t.reads or t.heavy or t.dtype != torch.int64:
        return False
    recorder = Recorder({axis.name: axis.size for axis in space(t.shape)})
    return recorder.place(t.load(space_index(t.shape), recorder)) is not None


class _Advanced:
    """Where the dims of `index(t, indices, wrap)` come from."""

    def __init__(self, t: Index, indices: Sequence[TensorValue | None], wrap: bool) -> None:
        self.wrap = wrap
        self.indices = list(indices) + [None] * (len(t) - len(indices))
        self.sizes = t
        used = [d for d, i in enumerate(self.indices) if i is not None]
        shapes = [i.shape for i in self.indices if i is not None]
        rank = max((len(s) for s in shapes), default=0)
        self.broadcast: list[IntExpr] = []
        for d in range(rank):
            column = [s[d - rank + len(s)] for s in shapes if d - rank + len(s) >= 0]
            self.broadcast.append(next((s for s in column if not is_one(s)), column[0]))
        adjacent = bool(used) and used == list(range(used[0], used[-1] + 1))
        self.first = used[0] if adjacent else 0
        kept = [d for d in range(len(t)) if self.indices[d] is None]
        self.before = [d for d in kept if d < self.first]
        self.after = [d for d in kept if d >= self.first]
        self.shape: Index = (*(t[d] for d in self.before), *self.broadcast, *(t[d] for d in self.after))

    def source(self, index: Index, ops: Ops) -> Index:
        """The index into t of an element of the result."""
        low, high = len(self.before), len(self.before) + len(self.broadcast)
        result: dict[int, IntExpr] = dict(zip(self.before, index[:low], strict=True))
        result.update(zip(self.after, index[high:], strict=True))
        for d, tensor in enumerate(self.indices):
            if tensor is not None:
                middle = index[low:high][len(self.broadcast) - len(tensor.shape) :]
                at = tuple(ZERO if is_one(s) else i for s, i in zip(tensor.shape, middle, strict=True))
                result[d] = _place(ops, tensor.load(at, ops), self.sizes[d], self.wrap)
        return tuple(result[d] for d in range(len(self.sizes)))


def index(ctx: Context, t: TensorValue, indices: Sequence[TensorValue | None], wrap: bool) -> TensorValue:
    """Advanced indexing; the result's shape is torch's."""
    plan = _Advanced(t.shape, indices, wrap)
    tensors = [i for i in indices if i is not None]
    for tensor in tensors:
        _readable(ctx, tensor)
    _readable(ctx, t, plan.shape)
    return ctx.lazy(
        plan.shape, t.dtype, t.device, lambda at, ops: _taken(t, plan.source(at, ops), ops), of=[t, *tensors], cost=3
    )


def gather(ctx: Context, t: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    """t at integer positions along a dim; of the index's shape."""
    if not t.shape:
        return t
    _readable(ctx, t, index.shape)

    def load(at: Index, ops: Ops) -> int:
        place = _place(ops, index.load(at, ops), t.shape[dim], False)
        return _taken(t, (*at[:dim], place, *at[dim + 1 :]), ops)

    return ctx.lazy(index.shape, t.dtype, t.device, load, of=[t, index], cost=2)


def _copied(ctx: Context, t: TensorValue) -> TensorValue:
    """A fresh buffer that holds t."""
    buffer = ctx.new_buffer(t.shape, t.dtype, t.device, dense(t.shape, t.layout))
    ctx.write(buffer, t)
    return ctx.strided(buffer)


def _order_of_reader(node: fx.Node | None) -> Index | None:
    """The strides in which a result is where its reader wants it, who keeps it or copies it to memory of its own, as it
    is or reshaped; None where nobody alone says."""
    shapes: list[Sizes] = []
    while node is not None and len(node.users) == 1:
        (user,), meta = node.users, node.meta["val"]
        shapes.append(tuple(meta.shape))
        if user.op == "output" or user.target is prims.copy_strided:
            wanted = (meta if user.op == "output" else user.meta["val"]).stride()
            return _reshaped(shapes, tuple(wanted))
        if user.target is not prims.reshape and not (_scatters(user) and user.args[0] is node):
            return None
        node = user
    return None


def _reshaped(shapes: Sequence[Sizes], strides: Sizes) -> Index | None:
    """The strides of the first of shapes, each of which is a view of the next one; these are the last one's."""
    pairs = list(zip(shapes[:0:-1], shapes[-2::-1], strict=True))
    if all(type(n) is int for sizes in (*shapes, strides) for n in sizes):
        found: Sizes | None = strides
        for shape, before in pairs:
            found = view_strides(shape, found, before) if found is not None else None
        return exprs(found) if found is not None else None
    steps: Index | None = exprs(strides)
    for shape, before in pairs:
        steps = broadcast_strides(exprs(shape), steps, exprs(before)) if steps is not None else None
    return steps


def _order_of_values(shape: Index, values: TensorValue) -> Index | None:
    """A shape's strides in the order of what is added there; None where a dim that is one element wide among the values
    is wider there: its stride says nothing."""
    if len(values.shape) != len(shape):
        return None
    silent = any(is_one(added) and not is_one(size) for added, size in zip(values.shape, shape, strict=True))
    return None if silent else order_like(shape, values)


def _scatters(node: fx.Node) -> bool:
    return isinstance(node.target, Prim) and node.target.name in SCATTERS


def _scattered(
    ctx: Context,
    t: TensorValue,
    shape: Index,
    values: TensorValue,
    mode: StoreMode,
    source: Callable[[Index, Ops], Index],
) -> TensorValue:
    if isinstance(t.data, Lazy) and t.order is None:  # zeros, mostly
        t.order = _order_of_reader(ctx.node) or _order_of_values(t.shape, values)
    summed = sum_by_place(ctx, t, shape, values, source) if mode == "add" else None
    if summed is not None:
        return summed
    if mode == "add" and t.dtype in (torch.bfloat16, torch.float16):
        # Additions round once, at the end.
        wide = ctx.lazy(t.shape, torch.float32, t.device, t.load, of=[t], cost=0)
        added = _scattered(ctx, wide, shape, values, mode, source)
        return ctx.lazy(t.shape, t.dtype, t.device, added.load, of=[added], cost=0)
    out = _copied(ctx, t)
    buffer = ctx.buffers[out.data.buffer]  # type: ignore[union-attr]
    ctx.scatter(buffer, shape, lambda at, ops: dot(source(at, ops), buffer.strides), values.load, mode, t.device)
    return out


def index_put(
    ctx: Context,
    t: TensorValue,
    indices: Sequence[TensorValue | None],
    values: TensorValue,
    accumulate: bool,
    wrap: bool,
) -> TensorValue:
    """A copy of t with values written (or added) where indices say."""
    plan = _Advanced(t.shape, indices, wrap)
    for tensor in indices:
        if tensor is not None:
            _readable(ctx, tensor)
    mode: StoreMode = "add" if accumulate else "set"
    return _scattered(ctx, t, plan.shape, values, mode, plan.source)


def _scatter_rule(mode: StoreMode) -> Callable[..., TensorValue]:
    def rule(ctx: Context, t: TensorValue, dim: int, index: TensorValue, src: TensorValue) -> TensorValue:
        def source(at: Index, ops: Ops) -> Index:
            if not t.shape:
                return ()
            place = _place(ops, index.load(at, ops), t.shape[dim], False)
            return (*at[:dim], place, *at[dim + 1 :])

        return _scattered(ctx, t, index.shape, src, mode, source)

    return rule


SCATTERS = frozenset({"index_put", "scatter", "scatter_add"})
"""Prims that may write to one place several times."""

RULES: Mapping[str, Rule] = {
    "index": index,
    "gather": gather,
    "index_put": index_put,
    "scatter": _scatter_rule("set"),
    "scatter_add": _scatter_rule("add"),
}
