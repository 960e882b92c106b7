"""Indexing by tensors of one integer where these are places: in functions of a score's positions.

Python's indexing reads such a tensor as a number, which only the data tells; here the graph indexes by the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdynamo.graph.lists_of_tensors import Record


def at_places(
    record: Record, func: Callable[..., object], args: tuple[Any, ...]
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """`tensor[key]` as a call of the operator that takes tensors, where there are such places in the key; what else is
    there is recorded as a call before it."""
    tensor, key = args
    items = list(key) if isinstance(key, tuple) else [key]
    if not any(isinstance(item, torch.Tensor) and item.dim() == 0 for item in items):
        return func, args
    if not all(_is_place(item) or _is_basic(item) for item in items):
        return func, args
    for at, item in enumerate(items):
        if item is Ellipsis:
            named = sum(other is not None and other is not Ellipsis for other in items)
            items[at : at + 1] = [slice(None)] * (tensor.dim() - named)
            break
    if sum(item is not None for item in items) > tensor.dim():
        return func, args
    for at, item in enumerate(items):
        if type(item) is int:  # a place like the others: what is added there in the backward stays one number
            items[at] = record(torch.full, ((), item), {"dtype": torch.int64, "device": tensor.device})
    basic = tuple(slice(None) if _is_place(item) else item for item in items)
    if any(item != slice(None) for item in basic):
        tensor = record(func, (tensor, basic), {})
    return torch.ops.aten.index.Tensor, (tensor, [item if _is_place(item) else None for item in items])


def _is_place(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.int32, torch.int64)


def _is_basic(item: object) -> bool:
    return item is None or item is Ellipsis or type(item) is int or isinstance(item, slice)
