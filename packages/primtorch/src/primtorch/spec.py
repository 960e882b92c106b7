"""A tensor's metadata without a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, overload

import torch

from primtorch.frozen import record

Size: TypeAlias = int | torch.SymInt


@record
class TensorSpec:
    """Shape, strides, dtype, device and storage offset; answers the questions of `torch.Tensor` that concern them.

    Sizes, strides and the offset are ints or SymInts. A spec is immutable.
    """

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Size = 0

    requires_grad: ClassVar[bool] = False
    layout: ClassVar[torch.layout] = torch.strided

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The metadata of a strided tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset())

    @overload
    def size(self, dim: None = None) -> tuple[Size, ...]: ...

    @overload
    def size(self, dim: int) -> Size: ...

    def size(self, dim: int | None = None) -> Size | tuple[Size, ...]:
        """The shape, or the size of one dim. Raises IndexError for a dim that is not there, as `stride` does."""
        return self.shape if dim is None else self.shape[dim]

    @overload
    def stride(self, dim: None = None) -> tuple[Size, ...]: ...

    @overload
    def stride(self, dim: int) -> Size: ...

    def stride(self, dim: int | None = None) -> Size | tuple[Size, ...]:
        """The strides, or that of one dim, in elements."""
        return self.strides if dim is None else self.strides[dim]

    def storage_offset(self) -> Size:
        """Where the first element lies in its memory, in elements."""
        return self.offset

    def dim(self) -> int:
        """How many dims there are."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """How many dims there are."""
        return len(self.shape)

    def numel(self) -> Size:
        """How many elements there are; 1 without dims."""
        n: Size = 1
        for size in self.shape:
            n = n * size
        return n

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Whether elements are real floats."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether elements are complex."""
        return self.dtype.is_complex

    def __repr__(self) -> str:
        at = f", offset={self.offset}" if not (type(self.offset) is int and self.offset == 0) else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{_join(self.shape)}]({_join(self.strides)}){at} {self.device}"


def spec_of(value: Any) -> TensorSpec:
    """The metadata of a tensor, or of what is metadata already."""
    return value if isinstance(value, TensorSpec) else TensorSpec.of(value)


def of_numbers(spec: TensorSpec) -> bool:
    """Whether no size is a symbol."""
    return _INT.issuperset(map(type, (*spec.shape, *spec.strides, spec.offset)))


_INT = frozenset((int,))


def _join(values: Sequence[Size]) -> str:
    return ", ".join(map(str, values))
