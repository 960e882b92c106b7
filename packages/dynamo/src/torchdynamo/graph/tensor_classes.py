"""Tensors of classes with a `__torch_function__`: in the graph they are plain tensors, and their fakes say the class.

Of `class Tagged(torch.Tensor)` no operator knows: torch's Python functions alone ask `__torch_function__`. So the graph
is one of plain tensors; capture asks in torch's place, at every call, and a value that leaves is given its class again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from primtorch.fake import FakeTensor

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
# What switches `__torch_function__` of classes off; the second one, that of modes, too.
SWITCHES: tuple[Any, ...] = (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction)

_MARK = "_class"
_NO_DISPATCH: object = torch.Tensor.__torch_dispatch__
_NO_OVERRIDE: object = torch._C._disabled_torch_function_impl
DEFAULT: object = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
TENSOR_METACLASSES = (type(torch.Tensor), type(torch.nn.Parameter))
UNINITIALIZED: type = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # without elements yet
_NOT_CAPTURED = (FakeTensor, UNINITIALIZED)
# Methods of a class that capture would have to run in the place of torch's, where it reads and writes attributes.
_OWN_ACCESS = ("__getattribute__", "__getattr__", "__setattr__", "__delattr__")


def is_capturable(kind: object) -> bool:
    """Whether a subclass of torch.Tensor changes nothing of what operators do, and keeps attributes as tensors do."""
    if not isinstance(kind, type) or not issubclass(kind, torch.Tensor) or issubclass(kind, _NOT_CAPTURED):
        return False
    plain = kind.__torch_dispatch__ is _NO_DISPATCH and type(kind) in TENSOR_METACLASSES
    return plain and not any(name in vars(klass) for klass in own_classes(kind) for name in _OWN_ACCESS)


def own_classes(kind: type) -> Iterator[type]:
    """The classes of the program's that come before torch's."""
    for klass in kind.__mro__:
        if klass in PLAIN_TENSORS:
            return
        yield klass


def remember_class(fake: torch.Tensor, kind: type) -> None:
    """Says of a fake that it stands for a tensor of this class."""
    if kind in PLAIN_TENSORS:
        fake.__dict__.pop(_MARK, None)
    else:
        fake.__dict__[_MARK] = kind


def class_of(fake: torch.Tensor) -> type | None:
    """The class that a fake was marked with."""
    return fake.__dict__.get(_MARK)


def hidden_method(owner: object, name: str) -> types.MethodDescriptorType | types.WrapperDescriptorType | None:
    """The method of a C type that the owner's class overrides, and that `super()` gives; None where it does not."""
    kind = (class_of(owner) if isinstance(owner, FakeTensor) else None) or type(owner)
    found = [vars(klass)[name] for klass in kind.__mro__ if name in vars(klass)]
    methods = [method for method in found if isinstance(method, _METHODS_OF_C_TYPES)]
    return methods[0] if methods and found[0] is not methods[0] else None


_METHODS_OF_C_TYPES = (types.MethodDescriptorType, types.WrapperDescriptorType)


def is_default(kind: type) -> bool:
    """Whether a class has the `__torch_function__` that every subclass of torch.Tensor inherits."""
    return getattr(override_of(kind), "__func__", None) is DEFAULT


def overrides(kind: type) -> bool:
    """Whether a class has a `__torch_function__` that does something."""
    return override_of(kind) is not _NO_OVERRIDE


def override_of(kind: type) -> object:
    """A class's `__torch_function__`."""
    return kind.__torch_function__  # type: ignore[attr-defined]


def stands_for_tensor(value: object) -> bool:
    """Whether torch takes an object that is no tensor in the place of one, and asks its class."""
    return not isinstance(value, torch.Tensor) and hasattr(type(value), "__torch_function__")


def overriding(args: Sequence[object], kwargs: Mapping[str, object] | None) -> tuple[type, ...]:
    """The classes that torch would ask for the meaning of a call: in the order of the arguments, subclasses first.

    They are classes of tensors, and those of the program's objects that torch takes in the place of tensors.
    """
    found: list[type] = []
    for value in asked_of((*args, *(kwargs or {}).values())):
        kind = class_of(value) if isinstance(value, FakeTensor) else type(value)
        if kind is None or kind in found or not overrides(kind):
            continue
        place = next((i for i, other in enumerate(found) if issubclass(kind, other)), len(found))
        found.insert(place, kind)
    return tuple(found)


def redefines(args: Sequence[object], name: str) -> type | None:
    """The class of an argument that has an attribute of this name itself: on a tensor of it, the name does not mean
    torch's."""
    for value in args:
        kind = class_of(value) if isinstance(value, FakeTensor) else None
        if kind is not None and any(name in vars(klass) for klass in own_classes(kind)):
            return kind
    return None


def asked_of(values: Sequence[object]) -> Iterator[object]:
    """Tensors among arguments and in lists of them, and what stands for one."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from (item for item in value if isinstance(item, FakeTensor) or stands_for_tensor(item))
        elif isinstance(value, FakeTensor) or stands_for_tensor(value):
            yield value


def is_instance(fake: torch.Tensor, classes: Any) -> bool:
    """`isinstance` of a tensor whose class its fake says."""
    if isinstance(classes, tuple):
        return any(is_instance(fake, one) for one in classes)
    kind = class_of(fake)
    assert kind is not None
    own: object = type(classes).__instancecheck__ if isinstance(classes, type) else None
    return issubclass(kind, classes) if own is type.__instancecheck__ else isinstance(fake, classes)


def size_of(tensor: torch.Tensor, dim: int) -> int:
    """A size of a tensor, by torch and not by its class. Generated code reads sizes so."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.shape[dim]


def with_class(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """A result of the graph as a tensor of a class, made as torch's default makes it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(kind)


def on_plain_tensors(function: Callable[..., object]) -> Callable[..., Any]:
    """The function with the classes of its arguments switched off: a graph's calls mean torch's own."""

    def call(*args: object) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)

    return call
