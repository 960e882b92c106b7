"""In-place operators over symbolic sizes, as a copy of their functional result.

Functionalization makes sure that an in-place call fits by running it on tensors of the Meta key first. Of the operators
named here those kernels read sizes as numbers, or broadcast in a way that does. A function mode would see the calls of
a program, but not those of torch's own programs of operators (`cosine_similarity` clamps in place), so that these are
programs of the dispatch key that fakes with symbols bear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.fake.table import formula_of, is_composite

aten = torch.ops.aten

_NAMES = (
    "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "atan2", "baddbmm", "bitwise_and", "bitwise_left_shift",
    "bitwise_or", "bitwise_right_shift", "bitwise_xor", "clamp", "clamp_max", "clamp_min", "copysign", "cumprod",
    "cumsum", "div", "eq", "exponential", "floor_divide", "fmod", "gcd", "ge", "gt", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "hypot", "igamma", "igammac", "index_fill", "lcm", "ldexp", "le", "lerp", "logit", "lt",
    "masked_fill", "mvlgamma", "nan_to_num", "ne", "nextafter", "pow", "remainder", "renorm", "sinc", "threshold",
    "tril", "triu", "xlogy",
)  # fmt: skip
_NARROW_NAMES = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cauchy", "ceil", "celu", "cos", "cosh", "deg2rad",
    "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "gelu", "i0", "leaky_relu",
    "lgamma", "log", "log10", "log1p", "log2", "log_normal", "mish", "neg", "normal", "rad2deg", "reciprocal",
    "rsqrt", "sgn", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Operators whose kernels of the Meta key copy to the target what they compute in another dtype, and read its strides
as numbers for that."""
_OTHERWISE_COMPUTED = frozenset({torch.bfloat16, torch.float16, torch.complex32, torch.complex64, torch.complex128})
_KEPT = frozenset({aten.div_.Tensor, aten.div_.Scalar})
"""Overloads of these whose kernels take symbols."""


def symbolic_writes(
    passing: Callable[[], AbstractContextManager[object]],
) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """(name of an overload, its program).

    Args:
        passing: gives a context in which a call passes the programs by.
    """
    for name in (*_NAMES, *_NARROW_NAMES):
        packet = getattr(aten, f"{name}_")
        for overload in packet.overloads():
            op = getattr(packet, overload)
            functional = _functional_of(op)
            if functional is not None and op not in _KEPT and not is_composite(op):
                dtypes = _OTHERWISE_COMPUTED if name in _NARROW_NAMES else None
                yield op.name(), _program(op, functional, passing, dtypes)
    for op in (aten.resize_.default, aten.resize_as_.default):
        yield op.name(), _resizing(op, passing)


def _program(
    op: OpOverload,
    functional: OpOverload,
    passing: Callable[[], AbstractContextManager[object]],
    dtypes: Collection[torch.dtype] | None,
) -> Callable[..., torch.Tensor]:
    """Args: dtypes: of which targets it is that copy; None for all."""

    def write(target: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if not torch._is_functional_tensor(target) or (dtypes is not None and target.dtype not in dtypes):
            with passing():
                op(target, *args, **kwargs)
            return target
        formula_of(op)(target, *args, **kwargs)  # raises what eager would, of shapes and dtypes
        with torch._C._DisableAutocast():  # type: ignore[attr-defined]  # it leaves in-place operators alone
            # What a backward saves is the copy, for the target is written.
            return target.copy_(functional(target.clone(), *args, **kwargs))

    return write


def _resizing(op: OpOverload, passing: Callable[[], AbstractContextManager[object]]) -> Callable[..., torch.Tensor]:
    """Nothing happens where the tensor has the size that it would be given, which is decided without a guard."""

    def resize(target: torch.Tensor, wanted: Any, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
        sizes = wanted.shape if isinstance(wanted, torch.Tensor) else wanted
        if memory_format is None and [str(n) for n in target.shape] == [str(n) for n in sizes]:
            return target
        with passing():
            op(target, wanted, memory_format=memory_format)
        return target

    return resize


def _functional_of(op: OpOverload) -> OpOverload | None:
    """The overload that takes the same arguments and writes to none."""
    name = op._schema.name.removeprefix("aten::")
    packet = aten.normal_functional if name == "normal_" else getattr(aten, name.removesuffix("_"))
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for overload in packet.overloads():
        found: OpOverload = getattr(packet, overload)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    return None
