"""Writes to out= that torch's own programs of operators lose while a mode is active."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from primtorch.effects import outs_of


def land(
    func: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    outs: Sequence[torch.Tensor],
    is_as_it_was: Callable[[torch.Tensor], bool],
) -> None:
    """Writes what a call with out= left unwritten: where a mode is active, some of torch's programs of operators
    compute a new tensor in the place of their out= argument, and drop it."""
    if func is torch.empty or not any(map(is_as_it_was, outs)):
        return
    function = func.overloadpacket if isinstance(func, OpOverload) else func
    results = function(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    flat = (results,) if isinstance(results, torch.Tensor) else results
    for out, result in zip(outs, flat, strict=True):
        if is_as_it_was(out):
            out.copy_(result)


class LandingOut(TorchFunctionMode):
    """Lands what calls on tensors that count their writes leave unwritten."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        outs = tuple(t for t in outs_of(kwargs) if not t.is_inference())
        before = {id(t): t._version for t in outs}
        result = func(*args, **kwargs)
        if len(outs) == len(outs_of(kwargs)):
            land(func, args, kwargs, outs, lambda t: t._version == before[id(t)])
        return result
