"""A compiled module that still is the user's module.

The compiled object is an instance of a class made at compile time that derives from the model's own
class and shares the model's `__dict__`. So parameters, buffers, attributes, hooks, `state_dict()` keys,
`train()/eval()`, `repr` and `isinstance` are the model's own, and what is set on one is set on both.
Only the call differs: the class's `__call__` is the guarded C callable.

In that call `self` is the model that the user compiled, the very object: `id(self)`, `type(self)`, `self in SEEN` and
what hooks are given are as in eager. The compiled object is equal to it and has its hash, so that a table keyed by
either knows both.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar, cast

import torch

import torchdynamo
from torchcompile.errors import NotCompilable
from torchdynamo.handed_on import hands_on_to

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
ClassT = TypeVar("ClassT", bound=type[Any])
Transform = Callable[[Callable[..., object]], Callable[..., object]]


def compiled_module(model: ModuleT, transform: Transform) -> ModuleT:
    """A view of `model` whose call is `transform` of the model's own call."""
    model = original_of(model)
    original = type(model)

    def deepcopy(view: torch.nn.Module, memo: dict[int, object]) -> torch.nn.Module:
        return compiled_module(copy.deepcopy(model, memo), transform)

    def reduce(view: torch.nn.Module, protocol: SupportsIndex) -> object:
        # A saved compiled model is the plain model: generated code belongs to this process.
        return _plain_object, (original,), model.__getstate__()

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__call__": transform(_call_of(model)),
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "_torchcompile_original": model,
    }
    if original.__eq__ is object.__eq__ and original.__hash__ is object.__hash__:
        namespace |= {"__eq__": _is_same_model, "__hash__": lambda view: object.__hash__(model)}
    compiled_class = type(original)(original.__name__, (original,), namespace)
    view = object.__new__(compiled_class)
    object.__setattr__(view, "__dict__", model.__dict__)
    return cast(ModuleT, view)


def _call_of(self: torch.nn.Module) -> Callable[..., object]:
    """What a call of the compiled object runs, whichever object that is: the model's own call."""

    def call(view: torch.nn.Module, /, *args: object, **kwargs: object) -> object:
        return self(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"{type(self).__name__}.__call__"
    hands_on_to(call, type(self).forward)
    return call


def compile_call(model: torch.nn.Module, transform: Transform) -> None:
    """Makes `transform` of the call of `model` what its call runs, where torch itself keeps such: no part of its state.

    All modules' calls are calls of one function, so that those that are built alike share what is compiled. Torch's own
    part of a call that breaks, one with hooks of FSDP, is run as it is; `forward` is captured then.
    """
    model._compiled_call_impl = transform(types.MethodType(_run_call, model))  # type: ignore[assignment]


def _run_call(self: torch.nn.Module, /, *args: object, **kwargs: object) -> object:
    return self._call_impl(*args, **kwargs)


def _is_same_model(view: torch.nn.Module, other: object) -> object:
    return original_of(other) is original_of(view) if isinstance(other, torch.nn.Module) else NotImplemented


def _plain_object(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """An object of the user's class before its state is set: what a pickled compiled model starts from."""
    plain: torch.nn.Module = object.__new__(kind)
    return plain


def original_of(model: ModuleT) -> ModuleT:
    """The user's object behind a model, compiled or not."""
    return cast(ModuleT, vars(type(model)).get("_torchcompile_original", model))


def compile_class(kind: ClassT, transform: Transform) -> ClassT:
    """Makes `transform` of the class's own call the call of all its objects, those of derived classes included.

    Raises:
        NotCompilable: its objects cannot be called, or it is PyTorch's own, which programs share.
    """
    original_call = kind.__call__
    if isinstance(original_call, torchdynamo.CompiledCallable):  # the class or a base of it is compiled
        original_call = original_call.function
    if not isinstance(original_call, types.FunctionType):
        raise NotCompilable(
            f"compile takes an nn.Module, a function or a class whose objects are called: {kind.__name__} defines no "
            "__call__ in Python"
        )
    if kind.__module__.partition(".")[0] == "torch":
        raise NotCompilable(
            f"compile of the class {kind.__name__} would change it for the whole process: derive an nn.Module of "
            f"your own from it, or compile an object of it, `torchcompile.compile({kind.__name__}(...))`"
        )

    def call(self: object, /, *args: object, **kwargs: object) -> object:
        return original_call(self, *args, **kwargs)

    call.__name__, call.__qualname__ = "__call__", f"{kind.__qualname__}.__call__"
    hands_on_to(call, kind.forward if issubclass(kind, torch.nn.Module) else original_call)
    kind.__call__ = transform(call)  # type: ignore[method-assign]
    return kind
