"""What a graph in a file may call, by name: torch's functions and operators that compute, and nothing else.

The tables are of what torch lets classes of tensors override, less what leads out of a computation. A reader that finds
another name refuses the file.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Mapping
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.amp import autocast_mode
from torch.overrides import get_overridable_functions, resolve_name
from torch.utils._device import _device_constructors

from primtorch import ambient, histories, packed, quantised
from primtorch.prims import PRIMS, Prim
from primtorch.symbolic import SCALAR_OPS
from torchdynamo.errors import NotExportable, UnsafeArchive

# Methods that hand out memory, take code, or tell what differs from process to process.
_NOT_METHODS = frozenset(
    {
        "apply_", "map_", "map2_", "storage", "untyped_storage", "storage_type", "data_ptr", "const_data_ptr", "numpy",
        "module_load", "share_memory_", "register_hook", "register_post_accumulate_grad_hook", "pin_memory", "set_",
        "record_stream", "tolist", "backward",
    }
)  # fmt: skip
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift", "neg",
    "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "iadd", "isub", "imul",
    "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip
_MORE_OF_TORCH = (
    "as_strided", "scalar_tensor", "rand_like", "randn_like", "randint_like", "normal", "sym_max", "sym_min", "sym_not",
    "sym_ite", "sym_float", "sym_int", "sym_sqrt", "fill", "_assert_async", "_check",
)  # fmt: skip
# Functions that classes may override, too, though torch's table lacks them.
_MORE_OF_FUNCTIONAL = ("hardsigmoid", "hardswish", "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_NAMESPACES = frozenset({"aten", histories.NAMESPACE})  # of operators; `load(operators=...)` adds to them
# Namespaces whose operators are defined where a program first needs one.
_DEFINED_LATE: Mapping[str, Callable[[], object]] = {
    quantised.NAMESPACE: quantised.known_forms, packed.NAMESPACE: packed.known_forms
}  # fmt: skip
_NOT_OPERATORS = frozenset({"aten::from_file", "aten::set_", "aten::set", "aten::_save_for_backward"})


@functools.cache
def functions() -> Mapping[str, Callable[..., object]]:
    """Python functions, by name."""
    found: dict[str, Callable[..., object]] = {}
    path_of = getattr(resolve_name, "__wrapped__", resolve_name)  # which sets a filter of warnings at each call
    for owner, members in get_overridable_functions().items():
        if owner is torch.Tensor:
            continue
        for member in members:
            name = path_of(member)
            if name and name.startswith("torch.") and not name.startswith("torch.Tensor."):
                found[name] = member
    makers: list[Any] = list(_device_constructors())
    found |= {f"torch.{maker.__name__}": maker for maker in makers if hasattr(torch, maker.__name__)}
    found |= {f"torch.{name}": getattr(torch, name) for name in _MORE_OF_TORCH if hasattr(torch, name)}
    functional = torch.nn.functional
    held = [name for name in _MORE_OF_FUNCTIONAL if hasattr(functional, name)]
    found |= {f"torch.nn.functional.{name}": getattr(functional, name) for name in held}
    found |= {f"operator.{name}": getattr(operator, name) for name in _OPERATORS}
    found |= {f"math.{name}": getattr(math, name) for name in ("sqrt", "ceil", "floor", "trunc", "pow", "exp", "log")}
    found |= {f"number.{op.name}": op.function for op in SCALAR_OPS.values()}  # where the others have no name for it
    found["getattr"] = getattr
    blocks: tuple[Any, ...] = (torch._C._set_grad_enabled, autocast_mode._enter_autocast, autocast_mode._exit_autocast)
    blocks += tuple(state.write for state in ambient.ATTENTION)
    found |= {f"block.{block.__name__}": block for block in blocks}
    return MappingProxyType(found)


# What torch's own Python calls where no class can override it (`torch._C._nn.hardswish`): bindings of operators.
_BINDINGS: Mapping[str, object] = MappingProxyType(
    {
        "torch._C._VariableFunctions": torch._C._VariableFunctions,
        **{f"torch._C.{name}": getattr(torch._C, name) for name in ("_nn", "_linalg", "_fft", "_special")},
    }
)


def _binding(path: str, name: str) -> Callable[..., object] | None:
    """A binding of an operator that a file may name, too."""
    found = getattr(_BINDINGS.get(path), name, None)
    held = isinstance(found, BuiltinFunctionType) and f"aten::{name}" not in _NOT_OPERATORS
    return found if held and hasattr(torch.ops.aten, name) else None


def _binding_name(target: object) -> str | None:
    name = target.__name__ if isinstance(target, BuiltinFunctionType) else ""
    return next((f"{path}.{name}" for path in _BINDINGS if name and _binding(path, name) == target), None)


@functools.cache
def _names() -> Mapping[object, str]:
    names: dict[object, str] = {}
    for name, function in functions().items():
        names.setdefault(function, name)
    return names


@functools.cache
def methods() -> frozenset[str]:
    """Methods of tensors."""
    members = get_overridable_functions()[torch.Tensor]
    known = {member.__name__ for member in members if hasattr(member, "__name__")}
    public = {name for name in known if not name.startswith("_")} - _NOT_METHODS
    return frozenset(public | {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "stride", "expand"})


@functools.cache
def attributes() -> frozenset[str]:
    """Attributes of tensors that a graph reads."""
    return frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "shape", "grad"})


def name_of(target: object) -> str:
    """A function's name in a file.

    Raises:
        NotExportable: it has none.
    """
    if isinstance(target, OpOverload):
        return f"ops.{target.namespace}.{target.name().partition('::')[2].partition('.')[0]}.{target._overloadname}"
    if isinstance(target, Prim):
        return f"prims.{target.name}"
    try:
        found = _names().get(target) or _binding_name(target)
    except TypeError:
        found = None
    if found is None:
        told = getattr(target, "__qualname__", None) or type(target).__name__
        raise NotExportable(
            f"the graph calls {told}, which has no form in a file; with aten_graph=True it may be one of operators"
        )
    return found


def function_named(name: str, operators: Collection[str]) -> Callable[..., object]:
    """What a name of a file stands for.

    Args:
        operators: namespaces beside torch's own whose operators may be called.

    Raises:
        UnsafeArchive: it is none that a reader calls.
    """
    kind, _, rest = name.partition(".")
    if kind == "prims" and rest in PRIMS:
        return PRIMS[rest]
    if kind == "ops" and rest.count(".") == 2:
        namespace, operation, overload = rest.split(".")
        if namespace not in {*_NAMESPACES, *operators} or f"{namespace}::{operation}" in _NOT_OPERATORS:
            raise UnsafeArchive(f"the file calls {name}: pass load(..., operators=({namespace!r},)) if you trust it")
        if namespace in _DEFINED_LATE:
            _DEFINED_LATE[namespace]()
        found = getattr(getattr(getattr(torch.ops, namespace), operation, None), overload, None)
        if isinstance(found, OpOverload):
            return found
    path, _, rest = name.rpartition(".")
    known = functions().get(name) or _binding(path, rest)
    if known is None:
        raise UnsafeArchive(f"the file calls {name!r}, which is no function of torch that a graph may call")
    return known
