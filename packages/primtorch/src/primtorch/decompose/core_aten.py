"""Prims spelt in core ATen: the same rules serve the second opset, with each prim rewritten to canonical ATen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from primtorch.arguments import Number, Sizes
from primtorch.builder import Builder, Operand, Value, tensor_among
from primtorch.families import Operator, overloads
from primtorch.layout import view_strides
from primtorch.prims import PRIMS, Prim
from primtorch.spec import Size

aten = torch.ops.aten
Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]

_SAME_ARGUMENTS: Mapping[str, OpOverload] = {
    name: getattr(aten, name).default
    for name in (
        "abs", "sign", "floor", "ceil", "round", "trunc", "isnan", "isinf", "signbit", "real", "imag", "view_as_real",
        "view_as_complex", "complex", "flip", "roll", "cat", "expand", "permute", "slice_scatter", "gather",
        "scatter_add", "amax", "amin", "cumsum", "cumprod", "logcumsumexp", "as_strided", "diagonal", "unfold",
        "as_strided_scatter", "cummax", "cummin",
    )
} | {
    "scatter": aten.scatter.src,
    "slice": aten.slice.Tensor,
    "squeeze": aten.squeeze.dims,
    "conj": aten.conj_physical.default,
    "sum": aten.sum.dim_IntList,
    **{
        prim.name: getattr(aten, prim.pointwise.overloads).default
        for prim in PRIMS.values()
        if prim.pointwise is not None and prim.operands == 1 and prim.aten is None
    },
}  # fmt: skip

_BINARY: Mapping[str, tuple[OpOverload, OpOverload]] = {
    name: (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
    for name in (
        "add", "sub", "mul", "div", "fmod", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor", "eq", "ne", "lt",
        "le", "gt", "ge",
    )
} | {"pow": (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar)}  # fmt: skip
_TENSORS_ONLY: Mapping[str, OpOverload] = {
    prim.name: Operator(next(overloads(prim.pointwise.overloads)), "").overload
    for prim in PRIMS.values()
    if prim.pointwise is not None and prim.operands == 2 and prim.aten is None and prim.name not in _BINARY
}


def _scalar_tensor(b: Builder, value: Number, like: Value) -> Value:
    made: Value = b.record(
        aten.scalar_tensor.default,
        (value,),
        {"dtype": like.dtype, "device": like.device},
        b.contiguous_spec((), like.dtype, like.device),
        "scalar_tensor",
    )
    return made


def _binary(b: Builder, prim: Prim, x: Operand, y: Operand) -> Call:
    if prim.name in _BINARY:
        both, scalar = _BINARY[prim.name]
        if not isinstance(x, Value):
            x = _scalar_tensor(b, x, tensor_among(y))
        return (both if isinstance(y, Value) else scalar), (x, y), {}
    like = tensor_among(x, y)
    x, y = (v if isinstance(v, Value) else _scalar_tensor(b, v, like) for v in (x, y))
    if prim.name in ("floor_div", "trunc_div"):
        return aten.div.Tensor_mode, (x, y), {"rounding_mode": prim.name.removesuffix("_div")}
    return _TENSORS_ONLY[prim.name], (x, y), {}


def _where(b: Builder, prim: Prim, cond: Value, x: Operand, y: Operand) -> Call:
    like = tensor_among(x, y)
    return aten.where.self, (cond, *(v if isinstance(v, Value) else _scalar_tensor(b, v, like) for v in (x, y))), {}


def _unsqueeze(b: Builder, prim: Prim, t: Value, dims: tuple[int, ...]) -> Call:
    shape: list[Size] = list(t.shape)
    for dim in sorted(dims):
        shape.insert(dim, 1)
    return (
        aten.view.default if len(dims) > 1 else aten.unsqueeze.default,
        (t, tuple(shape)) if len(dims) > 1 else (t, dims[0]),
        {},
    )


def _one_dim_at_a_time(overload: OpOverload) -> Callable[..., Call]:
    def rewrite(b: Builder, prim: Prim, t: Value, dims: tuple[int, ...], keepdim: bool = False) -> Call:
        for dim in sorted(dims, reverse=True)[:-1]:
            shape = tuple(1 if keepdim and d == dim else s for d, s in enumerate(t.shape) if keepdim or d != dim)
            t = b.record(overload, (t, dim, keepdim), {}, b.contiguous_spec(shape, t.dtype, t.device), prim.name)
        return overload, (t, min(dims), keepdim), {}

    return rewrite


def _reshape(b: Builder, prim: Prim, t: Value, shape: Sizes) -> Call:
    """A view, of a row-major copy where the elements do not lie so."""
    if view_strides(t.shape, t.spec.strides, shape) is None:
        options = {"memory_format": torch.contiguous_format}
        t = b.record(aten.clone.default, (t,), options, b.contiguous_spec(t.shape, t.dtype, t.device), "clone")
    return aten.view.default, (t, shape), {}


def _selection(indices: tuple[Value | None, ...], wrap: bool) -> tuple[int, Value] | None:
    """(dim, index) of indexing that takes whole slices along one dim, and counts no index from the end."""
    used = [(d, index) for d, index in enumerate(indices) if index is not None]
    return used[0] if not wrap and len(used) == 1 else None


def _index(b: Builder, prim: Prim, t: Value, indices: tuple[Value | None, ...], wrap: bool) -> Call:
    """`index` counts from the end; the selecting overloads refuse negative indices. Where several meet without
    wrapping, a rule has computed them."""
    chosen = _selection(indices, wrap)
    if chosen is not None and chosen[1].rank == 1:
        return aten.index_select.default, (t, *chosen), {}
    if chosen is not None and chosen[0] == 0 and t.rank == 2:
        return aten.embedding.default, (t, chosen[1]), {}
    return aten.index.Tensor, (t, indices), {}


def _index_put(
    b: Builder, prim: Prim, t: Value, indices: tuple[Value | None, ...], values: Value, accumulate: bool, wrap: bool
) -> Call:
    chosen = _selection(indices, wrap)
    if chosen is not None and chosen[1].rank == 1:
        return (aten.index_add if accumulate else aten.index_copy).default, (t, *chosen, values), {}
    return aten.index_put.default, (t, indices, values, accumulate), {}


def _pad(b: Builder, prim: Prim, t: Value, low: Sizes, high: Sizes, value: Number) -> Call:
    flat = tuple(n for a, z in zip(reversed(low), reversed(high), strict=True) for n in (a, z))
    return aten.constant_pad_nd.default, (t, flat, value), {}


_SPELT: Mapping[str, Callable[..., Call]] = {
    "convert_element_type": lambda b, p, t, dtype, rounded=False: (aten._to_copy.default, (t,), {"dtype": dtype}),
    "device_put": lambda b, p, t, device: (aten._to_copy.default, (t,), {"device": device}),
    "bitcast": lambda b, p, t, dtype: (aten.view.dtype, (t, dtype), {}),
    "full": lambda b, p, shape, value, dtype, device: (
        aten.full.default,
        (shape, value),
        {"dtype": dtype, "device": device},
    ),
    "iota": lambda b, p, length, start, step, dtype, device: (
        aten.arange.start_step,
        (start, start + length * step, step),
        {"dtype": dtype, "device": device},
    ),
    "empty_strided": lambda b, p, shape, strides, dtype, device: (
        aten.empty_strided.default,
        (shape, strides),
        {"dtype": dtype, "device": device},
    ),
    "isfinite": lambda b, p, t: (aten.isfinite.default, (t,), {}),
    "index": _index,
    "index_put": _index_put,
    "unsqueeze": _unsqueeze,
    "reshape": _reshape,
    "where": _where,
    "pad": _pad,
    "prod": _one_dim_at_a_time(aten.prod.dim_int),
    "all": lambda b, p, t, dims, keepdim=False: (aten.all.dims, (t, dims, keepdim), {}),
    "any": lambda b, p, t, dims, keepdim=False: (aten.any.dims, (t, dims, keepdim), {}),
    "argmax": lambda b, p, t, dims, keepdim=False: (aten.argmax.default, (t, dims[0] if dims else None, keepdim), {}),
    "argmin": lambda b, p, t, dims, keepdim=False: (aten.argmin.default, (t, dims[0] if dims else None, keepdim), {}),
    "var_mean": lambda b, p, t, dims, correction, keepdim=False: (
        aten.var_mean.correction,
        (t, dims),
        {"correction": correction, "keepdim": keepdim},
    ),
    "sort": lambda b, p, t, dim, descending, stable: (
        aten.sort.stable,
        (t,),
        {"stable": stable, "dim": dim, "descending": descending},
    ),
    "searchsorted": lambda b, p, sequence, values, right: (
        aten.searchsorted.Tensor,
        (sequence, values),
        {"right": right},
    ),
}


SPELLINGS: frozenset[OpOverload] = frozenset(
    [
        *_SAME_ARGUMENTS.values(),
        *(overload for pair in _BINARY.values() for overload in pair),
        *_TENSORS_ONLY.values(),
        *(prim.aten for prim in PRIMS.values() if prim.aten is not None),
        aten.div.Tensor_mode,
        aten.where.self,
        aten.view.default,
        aten.clone.default,
        aten.view.dtype,
        aten.unsqueeze.default,
        aten.constant_pad_nd.default,
        aten.scalar_tensor.default,
        aten._to_copy.default,
        aten.full.default,
        aten.arange.start_step,
        aten.empty_strided.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.embedding.default,
        aten.index_put.default,
        aten.index_add.default,
        aten.index_copy.default,
        aten.isfinite.default,
        aten.prod.dim_int,
        aten.all.dims,
        aten.any.dims,
        aten.argmax.default,
        aten.argmin.default,
        aten.var_mean.correction,
        aten.sort.stable,
        aten.searchsorted.Tensor,
    ]
)
"""What a prim may be spelt with: core ATen, and the whole operators that it has no smaller words for."""


def as_core_aten(b: Builder, prim: Prim, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Call:
    """(overload, args, kwargs) for a prim call; prims that ATen has no word for stay prims."""
    if prim.aten is not None:
        return prim.aten, args, dict(kwargs)
    if prim.name in _SAME_ARGUMENTS:
        return _SAME_ARGUMENTS[prim.name], args, dict(kwargs)
    if prim.family in ("elementwise binary", "comparison"):
        return _binary(b, prim, *args)
    spelt = _SPELT.get(prim.name)
    return spelt(b, prim, *args, **kwargs) if spelt is not None else (prim, args, dict(kwargs))
