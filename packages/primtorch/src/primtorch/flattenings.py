"""How tensors of classes without `__tensor_flatten__` are taken apart and put together: a table that is open.

Torch's `MaskedTensor` is in it from the start. Its class asks whether the masks of two operands match, which only the
data can tell; `Matches` answers while its code runs on fakes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.masked import MaskedTensor

from primtorch.dispatch_mode import DispatchMode
from primtorch.frozen import record

aten = torch.ops.aten

Flatten: TypeAlias = Callable[[Any], tuple[Sequence[str], object]]
"""The names of the attributes that are a tensor's parts, and what it holds beside them."""
Unflatten: TypeAlias = Callable[[Mapping[str, Any], Any, tuple[Any, ...], tuple[Any, ...]], torch.Tensor]
"""The tensor of parts by name, what it held beside them, its sizes and its strides."""


@record
class Flattening:
    """What a class says by `__tensor_flatten__` and `__tensor_unflatten__`, said for it.

    Attributes:
        elementwise: each part has the tensor's own sizes, and `unflatten` reads these from them alone.
    """

    flatten: Flatten
    unflatten: Unflatten
    elementwise: bool = False


def register_flattening(
    kind: type[torch.Tensor], flatten: Flatten, unflatten: Unflatten, *, elementwise: bool = False
) -> None:
    """Has compiled programs trace through tensors of a class with `__torch_dispatch__` that wraps others and lacks
    `__tensor_flatten__` and `__tensor_unflatten__`, as one that cannot be changed.

    Args:
        kind: the class; classes that inherit from it need entries of their own.
        flatten: gives for a tensor the names of the attributes that are its parts (tensors of any shape and dtype,
            which require no gradient), and what it holds beside them: something that can be copied and compared.
        unflatten: `(parts by name, what was held, sizes, strides) -> tensor`, with these very parts in it. It changes
            nothing but the tensor that it makes.
        elementwise: each part has the tensor's own sizes, and `unflatten` takes them from the parts. Such a tensor may
            have sizes that vary where a program makes it.

    Raises:
        TypeError: the class is no subclass of torch.Tensor with a `__torch_dispatch__` of its own.
        ValueError: it has a flattening already, its own or a registered one.
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
        raise TypeError(f"{kind!r} is no subclass of torch.Tensor")
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{kind.__qualname__} has no __torch_dispatch__: it is a plain tensor to operators")
    if hasattr(kind, "__tensor_flatten__") or kind in _FLATTENINGS:
        raise ValueError(f"{kind.__qualname__} has a flattening already")
    _FLATTENINGS[kind] = Flattening(flatten, unflatten, elementwise)


def flattening_of(kind: object) -> Flattening | None:
    """The table's entry for a class."""
    return _FLATTENINGS.get(kind) if isinstance(kind, type) else None


# -- torch.masked --------------------------------------------------------------------------------

_DATA, _MASK = "_masked_data", "_masked_mask"


def _unmasked(tensor: MaskedTensor) -> tuple[Sequence[str], object]:
    return (_DATA, _MASK), None


def _masked(parts: Mapping[str, Any], held: object, size: tuple[Any, ...], stride: tuple[Any, ...]) -> torch.Tensor:
    """The class's own constructor would copy both, look at the data, and warn."""
    data: torch.Tensor = parts[_DATA]
    made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        MaskedTensor,
        data.size(),
        dtype=data.dtype,
        device=data.device,
        layout=data.layout,
        dispatch_sizes_strides_policy="strides",
        dispatch_layout=True,
    )
    made._masked_data, made._masked_mask = data, parts[_MASK]
    return made  # type: ignore[no-any-return]


_FLATTENINGS: dict[type, Flattening] = {MaskedTensor: Flattening(_unmasked, _masked, elementwise=True)}


@record
class Question:
    """Whether two tensors are equal in all elements, and the tensor that says so."""

    pair: tuple[torch.Tensor, torch.Tensor]
    truth: torch.Tensor


@dataclass(eq=False)
class Matches(DispatchMode):
    """Answers yes where code asks whether two tensors are equal in all elements (`torch.eq(a, b).all().item()`).

    Attributes:
        asked: what was asked of pairs that are not known to be the same value.
    """

    asked: list[Question] = field(default_factory=list)
    _open: dict[int, Question] = field(default_factory=dict)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if MaskedTensor in types:
            return NotImplemented
        if func in _TAKE and (question := self._open.get(id(args[0]))) is not None:
            if source_of(question.pair[0]) is not source_of(question.pair[1]):
                self.asked.append(question)
            return True
        out = func(*args, **(kwargs or {}))
        if func is aten.eq.Tensor:
            self._open[id(out)] = Question((args[0], args[1]), out)
        elif func is aten.all.default and (question := self._open.get(id(args[0]))) is not None:
            self._open[id(out)] = Question(question.pair, out)
        elif func in _SAME_VALUE and args[0].shape == out.shape and args[0].dtype == out.dtype:
            out.__dict__[_SOURCE] = source_of(args[0])
        return out


_TAKE = frozenset({aten.item.default, aten._local_scalar_dense.default})
_SOURCE = "_same_value_as"
_SAME_VALUE = frozenset(
    {aten.clone.default, aten.detach.default, aten.alias.default, aten.expand.default, aten.expand_as.default}
)


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one was copied from, while `Matches` looked on; else itself."""
    found: torch.Tensor = getattr(tensor, "__dict__", {}).get(_SOURCE, tensor)
    return found


@contextmanager
def matching(kind: type) -> Iterator[list[Question]]:
    """A block in which code of a class runs on fakes: what it asks of pairs of tensors is taken for granted, and is in
    the list."""
    if kind is not MaskedTensor:
        yield []
        return
    mode = Matches()
    with mode:
        yield mode.asked


@functools.cache
def warned_of(requires_grad: bool) -> tuple[str, ...]:
    """What torch warns of where a masked tensor is made, of data that requires a gradient too. Not to be asked first
    within a mode."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        MaskedTensor(torch.zeros(1, requires_grad=requires_grad), torch.ones(1, dtype=torch.bool))
    return tuple(str(warning.message) for warning in told)


@functools.cache
def masks_differ() -> str:
    """What torch raises where the masks of two operands do not match. Not to be asked first within a mode."""
    with torch.no_grad(), unwarned(MaskedTensor):
        one, other = (MaskedTensor(torch.zeros(1), torch.full((1,), mask)) for mask in (True, False))
        try:
            torch.add(one, other)
        except ValueError as error:
            return str(error)
    raise AssertionError("torch adds masked tensors whose masks differ")


@contextmanager
def unwarned(kind: type) -> Iterator[None]:
    """A block in which code of a class runs on fakes: what it says at each tensor is said once, by who captures it."""
    if kind is not MaskedTensor:
        yield
        return
    with warnings.catch_warnings():
        for begins in ("The PyTorch API of MaskedTensors", "It is not recommended to create a MaskedTensor"):
            warnings.filterwarnings("ignore", begins, UserWarning)
        yield
