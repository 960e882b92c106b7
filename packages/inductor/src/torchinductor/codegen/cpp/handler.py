"""The op protocol's C++ handler: replaying a stage's body on it writes each operation into the outermost loop that it
does not depend on."""

from __future__ import annotations

import struct

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
from torchinductor.codegen.cpp.plan import Layout
from torchinductor.codegen.cpp.rows import row_place
from torchinductor.codegen.cpp.stage_text import StageText, Value
from torchinductor.indexing import coefficient_of, number, pieces, product, variable
from torchinductor.ir import Apply, Kernel, Stage, compute_dtype
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

_MOST_WORDS = 4096  # random numbers that are made at one time
_MOST_PIECES = 5  # of the smaller or the larger of two indices along the innermost loop
_MOST_APART = 4096  # elements of a row that are made bytes behind the loop that computes them
_COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})
_MUCH = 32  # operations of a body beside which that costs nothing


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
        self.text = StageText(kernel.laid_out(Layout), stage, min(widths, default=4))
        self.depths = {loop.axis: d + 1 for d, loop in enumerate(self.text.loops) if loop.axis is not None}
        self.ranges = kernel.ranges
        self.heavy = any(op.heavy for op in stage.body.of(Apply))
        self.row_place = row_place(kernel, self.text.layout)
        self.indices: dict[str, str] = {}  # of values that are indices, as text
        self.places: dict[str, IntExpr] = {}  # of values that are indices, or integers of the program's text
        self.choices: dict[Call, IntExpr] = {}  # of two indices, and what stands for each
        self.wider: dict[str, Value] = {}  # of bytes, the int32 values that they were

    # emission -------------------------------------------------------------------------------------------------
    def _emit(self, text: str, dtype: torch.dtype, depth: int, short: bool = False) -> Value:
        name = f"t{self.names.count}"
        self.names.count += 1
        for lines in (self.text.lines, self.text.values):
            lines[depth].append(f"const {value_type(dtype)} {name} = {text};")
        return Value(name, dtype, depth, short)

    def _depth(self, expr: IntExpr, *values: Value | None) -> int:
        deepest = max((self.depths.get(s, 0) for s in expr.symbols()), default=0)
        return max((deepest, *(v.depth for v in values if v is not None)))

    def _index(self, expr: IntExpr) -> str:
        axis = self.text.loops[-1].axis if self.text.loops else None
        for atom in {atom for monomial, _ in expr.ordered_terms() for atom in monomial} if axis else ():
            if wraps(atom, self.ranges) and isinstance(atom, Call):
                self._cut("ge", atom.left, atom.right)
            elif isinstance(atom, Call) and axis in atom.left.symbols() | atom.right.symbols():
                expr = expr.substitute({atom: self._in_pieces(atom)})
        return index_text(expr, self.ranges, self.kernel.numbers)

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

    def _jumps(self, buffer: str, index: IntExpr) -> bool:
        """Whether a load along the innermost loop is not contiguous, from a buffer that surely has a first element."""
        axis = self.text.loops[-1].axis if self.text.loops else None
        step = coefficient_of(index, axis) if axis is not None else None
        numel = product(self.kernel.buffers[buffer].shape).as_int()
        return bool(numel) and (step is None or step.as_int() not in (0, 1))

    def _start(self, buffer: str, index: IntExpr, mask: Value) -> IntExpr | None:
        """Where a contiguous load along the innermost loop starts, if a mask holds for all of the loop or for nothing
        of it and the buffer is surely as long as the loop."""
        axis = self.text.loops[-1].axis if self.text.loops else None
        if axis is None or mask.depth == len(self.text.loops):
            return None
        step, numel = coefficient_of(index, axis), product(self.kernel.buffers[buffer].shape).as_int()
        length = self.ranges[axis].as_int()
        if step is None or step.as_int() != 1 or numel is None or length is None or length > numel:
            return None
        return index - variable(axis)

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

    def _stored_apart(self, buffer: str, index: IntExpr, value: Value) -> bool:
        """Stores a row of bytes behind the loop that computes them, where it is long. Within it they would make it one
        over as many elements at a time as a vector has bytes, which leaves much of a row over."""
        wide, layout = self.wider.get(value.text), self.text.layout
        if wide is None or self.stage.kind != "outer" or not layout.simd or layout.tile or layout.lanes:
            return False
        loop = self.text.loops[-1] if self.text.loops else None
        if loop is None or loop.axis is None or loop.most is None or wide.depth != len(self.text.loops):
            return False
        step = coefficient_of(index, loop.axis)
        if step is None or step.as_int() != 1 or loop.most > _MOST_APART or len(self.stage.body.ops) < _MUCH:
            return False
        name = f"row{self.names.count}_wide"
        self.names.count += 1
        element = f"{self.names.pointer[buffer]}[{self._index(index - variable(loop.axis))} + k]"
        self.text.opening.append(f"i32 {name}[{loop.most}];")
        self.text.inside.append(f"{name}[{loop.var} - {loop.start}] = {wide.text};")
        each = f"for (i64 k = {loop.start}; k < {loop.stop}; k++)"
        self.text.closing += ["#pragma omp simd", f"{each} {element} = (u8){name}[k - {loop.start}];"]
        return True

    # protocol -------------------------------------------------------------------------------------------------
    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: Value | None = None) -> Value:
        index = self.row_place if buffer in self.kernel.rows else index
        pointer, place = self.names.pointer[buffer], self._index(index)
        turned = self._turned(buffer, index, True) if mask is None else None
        short = dtype == torch.bfloat16
        if turned is not None:
            return self._emit(load_text(turned, dtype, None), compute_dtype(dtype), len(self.text.loops), short)
        start = None if mask is None else self._start(buffer, index, mask)
        if mask is not None and start is not None:
            # Always reads, and so vectorises; where the mask does not hold it reads the buffer's beginning.
            place = f"(({self._index(start)}) & -(i64){mask.text}) + {self._index(index - start)}"
            text = f"keep({load_text(f'{pointer}[{place}]', dtype, None)}, {mask.text})"
        elif mask is not None and self._jumps(buffer, index):
            # Likewise; it reads the first element.
            element = f"{pointer}[({place}) & -(i64){mask.text}]"
            text = f"keep({load_text(element, dtype, None)}, {mask.text})"
        else:
            text = load_text(f"{pointer}[{place}]", dtype, mask.text if mask else None)
        depth = self._depth(index, mask)
        if buffer in self.stage.body.writes:
            depth = len(self.text.loops)
        return self._emit(text, compute_dtype(dtype), depth, short)

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
            if mask is None and self._stored_apart(buffer, index, value):
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

    def _cut(self, op: str, a: IntExpr | None, b: IntExpr | None) -> None:
        """Notes where along the innermost loop a comparison of indices changes."""
        axis = self.text.loops[-1].axis if self.text.loops else None
        if a is None or b is None or axis is None:
            return
        step = coefficient_of(a - b, axis)
        rest = None if step is None else (a - b - step * variable(axis)).as_int()
        if step is None or rest is None or step.as_int() not in (1, -1):
            return
        zero = -rest * (step.as_int() or 0)  # where both are equal
        before = op in ("ge", "lt") if step.as_int() == 1 else op in ("gt", "le")
        self.text.cuts |= {zero, zero + 1} if op in ("eq", "ne") else {zero if before else zero + 1}

    def indirect(self, value: Value, size: IntExpr) -> IntExpr:
        name = f"j{self.names.count}"
        self.names.count += 1
        inside = self._emit(f"(u64){value.text} < (u64)({self._index(size)})", torch.bool, value.depth).text
        # A wrong index is reported after the kernel; here it must only not leave the memory.
        self._flag(inside, value.depth, Fault.INDEX)
        self.text.lines[value.depth].append(f"const i64 {name} = {inside} ? {value.text} : 0;")
        self.depths[name] = value.depth
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
        if op in _COMPARISONS:
            self._cut(op, *(self.places.get(a.text) for a in args))
        if op == "where" and self._settles(*args):
            self.text.settled[args[0].text] = None
        if op == "where" and self._padded(*args):
            text = f"pick<{value_type(dtype)}>({', '.join(a.text for a in args)})"
        elif op == "pow" and operand.is_floating_point:
            text = _power(operand, args[0].text, args[1].text)
        else:
            text = OPERATIONS[op](operand, *[a.text for a in args])
        return self._emit(text, dtype, depth, op == "where" and args[1].short and args[2].short)

    def _settles(self, condition: Value, *values: Value) -> bool:
        """Whether a choice made for all of the innermost loop leaves out what is computed at length in it."""
        inside = [value.depth == len(self.text.loops) for value in values]
        named = condition.text.lstrip("t").isdigit()
        return self.heavy and named and condition.depth < len(self.text.loops) and all(inside)

    def _padded(self, condition: Value, *values: Value) -> bool:
        """Whether one value of a choice changes within the innermost loop, and neither the condition nor the other do:
        the window's place over the border. g++ does not vectorise a loop with several such choices."""
        inside = [value.depth == len(self.text.loops) for value in values]
        return self.text.layout.simd and condition.depth < len(self.text.loops) and inside.count(True) == 1

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
