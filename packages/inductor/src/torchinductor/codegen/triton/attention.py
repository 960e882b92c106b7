"""The template of an attention: a program goes along a line of tiles of scores, and keeps none of them.

For the results and for the gradient by queries the line is that of a block of queries, over keys; for the gradients by
keys and values it is that of a block of keys, over queries, of each head that shares the key's. The tile's y dimension
runs over what the program has, its inner one over what it goes along. Tiles that the mask cuts come first, then those
that it leaves whole, where it is not asked.

Exponentials are of base 2, with the change of base and, where the program does nothing to a score, the scale folded
into one multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.codegen.naming import described
from torchinductor.indexing import number
from torchinductor.ir import Attention, Region, Template
from torchinductor.ir.attention import GRADIENT, SCORE, Direction, Function
from torchinductor.ops import StoreMode

from .expressions import ATOMICS, Value, tl_type
from .handler import NO_DIMS, TritonHandler, index_text
from .plan import Layout, is_wide, pow2
from .writer import TritonSource, Writer, source_of

LOG2E = 1 / math.log(2)
SMALLEST = 16  # the smallest side of a tile that the tensor cores take
LARGEST_HEAD = 256


@record
class Blocks:
    """The tile of a program, and how it is made."""

    rows: int
    columns: int
    warps: int
    stages: int


# By what is computed, whether elements are of 16 bits, and the head's size up to which an entry holds: those of 16 bits
# and sizes up to 128 as measured on an H200, the others the largest that keep what they compute in registers.
BLOCKS: Mapping[tuple[Direction, bool], Mapping[int, Blocks]] = {
    ("forward", True): {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3), 256: Blocks(128, 64, 8, 2)},
    ("queries", True): {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 32, 8, 2)},
    ("keys", True): {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 64, 8, 2), 256: Blocks(32, 32, 8, 1)},
    ("forward", False): {64: Blocks(32, 32, 4, 2), 128: Blocks(16, 16, 4, 1), 256: Blocks(16, 16, 4, 1)},
    ("queries", False): {64: Blocks(32, 32, 4, 2), 128: Blocks(16, 16, 4, 1), 256: Blocks(16, 16, 4, 1)},
    ("keys", False): {64: Blocks(32, 16, 4, 2), 128: Blocks(16, 16, 4, 1), 256: Blocks(16, 16, 4, 1)},
}

# Where more is computed beside the products: a score's function, or the bounds of lengths that no tile divides.
CROWDED: Mapping[tuple[Direction, bool], Mapping[int, Blocks]] = {
    ("keys", True): {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 32, 8, 2)},
}


def plan_attention(template: Template) -> Template | None:
    """The template with its layout; None where the design does not fit it."""
    assert isinstance(template, Attention)
    query, key, value = template.query, template.key, template.value
    dtypes = {template.loops.buffers[region.buffer].dtype for region in (query, key, value)}
    sizes = [region.shape[3].as_int() for region in (query, value)]
    half = dtypes <= {torch.float16, torch.bfloat16}
    if len(dtypes) != 1 or not (half or dtypes == {torch.float32}) or None in sizes:
        return None
    side = max(pow2(size or 0) for size in sizes)
    if side > LARGEST_HEAD or query.shape[0] != key.shape[0]:
        return None
    kind = template.direction, half
    lengths = (query.shape[2].as_int(), key.shape[2].as_int())
    crowded = template.score is not None or any(length is None or length % 128 for length in lengths)
    tables_of = (*((CROWDED.get(kind, {}),) if crowded else ()), BLOCKS[kind])
    chosen = next(blocks for table in tables_of for limit, blocks in table.items() if side <= limit)
    rows, columns = chosen.rows, chosen.columns
    tables = template.tables
    if tables is not None:
        by_keys = template.direction == "keys"
        sides = (tables.columns, tables.rows) if by_keys else (tables.rows, tables.columns)
        rows, columns = math.gcd(rows, sides[0]), math.gcd(columns, sides[1])
    if min(rows, columns) < SMALLEST:
        return None
    *fixed, along = template.loops.axes
    layout = Layout(
        "attention",
        (along,),
        fixed=tuple(fixed),
        x_block=rows,
        r_block=columns,
        warps=chosen.warps if rows >= 64 else min(4, chosen.warps),
        stages=chosen.stages,
        wide=is_wide(template.loops),
    )
    return replace(template, loops=replace(template.loops, layout=layout))


def write_attention(template: Template) -> TritonSource:
    """The source of a planned template."""
    assert isinstance(template, Attention)
    writer = {"forward": _Forward, "queries": _Queries, "keys": _Keys}[template.direction](template)
    bodies = [function.body for function in template.functions]
    return source_of(template.loops, writer.write(), described(bodies, template.kind, template.direction, otherwise=""))


class _Handler(TritonHandler):
    """Sums up a tile before it is added to places that do not vary over it."""

    meeting = NO_DIMS

    def store(
        self, buffer: str, index: IntExpr, value: Value, mode: StoreMode = "set", mask: Value | None = None
    ) -> None:
        over = value.dims | self.dims_of(index)
        name, dims = value.name, self.dims_of(index)
        if mode != "add" or over == dims:
            super().store(buffer, index, value, mode, mask)
            return
        if "r" in over:
            name = f"tl.broadcast_to({name}, zero.shape)" if "y" in over and len(value.dims) < 2 else name
            name = f"tl.sum({name}, 1)[:, None]" if "r" not in dims else name
        if "y" in over and "y" not in dims:
            name = f"tl.sum({name}, 0)[None, :]" if "r" in dims else f"tl.sum({name})"
        guard = self.mask_text(dims)
        address = self._address(buffer, index, block=False)
        arguments = f"{address}, {name}" + (f", mask={guard}" if guard else "")
        self.statement(f'{ATOMICS["add"]}({arguments}, sem="relaxed")')
        self.written.add(buffer)


class _Attention(Writer):
    """What the three directions have in common."""

    rows: str  # the position along the tile's y dimension
    columns: str  # the position along its inner dimension

    def __init__(self, template: Attention) -> None:
        super().__init__(template.loops)
        self.handler = _Handler(template.loops)
        self.template = template
        self.element = tl_type(template.loops.buffers[template.query.buffer].dtype)
        heads, shared = template.query.shape[1], template.key.shape[1]
        self.group = heads // shared if heads != shared else number(1)
        self.tile = f"[{self.layout.x_block}, {self.layout.r_block}]"
        sizes = (template.query.shape[3].as_int() or 0, template.value.shape[3].as_int() or 0)
        self.head = dict(zip("de", sizes, strict=True))  # d: of queries and keys, e: of values

    def write(self) -> list[str]:
        """The kernel's statements."""
        raise NotImplementedError

    # -- places

    def begin_program(self) -> None:
        """The program's block, and the batch and head that it is of."""
        layout = self.layout
        self.begin()
        (along,) = layout.x
        self.line(f"tiles = {index_text((along.size + number(layout.x_block - 1)) // number(layout.x_block))}")
        self.line("tile = pid % tiles")
        self.place("y", (along,), layout.x_block, "tile", "[:, None]")
        self.split("rest", layout.fixed, None, "pid // tiles")
        self.line(f"zero = tl.zeros({self.tile}, tl.int32)")
        for name, size in self.head.items():
            self.line(f"{name} = tl.arange(0, {pow2(size)})")
        self.line(f"n = tl.arange(0, {layout.r_block})")

    def base(self, region: Region, head: str) -> str:
        """Where the matrix (or the line) of the program's batch and a head begins."""
        parts = [index_text(region.offset)] if region.offset.terms else []
        for place, size, stride in zip(("b", head), region.shape, region.strides, strict=False):
            if size.as_int() != 1:
                parts.append(f"({place}) * {_factor(stride)}")
        pointer = self.handler.pointers[region.buffer]
        return " + ".join([pointer, *parts])

    def matrix(self, name: str, region: Region, head: str, rows: str, column: str, across: bool = False) -> None:
        """Pointers to rows of a matrix; with `across`, to its columns."""
        row, step = (f"{rows}[None, :]", f"{column}[:, None]") if across else (f"{rows}[:, None]", f"{column}[None, :]")
        if rows == "y":
            row = "y"
        self.line(
            f"{name} = {self.base(region, head)} + {row} * {_factor(region.strides[2])}"
            f" + {step} * {_factor(region.strides[3])}"
        )

    def loaded(self, at: str, column: str, bound: str | None, across: bool = False) -> str:
        """The matrix at pointers, zero outside of it. `bound`: the mask of its rows."""
        masks = [bound] if bound else []
        size = self.head[column]
        if pow2(size) != size:
            masks.append(f"({column}{'[:, None]' if across else '[None, :]'} < {size})")
        return f"tl.load({at}, mask={' & '.join(masks)}, other=0.0)" if masks else f"tl.load({at})"

    def stored(self, region: Region, head: str, column: str, value: str) -> None:
        """Writes the program's rows of a matrix."""
        name = f"{column}_out{len(self.handler.lines)}"
        self.matrix(name, region, head, "y", column)
        masks = [self.handler.masks[dim] for dim in ("y",) if dim in self.handler.masks]
        size = self.head[column]
        if pow2(size) != size:
            masks.append(f"({column}[None, :] < {size})")
        element = tl_type(self.kernel.buffers[region.buffer].dtype)
        guard = f", mask={' & '.join(masks)}" if masks else ""
        self.line(f"tl.store({name}, ({value}).to({element}){guard})")

    @property
    def y_mask(self) -> str | None:
        return self.handler.masks.get("y")

    @property
    def r_mask(self) -> str | None:
        return self.handler.masks.get("r")

    @property
    def step_mask(self) -> str | None:
        """The mask of what the program goes along, as rows of a matrix."""
        return None if self.r_mask is None else "within[:, None]"

    # -- going along

    def along(self, size: IntExpr, head: str, step: Callable[[bool], None]) -> None:
        """Loops over tiles: those that the mask cuts, then whole ones. `step` writes what is done with one."""
        tables, width = self.template.tables, self.layout.r_block
        if tables is None:
            self.handler.begin_loop()
            self.line("start = r0")
            self._columns(size, width)
            step(self.template.mask is not None)
            self.handler.end_loop(f"for r0 in range(0, {index_text(size)}, {width}):")
            return
        by_keys = self.template.direction == "keys"
        across, side = (tables.columns, tables.rows) if by_keys else (tables.rows, tables.columns)
        for cut, lines in ((True, tables.partial), (False, tables.full)):
            if lines is None:
                continue
            counts, places = lines
            block = f"(tile * {self.layout.x_block} // {across})"
            times = side // width
            self.line(f"blocks = tl.load({self.base(counts, head)} + {block} * {_factor(counts.strides[2])}) * {times}")
            self.line(f"places = {self.base(places, head)} + {block} * {_factor(places.strides[2])}")
            self.line("block = tl.load(places)")
            self.handler.begin_loop()
            within = f" + (r0 % {times}) * {width}" if times > 1 else ""
            start = f"block * {side}{within}"
            self.line(f"start = ({start}).to(tl.int64)" if self.layout.wide else f"start = {start}")
            following = "(r0 + 1)" + (f" // {times}" if times > 1 else "")
            at = f"places + {following} * {_factor(places.strides[3])}"
            self.line(f"block = tl.load({at}, mask=r0 + 1 < blocks, other=0)")
            self._columns(size, side)
            step(cut and self.template.mask is not None)
            self.handler.end_loop("for r0 in range(0, blocks):")

    def _columns(self, size: IntExpr, side: int) -> None:
        """What a tile stands for along its inner dimension."""
        handler = self.handler
        self.line(f"{self.columns} = start + n[None, :]")
        handler.dims[self.columns] = frozenset({"r"})
        handler.masks.pop("r", None)
        known = size.as_int()
        if known is None or known % side:
            self.line(f"within = start + n < {index_text(size)}")
            self.line("r_mask = within[None, :]")
            handler.masks["r"] = "r_mask"

    # -- scores

    def call(self, function: Function, **carried: str) -> str:
        """A function's value on a tile."""
        handler = self.handler
        for key, name in carried.items():
            handler.carried_values[key] = Value(name, torch.float32, frozenset({"y", "r"}))
        value = function.body.replay(handler)[function.value]
        if len(value.dims) == 2:
            return value.name
        if not value.dims:
            return f"tl.full({self.tile}, {value.name}, {tl_type(value.dtype)})"
        return f"tl.broadcast_to({value.name}, {self.tile})"

    def kept(self, cut: bool) -> str | None:
        """Which scores of a tile count, or None where all do."""
        parts = [self.call(self.template.mask)] if cut and self.template.mask is not None else []
        if self.r_mask is not None:
            parts.append(self.r_mask)
        if not parts:
            return None
        self.line(f"kept = {' & '.join(f'({part})' for part in parts)}")
        return "kept"

    def scored(self, product: str) -> float:
        """Writes the tile of scores; gives what they are multiplied by to be exponents of 2."""
        scale, function = self.template.scale, self.template.score
        self.line(f"scores = {product}")
        if function is None and (scale > 0 or self.template.direction != "forward"):
            self.line("modified = scores")
            return scale * LOG2E
        self.line(f"scores = scores * {scale!r}")
        modified = "scores" if function is None else self.call(function, **{SCORE: "scores"})
        self.line(f"modified = {modified}")
        return LOG2E

    def slope(self, of_weights: str, delta: str, kept: str | None) -> None:
        """The gradient by what the products are multiplied by the scale to."""
        self.line(f"slope = weights * ({of_weights} - {delta})")
        function = self.template.pullback
        if function is None:
            return
        name = self.call(function, **{SCORE: "scores", GRADIENT: "slope"})
        self.line(f"slope = tl.where({kept}, {name}, 0.0)" if kept else f"slope = {name}")

    def weights(self, factor: float, line: str, kept: str | None) -> None:
        """The exponentials over their sums, of which `line` is the logarithm of base 2."""
        self.line(f"weights = tl.exp2(modified * {factor!r} - {line})")
        if kept is not None:
            self.line(f"weights = tl.where({kept}, weights, 0.0)")

    def dot(self, left: str, right: str, total: str | None = None) -> str:
        added = f", {total}" if total else ""
        return f'tl.dot({left}, {right}{added}, input_precision="ieee")'


class _Forward(_Attention):
    columns = "k"

    def write(self) -> list[str]:
        template, layout = self.template, self.layout
        self.begin_program()
        head = f"h // {_factor(self.group)}"
        self.matrix("query_at", template.query, "h", "y", "d")
        self.line(f"query = {self.loaded('query_at', 'd', self.y_mask)}")
        self.matrix("key_at", template.key, head, "n", "d", across=True)
        self.matrix("value_at", template.value, head, "n", "e")
        self.line(f'top = tl.full([{layout.x_block}], float("-inf"), tl.float32)')
        self.line(f"total = tl.zeros([{layout.x_block}], tl.float32)")
        self.line(f"result = tl.zeros([{layout.x_block}, {pow2(self.head['e'])}], tl.float32)")
        self.along(template.key.shape[2], "h", self.step)
        self.finish()
        return self.handler.lines

    def step(self, cut: bool) -> None:
        template = self.template
        at = f"key_at + start * {_factor(template.key.strides[2])}"
        self.line(f"keys = {self.loaded(at, 'd', self.r_mask, across=True)}")
        factor = self.scored(self.dot("query", "keys"))
        kept = self.kept(cut)
        if kept is not None:
            self.line(f'modified = tl.where({kept}, modified, float("-inf"))')
        self.line("high = tl.maximum(top, tl.max(modified, 1))")
        certain = kept is None and template.score is None
        self.line("about = high" if certain else 'about = tl.where(high == float("-inf"), 0.0, high)')
        self.line(f"weights = tl.exp2(modified * {factor!r} - (about * {factor!r})[:, None])")
        self.line(f"less = tl.exp2((top - about) * {factor!r})")
        self.line("total = total * less + tl.sum(weights, 1)")
        self.line("result = result * less[:, None]")
        at = f"value_at + start * {_factor(template.value.strides[2])}"
        self.line(f"values = {self.loaded(at, 'e', self.step_mask)}")
        self.line(f"result = {self.dot(f'weights.to({self.element})', 'values', 'result')}")
        self.line("top = high")

    def finish(self) -> None:
        out, lse = self.template.results
        folded = self.template.score is None and self.template.scale > 0
        unit = f" * {self.template.scale!r}" if folded else ""
        self.line("empty = total == 0.0")
        self.line("sums = tl.where(empty, 1.0, total)")
        self.stored(out, "h", "e", "result / sums[:, None]")
        self.line(f'logarithm = tl.where(empty, float("-inf"), top{unit} + tl.log(sums))')
        guard = f", mask={self.y_mask}" if self.y_mask else ""
        self.line(f"tl.store({self.base(lse, 'h')} + y * {_factor(lse.strides[2])}, logarithm[:, None]{guard})")


class _Derivative(_Attention):
    def line_of(self, name: str, region: Region, at: str, mask: str | None) -> None:
        """A number for each query."""
        address = f"{self.base(region, 'h')} + ({at}) * {_factor(region.strides[2])}"
        self.line(f"{name} = tl.load({address}, mask={mask}, other=0.0)" if mask else f"{name} = tl.load({address})")

    def logarithms(self) -> None:
        """Of base 2; queries none of whose scores count have none."""
        self.line(f'logarithms = tl.where(logarithms == float("-inf"), 0.0, logarithms) * {LOG2E!r}')


class _Queries(_Derivative):
    columns = "k"

    def write(self) -> list[str]:
        template, layout = self.template, self.layout
        tangent, lse, delta = template.given
        self.begin_program()
        head = f"h // {_factor(self.group)}"
        self.matrix("query_at", template.query, "h", "y", "d")
        self.line(f"query = {self.loaded('query_at', 'd', self.y_mask)}")
        self.matrix("tangent_at", tangent, "h", "y", "e")
        self.line(f"tangent = {self.loaded('tangent_at', 'e', self.y_mask)}.to({self.element})")
        self.line_of("logarithms", lse, "y", self.y_mask)
        self.logarithms()
        self.line_of("delta", delta, "y", self.y_mask)
        self.matrix("key_at", template.key, head, "n", "d", across=True)
        self.matrix("value_at", template.value, head, "n", "e", across=True)
        self.line(f"result = tl.zeros([{layout.x_block}, {pow2(self.head['d'])}], tl.float32)")
        self.along(template.key.shape[2], "h", self.step)
        self.stored(template.results[0], "h", "d", f"result * {template.scale!r}")
        return self.handler.lines

    def step(self, cut: bool) -> None:
        template = self.template
        at = f"key_at + start * {_factor(template.key.strides[2])}"
        self.line(f"keys = {self.loaded(at, 'd', self.r_mask, across=True)}")
        at = f"value_at + start * {_factor(template.value.strides[2])}"
        self.line(f"values = {self.loaded(at, 'e', self.r_mask, across=True)}")
        factor = self.scored(self.dot("query", "keys"))
        kept = self.kept(cut)
        self.weights(factor, "logarithms", kept)
        self.slope(self.dot("tangent", "values"), "delta", kept)
        self.line(f"result = {self.dot(f'slope.to({self.element})', 'tl.trans(keys)', 'result')}")


class _Keys(_Derivative):
    columns = "q"

    def write(self) -> list[str]:
        template, layout, handler = self.template, self.layout, self.handler
        self.begin_program()
        self.matrix("key_at", template.key, "hk", "y", "d")
        self.line(f"key = {self.loaded('key_at', 'd', self.y_mask)}")
        self.matrix("value_at", template.value, "hk", "y", "e")
        self.line(f"value = {self.loaded('value_at', 'e', self.y_mask)}")
        self.line(f"by_key = tl.zeros([{layout.x_block}, {pow2(self.head['d'])}], tl.float32)")
        self.line(f"by_value = tl.zeros([{layout.x_block}, {pow2(self.head['e'])}], tl.float32)")
        single = self.group.as_int() == 1
        outer, handler.lines = handler.lines, []
        self.line("h = hk" if single else f"h = hk * {_factor(self.group)} + member")
        self.matrix("query_at", template.query, "h", "n", "d", across=True)
        self.matrix("tangent_at", template.given[0], "h", "n", "e")
        self.along(template.query.shape[2], "h", self.step)
        member, handler.lines = handler.lines, outer
        if single:
            handler.lines += member
        else:
            self.line(f"for member in range(0, {index_text(self.group)}):")
            handler.lines += ["    " + line for line in member]
        self.stored(template.results[0], "hk", "d", f"by_key * {template.scale!r}")
        self.stored(template.results[1], "hk", "e", "by_value")
        return handler.lines

    def step(self, cut: bool) -> None:
        template = self.template
        tangent, lse, delta = template.given
        at = f"query_at + start * {_factor(template.query.strides[2])}"
        self.line(f"queries = {self.loaded(at, 'd', self.r_mask, across=True)}")
        at = f"tangent_at + start * {_factor(tangent.strides[2])}"
        self.line(f"tangent = {self.loaded(at, 'e', self.step_mask)}.to({self.element})")
        self.line_of("logarithms", lse, "start + n[None, :]", self.r_mask)
        self.logarithms()
        self.line_of("delta", delta, "start + n[None, :]", self.r_mask)
        factor = self.scored(self.dot("key", "queries"))
        kept = self.kept(cut)
        self.weights(factor, "logarithms", kept)
        self.line(f"by_value = {self.dot(f'weights.to({self.element})', 'tangent', 'by_value')}")
        self.slope(self.dot("value", "tl.trans(tangent)"), "delta", kept)
        self.line(f"by_key = {self.dot(f'slope.to({self.element})', 'tl.trans(queries)', 'by_key')}")


def _factor(expr: IntExpr) -> str:
    return index_text(expr) if expr.as_int() is not None else f"({index_text(expr)})"
