"""How a kernel's iteration space is laid over programs and tiles. Pure decisions on axes; no text.

`planned` gives a kernel its `Layout`, once; all that writes or launches it reads it there.

A tile has at most two dimensions. A pointwise kernel takes one of three shapes: `flat` (one line over all axes), `rows`
(a tile along the last axis, the other axes fixed by the program) and `tiled` (two axes, for transposes). A reduction
takes a tile of outer points by inner points, the inner dimension whole (`persistent`) or in a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import coefficient_of, number, product
from torchinductor.ir import Apply, Axis, Kernel, Load
from torchinductor.scheduling.axes import by_rows, merge_axes
from torchinductor.scheduling.online import join_passes

Shape = Literal["flat", "rows", "tiled", "reduction", "matmul", "attention"]

PERSISTENT_LIMIT = 16384  # elements of a row that a program keeps in registers
PROGRAMS_WANTED = 132 * 4  # enough to fill a large GPU
LOOP_BLOCK = 4096  # elements of a row that a program takes at a time where it loops
NARROW = 1024  # columns up to which a sum of columns takes narrow tiles
UNKNOWN_SIZE = 1024  # what a symbolic size counts as where sizes are weighed


@dataclass(frozen=True, slots=True)
class Layout:
    """How a kernel whose axes are merged is laid out."""

    shape: Shape
    x: tuple[Axis, ...]  # axes that the tile's x dimension runs over, the last one fastest
    y: tuple[Axis, ...] = ()  # the second tile dimension of `tiled`
    r: tuple[Axis, ...] = ()  # inner axes
    fixed: tuple[Axis, ...] = ()  # axes whose value is one number in a program
    x_block: int = 1024
    y_block: int = 1
    r_block: int = 1
    persistent: bool = False
    warps: int = 4
    wide: bool = False  # offsets need 64 bits
    stages: int = 1  # iterations of a loop whose loads are under way at one time

    def across(self, dim: str) -> int:
        """The length of a two-dimensional tile across one of its dimensions."""
        return self.x_block if dim == "r" else self.y_block

    @property
    def grid(self) -> IntExpr:
        """Programs to launch."""
        count = product(a.size for a in self.fixed)
        for axes, block in ((self.x, self.x_block), (self.y, self.y_block)):
            if axes:
                count = count * _ceil_div(product(a.size for a in axes), block)
        return count


def _ceil_div(size: IntExpr, block: int) -> IntExpr:
    return (size + number(block - 1)) // number(block)


def planned(kernel: Kernel, join: bool = True) -> Kernel:
    """The kernel with axes merged, and with its layout. Where rows are looped over, passes over them are joined."""
    kernel = _as_memory_lies(merge_axes(kernel))
    layout = _reduction(kernel) if kernel.inner else _pointwise(kernel)
    if kernel.inner and not layout.persistent and join:
        kernel = join_passes(kernel)
        layout = _reduction(kernel)
    stages = 2 if layout.r and not layout.persistent else 1
    return replace(kernel, layout=replace(layout, wide=is_wide(kernel), stages=stages))


def _as_memory_lies(kernel: Kernel) -> Kernel:
    """A pointwise kernel with its loops as its result lies, where more memory is walked through so: neighbouring
    threads of a kernel over channels-last images are neighbours in memory."""
    other = by_rows(kernel)
    if other is None:
        return kernel
    votes = _unit_axes(kernel)
    return merge_axes(other) if votes[other.axes[-1].name] > votes[kernel.axes[-1].name] else kernel


# ---- choices --------------------------------------------------------------------------------------------------------


def is_wide(kernel: Kernel) -> bool:
    """Whether an offset or a linear position may not fit 32 bits. Unknown sizes may be large."""
    extents = [product(a.size for a in kernel.axes)]
    for name in kernel.arguments:
        buffer = kernel.buffers[name]
        reach = number(1)
        for size, stride in zip(buffer.shape, buffer.strides, strict=True):
            reach = reach + size * stride
        extents.append(reach)
    return any(e.as_int() is None or (e.as_int() or 0) >= 2**31 for e in extents)


def _static(axes: Iterable[Axis]) -> int | None:
    return product(a.size for a in axes).as_int()


def _unit_axes(kernel: Kernel) -> Counter[str]:
    """How much memory is walked through one element at a time along each axis, in bytes."""
    votes: Counter[str] = Counter()
    sizes = {a.name: a.size.as_int() or UNKNOWN_SIZE for a in kernel.axes}
    for stage in kernel.stages:
        for access in stage.body.accesses:
            index, used = access.index, access.index.symbols()
            scattered = bool(used - sizes.keys() - set(kernel.symbols))  # by a value that is read: anywhere
            weight = kernel.buffers[access.buffer].dtype.itemsize
            for axis, size in sizes.items():
                weight *= size if scattered or axis in used else 1
            for axis in sizes:
                step = coefficient_of(index, axis)
                if step is not None and step.as_int() == 1:
                    votes[axis] += weight
    return votes


def _masked_loads(kernel: Kernel) -> int:
    return sum(load.mask is not None for stage in kernel.stages for load in stage.body.of(Load))


def pow2(value: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(value - 1, 0).bit_length()


def _pointwise(kernel: Kernel) -> Layout:
    axes = kernel.outer
    votes = _unit_axes(kernel)
    last = axes[-1] if axes else None
    # A second axis that some access walks along: without a square tile it would touch one element a cache line.
    heavy = votes[last.name] // 4 if last is not None else 0  # a vector's walk along its only axis does not count
    others = [a for a in axes[:-1] if votes[a.name] > heavy and (a.size.as_int() or 64) >= 16]
    if last is not None and others and (last.size.as_int() or 64) >= 16:
        other = max(others, key=lambda a: votes[a.name])
        fixed = tuple(a for a in axes if a not in (other, last))
        return Layout("tiled", (last,), (other,), fixed=fixed, x_block=64, y_block=64, warps=8)
    width = last.size.as_int() if last is not None else 1
    if len(axes) > 1 and width is not None and last is not None and width >= 16 and _masked_loads(kernel) >= 3:
        # A window: its rows' positions and checks are made once a row, its columns' once a column.
        block = min(pow2(width), 128)
        # Two points a thread: neighbouring threads read neighbouring memory.
        return Layout("tiled", (last,), tuple(axes[:-1]), x_block=block, y_block=512 // block, warps=8)
    if len(axes) > 1 and width is not None and last is not None:
        block = min(pow2(width), 2048)
        if width >= 256 and -(-width // block) * block <= 1.13 * width:
            return Layout("rows", (last,), fixed=tuple(axes[:-1]), x_block=block, warps=4 if block <= 1024 else 8)
    total = _static(axes)
    block = 1024 if total is None else max(128, min(1024, pow2(-(-total // PROGRAMS_WANTED))))
    return Layout("flat", tuple(axes), x_block=block, warps=max(1, min(4, block // 128)))


def _reduction(kernel: Kernel) -> Layout:
    inner, outer = kernel.inner, kernel.outer
    votes = _unit_axes(kernel)
    along_inner = sum(votes[a.name] for a in inner)
    along_outer = votes[outer[-1].name] if outer else 0
    length = _static(inner)
    count = _static(outer)
    ordered = any(s.body.scans for s in kernel.stages)
    if along_outer > along_inner:
        return _column(kernel, length, count)
    if length is not None and length <= PERSISTENT_LIMIT:
        return _persistent_row(kernel, length, count)
    block = LOOP_BLOCK if length is None else min(pow2(length), LOOP_BLOCK)
    passes = sum(stage.kind == "inner" for stage in kernel.stages)
    # Rows that are read several times should stay in the second-level cache: few wide programs, not many narrow ones.
    warps = 32 if passes > 1 and not ordered else 8
    return Layout("reduction", outer, r=inner, x_block=1, r_block=block * (2 if warps == 32 else 1), warps=warps)


def _persistent_row(kernel: Kernel, length: int, count: int | None) -> Layout:
    r_block = pow2(length)
    rows = max(1, 1024 // r_block)
    if count is not None:
        rows = min(rows, pow2(max(1, count // PROGRAMS_WANTED)))
    elements = rows * r_block
    # Measured on an H200: backward of layer norm is a fifth faster with 32 elements a thread than with 16, a softmax as
    # fast, and what computes much (the error function) slower.
    heavy = any(op.heavy for stage in kernel.stages for op in stage.body.of(Apply))
    warps = max(1, min(16, elements // (512 if heavy else 1024)))
    return Layout(
        "reduction", kernel.outer, r=kernel.inner, x_block=rows, r_block=r_block, persistent=True, warps=warps
    )


def _column(kernel: Kernel, length: int | None, count: int | None) -> Layout:
    """The outer axis is the one that is contiguous: tiles that are wide in x."""
    last = kernel.outer[-1].name
    walked = [op for stage in kernel.stages for op in stage.body.accesses if last in op.index.symbols()]
    widest = 512 // max((kernel.buffers[op.buffer].dtype.itemsize for op in walked), default=4)
    # Measured on an H200: sums of 768 columns take two thirds of the time in narrow tiles of few threads, those of 4096
    # a third more; 128 columns of 16 bits are a tenth to a quarter faster than 256.
    narrow = count is not None and count <= NARROW
    width = min(widest, 64 if narrow else 128, 64 if count is None else pow2(count))
    limit = 8192 // width
    r_block = min(limit, 64 if length is None else pow2(length), 64)
    whole = length is not None and length <= r_block
    warps = 4 if narrow and width * r_block <= 4096 else 8
    return Layout(
        "reduction", kernel.outer, r=kernel.inner, x_block=width, r_block=r_block, persistent=whole, warps=warps
    )
