"""What refusals of all families are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from primtorch import prims
from primtorch.arguments import Number, TensorLike
from primtorch.builder import Builder, Value
from primtorch.layout import same_shape
from primtorch.spec import Size

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                   torch.uint16, torch.uint32, torch.uint64})  # fmt: skip
_C_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int",
    torch.int64: "int64_t",
}


def refuse(wrong: bool, message: str | Callable[[], str], error: type[Exception] = RuntimeError) -> None:
    """Raises where `wrong` holds; a message that is a function is made only then."""
    if wrong:
        raise error(message if isinstance(message, str) else message())


def want(b: Builder, fine: Value, message: str) -> None:
    """The program raises when it runs where not all elements are true."""
    b.emit(prims.assert_async, fine.reduce(prims.all, tuple(range(fine.rank))), message)


def is_empty(size: Size) -> bool:
    """Whether a size is known to be 0."""
    return type(size) is int and size == 0


def refuse_batch(name: str, x: TensorLike, spatial: int, *, channels: bool = True) -> None:
    """Raises unless x is (channels, *sizes) or (batch, channels, *sizes) of which only the batch is empty, or without
    `channels` the first dim."""
    inner = x.shape[x.dim() - spatial - 1 if channels else 1 :]
    refuse(
        x.dim() not in (spatial + 1, spatial + 2) or any(map(is_empty, inner)),
        lambda: (
            f"{name}: Expected {spatial + 1}D or {spatial + 2}D (batch mode) tensor with possibly 0 batch size and "
            f"other non-zero dimensions for input, but got: {list(x.shape)}"
        ),
    )


def refuse_other_shape(name: str, t: TensorLike | None, shape: Sequence[Size]) -> None:
    """Raises where an operand that may be left out has another shape."""
    if t is not None:
        refuse(
            not same_shape(t.shape, shape),
            lambda: f"Expected {name} to have the shape {list(shape)}, but got {list(t.shape)}",
        )


def refuse_overflow(value: Number, dtype: torch.dtype) -> None:
    """Raises what eager raises for a Python number out of a dtype's range; one that is symbolic has none yet.

    Infinities are floats, and negative numbers count from above in unsigned ones, as c10's checked conversions have it.

    Raises:
        RuntimeError: the number overflows.
    """
    name = _C_NAMES.get(dtype)
    if name is None or not (type(value) is int or type(value) is float):
        return
    if dtype.is_floating_point:
        wrong = math.isfinite(value) and abs(value) > torch.finfo(dtype).max
    else:
        limits = torch.iinfo(dtype)
        lowest = limits.min or -limits.max
        wrong = not math.isfinite(value) or not lowest <= value <= limits.max
    if wrong:
        raise RuntimeError(f"value cannot be converted to type {name} without overflow")
