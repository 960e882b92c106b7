"""Padding by a number and by the tensor's own elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable

aten = torch.ops.aten
RULES = RuleTable()


@RULES(aten.constant_pad_nd.default)
def _constant_pad(b: Builder, x: Value, pad: Sequence[Any], value: Any = 0) -> Value:
    low: list[Any] = [0] * x.rank
    high: list[Any] = [0] * x.rank
    for i in range(len(pad) // 2):
        low[x.rank - 1 - i], high[x.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    if all(isinstance(n, int) and n == 0 for n in (*low, *high)):
        return x
    return b.emit(prims.pad, x, tuple(low), tuple(high), b.number(value, x))  # type: ignore[no-any-return]


def _mirrored(i: Value, size: Any) -> Value:
    """Positions outside [0, size) reflected at the ends, which are not repeated."""
    last = size - 1
    return last - (last - i.map(prims.abs)).map(prims.abs)  # type: ignore[no-any-return]


def _clamped(i: Value, size: Any) -> Value:
    return i.maximum(0).minimum(size - 1)


def _pad_indices(
    b: Builder, place: Any, spatial: Sequence[Any], padding: Sequence[Any], device: torch.device
) -> list[Value]:
    rank = len(spatial)
    indices = []
    for d, size in enumerate(spatial):
        low, high = padding[2 * (rank - 1 - d)], padding[2 * (rank - 1 - d) + 1]
        i = place(b.iota(size + low + high, device, start=-low), size)
        indices.append(i.unsqueeze(*range(1, rank - d)))
    return indices


def _indexed_pad(place: Any, rank: int) -> Any:
    def rule(b: Builder, x: Value, padding: Sequence[Any]) -> Value:
        lead = x.rank - rank
        indices = _pad_indices(b, place, x.shape[lead:], padding, x.device)
        return b.emit(prims.index, x, (*(None,) * lead, *indices), False)  # type: ignore[no-any-return]

    return rule


def _indexed_pad_backward(place: Any, rank: int) -> Any:
    def rule(b: Builder, grad: Value, x: Value, padding: Sequence[Any]) -> Value:
        lead = x.rank - rank
        indices = _pad_indices(b, place, x.shape[lead:], padding, x.device)
        g = grad.compute()
        zeros = b.full(x.shape, 0, g.dtype, g.device)
        return b.emit(prims.index_put, zeros, (*(None,) * lead, *indices), g, True, False).to(grad.dtype)  # type: ignore[no-any-return]

    return rule


for _rank in (1, 2, 3):
    for _name, _how in (("reflection", _mirrored), ("replication", _clamped)):
        RULES.add(getattr(aten, f"{_name}_pad{_rank}d").default, _indexed_pad(_how, _rank))
        RULES.add(getattr(aten, f"{_name}_pad{_rank}d_backward").default, _indexed_pad_backward(_how, _rank))
