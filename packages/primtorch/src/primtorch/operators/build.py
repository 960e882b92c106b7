"""How formulas make descriptors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from primtorch.arguments import TENSORS, Number, Sizes, TensorLike
from primtorch.eager_kernels import Fact
from primtorch.errors import DataDependentShape
from primtorch.layout import broadcast, contiguous_strides, dense_like, iterator_strides
from primtorch.spec import Size, TensorSpec


class Fresh(Protocol):
    """Gives a size that only the data tells, in a range. Formulas of such operators take it as keyword `fresh`.

    of: the tensor whose elements that are not zero it counts, so that it is the same size until they change."""

    def __call__(self, maximum: Size | None, minimum: Size = 0, of: TensorLike | None = None) -> Size: ...


def refuse_fresh(maximum: Size | None, minimum: Size = 0, of: TensorLike | None = None) -> Size:
    """Without symbols for data-dependent sizes there is none to give."""
    raise DataDependentShape(
        "an operator's output size",
        "it depends on the data (nonzero, unique, masked_select or indexing by a mask)",
        "Give the FakeMode a ShapeEnv, or keep this part out of the compiled region.",
    )


def per_dim(values: Size | Sequence[Size], rank: int, default: Sequence[Size] | None = None) -> Sizes:
    """One entry for each spatial dim, from eager's number, its list of one, or its empty list (the default)."""
    if isinstance(values, int | torch.SymInt):
        return (values,) * rank
    if not values and default is not None:
        return tuple(default)
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def contiguous(like: TensorLike, shape: Iterable[Size], dtype: torch.dtype | None = None) -> TensorSpec:
    """A contiguous result on `like`'s device."""
    sizes = tuple(shape)
    return TensorSpec(sizes, contiguous_strides(sizes), dtype or like.dtype, like.device)


def strided(
    like: TensorLike, shape: Iterable[Size], strides: Iterable[Size], dtype: torch.dtype | None = None
) -> TensorSpec:
    """A fresh result with the given strides."""
    return TensorSpec(tuple(shape), tuple(strides), dtype or like.dtype, like.device)


def as_dense(like: TensorLike) -> TensorSpec:
    """A fresh result of `like`'s shape and dtype, with its order of dims and no gaps."""
    shape = tuple(like.shape)
    return strided(like, shape, dense_like(shape, like.stride()))


def view(base: TensorLike, shape: Iterable[Size], strides: Iterable[Size], offset: Size | None = None) -> TensorSpec:
    """A result that shares memory with `base`."""
    at = base.storage_offset() if offset is None else offset
    return TensorSpec(tuple(shape), tuple(strides), base.dtype, base.device, at)


def common_device(operands: Sequence[TensorLike]) -> torch.device:
    """The device of the result; a 0-d CPU tensor goes with any device.

    Raises:
        RuntimeError: two devices.
    """
    device = operands[0].device
    for operand in operands[1:]:
        other = operand.device
        if other is device or other == device:
            continue
        if other.type == "cpu" and not operand.shape:
            continue
        if device.type == "cpu" and all(not o.shape for o in operands if o.device == device):
            device = other
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {device} and {other}!"
        )
    return device


def as_cast(x: TensorLike, dtype: torch.dtype | None) -> tuple[Sizes, Sizes]:
    """Shape and strides of an operand as TensorIterator sees it that computes in a dtype: on CPUs it casts operands of
    others before it looks at them, and a cast of one with repeated elements has none."""
    shape, strides = tuple(x.shape), x.stride()
    as_it_lies = dtype is None or x.dtype is dtype or not Fact.CASTS_BEFORE_IT_LOOKS.on(x.device)
    return shape, strides if as_it_lies else dense_like(shape, strides)


def elementwise(
    operands: Sequence[TensorLike | Number | None], dtype: torch.dtype, computed: torch.dtype | None = None
) -> TensorSpec:
    """The output of TensorIterator over the operands. A number is one without dims, beside which no tensor is taken
    as it lies; what eager passes beside its iterator is not to be given here.

    Args:
        dtype: of the output.
        computed: what the iterator casts its operands to; None where it takes each as it is.
    """
    tensors = [t for t in operands if isinstance(t, TENSORS)]
    numbers = sum(o is not None for o in operands) - len(tensors)
    if len(tensors) == 1 and not numbers:
        only = tensors[0]
        shape: Sizes = tuple(only.shape)
        return TensorSpec(shape, iterator_strides(shape, ((shape, only.stride()),)), dtype, only.device)
    if not tensors:  # torch.div(7, 2) and the like: numbers alone give a 0-d tensor
        return TensorSpec((), (), dtype, torch.device("cpu"))
    device = common_device(tensors)
    layouts = tuple(as_cast(t, computed) for t in tensors)
    shape = layouts[0][0]
    for other, _ in layouts[1:]:
        shape = broadcast(shape, other)
    if numbers:
        layouts += (((), ()),)
    return TensorSpec(shape, iterator_strides(shape, layouts), dtype, device)
