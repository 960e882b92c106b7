"""Values and the builder: rules compute on `Value`s, the builder records one FX node for each distinct prim call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem as _getitem
from typing import Any, TypeAlias, overload

import torch
from torch import fx

from primtorch import prims
from primtorch.arguments import Number, Sizes, TensorLike
from primtorch.call_forms import Form, form_of, is_described
from primtorch.layout import broadcast_shapes, certainly_equal, contiguous_strides, product, wrap_dim
from primtorch.nodes import new_node
from primtorch.prims import Prim
from primtorch.promotion import COMPUTE_DTYPE, number_as
from primtorch.spec import Size, TensorSpec, of_numbers
from primtorch.symbolic import ShapeEnv, expr_of, materialize, settled, text_of
from primtorch.symbolic.sym_node import node_of

_ATOMS = frozenset({int, float, bool, type(None), str, complex, torch.dtype, torch.device})
Operand: TypeAlias = "Value | Number"
"""An operand of arithmetic in a rule."""


def _binary(prim: Prim) -> Callable[[Value, Operand], Value]:
    """The method `value.op(other)` of a binary prim: shapes are broadcast, dtypes are one already."""
    return lambda value, other: value.b.binary(prim, value, other)


def _reflected(prim: Prim) -> Callable[[Value, Operand], Value]:
    """The method for `other op value`."""
    return lambda value, other: value.b.binary(prim, other, value)


class Value:
    """A tensor of the graph under construction. Arithmetic broadcasts, but does not promote."""

    __slots__ = ("b", "node", "spec")

    def __init__(self, b: Builder, node: fx.Node, spec: TensorSpec) -> None:
        self.b = b
        self.node = node
        self.spec = spec

    @property
    def shape(self) -> Sizes:
        """Sizes, ints or SymInts."""
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """Where it will lie."""
        return self.spec.device

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.spec.shape)

    def numel(self) -> Size:
        """How many elements it has."""
        return product(self.spec.shape)

    def dim(self, dim: int, rank: int | None = None) -> int:
        """A dimension as a non-negative int. Raises IndexError as eager does."""
        return wrap_dim(dim, len(self.spec.shape) if rank is None else rank)

    def __neg__(self) -> Value:
        return self.b.emit(prims.neg, self)

    def __invert__(self) -> Value:
        return self.b.emit(prims.bitwise_not, self)

    __add__ = __radd__ = _binary(prims.add)
    __sub__, __rsub__ = _binary(prims.sub), _reflected(prims.sub)
    __mul__ = __rmul__ = _binary(prims.mul)
    __truediv__, __rtruediv__ = _binary(prims.div), _reflected(prims.div)
    __floordiv__ = _binary(prims.floor_div)
    __mod__ = _binary(prims.remainder)
    __pow__ = _binary(prims.pow)
    __and__ = _binary(prims.bitwise_and)
    __or__ = _binary(prims.bitwise_or)
    __xor__ = _binary(prims.bitwise_xor)
    __lt__ = _binary(prims.lt)
    __le__ = _binary(prims.le)
    __gt__ = _binary(prims.gt)
    __ge__ = _binary(prims.ge)
    eq = _binary(prims.eq)
    ne = _binary(prims.ne)
    maximum = _binary(prims.maximum)
    minimum = _binary(prims.minimum)

    def map(self, prim: Prim) -> Value:
        """A unary prim of this value."""
        return self.b.emit(prim, self)

    def to(self, dtype: torch.dtype) -> Value:
        """Converted to a dtype; itself where it has that one."""
        if self.spec.dtype is dtype:
            return self
        return self.b.emit(prims.convert_element_type, self, dtype)

    def compute(self) -> Value:
        """This value in the dtype in which arithmetic on it is done."""
        wide = COMPUTE_DTYPE.get(self.spec.dtype)
        return self if wide is None else self.to(wide)

    def expand(self, shape: Sequence[Size]) -> Value:
        """Broadcast to a shape; itself where that is certainly its own."""
        if _is_already(self.spec.shape, shape):
            return self
        return self.b.emit(prims.expand, self, tuple(shape))

    def reshape(self, shape: Sequence[Size]) -> Value:
        """The same elements in row-major order in another shape, which has no -1."""
        if _is_already(self.spec.shape, shape):
            return self
        return self.b.emit(prims.reshape, self, tuple(shape))

    def permute(self, dims: Sequence[int]) -> Value:
        """Dim i of the result is dim `dims[i]`, non-negative."""
        if tuple(dims) == tuple(range(self.rank)):
            return self
        return self.b.emit(prims.permute, self, tuple(dims))

    def transpose(self, a: int, b: int) -> Value:
        """Two dims exchanged; negative ones count from the last."""
        order = list(range(self.rank))
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def unsqueeze(self, *dims: int) -> Value:
        """Dims of size 1 at these places of the result."""
        return self.b.emit(prims.unsqueeze, self, tuple(sorted(dims))) if dims else self

    def squeeze(self, *dims: int) -> Value:
        """Without these dims, each of size 1."""
        return self.b.emit(prims.squeeze, self, tuple(sorted(dims))) if dims else self

    def slice(self, dim: int, start: Size, stop: Size, step: Size = 1) -> Value:
        """Elements `start`, `start + step`, ... before `stop` along a dim; both lie within it."""
        size = self.spec.shape[dim]
        if type(start) is int and start == 0 and type(step) is int and step == 1 and _is_all(stop, size):
            return self
        return self.b.emit(prims.slice, self, dim, start, stop, step)

    def select(self, dim: int, index: Size) -> Value:
        """The element at a non-negative index along a dim, which goes."""
        return self.slice(dim, index, index + 1).squeeze(dim)

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """The sum over non-negative dims, in this dtype; itself over none."""
        return self.reduce(prims.sum, dims, keepdim)

    def reduce(self, prim: Prim, dims: Sequence[int], keepdim: bool = False) -> Value:
        """A reduction over non-negative dims, which stay as 1 with `keepdim`; itself over none."""
        if not dims:
            return self
        return self.b.emit(prim, self, tuple(dims), keepdim)

    def mean(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """The sum over the dims by the number of elements that it is of."""
        count = product([self.spec.shape[d] for d in dims])
        return self.sum(dims, keepdim) / count


def tensor_among(*operands: Operand) -> Value:
    """The first tensor among operands of which one is no number."""
    for operand in operands:
        if isinstance(operand, Value):
            return operand
    raise TypeError("one of the operands must be a tensor")


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal; of symbols this is asked for and guarded."""
    return a is b or bool(a == b)


def _is_all(stop: Size, size: Size) -> bool:
    """Whether a slice from zero to here is the whole of a dim. Of symbols this is no question: an answer would hold for
    some sizes, and the slice is right for all."""
    return stop is size or expr_of(stop) == expr_of(size)


def _is_already(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(x is y or certainly_equal(x, y) for x, y in zip(a, b, strict=True))


def _frozen(argument: Any) -> object:
    """A hashable stand-in that tells 1, 1.0, True and -0.0 apart."""
    kind = type(argument)
    if kind is int or kind is str or argument is None:
        return argument
    if kind is Value:
        return argument.node
    if kind is tuple or kind is list or isinstance(argument, (tuple, list)):
        return tuple([a if type(a) is int else _frozen(a) for a in argument])
    if kind is torch.SymInt:
        return ("sym", str(expr_of(argument)))
    if kind is torch.SymFloat:
        return ("sym", str(argument))
    return (kind, str(argument))


Emitter = Callable[
    ["Builder", Prim, tuple[object, ...], Mapping[str, object]],
    "tuple[Callable[..., object], tuple[object, ...], dict[str, object]]",
]


def nowhere(device: torch.device) -> bool:
    """Said of a device whatever it is: no."""
    return False


class Builder:
    """Records prims in an FX graph.

    `meta` (but never "val") is put on every node made. Under `meta["recomputed"]` (a checkpoint computes a value again
    so that it need not be kept) a call never gives what an equal one without it gave.
    `source` is the ATen node under lowering, or None; `val` is what it says of its result, or None.
    `rewrite` may turn a prim call into (target, args, kwargs) of another opset.
    `walks_windows` is what `lower` was told of devices.
    `offsets` says of positions of maxima which offsets in which windows they were computed from.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rewrite: Emitter | None = None,
        walks_windows: Callable[[torch.device], bool] = nowhere,
    ) -> None:
        self.graph = graph
        self.walks_windows = walks_windows
        self.meta: Mapping[str, object] = {"stack": ()}
        self.source: fx.Node | None = None
        self.val: Any = None
        self.rewrite = rewrite
        self.symbol_nodes: dict[str, fx.Node] = {}
        self._carriers: dict[str, tuple[fx.Node, int]] = {}  # dimensions of inputs that have a symbol as their size
        self._known: dict[object, object] = {}
        self._metas: dict[Form, object] = {}
        self.offsets: dict[fx.Node, tuple[Value, Sequence[Sizes]]] = {}

    def traced(self, operand: int, value: Value) -> TensorLike:
        """What the ATen graph says of an operand of the node under lowering: its strides are eager's, a value's those
        of the opset."""
        given = self.source.args[operand] if self.source is not None else None
        return given.meta["val"] if isinstance(given, fx.Node) else value.spec

    # --- recording -------------------------------------------------------------------------------
    def emit(self, prim: Prim, *args: object, **kwargs: object) -> Value:
        """One call of a prim that gives a tensor; a call equal to an earlier one gives that one's result.

        An effect is done each time, and a float is read out of a tensor each time: it is a symbol of its own in
        whatever is computed from it, and of floats nothing is known to be equal.
        """
        value: Value = self.call(prim, args, kwargs)
        return value

    def emit_several(self, prim: Prim, *args: object, **kwargs: object) -> Results:
        """`emit` of a prim that gives several tensors."""
        results: Results = self.call(prim, args, kwargs)
        return results

    def call(self, prim: Prim, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """`emit` of any prim: a Value, Results, or a number that depends on data, as its schema says."""
        key: tuple[object, ...] | None = None
        reads_float = "dynamic" in prim.tags and isinstance(self.val, torch.SymFloat)
        if "effect" not in prim.tags and not reads_float:
            key = (prim, "recomputed" in self.meta, *[a.node if type(a) is Value else _frozen(a) for a in args])
            if kwargs:
                key = (*key, tuple((k, _frozen(v)) for k, v in sorted(kwargs.items())))
            known = self._known.get(key)
            if known is not None:
                if "dynamic" in prim.tags and self.val is not None:
                    self._equate(self.val, known)
                return known
        result = self.emit_anew(prim, *args, **kwargs)
        if key is not None:
            self._known[key] = result
        return result

    def emit_anew(self, prim: Prim, *args: object, **kwargs: object) -> Any:
        """One call of a prim, whatever was called before."""
        if "dynamic" in prim.tags and self.val is not None:
            specs = self.val  # the sizes' symbols are those that the rest of the graph knows
        else:
            specs = self._meta(prim, args, kwargs)
        target: Callable[..., object] = prim
        if self.rewrite is not None:
            target, args, kwargs = self.rewrite(self, prim, args, kwargs)
        return self.record(target, args, kwargs, specs, prim.name)

    def _meta(self, prim: Prim, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """What the prim says of its result: once for calls of one form."""
        given = [a.spec if type(a) is Value else _specs(a) for a in args]
        named = {k: _specs(v) for k, v in kwargs.items()} if kwargs else {}
        form = form_of(prim, given, named)
        if form is None:
            return prim.meta(*given, **named)
        known = self._metas.get(form)
        if known is None:
            known = prim.meta(*given, **named)
            if is_described(known):
                self._metas[form] = known
        return known

    def _equate(self, val: Any, known: Any) -> None:
        """`val` describes `known` too: its data-dependent sizes, symbols of their own, are the same numbers."""
        if isinstance(val, (tuple, list)):
            for part, other in zip(val, known, strict=True):
                self._equate(part, other)
            return
        pairs = [(val, known)] if isinstance(val, torch.SymInt) else zip(val.shape, known.spec.shape, strict=True)
        for size, other in pairs:
            if isinstance(size, torch.SymInt) and text_of(size) != text_of(other):
                (size == other).node.expect_true("", 0)  # type: ignore[union-attr]
                self.bind(size, self._size_node(other))

    def record(
        self, target: Callable[..., object], args: object, kwargs: Mapping[str, object], val: object, name: str
    ) -> Any:
        """One node, whatever its target; `val` describes its result."""
        named = {k: self._nodes(v) for k, v in kwargs.items()} if kwargs else kwargs
        node = new_node(self.graph, "call_function", target, self._nodes(args), named, name)
        node.meta.update(self.meta)
        node.meta["val"] = val = with_settled(val) if type(val) is TensorSpec else val
        return self.result(node, val)

    def result(self, node: fx.Node, val: Any) -> object:
        """Values for a node's result; a tuple's elements get their getitem nodes when they are read."""
        if isinstance(val, (tuple, list)):
            return Results(self, node, val)
        if isinstance(val, (torch.SymInt, torch.SymFloat)):
            self.bind(val, node)
            return val
        if val is None or isinstance(val, (int, float, bool)):
            return val if val is None else node
        spec = as_spec(val)
        for dim, size in enumerate(spec.shape):
            if isinstance(size, torch.SymInt):
                self._bind_size(size, node, dim)
        return Value(self, node, spec)

    def bind(self, size: torch.SymInt | torch.SymFloat, node: fx.Node) -> None:
        """Make `node` the source of a symbol when `size` is a symbol alone."""
        name = text_of(size)
        if name.isidentifier():
            self.symbol_nodes.setdefault(name, node)

    def _bind_size(self, size: torch.SymInt, node: fx.Node, dim: int) -> None:
        name = text_of(size)
        if not name.isidentifier() or name in self.symbol_nodes:
            return
        if node.op == "placeholder":  # not at once: a tangent has the size of a result, which says it without one
            self._carriers.setdefault(name, (node, dim))
            return
        self._read_size(name, node, dim)

    def _read_size(self, name: str, node: fx.Node, dim: int) -> None:
        made = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
        made.meta.update(self.meta)
        made.meta["val"] = node.meta["val"].shape[dim]
        self.symbol_nodes[name] = made

    def _size_node(self, size: int | torch.SymInt | torch.SymFloat) -> Any:
        if self._carriers and not isinstance(size, int):
            node = node_of(size)
            for name in node.expr.symbols():
                self._find(name, node.env)
        return materialize(self.graph, size, self.symbol_nodes)

    def _find(self, name: str, env: ShapeEnv) -> None:
        """Reads a symbol off the input that carries it, unless something else gives it or what it is computed from: a
        tangent has its sizes from the forward, which does not have the tangent."""
        if name in self.symbol_nodes:
            return
        roots = env.roots({name})
        if name in self._carriers and not roots <= self.symbol_nodes.keys():
            self._read_size(name, *self._carriers[name])
            return
        for root in roots & self._carriers.keys() - self.symbol_nodes.keys():
            self._read_size(root, *self._carriers[root])

    def _nodes(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is Value or kind is Results:
            return argument.node
        if kind in _ATOMS:
            return argument
        if isinstance(argument, (tuple, list)):
            return tuple([a.node if type(a) is Value else self._nodes(a) for a in argument])
        if kind is torch.SymInt or kind is torch.SymFloat:
            return self._size_node(argument)
        return argument

    # --- arithmetic with broadcasting --------------------------------------------------------------
    def binary(self, prim: Prim, x: Operand, y: Operand) -> Value:
        """A binary prim; operands broadcast, a number takes the tensor's dtype."""
        if isinstance(x, Value):
            if not isinstance(y, Value):
                y = self.number(y, x)
            elif not _is_already(x.spec.shape, y.spec.shape):
                shape = broadcast_shapes(x.spec.shape, y.spec.shape)
                x, y = x.expand(shape), y.expand(shape)
        elif isinstance(y, Value):
            x = self.number(x, y)
        else:
            raise TypeError(f"{prim.name}: one of the operands must be a tensor")
        return self.emit(prim, x, y)

    def number(self, value: Number, like: Value) -> Operand:
        """A number in the kind of a value's dtype; a symbolic one becomes a tensor where a float is needed."""
        dtype = like.spec.dtype
        if isinstance(value, torch.SymInt) and (dtype.is_floating_point or dtype.is_complex):
            return self.full((), value, dtype, like.spec.device).expand(like.spec.shape)
        return number_as(value, dtype)

    def where(self, cond: Value, x: Operand, y: Operand) -> Value:
        """`x` where the condition is true, else `y`; all three are broadcast. Raises TypeError for two numbers."""
        tensors = [v for v in (cond, x, y) if isinstance(v, Value)]
        shape = broadcast_shapes(*(v.spec.shape for v in tensors))
        like = tensor_among(x, y).expand(shape)
        x = x.expand(shape) if isinstance(x, Value) else self.number(x, like)
        y = y.expand(shape) if isinstance(y, Value) else self.number(y, like)
        return self.emit(prims.where, cond.expand(shape), x, y)

    # --- creation ----------------------------------------------------------------------------------
    def full(self, shape: Sequence[Size], value: Number, dtype: torch.dtype, device: torch.device) -> Value:
        """A tensor of one number, which is converted to the dtype."""
        return self.emit(prims.full, tuple(shape), number_as(value, dtype), dtype, device)

    def full_like(self, like: Value, value: Number) -> Value:
        """A tensor of one number, of the shape, dtype and device of another."""
        return self.full(like.spec.shape, value, like.spec.dtype, like.spec.device)

    def iota(
        self, length: Size, device: torch.device, start: Size = 0, step: Size = 1, dtype: torch.dtype = torch.int64
    ) -> Value:
        """`start`, `start + step`, ...: `length` numbers."""
        return self.emit(prims.iota, length, start, step, dtype, device)

    def cat(self, tensors: Sequence[Value], dim: int) -> Value:
        """Tensors of one dtype behind each other along a non-negative dim."""
        return tensors[0] if len(tensors) == 1 else self.emit(prims.cat, tuple(tensors), dim)

    def contiguous_spec(self, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> TensorSpec:
        """The metadata of a row-major tensor; strides are in elements."""
        return TensorSpec(tuple(shape), contiguous_strides(tuple(shape)), dtype, device)


class Results(Sequence[Value]):
    """The results of a call that has several; reading one records its getitem once. Where the operator leaves one out
    (a gradient that nobody asked for) there is None."""

    __slots__ = ("_read", "b", "node", "vals")

    def __init__(self, b: Builder, node: fx.Node, vals: Sequence[object]) -> None:
        self.b = b
        self.node = node
        self.vals = tuple(vals)
        self._read: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self.vals)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Value, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self.vals))))
        if index < 0:
            index += len(self.vals)
        if not 0 <= index < len(self.vals):
            raise IndexError(f"{self.node.name} has {len(self.vals)} results, not {index + 1}")
        if self.vals[index] is None:
            return None
        if index not in self._read:
            node = self.b.graph.create_node("call_function", _getitem, (), {}, name="getitem")
            node.args = (self.node, index)
            node.meta.update(self.node.meta)
            node.meta["val"] = self.vals[index]
            self._read[index] = self.b.result(node, self.vals[index])
        return self._read[index]


def _specs(argument: Any) -> object:
    kind = type(argument)
    if kind is Value:
        return argument.spec
    if kind in _ATOMS:
        return argument
    if isinstance(argument, (tuple, list)):
        return tuple([_specs(a) for a in argument])
    return argument


def as_spec(val: TensorLike) -> TensorSpec:
    """The descriptor of a tensor-like `meta["val"]`."""
    if isinstance(val, TensorSpec):
        return val
    return TensorSpec(tuple(val.shape), tuple(val.stride()), val.dtype, val.device, val.storage_offset())


def with_settled(spec: TensorSpec) -> TensorSpec:
    """The metadata with numbers for the sizes that are settled."""
    if of_numbers(spec):
        return spec
    sizes = (*spec.shape, *spec.strides, spec.offset)
    rank = len(spec.shape)
    known = tuple(map(settled, sizes))
    return TensorSpec(known[:rank], known[rank:-1], spec.dtype, spec.device, known[-1])
