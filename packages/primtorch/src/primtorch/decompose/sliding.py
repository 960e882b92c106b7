"""Windows spelt out by indices: adaptive and fractional maxima, unpooling, columns of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable
from primtorch.layout import product
from primtorch.promotion import compute_dtype

aten = torch.ops.aten
RULES = RuleTable()


def _each(values: Any, rank: int) -> tuple[Any, ...]:
    if isinstance(values, (int, torch.SymInt)):
        return (values,) * rank
    return tuple(values) * rank if len(values) == 1 else tuple(values)


# --- adaptive maxima -------------------------------------------------------------------------------
def _adaptive_positions(b: Builder, size: Any, out: Any, device: torch.device) -> tuple[Value, Any]:
    """(out, window) positions of the window [floor(i*size/out), ceil((i+1)*size/out)), its last one repeated where
    the window is shorter than the longest."""
    exact = isinstance(size, int) and isinstance(out, int) and size % out == 0
    longest = size // out if exact else (size + out - 1) // out + 1
    i = b.iota(out, device)
    start, stop = (i * size) // out, ((i + 1) * size + (out - 1)) // out
    place = start.unsqueeze(1) + b.iota(longest, device).unsqueeze(0)
    return place.minimum(stop.unsqueeze(1) - 1), longest


def _adaptive_max_pool(rank: int) -> Any:
    def rule(b: Builder, x: Value, output_size: Any) -> tuple[Value, Value]:
        out = _each(output_size, rank)
        lead, spatial = x.shape[: x.rank - rank], x.shape[x.rank - rank :]
        if any(isinstance(n, int) and n == 0 for n in (*out, *x.shape)):
            shape = (*lead, *out)
            return b.full(shape, 0, x.dtype, x.device), b.full(shape, 0, torch.int64, x.device)
        indices, flat, windows = [], None, []
        for d in range(rank):
            place, longest = _adaptive_positions(b, spatial[d], out[d], x.device)
            # axes: out_0, window_0, out_1, window_1, ...
            place = place.unsqueeze(*range(2 * d), *range(2 * d + 2, 2 * rank))
            indices.append(place)
            windows.append(longest)
            flat = place if flat is None else flat * spatial[d] + place
        assert flat is not None
        taken = b.emit(prims.index, x, (*(None,) * len(lead), *indices), False)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        count = product(windows)
        taken = taken.permute([*range(len(lead)), *(len(lead) + d for d in order)]).reshape((*lead, *out, count))
        where = flat.permute(order).reshape((*out, count)).expand((*lead, *out, count))
        last = len(lead) + rank
        best = b.emit(prims.argmax, taken, (last,), True)
        return (
            b.emit(prims.gather, taken, last, best).squeeze(last),
            b.emit(prims.gather, where, last, best).squeeze(last),
        )

    return rule


def scatter_by_position(b: Builder, grad: Value, x: Value, indices: Value, rank: int) -> Value:
    """Add each element of `grad` to the element of x's spatial dims whose flat position `indices` gives."""
    lead = x.shape[: x.rank - rank]
    count, windows = product(x.shape[x.rank - rank :]), product(grad.shape[grad.rank - rank :])
    compute = compute_dtype(grad.dtype)
    zeros = b.full((*lead, count), 0, compute, grad.device)
    out = b.emit(
        prims.scatter_add,
        zeros,
        len(lead),
        indices.reshape((*lead, windows)),
        grad.to(compute).reshape((*lead, windows)),
    )
    return out.reshape(x.shape).to(grad.dtype)  # type: ignore[no-any-return]


for _rank in (2, 3):
    RULES.add(getattr(aten, f"adaptive_max_pool{_rank}d").default, _adaptive_max_pool(_rank))
    RULES.add(
        getattr(aten, f"adaptive_max_pool{_rank}d_backward").default,
        lambda b, grad, x, indices, rank=_rank: scatter_by_position(b, grad, x, indices, rank),
    )
    RULES.add(
        getattr(aten, f"fractional_max_pool{_rank}d").default,
        lambda b, *args, prim=prims.PRIMS[f"fractional_max_pool{_rank}d"]: b.emit(prim, *args),
    )
    RULES.add(
        getattr(aten, f"fractional_max_pool{_rank}d_backward").default,
        lambda b, grad, x, kernel, out, indices, rank=_rank: scatter_by_position(b, grad, x, indices, rank),
    )


# --- unpooling -----------------------------------------------------------------------------------
def _max_unpool(rank: int) -> Any:
    def rule(b: Builder, x: Value, indices: Value, output_size: Sequence[Any], *geometry: Any) -> Value:
        lead = x.shape[: x.rank - rank]
        windows = product(x.shape[x.rank - rank :])
        zeros = b.full((*lead, product(output_size)), 0, x.dtype, x.device)
        out = b.emit(prims.scatter, zeros, len(lead), indices.reshape((*lead, windows)), x.reshape((*lead, windows)))
        return out.reshape((*lead, *output_size))  # type: ignore[no-any-return]

    return rule


RULES.add(aten.max_unpool2d.default, _max_unpool(2))
RULES.add(aten.max_unpool3d.default, _max_unpool(3))


# --- columns of patches ----------------------------------------------------------------------------
def _patch_positions(b: Builder, out: Any, kernel: Any, dilation: Any, stride: Any, device: torch.device) -> Value:
    """(kernel, out) positions in the padded image."""
    tap = b.iota(kernel, device, step=dilation).unsqueeze(1)
    return tap + b.iota(out, device, step=stride).unsqueeze(0)  # type: ignore[no-any-return]


def _patch_count(size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@RULES(aten.im2col.default)
def _im2col(b: Builder, x: Value, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    kernel, dilation, padding, stride = (_each(v, 2) for v in (kernel_size, dilation, padding, stride))
    image = x if x.rank == 4 else x.unsqueeze(0)
    n, c, *spatial = image.shape
    out = [_patch_count(*v) for v in zip(spatial, kernel, dilation, padding, stride, strict=True)]
    if any(not isinstance(p, int) or p != 0 for p in padding):
        image = b.emit(prims.pad, image, (0, 0, *padding), (0, 0, *padding), b.number(0, image))
    rows, columns = (_patch_positions(b, out[d], kernel[d], dilation[d], stride[d], x.device) for d in range(2))
    patches = b.emit(prims.index, image, (None, None, rows.unsqueeze(2, 3), columns.unsqueeze(0, 1)), False)
    result = patches.permute((0, 1, 2, 4, 3, 5)).reshape((n, c * kernel[0] * kernel[1], out[0] * out[1]))
    return result if x.rank == 4 else result.squeeze(0)  # type: ignore[no-any-return]


@RULES(aten.col2im.default)
def _col2im(
    b: Builder, x: Value, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Value:
    kernel, dilation, padding, stride = (_each(v, 2) for v in (kernel_size, dilation, padding, stride))
    size = _each(output_size, 2)
    columns = x if x.rank == 3 else x.unsqueeze(0)
    n = columns.shape[0]
    c = columns.shape[1] // (kernel[0] * kernel[1])
    out = [_patch_count(*v) for v in zip(size, kernel, dilation, padding, stride, strict=True)]
    patches = columns.compute().reshape((n, c, *kernel, *out)).permute((0, 1, 2, 4, 3, 5))
    padded = [s + 2 * p for s, p in zip(size, padding, strict=True)]
    zeros = b.full((n, c, *padded), 0, patches.dtype, x.device)
    rows, cols = (_patch_positions(b, out[d], kernel[d], dilation[d], stride[d], x.device) for d in range(2))
    places = (None, None, rows.unsqueeze(2, 3), cols.unsqueeze(0, 1))
    image = b.emit(prims.index_put, zeros, places, patches, True, False)
    for d in range(2):
        image = image.slice(2 + d, padding[d], padding[d] + size[d])
    image = image.to(x.dtype)
    return image if x.rank == 3 else image.squeeze(0)  # type: ignore[no-any-return]
