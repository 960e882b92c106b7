"""Calls that run on tensors without data, and that a graph still has no place for: its values are dense, gradients
included, and what views what is known of torch's own operators alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType

import torch
from torch._ops import OpOverload

from primtorch.effects import returns_memory
from torchdynamo.reasons import BreakGraph

__all__ = ["refuse"]

# The flag with which the gradient of the first of these arguments is sparse, and the operator of that name. A function
# in Python has parameters of its own.
_SPARSE: dict[str, tuple[str, tuple[str, ...], OpOverload]] = {
    "embedding": ("sparse", ("weight",), torch.ops.aten.embedding.default),
    "embedding_bag": ("sparse", ("weight",), torch.ops.aten.embedding_bag.default),
    "_embedding_bag": ("sparse", ("weight",), torch.ops.aten._embedding_bag.default),
    "gather": ("sparse_grad", ("self", "input"), torch.ops.aten.gather.default),
}


def refuse(
    name: str, func: object, overload: OpOverload | None, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raises BreakGraph for such a call of a function that goes by `name`, or of an overload."""
    if overload is not None and returns_memory(overload):
        raise BreakGraph("operator_view", f"call of {overload}")
    rule = _SPARSE.get(name.partition(".")[0])
    if rule is None or not torch.is_grad_enabled():
        return
    flag, owners, operator = rule
    given = {**dict(zip(_parameters(func, overload or operator), args, strict=False)), **kwargs}
    differentiated = (given[owner] for owner in owners if owner in given)
    if given.get(flag) and any(isinstance(one, torch.Tensor) and one.requires_grad for one in differentiated):
        raise BreakGraph("sparse_gradient", f"{name}() with {flag}=True")


def _parameters(func: object, operator: OpOverload) -> tuple[str, ...]:
    if type(func) is FunctionType:
        return func.__code__.co_varnames[: func.__code__.co_argcount]
    return tuple(argument.name for argument in operator._schema.arguments)
