"""How a kernel's iteration space is laid over programs and tiles. Pure decisions on axes; no text.

`planned` gives a kernel its `Layout`, once; all that writes or launches it reads it there.

A tile has at most two dimensions. A pointwise kernel takes one of three shapes: `flat` (one line over all axes), `rows`
(a tile along the last axis, the other axes fixed by the program) and `tiled` (two axes, for transposes). A reduction
takes a tile of outer points by inner points, the inner dimension whole (`persistent`) or in a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.indexing import coefficient_of, number, product
from torchinductor.ir import Apply, Axis, Body, Constant, IndexExpr, Indirect, Kernel, Load, Reduce, ToDtype
from torchinductor.scheduling.axes import aligned_along, by_rows, merge_axes
from torchinductor.scheduling.online import join_passes

Shape = Literal["flat", "rows", "tiled", "reduction", "matmul", "attention", "filter_gradient"]

PERSISTENT_LIMIT = 16384  # elements of a row that a program keeps in registers
PROGRAMS_WANTED = 132 * 4  # enough to fill a large GPU
# Tiles and numbers of threads were measured on an H200, on kernels of training steps of nine public models.
COLUMN_PROGRAMS = 132 * 16  # enough where a program's loop waits for loads of a small tile
MIN_CHUNK = 2048  # elements that a program should reduce at least
MOST_CHUNKS = 512  # the results of a column's parts are summed by few programs
SHORT_LINE = 1024  # elements of a row that a pointwise kernel's programs seldom go beyond
LONG_LINE = 2048  # elements of a row of which programs of a pointwise kernel take parts
ROW_BLOCK = 1024  # elements of such a row that a program takes
WINDOW = 8  # places that a point reads, beyond which not all registers of usual tiles suffice
WINDOW_BLOCK = 256  # points that a program takes whose windows move by several places
COLUMN_TILE = 2048  # elements of a tile of columns that is loaded at a time
COLUMN_PIECE = 4096  # of one that is loaded at once or of several buffers, and of one that is the end of a sum
HEAVY_COLUMN = 1024  # of one of which much is computed
NARROW = 64  # columns of these
AHEAD = 3  # iterations of a loop along a long row, or down some columns, whose loads are under way at one time
AHEAD_BYTES = 8  # that are loaded for a point of it, at most
SHORT_ROW = 64  # elements of a row of which a program takes eight
SMALL = 1 << 20  # elements of a sum of columns that is no more than the end of another one
SHARED_TILE = 8192  # elements of a tile whose rows share what they read
SHARED_ROWS = 64  # of them
SHARED_CHUNK = 4096  # points that all rows of such a tile should be given at least
END_WARPS = 4  # of the end of a sum, whatever its size: ends of several sums share a launch
WALK_COLUMNS = 8192  # columns of rows that a program walks over with a sum for each
WALK_SUMS = 16384  # of them, of 32 bits
WALK_WARPS = 132 * 16  # of all programs together
WALK_TILE = 2048  # elements of the rows that a program takes at a time
WALK_ELEMENTS = 16  # of them, a thread
HEAVY_WALK_TILE = 4096  # of rows of which much is computed
HEAVY_WALK_ELEMENTS = 8  # of them, a thread: more would not fit its registers
WALK_STEPS = 4  # tiles that a program should have at least
WALK_BYTES = 16  # that are loaded for a point, at most, where loads are under way for several iterations
UNKNOWN_SIZE = 1024  # what a symbolic size counts as where sizes are weighed

_COMPARING = (Load, Apply, ToDtype, Constant, IndexExpr, Indirect, Reduce)


@record
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
    down: bool = False  # reductions go down columns that lie beside each other, the inner axes' elements far apart
    shared: bool = False  # what is read of an inner point is the same for all of a tile's outer ones
    persistent: bool = False
    warps: int = 4
    wide: bool = False  # offsets need 64 bits
    stages: int = 1  # iterations of a loop whose loads are under way at one time
    walk: Axis | None = None  # the programs' axis, where each goes through tiles along x and keeps sums of columns

    def across(self, dim: str) -> int:
        """The length of a two-dimensional tile across one of its dimensions."""
        return self.x_block if dim == "r" else self.y_block

    @property
    def grid(self) -> IntExpr:
        """Programs to launch."""
        if self.walk is not None:
            return self.walk.size
        count = product(a.size for a in self.fixed)
        for axes, block in ((self.x, self.x_block), (self.y, self.y_block)):
            if axes:
                count = count * _ceil_div(product(a.size for a in axes), block)
        return count


def _ceil_div(size: IntExpr, block: int) -> IntExpr:
    return (size + number(block - 1)) // number(block)


def planned_end(kernel: Kernel) -> Kernel:
    """The plan of a kernel that adds up what the programs of another one have summed up."""
    kernel = merge_axes(kernel)
    width, r_block = _end_width(_static(kernel.outer) or UNKNOWN_SIZE), pow2(_static(kernel.inner) or 1)
    tile = Layout("reduction", kernel.outer, r=kernel.inner, x_block=width, r_block=r_block, persistent=True)
    return replace(kernel, layout=replace(tile, wide=is_wide(kernel), warps=END_WARPS))


def _end_width(count: int) -> int:
    """Of so many columns, those that a program takes which would wait for one load after the other."""
    return max(8, min(128, pow2(-(-count // PROGRAMS_WANTED))))


def planned(kernel: Kernel, join: bool = True) -> Kernel:
    """The kernel with axes merged, and with its layout. Where rows are looped over, passes over them are joined."""
    kernel = _as_memory_lies(merge_axes(kernel))
    if kernel.part is not None:
        return replace(kernel, layout=replace(_walk(kernel, kernel.part), wide=is_wide(kernel)))
    layout = _reduction(kernel) if kernel.inner else _pointwise(kernel)
    if kernel.inner and not layout.persistent and join:
        kernel = join_passes(kernel)
        layout = _reduction(kernel)
    stages = 1 if layout.persistent else layout.stages
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
    extents = [product(a.size for a in (*kernel.outer, *kernel.inner))]
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
    told = {*sizes, *kernel.symbols}
    for stage in kernel.stages:
        for access in stage.body.accesses:
            index, used = access.index, access.index.symbols()
            scattered = not used <= told  # by a value that is read: anywhere
            weight = kernel.buffers[access.buffer].dtype.itemsize
            for axis, size in sizes.items():
                weight *= size if scattered or axis in used else 1
            for axis in used & sizes.keys():  # whose votes are their own
                step = coefficient_of(index, axis)
                if step is not None and step.as_int() == 1:
                    votes[axis] += weight
    return votes


def _checked_along(kernel: Kernel, axis: Axis) -> Counter[str]:
    """How many loads of each buffer have a mask that varies along an axis: of many, the buffer is read by a window that
    moves along it, of one each, several buffers are joined there."""
    count: Counter[str] = Counter()
    for stage in kernel.stages:
        varies: list[bool] = []
        for op in stage.body.ops:
            own = any(axis.name in index.symbols() for index in op.indices)
            varies.append(own or any(varies[at] for at in op.operands))
            if isinstance(op, Load) and op.mask is not None and varies[op.mask]:
                count[op.buffer] += 1
    return count


def _strided_along(kernel: Kernel, axis: Axis) -> bool:
    """Whether neighbours along an axis read what lies apart: windows that move by several places."""
    steps = (
        coefficient_of(op.index, axis.name)
        for stage in kernel.stages
        for op in stage.body.of(Load)
        if axis.name in op.index.symbols()
    )
    return any(step is not None and (step.as_int() or 0) > 1 for step in steps)


def is_heavy(kernel: Kernel) -> bool:
    """Whether it computes more than a few additions and products."""
    return any(op.heavy for stage in kernel.stages for op in stage.body.of(Apply))


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
    checked = _checked_along(kernel, last) if last is not None else Counter[str]()
    window = max(checked.values(), default=0) >= 3
    if last is not None and len(axes) > 1 and width is not None and width >= 16 and window:
        if _strided_along(kernel, last):
            return Layout("flat", tuple(axes), x_block=WINDOW_BLOCK, warps=4)
        # A window: its rows' positions and checks are made once a row, its columns' once a column.
        block = min(pow2(width), 128)
        # Two points a thread: neighbouring threads read neighbouring memory.
        return Layout("tiled", (last,), tuple(axes[:-1]), x_block=block, y_block=512 // block, warps=8)
    long = width is not None and -(-width // LONG_LINE) * LONG_LINE <= 1.13 * width
    if last is not None and len(axes) > 1 and long and aligned_along(kernel, last, 4):
        # What is the same for a row is read once. Shorter rows are a line like any other.
        return Layout("rows", (last,), fixed=tuple(axes[:-1]), x_block=ROW_BLOCK, warps=4)
    total = _static(axes)
    block = 1024
    if total is not None and width is not None:
        # A thread takes two vectors of 16-bit elements. Where rows end within them, four elements are better; one
        # vector where rows are long.
        whole = len(axes) < 2 or width == pow2(width)
        one = whole or (width >= SHORT_LINE and width % 8 == 0)
        block = 512 if not one else 2048 if whole and not checked and not is_heavy(kernel) else 1024
        block = max(128, min(block, pow2(-(-total // PROGRAMS_WANTED))))
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
    shared = _sharing(kernel)
    if shared and length:
        return _shared_rows(kernel, shared, length)
    if length is not None and length <= PERSISTENT_LIMIT:
        return _persistent_row(kernel, length, count)
    block, warps, stages = _long_row(kernel, ordered)
    if length is not None:
        block = min(pow2(length), block)
    return Layout("reduction", outer, r=inner, x_block=1, r_block=block, warps=warps, stages=stages)


def _long_row(kernel: Kernel, ordered: bool) -> tuple[int, int, int]:
    """Elements, warps and stages of a loop along a row that registers do not hold."""
    bodies = [stage.body for stage in kernel.stages if stage.kind == "inner"]
    # Odd rows are read two or four bytes at a time: by programs that take less of them. So are those that only begin
    # at aligned places, and end within what a thread takes at a time.
    length = kernel.inner[-1].size.as_int()
    if not aligned_along(kernel, kernel.inner[-1], 16) or (length is not None and length % 8):
        return (8192, 32, 1) if len(bodies) > 1 and not ordered else (1024, 4, 1)
    ahead = max(_loaded(kernel, body) for body in bodies) <= AHEAD_BYTES
    if len(bodies) > 1 and not ordered:
        # Rows that are read several times should stay in the second-level cache: few wide programs, not many narrow
        # ones. Where they are stored, too, it is better not to wait for loads.
        return (4096, 8, AHEAD) if ahead and any(body.writes for body in bodies) else (8192, 32, 1)
    plain = all(not op.heavy for body in bodies for op in body.of(Apply)) and all(
        op.kind in ("sum", "moments") for body in bodies for op in body.of(Reduce)
    )
    return (4096, 4, AHEAD) if ahead and plain and not ordered else (4096, 8, 1)


def _under_way(kernel: Kernel, most: int) -> bool:
    """Whether loads of several iterations may be under way: few bytes, and none that is checked element by element
    (two such kernels of a vision transformer took six times as long)."""
    bodies = [stage.body for stage in kernel.stages if stage.kind == "inner"]
    checked = any(op.mask is not None for body in bodies for op in body.of(Load))
    return not checked and all(_loaded(kernel, body) <= most for body in bodies)


def _window(kernel: Kernel) -> int:
    """The places that a point reads, each of which takes registers: many, where a convolution's result or gradient is
    summed up as it is made."""
    inner = {axis.name for axis in kernel.inner}
    bodies = [stage.body for stage in kernel.stages if stage.kind == "inner"]
    return max((len({op.index for op in body.of(Load) if op.index.symbols() & inner}) for body in bodies), default=0)


def _loaded(kernel: Kernel, body: Body) -> int:
    """The bytes that a body loads for each point of the inner axes."""
    inner = {axis.name for axis in kernel.inner}
    loads = {(op.buffer, op.index): op.dtype.itemsize for op in body.of(Load) if op.index.symbols() & inner}
    return sum(loads.values())


def _sharing(kernel: Kernel) -> tuple[Axis, ...]:
    """The outer axes along which sums read the same values. Places that values tell count as different."""
    ops = [op for stage in kernel.stages if stage.kind == "inner" for op in stage.body.ops]
    read = {name for op in ops if isinstance(op, Load) for name in op.index.symbols()}
    if not read or any(name.startswith("j") for name in read) or not all(isinstance(op, _COMPARING) for op in ops):
        return ()
    return tuple(a for a in kernel.outer if a.name not in read)


def _shared_rows(kernel: Kernel, shared: tuple[Axis, ...], length: int) -> Layout:
    """Values are read once for all rows of a tile, each of which takes its own of them."""
    fixed = tuple(a for a in kernel.outer if a not in shared)
    rows, beside = _static(shared) or UNKNOWN_SIZE, _static(fixed) or UNKNOWN_SIZE
    x_block = min(pow2(rows), SHARED_ROWS)
    # Long sums are cut into as many parts as programs are wanted; of short ones more are made at a time.
    while length < 2 * SHARED_CHUNK and x_block > 4 and beside * -(-rows // x_block) < PROGRAMS_WANTED:
        x_block //= 2
    r_block = min(SHARED_TILE // x_block, pow2(length))
    layout = Layout("reduction", shared, r=kernel.inner, fixed=fixed, x_block=x_block, r_block=r_block, shared=True)
    return replace(layout, persistent=length <= r_block, warps=max(1, min(8, x_block * r_block // 1024)))


def _persistent_row(kernel: Kernel, length: int, count: int | None) -> Layout:
    r_block = pow2(length)
    rows = max(1, (512 if r_block <= SHORT_ROW else 1024) // r_block)
    if count is not None:
        rows = min(rows, pow2(max(1, count // PROGRAMS_WANTED)))
    elements = rows * r_block
    # Backward of layer norm is a fifth faster with 32 elements a thread than with 16, a softmax as fast, and what
    # computes much (the error function) slower.
    warps = max(1, min(16, elements // (512 if is_heavy(kernel) else 1024)))
    return Layout(
        "reduction", kernel.outer, r=kernel.inner, x_block=rows, r_block=r_block, persistent=True, warps=warps
    )


def walk_rows(columns: int, heavy: bool = False) -> int:
    """Rows of so many columns that a program takes at a time."""
    return max(1, (HEAVY_WALK_TILE if heavy else WALK_TILE) // pow2(columns))


def walk_parts(rows: int | None, columns: int, heavy: bool = False) -> int:
    """The programs that rows with sums of columns are dealt out to."""
    programs = WALK_WARPS // max(8, _walk_warps(columns, heavy))
    return programs if rows is None else max(1, min(programs, rows // (walk_rows(columns, heavy) * WALK_STEPS)))


def _walk_warps(columns: int, heavy: bool) -> int:
    elements = HEAVY_WALK_ELEMENTS if heavy else WALK_ELEMENTS
    return max(4, min(16, walk_rows(columns, heavy) * pow2(columns) // (32 * elements)))


def _walk(kernel: Kernel, part: Axis) -> Layout:
    """Rows with sums of columns: a program goes through many, some at a time."""
    columns, heavy = _static(kernel.inner) or 1, is_heavy(kernel)
    x_block, r_block = walk_rows(columns, heavy), pow2(columns)
    tile = Layout("reduction", kernel.outer, r=kernel.inner, x_block=x_block, r_block=r_block, persistent=True)
    stages = AHEAD if not heavy and _under_way(kernel, WALK_BYTES) else 1
    return replace(tile, walk=part, warps=_walk_warps(columns, heavy), stages=stages)


def _column(kernel: Kernel, length: int | None, count: int | None) -> Layout:
    """The outer axis is the one that is contiguous: tiles that are wide in x, no wider than what lies together."""
    last = kernel.outer[-1]
    together = last.size.as_int()
    walked = {
        op.buffer
        for stage in kernel.stages
        for op in stage.body.accesses
        if last.name in op.index.symbols() and op.index.symbols() & {a.name for a in kernel.inner}
    }
    stages = 1
    end = length is not None and count is not None and length * count <= SMALL
    if end:
        # The end of a sum of columns: few programs would wait for one load after the other.
        width, tile = _end_width(count or 1), COLUMN_PIECE
    else:
        width = 64 if together is None else min(128, pow2(together))
        # Few programs, where a sum could not be split: each has more under way.
        few = count is not None and count < width * PROGRAMS_WANTED // 2
        tile = 4 * COLUMN_TILE if few or len(walked) == 1 else COLUMN_TILE
        if len(walked) == 1 and sum(1 for stage in kernel.stages for _ in stage.body.of(Reduce)) == 1:
            tile, stages = COLUMN_PIECE, AHEAD
        elif not few and _under_way(kernel, AHEAD_BYTES):
            width, tile, stages = min(width, NARROW), HEAVY_COLUMN if is_heavy(kernel) else COLUMN_PIECE, 2
        if length is not None and length <= COLUMN_PIECE // NARROW:
            width, tile = min(width, NARROW), COLUMN_PIECE
        window = _window(kernel)
        if window > WINDOW:
            width, tile, stages = min(width, NARROW), HEAVY_COLUMN if window <= 2 * WINDOW else HEAVY_COLUMN // 2, 1
    r_block = tile // width if length is None else min(tile // width, pow2(length))
    whole = length is not None and length <= r_block
    warps = END_WARPS if end else max(1, min(8 if tile > COLUMN_PIECE else 4, width * r_block // 128))
    layout = Layout("reduction", kernel.outer, r=kernel.inner, x_block=width, r_block=r_block, down=True)
    return replace(layout, persistent=whole, warps=warps, stages=stages)


def chunks_wanted(layout: Layout, count: int, length: int) -> int:
    """Into how many parts a reduction of `count` points of `length` elements is best cut."""
    if layout.shared:
        return min(COLUMN_PROGRAMS // (layout.grid.as_int() or 1), length // SHARED_CHUNK, MOST_CHUNKS)
    programs = -(-count // layout.x_block)
    if layout.x_block == 1:
        return min(PROGRAMS_WANTED // programs, length // MIN_CHUNK)
    wanted = COLUMN_PROGRAMS if layout.stages == 1 else PROGRAMS_WANTED
    return min(wanted // programs, length * layout.x_block // (4 * MIN_CHUNK), MOST_CHUNKS)
