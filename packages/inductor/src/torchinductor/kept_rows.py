"""What a forward keeps for its backward, in rows that vector loads divide.

A copy of 16-bit numbers whose rows are odd (the scores of 50,257 words, which the caller has and may overwrite) is
written and read number by number. Nobody but the backward sees how it lies, so that its rows get a margin; a matrix
product whose result has the same margin has then made the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from primtorch import prims
from primtorch.layout import contiguous_strides
from primtorch.prims import Prim
from primtorch.spec import Size, TensorSpec
from torchinductor.schemas import DeviceTraits

_WASTE = 64  # a margin is at most this part of a row
_LOOK_AT_MEMORY = frozenset({"as_strided", "as_strided_scatter", "bitcast"})


def align_kept_rows(kept: Iterable[tuple[fx.Node, fx.Node]], traits_of: Callable[[torch.device], DeviceTraits]) -> bool:
    """Changes copies that a forward returns and the backward's placeholders for them, given in pairs, in place; says
    whether anything changed."""
    changed = False
    for value, placeholder in kept:
        strides = _aligned(value, traits_of) if _is_copy(value) and not _seen(placeholder) else None
        if strides is None:
            continue
        spec = _spec(value)
        laid = TensorSpec(spec.shape, strides, spec.dtype, spec.device)
        value.target, value.args = prims.copy_strided, (value.args[0], strides)
        value.meta["val"] = placeholder.meta["val"] = laid
        changed = True
    return changed


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value  # type: ignore[no-any-return]


def _is_copy(value: fx.Node) -> bool:
    return value.target is torch.ops.aten.clone.default and not value.kwargs and len(value.users) == 1


def _seen(node: fx.Node) -> bool:
    """Whether anything but kernels, which are made for any strides, sees how a value lies."""
    for user in node.users:
        if not isinstance(user.target, Prim) or user.target.name in _LOOK_AT_MEMORY:
            return True
        if user.target.family == "view" and _seen(user):
            return True
    return False


def _aligned(value: fx.Node, traits_of: Callable[[torch.device], DeviceTraits]) -> tuple[Size, ...] | None:
    """Strides of a value's rows with a margin; None where they need none, or it is too dear."""
    spec = _spec(value)
    rates = traits_of(spec.device).products
    shape = tuple(spec.shape)
    if rates is None or len(shape) < 2 or not all(isinstance(size, int) for size in shape) or 0 in shape:
        return None
    if spec.dtype.itemsize != 2 or not spec.dtype.is_floating_point or tuple(spec.strides) != contiguous_strides(shape):
        return None
    unit = rates.alignment // spec.dtype.itemsize
    columns = shape[-1]
    grown = -(-columns // unit) * unit
    if grown == columns or (grown - columns) * _WASTE > columns:
        return None
    return contiguous_strides((*shape[:-1], grown))
