"""The state of one graph's lowering: its buffers, the operations in order, and how a value becomes memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from primtorch.effects import has_effect
from primtorch.frozen import record
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic.expr import IntExpr
from torchinductor.errors import LoweringError
from torchinductor.indexing import MOST_SHAPES, ONE, ZERO, Index, at_least, contiguous_strides, dot, exprs
from torchinductor.ir import Axis, Buffer, Bundle, Kernel, Recorder, Stage, Template, space, space_index
from torchinductor.lowering.values import Lazy, Load, Ops, Strided, TensorValue
from torchinductor.ops import ReductionKind, StoreMode
from torchinductor.schemas import DeviceTraits, InductorOptions

OperandLayout: TypeAlias = Literal["exact", "order", "any"]
"""What of eager's layout an operand keeps: its strides, the order of its dims in memory, or nothing."""


@record
class ViewRef:
    """An operand of an ATen call: a strided view of a buffer."""

    buffer: str
    shape: Index
    strides: Index
    offset: IntExpr

    def __str__(self) -> str:
        offset = f" offset {self.offset}" if self.offset.terms else ""
        return f"{self.buffer}[{', '.join(map(str, self.shape))}] strides ({', '.join(map(str, self.strides))}){offset}"


@record
class Flat:
    """An operator with lists among its results, as a function that gives all of them as one list."""

    op: OpOverload

    def __call__(self, *args: object, **kwargs: object) -> list[object]:
        return list(flattened(self.op(*args, **kwargs)))

    def __str__(self) -> str:
        return str(self.op)


def flattened(results: object) -> Iterator[object]:
    """The leaves of nested results."""
    if isinstance(results, (tuple, list)):
        for part in results:
            yield from flattened(part)
    else:
        yield results


@record
class ExternCall:
    """A call of an ATen overload (or of a prim's reference). Arguments may hold `ViewRef`s and `IntExpr`s."""

    name: str
    op: Callable[..., object]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    outputs: tuple[str | None, ...]
    reads: tuple[str, ...]  # buffers, each once, in the order of the arguments
    frames: tuple[UserFrame, ...] = ()  # the user's lines behind it
    origins: tuple[str, ...] = ()

    @property
    def effect(self) -> bool:
        """Whether it does something beside giving results: it is called though nobody reads them, and in its place
        among other calls that do."""
        op = self.op.op if isinstance(self.op, Flat) else self.op
        return isinstance(op, OpOverload) and has_effect(op)

    def __str__(self) -> str:
        lines = [f"call {self.name} of {self.op}", f"  -> {', '.join(o or '_' for o in self.outputs)}"]
        lines += [f"  {_text(argument)}" for argument in self.args]
        return "\n".join([*lines, *(f"  {name}={_text(value)}" for name, value in self.kwargs)])


def _text(argument: object) -> str:
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


@record
class SeedCall:
    """Draws a seed into a 0-d int64 buffer."""

    name: str
    output: str
    device: torch.device

    def __str__(self) -> str:
        return f"seed {self.name} on {self.device}\n  -> {self.output}"


@record
class ScalarRead:
    """Gives a data-dependent size symbol its value."""

    name: str
    symbol: str
    source: ViewRef

    def __str__(self) -> str:
        return f"read {self.name}\n  -> {self.symbol}\n  {self.source}"


Operation: TypeAlias = Kernel | Template | Bundle | ExternCall | SeedCall | ScalarRead


def refuse(template: Template) -> bool:
    """What a back end without templates says of one."""
    return False


def plain_traits(device: torch.device) -> DeviceTraits:
    """Those of a device of which nothing is said."""
    return DeviceTraits()


Margins: TypeAlias = dict[IntExpr, tuple[IntExpr, IntExpr]]
"""By the stride of a dim: its size, and the size up to which there are zeros behind."""


@dataclass
class Context:
    """Grows while the graph's nodes are lowered in order."""

    options: InductorOptions
    takes: Callable[[Template], bool] = refuse  # whether a template's device has a back end that takes it
    traits_of: Callable[[torch.device], DeviceTraits] = plain_traits
    buffers: dict[str, Buffer] = field(default_factory=dict)
    margins: dict[str, Margins] = field(default_factory=dict)  # of buffers that have some
    operations: list[Operation] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    by_reference: list[tuple[str, tuple[UserFrame, ...]]] = field(default_factory=list)  # prims, and whose lines
    node: fx.Node | None = None
    inline: bool = False  # the node is of a graph of which nothing is stored
    _names: int = 0

    # names and buffers ----------------------------------------------------------------------------------------
    def fail(self, reason: str) -> LoweringError:
        """The error that names the node at work and the user's lines behind it."""
        node = self.node
        return LoweringError(
            node.format_node() or str(node) if node is not None else "?",
            reason,
            self.frames(),
        )

    def frames(self) -> tuple[UserFrame, ...]:
        """The user's lines behind the node at work, outermost first."""
        return tuple(self.node.meta.get("stack", ())) if self.node is not None else ()

    def origin(self) -> tuple[str, ...]:
        """The name of the node at work, for kernels to bear."""
        return () if self.node is None else (self.node.name,)

    def new_name(self, prefix: str) -> str:
        """A name that nothing of the graph has."""
        self._names += 1
        return f"{prefix}{self._names - 1}"

    def new_buffer(
        self, shape: Index, dtype: torch.dtype, device: torch.device, strides: Index | None = None
    ) -> Buffer:
        """A buffer of this layout, in elements; row-major unless strides are given."""
        buffer = Buffer(self.new_name("buf"), dtype, device, shape, strides or contiguous_strides(shape))
        self.buffers[buffer.name] = buffer
        return buffer

    def kernel(
        self, device: torch.device, axes: tuple[Axis, ...], stages: Sequence[Stage], scatters: bool = False
    ) -> Kernel:
        """Adds a kernel to the operations."""
        made = Kernel(self.new_name("op"), device, axes, tuple(stages), self.buffers, self.origin(), scatters=scatters)
        self.operations.append(made)
        return made

    # values ---------------------------------------------------------------------------------------------------
    def lazy(
        self,
        shape: Index,
        dtype: torch.dtype,
        device: torch.device,
        load: Load,
        *,
        of: Sequence[TensorValue] = (),
        cost: int = 1,
        heavy: bool = False,
        narrower: TensorValue | None = None,
    ) -> TensorValue:
        """A computation from other values."""
        reads: frozenset[str] = frozenset().union(*(v.reads for v in of)) if of else frozenset()
        total = cost + sum(v.cost for v in of)
        return TensorValue(shape, dtype, device, Lazy(load, total, reads, heavy or any(v.heavy for v in of), narrower))

    def strided(self, buffer: Buffer) -> TensorValue:
        """The whole of a buffer."""
        return TensorValue(buffer.shape, buffer.dtype, buffer.device, Strided(buffer.name, buffer.strides))

    def realize(self, value: TensorValue, strides: Index | None = None) -> Strided:
        """Makes sure that the value lies in memory (with the given strides, if it does not lie there yet)."""
        if isinstance(value.data, Lazy):
            laid = strides or dense(value.shape, value.layout)
            buffer = self.new_buffer(value.shape, value.dtype, value.device, laid)
            self.write(buffer, value)
            value.data = Strided(buffer.name, buffer.strides)
        return value.data

    def store(self, value: TensorValue) -> None:
        """Makes sure that reading the value computes nothing again.

        The conversion of a narrower value is stored as that one, and whoever reads it converts: memory costs more than
        that. Who wants this very value in memory calls `realize`.
        """
        narrower = value.narrower
        if narrower is None:
            self.realize(value)
            return
        narrower.hint = value.hint if narrower.hint is None else narrower.hint
        self.store(narrower)

        def load(index: Index, ops: Ops) -> int:
            return ops.to_dtype(narrower.load(index, ops), value.dtype, narrower.dtype)

        value.data = Lazy(load, narrower.cost + 1, narrower.reads, narrower=narrower)

    def copy(self, value: TensorValue) -> TensorValue:
        """The value of a strided one in memory of its own, with the same strides."""
        assert isinstance(value.data, Strided)
        buffer = self.new_buffer(value.shape, value.dtype, value.device, value.data.strides)
        self.write(buffer, value)
        return self.strided(buffer)

    def realize_exactly(self, value: TensorValue, strides: Index) -> TensorValue:
        """A value in memory with exactly these strides, also where they address nothing: itself, or a copy. Raises
        LoweringError where a value that is not stored yet cannot have them."""
        data = value.data
        if isinstance(data, Strided) and not same_strides(value.shape, data.strides, strides):
            buffer = self.new_buffer(value.shape, value.dtype, value.device, strides)
            self.write(buffer, value)
            return self.strided(buffer)
        stored = self.realize(value, strides)
        if not same_strides(value.shape, stored.strides, strides):
            raise self.fail(f"strides {strides} are not those of {stored}")
        if stored.strides == strides:
            return value
        return TensorValue(value.shape, value.dtype, value.device, replace(stored, strides=strides), value.hint)

    def write(
        self,
        buffer: Buffer,
        value: TensorValue,
        strides: Index | None = None,
        offset: IntExpr = ZERO,
    ) -> Kernel:
        """buffer[offset + i*strides] = value[i], for all i."""
        axes, index = space(value.shape), space_index(value.shape)
        recorder = Recorder({a.name: a.size for a in axes})
        loaded = value.load(index, recorder)
        recorder.store(buffer.name, dot(index, buffer.strides if strides is None else strides, offset), loaded)
        return self.kernel(value.device, axes, [Stage("outer", recorder.body())])

    def reduction(
        self,
        value: TensorValue,
        dims: Sequence[int],
        kind: ReductionKind,
        dtype: torch.dtype,
        finish: Callable[[int, Recorder, Index], int] | None = None,
        transform: Load | None = None,
        position: Callable[[Index], IntExpr] | None = None,
    ) -> TensorValue:
        """Reduces `value` (seen through `transform`) over dims; the result keeps them with size one."""
        shape = value.shape
        axes, index = space(shape, dims), space_index(shape)
        ranges = {a.name: a.size for a in axes}
        inner = Recorder(ranges)
        key = self.new_name("r")
        loaded = transform(index, inner) if transform is not None else value.load(index, inner)
        if position is None:
            inner.reduce(kind, key, loaded)
        else:
            inner.reduce(kind, key, loaded, inner.index_expr(position(index), torch.int64))
        kept = tuple(exprs([1])[0] if d in dims else s for d, s in enumerate(shape))
        buffer = self.new_buffer(kept, dtype, value.device)
        outer = Recorder(ranges)
        outer_index = tuple(ZERO if d in dims else i for d, i in enumerate(index))
        result = outer.carried(key, torch.int64 if position is not None else inner.dtype(loaded))
        if finish is not None:
            result = finish(result, outer, outer_index)
        outer.store(buffer.name, dot(outer_index, buffer.strides), result)
        self.kernel(value.device, axes, [Stage("inner", inner.body()), Stage("outer", outer.body())])
        return self.strided(buffer)

    def scatter(
        self,
        buffer: Buffer,
        shape: Index,
        target: Callable[[Index, Recorder], IntExpr],
        values: Load,
        mode: StoreMode,
        device: torch.device,
    ) -> None:
        """buffer[target(i)] (mode)= values(i) for all i of `shape`, in row-major order where the order matters."""
        axes, index = space(shape), space_index(shape)
        recorder = Recorder({a.name: a.size for a in axes})
        place = target(index, recorder)
        recorder.store(buffer.name, place, values(index, recorder), mode)
        self.kernel(device, axes, [Stage("outer", recorder.body())], scatters=True)

    def realize_as_eager(self, value: TensorValue) -> TensorValue:
        """The value in memory as eager lays it out: rows that are padded stay so, what is broadcast is stored once."""
        data, hint = value.data, value.hint
        if hint is None or (isinstance(data, Strided) and same_strides(value.shape, data.strides, hint)):
            return value
        if not without_overlaps(value.shape, hint):
            return value
        stored = tuple(s if st.terms else ONE for s, st in zip(value.shape, hint, strict=True))
        buffer = self.new_buffer(stored, value.dtype, value.device, hint)
        self.write(buffer, TensorValue(stored, value.dtype, value.device, Lazy(value.load, value.cost, value.reads)))
        laid = TensorValue(value.shape, value.dtype, value.device, Strided(buffer.name, hint))
        if isinstance(data, Lazy):
            value.data = laid.data
        return laid

    def realize_in_order(self, value: TensorValue) -> TensorValue:
        """The value in memory with its dims in eager's order; holes may be closed."""
        hint, layout = value.hint, value.layout
        if hint is None or layout is None or same_order(value.shape, layout, hint):
            return value
        return self.realize_exactly(value, dense(value.shape, hint))

    def operand(self, value: TensorValue, layout: OperandLayout) -> ViewRef:
        """A value as an operand of an ATen call that looks at how its operands lie in memory."""
        if layout == "exact":
            view, hint = self.reference(self.realize_as_eager(value)), value.hint
            if hint is None or not same_strides(value.shape, view.strides, hint):
                return view
            return replace(view, strides=hint)  # those of dims of size one, too, for an operator may look at them
        if layout == "order":
            value = self.realize_in_order(value)
        return self.reference(value)

    def reference(self, value: TensorValue) -> ViewRef:
        """The value as an operand of an ATen call."""
        data = self.realize(value)
        return ViewRef(data.buffer, value.shape, data.strides, data.offset)

    def extern(
        self,
        op: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        results: Sequence[object],
        layout: OperandLayout = "order",
    ) -> list[TensorValue | None]:
        """Calls an op on values in memory that keep this much of eager's layout.

        `results` are the metas of its results, one entry each, None for unused.
        """
        reads: dict[str, None] = {}

        def lift(arg: object) -> object:
            if isinstance(arg, TensorValue):
                ref = self.operand(arg, layout)
                reads[ref.buffer] = None
                return ref
            if isinstance(arg, (tuple, list)):
                return type(arg)(lift(a) for a in arg)
            return arg

        lifted = tuple(lift(a) for a in args)
        lifted_kwargs = tuple((k, lift(v)) for k, v in kwargs.items())
        outputs: list[TensorValue | None] = []
        for meta in results:
            if not isinstance(meta, (TensorSpec, torch.Tensor)):
                outputs.append(None)
                continue
            buffer = self.new_buffer(exprs(meta.shape), meta.dtype, torch.device(meta.device), exprs(meta.stride()))
            outputs.append(self.strided(buffer))
        names = tuple(o.data.buffer if o is not None else None for o in outputs)  # type: ignore[union-attr]
        told = self.frames(), self.origin()
        call = ExternCall(self.new_name("call"), op, lifted, lifted_kwargs, names, tuple(reads), *told)
        self.operations.append(call)
        return outputs


def same_strides(shape: Index, a: Index, b: Index) -> bool:
    """Whether two strides address a shape alike; those of dims of size one do not count."""
    return all(x == y or s.as_int() == 1 for s, x, y in zip(shape, a, b, strict=True)) or any(
        s.as_int() == 0 for s in shape
    )


@lru_cache(maxsize=MOST_SHAPES)
def same_order(shape: Index, a: Index, b: Index) -> bool:
    """Whether two strides surely lay out the dims of a shape in one order; those of size one do not count."""
    if same_strides(shape, a, b):
        return True
    wide = [d for d, size in enumerate(shape) if size.as_int() != 1]
    for i, j in combinations(wide, 2):
        found = [(at_least(s[i], s[j], shape), at_least(s[j], s[i], shape)) for s in (a, b)]
        if found[0] != found[1] or not any(found[0]):
            return False
    return True


def without_overlaps(shape: Index, strides: Index) -> bool:
    """Whether no two elements surely share a place, other than those of dims with stride zero, which share all."""
    rest = [(s, st) for s, st in zip(shape, strides, strict=True) if st.terms and s.as_int() != 1]
    reach = ONE  # places that the dims so far take
    while rest:
        for k, (size, stride) in enumerate(rest):
            further = reach + (size - ONE) * stride
            others = [other for _, other in (*rest[:k], *rest[k + 1 :])]
            if at_least(stride, reach, shape) and all(at_least(other, further, shape) for other in others):
                reach = further
                del rest[k]
                break
        else:
            return False
    return True


def dense(shape: Index, hint: Index | None) -> Index:
    """Strides without holes that lay the dims out in the order of `hint`; row-major ones where it tells none."""
    plain = contiguous_strides(shape)
    if hint is None or hint == plain or _is_dense(shape, hint):
        return plain if hint is None else hint
    wide = [d for d, size in enumerate(shape) if size.as_int() != 1]
    if not all(hint[d].terms for d in wide) or not without_overlaps(shape, hint):
        return plain
    return in_order_of(shape, hint)


def order_like(shape: Index, like: TensorValue) -> Index | None:
    """Strides for a shape in the order of another value of its rank; None where that tells no order."""
    wide = [d for d, size in enumerate(like.shape) if size.as_int() != 1]
    if like.layout is None or len(wide) < 2 or not all(like.layout[d].terms for d in wide):
        return None
    return in_order_of(shape, like.layout, like.shape)


@lru_cache(maxsize=MOST_SHAPES)
def in_order_of(shape: Index, hint: Index, of: Index | None = None) -> Index:
    """Strides without holes for a shape, in the order of those of another (`of`) of its rank."""
    sizes = shape if of is None else (*shape, *of)
    wide = [d for d, size in enumerate(shape) if size.as_int() != 1]
    order: list[int] = []  # innermost first
    while len(order) < len(wide):
        rest = [d for d in wide if d not in order]
        order += [d for d in rest if all(at_least(hint[other], hint[d], sizes) for other in rest)][:1] or rest[-1:]
    strides, step = list(hint), ONE
    for d in order:
        strides[d] = step
        step = step * shape[d]
    for d in range(len(shape)):  # a dim of size one stays where it was among the others: ATen looks at its stride too
        if d not in wide:
            strides[d] = next((strides[o] for o in order if at_least(hint[o], hint[d], sizes)), step)
    return tuple(strides)


def _is_dense(shape: Index, strides: Index) -> bool:
    rest = [(st, s) for s, st in zip(shape, strides, strict=True) if s.as_int() != 1]
    step = ONE
    while rest:
        found = next((i for i, (st, _) in enumerate(rest) if st == step), None)
        if found is None:
            return False
        step = step * rest.pop(found)[1]
    return True
