"""The op protocol's C++ handler: replaying a stage's body on it writes each operation into the outermost loop that it
does not depend on."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from primtorch.symbolic.expr import Call, IntExpr, atom_expr
from torchinductor.codegen.cpp.accumulators import (
    Accumulator,
    accumulate,
    accumulate_lanes,
    accumulate_moments,
    run_along,
)
from torchinductor.codegen.cpp.expressions import (
    OPERATIONS,
    STORAGE,
    bitcast_text,
    constant_text,
    convert_text,
    index_text,
    load_text,
    storage_text,
    value_type,
    wraps,
)
from torchinductor.codegen.cpp.loop_parts import Choices, Line, Part, settled
from torchinductor.codegen.cpp.plan import Layout
from torchinductor.codegen.cpp.rows import row_place
from torchinductor.codegen.cpp.stage_text import StageText, Value
from torchinductor.indexing import ONE, coefficient_of, number, pieces, product, variable
from torchinductor.ir import OF_PLACES, Apply, Kernel, Stage, compute_dtype
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

_MOST_WORDS = 4096  # random numbers that are made at one time
_MOST_PIECES = 5  # of the smaller or the larger of two indices along the innermost loop
_MOST_APART = 4096  # elements of a row that are made bytes behind the loop that computes them
_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})
_MUCH = 32  # operations of a body beside which that costs nothing
_SOME = 16  # the same where it is not known how long the row is: it may be shorter than a vector of bytes


class Names:
    """What a kernel's stages share: pointers by buffer, accumulators by key, and how many names were given out."""

    def __init__(self, kernel: Kernel) -> None:
        self.pointer = {name: f"p{k}" for k, name in enumerate(kernel.arguments)}
        self.pointer |= {name: f"row{k}" for k, name in enumerate(kernel.rows)}
        self.accumulators: dict[str, Accumulator] = {}
        self.turned: dict[tuple[str, IntExpr], str] = {}  # loads across the vector axis: buffers of the tile
        self.count = 0


class CppHandler(OpsHandler[Value]):
    """Writes one stage into `text`."""

    def __init__(self, kernel: Kernel, names: Names, stage: Stage) -> None:
        self.kernel, self.names, self.stage = kernel, names, stage
        widths = (kernel.buffers[op.buffer].dtype.itemsize for op in stage.body.accesses)
        self.text = StageText(kernel.laid_out(Layout), stage, kernel.ranges, min(widths, default=4))
        self.depths = {loop.axis: d + 1 for d, loop in enumerate(self.text.loops) if loop.axis is not None}
        self.ranges = kernel.ranges
        self.heavy = any(op.heavy for op in stage.body.of(Apply))
        self.row_place = row_place(kernel, self.text.layout)
        self.indices: dict[str, str] = {}  # of values that are indices, as text
        self.places: dict[str, IntExpr] = {}  # of values that are indices, or integers of the program's text
        self.choices: dict[Call, IntExpr] = {}  # of two indices, and what stands for each
        self.wider: dict[str, Value] = {}  # of bytes, the int32 values that they were
        places = self.text.places  # of the innermost loop, where its parts are not known yet
        self.by_parts = None if places is None else Choices(places, self.ranges, kernel.numbers)

    # emission -------------------------------------------------------------------------------------------------
    def _emit(self, text: str, dtype: torch.dtype, depth: int, short: bool = False) -> Value:
        made = self._named(dtype, depth, short)
        self._define(f"const {value_type(dtype)} {made.text} = {text};", depth)
        return made

    def _named(self, dtype: torch.dtype, depth: int, short: bool = False) -> Value:
        """A value that is to be defined."""
        self.names.count += 1
        return Value(f"t{self.names.count - 1}", dtype, depth, short)

    def _define(self, line: str, depth: int, shorter: Line | None = None) -> None:
        """Writes what only computes; `shorter`: what may stand for it in the innermost loop's parts."""
        for lines in (self.text.lines, self.text.values):
            lines[depth].append(line)
        if shorter is not None and self.text.places is not None:
            self.text.places.shorter[line] = shorter

    def _depth(self, expr: IntExpr, *values: Value | None) -> int:
        deepest = max((self.depths.get(s, 0) for s in expr.symbols()), default=0)
        return max((deepest, *(v.depth for v in values if v is not None)))

    def _index(self, expr: IntExpr) -> str:
        axis = self.text.loops[-1].axis if self.text.loops else None
        for atom in {atom for monomial, _ in expr.ordered_terms() for atom in monomial} if axis else ():
            if wraps(atom, self.ranges) and isinstance(atom, Call):
                self._cut("ge", atom.left, atom.right)
            elif isinstance(atom, Call) and axis in atom.left.symbols() | atom.right.symbols():
                known = self.text.loops[-1].most is not None and atom_expr(atom).symbols() == {axis}
                expr = expr.substitute({atom: self._in_pieces(atom) if known else self._in_parts(atom)})
        return index_text(expr, self.ranges, self.kernel.numbers)

    def _told_by_parts(self, expr: IntExpr) -> Choices | None:
        """What tells an index along the innermost loop in each of its parts, where these are not numbers: then the
        compiler sees what it is by itself."""
        loop = self.text.loops[-1] if self.text.loops else None
        if loop is None or loop.axis is None or self.by_parts is None:
            return None
        names = expr.symbols()
        outside = (names - {loop.axis}) & self.depths.keys()
        counted = loop.most is not None and names == {loop.axis}
        if loop.axis not in names or outside or counted or not self.by_parts.note(expr):
            return None
        return self.by_parts

    def _in_parts(self, choice: Call) -> IntExpr:
        """What stands for a choice of indices: a variable, which is told without a choice in each part of the loop."""
        known = self.choices.get(choice)
        if known is not None:
            return known
        expr = atom_expr(choice)
        self.choices[choice], by_parts = expr, self._told_by_parts(expr)
        if by_parts is None:
            return expr
        name = f"j{self.names.count}"
        self.names.count += 1
        depth = len(self.text.loops)

        def line(index: IntExpr) -> str:
            return f"const i64 {name} = {index_text(index, self.ranges, self.kernel.numbers)};"

        self._define(line(expr), depth, lambda part: line(by_parts.within(expr, part)))
        self.depths[name], self.choices[choice] = depth, variable(name)
        return self.choices[choice]

    def _in_pieces(self, choice: Call) -> IntExpr:
        """What stands for the smaller or the larger of two indices: a variable that is told by its pieces along the
        innermost loop, which is cut where another one begins, so that the compiler sees through them."""
        known = self.choices.get(choice)
        if known is not None:
            return known
        loop = self.text.loops[-1]
        found = pieces(atom_expr(choice), loop.axis or "", loop.most or 0) if loop.start == "0" else []
        self.choices[choice] = atom_expr(choice)
        if 1 < len(found) <= _MOST_PIECES:
            texts = [f"({self._index(piece)})" for _, piece in found]
            begins = [f"{loop.var} < {begin}L" for begin, _ in found[1:]]
            text = "".join(f"{before} ? {piece} : " for before, piece in zip(begins, texts, strict=False)) + texts[-1]
            name = f"j{self.names.count}"
            self.names.count += 1
            depth = self.depths[loop.axis or ""]
            for lines in (self.text.lines, self.text.values):
                lines[depth].append(f"const i64 {name} = {text};")
            self.text.cuts |= {begin for begin, _ in found[1:]}
            self.depths[name], self.choices[choice] = depth, variable(name)
        return self.choices[choice]

    def _always(self, buffer: str, index: IntExpr, place: str, mask: Value) -> tuple[str, IntExpr] | None:
        """What is read along the innermost loop whether a mask holds or not, and so vectorises: where it does not, the
        buffer's beginning. And what has to be at least zero for the buffer to be as long as that."""
        axis = self.text.loops[-1].axis if self.text.loops else None
        step = coefficient_of(index, axis) if axis is not None else None
        numel = product(self.kernel.buffers[buffer].shape)
        pointer, contiguous = self.names.pointer[buffer], step is not None and step.as_int() == 1
        if contiguous and axis is not None and mask.depth < len(self.text.loops):
            room, start = numel - self.ranges[axis], index - variable(axis)
            element = f"{pointer}[(({self._index(start)}) & -(i64){mask.text}) + {self._index(index - start)}]"
        elif step is None or step.as_int() not in (0, 1):
            room, element = numel - ONE, f"{pointer}[({place}) & -(i64){mask.text}]"
        else:
            return None
        known = room.as_int()
        if known is not None:
            return (element, room) if known >= 0 else None
        told = self.text.places is not None and room.symbols() <= set(self.kernel.symbols)  # its numbers are at hand
        return (element, room) if told else None

    def _row_or_none(self, buffer: str, index: IntExpr, mask: Value) -> str | None:
        """The element of what is read along a tile's row under a condition for all of it: of the row, or of zeros."""
        loop, tile = self.text.loops[-1] if self.text.loops else None, self.text.layout.tile
        if tile is None or loop is None or loop.most is None or loop.axis is None or mask.depth >= len(self.text.loops):
            return None
        step = coefficient_of(index, loop.axis)
        if step is None or step.as_int() != 1:
            return None
        name, kind = f"row{self.names.count}", STORAGE[self.kernel.buffers[buffer].dtype]
        self.names.count += 1
        first = self._index(index - variable(loop.axis) + variable(loop.start))
        self.text.declared.append(f"static const {kind} {name}_none[{loop.most}] = {{}};")
        there = f"{self.names.pointer[buffer]} + {first}"
        depth = len(self.text.loops) - 1
        self._define(f"const {kind}* {name} = {mask.text} ? {there} : {name}_none;", depth)
        return f"{name}[{loop.var} - {loop.start}]"

    def _turned(self, buffer: str, index: IntExpr, load: bool) -> str | None:
        """The place of an access that is contiguous across the vector axis in a buffer of the tile, which is turned
        over before or after the tile's loops; None for any other access."""
        tile = self.text.layout.tile
        if tile is None or buffer in (self.stage.body.writes if load else self.stage.body.reads):
            return None
        cross, vector = tile.cross, tile.vector
        along, step = (coefficient_of(index, loop.var) for loop in (cross, vector))
        if along is None or along.as_int() != 1 or step is None or not step.terms or step.as_int() == 1:
            return None
        corner = index - variable(cross.var) - step * variable(vector.var)
        if (corner.symbols() | step.symbols()) & self.depths.keys():
            return None
        known = self.names.turned.get((buffer, index)) if load else None
        if known is not None:
            return f"{known}[{tile.place}]"
        name = f"turned{self.names.count}"
        self.names.count += 1
        if load:
            self.names.turned[buffer, index] = name
        first = corner + variable(cross.start) + step * variable(vector.start)
        there = f"{self.names.pointer[buffer]} + {self._index(first)}, {self._index(step)}"
        rows, columns = (f"{loop.stop} - {loop.start}" for loop in (cross, vector))
        self.text.declared.append(f"{STORAGE[self.kernel.buffers[buffer].dtype]} {name}[{tile.elements}];")
        if load:
            self.text.declared.append(f"turn({there}, {name}, {vector.most}, {rows}, {columns});")
        else:
            self.text.finishing.append(f"turn({name}, {vector.most}, {there}, {columns}, {rows});")
        return f"{name}[{tile.place}]"

    def _stored_apart(self, buffer: str, index: IntExpr, value: Value, plain: str) -> bool:
        """Stores a row of bytes behind the loop that computes them, where it is long. Within it they would make it one
        over as many elements at a time as a vector has bytes, which leaves much of a row over."""
        wide, layout = self.wider.get(value.text), self.text.layout
        if wide is None or self.stage.kind != "outer" or not layout.simd or layout.tile or layout.lanes:
            return False
        loop, places = self.text.loops[-1] if self.text.loops else None, self.text.places
        if loop is None or loop.axis is None or wide.depth != len(self.text.loops):
            return False
        step, most = coefficient_of(index, loop.axis), loop.most if places is None or loop.most else _MOST_APART
        if step is None or step.as_int() != 1 or most is None or most > _MOST_APART:
            return False
        if len(self.stage.body.ops) < (_MUCH if loop.most else _SOME):
            return False
        name = f"row{self.names.count}_wide"
        self.names.count += 1
        element = f"{self.names.pointer[buffer]}[{self._index(index - variable(loop.axis))} + k]"
        array, line = f"i32 {name}[{most}];", f"{name}[{loop.var} - {loop.start}] = {wide.text};"
        each = f"for (i64 k = {loop.start}; k < {loop.stop}; k++)"
        behind = ["#pragma omp simd", f"{each} {element} = (u8){name}[k - {loop.start}];"]
        if loop.most is None and places is not None:  # such rows as the array has room for
            places.assume(number(most) - self.ranges[loop.axis])
            places.opening.append(array)
            places.closing += behind
            places.shorter[plain] = line
            self.text.inside.append(plain)
            return True
        self.text.opening.append(array)
        self.text.inside.append(line)
        self.text.closing += behind
        return True

    # protocol -------------------------------------------------------------------------------------------------
    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: Value | None = None) -> Value:
        index = self.row_place if buffer in self.kernel.rows else index
        pointer, place = self.names.pointer[buffer], self._index(index)
        turned = self._turned(buffer, index, True) if mask is None else None
        short = dtype == torch.bfloat16
        if turned is not None:
            return self._emit(load_text(turned, dtype, None), compute_dtype(dtype), len(self.text.loops), short)
        depth = len(self.text.loops) if buffer in self.stage.body.writes else self._depth(index, mask)
        plain = load_text(f"{pointer}[{place}]", dtype, mask.text if mask else None)
        always = None if mask is None else self._always(buffer, index, place, mask)
        row = None if mask is None or always is not None else self._row_or_none(buffer, index, mask)
        if row is not None:
            return self._emit(load_text(row, dtype, None), compute_dtype(dtype), depth, short)
        if mask is None or always is None:
            return self._emit(plain, compute_dtype(dtype), depth, short)
        text, room = f"keep({load_text(always[0], dtype, None)}, {mask.text})", always[1]
        known, kind = room.as_int(), value_type(dtype)
        if known is not None or self.text.places is None:
            return self._emit(text, compute_dtype(dtype), depth, short)
        self.text.places.assume(room)
        made = self._named(compute_dtype(dtype), depth, short)
        self._define(f"const {kind} {made.text} = {plain};", depth, f"const {kind} {made.text} = {text};")
        return made

    def store(
        self, buffer: str, index: IntExpr, value: Value, mode: StoreMode = "set", mask: Value | None = None
    ) -> None:
        dtype = self.kernel.buffers[buffer].dtype
        index = self.row_place if buffer in self.kernel.rows else index
        turned = self._turned(buffer, index, False) if mode == "set" and mask is None else None
        if turned is not None:
            self.text.inside.append(f"{turned} = {storage_text(value.text, dtype, value.dtype, value.short)};")
            return
        element = f"{self.names.pointer[buffer]}[{self._index(index)}]"
        text = value.text
        if mode != "set":
            compute = compute_dtype(dtype)
            old = load_text(element, dtype, None)
            op = {"add": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}[mode]
            text = OPERATIONS[op](compute, old, convert_text(text, compute, value.dtype))
            line = f"{element} = {storage_text(text, dtype, compute)};"
        else:
            line = f"{element} = {storage_text(text, dtype, value.dtype, value.short)};"
            if mask is None and self._stored_apart(buffer, index, value, line):
                return
        depth = len(self.text.loops) if self.kernel.scatters else self._depth(index, value, mask)
        # A store stands in the innermost loop that its place depends on, or deeper with its value.
        self.text.lines[depth].append(f"if ({mask.text}) {line}" if mask else line)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        if isinstance(value, int) and dtype == torch.int64:
            self.places[constant_text(value, dtype)] = number(value)
        return Value(constant_text(value, dtype), dtype, 0, dtype == torch.float32 and _is_short(value))

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> Value:
        dtype = compute_dtype(dtype)
        place = self._index(expr)
        made = self._emit(convert_text(f"({place})", dtype, torch.int64), dtype, self._depth(expr))
        self.indices[made.text] = place
        self.places[made.text] = expr
        return made

    def _cut(self, op: str, a: IntExpr | None, b: IntExpr | None) -> Callable[[Part], bool] | None:
        """Notes where along the innermost loop a comparison of indices changes. Where the compiler does not see what it
        is in the loop's parts, gives that."""
        loop = self.text.loops[-1] if self.text.loops else None
        if a is None or b is None or loop is None or loop.axis is None:
            return None
        step = coefficient_of(a - b, loop.axis)
        rest = None if step is None else a - b - step * variable(loop.axis)
        if step is None or rest is None or not step.terms:
            return None
        known = rest.as_int()
        if known is None or loop.most is None:
            fixed = self.text.places is not None and not rest.symbols() & self.depths.keys()
            return settled(op, a - b, self.text.places) if fixed and self.text.places is not None else None
        if step.as_int() not in (1, -1):
            return None
        zero = -known * (step.as_int() or 0)  # where both are equal
        before = op in ("ge", "lt") if step.as_int() == 1 else op in ("gt", "le")
        self.text.cuts |= {zero, zero + 1} if op in ("eq", "ne") else {zero if before else zero + 1}
        return None

    def indirect(self, value: Value, size: IntExpr) -> IntExpr:
        name = f"j{self.names.count}"
        self.names.count += 1
        place = self.places.get(value.text)
        by_parts = None if place is None else self._told_by_parts(place)
        if by_parts is not None and place is not None and value.depth == len(self.text.loops):
            return self._in_range(name, value, place, size, by_parts)
        inside = self._emit(f"(u64){value.text} < (u64)({self._index(size)})", torch.bool, value.depth).text
        # A wrong index is reported after the kernel; here it must only not leave the memory.
        self._flag(inside, value.depth, Fault.INDEX)
        self.text.lines[value.depth].append(f"const i64 {name} = {inside} ? {value.text} : 0;")
        self.depths[name] = value.depth
        return variable(name)

    def _in_range(self, name: str, value: Value, place: IntExpr, size: IntExpr, by_parts: Choices) -> IntExpr:
        """A place that is computed from indices: the shorter lines hold where it is one of a dim of `size`."""
        inside, depth, numbers = self._named(torch.bool, value.depth).text, value.depth, self.kernel.numbers
        check = f"const bool {inside} = (u64){value.text} < (u64)({self._index(size)});"
        self._define(check, depth, lambda part: f"const bool {inside} = true;")
        self._flag(inside, depth, Fault.INDEX)

        def line(part: Part) -> str:
            return f"const i64 {name} = {index_text(by_parts.within(place, part), self.ranges, numbers)};"

        self._define(f"const i64 {name} = {inside} ? {value.text} : 0;", depth, line)
        if self.text.places is not None:
            self.text.places.bounds.append(lambda: by_parts.bound(place, size))
        self.depths[name] = depth
        return variable(name)

    def _flag(self, condition: str, depth: int, fault: Fault) -> None:
        flag = f"bad{self.names.count}"
        self.names.count += 1
        self.text.declared.append(f"int {flag} = 0;")
        self.text.lines[depth].append(f"{flag} |= !{condition};")
        self.text.finishing.append(f"bad |= {flag} * {fault.value};")
        if depth == len(self.text.loops):
            self.text.reductions.append(f"reduction(|:{flag})")

    def require(self, value: Value, condition: Value, fault: Fault) -> Value:
        self._flag(
            condition.text, len(self.text.loops), fault
        )  # where the loops run: nothing is required of no element
        return value

    def to_dtype(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        text = convert_text(value.text, dtype, value.dtype)
        made = self._emit(text, compute_dtype(dtype), value.depth, dtype == torch.bfloat16)
        if dtype is torch.uint8 and value.dtype is torch.int32:
            self.wider[made.text] = value
        return made

    def bitcast(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        text = bitcast_text(value.text, dtype, source, value.short)
        return self._emit(text, compute_dtype(dtype), value.depth, dtype == torch.bfloat16)

    def apply(self, op: str, *args: Value) -> Value:
        result = ELEMENTWISE[op].result
        operand = args[1].dtype if result == "second" else args[0].dtype
        dtype = torch.bool if result == "bool" else operand
        depth = max(a.depth for a in args)
        holds = self._cut(op, *(self.places.get(a.text) for a in args)) if op in _COMPARISONS else None
        if holds is not None:
            made, texts = self._named(dtype, depth), ("false", "true")
            line = f"const bool {made.text} = {OPERATIONS[op](operand, *[a.text for a in args])};"
            self._define(line, depth, lambda part: f"const bool {made.text} = {texts[holds(part)]};")
            return made
        if op == "where" and self._settles(*args):
            self.text.settled[args[0].text] = None
        if op == "where" and self._padded(*args):
            text = f"pick<{value_type(dtype)}>({', '.join(a.text for a in args)})"
        elif op == "pow" and operand.is_floating_point:
            text = _power(operand, args[0].text, args[1].text)
        else:
            text = OPERATIONS[op](operand, *[a.text for a in args])
        computed = self._emit(text, dtype, depth, op == "where" and args[1].short and args[2].short)
        if dtype == torch.int64 and op in OF_PLACES:
            self._note_place(op, computed, args)
        return computed

    def _note_place(self, op: str, computed: Value, args: tuple[Value, ...]) -> None:
        """Notes an index that is computed from indices, where the innermost loop's parts are not numbers."""
        loop = self.text.loops[-1] if self.text.loops else None
        places = [place for arg in args if (place := self.places.get(arg.text)) is not None]
        if loop is None or len(places) < len(args):
            return
        place = OF_PLACES[op](*places)
        if place is not None and (loop.most is None or place.symbols() - self.depths.keys()):
            self.places[computed.text] = place

    def _settles(self, condition: Value, *values: Value) -> bool:
        """Whether a choice made for all of the innermost loop leaves out what is computed at length in it."""
        inside = [value.depth == len(self.text.loops) for value in values]
        named = condition.text.lstrip("t").isdigit()
        return self.heavy and named and condition.depth < len(self.text.loops) and all(inside)

    def _padded(self, condition: Value, *values: Value) -> bool:
        """Whether one value of a choice changes within the innermost loop, and neither the condition nor the other do:
        the window's place over the border. g++ does not vectorise a loop with several such choices; where nothing tells
        how long the loop is, it does with none."""
        inside = [value.depth == len(self.text.loops) for value in values]
        if not self.text.layout.simd or condition.depth == len(self.text.loops):
            return False
        return inside.count(True) == 1 or (all(inside) and self.text.loops[-1].most is None)

    def random_bits(self, seed: Value, index: IntExpr, stream: int) -> Value:
        words = self._words(seed, index, stream)
        if words is not None:
            return self._emit(f"(i64){words}", torch.int64, len(self.text.loops))
        text = f"philox({seed.text}, {self._index(index)}, {stream}u)"
        return self._emit(text, torch.int64, self._depth(index, seed))

    def _words(self, seed: Value, index: IntExpr, stream: int) -> str | None:
        """A random number out of those of all iterations of the innermost loop, which are made before it by vectors;
        None where they do not follow one another there, or the loop has no end that is known."""
        loop, outside = (self.text.loops or (None,))[-1], len(self.text.loops) - 1
        if loop is None or loop.most is None or loop.most > _MOST_WORDS or loop.axis is None:
            return None
        step = coefficient_of(index, loop.axis)
        rest = index - variable(loop.axis)
        if step is None or step.as_int() != 1 or self._depth(rest, seed) > outside:
            return None
        name = f"words{self.names.count}"
        self.names.count += 1
        self.text.declared.append(f"u32 {name}_all[{loop.most + 8}];")
        count = f"{loop.stop} - {loop.start}"
        start = f"{self._index(rest)} + {loop.start}"
        fill = f"const u32* {name} = philox_fill({seed.text}, {start}, {count}, {stream}u, {name}_all);"
        for lines in (self.text.lines, self.text.values):
            lines[outside].append(fill)
        return f"{name}[{loop.var} - {loop.start}]"

    def carried(self, key: str, dtype: torch.dtype) -> Value:
        made = self.names.accumulators[key]
        have = torch.int64 if made.arg else made.dtype
        if self.text.layout.lanes is None:
            text, depth = made.name, 0
        else:
            text, depth = f"{made.name}[{self.text.lane}]", len(self.text.loops)
        # A float32 sum is kept in a double, so that its type here is not `have`'s.
        return self._emit(f"({value_type(have)}){text}", have, depth)

    def reduce(
        self, kind: ReductionKind, key: str, value: Value, position: Value | None = None, about: str | None = None
    ) -> None:
        name = f"r{len(self.names.accumulators)}"
        blocks = kind in ("sum", "moments") and value.dtype == torch.float32 and self.text.layout.chunked
        made = Accumulator(name, kind, value.dtype, f"{name}_part" if blocks else None)
        self.names.accumulators[key] = made
        if about is not None:
            accumulate_moments(self.text, made, self.names.accumulators[about], value)
            return
        if self.text.layout.lanes is None:
            accumulate(self.text, made, value, None if position is None else self.indices[position.text])
        else:
            accumulate_lanes(self.text, made, value, position)

    def scan(self, kind: ScanKind, value: Value, position: Value | None = None) -> tuple[Value, ...]:
        name = f"r{len(self.names.accumulators)}"
        self.names.accumulators[name] = Accumulator(name, kind, value.dtype, None)
        results = run_along(self.text, name, kind, value, position)
        return tuple(self._emit(text, dtype, len(self.text.loops)) for text, dtype in results)


def _is_short(value: bool | int | float) -> bool:
    """Whether a number is one of bfloat16's."""
    try:
        bits = struct.pack("<f", value)  # no tensor: the program may have set a default device
    except OverflowError:
        return False
    return bits[:2] == bytes(2) and struct.unpack("<f", bits)[0] == value


def _power(dtype: torch.dtype, base: str, exponent: str) -> str:
    """pow with a literal exponent as products and roots."""
    one = "1.0" if dtype == torch.float64 else "1.0f"
    match exponent.strip("()").rstrip("f"):
        case "2.0":
            return f"({base} * {base})"
        case "3.0":
            return f"({base} * {base} * {base})"
        case "1.0":
            return base
        case "-1.0":
            return f"({one} / {base})"
    return OPERATIONS["pow"](dtype, base, exponent)
