"""The template of an attention: a thread goes along a line of tiles of scores, and keeps none of them.

For the results and for the gradient by queries the line is that of a block of queries, over keys; for the gradients by
keys and values it is that of a block of keys, over queries, of each head that shares the key's. The block is the
program's *own*; what it goes along are the *others*. A tile's vectors run over its own positions: what the program has
is turned once, so that products, functions, maxima and sums are all of whole vectors, and the others are read as they
lie. Tiles that the mask cuts come first, then those that it leaves whole, where it is not asked.

The scale is multiplied into what is turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.codegen.cpp.expressions import OPERATIONS, constant_text, index_text, load_text, storage_text
from torchinductor.codegen.cpp.expressions import value_type as type_text
from torchinductor.codegen.cpp.handler import CppHandler, Names
from torchinductor.codegen.cpp.plan import Layout, Loop
from torchinductor.codegen.cpp.stage_text import Value
from torchinductor.codegen.cpp.tile_product import LANE_BYTES, TILE_PRODUCT
from torchinductor.codegen.cpp.writer import arguments, empty_checks
from torchinductor.codegen.naming import PLACEHOLDER
from torchinductor.ir import Attention, Region, Template
from torchinductor.ir.attention import GRADIENT, POSITIONS, SCORE, Function

LARGEST_HEAD = 256
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PARALLEL = 1 << 15  # scores from which on it is worth running in parallel


@record
class Tiles:
    """Positions of a tile: of a program's own, and of the others at a time."""

    own: int
    others: int


def plan_attention(template: Template) -> Template | None:
    """The template with its tiles; None where the design does not fit it."""
    assert isinstance(template, Attention)
    query, key, value = template.query, template.key, template.value
    dtypes = {template.loops.buffers[region.buffer].dtype for region in (query, key, value)}
    heads = [region.shape[3].as_int() for region in (query, value)]
    if len(dtypes) != 1 or not dtypes <= _FLOATS or None in heads or query.shape[0] != key.shape[0]:
        return None
    longest = max(size or 0 for size in heads)
    if longest > LARGEST_HEAD:
        return None
    side = 64 if longest <= 128 else 32
    by_keys = template.direction == "keys"
    length = (key if by_keys else query).shape[2].as_int()
    own = side if length is None else min(side, _whole(length, 16))
    if template.tables is not None:
        own = math.gcd(own, template.tables.columns if by_keys else template.tables.rows)
    return replace(template, loops=replace(template.loops, layout=Tiles(own, side)))


def write_attention(template: Template) -> str:
    """The text of a planned template: a function named PLACEHOLDER with the C ABI of kernels."""
    assert isinstance(template, Attention)
    return {"forward": _Forward, "queries": _Queries, "keys": _Keys}[template.direction](template).write()


def _whole(size: int, by: int) -> int:
    return -(-size // by) * by


class _Handler(CppHandler):
    """Writes what becomes of one score, in loops over a tile."""

    def __init__(self, template: Attention, names: Names, loops: tuple[Loop, Loop], simd: bool) -> None:
        kernel = replace(template.loops, layout=Layout((), (), loops, simd=simd))
        super().__init__(kernel, names, kernel.stages[0])
        sizes = (*template.query.shape[:3], template.key.shape[2])
        self.ranges = {**kernel.ranges, **dict(zip(POSITIONS, sizes, strict=True))}
        self.given: dict[str, Value] = {}

    def carried(self, key: str, dtype: torch.dtype) -> Value:
        return self.given[key]

    def read(self, text: str, dtype: torch.dtype, depth: int) -> Value:
        """A value that is at hand."""
        return self._emit(text, dtype, depth)

    def call(self, function: Function, **given: Value) -> Value:
        """A function's value."""
        self.given = given
        return function.body.replay(self)[function.value]

    def last(self, line: str) -> None:
        """A statement of the innermost loop."""
        self.text.inside.append(line)


class _Attention:
    """What the three directions have in common."""

    own: str  # the positions of a program
    others: str  # those that it goes along
    head: str  # the head that a program is of

    def __init__(self, template: Attention) -> None:
        self.template, self.kernel = template, template.loops
        self.names, self.tiles = Names(self.kernel), self.kernel.laid_out(Tiles)
        half = self.dtype_of(template.query).itemsize == 2
        self.dtype = torch.float32 if half else self.dtype_of(template.query)
        self.word = type_text(self.dtype)
        self.lanes = LANE_BYTES // self.dtype.itemsize
        self.width = _whole(self.tiles.own, self.lanes)
        self.size = {name: getattr(template, name).shape[3].as_int() or 0 for name in ("query", "key", "value")}
        self.lines: list[str] = []
        self.depth = 0

    # -- text

    def line(self, text: str) -> None:
        """A line, indented by the blocks that are open."""
        self.depth -= text.startswith("}")
        self.lines.append("  " * self.depth + text)
        self.depth += text.endswith("{")

    def program(self) -> None:
        """What is done for a block of one head."""
        raise NotImplementedError

    def write(self) -> str:
        """The function."""
        template, own = self.template, self.own
        batch, heads, length = map(_text, (template.query.shape[0], *self._programs()))
        bodies = [function.body for function in template.functions]
        self.lines = [TILE_PRODUCT, f'extern "C" int {PLACEHOLDER}(void* const* buffers, const i64* symbols) {{']
        self.depth = 1
        for text in (*arguments(self.kernel), "int bad = 0;", *empty_checks(self.kernel, bodies)):
            self.line(text)
        self.line(f"const i64 tiles = ({length} + {self.tiles.own - 1}) / {self.tiles.own};")
        if not any(body.writes for body in bodies):  # additions are made in the loops' order
            work = " * ".join(f"({_text(size)})" for size in (*template.query.shape[:3], template.key.shape[2]))
            self.line(f"#pragma omp parallel for schedule(dynamic) reduction(|:bad) if ({work} >= {_PARALLEL})")
        self.line(f"for (i64 program = 0; program < tiles * ({heads}) * ({batch}); program++) {{")
        self.line(f"const i64 b = program / (tiles * ({heads})), {self.head} = program / tiles % ({heads});")
        self.line(f"const i64 {own}0 = program % tiles * {self.tiles.own};")
        self.line(f"const i64 {own}1 = imin<i64>({own}0 + {self.tiles.own}, {length}), mine = {own}1 - {own}0;")
        self.array("scores", self.tiles.others * self.width)
        self.program()
        self.line("}")
        self.line("return bad;")
        self.line("}")
        return "\n".join(self.lines) + "\n"

    def _programs(self) -> tuple[IntExpr, IntExpr]:
        """How many heads there are, and their length."""
        region = self.template.query
        return region.shape[1], region.shape[2]

    # -- places

    def dtype_of(self, region: Region) -> torch.dtype:
        return self.kernel.buffers[region.buffer].dtype

    def base(self, region: Region, head: str) -> str:
        """Where the matrix (or the line) of the program's batch and a head begins."""
        parts = [self.names.pointer[region.buffer], _text(region.offset)]
        for place, size, stride in zip(("b", head), region.shape, region.strides, strict=False):
            if size.as_int() != 1:
                parts.append(f"{place} * ({_text(stride)})")
        return " + ".join(parts)

    def loaded(self, region: Region, pointer: str, index: str) -> str:
        """An element in the type that is computed in."""
        return f"({self.word}){load_text(f'{pointer}[{index}]', self.dtype_of(region), None)}"

    def array(self, name: str, size: int, value: str | None = None) -> None:
        """Memory of a program."""
        self.line(f"alignas({LANE_BYTES}) {self.word} {name}[{size}];")
        if value is not None:
            self.line(f"for (i64 i = 0; i < {size}; i++) {name}[i] = {value};")

    def padded(self, size: int) -> int:
        """The length of a row of whole vectors."""
        return _whole(size, self.lanes)

    def turned(self, name: str, region: Region, head: str, scaled: bool = False) -> None:
        """The program's rows of a matrix as columns."""
        size = region.shape[3].as_int() or 0
        self.array(name, size * self.width, constant_text(0.0, self.dtype))
        self.line("{")
        self.line(f"const auto* from = {self.base(region, head)} + {self.own}0 * ({_text(region.strides[2])});")
        factor = f" * {constant_text(self.template.scale, self.dtype)}" if scaled else ""
        element = self.loaded(region, "from", f"y * ({_text(region.strides[2])}) + d * ({_text(region.strides[3])})")
        self.line("for (i64 y = 0; y < mine; y++)")
        self.line(f"  for (i64 d = 0; d < {size}; d++) {name}[d * {self.width} + y] = {element}{factor};")
        self.line("}")

    def lies_in_rows(self, region: Region) -> bool:
        """Whether the rows of a matrix are read where they lie."""
        whole = (region.shape[3].as_int() or 1) % self.lanes == 0
        return self.dtype_of(region) == self.dtype and region.strides[3].as_int() == 1 and whole

    def room(self, name: str, region: Region) -> None:
        """Memory for rows that are not read where they lie."""
        if not self.lies_in_rows(region):
            self.array(f"{name}_tile", self.tiles.others * self.padded(region.shape[3].as_int() or 0))

    def rows(self, name: str, region: Region, head: str) -> None:
        """The others' rows of a matrix, from `name` on, `name`_step elements apart."""
        first, row = f"{self.others}0", _text(region.strides[2])
        if self.lies_in_rows(region):
            self.line(f"const {self.word}* {name} = {self.base(region, head)} + {first} * ({row});")
            self.line(f"const i64 {name}_step = {row};")
            return
        size = region.shape[3].as_int() or 0
        padded = self.padded(size)
        self.line(f"const {self.word}* {name} = {name}_tile;")
        self.line(f"const i64 {name}_step = {padded};")
        self.line(f"for (i64 r = 0; r < {self.others}1 - {first}; r++) {{")
        self.line(f"const auto* from = {self.base(region, head)} + ({first} + r) * ({row});")
        element = self.loaded(region, "from", f"d * ({_text(region.strides[3])})")
        self.line(f"for (i64 d = 0; d < {size}; d++) {name}_tile[r * {padded} + d] = {element};")
        if padded != size:
            self.line(f"for (i64 d = {size}; d < {padded}; d++) {name}_tile[r * {padded} + d] = 0;")
        self.line("}")

    def stored(self, region: Region, head: str, value: str) -> None:
        """Writes the program's rows of a matrix: `value` of row y and column d."""
        row, column = map(_text, region.strides[2:])
        self.line("{")
        self.line(f"auto* to = {self.base(region, head)} + {self.own}0 * ({row});")
        text = storage_text(f"({value})", self.dtype_of(region), self.dtype)
        self.line("for (i64 y = 0; y < mine; y++)")
        self.line(f"  for (i64 d = 0; d < {_text(region.shape[3])}; d++) to[y * ({row}) + d * ({column})] = {text};")
        self.line("}")

    def numbers(self, name: str, region: Region, room: int) -> None:
        """A number for each query from q0 to q1."""
        self.array(name, room)
        at = f"(q0 + i) * ({_text(region.strides[2])})"
        self.line(f"for (i64 i = 0; i < q1 - q0; i++) {name}[i] = ({self.base(region, 'h')})[{at}];")

    # -- going along

    def along(self, size: IntExpr, step: Callable[[], None]) -> None:
        """Loops over tiles: those that the mask cuts, then whole ones. `step` writes what is done with one."""
        tables, template, others = self.template.tables, self.template, self.others
        length, side = _text(size), self.tiles.others
        self.line(f"const auto step = [&](const i64 {others}0, const i64 {others}1, const bool cut) {{")
        self.line(f"const i64 count = {others}1 - {others}0;")
        step()
        self.line("};")
        if tables is None:
            start = f"for (i64 r = 0; r < {length}; r += {side})"
            self.line(f"{start} step(r, imin<i64>(r + {side}, {length}), true);")
            return
        by_keys = template.direction == "keys"
        mine, theirs = (tables.columns, tables.rows) if by_keys else (tables.rows, tables.columns)
        for cut, lines in (("true", tables.partial), ("false", tables.full)):
            if lines is None:
                continue
            counts, places = lines
            self.line("{")
            self.line(f"const i64 line = {self.own}0 / {mine};")
            self.line(f"const i64 blocks = ({self.base(counts, 'h')})[line * ({_text(counts.strides[2])})];")
            self.line(f"const auto* places = {self.base(places, 'h')} + line * ({_text(places.strides[2])});")
            self.line("for (i64 n = 0; n < blocks; n++) {")
            self.line(f"const i64 from = places[n * ({_text(places.strides[3])})] * (i64){theirs};")
            self.line(f"const i64 to = imin<i64>(from + {theirs}, {length});")
            self.line(f"for (i64 r = from; r < to; r += {side}) step(r, imin<i64>(r + {side}, to), {cut});")
            self.line("}")
            self.line("}")

    def product(self, to: str, left: str, right: str, width: int, add: bool = True) -> None:
        """A tile's columns, from memory of the width of a tile, times the others' rows, added to the program's."""
        told = f"{to}, {width}, {left}, 1, {self.width}, {right}, {right}_step, {self.width}, {width}, count"
        self.line(f"product<{self.word}>({told}, {'true' if add else 'false'});")

    def tile(self, to: str, rows: str, own: str, size: int) -> None:
        """The others' rows times the program's own."""
        told = f"{to}, {self.width}, {rows}, {rows}_step, 1, {own}, {self.width}, count, {self.width}, {size}"
        self.line(f"product<{self.word}>({told}, false);")

    # -- scores

    def each(self, write: Callable[[_Handler, str, Value | None], None]) -> None:
        """Loops over a tile in which `write` says what is done with a score, at its place, and whether it counts."""
        if self.template.mask is None or self.template.tables is None:
            self._each(write, self.template.mask is not None)
            return
        self.line("if (cut) {")
        self._each(write, True)
        self.line("} else {")
        self._each(write, False)
        self.line("}")

    def _each(self, write: Callable[[_Handler, str, Value | None], None], cut: bool) -> None:
        own, others = self.own, self.others
        loops = tuple(Loop(name, f"{name}1", f"{name}0", axis=name) for name in (others, own))
        pullback = self.template.pullback
        simd = pullback is None or not pullback.body.writes
        handler = _Handler(self.template, self.names, (loops[0], loops[1]), simd)
        mask = self.template.mask
        kept = handler.call(mask) if cut and mask is not None else None
        write(handler, f"[({others} - {others}0) * {self.width} + {own} - {own}0]", kept)
        for text in handler.text.write():
            self.lines.append("  " * self.depth + text)

    def chosen(self, kept: Value | None, value: str, otherwise: float) -> str:
        """A value where a score counts."""
        return value if kept is None else f"({kept.text} ? {value} : {constant_text(otherwise, self.dtype)})"

    def exp(self, text: str) -> str:
        """An exponential; zero where it would be less than a normal number."""
        return f"exp_or_zero({text})"


class _Forward(_Attention):
    own, others, head = "q", "k", "h"

    def program(self) -> None:
        template, low = self.template, constant_text(-math.inf, self.dtype)
        width, columns = self.width, self.padded(self.size["value"])
        self.line(f"const i64 shared = h / ({_text(_group(template))});")
        self.turned("query", template.query, "h", scaled=True)
        self.room("keys", template.key)
        self.room("values", template.value)
        self.array("top", width, low)
        self.array("total", width, "0")
        self.array("result", width * columns, "0")
        for name in ("high", "less", "part"):
            self.array(name, width)
        self.along(template.key.shape[2], self.step)
        out, lse = template.results
        self.stored(out, "h", f"result[y * {columns} + d] / (total[y] == 0 ? 1 : total[y])")
        self.line("for (i64 y = 0; y < mine; y++) {")
        logarithm = f"total[y] == 0 ? {low} : top[y] + {OPERATIONS['log'](self.dtype, 'total[y]')}"
        self.line(f"({self.base(lse, 'h')})[(q0 + y) * ({_text(lse.strides[2])})] = {logarithm};")
        self.line("}")

    def step(self) -> None:
        template, width = self.template, self.width
        self.rows("keys", template.key, "shared")
        self.rows("values", template.value, "shared")
        self.tile("scores", "keys", "query", self.size["query"])
        if template.score is not None or template.mask is not None:
            self.each(self.modified)
        lanes, score = f"for (i64 y = 0; y < {width}; y++)", f"scores[r * {width} + y]"
        self.line(f"{lanes} {{ high[y] = top[y]; part[y] = 0; }}")
        self.line("for (i64 r = 0; r < count; r++)")
        self.line(f"  {lanes} high[y] = {score} > high[y] ? {score} : high[y];")
        self.line("#pragma omp simd")
        self.line(f"{lanes} {{")
        self.line(f"const {self.word} about = high[y] == {constant_text(-math.inf, self.dtype)} ? 0 : high[y];")
        self.line(f"less[y] = {self.exp('top[y] - about')}; top[y] = high[y]; high[y] = about;")
        self.line("}")
        self.line("for (i64 r = 0; r < count; r++) {")
        self.line("#pragma omp simd")
        self.line(f"{lanes} {{")
        self.line(f"const {self.word} w = {self.exp(f'{score} - high[y]')};")
        self.line(f"{score} = w; part[y] += w;")
        self.line("}")
        self.line("}")
        self.line(f"{lanes} total[y] = total[y] * less[y] + part[y];")
        columns = self.padded(self.size["value"])
        self.line(f"{lanes} for (i64 d = 0; d < {columns}; d++) result[y * {columns} + d] *= less[y];")
        self.product("result", "scores", "values", columns)

    def modified(self, handler: _Handler, at: str, kept: Value | None) -> None:
        score = handler.read(f"scores{at}", self.dtype, 2)
        function = self.template.score
        value = score if function is None else handler.call(function, **{SCORE: score})
        handler.last(f"scores{at} = {self.chosen(kept, value.text, -math.inf)};")


class _Derivative(_Attention):
    keeps_weights = False

    def slope(self, handler: _Handler, at: str, kept: Value | None) -> None:
        """The gradient by what the products are multiplied by the scale to, and the weights."""
        template, dtype = self.template, self.dtype
        place = "[q - q0]"
        score = handler.read(f"scores{at}", dtype, 2)
        modified = score if template.score is None else handler.call(template.score, **{SCORE: score})
        depth = handler.depths["q"]
        lse = handler.read(f"logarithms{place}", dtype, depth)
        line = handler.read(self._finite(lse), dtype, depth)
        delta = handler.read(f"deltas{place}", dtype, depth)
        weight = handler.read(self.exp(f"{modified.text} - {line.text}"), dtype, 2)
        weight = handler.read(self.chosen(kept, weight.text, 0.0), dtype, 2)
        slope = handler.read(f"{weight.text} * (gradients{at} - {delta.text})", dtype, 2)
        if template.pullback is not None:
            slope = handler.call(template.pullback, **{SCORE: score, GRADIENT: slope})
            slope = handler.read(self.chosen(kept, slope.text, 0.0), dtype, 2)
        handler.last(f"scores{at} = {slope.text};")
        if self.keeps_weights:
            handler.last(f"weights{at} = {weight.text};")

    def _finite(self, lse: Value) -> str:
        """Queries none of whose scores count have no logarithm."""
        return f"({lse.text} == {constant_text(-math.inf, self.dtype)} ? 0 : {lse.text})"


class _Queries(_Derivative):
    own, others, head = "q", "k", "h"

    def program(self) -> None:
        template = self.template
        tangent, lse, delta = template.given
        self.line(f"const i64 shared = h / ({_text(_group(template))});")
        self.turned("query", template.query, "h", scaled=True)
        self.turned("tangent", tangent, "h")
        self.numbers("logarithms", lse, self.width)
        self.numbers("deltas", delta, self.width)
        self.room("keys", template.key)
        self.room("values", template.value)
        self.array("gradients", self.tiles.others * self.width)
        columns = self.padded(self.size["query"])
        self.array("result", self.width * columns, "0")
        self.along(template.key.shape[2], self.step)
        scale = constant_text(template.scale, self.dtype)
        self.stored(template.results[0], "h", f"result[y * {columns} + d] * {scale}")

    def step(self) -> None:
        template = self.template
        self.rows("keys", template.key, "shared")
        self.rows("values", template.value, "shared")
        self.tile("scores", "keys", "query", self.size["query"])
        self.tile("gradients", "values", "tangent", self.size["value"])
        self.each(self.slope)
        self.product("result", "scores", "keys", self.padded(self.size["query"]))


class _Keys(_Derivative):
    own, others, head = "k", "q", "shared"
    keeps_weights = True

    def _programs(self) -> tuple[IntExpr, IntExpr]:
        region = self.template.key
        return region.shape[1], region.shape[2]

    def program(self) -> None:
        template = self.template
        self.turned("key", template.key, "shared", scaled=True)
        self.turned("value", template.value, "shared")
        self.room("queries", template.query)
        self.room("tangents", template.given[0])
        self.array("gradients", self.tiles.others * self.width)
        self.array("weights", self.tiles.others * self.width)
        of_key, of_value = self.padded(self.size["key"]), self.padded(self.size["value"])
        self.array("by_key", self.width * of_key, "0")
        self.array("by_value", self.width * of_value, "0")
        group = _text(_group(template))
        self.line(f"for (i64 h = shared * ({group}); h < (shared + 1) * ({group}); h++) {{")
        self.along(template.query.shape[2], self.step)
        self.line("}")
        scale = constant_text(template.scale, self.dtype)
        self.stored(template.results[0], "shared", f"by_key[y * {of_key} + d] * {scale}")
        self.stored(template.results[1], "shared", f"by_value[y * {of_value} + d]")

    def step(self) -> None:
        template = self.template
        tangent, lse, delta = template.given
        self.rows("queries", template.query, "h")
        self.rows("tangents", tangent, "h")
        self.numbers("logarithms", lse, self.tiles.others)
        self.numbers("deltas", delta, self.tiles.others)
        self.tile("scores", "queries", "key", self.size["key"])
        self.tile("gradients", "tangents", "value", self.size["value"])
        self.each(self.slope)
        self.product("by_value", "weights", "tangents", self.padded(self.size["value"]))
        self.product("by_key", "scores", "queries", self.padded(self.size["key"]))


def _group(template: Attention) -> IntExpr:
    """How many heads share one of the keys."""
    return template.query.shape[1] // template.key.shape[1]


def _text(expr: IntExpr) -> str:
    return index_text(expr, {})
