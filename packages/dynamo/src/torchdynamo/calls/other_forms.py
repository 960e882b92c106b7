"""Functions of libraries that capture reads in another form: one with the same results, which asks no truth of the data
or keeps no cache. What such a form finds wrong is found again, and told, by the function itself, which runs eagerly."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import constraints
from torch.nn import functional as F

from primtorch.fake import FakeTensor
from primtorch.layout import broadcast_shapes
from primtorch.symbolic import depends_on_data
from primtorch.symbolic.numbers import is_symbolic
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import MISSING, Args, Kwargs, World

_square: Callable[..., torch.Tensor] = constraints._Square.check


def _symmetric(self: object, value: torch.Tensor) -> Any:
    if value.shape[-2] != value.shape[-1]:
        return _square(self, value)
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def _positive_definite(self: object, value: torch.Tensor) -> object:
    """What is not symmetric has a factor, too, which says nothing."""
    if value.shape[-2] != value.shape[-1]:
        return _square(self, value)
    symmetric = _symmetric(self, value)
    return torch.where(symmetric.all(), torch.linalg.cholesky_ex(value).info.eq(0), symmetric)


def _check_all(error_type: Any, cond: object, message: object = None) -> None:
    if not torch.is_tensor(cond):
        raise TypeError(f"cond must be a tensor, but got {type(cond)}")
    if cond.dtype is not torch.bool:
        raise TypeError(f"cond tensor must have dtype torch.bool, but got {cond.dtype}")
    if not cond.all():
        raise error_type(message)


OTHER_FORMS: dict[object, Any] = {
    constraints._Symmetric.check: _symmetric,
    constraints._PositiveDefinite.check: _positive_definite,
    torch._check_tensor_all_with: _check_all,
}


def one_hot(args: Args, kwargs: Kwargs) -> object:
    """`one_hot` of a known number of classes: torch's own takes the smallest and the largest index out of the tensor.
    The graph refuses an index that is out of bounds where it writes by it."""
    given = {**dict(zip(("tensor", "num_classes"), args, strict=False)), **kwargs}
    index, count = given.get("tensor"), given.get("num_classes", -1)
    known = isinstance(index, FakeTensor) and index.dtype is torch.int64 and class_of(index) is None
    if not known or not isinstance(count, (int, torch.SymInt)) or count <= 0 or len(given) != len(args) + len(kwargs):
        return MISSING
    assert isinstance(index, FakeTensor)
    made = torch.zeros((*index.shape, count), dtype=torch.int64, device=index.device)
    return made.scatter_(-1, index.unsqueeze(-1), 1)


def batch_norm(args: Args, kwargs: Kwargs) -> object:
    """A batch norm in training whose momentum the data tells, as that of a module that averages over all batches does:
    the kernel takes a plain number. The batch's statistics are those that it makes with a momentum of 1."""
    given: dict[str, Any] = {**dict(zip(_OF_BATCH_NORM, args, strict=False)), **kwargs}
    momentum = given.get("momentum")
    kept: list[Any] = [given.get(name) for name in ("running_mean", "running_var")]
    if not is_symbolic(momentum) or not depends_on_data(momentum) or not given.get("training"):
        return MISSING
    if any(statistic is None for statistic in kept):
        return MISSING
    mean, variance = (torch.zeros_like(statistic) for statistic in kept)
    normalized = F.batch_norm(**{**given, "running_mean": mean, "running_var": variance, "momentum": 1.0})
    for statistic, batch in zip(kept, (mean, variance), strict=True):
        statistic.mul_(1 - momentum).add_(batch * momentum)
    return normalized


_OF_BATCH_NORM = F.batch_norm.__code__.co_varnames[: F.batch_norm.__code__.co_argcount]


def numel(args: Args, kwargs: Kwargs) -> object:
    """`torch.Size.numel`, whose C code would take each symbol for the number that it is in this call."""
    return math.prod(*args) if len(args) == 1 and isinstance(args[0], torch.Size) and not kwargs else MISSING


def common_shape(args: Args, kwargs: Kwargs) -> object:
    """The common shape of two, whose C code takes no symbols."""
    return MISSING if kwargs or len(args) != 2 else torch.Size(broadcast_shapes(*args))  # type: ignore[arg-type]


# Operators and C functions of torch's that are made of others, where their arguments ask for it.
OF_OPERATORS: dict[object, Callable[[Args, Kwargs], object]] = {
    F.one_hot: one_hot,
    F.batch_norm: batch_norm,
    torch.Size.numel: numel,
    torch._C._infer_size: common_shape,
}


# The function within `functools.singledispatch` that looks an implementation up, and keeps it in a cache.
_DISPATCH = next(
    code
    for code in functools.singledispatch.__code__.co_consts
    if isinstance(code, types.CodeType) and code.co_name == "dispatch"
)


def implementation(registry: dict[type, Callable[..., object]], cls: type) -> Callable[..., object]:
    """What a `functools.singledispatch` function runs for a class."""
    if cls in registry:
        return registry[cls]
    return functools._find_impl(cls, registry)  # type: ignore[attr-defined, no-any-return]


def dispatched(world: World, fn: types.FunctionType, args: Args, kwargs: Kwargs) -> Args | None:
    """For a call of a generic function's `dispatch`: what `implementation`, which keeps no cache, is asked."""
    if fn.__code__ is not _DISPATCH or len(args) != 1 or kwargs:
        return None
    cell = (fn.__closure__ or ())[_DISPATCH.co_freevars.index("registry")]
    return world.load_cell(cell), *args
