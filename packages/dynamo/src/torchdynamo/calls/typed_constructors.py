"""`torch.FloatTensor(...)` and its kind, as functions that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch.fake import FakeTensor
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.loops import OpenRange
from torchdynamo.reasons import BreakGraph


def call(fn: Any, args: Args, kwargs: Kwargs, tensor: Callable[..., object]) -> object:
    """A tensor on the CPU of sizes, of numbers, or of another tensor's memory.

    `tensor` makes one of a list as `torch.tensor` does. What else these constructors take, and what they refuse, ends
    the graph.
    """
    dtype = torch.get_default_dtype() if fn is torch.Tensor else fn.dtype
    on_cpu = kwargs.keys() <= {"device"} and kwargs.get("device") in (None, "cpu", torch.device("cpu"))
    first = args[0] if len(args) == 1 else None
    if on_cpu and isinstance(first, torch.Size):
        args, first = tuple(first), None
    if on_cpu and type(first) is OpenRange:
        return of_range(first, dtype)
    if on_cpu and isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
        return tensor(torch.tensor, (list(first),), {"dtype": dtype, "device": "cpu"})
    if not kwargs and type(first) is FakeTensor and first.device.type == "cpu" and _takes(fn, first):
        return torch.ops.aten.alias.default(first)
    if on_cpu and all(type(size) in (int, torch.SymInt) for size in args):
        return torch.empty(args or (0,), dtype=dtype, device="cpu")
    raise BreakGraph("c_function", f"call of torch.{fn.__name__} with other arguments than sizes and numbers")


def of_range(numbers: OpenRange, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """`torch.tensor(range(...))` of numbers that are others at each call."""
    made: torch.Tensor = torch.arange(*numbers.numbers, dtype=torch.int64, device=device)  # type: ignore[call-overload]
    return made if dtype is None else made.to(dtype)


def _takes(fn: Any, tensor: torch.Tensor) -> bool:
    return fn is torch.Tensor or tensor.dtype == fn.dtype
