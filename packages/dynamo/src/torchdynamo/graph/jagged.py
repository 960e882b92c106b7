"""Nested tensors of the jagged layout: a graph has their values and offsets, tensors like any other.

While a program is captured, one is a tensor of torch's class around fakes. A call runs torch's own code for it, under
a mode that sees each operator on the values and records that, with autograd as at the call: so graphs hold plain
tensors alone. A ragged length is a symbol that is equal to itself alone, as torch's own number of it is.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nested._internal import nested_tensor as jagged

from primtorch.dispatch_mode import DispatchMode
from primtorch.effects import is_inplace
from primtorch.fake import FakeTensor
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.relation import Truth
from primtorch.symbolic.sym_node import SymNode
from primtorch.wrappers import wrappers_in
from torchdynamo.graph.jagged_attention import attention
from torchdynamo.graph.special_tensors import leaves, refusal
from torchdynamo.interpreter.protocol import MISSING, Escape
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.graph.recorder import Recorder

KIND = jagged.NestedTensor
# Torch's numbers of ragged lengths, by the tensor that tells the rows.
_NUMBERS: MutableMapping[torch.Tensor, torch.SymInt] = jagged._tensor_symint_registry
_SEQLENS = ("min_seqlen", "max_seqlen")

# Torch's code gives out values as `detach`, where its autograd has the history of a nested tensor around it.
_DETACHING = frozenset({"detach", "data"})
# Calls whose derivative is the other conversion; of others that pad rows, torch's derivative is no less its own.
_CONVERTING = frozenset({"to_padded_tensor", "nested_to_padded_tensor", "_nested_from_padded_tensor"})
_MAKERS: dict[str, int] = {"_nested_view_from_jagged": 3, "_nested_from_padded_tensor": -1}
"""Functions that make one of offsets, their second argument; the place of the lengths, if they take these."""


def is_jagged(value: object) -> TypeGuard[jagged.NestedTensor]:
    """Whether a value is a nested tensor of the jagged layout."""
    return type(value) is KIND


def stands_for_one(value: object) -> TypeGuard[jagged.NestedTensor]:
    """Whether a value is what a program sees of one while it is captured, or what torch gives its own functions."""
    return type(value) is KIND and (isinstance(value._values, FakeTensor) or value is jagged._dummy_instance)


def dummy() -> torch.Tensor:
    """The nested tensor that torch's functions are given to find their code; made where nothing makes tensors fake."""
    if jagged._dummy_instance is None:
        with torch._C.DisableTorchFunction(), for_real():
            torch.neg(jagged._nt_view_dummy())  # which imports what torch's code for operators imports
    return jagged._nt_view_dummy()


@contextmanager
def for_real() -> Iterator[None]:
    """A block in which no mode makes tensors fake."""
    modes = []
    while torch._C._len_torch_dispatch_stack():
        modes.append(torch._C._pop_torch_dispatch_stack(None))
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_dispatch_stack(mode)


# -- what compiled code reads and makes ----------------------------------------------------------


_Parts = tuple[torch.Tensor, torch.Tensor | None, int, dict[str, torch.Tensor]]


class _ValuesContext(FunctionCtx):
    """What is kept where values are taken of a nested tensor."""

    parts: _Parts


class _PaddedContext(BackwardCFunction):
    """What is kept where rows are padded: how many there are in all."""

    total: int


class _PackedContext(BackwardCFunction):
    """What is kept where padding is left out: how long a row with it is."""

    size: int


class _Values(torch.autograd.Function):
    """The values of a nested tensor. Torch's own function for it has no second derivative."""

    @staticmethod
    def forward(ctx: _ValuesContext, nested: jagged.NestedTensor) -> torch.Tensor:
        ctx.parts = nested._offsets, nested._lengths, nested._ragged_idx, nested._metadata_cache
        values: torch.Tensor = nested._values.detach()
        return values

    @staticmethod
    def backward(ctx: _ValuesContext, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _Nested.apply(gradient, ctx.parts)  # type: ignore[no-any-return]


class _Nested(torch.autograd.Function):
    """The nested tensor around values."""

    @staticmethod
    def forward(ctx: object, values: torch.Tensor, parts: _Parts) -> torch.Tensor:
        offsets, lengths, ragged_idx, kept = parts
        made: torch.Tensor = KIND(
            values.detach(), offsets, lengths=lengths, _ragged_idx=ragged_idx, _metadata_cache=kept
        )
        return made

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _Values.apply(gradient), None


def values_of(nested: torch.Tensor) -> torch.Tensor:
    """The values of a nested tensor, with its history."""
    with torch._C.DisableTorchFunctionSubclass():
        if not nested.requires_grad:
            return nested._values.detach()  # type: ignore[attr-defined, no-any-return]
        with torch.enable_grad():
            return _Values.apply(nested)  # type: ignore[no-any-return]


def form_of(nested: jagged.NestedTensor) -> tuple[int, bool, tuple[str, ...], bool, bool]:
    """What code relies on of a nested tensor beside its tensors and its sizes."""
    kept = tuple(name for name in _SEQLENS if nested._metadata_cache.get(name) is not None)
    with torch._C.DisableTorchFunctionSubclass():
        grad, leaf = nested.requires_grad, nested.is_leaf
    return nested._ragged_idx, nested._lengths is None, kept, grad, leaf


def min_seqlen(nested: jagged.NestedTensor) -> int:
    """The length of the shortest row that it keeps."""
    return int(nested._metadata_cache["min_seqlen"].shape[0])


def max_seqlen(nested: jagged.NestedTensor) -> int:
    """The length of the longest row that it keeps."""
    return int(nested._metadata_cache["max_seqlen"].shape[0])


def rows_of(value: object) -> object:
    """What says whether two have the same ragged length: the one object that torch keeps for it. `value` is a nested
    tensor, or the offsets or lengths of one."""
    if type(value) is KIND:
        return value._size[value._ragged_idx]
    known = _NUMBERS.get(value) if isinstance(value, torch.Tensor) else None
    return value if known is None else known


def ragged_length(rows: torch.Tensor) -> torch.SymInt:
    """Torch's number for the ragged length of what has these offsets or lengths."""
    return jagged.get_tensor_symint(rows)  # type: ignore[no-any-return, no-untyped-call]


def number_rows(rows: Sequence[torch.Tensor | None]) -> None:
    """Counts ragged lengths as torch does where nested tensors are made: None is one of which nothing is left."""
    for one in rows:
        if one is None:
            jagged._tensor_id_counter += 1
        else:
            ragged_length(one)


def rebuilt(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged_idx: int,
    shortest: int | None,
    longest: int | None,
    fresh: bool,
) -> torch.Tensor:
    """The nested tensor of a result of the graph: to autograd a view of its values, for writes to it are theirs.

    Args:
        fresh: nobody else has the values, so that it need be none where they have no history.
    """
    kept = [None if size is None else torch.zeros(size, 0) for size in (shortest, longest)]
    if fresh and not values.requires_grad:
        named = {name: size for name, size in zip(_SEQLENS, kept, strict=True) if size is not None}
        made: torch.Tensor = KIND(values, offsets, lengths=lengths, _ragged_idx=ragged_idx, _metadata_cache=named)
        return made
    with torch.set_grad_enabled(values.requires_grad or torch.is_grad_enabled()):
        made = torch._nested_view_from_jagged(  # type: ignore[attr-defined]
            values, offsets, dummy(), lengths, ragged_idx, *kept
        )
    if made.grad_fn is not None:
        made.grad_fn.register_hook(_differentiable)
    return made


def _differentiable(
    gradients: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...] | None:
    """The gradient that torch has found of a view's values, with a derivative of its own."""
    if given[0] is None or not given[0].requires_grad:
        return None
    return values_of(given[0]), *gradients[1:]


class _Padded(torch.autograd.Function):
    """Rows side by side, with padding: torch knows its derivative of nested tensors, but not of their values."""

    @staticmethod
    def forward(
        ctx: _PaddedContext, values: torch.Tensor, offsets: torch.Tensor, size: int, padding: float
    ) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        ctx.total = values.shape[0]
        made: torch.Tensor = torch.ops.aten._jagged_to_padded_dense_forward.default(values, [offsets], [size], padding)
        return made

    @staticmethod
    def backward(ctx: _PaddedContext, gradient: torch.Tensor) -> tuple[object, ...]:  # type: ignore[override]
        (offsets,) = ctx.saved_tensors
        return packed(gradient, [offsets], ctx.total), None, None, None


class _Packed(torch.autograd.Function):
    """Rows one after the other, without padding."""

    @staticmethod
    def forward(ctx: _PackedContext, dense: torch.Tensor, offsets: torch.Tensor, total: int | None) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        ctx.size = dense.shape[1]
        made: torch.Tensor = torch.ops.aten._padded_dense_to_jagged_forward.default(dense, [offsets], total)
        return made

    @staticmethod
    def backward(ctx: _PackedContext, gradient: torch.Tensor) -> tuple[object, ...]:  # type: ignore[override]
        (offsets,) = ctx.saved_tensors
        return padded(gradient, [offsets], [ctx.size], 0.0), None, None


def padded(
    values: torch.Tensor, offsets: Sequence[torch.Tensor], sizes: Sequence[int], padding: float = 0.0
) -> torch.Tensor:
    """`aten::_jagged_to_padded_dense_forward`, with a derivative."""
    return _Padded.apply(values, offsets[0], sizes[0], padding)  # type: ignore[no-any-return]


def packed(dense: torch.Tensor, offsets: Sequence[torch.Tensor], total: int | None = None) -> torch.Tensor:
    """`aten::_padded_dense_to_jagged_forward`, with a derivative."""
    return _Packed.apply(dense, offsets[0], total)  # type: ignore[no-any-return]


_WITH_DERIVATIVE: dict[OpOverload, Callable[..., torch.Tensor]] = {
    torch.ops.aten._jagged_to_padded_dense_forward.default: padded,
    torch.ops.aten._padded_dense_to_jagged_forward.default: packed,
}


# -- capture -------------------------------------------------------------------------------------


class RaggedNode(SymNode):
    """The symbol of a ragged length: equal to itself alone, and of no number that a graph could use."""

    __slots__ = ()

    def is_nested_int(self) -> bool:
        return True

    def nested_int(self) -> int:  # type: ignore[override]
        return int(str(self.expr)[1:])

    def nested_int_coeff(self) -> int:
        """How many ragged lengths it stands for: one."""
        return 1

    def eq(self, other: SymNode) -> SymNode:
        return SymNode(Truth(self.expr == other.expr), None, self.env)

    def ne(self, other: SymNode) -> SymNode:
        return SymNode(Truth(self.expr != other.expr), None, self.env)

    def int_(self) -> int:
        raise BreakGraph("special_tensor", "a ragged length is asked for its number")

    def guard_int(self, file: str, line: int) -> int:  # type: ignore[override, valid-type]
        return self.int_()


def _ragged(env: ShapeEnv | None) -> torch.SymInt:
    assert env is not None
    return torch.SymInt(RaggedNode(env.unbacked(min=2).node.expr, None, env))


class Jagged:
    """The nested tensors of one graph."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.know_rows: Callable[[FakeTensor], None] = self.symbol  # called before one is made of offsets or lengths
        self.used = False
        self._alive: list[object] = []
        self._rows: list[weakref.ref[FakeTensor]] = []  # that torch's registry knows by symbols of this graph
        self.numbered: list[FakeTensor] = []  # those of which torch gives a new number at each call, in its order

    def release(self) -> None:
        """Torch's registry forgets the symbols."""
        for rows in self._rows:
            fake = rows()
            if fake is not None:
                _NUMBERS.pop(fake, None)
        self._rows.clear()
        self._alive.clear()
        self.numbered.clear()

    def symbol(self, rows: FakeTensor, same: FakeTensor | None = None) -> None:
        """Gives the offsets or lengths a symbol for their ragged length: a new one, or that of others."""
        if _NUMBERS.get(rows) is None:
            _NUMBERS[rows] = _ragged(self.recorder.mode.shape_env) if same is None else _NUMBERS[same]
            self._rows.append(weakref.ref(rows))

    def rows_of(self, length: torch.SymInt) -> FakeTensor | None:
        """The offsets or lengths that have a ragged length of this graph."""
        rows = (ref() for ref in self._rows if isinstance(length.node, RaggedNode))
        return next((one for one in rows if one is not None and _NUMBERS[one].node.expr == length.node.expr), None)

    def around(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor,
        lengths: torch.Tensor | None,
        ragged_idx: int,
        sizes: Mapping[str, int | torch.SymInt],
    ) -> torch.Tensor:
        """The nested tensor of these fakes."""
        self.used = True
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.recorder.mode:
            kept = {name: torch.zeros(size, 0) for name, size in sizes.items()}
            made: torch.Tensor = KIND(
                values, offsets, lengths=lengths, _ragged_idx=ragged_idx, _metadata_cache=kept or None
            )
        self._alive.append(made)
        self.recorder.wrappers.memories.append(values.memory)  # type: ignore[attr-defined]
        return made

    def dummy(self) -> torch.Tensor:
        """`dummy()`; the program has nested tensors from here on."""
        self.used = True
        return dummy()

    def are_in(self, args: object, kwargs: object) -> bool:
        """Whether nested tensors are among the arguments."""
        return self.used and any(map(is_jagged, leaves((args, kwargs))))

    def run(self, name: str, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """A call with nested tensors: what torch's code for it does is in the graph, and its result is given."""
        if is_inplace(name) or name in _WRITING or "out" in kwargs:
            raise BreakGraph("special_tensor", f"{name}() writes to a nested tensor")
        args, kwargs = self.recorder.adopt_all(args), self.recorder.adopt_all(kwargs)
        if name == "unbind":
            return self._unbind(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            found = attention(self, *args, **kwargs)
            if found is not MISSING:
                return found
        if name in _MAKERS:
            self._know_rows(_MAKERS[name], args, kwargs)
        below, count = _Below(self.recorder, name), jagged._tensor_id_counter
        try:
            with torch.no_grad(), torch._C._EnableTorchFunction(), below:
                result = func(*args, **kwargs)
        except Escape:
            raise
        except Exception as error:
            raise refusal(name, "nested", error) from error
        for leaf in leaves(result):
            if is_jagged(leaf):
                if not stands_for_one(leaf) or not isinstance(rows_of(leaf).node, RaggedNode):  # type: ignore[attr-defined]
                    jagged._tensor_id_counter = count
                    raise BreakGraph("special_tensor", f"{name}() makes a nested tensor of other rows")
                self._alive.append(leaf)
                self.recorder.wrappers.memories.append(leaf._values.memory)  # type: ignore[attr-defined]
        return result

    def is_one(self, value: object) -> TypeGuard[jagged.NestedTensor]:
        """Whether a value is a nested tensor of the graph."""
        return is_jagged(value) and stands_for_one(value)

    def lengths_kept(self, nested: jagged.NestedTensor) -> dict[str, int]:
        """What it keeps of the lengths of its shortest and longest row, by name."""
        kept = nested._metadata_cache or {}
        return {name: kept[name].shape[0] for name in _SEQLENS if kept.get(name) is not None}

    def convert(self, func: OpOverload, args: tuple[Any, ...]) -> Any:
        """A conversion between rows and padding, recorded with a derivative where one is asked for."""
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in _fakes(args))
        return self.recorder.record(_WITH_DERIVATIVE[func] if differentiated else func, args, {})

    def _unbind(self, nested: jagged.NestedTensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """The rows, as views of the values: their lengths are numbers that the graph reads."""
        if dim != 0:
            raise BreakGraph("special_tensor", f"unbind() of a nested tensor along dimension {dim}")
        recorder, along = self.recorder, nested._ragged_idx - 1
        offsets, lengths = nested._offsets, nested._lengths
        values: Any = self.run("values", KIND.values, (nested,), {})
        with recorder.recording():
            int(offsets.shape[0])  # a graph has one number of rows
            sizes = recorder.taken.take("tolist", offsets.diff() if lengths is None else lengths)
            starts = [] if lengths is None else recorder.taken.take("tolist", offsets)
            if sizes is MISSING or starts is MISSING:
                raise BreakGraph("special_tensor", "unbind() of a nested tensor: lengths that the graph cannot read")
            if lengths is None:
                return tuple(values.split(sizes, along))
            return tuple(values.narrow(along, first, size) for first, size in zip(starts, sizes, strict=False))

    def _know_rows(self, place: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        lengths = args[place] if 0 <= place < len(args) else kwargs.get("lengths")
        rows = lengths if lengths is not None else args[1] if len(args) > 1 else kwargs.get("offsets")
        if isinstance(rows, FakeTensor) and _NUMBERS.get(rows) is None:
            self.numbered.append(rows)
            self.know_rows(rows)


_WRITING = frozenset({"retain_grad", "register_hook"})


class _Below(DispatchMode):
    """What torch's code for nested tensors does with their values: recorded, with autograd as it was at the call."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name  # of the call
        self.grad = torch.is_grad_enabled()
        self.keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def __enter__(self) -> Self:
        super().__enter__()
        included, excluded = self.keys
        # Without ADInplaceOrView, which would make a view of what has a history already.
        self.guard = torch._C._ForceDispatchKeyGuard(included, excluded.add(torch._C.DispatchKey.ADInplaceOrView))
        self.guard.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.guard.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if wrappers_in(types):
            return NotImplemented
        if func is torch.ops.aten.detach.default and self.name not in _DETACHING:
            func = torch.ops.aten.alias.default
        recorder = self.recorder
        with torch._C._ForceDispatchKeyGuard(*self.keys), torch.set_grad_enabled(self.grad):
            args, keywords = recorder.adopt_all(args), recorder.adopt_all(dict(kwargs or {}))
            differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in _fakes((args, keywords)))
            call: Callable[..., object] = func
            if differentiated and func in _WITH_DERIVATIVE:
                if self.name not in _CONVERTING:
                    raise BreakGraph("special_tensor", f"a derivative of {self.name}() over rows of several lengths")
                call = _WITH_DERIVATIVE[func]
            result = recorder.record(call, args, keywords)
        for fake in _fakes(result):
            if differentiated and fake.grad_fn is not None and "NotImplemented" in fake.grad_fn.name():
                raise BreakGraph("special_tensor", f"{func} has a derivative on nested tensors alone")
            node = recorder.node_of(fake)
            if node is not None and torch.Tag.nondeterministic_seeded in func.tags:
                made = node.all_input_nodes[0] if node.target is operator.getitem else node
                made.meta["effect"] = True
        return result


def _fakes(value: object) -> Iterator[FakeTensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, FakeTensor))
