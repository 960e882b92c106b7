"""Shapes from torch's C++ meta kernels, on real `meta` tensors, for operators without an own formula."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from primtorch.arguments import TENSORS
from primtorch.errors import NoFormula
from primtorch.families import Formula
from primtorch.spec import TensorSpec


def _has_symbols(leaf: object) -> bool:
    if isinstance(leaf, TENSORS):
        return any(type(s) is not int for s in (*leaf.shape, *leaf.stride()))
    return isinstance(leaf, torch.SymInt)


def has_native_meta(op: OpOverload) -> bool:
    """Whether the operator's active Meta kernel is a C++ one."""
    name = op.name()
    # Operators of TorchScript alone are not the dispatcher's.
    if torch._C.DispatchKey.Meta in op.py_kernels or not torch._C._dispatch_has_kernel(name):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "Meta"
    ) or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutogradNonFunctional")


def meta_formula(op: OpOverload, symbolic: Formula | None = None) -> Formula:
    """A formula that runs the operator's C++ meta kernel.

    Args:
        symbolic: the formula to use when a size is symbolic, which these kernels do not take.

    Raises:
        NoFormula: (when called) a size is symbolic and there is no formula for that.
    """

    def formula(*args: object, **kwargs: object) -> object:
        if kwargs.get("layout") not in (None, torch.strided):
            raise NoFormula(op.name(), reason="its result is not strided")
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if symbolic is not None and any(map(_has_symbols, leaves)):
            return symbolic(*args, **kwargs)
        device: torch.device | None = None
        converted: list[object] = []
        for leaf in leaves:
            if not isinstance(leaf, TENSORS):
                if _has_symbols(leaf):
                    raise NoFormula(op.name(), reason="its kernel for meta tensors takes no symbolic sizes")
                converted.append(leaf)
                continue
            if device is None or (device.type == "cpu" and leaf.device.type != "cpu"):
                device = leaf.device
            if _has_symbols(leaf):
                raise NoFormula(op.name(), reason="its kernel for meta tensors takes no symbolic sizes")
            converted.append(torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype, device="meta"))
        meta_args, meta_kwargs = pytree.tree_unflatten(converted, tree)
        result = op(*meta_args, **meta_kwargs)
        place = device or torch.device("cpu")
        given = {id(c): leaf for c, leaf in zip(converted, leaves, strict=True) if isinstance(c, torch.Tensor)}

        def described(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in given:
                return given[id(value)]
            return TensorSpec(tuple(value.shape), value.stride(), value.dtype, place, value.storage_offset())

        return pytree.tree_map(described, result)

    return formula
