"""The template of a matrix product: a program makes a tile of rows by columns, in a loop over the inner axis.

The tile's y dimension runs over rows, its x dimension over columns; the loop's block of the inner axis lies along a
tile's columns for the left factor and along its rows for the right one. Programs walk through bands of `BAND` tiles of
rows, so that those that run at one time share their operands in the second-level cache.
"""

from __future__ import annotations

from dataclasses import replace

from primtorch.symbolic.expr import intern_symbol
from torchinductor.codegen.naming import described
from torchinductor.indexing import number, product, variable
from torchinductor.ir import Load, Operand, Template, ToDtype

from .expressions import Value, tl_type
from .handler import index_text
from .plan import PROGRAMS_WANTED, UNKNOWN_SIZE, Layout, is_wide, pow2
from .writer import TritonSource, Writer, source_of

BAND = 8


def plan(template: Template) -> Template | None:
    """The template with its layout; None where a side is too short for the tensor cores' smallest tile."""
    height, width, depth = (
        product(axis.size for axis in axes).as_int() or UNKNOWN_SIZE
        for axes in (template.rows, template.columns, (template.depth,))
    )
    if min(height, width, depth) < 16:
        return None
    half = template.operands[0].dtype.itemsize == 2
    loads = [op for operand in template.operands for op in operand.prologue.of(Load)]
    line = max(16, 128 // max(op.dtype.itemsize for op in loads))  # what is loaded for several iterations has to fit
    side = 128 if half else 64
    y, x, r = min(pow2(height), side), min(pow2(width), side), min(pow2(depth), line)
    count = product(axis.size for axis in template.batch).as_int() or 1
    while y > 32 and x > 32 and count * -(-height // y) * -(-width // x) < PROGRAMS_WANTED // 4:
        y, x = (y // 2, x) if y >= x else (y, x // 2)
    layout = Layout(
        "matmul",
        template.columns,
        template.rows,
        (template.depth,),
        template.batch,
        x_block=x,
        y_block=y,
        r_block=r,
        warps=8 if x * y >= 128 * 128 else 4,
        stages=3 if half else 2,
        wide=is_wide(template.loops),
    )
    return replace(template, loops=replace(template.loops, layout=layout))


def write_matmul(template: Template) -> TritonSource:
    """The source of a planned template."""
    bodies = (*(operand.prologue for operand in template.operands), *template.epilogue)
    return source_of(template.loops, _MatmulWriter(template).write(), described(bodies, template.kind, otherwise=""))


class _MatmulWriter(Writer):
    def __init__(self, template: Template) -> None:
        super().__init__(template.loops)
        self.template = template

    def write(self) -> list[str]:
        handler, layout, total = self.handler, self.layout, self.template.total
        self.begin()
        self._tiles()
        tile = f"[{layout.y_block}, {layout.x_block}]"
        self.line(f"acc = tl.zeros({tile}, {tl_type(total.dtype)})")
        handler.begin_loop()
        left, right = self.template.operands
        a = self._factor(left, "rl", "[None, :]", f"[{layout.y_block}, {layout.r_block}]")
        b = self._factor(right, "rr", "[:, None]", f"[{layout.r_block}, {layout.x_block}]")
        # Triton before 3.7 asks for the accumulator's type by name where it is not float32.
        self.line(f'acc = tl.dot({a}, {b}, acc, input_precision="ieee", out_dtype={tl_type(total.dtype)})')
        handler.end_loop(f"for r0 in range(0, {index_text(self.template.depth.size)}, {layout.r_block}):")
        handler.carried_values[total.key] = Value("acc", total.dtype, frozenset({"x", "y"}))
        for position, body in enumerate(self.template.epilogue, 1):
            self.wait(position)
            body.replay(handler)
        return handler.lines

    def _tiles(self) -> None:
        """Program id -> a tile of one of the batch's products, in bands."""
        layout = self.layout
        for dim, axes, block in (("y", layout.y, layout.y_block), ("x", layout.x, layout.x_block)):
            size = product(a.size for a in axes)
            self.line(f"tiles_{dim} = {index_text((size + number(block - 1)) // number(block))}")
        self.line("tile = pid % (tiles_y * tiles_x)")
        self.line(f"band = tile // ({BAND} * tiles_x) * {BAND}")
        self.line(f"within = tile % ({BAND} * tiles_x)")
        self.line(f"high = tl.minimum(tiles_y - band, {BAND})")
        self.place("y", layout.y, layout.y_block, "band + within % high", "[:, None]")
        self.place("x", layout.x, layout.x_block, "within // high", "[None, :]")
        self.split("batch", layout.fixed, None, "pid // (tiles_y * tiles_x)")
        self.line(f"zero = tl.zeros([{layout.y_block}, {layout.x_block}], tl.int32)")

    def _factor(self, operand: Operand, position: str, suffix: str, tile: str) -> str:
        """The text of a factor's tile in the loop, zero where it lies past the end of the inner axis."""
        handler, depth = self.handler, self.template.depth
        self.line(f"{position} = r0 + tl.arange(0, {self.layout.r_block}){suffix}")
        handler.dims[position] = frozenset({"r"})
        self.bound("r", position, depth.size, self.layout.r_block)
        value = operand.prologue.replay(handler, {intern_symbol(depth.name): variable(position)})[operand.value]
        text = value.name
        if "r" in handler.masks and not all(isinstance(op, (Load, ToDtype)) for op in operand.prologue.ops):
            text = f"tl.where({handler.masks['r']}, {text}, 0)"  # what is made of a masked load need not be zero
        if len(value.dims) < 2:
            text = f"tl.broadcast_to({text}, {tile})"
        return text if operand.dtype is value.dtype else f"{text}.to({tl_type(operand.dtype)})"
