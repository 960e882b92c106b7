"""Tensors that wrap others: classes with `__tensor_flatten__` or an entry of their own in the table of flattenings
(`primtorch.flattenings`), whose operators are what `__torch_dispatch__` does.

A `Template` says how such a tensor is made of plain ones. A program over these is a program over the plain tensors in
them: the class itself, run on fakes, says which.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from primtorch.flattenings import flattening_of
from primtorch.frozen import record
from primtorch.layout import contiguous_strides
from primtorch.spec import Size, TensorSpec

_NO_DISPATCH: object = torch.Tensor.__torch_dispatch__
_WHOLE = "_whole"
_DTENSOR = "torch.distributed.tensor"
_MESH = "device_mesh"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_nested(kind: object) -> bool:
    """Whether a class is torch's of nested tensors, which have sizes that are no numbers."""
    return str(getattr(kind, "__module__", "")).startswith("torch.nested.")


def is_wrapper(kind: object) -> bool:
    """Whether tensors of a class can be taken apart and put together again: it says how, or the table does."""
    if is_nested(kind):
        return False
    if flattening_of(kind) is not None:
        return True
    if getattr(kind, "__torch_dispatch__", _NO_DISPATCH) is _NO_DISPATCH:
        return False
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def wraps_others(value: object) -> bool:
    """Whether a value is a tensor that wraps others, of a class that says how."""
    return isinstance(value, torch.Tensor) and is_wrapper(type(value))


def lies_over_ranks(kind: type) -> bool:
    """Whether a class is torch's DTensor."""
    return kind.__module__ == _DTENSOR


def taken_apart(tensor: torch.Tensor) -> tuple[tuple[str, ...], object]:
    """The names of a wrapper's parts, and what it holds beside them. The mesh of a DTensor is one of the parts: torch
    2.11 names it only in the layout."""
    entry = flattening_of(type(tensor))
    if entry is not None:
        names, context = entry.flatten(tensor)
    else:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    more = (_MESH,) if lies_over_ranks(type(tensor)) and _MESH not in names else ()
    return (*names, *more), context


def whole_of(fake: torch.Tensor) -> torch.Tensor | None:
    """What a fake stands for if it is that of a wrapper: a tensor of the class around fakes, else None."""
    return fake.__dict__.get(_WHOLE)


def stand_for(fake: torch.Tensor, whole: torch.Tensor) -> None:
    """Notes on a fake tensor which tensor of a wrapper's class it stands for."""
    fake.__dict__[_WHOLE] = whole


@dataclass(frozen=True, slots=True, eq=False)
class Relaid:
    """Another layout of one tensor: a function that makes a wrapper of it, takes the tensor out of one, or lays one out
    in another way over processes. It is linear, and what its derivative does hangs on layouts alone."""

    function: Callable[..., torch.Tensor]
    rest: tuple[object, ...]
    named: Mapping[str, object]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, tensor: object) -> torch.Tensor:
        return self.function(tensor, *self.rest, **self.named)


@record
class ByClass:
    """What a function of torch means to a class, which has it in its `__torch_function__`; classes may be switched off
    where it is called."""

    kind: type
    function: Callable[..., object]

    @property
    def __name__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.kind.__torch_function__(self.function, (self.kind,), args, kwargs)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A function that is no operator, of tensors of which some wrap others: it is made of operators and of autograd
    functions that make wrappers and take them apart. Called with the tensors among its arguments."""

    function: Callable[..., object]
    leaves: tuple[object, ...]  # of its arguments; `HERE` where there is a tensor
    structure: pytree.TreeSpec

    @staticmethod
    def of(
        function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[Applied, list[torch.Tensor]]:
        """The call, and the tensors that it is of."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = tuple(HERE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return Applied(function, rest, structure), tensors

    @property
    def __name__(self) -> str:
        return f"applied_{getattr(self.function, '__name__', self.function)}"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        leaves = [next(given) if leaf is HERE else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.function(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            raise NotTakenApart(f"{self.__name__}() gives a {type(result).__qualname__}")
        return result


HERE = object()


@record
class Held:
    """A part of a wrapper that is no tensor, and one and the same object: a mesh of processes."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class NotTakenApart(Exception):
    """Why a wrapper cannot be expressed by plain tensors."""


@dataclass(frozen=True)
class Template:
    """How a wrapper is made: its class, the names and templates of its parts, what else it holds, its own metadata."""

    kind: type
    names: tuple[str, ...]
    context: object
    parts: tuple[Template | TensorSpec | Held, ...]
    size: tuple[Size, ...]
    stride: tuple[Size, ...]

    @staticmethod
    def of(tensor: Any) -> Template:
        """Raises NotTakenApart."""
        kind = type(tensor)
        if lies_over_ranks(kind) and any(hasattr(placement, "mask_buffer") for placement in tensor.placements):
            raise NotTakenApart(f"a {kind.__qualname__} has a placement that keeps a mask")
        try:
            names, context = taken_apart(tensor)
            values = [getattr(tensor, name) for name in names]
        except AttributeError as error:  # of one that is being made
            raise NotTakenApart(f"a {kind.__qualname__} lacks what it is to be taken apart into: {error}") from error
        parts = tuple(map(_part_template, itertools.repeat(kind), names, values))
        kept = _kept(kind, context, parts)
        return Template(kind, names, kept, parts, tuple(tensor.shape), tuple(tensor.stride()))

    def flatten(self, tensor: object) -> Iterator[torch.Tensor]:
        """The plain tensors in a tensor of this template, in the order of the specs."""
        for name, part in zip(self.names, self.parts, strict=True):
            value = getattr(tensor, name)
            if isinstance(part, Template):
                yield from part.flatten(value)
            elif isinstance(part, TensorSpec):
                yield value

    def specs(self) -> Iterator[TensorSpec]:
        """The metadata of the plain tensors, in the order in which they are taken out."""
        for part in self.parts:
            if isinstance(part, Template):
                yield from part.specs()
            elif isinstance(part, TensorSpec):
                yield part

    def symbolic(self) -> bool:
        """Whether a size is no number."""
        specs = list(self.specs())
        sizes = (*self.size, *self.stride, *(size for s in specs for size in (*s.shape, *s.strides, s.offset)))
        return any(type(size) is not int for size in sizes)

    def elementwise(self) -> bool:
        """Whether the sizes of a tensor of this template are those of its parts, and need not be known."""
        entry = flattening_of(self.kind)
        if entry is None or not entry.elementwise:
            return False
        return all(part.elementwise() for part in self.parts if isinstance(part, Template))

    def sized(self, spec: TensorSpec) -> Template:
        """The template of an elementwise tensor with other sizes, those of `spec`, whose parts are contiguous."""
        like = TensorSpec(spec.shape, contiguous_strides(spec.shape), spec.dtype, spec.device)
        parts = tuple(
            part.sized(like)
            if isinstance(part, Template)
            else replace(like, dtype=part.dtype, device=part.device)
            if isinstance(part, TensorSpec)
            else part
            for part in self.parts
        )
        return replace(self, parts=parts, size=like.shape, stride=like.strides)

    def build(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """A tensor of this template around the next plain tensors."""
        inner = {name: _built(part, tensors) for name, part in zip(self.names, self.parts, strict=True)}
        context = _copied(self.context, self.parts)
        entry = flattening_of(self.kind)
        if entry is not None:
            return entry.unflatten(inner, context, self.size, self.stride)
        return self.kind.__tensor_unflatten__(inner, context, torch.Size(self.size), self.stride)  # type: ignore[attr-defined, no-any-return, arg-type]


def _built(part: Template | TensorSpec | Held, tensors: Iterator[torch.Tensor]) -> object:
    match part:
        case Template():
            return part.build(tensors)
        case Held(value=value):
            return value
    return next(tensors)


def _part_template(kind: type, name: str, value: object) -> Template | TensorSpec | Held:
    if type(value).__module__ == "torch.distributed.device_mesh":
        return Held(value)
    if not isinstance(value, torch.Tensor):
        raise NotTakenApart(f"{kind.__qualname__}.{name} is a {type(value).__qualname__}")
    if value.requires_grad and not lies_over_ranks(kind):  # whose local tensor says so, and has no history
        raise NotTakenApart(f"{kind.__qualname__}.{name} requires a gradient itself")
    if is_wrapper(type(value)):
        return Template.of(value)
    if type(value) not in _PLAIN and not hasattr(value, "fake_mode"):
        raise NotTakenApart(f"{kind.__qualname__}.{name} is a {type(value).__qualname__}")
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise NotTakenApart(f"{kind.__qualname__}.{name} is no dense tensor")
    return TensorSpec.of(value)


def _copied(context: object, parts: Sequence[Template | TensorSpec | Held]) -> object:
    """A copy of what a wrapper holds beside its parts. What is one and the same object is so in the copy."""
    return copy.deepcopy(context, {id(part.value): part.value for part in parts if isinstance(part, Held)})


def _kept(kind: type, context: object, parts: Sequence[Template | TensorSpec | Held]) -> object:
    """A copy of what a wrapper holds beside its parts, which can be compared with another one's."""
    try:
        kept = _copied(context, parts)
        same = kept == context
    except Exception as error:
        raise NotTakenApart(f"what {kind.__qualname__} holds beside tensors cannot be copied: {error}") from error
    if same is not True:
        raise NotTakenApart(f"what {kind.__qualname__} holds beside tensors is not equal to a copy of it")
    return kept


def wrappers_in(types: Sequence[object]) -> bool:
    """Whether a dispatch is one for a wrapper to see to. `types` are those of its arguments."""
    return any(is_wrapper(kind) or is_nested(kind) for kind in types)
