"""The C++ functionalization of PyTorch, as a region and four verbs.

Inside the region a program may write in place and take views; what reaches a dispatch mode below is functional.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def functional_region() -> Iterator[None]:
    """Views are replayed as views (`reapply_views`), so the graph keeps `view`, not `view_copy`."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def is_wrapped(t: object) -> bool:
    return isinstance(t, torch.Tensor) and torch._is_functional_tensor(t)


def wrap(inner: torch.Tensor) -> torch.Tensor:
    """A functional tensor around `inner`, with no autograd history."""
    outer: torch.Tensor = torch._to_functional_tensor(inner)
    return outer


def unwrap(outer: torch.Tensor) -> torch.Tensor:
    """The present value, after pending writes through aliases."""
    if not torch._is_functional_tensor(outer):
        return outer
    torch._sync(outer)  # type: ignore[attr-defined]
    inner: torch.Tensor = torch._from_functional_tensor(outer)
    return inner


def storage_was_replaced(outer: torch.Tensor) -> bool:
    """True after `set_` or a `.data` assignment."""
    return bool(torch._functionalize_was_storage_changed(outer))


class NonLeaf(torch.autograd.Function):
    """Gives a non-leaf input its own history without recording an operator, so that it may be written in grad mode."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return wrap(unwrap(leaf))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


_WRITES_TO_REWRITE = (
    "clamp", "clamp_min", "clamp_max", "clip", "tril", "triu", "cumsum", "cumprod", "masked_fill", "index_fill", "nan_to_num",
    "renorm", "xlogy", "threshold",
)  # fmt: skip
_REWRITTEN: dict[Any, Any] = {
    **{getattr(torch.Tensor, f"{n}_"): getattr(torch.Tensor, n) for n in _WRITES_TO_REWRITE if n != "threshold"},
    **{getattr(torch, f"{n}_"): getattr(torch, n) for n in _WRITES_TO_REWRITE if hasattr(torch, f"{n}_")},
    torch._C._nn.hardtanh_: torch._C._nn.hardtanh,
    torch._C._nn.hardswish_: torch._C._nn.hardswish,
    torch._C._nn.hardsigmoid_: torch._C._nn.hardsigmoid,
    torch._C._nn.relu6_: torch._C._nn.relu6,
    torch.Tensor.exponential_: torch.ops.aten.exponential.default,
}
# Functions that hand a torch-function mode themselves, not the operator in them.
_WITH_INPLACE_FLAG = {f: inspect.signature(f) for f in (F.hardtanh, F.hardswish, F.hardsigmoid, F.relu6, F._threshold)}


class WriteByCopy(TorchFunctionMode):
    """Runs `x.f_(...)` as `x.copy_(x.clone().f(...))` for the operators above.

    C++ functionalization first runs an in-place operator on meta tensors, to find shape errors. With symbolic sizes the
    meta kernels of these do not work. What the backward saves is the clone, because x itself is written.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        functional = _REWRITTEN.get(func)
        if functional is not None:
            return args[0].copy_(functional(args[0].clone(), *args[1:], **kwargs))
        signature = _WITH_INPLACE_FLAG.get(func)
        if signature is not None:
            call = signature.bind(*args, **kwargs)
            if call.arguments.get("inplace", False):
                call.arguments["inplace"] = False
                target = call.args[0]
                return target.copy_(func(target.clone(), *call.args[1:], **call.kwargs))
        return func(*args, **kwargs)
