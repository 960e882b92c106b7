"""What tracing a program needs beside PyTorch's functionalization, whose region and verbs are primtorch's: questions
about wrapped tensors, histories of non-leaves, and in-place calls that functionalization gets wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from aotautograd.eager_errors import USER_ERRORS, eager_error
from aotautograd.errors import AotAutogradError, UnsupportedMutation
from aotautograd.history import has_history
from aotautograd.layouts import KeptLayouts, WithStrides
from aotautograd.present_views import PresentViews, may_change
from aotautograd.schemas import Values
from aotautograd.symbolic_numbers import SYMBOLIC_RULES
from aotautograd.versions import set_version, version_of
from primtorch.effects import (
    RESTRIDES,
    asked_inplace,
    outs_of,
    overload_of,
    place_of_inplace,
    writes_first,
    written_by,
    written_statistics,
)
from primtorch.errors import DataDependentValue, PrimTorchError
from primtorch.fake import lstm
from primtorch.functionalize import unwrap, wrap
from primtorch.layout import written_alike
from primtorch.out_arguments import land
from primtorch.schemas import UserFrame
from primtorch.spec import Size
from primtorch.symbolic import hint_of
from primtorch.symbolic.numbers import is_symbolic
from primtorch.warned import called_at

WORDED = "_worded_by_eager"
Called: TypeAlias = Callable[..., object]
"""What a torch-function mode is told was called: a function of torch, a method, an overload."""


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """The caller's hooks on saved tensors are for what a call saves, not for what tracing it does."""
    autograd = torch._C._autograd
    taken: list[tuple[object, object]] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def has_size(t: torch.Tensor, wanted: torch.Tensor | Sequence[Size] | int) -> bool:
    """Whether a tensor has the size that it would be given, or that of the other tensor; decided without a guard."""
    sizes = wanted.shape if isinstance(wanted, torch.Tensor) else (wanted,) if isinstance(wanted, int) else wanted
    return written_alike(t.shape, sizes)


def is_wrapped(t: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is one of functionalization's own tensors."""
    return isinstance(t, torch.Tensor) and torch._is_functional_tensor(t)


def storage_was_replaced(outer: torch.Tensor) -> bool:
    """True after `set_` or a `.data` assignment."""
    return bool(torch._functionalize_was_storage_changed(outer))


class NonLeaf(torch.autograd.Function):
    """Gives a non-leaf input its own history without recording an operator, so that it may be written in grad mode."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return wrap(unwrap(leaf))

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class OwnTangent(torch.autograd.Function):
    """Hands the gradient that comes for an output on as a tensor of which nobody else knows, as it is when a loss is
    behind that output: autograd keeps what it alone holds."""

    @staticmethod
    def forward(ctx: object, output: torch.Tensor) -> torch.Tensor:
        return wrap(unwrap(output))

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return wrap(unwrap(grads[0]))


def reads_data(func: Called, args: tuple[object, ...]) -> bool:
    """Whether the call reads memory of a traced tensor, which has none: torch does not see that."""
    return func in _READS_DATA and is_wrapped(args[0])


_READS_DATA = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})


_NO_PLACE = -1  # of what is no input of the program


class InPlaceCalls(TorchFunctionMode):
    """Raises what eager raises for writes to a tensor that overlaps itself, which C++ functionalization turns into
    arithmetic on its base without an error, and makes sure that out= tensors are written."""

    def __init__(
        self,
        inputs: Sequence[object],
        with_strides: WithStrides,
        symbolic: bool,
        user_frames: Callable[[], Sequence[UserFrame]],
    ) -> None:
        self.user_frames = user_frames
        self.layouts = KeptLayouts(inputs, with_strides)
        self.inputs = {id(value): place for place, value in enumerate(inputs)}  # which live as long as the trace
        self.written_at: dict[int, int] = {}  # by their places: the number of autograd's next node at the last write
        self.present = PresentViews()
        self.reshaped: set[int] = set()  # memories of which a view was given another shape without autograd's knowledge
        self.grad_mode = self.with_histories = torch.is_grad_enabled()
        self.unknown: set[int] = set()  # where they are not asked for: memories of what was given another shape
        self.symbolic = symbolic

    def __torch_function__(
        self, func: Called, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if self.grad_mode != torch.is_grad_enabled() and self.present.stand_for((args, kwargs)):
            self._refuse_function()
        args, kwargs = self.present.of((args, kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self.grad_mode = args[0]
        try:
            return self.present.behind(self._call(func, args, kwargs))
        except USER_ERRORS as error:
            if isinstance(error, (AotAutogradError, PrimTorchError)) or hasattr(error, WORDED):
                raise
            better = eager_error(func, args, kwargs)
            if better is None:
                raise
            setattr(better, WORDED, True)  # a function that calls another has it for its own error
            raise better from None

    def _call(self, func: Called, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        statistics = [t for t in written_statistics(func, args, kwargs) if is_wrapped(t)]
        parts = [t for t in statistics if t._is_view() or id(t) not in self.inputs]
        if parts:
            return self._with_own_statistics(parts, func, args, kwargs)
        called = overload_of(func, args, kwargs) or func
        name = getattr(func, "__name__", "").partition(".")[0]  # an overload's has the overload in it
        writes = name not in _NO_WRITE
        if writes and args and isinstance(args[0], torch.Tensor) and writes_first(called, args, kwargs):
            overlaps = _item_overlaps(args) if name == "__setitem__" else _overlaps_itself(args[0])
            if overlaps:
                raise RuntimeError(_OVERLAP)
            _update_history(args[0])
        if self.unknown and torch.is_grad_enabled() and name != "__get__":
            self._refuse_unknown_history((args, kwargs))
        written = written_by(called, args, kwargs) if writes else []
        if not written:
            return self._reshape(func, name, args, kwargs) if name in _SHAPES else self._run(func, name, args, kwargs)
        number = torch._C._autograd._get_sequence_nr()
        for tensor in written:
            place = self.inputs.get(id(tensor), self.inputs.get(id(tensor._base)))
            if place is not None:
                self.written_at[place] = number
        kept = self.layouts.before(written)
        before = {id(t): unwrap(t) for t in outs_of(kwargs) if is_wrapped(t)}
        result = self._run(func, name, args, kwargs)
        if len(before) == len(outs_of(kwargs)):
            land(func, args, kwargs, outs_of(kwargs), lambda t: unwrap(t) is before[id(t)])
        self.layouts.after(kept)
        if self.reshaped:
            self._refuse_lost_history(written)
        return result

    def _with_own_statistics(
        self, parts: Sequence[torch.Tensor], func: Called, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A normalisation that updates what may be parts of other tensors: functionalization does not see that it
        writes, and autograd does not tell of all views (of a detached one, say)."""
        with torch.no_grad():
            own = {id(t): t.clone() for t in parts}
        self.inputs |= {id(t): _NO_PLACE for t in own.values()}
        try:
            result = self._call(func, *pytree.tree_map(lambda t: own.get(id(t), t), (args, kwargs)))
        finally:
            for t in own.values():
                del self.inputs[id(t)]
        for t in parts:
            version = version_of(t) + version_of(own[id(t)])  # not every such write counts
            with torch.no_grad():
                self._call(torch.Tensor.copy_, (t, own[id(t)]), {})
            set_version(t, version)
        return result

    def _reshape(self, func: Called, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call that changes what a tensor is, and not its elements. Without grad mode autograd is not told."""
        target = args[0] if args else None
        if not is_wrapped(target):
            return self._run(func, name, args, kwargs)
        if name == "detach_":
            known = self.present.behind(target) is not target and not self.present.is_view(target)
            return self.present.detach(target) if known else self._run(func, name, args, kwargs)
        if torch.is_grad_enabled():
            _update_history(target)
            return self.present.change(name, args, kwargs) if may_change(target) else func(*args, **kwargs)
        if not self.with_histories:
            self.unknown.add(target.untyped_storage()._cdata)
            if target.requires_grad and target._is_view() and not has_history(target):
                return self.present.change_without_history(name, args, kwargs)
            with torch.enable_grad():
                return self.present.change(name, args, kwargs)
        result = self._run(func, name, args, kwargs)
        if target._is_view():
            self.reshaped.add(target.untyped_storage()._cdata)
        return result

    def _refuse_function(self) -> None:
        """Nothing but the body of an autograd.Function runs without grad mode where the program did not turn it off.
        The function's history begins at the tensors that it was called with, past this mode."""
        raise UnsupportedMutation(
            "an autograd.Function takes a tensor that was given another shape in place; "
            "take a view of that shape instead"
        )

    def _refuse_unknown_history(self, values: object) -> None:
        """In eager the gradient would come in the shape that the tensor was given under no_grad."""
        for t in pytree.tree_leaves(values):
            if is_wrapped(t) and t.requires_grad and t.untyped_storage()._cdata in self.unknown:
                raise UnsupportedMutation(
                    "a tensor that needs a gradient was given another shape in place under no_grad, and is used with "
                    "grad mode on; take a view of that shape instead"
                )

    def _refuse_lost_history(self, written: Sequence[torch.Tensor]) -> None:
        """Autograd takes the views of a functional tensor again after a write, in the shape that they were made in."""
        for t in written:
            if t.requires_grad and t.untyped_storage()._cdata in self.reshaped:
                raise UnsupportedMutation(
                    "a view that needs a gradient was given another shape in place, and then written to; "
                    "take a view of that shape instead"
                )

    def _run(self, func: Called, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if reads_data(func, args):
            remedy = "Give what is read to the program as an input, or keep this part out of it."
            raise DataDependentValue(f"Tensor.{name}()", "the program is traced without data", remedy)
        if name == "tensor_split" and isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            return func(args[0], _numbers(args[1]), *args[2:], **kwargs)
        if name in ("resize_", "resize_as_") and len(args) == 2 and has_size(*args):
            return args[0]
        if name == "bernoulli" and "out" not in kwargs:
            args = (
                args[0].contiguous(),
                *args[1:],
            )  # row by row, whatever its strides; in place it is drawn as it lies
        if func is torch.lstm:
            return lstm(*args, **kwargs)
        rule = SYMBOLIC_RULES.get(func) if self.symbolic else None
        if rule is not None and any(map(is_symbolic, (*args, *kwargs.values()))):
            return rule(*args, **kwargs)
        if func in _OF_A_KIND and args:
            args = (torch.empty((), dtype=args[0].dtype, device=args[0].device), *args[1:])
        fill = _FILLS.get(func) if "out" in kwargs else None
        if fill is not None and _sizes(args, kwargs) == tuple(kwargs["out"].shape):
            return fill(kwargs["out"], kwargs)
        if func in _PRODUCTS and self.symbolic and isinstance(kwargs.get("out"), torch.Tensor):
            return _product_into(func, args, kwargs)
        if self.symbolic and args and _is_short_float_of_symbolic_size(args[0]):
            compute = _out_of_place(func, name, args, kwargs)
            if compute is not None:
                return _in_place_by_value(compute, func, args, kwargs)
        return called_at(self.user_frames(), func, args, kwargs)


def _is_short_float_of_symbolic_size(t: object) -> bool:
    return (
        isinstance(t, torch.Tensor)
        and t.dtype in (torch.bfloat16, torch.float16)
        and any(isinstance(size, torch.SymInt) for size in t.shape)
    )


def _out_of_place(func: Called, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Called | None:
    """What gives the values that a built-in or a function of torch.nn writes to its first argument, if it does."""
    if type(func) is FunctionType:
        if not asked_inplace(func, args, kwargs):
            return None
        place = place_of_inplace(func)
        return lambda *given, **named: func(*given[:place], **{**named, "inplace": False})
    if name[-1:] != "_" or name[-2:] == "__" or not hasattr(torch.ops.aten, name):
        return None
    return _BY_VALUE.get(name) or getattr(torch.ops.aten, name[:-1], None)


def _in_place_by_value(compute: Called, func: Called, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Computes the new values and copies them. Functionalization itself first tries the call on a tensor without data,
    where torch computes in float32 what it has in 16 bits: its copy reads the strides as numbers."""
    target = args[0]
    before = target.clone() if torch.is_grad_enabled() and target.requires_grad else target  # for the derivative
    result = compute(before, *args[1:], **kwargs)
    if not isinstance(result, torch.Tensor) or not has_size(target, result) or result.dtype != target.dtype:
        return func(*args, **kwargs)
    return target.copy_(result)


# Where the operator of that name without the underscore is another, or takes its arguments in another order.
_BY_VALUE: dict[str, Called] = {"normal_": torch.ops.aten.normal_functional, "polygamma_": torch.Tensor.polygamma}


# They read no more of their tensor than its type and device, which they take from its dispatch keys. A tensor with
# symbolic sizes bears another key.
_OF_A_KIND: frozenset[object] = frozenset({torch.Tensor.new, torch.Tensor.new_tensor})  # type: ignore[attr-defined]

# Factories that resize out= before they fill it: what they do to one that has its size.
_FILLS: dict[Called, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {
    torch.randn: lambda out, kwargs: out.normal_(generator=kwargs.get("generator")),
    torch.empty: lambda out, kwargs: out,
}

# With out=, torch 2.11's C++ programs of these read its number of elements as a number.
_PRODUCTS: frozenset[object] = frozenset({torch.matmul, torch.Tensor.matmul, torch.linalg.matmul})


def _product_into(func: Called, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
    """The product written to an out= that is of its kind and needs no resizing; what eager refuses, it refuses."""
    out = kwargs["out"]
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    recorded = torch.is_grad_enabled() and any(value.requires_grad for value in operands)
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if recorded or not isinstance(result, torch.Tensor) or not has_size(out, result):
        return func(*args, **kwargs)
    return out.copy_(result) if (out.dtype, out.device) == (result.dtype, result.device) else func(*args, **kwargs)


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Size, ...]:
    """The sizes that a factory was given: one by one, as a sequence, or by name."""
    given = (kwargs["size"],) if "size" in kwargs else args
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


_SHAPES = RESTRIDES | {"detach_"}
_NO_WRITE = _SHAPES | {"requires_grad_", "resize_", "resize_as_", "set_", "retain_grad", "share_memory_", "rename_",
                       "__get__", "__set__"}  # fmt: skip
_OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)


def _numbers(t: torch.Tensor) -> list[int] | int:
    """The whole numbers in a tensor of 0 or 1 dims; the operator would read them from memory, which is not there."""
    return [int(n.item()) for n in t.unbind()] if t.dim() else int(t.item())


def _overlaps_itself(t: torch.Tensor) -> bool:
    """A dimension of stride 0 that has more than one element, decided without a guard."""
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if type(stride) is int and stride == 0 and hint_of(size, 2) > 1:
            return True
    return False


def _update_history(t: torch.Tensor) -> None:
    """A view that was written through another one gets its history when somebody asks for it. Autograd's check of
    writes does not ask, and would take it for a leaf."""
    if torch.is_grad_enabled() and t._is_view():
        with contextlib.suppress(RuntimeError):  # what may not be written raises when it is written
            _ = t.grad_fn


def _item_overlaps(args: Values) -> bool:
    """Whether `args[0][args[1]]`, a view, overlaps itself."""
    if not _overlaps_itself(args[0]):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(i, (torch.Tensor, list)) for i in index):
        return True  # advanced indexing writes to the whole tensor
    return _overlaps_itself(args[0].detach()[args[1]])
