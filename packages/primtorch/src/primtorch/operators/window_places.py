"""Places in windows: an element's offset is its number in the row-major order of its window, its position that in the
row-major order of all spatial dims, as ATen's indices have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import Sizes
from primtorch.builder import Builder, Value
from primtorch.layout import certainly_equal, product
from primtorch.spec import Size


def numbers_along(b: Builder, offsets: Value, kernel: Sequence[Size]) -> list[Value | int]:
    """For each dim the int32 number in its window of the elements with these offsets; 0 where windows have but one."""
    found: list[Value | int] = []
    rest = offsets.to(torch.int32)
    for d, size in enumerate(kernel):
        inner = product(kernel[d + 1 :])
        if isinstance(size, int) and size == 1:
            found.append(0)
        elif isinstance(inner, int) and inner == 1:
            found.append(rest)
        else:
            number = b.binary(prims.trunc_div, rest, inner)
            rest = rest - number * inner
            found.append(number)
    return found


def flattened(places: Sequence[Value], spatial: Sizes) -> Value:
    """The positions of elements that have these places along each dim."""
    flat, *others = places
    for place, size in zip(others, spatial[1:], strict=True):
        flat = flat * size + place
    return flat


def positions_of(b: Builder, offsets: Value, windows: Sequence[Sizes], spatial: Sizes) -> Value:
    """The positions of the elements that have these offsets in windows: kernel, stride, padding and dilation of each
    dim."""
    rank = len(spatial)
    _, strides, paddings, dilations = windows
    padded = product([size + 2 * padding for size, padding in zip(spatial, paddings, strict=True)])
    dtype = torch.int32 if isinstance(padded, int) and padded < 2**31 else torch.int64
    position: Value | None = None
    for d, (stride, padding) in enumerate(zip(strides, paddings, strict=True)):
        row, count = product(spatial[d + 1 :]), offsets.shape[offsets.rank - rank + d]
        start = b.iota(count, offsets.device, -padding * row, stride * row, dtype)
        start = start.unsqueeze(*range(1, rank - d))
        position = start if position is None else position + start
    assert position is not None
    for d, number in enumerate(numbers_along(b, offsets, windows[0])):
        if isinstance(number, Value):
            step = dilations[d] * product(spatial[d + 1 :])
            number = number.to(dtype)
            position = position + (number if isinstance(step, int) and step == 1 else number * step)
    return position.expand(offsets.shape).to(torch.int64)


def certainly_alike(ones: Sequence[Sizes], others: Sequence[Sizes]) -> bool:
    """Whether windows are certainly the same; nothing is asked of symbols."""
    return all(
        certainly_equal(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)
    )


# --- in blocks -----------------------------------------------------------------------------------
# Places are counted as (block, place in the block) along each dim, a block being as long as the windows' stride, and
# the first one beginning in the padding.
def positions_in_blocks(
    b: Builder, spatial: Sizes, blocks: Sequence[Size], stride: Sizes, padding: Sizes, device: torch.device
) -> Value:
    """(blocks_0, stride_0, blocks_1, stride_1, ...) positions; what lies in the padding has any number."""
    rank, places = len(spatial), []
    for d, count in enumerate(blocks):
        along = b.iota(count * stride[d], device, start=-padding[d]).reshape((count, stride[d]))
        places.append(along.unsqueeze(*range(2, 2 * (rank - d))))
    return flattened(places, spatial)


def offsets_in_blocks(
    b: Builder,
    kernel: Sizes,
    stride: Sizes,
    dilation: Sizes,
    before: Sequence[int],
    device: torch.device,
) -> Value:
    """(stride_0, 1, stride_1, ...) int32 offsets that the places of a block have in the window that starts `before`
    blocks earlier; negative where a place is none of its elements."""
    rank, nowhere = len(kernel), -product(kernel)
    offset: Value | None = None
    for d, back in enumerate(before):
        inner, first = product(kernel[d + 1 :]), back * stride[d]
        if dilation[d] == 1:  # one expression: it is computed for each position
            along = b.iota(stride[d], device, first * inner, inner, torch.int32)
        else:
            place = b.iota(stride[d], device, first, dtype=torch.int32)
            along = b.binary(prims.trunc_div, place, dilation[d])
            along = b.where((along * dilation[d]).eq(place), along * inner, nowhere)
        if first + stride[d] > dilation[d] * kernel[d]:
            along = b.where(along < kernel[d] * inner, along, nowhere)
        along = along.unsqueeze(*range(1, 2 * (rank - d) - 1))
        offset = along if offset is None else offset + along
    assert offset is not None
    return offset
