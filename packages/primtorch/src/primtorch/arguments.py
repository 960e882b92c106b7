"""The types in which formulas, rules and prims say what they take, each with its meaning in one line.

`Size` and `TensorSpec` stand in `primtorch.spec`; what a rule computes on, `Value` and `Operand`, in
`primtorch.builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

import torch

from primtorch.spec import Size, TensorSpec

Sizes: TypeAlias = tuple[Size, ...]
"""A shape, or the strides of one."""
Number: TypeAlias = bool | int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool
"""A Python number, or a symbol for one: what ATen calls a Scalar."""
NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
"""`Number` for isinstance."""
Real: TypeAlias = float | torch.SymInt
"""A number that is compared with others. A symbol for a float counts as a float: torch does not say what it can do."""
TensorLike: TypeAlias = TensorSpec | torch.Tensor
"""What a formula gets for a tensor: a descriptor, or a tensor, of which it reads the metadata alone."""
TENSORS = (TensorSpec, torch.Tensor)
"""`TensorLike` for isinstance: it tells tensors from numbers among a formula's operands."""
Device: TypeAlias = torch.device | str | None
"""What a program gives as device=; None is the default device, or that of the tensor that it is like."""
PerDim: TypeAlias = Size | Sequence[Size]
"""An entry for each spatial dimension: one number for all of them, a list of one, or as many as there are."""
Dims: TypeAlias = Sequence[int] | int | None
"""The dimensions of a reduction; None is all of them."""


class TensorOptions(TypedDict, total=False):
    """The keywords of ATen's factories."""

    dtype: torch.dtype | None
    layout: torch.layout | None
    device: Device
    pin_memory: bool | None


class LikeOptions(TensorOptions, total=False):
    """The keywords of factories that make a tensor like another."""

    memory_format: torch.memory_format | None
