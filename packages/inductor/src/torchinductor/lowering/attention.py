"""Attention over the program's functions: a template where the device's back end makes one, else all scores at once.

The functions are graphs of 0-d tensors. They become bodies over a score's positions, which either form takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from primtorch.arguments import TensorLike
from primtorch.attention import (
    POSITION,
    AttentionParts,
    FlexAttention,
    FlexAttentionDerivative,
    working_dtype,
)
from primtorch.frozen import record
from primtorch.prims import Prim
from primtorch.spec import TensorSpec
from primtorch.symbolic.expr import IntExpr, intern_symbol
from torchinductor.indexing import ONE, ZERO, Index, contiguous_strides, dot, exprs, is_one, variable
from torchinductor.ir import Attention, Axis, Indirect, Kernel, Recorder, Region, Stage
from torchinductor.ir.attention import GRADIENT, POSITIONS, SCORE, Direction, Function, Tables
from torchinductor.lowering.context import Context
from torchinductor.lowering.values import Lazy, Ops, Strided, TensorValue
from torchinductor.ops import OpsHandler

RunInline: TypeAlias = Callable[[Context, fx.GraphModule, Sequence[object]], list[object]]


class NotInline(Exception):
    """A function computes something that has to be stored."""


# ---- the functions' values -----------------------------------------------------------------------------------------


class Position(TensorValue):
    """One of a score's positions, of an integer type."""

    __slots__ = ("place",)

    def __init__(self, place: IntExpr, dtype: torch.dtype, device: torch.device) -> None:
        load = lambda index, ops: ops.index_expr(place, dtype)
        super().__init__((), dtype, device, Lazy(load, 0, frozenset()))
        self.place = place


@record
class Additions:
    """What a function adds to a tensor of zeros: values at places."""

    parts: tuple[tuple[tuple[TensorValue, ...], bool, TensorValue], ...]  # (indices, whether they wrap, value)


def at_positions(node: fx.Node, args: tuple[object, ...]) -> object | None:
    """What a node of a function gives that has a meaning of its own there, or None."""
    if not isinstance(node.target, Prim):
        return None
    match node.target.name:
        case "convert_element_type":
            value, dtype = cast("tuple[object, torch.dtype]", args[:2])
            if isinstance(value, Position) and dtype in (torch.int32, torch.int64):
                return Position(value.place, dtype, value.device)
            return value if isinstance(value, Additions) else None
        case "index_put":
            target, indices, value, accumulate, wrap = cast("tuple[Any, ...]", args)
            if not accumulate or not _is_zero(node.args[0]) or len(indices) < len(target.shape):
                raise NotInline("index_put")
            if any(i is None or i.shape for i in indices) or value.shape:
                raise NotInline("index_put")
            return Additions(((tuple(indices), wrap, value),))
        case "add" if all(isinstance(arg, Additions) for arg in args):
            return Additions(tuple(part for arg in cast("tuple[Additions, ...]", args) for part in arg.parts))
        case "copy_strided" if isinstance(args[0], Additions) or (
            isinstance(args[0], TensorValue) and not args[0].shape
        ):
            return args[0]  # of what nobody stores
    if any(isinstance(arg, Additions) for arg in args):
        raise NotInline(node.target.name)
    return None


def without_wrapping(args: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of indexing, where places are positions: none is negative."""
    tensor, indices, _ = cast("tuple[TensorValue, Sequence[object], bool]", args)
    known = all(index is None or isinstance(index, Position) for index in indices)
    return (tensor, indices, False) if known else args


def _is_zero(node: object) -> bool:
    return (
        isinstance(node, fx.Node)
        and isinstance(node.target, Prim)
        and node.target.name == "full"
        and node.args[1] in (0, 0.0)
    )


def remembered(value: object) -> object:
    """A 0-d value that is recorded once in a body, however often it is read."""
    if not isinstance(value, TensorValue) or not isinstance(value.data, Lazy) or isinstance(value, Position):
        return value
    if value.shape:
        return value
    data = value.data
    last: list[tuple[Ops, int]] = []

    def load(index: Index, ops: Ops) -> int:
        if not last or last[0][0] is not ops:
            last[:] = [(ops, data.load(index, ops))]
        return last[0][1]

    value.data = replace(data, load=load)
    return value


class _Given(OpsHandler[int]):
    """Passes a body over positions on, with values in the place of what is carried."""

    def __init__(self, ops: Ops, carried: dict[str, int]) -> None:
        self.ops, self.known = ops, carried

    def __getattribute__(self, name: str) -> Any:
        if name in ("ops", "known", "carried"):
            return object.__getattribute__(self, name)
        return getattr(self.ops, name)

    def carried(self, key: str, dtype: torch.dtype) -> int:
        return self.known[key]


# ---- the call ------------------------------------------------------------------------------------------------------


@record
class _Functions:
    """The functions of a call as bodies; with what a score's gradient adds to tensors, if it is asked for."""

    score: Function | None
    mask: Function | None
    pullback: Function | None
    additions: tuple[Additions, ...] = ()


class _Call:
    """The lowering of one call."""

    def __init__(self, ctx: Context, attention: FlexAttention, parts: AttentionParts, run_inline: RunInline) -> None:
        self.ctx, self.attention, self.parts, self.run_inline = ctx, attention, parts, run_inline
        self.query, self.key, self.value = parts.query, parts.key, parts.value
        self.device = self.query.device
        self.dtype = working_dtype(self.query.dtype)
        batch, self.heads, rows, _ = self.query.shape
        self.shape: Index = (batch, self.heads, rows, self.key.shape[2])
        self.ranges = dict(zip(POSITIONS, self.shape, strict=True))
        for value in parts.captured:
            ctx.realize(value)

    # -- functions

    def inlined(self, body: fx.GraphModule, carried: Sequence[str], positions: bool = True) -> list[object]:
        """What a function gives, over positions."""
        scores = [self._carried(key) for key in carried[:1]]
        places = [Position(variable(name), POSITION, self.device) for name in POSITIONS]
        rest = [self._carried(key) for key in carried[1:]]
        return self.run_inline(self.ctx, body, [*self.parts.numbers, *self.parts.captured, *scores, *places, *rest])

    def _carried(self, key: str) -> TensorValue:
        dtype = self.dtype
        return TensorValue((), dtype, self.device, Lazy(lambda index, ops: ops.carried(key, dtype), 0, frozenset()))

    def function(self, value: object, dtype: torch.dtype) -> Function:
        recorder = Recorder(self.ranges)
        assert isinstance(value, TensorValue)
        loaded = value.load((), recorder)
        if recorder.dtype(loaded) != dtype:
            loaded = recorder.to_dtype(loaded, dtype, recorder.dtype(loaded))
        return Function(recorder.body(), loaded)

    def functions(self, pullback: fx.GraphModule | None = None, captured: int = 0) -> _Functions:
        """Raises NotInline."""
        score = mask = pulled = None
        additions: list[Additions] = []
        if self.attention.score is not None:
            (value,) = self.inlined(cast("fx.GraphModule", self.attention.score), (SCORE,))
            score = self.function(value, self.dtype)
        if self.attention.mask is not None:
            (value,) = self.inlined(cast("fx.GraphModule", self.attention.mask), ())
            mask = self.function(value, torch.bool)
        if pullback is not None:
            first, *others = self.inlined(pullback, (SCORE, GRADIENT))
            pulled = self.function(first, self.dtype)
            for value in others:
                if isinstance(value, TensorValue) and not value.shape:
                    value = Additions((((), False, value),))
                if not isinstance(value, Additions):
                    raise NotInline("a gradient of the pullback")
                additions.append(value)
        return _Functions(score, mask, pulled, tuple(additions))

    # -- memory

    def region(self, value: TensorValue) -> Region:
        data = self.ctx.realize(value)
        return Region(data.buffer, value.shape, data.strides, data.offset)

    def result(self, spec: TensorLike) -> TensorValue:
        """A result that is yet to be written."""
        return self.ctx.strided(self.ctx.new_buffer(exprs(spec.shape), spec.dtype, self.device, exprs(spec.stride())))

    def tables(self, by_keys: bool) -> Tables | None:
        said = self.attention.tables
        if said is None:
            return None
        first = said.by_rows if by_keys else 0
        found = [self.region(table) for table in self.parts.tables[first : first + said.by_rows]]
        full = (found[2], found[3]) if said.full else None
        return Tables(said.queries, said.keys, (found[0], found[1]), full)

    # -- the template

    def template(
        self, direction: Direction, results: Sequence[TensorValue], functions: _Functions, **given: Any
    ) -> Attention:
        """One kernel, with loops that say what it touches."""
        ctx = self.ctx
        regions = {"query": self.region(self.query), "key": self.region(self.key), "value": self.region(self.value)}
        made = tuple(map(self.region, results))
        tables = self.tables(direction == "keys")
        lines = () if tables is None else (*tables.partial, *(tables.full or ()))
        taken = tuple(given.pop("given", ()))
        chosen = (functions.score, functions.mask, functions.pullback)
        bodies = [function.body for function in chosen if function is not None]
        axes = tuple(Axis(n, size) for n, size in zip(POSITIONS[:3], self.shape[:3], strict=True))
        if direction == "keys":
            key_shape = self.key.shape
            axes = tuple(Axis(n, size) for n, size in zip(("b", "hk", "k"), key_shape[:3], strict=True))
        recorder = Recorder({axis.name: axis.size for axis in axes})
        for region in (*regions.values(), *lines, *taken):
            recorder.load(region.buffer, ZERO, ctx.buffers[region.buffer].dtype)
        for body in bodies:
            for access in body.accesses:
                recorder.load(access.buffer, ZERO, ctx.buffers[access.buffer].dtype)
        sizes = [e for r in (*regions.values(), *lines, *taken, *made) for e in (*r.shape, *r.strides, r.offset)]
        inner = set(POSITIONS) | {op.symbol for body in bodies for op in body.ops if hasattr(op, "symbol")}
        asked = [e for body in bodies for e in (*body.indices, *(op.size for op in body.of(Indirect)))]
        sizes += [variable(n) for e in asked for n in sorted(e.symbols() - inner)]
        for expr in dict.fromkeys(sizes):
            if expr.symbols():
                recorder.index_expr(expr, torch.int64)
        for region in made:
            dtype = ctx.buffers[region.buffer].dtype
            recorder.store(region.buffer, ZERO, recorder.constant(0, dtype))
        for body in bodies:
            for buffer in sorted(body.writes):
                recorder.store(buffer, ZERO, recorder.constant(0, ctx.buffers[buffer].dtype), "add")
        loops = Kernel(
            ctx.new_name("op"),
            self.device,
            axes,
            (Stage("outer", recorder.body()),),
            ctx.buffers,
            ctx.origin(),
            scatters=True,
        )
        return Attention(
            kind="attention",
            loops=loops,
            direction=direction,
            results=made,
            given=taken,
            scale=self.attention.scale,
            score=functions.score,
            mask=functions.mask,
            pullback=functions.pullback,
            tables=tables,
            **regions,
        )

    # -- all scores at once

    def strided(self, value: TensorValue) -> TensorValue:
        """A copy by rows, in the type that scores are computed in."""
        ctx = self.ctx
        buffer = ctx.new_buffer(value.shape, self.dtype, self.device)
        ctx.write(buffer, value)
        return ctx.strided(buffer)

    def viewed(self, value: TensorValue, shape: Index, strides: Index) -> TensorValue:
        data = self.ctx.realize(value)
        return TensorValue(shape, value.dtype, value.device, Strided(data.buffer, strides, data.offset))

    def grouped(self, value: TensorValue) -> TensorValue:
        """Row-major heads of the query as rows of the key's head that they share."""
        batch, _, rows, columns = value.shape
        shared = self.key.shape[1]
        shape = (batch, shared, _quotient(value.shape[1], shared) * rows, columns)
        return self.viewed(value, shape, contiguous_strides(shape))

    def transposed(self, value: TensorValue) -> TensorValue:
        data = self.ctx.realize(value)
        *outer, rows, columns = value.shape
        *steps, step, unit = data.strides
        return self.viewed(value, (*outer, columns, rows), (*steps, unit, step))

    def product(self, a: TensorValue, b: TensorValue, shape: Index | None = None) -> TensorValue:
        """a @ b over batches and heads, looked at in another shape."""
        whole = (*a.shape[:-1], b.shape[-1])
        spec = TensorSpec(whole, contiguous_strides(whole), self.dtype, self.device)  # type: ignore[arg-type]
        (made,) = self.ctx.extern(torch.ops.aten.matmul.default, (a, b), {}, [spec], "any")
        assert made is not None
        return made if shape is None else self.viewed(made, shape, contiguous_strides(shape))

    def pointwise(
        self, shape: Index, dtype: torch.dtype, of: Sequence[TensorValue], load: Callable[[Index, Ops], int]
    ) -> TensorValue:
        return self.ctx.lazy(shape, dtype, self.device, load, of=of, cost=2)

    def converted(self, value: TensorValue, dtype: torch.dtype) -> TensorValue:
        """A value in another type."""

        def load(index: Index, ops: Ops) -> int:
            loaded = value.load(index, ops)
            return loaded if value.dtype == dtype else ops.to_dtype(loaded, dtype, value.dtype)

        return self.pointwise(value.shape, dtype, [value], load)

    def stored(self, value: TensorValue) -> TensorValue:
        self.ctx.realize(value, contiguous_strides(value.shape))
        return value

    def replayed(self, function: Function, index: Index, ops: Ops, **carried: int) -> int:
        places = {intern_symbol(name): place for name, place in zip(POSITIONS, index, strict=True)}
        return function.body.replay(_Given(ops, carried), places)[function.value]

    def scores(self, query: TensorValue, key: TensorValue) -> TensorValue:
        """The products, scaled."""
        raw = self.product(self.grouped(query), self.transposed(key), self.shape)
        scale = self.attention.scale

        def load(index: Index, ops: Ops) -> int:
            return ops.apply("mul", raw.load(index, ops), ops.constant(scale, self.dtype))

        return self.pointwise(self.shape, self.dtype, [raw], load)

    def modified(self, scores: TensorValue, functions: _Functions) -> TensorValue:
        """What becomes of the scores; -inf where they do not count."""

        def load(index: Index, ops: Ops) -> int:
            value = scores.load(index, ops)
            if functions.score is not None:
                value = self.replayed(functions.score, index, ops, score=value)
            if functions.mask is not None:
                kept = self.replayed(functions.mask, index, ops)
                value = ops.apply("where", kept, value, ops.constant(-math.inf, self.dtype))
            return value

        return self.pointwise(self.shape, self.dtype, [scores, *self.parts.captured], load)


def _quotient(size: IntExpr, by: IntExpr) -> IntExpr:
    return size // by


def lowered(
    ctx: Context,
    target: FlexAttention | FlexAttentionDerivative,
    args: tuple[object, ...],
    metas: Sequence[TensorLike],
    run_inline: RunInline,
) -> tuple[TensorValue, ...]:
    """The results of a call."""
    try:
        if isinstance(target, FlexAttention):
            return _forward(_Call(ctx, target, target.parts(args), run_inline), metas)
        return _derivative(ctx, target, args, metas, run_inline)
    except NotInline as error:
        raise ctx.fail(
            f"a function of attention's scores that computes more than one number at a time ({error})"
        ) from error


def _forward(call: _Call, metas: Sequence[TensorLike]) -> tuple[TensorValue, ...]:
    functions = call.functions()
    out, lse = (call.result(meta) for meta in metas)
    template = call.template("forward", (out, lse), functions)
    if call.ctx.takes(template):
        call.ctx.operations.append(template)
        return out, lse
    return _dense_forward(call, functions, metas)


def _dense_forward(call: _Call, functions: _Functions, metas: Sequence[TensorLike]) -> tuple[TensorValue, ...]:
    ctx, dtype = call.ctx, call.dtype
    scores = call.scores(call.strided(call.query), call.strided(call.key))
    scores = call.stored(call.modified(scores, functions))
    rows = (*call.shape[:3], ONE)
    highest = ctx.reduction(scores, (3,), "amax", dtype)
    at_row = lambda index: (*index[:3], ZERO)

    def finite(value: TensorValue) -> Callable[[Index, Ops], int]:
        def load(index: Index, ops: Ops) -> int:
            loaded = value.load(at_row(index), ops)
            empty = ops.apply("eq", loaded, ops.constant(-math.inf, dtype))
            return ops.apply("where", empty, ops.constant(0.0, dtype), loaded)

        return load

    top = finite(highest)

    def weight(index: Index, ops: Ops) -> int:
        return ops.apply("exp", ops.apply("sub", scores.load(index, ops), top(index, ops)))

    total = ctx.reduction(scores, (3,), "sum", dtype, transform=weight)

    def divided(index: Index, ops: Ops) -> int:
        by = total.load(at_row(index), ops)
        empty = ops.apply("eq", by, ops.constant(0.0, dtype))
        by = ops.apply("where", empty, ops.constant(1.0, dtype), by)
        return ops.apply("div", weight(index, ops), by)

    weights = call.stored(call.pointwise(call.shape, dtype, [scores, highest, total], divided))
    found = call.product(call.grouped(weights), call.strided(call.value), (*call.shape[:3], call.value.shape[3]))

    def logarithm(index: Index, ops: Ops) -> int:
        place = (*index, ZERO)
        return ops.apply("add", ops.apply("log", total.load(place, ops)), highest.load(place, ops))

    out = call.pointwise(found.shape, call.query.dtype, [found], found.load)
    lse = call.pointwise(rows[:3], dtype, [total, highest], logarithm)
    out.hint, lse.hint = (exprs(meta.stride()) for meta in metas)
    return out, lse


def _derivative(
    ctx: Context,
    target: FlexAttentionDerivative,
    args: tuple[object, ...],
    metas: Sequence[TensorLike],
    run_inline: RunInline,
) -> tuple[TensorValue, ...]:
    given, out, lse, tangent, of_lse = target.split(args)
    call = _Call(ctx, target.forward, target.forward.parts(given), run_inline)
    functions = call.functions(cast("fx.GraphModule | None", target.pullback))
    dtype = call.dtype
    both = lambda index, ops: ops.apply("mul", out.load(index, ops), tangent.load(index, ops))
    products = call.pointwise(out.shape, dtype, [out, tangent], both)
    summed = products if is_one(out.shape[3]) else ctx.reduction(products, (3,), "sum", dtype)
    less = lambda index, ops: ops.apply("sub", summed.load((*index, ZERO), ops), of_lse.load(index, ops))
    delta = call.stored(call.pointwise(call.shape[:3], dtype, [summed, of_lse], less))
    if target.captured and ctx.options.deterministic and not ctx.traits_of(call.device).ordered_stores:
        raise ctx.fail("gradients of what a score function closes over are added in no order: not deterministic")
    sums = [_zeros(call, call.parts.captured[place].shape) for place in target.captured]
    results = [call.result(meta) for meta in metas[:3]]
    taken = tuple(map(call.region, (tangent, lse, delta)))
    plain = functions.pullback
    adding = _adding(call, functions, sums)
    templates = (
        call.template("queries", results[:1], replace(functions, pullback=adding), given=taken),
        call.template("keys", results[1:], replace(functions, pullback=plain), given=taken),
    )
    if all(map(ctx.takes, templates)):
        ctx.operations += templates
    else:
        results = _dense_derivative(call, functions, (tangent, lse, delta), sums, metas)
    captured = [
        call.converted(value, call.parts.captured[place].dtype)
        for place, value in zip(target.captured, sums, strict=True)
    ]
    for value, meta in zip((*results, *captured), metas, strict=True):
        value.hint = exprs(meta.stride())
    return (*results, *captured)


def _zeros(call: _Call, shape: Index) -> TensorValue:
    """Zeros that are added to: one after the other, where stores have an order, which takes wider numbers."""
    ctx = call.ctx
    dtype = torch.float64 if ctx.traits_of(call.device).ordered_stores else call.dtype
    buffer = ctx.new_buffer(shape, dtype, call.device)
    ctx.write(buffer, call.pointwise(shape, dtype, [], lambda index, ops: ops.constant(0.0, dtype)))
    return ctx.strided(buffer)


def _add_to(ops: Ops, target: TensorValue, part: tuple[tuple[TensorValue, ...], bool, TensorValue]) -> None:
    indices, wrap, value = part
    data = cast("Strided", target.data)
    places = []
    for index, size in zip(indices, target.shape, strict=True):
        place = index.load((), ops)
        if wrap and not isinstance(index, Position):
            negative = ops.apply("lt", place, ops.constant(0, torch.int64))
            place = ops.apply("where", negative, ops.apply("add", place, ops.index_expr(size, torch.int64)), place)
        places.append(ops.indirect(place, size))
    ops.store(data.buffer, dot(tuple(places), data.strides, data.offset), value.load((), ops), "add")


def _adding(call: _Call, functions: _Functions, sums: Sequence[TensorValue]) -> Function | None:
    """The pullback that adds to the gradients of what the functions close over, too."""
    if functions.pullback is None or not functions.additions:
        return functions.pullback
    recorder = Recorder(call.ranges)
    mapped = functions.pullback.body.replay(recorder)
    for target, additions in zip(sums, functions.additions, strict=True):
        for part in additions.parts:
            _add_to(recorder, target, part)
    return Function(recorder.body(), mapped[functions.pullback.value])


def _dense_derivative(
    call: _Call,
    functions: _Functions,
    given: tuple[TensorValue, TensorValue, TensorValue],
    sums: Sequence[TensorValue],
    metas: Sequence[TensorLike],
) -> list[TensorValue]:
    dtype, shape = call.dtype, call.shape
    tangent, lse, delta = given
    query, key, value = map(call.strided, (call.query, call.key, call.value))
    tangent = call.strided(tangent)
    scores = call.scores(query, key)
    modified = call.modified(scores, functions)

    def weight(index: Index, ops: Ops) -> int:
        known = lse.load(index[:3], ops)
        empty = ops.apply("eq", known, ops.constant(-math.inf, dtype))
        known = ops.apply("where", empty, ops.constant(0.0, dtype), known)
        return ops.apply("exp", ops.apply("sub", modified.load(index, ops), known))

    weights = call.stored(call.pointwise(shape, dtype, [modified, lse], weight))
    of_weights = call.product(call.grouped(tangent), call.transposed(value), shape)

    def gradient(index: Index, ops: Ops) -> int:
        less = ops.apply("sub", of_weights.load(index, ops), delta.load(index[:3], ops))
        return ops.apply("mul", weights.load(index, ops), less)

    slope = call.pointwise(shape, dtype, [weights, of_weights, delta], gradient)
    if functions.pullback is not None:
        slope = _pulled(call, functions, scores, call.stored(slope), sums)
    slope = call.stored(slope)
    rows = call.grouped(slope)
    scale = call.attention.scale
    by_query = call.product(rows, key, call.query.shape)
    by_key = call.product(call.transposed(rows), call.grouped(query))
    by_value = call.product(call.transposed(call.grouped(weights)), call.grouped(tangent))

    def scaled(found: TensorValue, by: float, meta: TensorLike) -> TensorValue:
        def load(index: Index, ops: Ops) -> int:
            return ops.apply("mul", found.load(index, ops), ops.constant(by, dtype))

        return call.pointwise(found.shape, meta.dtype, [found], load)

    return [
        scaled(f, by, m) for f, by, m in zip((by_query, by_key, by_value), (scale, scale, 1.0), metas, strict=False)
    ]


def _pulled(
    call: _Call, functions: _Functions, scores: TensorValue, slope: TensorValue, sums: Sequence[TensorValue]
) -> TensorValue:
    """The gradient by scores, from that by what became of them."""
    ctx, dtype, shape = call.ctx, call.dtype, call.shape
    pullback = functions.pullback
    assert pullback is not None
    adding = _adding(call, functions, sums)
    if adding is not pullback and adding is not None:
        axes = tuple(Axis(f"i{d}", size) for d, size in enumerate(shape))
        recorder = Recorder({axis.name: axis.size for axis in axes})
        index = tuple(axis.var for axis in axes)
        call.replayed(adding, index, recorder, score=scores.load(index, recorder), gradient=slope.load(index, recorder))
        ctx.kernel(call.device, axes, [Stage("outer", recorder.body())], scatters=True)

    def load(index: Index, ops: Ops) -> int:
        given = {SCORE: scores.load(index, ops), GRADIENT: slope.load(index, ops)}
        value = call.replayed(pullback, index, ops, **given)
        if functions.mask is not None:
            kept = call.replayed(functions.mask, index, ops)
            value = ops.apply("where", kept, value, ops.constant(0.0, dtype))
        return value

    return call.pointwise(shape, dtype, [scores, slope, *call.parts.captured], load)
