"""Indexing by tensors of one integer where these are places: in functions of a score's positions.

Python's indexing reads such a tensor as a number, which only the data tells; here the graph indexes by the tensor.
"""

from __future__ import annotations

from typing import Any

import torch


def at_places(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """`tensor[key]` as a call of the operator that takes tensors, where it is one."""
    tensor, key = args
    items = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(item, torch.Tensor) and item.dim() == 0 for item in items):
        return func, args
    if not all(_is_place(item) or item == slice(None) for item in items) or len(items) > tensor.dim():
        return func, args
    return torch.ops.aten.index.Tensor, (tensor, [item if _is_place(item) else None for item in items])


def _is_place(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.int32, torch.int64)
