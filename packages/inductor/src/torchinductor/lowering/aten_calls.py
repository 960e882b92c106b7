"""The ATen calls of prims that have no kernel of ours, where a prim's arguments are not an overload's in its order.

A call of an overload runs in the C++ executor; a prim's reference would be called in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.prims import Prim
from torchinductor.lowering.values import TensorValue

Call: TypeAlias = "tuple[OpOverload, tuple[object, ...], dict[str, object]]"

aten = torch.ops.aten


def aten_call(prim: Prim, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call | None:
    """The overload that computes the prim of these arguments, with what it is given; None if there is none."""
    if prim.aten is not None:
        return prim.aten, args, dict(kwargs)
    rule = _RULES.get(prim.name)
    return None if rule is None else rule(*args, **kwargs)


def _sort(t: TensorValue, dim: int, descending: bool, stable: bool) -> Call:
    return aten.sort.stable, (t,), {"stable": stable, "dim": dim, "descending": descending}


def _searchsorted(sequence: TensorValue, values: TensorValue, right: bool) -> Call:
    return aten.searchsorted.Tensor, (sequence, values), {"right": right}


def _full(shape: object, value: object, dtype: torch.dtype, device: torch.device) -> Call | None:
    if not isinstance(value, (bool, int, float)):
        return None
    return aten.full.default, (shape, value), {"dtype": dtype, "device": device}


def _index_put(
    t: TensorValue, indices: Sequence[TensorValue | None], values: TensorValue, accumulate: bool, wrap: bool
) -> Call:
    return aten.index_put.default, (t, indices, values, accumulate), {}


def _along(overload: OpOverload) -> Callable[[TensorValue, int, TensorValue, TensorValue], Call]:
    return lambda t, dim, index, src: (overload, (t, dim, index, src), {})


def _unary(overload: OpOverload) -> Callable[[TensorValue], Call]:
    return lambda t: (overload, (t,), {})


def _binary(packet: OpOverloadPacket) -> Callable[[object, object], Call | None]:
    def call(a: object, b: object) -> Call | None:
        if isinstance(a, TensorValue) and isinstance(b, (TensorValue, int, float)):
            return (packet.Tensor if isinstance(b, TensorValue) else packet.Scalar), (a, b), {}
        return None

    return call


# What is met where no kernel is generated: sorting, arithmetic of complex numbers, writes that need an order.
_RULES: Mapping[str, Callable[..., Call | None]] = {
    "sort": _sort,
    "searchsorted": _searchsorted,
    "index_put": _index_put,
    "scatter": _along(aten.scatter.src),
    "scatter_add": _along(aten.scatter_add.default),
    "full": _full,
    "convert_element_type": lambda t, dtype, rounded=False: (aten._to_copy.default, (t,), {"dtype": dtype}),
    "complex": lambda re, im: (aten.complex.default, (re, im), {}),
    **{name: _binary(getattr(aten, name)) for name in ("add", "sub", "mul", "div", "eq", "ne")},
    **{
        name: _unary(getattr(aten, name).default)
        for name in (
            "abs", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "sinh", "cosh", "tanh",
            "sigmoid", "isnan", "isinf", "isfinite",
        )
    },
}  # fmt: skip
