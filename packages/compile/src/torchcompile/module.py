"""A compiled module that still is the user's module.

The compiled object is an instance of a class made at compile time that derives from the model's own
class and shares the model's `__dict__`. So parameters, buffers, attributes, hooks, `state_dict()` keys,
`train()/eval()`, `repr` and `isinstance` are the model's own, and what is set on one is set on both.
Only the call differs: the class's `__call__` is the guarded C callable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiled_module(model: ModuleT, transform: Transform) -> ModuleT:
    """A view of `model` whose call is `transform` of the model's own call."""
    original = original_class(model)
    original_call = original.__call__

    def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return original_call(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = f"{original.__name__}.__call__"

    def deepcopy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        duplicate = copy.deepcopy(original_view(self), memo)
        return compiled_module(duplicate, transform)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        # A saved compiled model is the plain model: generated code belongs to this process.
        return _plain_object, (original,), original_view(self).__getstate__()

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__call__": transform(call),
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "_torchcompile_original": original,
    }
    compiled_class = type(original)(original.__name__, (original,), namespace)
    view = object.__new__(compiled_class)
    object.__setattr__(view, "__dict__", model.__dict__)
    return cast(ModuleT, view)


def _plain_object(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """An object of the user's class before its state is set: what a pickled compiled model starts from."""
    plain: torch.nn.Module = object.__new__(kind)
    return plain


def original_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """The user's class of a model, compiled or not."""
    return cast(type[torch.nn.Module], getattr(type(model), "_torchcompile_original", type(model)))


def original_view(model: torch.nn.Module) -> torch.nn.Module:
    """The plain model that a compiled one was made from (an object of its own class, sharing the state)."""
    view = _plain_object(original_class(model))
    object.__setattr__(view, "__dict__", model.__dict__)
    return view
