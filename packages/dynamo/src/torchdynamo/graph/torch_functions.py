"""Functions of torch that run as CPython runs them, under the recorder, which writes their nodes."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.overrides

from torchdynamo.graph.tensor_classes import asked_of

# Python modules of torch whose functions are thin layers over operators: run natively under the recorder.
LEAF_MODULES = frozenset(
    {
        "torch.nn.functional", "torch.functional", "torch._tensor", "torch._ops", "torch._VF", "torch.linalg",
        "torch.fft", "torch.special",
    }
)  # fmt: skip


def _overridable() -> frozenset[object]:
    """Torch's functions that ask the function mode first."""
    found = set()
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            try:
                found.add(function)
            except TypeError:  # an unhashable descriptor is never called by name
                continue
    return frozenset(found)


OVERRIDABLE = _overridable()


# They ask the function mode with a part of what they were given: the one without `weight`, the other without
# `ambiguity_check`. What they do is interpreted.
HANDED_ON_IN_PART: frozenset[object] = frozenset({torch.nn.functional.l1_loss, torch.Tensor.dim_order})
# Raises for what is in a tensor, in Python: interpreted, that is a condition of the graph.
_ASKS_DATA: frozenset[object] = frozenset({torch.nn.functional.gaussian_nll_loss})


# Packages whose functions are known by the module that they name.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "typing_extensions"}


def home_of(function: types.FunctionType) -> str:
    """The module whose function it is. A wrapper goes by the module of what it wraps (`functools.wraps`), and is no
    more of torch or NumPy for it: it is of the module where it was written."""
    named = function.__module__ or ""
    if named.partition(".")[0] not in _LIBRARIES:
        return named
    written = str(function.__globals__.get("__name__") or "")
    return named if written.partition(".")[0] in _LIBRARIES else written


def is_leaf(function: Any) -> bool:
    """A function of torch that runs as it is, under the recorder."""
    kind = type(function)
    if kind is types.FunctionType:
        if function in HANDED_ON_IN_PART or function in _ASKS_DATA:
            return False
        return home_of(function) in LEAF_MODULES or function in OVERRIDABLE
    if kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
        return True
    if kind is types.BuiltinFunctionType:
        owner = function.__self__
        module = function.__module__ or ""
        return module.startswith("torch") or owner is _VARIABLE_FUNCTIONS or _owner_name(owner).startswith("torch")
    return kind in _METHODS and issubclass(function.__objclass__, torch._C.TensorBase)


def passes_modes_by(function: object, values: Sequence[object]) -> bool:
    """Whether a call asks no function mode: nobody but the caller can record it.

    Torch 2.14 calls operators so that are defined in Python. And while calls are recorded, torch's C code asks no
    classes, and refuses what they have it take in the place of a tensor.
    """
    if type(function) is torch._ops.OpOverload and getattr(function, "_pyobj_dispatcher", None) is not None:
        return True
    return any(not isinstance(value, torch.Tensor) for value in asked_of(values))


_VARIABLE_FUNCTIONS = type(torch._C._VariableFunctions)
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def _owner_name(owner: object) -> str:
    return str(getattr(owner, "__module__", None) or getattr(owner, "__name__", None) or "")
