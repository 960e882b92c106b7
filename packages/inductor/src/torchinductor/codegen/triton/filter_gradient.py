"""The template of the gradient of depthwise filters: a program goes down lines with a sum for each tap and channel.

A tile is of some pieces of lines by some channels. Of a piece, a few places beside each other, a thread reads the
gradient once, and each row of the image that a tap falls on once, however many of the taps it serves: five taps by five
read 55 values of the image for seven places rather than 175. Sums lie in registers until the program is through; those
of all programs are added up by a kernel of their own, in a fixed order.

Bytes: gradient and image once, as neighbouring lines find an image's rows in the first-level cache. Instructions, as
the machine code has them: for seven places of nine taps some 20 an element, of 25 some 45. At 132 * 128 lanes of
1.7 GHz the former take no longer than the bytes at 3 TB a second, the latter about as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.codegen.naming import described
from torchinductor.indexing import ZERO, dot, number, variable
from torchinductor.ir import FilterGradient, Kernel, Region, Template

from .handler import index_text
from .plan import Layout, is_wide, planned_end, pow2
from .split import in_chunks
from .writer import TritonSource, Writer, source_of


@record
class Tile:
    """What a program takes at a time.

    Attributes:
        along: places of a line that a thread takes, at most: as many as divide the line.
        vector: channels that it takes.
        warps: of a program.
        programs: of all channels together.
    """

    along: int
    vector: int
    warps: int
    programs: int


# By the number of taps up to which an entry holds: of twenty, those that take a step's gradients of MobileNetV3 and of
# EfficientNet with 128 images least time on an H200 (docs/results/h200_programs.md).
TILES: Mapping[int, Tile] = {
    9: Tile(along=7, vector=2, warps=4, programs=132 * 6),
    25: Tile(along=7, vector=2, warps=2, programs=132 * 12),
}
CHANNELS = 64  # of a tile, at most: two bytes each, they fill a cache line
FEWEST = 8  # of a tile of many channels
WASTE = 8  # tiles are narrower where more than this part of the channels would be none
STEPS = 4  # tiles that a program should have at least


def plan_filter_gradient(template: Template) -> Template | None:
    """The template with its layout; None where filters have more taps than threads have registers for."""
    assert isinstance(template, FilterGradient)
    tile, channels, width = _tile(template), template.channels.size.as_int(), template.gradient.shape[3].as_int()
    if tile is None or channels is None or width is None:
        return None
    block = _channels_of_a_tile(channels)
    layout = Layout(
        "filter_gradient",
        (template.channels,),
        x_block=block,
        y_block=max(1, 32 * tile.warps * tile.vector // block),
        r_block=max(size for size in range(1, tile.along + 1) if width % size == 0),
        warps=tile.warps,
    )
    return replace(template, loops=replace(template.loops, layout=layout))


def _tile(template: FilterGradient) -> Tile | None:
    taps = template.kernel[0] * template.kernel[1]
    return next((tile for limit, tile in TILES.items() if taps <= limit), None)


def _channels_of_a_tile(channels: int) -> int:
    """The most of which few are none."""
    block = min(CHANNELS, pow2(channels))
    while block > FEWEST and (-channels % block) * WASTE > channels:
        block //= 2
    return block


def split_filter_gradient(template: Template) -> list[Kernel | Template]:
    """A planned template as the programs' sums, and the end of these."""
    assert isinstance(template, FilterGradient)
    layout, tile = template.loops.laid_out(Layout), _tile(template)
    assert tile is not None
    programs, lines = tile.programs // (layout.grid.as_int() or 1), template.lines.size.as_int()
    pieces = (template.gradient.shape[3].as_int() or 0) // layout.r_block
    parts = max(1, programs if lines is None else min(programs, lines * pieces // (layout.y_block * STEPS)))
    if lines is not None:
        parts = -(-lines // -(-lines // parts))  # without those that would be left with no line
    partial, ends = in_chunks(template.loops, parts)
    layout = replace(layout, fixed=partial.outer[:1], wide=is_wide(partial))
    return [replace(template, loops=replace(partial, layout=layout)), planned_end(ends)]


def write_filter_gradient(template: Template) -> TritonSource:
    """The source of the programs' sums."""
    assert isinstance(template, FilterGradient)
    bodies = [stage.body for stage in template.loops.stages[:1]]
    return source_of(template.loops, _Writer(template).write(), described(bodies, template.kind))


class _Writer(Writer):
    def __init__(self, template: FilterGradient) -> None:
        super().__init__(template.loops)
        self.template = template
        self.places = self.layout.r_block  # of a piece
        self.tile = f"[{self.layout.y_block}, {self.layout.x_block}]"
        self.taps = [(y, x) for y in range(template.kernel[0]) for x in range(template.kernel[1])]

    def write(self) -> list[str]:
        """The kernel's statements."""
        layout, handler = self.layout, self.handler
        (channels,), (part,) = layout.x, layout.fixed
        tiles = index_text((channels.size + number(layout.x_block - 1)) // number(layout.x_block))
        self.begin()
        self.place("x", (channels,), layout.x_block, f"pid % {tiles}", "[None, :]")
        self.line(f"{part.name} = pid // {tiles}")
        for y, x in self.taps:
            self.line(f"sum{y}_{x} = tl.zeros({self.tile}, tl.float32)")
        handler.begin_loop()
        pieces = number((self.template.gradient.shape[3].as_int() or 0) // self.places)
        span = pieces * self.template.lines.size
        self.line(f"piece = r0 + tl.arange(0, {layout.y_block})[:, None]")
        self.positions(part.var, pieces, span)
        self.products()
        handler.end_loop(f"for r0 in range(0, {index_text(span)}, {layout.y_block}):")
        buffer = self.kernel.buffers[self.kernel.writes[0]]
        guard = self.guard()
        for y, x in self.taps:
            place = index_text(dot((part.var, number(y), number(x), ZERO), buffer.strides))
            pointer = f"{self.handler.pointers[buffer.name]} + {place} + x"
            self.line(f"tl.store({pointer}, tl.sum(sum{y}_{x}, 0)[None, :]{guard})")
        return handler.lines

    def positions(self, part: IntExpr, pieces: IntExpr, span: IntExpr) -> None:
        """Which image and places a tile's pieces are of, and whether they are any."""
        template, height = self.template, self.template.gradient.shape[2]
        own, lines = template.lines.size, template.gradient.shape[0] * height
        self.line(f"own = piece // {_factor(pieces)}")
        self.line(f"line = {index_text(part * own)} + own")
        checks = []
        if (span % number(self.layout.y_block)).as_int() != 0:
            checks.append(f"(own < {_factor(own)})")
        if own * self.layout.fixed[0].size != lines:
            checks.append(f"(line < {_factor(lines)})")
        if checks:
            self.line(f"y_mask = {' & '.join(checks)}")
            self.handler.masks["y"] = "y_mask"
        self.line(f"image = line // {_factor(height)}")
        self.line(f"top = line % {_factor(height)}")
        self.line(f"left = piece % {_factor(pieces)} * {self.places}")
        self.line(f"given = {self.address(template.gradient, (1, 1))}")
        self.line(f"read = {self.address(template.image, template.stride)}")

    def address(self, region: Region, stride: tuple[int, int]) -> str:
        """Pointers to the elements of a tile at the pieces' corners, of an image before it is padded."""
        images, channels, rows, columns = region.strides
        steps = (images, channels, rows * number(stride[0]), columns * number(stride[1]))
        index = dot(tuple(map(variable, ("image", "x", "top", "left"))), steps, region.offset)
        return f"{self.handler.pointers[region.buffer]} + ({index_text(index)})"

    def guard(self, *checks: str) -> str:
        """The mask of a load or store of a tile."""
        masks = [*checks, *(self.handler.masks[dim] for dim in ("x",) if dim in self.handler.masks)]
        return f", mask={' & '.join(masks)}" if masks else ""

    def loaded(self, pointer: str, region: Region, row: int, column: int, *checks: str) -> str:
        """The tile at so many rows and columns from the corners, zero where a check fails."""
        # A constant by itself becomes the instruction's own offset.
        away = index_text(number(row) * region.strides[2] + number(column) * region.strides[3])
        guard = self.guard(*checks)
        return f"tl.load({pointer} + {away}{guard}{', other=0.0' if guard else ''}).to(tl.float32)"

    def products(self) -> None:
        """Adds the products of a tile to the sums of the taps."""
        template = self.template
        whole = [self.handler.masks["y"]] if "y" in self.handler.masks else []
        for at in range(self.places):
            self.line(f"slope{at} = {self.loaded('given', template.gradient, 0, at, *whole)}")
        steps = range(template.kernel[1])
        reached = {at * template.stride[1] + x * template.dilation[1] for at in range(self.places) for x in steps}
        for column in sorted(reached):
            self.check(f"column{column}", 1, column)
        for y in range(template.kernel[0]):
            row = y * template.dilation[0]
            self.check(f"row{row}", 0, row)
            for column in sorted(reached):
                checks = [name for name in (f"row{row}", f"column{column}") if name in self.handler.masks]
                place = row - template.padding[0], column - template.padding[1]
                self.line(f"value = {self.loaded('read', template.image, *place, *whole, *checks)}")
                for x in steps:
                    at, rest = divmod(column - x * template.dilation[1], template.stride[1])
                    if not rest and 0 <= at < self.places:
                        # The machine's own operation in any case, and half as many: to find out which loads lie alike,
                        # Triton goes through all operations that lead to one of them, for each.
                        self.line(f"sum{y}_{x} = tl.fma(slope{at}, value, sum{y}_{x})")

    def check(self, name: str, dim: int, away: int) -> None:
        """A mask of the pieces that lie within the image so far from their corners, where not all surely do."""
        template = self.template
        size, made = (region.shape[2 + dim].as_int() for region in (template.image, template.gradient))
        assert size is not None and made is not None
        step, least = template.stride[dim], away - template.padding[dim]
        last = made - (1, self.places)[dim]  # the last piece's corner
        place = index_text(variable(("top", "left")[dim]) * number(step) + number(least))
        checks = [f"({place} >= 0)"] if least < 0 else []
        if last * step + least >= size:
            checks.append(f"({place} < {size})")
        if checks:
            self.line(f"{name} = {' & '.join(checks)}")
            self.handler.masks[name] = name


def _factor(expr: IntExpr) -> str:
    return index_text(expr) if expr.as_int() is not None else f"({index_text(expr)})"
