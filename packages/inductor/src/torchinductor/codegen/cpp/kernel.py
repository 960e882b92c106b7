"""Writes one fused kernel as a C++ function.

Loops are of three kinds. The *frame* runs over outer axes and is parallel. Inside it each stage has its own loops. The
innermost loop of all is over the *vector axis*, the one along which most accesses are contiguous:

* no inner axes: the frame, then the vector axis (`simd`);
* the vector axis is an inner one: reductions are `simd reduction` along it;
* the vector axis is an outer one (column sums): the frame goes over blocks of it, accumulators are arrays with a lane
  for each element of the block, and each stage ends in a loop over lanes.

float32 sums go in blocks: at most about a thousand additions into one float32, the blocks' sums into a double.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from primtorch.symbolic.expr import Call, IntExpr
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
)
from torchinductor.indexing import below, coefficient_of, product, variable
from torchinductor.ir import Apply, Axis, Indirect, Kernel, Reduce, Stage, Store
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

_LANES = 64  # elements of a block of the vector axis when accumulators are arrays
_TILE = (16, 16)  # elements of a tile along the axis that loads are contiguous in, and along the vector axis
_BLOCK = 4096  # elements of a block of the vector axis when it is the only loop to share among threads
_SUM_BLOCK = 512  # additions of one vector loop into float32 accumulators (each of 8 or 16 SIMD lanes takes a share)
_LANE_SUM_BLOCK = 32  # the same where each accumulator takes every addition


@dataclass(frozen=True, slots=True)
class Loop:
    """`for (i64 var = start; var < stop; var += step)`; `axis` is None for a loop over blocks."""

    var: str
    stop: str
    start: str = "0"
    step: int = 1
    axis: str | None = None

    @property
    def head(self) -> str:
        increment = f"{self.var}++" if self.step == 1 else f"{self.var} += {self.step}"
        return f"for (i64 {self.var} = {self.start}; {self.var} < {self.stop}; {increment})"


@dataclass(slots=True)
class Plan:
    """The loops of a kernel."""

    kernel: Kernel
    frame: list[Loop]
    inner: list[Loop]  # loops of an inner stage
    outer: list[Loop]  # loops of an outer stage
    lanes: str | None  # the vector axis when accumulators have lanes
    lane_count: int
    simd: bool  # whether the innermost loop may be vectorised
    parallel: str | None  # the condition under which the frame runs in parallel, None for never
    chunked: bool  # whether float32 sums go in blocks
    ascending: bool  # whether there is one inner axis, so that positions along it only grow
    sizes: dict[str, IntExpr] = field(default_factory=dict)


class Value(NamedTuple):
    """A value in generated code: its text (a name or literal), its type, and the depth of loops it depends on."""

    text: str
    dtype: torch.dtype
    depth: int


def write_kernel(kernel: Kernel, grain: int) -> str:
    """The text of a function named KERNEL with the C ABI of kernels."""
    kernel = ordered_scatter(kernel) if kernel.scatters else kernel
    plan = make_plan(kernel, grain)
    writer = _Writer(plan)
    checks = any(stage.body.faults for stage in kernel.stages)
    lines = [
        'extern "C" int KERNEL(void* const* buffers, const i64* symbols) {',
        *(f"  {line}" for line in _arguments(kernel)),
        *(["  int bad = 0;"] if checks else []),
        *(f"  {line}" for line in _empty_checks(kernel)),
    ]
    depth = 1
    if plan.frame and plan.parallel is not None:
        clause = f" if ({plan.parallel})" if plan.parallel else ""
        clause += " reduction(|:bad)" if checks else ""
        collapse = f" collapse({len(plan.frame)})" if len(plan.frame) > 1 else ""
        lines.append(f"  #pragma omp parallel for schedule(static){collapse}{clause}")
    for loop in plan.frame:
        lines.append("  " * depth + loop.head)
        depth += 1
    if plan.frame:
        depth -= 1
    body = writer.stages()
    indent = "  " * depth
    lines.append(f"{indent}{{")
    lines += [f"{indent}  {line}" for line in body]
    lines.append(f"{indent}}}")
    lines.append(f"  return {'bad' if checks else '0'};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _arguments(kernel: Kernel) -> list[str]:
    lines = []
    written = set(kernel.writes)
    shared = {name for pair in kernel.in_place for name in pair}
    for position, name in enumerate(kernel.arguments):
        kind = STORAGE[kernel.buffers[name].dtype]
        const = "" if name in written else "const "
        alone = "" if name in shared else " __restrict"
        lines.append(f"{const}{kind}*{alone} p{position} = ({const}{kind}*)buffers[{position}];")
    for position, symbol in enumerate(kernel.symbols):
        lines.append(f"const i64 {symbol} = symbols[{position}];")
    return lines


def _empty_checks(kernel: Kernel) -> list[str]:
    """What the kernel indexes by loaded values is not empty: there is no place that a wrong index could be moved to."""
    ops = [op for stage in kernel.stages for op in stage.body.ops]
    sizes = dict.fromkeys(op.size for op in ops if isinstance(op, Indirect) and not (op.size.as_int() or 0) > 0)
    total = index_text(product(a.size for a in kernel.axes), {})
    return [f"if ({index_text(size, {})} <= 0 && {total} > 0) return {Fault.INDEX.value};" for size in sizes]


# planning -----------------------------------------------------------------------------------------------------
def ordered_scatter(kernel: Kernel) -> Kernel:
    """A scatter with the axes along which two iterations may meet as inner, sequential loops."""
    (stage,) = kernel.stages
    stores = list(stage.body.of(Store))
    axes = []
    for axis in kernel.axes:
        free = all(_conflict_free(op.index, axis, kernel) for op in stores)
        axes.append(replace(axis, inner=not free))
    if not any(a.inner for a in axes):
        return replace(kernel, axes=tuple(axes), scatters=False)
    return replace(kernel, axes=tuple(axes), stages=(Stage("inner", stage.body),))


def _conflict_free(index: IntExpr, axis: Axis, kernel: Kernel) -> bool:
    """Whether different values of the axis surely store to different elements."""
    step = coefficient_of(index, axis.name)
    if step is None or not step.terms:
        return False
    rest = index - step * axis.var
    whole = step * axis.size
    remainder = rest % whole
    if isinstance(remainder, IntExpr) and len(remainder.terms) == 1:
        (monomial,) = remainder.terms
        if len(monomial) == 1 and isinstance(monomial[0], Call) and monomial[0].op == "mod":
            remainder = monomial[0].left
    return below(remainder, step, kernel.ranges)


def _strides(kernel: Kernel, axis: Axis) -> list[tuple[IntExpr | None, int]]:
    """(stride, weight) of the axis in each access; a store counts twice, an inner stage eight times."""
    found = []
    for stage in kernel.stages:
        factor = 8 if stage.kind == "inner" else 1
        for op in stage.body.accesses:
            found.append((coefficient_of(op.index, axis.name), factor * (2 if isinstance(op, Store) else 1)))
    return found


def _score(kernel: Kernel, axis: Axis) -> int:
    """How well the axis does as the vector axis."""
    total = 0
    for stride, weight in _strides(kernel, axis):
        if stride is None:
            total -= 2 * weight
        elif stride.as_int() == 1:
            total += 4 * weight
        elif stride.terms:
            total -= 2 * weight
    size = axis.size.as_int()
    return total if size is None or size >= 8 else total // 2 - 4


def _extent(kernel: Kernel, axis: Axis) -> float:
    """The largest stride of the axis, for the order of loops: a symbolic stride counts as large."""
    result = 0.0
    for stride, _ in _strides(kernel, axis):
        if stride is not None:
            known = stride.as_int()
            result = max(result, abs(known) if known is not None else 1e12)
    return result


def _order(kernel: Kernel, axes: list[Axis]) -> list[Axis]:
    """Outermost first: by decreasing stride, then as they stand."""
    return sorted(axes, key=lambda a: -_extent(kernel, a))


def _work(kernel: Kernel) -> int:
    """The weight of one iteration: heavy functions count more."""
    heavy = sum(op.heavy for stage in kernel.stages for op in stage.body.of(Apply))
    return max(1, len(kernel.stages)) + 4 * heavy


def _parallel(kernel: Kernel, frame: list[Loop], grain: int) -> str | None:
    if not frame:
        return None
    total = product(a.size for a in kernel.axes)
    limit = max(1, grain // _work(kernel))
    known = total.as_int()
    if known is not None:
        return "" if known >= limit else None
    return f"{index_text(total, {})} >= {limit}"


def make_plan(kernel: Kernel, grain: int) -> Plan:
    """Chooses the vector axis and the loops."""
    outer, inner = list(kernel.outer), list(kernel.inner)
    scans = any(s.body.scans for s in kernel.stages)
    ordered = scans or kernel.scatters
    candidates = [a for a in kernel.axes if not (ordered and a.inner)]
    vector = max(candidates, key=lambda a: (_score(kernel, a), kernel.axes.index(a)), default=None)
    if ordered and vector is not None and _score(kernel, vector) <= 0:
        vector = None
    if vector is not None and not vector.inner and inner and _score(kernel, vector) <= 0:
        vector = None
    sizes = {a.name: a.size for a in kernel.axes}

    def text(axis: Axis) -> str:
        return index_text(axis.size, {})

    def full(axis: Axis) -> Loop:
        return Loop(axis.name, text(axis), axis=axis.name)

    arg = any(op.position is not None for stage in kernel.stages for op in stage.body.of(Reduce))
    lanes, lane_count, chunked = None, 0, False
    inner_loops = [full(a) for a in (inner if ordered else _order(kernel, [a for a in inner if a is not vector]))]
    outer_loops: list[Loop] = []
    frame = [full(a) for a in _order(kernel, [a for a in outer if a is not vector])]
    simd = True
    if vector is None:
        simd = False
    elif not inner and (cross := _crossing(kernel, vector)) is not None:
        frame = [loop for loop in frame if loop.axis != cross.name]
        for axis, tile in zip((cross, vector), _TILE, strict=True):
            over_tiles, in_tile = _split(full(axis), tile, axis.size)
            frame.append(over_tiles)
            outer_loops.append(in_tile)
    elif not vector.inner:
        blocked = bool(inner)
        count = _LANES if blocked else _BLOCK
        lone = not frame or _known_small([a for a in outer if a is not vector])
        known = vector.size.as_int()
        if blocked and known is not None and known < count:
            count = max(known, 1)
        if blocked or (lone and (known is None or known > count)):
            block, name = f"{vector.name}_b", vector.name
            frame.append(Loop(block, text(vector), step=count))
            whole = known is not None and known % count == 0
            stop = f"{block} + {count}" if whole else f"imin<i64>({block} + {count}, {text(vector)})"
            lane = Loop(name, stop, block, axis=name)
        else:
            lane = full(vector)
        if blocked:
            lanes, lane_count = vector.name, count
            reduced = product(a.size for a in inner).as_int()
            chunked = not ordered and (reduced is None or reduced > 2 * _LANE_SUM_BLOCK) and bool(inner_loops)
            if chunked:
                inner_loops[-1:] = _split(inner_loops[-1], _LANE_SUM_BLOCK, sizes[inner_loops[-1].var])
        inner_loops = [*inner_loops, lane]
        outer_loops = [lane]
    else:
        reduced = product(a.size for a in inner).as_int()
        chunked = reduced is None or reduced > _SUM_BLOCK
        last = vector.size.as_int()
        loops = _split(full(vector), _SUM_BLOCK, vector.size) if last is None or last > _SUM_BLOCK else [full(vector)]
        inner_loops = [*inner_loops, *loops]
        simd = not arg
    return Plan(
        kernel,
        frame,
        inner_loops,
        outer_loops,
        lanes,
        lane_count,
        simd,
        _parallel(kernel, frame, grain),
        chunked,
        len(inner) <= 1,
        sizes,
    )


def _crossing(kernel: Kernel, vector: Axis) -> Axis | None:
    """The axis along which some loads are contiguous that jump along the vector axis: a transposition, done in tiles
    so that every cache line that is fetched is used up while it is near."""
    for axis in kernel.axes:
        sizes = (axis.size.as_int(), vector.size.as_int())
        if axis is vector or any(n is not None and n < 2 * t for n, t in zip(sizes, _TILE, strict=True)):
            continue
        for stage in kernel.stages:
            for op in stage.body.accesses:
                along, across = coefficient_of(op.index, axis.name), coefficient_of(op.index, vector.name)
                if along is not None and along.as_int() == 1 and across is not None and across.terms:
                    return axis
    return None


def _known_small(axes: list[Axis]) -> bool:
    known = product(a.size for a in axes).as_int()
    return known is not None and known < 8


def _split(loop: Loop, count: int, size: IntExpr) -> list[Loop]:
    """A loop over blocks of `count`, and the loop within a block."""
    block, known = f"{loop.var}_c", size.as_int()
    stop = f"{block} + {count}"
    if known is None or known % count:
        stop = f"imin<i64>({stop}, {loop.stop})"
    return [Loop(block, loop.stop, step=count), Loop(loop.var, stop, block, axis=loop.axis)]


# writing ------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Accumulator:
    """A reduction's variables: `name` holds the result, `part` the float32 sum of the current block."""

    name: str
    kind: str
    dtype: torch.dtype  # of the reduced value
    part: str | None

    @property
    def arg(self) -> bool:
        return self.kind in ("argmax", "argmin")


_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}


class _Writer:
    """Writes the stages of a kernel."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pointer = {name: f"p{k}" for k, name in enumerate(plan.kernel.arguments)}
        self.accumulators: dict[str, Accumulator] = {}
        self.names = 0

    def stages(self) -> list[str]:
        lines: list[str] = []
        for stage in self.plan.kernel.stages:
            lines += _StageWriter(self, stage).write()
        return lines


def _lowest(kind: str, dtype: torch.dtype) -> str:
    """The identity of a maximum or minimum."""
    if dtype == torch.bool:
        return "false" if "max" in kind else "true"
    if dtype.is_floating_point:
        return constant_text(float("-inf") if "max" in kind else float("inf"), dtype)
    info = torch.iinfo(dtype)
    return constant_text(info.min if "max" in kind else info.max, dtype)


class _StageWriter(OpsHandler[Value]):
    """Writes one stage: each operation stands in the outermost loop that it does not depend on."""

    def __init__(self, writer: _Writer, stage: Stage) -> None:
        self.writer, self.stage, self.plan = writer, stage, writer.plan
        self.loops = self.plan.inner if stage.kind == "inner" else self.plan.outer
        self.lines: list[list[str]] = [[] for _ in range(len(self.loops) + 1)]
        self.depths = {loop.axis: d + 1 for d, loop in enumerate(self.loops) if loop.axis is not None}
        self.declared: list[str] = []  # before the stage's block
        self.opening: list[str] = []  # before the innermost loop
        self.closing: list[str] = []  # after the innermost loop
        self.finishing: list[str] = []  # after all loops
        self.reductions: list[str] = []  # clauses of the simd pragma
        self.ranges = self.plan.sizes
        self.sequential = False
        self.lane_depth = len(self.loops)

    def write(self) -> list[str]:
        self.stage.body.replay(self)
        lines = list(self.declared)
        lines.append("{")
        lines += self._nest(0)
        lines += [f"  {line}" for line in self.finishing]
        lines.append("}")
        return lines

    def _nest(self, depth: int) -> list[str]:
        pad = "  " * (depth + 1)
        lines = [pad + line for line in self.lines[depth]]
        if depth == len(self.loops):
            return lines
        loop = self.loops[depth]
        last = depth == len(self.loops) - 1
        block = (self.plan.lanes is None and last) or (self.plan.lanes is not None and depth == len(self.loops) - 2)
        if block:
            lines += [pad + line for line in self.opening]
        if last and self.plan.simd and not self.sequential:
            clauses = "".join(f" {c}" for c in self.reductions)
            lines.append(f"{pad}#pragma omp simd{clauses}")
        lines.append(f"{pad}{loop.head} {{")
        lines += self._nest(depth + 1)
        lines.append(f"{pad}}}")
        if block:
            lines += [pad + line for line in self.closing]
        return lines

    # emission -------------------------------------------------------------------------------------------------
    def _emit(self, text: str, dtype: torch.dtype, depth: int) -> Value:
        name = f"t{self.writer.names}"
        self.writer.names += 1
        self.lines[depth].append(f"const {value_type(dtype)} {name} = {text};")
        return Value(name, dtype, depth)

    def _depth(self, expr: IntExpr, *values: Value | None) -> int:
        deepest = max((self.depths.get(s, 0) for s in expr.symbols()), default=0)
        return max((deepest, *(v.depth for v in values if v is not None)))

    def _index(self, expr: IntExpr) -> str:
        return index_text(expr, self.ranges)

    def _jumps(self, buffer: str, index: IntExpr) -> bool:
        """Whether a load along the innermost loop is not contiguous, from a buffer that surely has a first element."""
        axis = self.loops[-1].axis if self.loops else None
        step = coefficient_of(index, axis) if axis is not None else None
        numel = product(self.plan.kernel.buffers[buffer].shape).as_int()
        return bool(numel) and (step is None or step.as_int() not in (0, 1))

    # protocol -------------------------------------------------------------------------------------------------
    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: Value | None = None) -> Value:
        pointer, place = self.writer.pointer[buffer], self._index(index)
        if mask is not None and self._jumps(buffer, index):
            # Always reads, and so vectorises; where the mask does not hold it reads the first element.
            text = f"keep({load_text(pointer, f'({place}) & -(i64){mask.text}', dtype, None)}, {mask.text})"
        else:
            text = load_text(pointer, place, dtype, mask.text if mask else None)
        depth = self._depth(index, mask)
        if buffer in self.stage.body.writes:
            depth = len(self.loops)
        return self._emit(text, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, depth)

    def store(
        self, buffer: str, index: IntExpr, value: Value, mode: StoreMode = "set", mask: Value | None = None
    ) -> None:
        dtype = self.plan.kernel.buffers[buffer].dtype
        place = f"{self.writer.pointer[buffer]}[{self._index(index)}]"
        text = value.text
        if mode != "set":
            compute = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
            old = load_text(self.writer.pointer[buffer], self._index(index), dtype, None)
            op = {"add": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}[mode]
            text = OPERATIONS[op](compute, old, convert_text(text, compute, value.dtype))
            line = f"{place} = {storage_text(text, dtype, compute)};"
        else:
            line = f"{place} = {storage_text(text, dtype, value.dtype)};"
        depth = len(self.loops) if self.plan.kernel.scatters else self._depth(index, value, mask)
        # A store stands in the innermost loop that its place depends on, or deeper with its value.
        self.lines[depth].append(f"if ({mask.text}) {line}" if mask else line)

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        return Value(constant_text(value, dtype), dtype, 0)

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> Value:
        if dtype in (torch.bfloat16, torch.float16):
            dtype = torch.float32
        text = convert_text(f"({self._index(expr)})", dtype, torch.int64)
        return self._emit(text, dtype, self._depth(expr))

    def indirect(self, value: Value, size: IntExpr) -> IntExpr:
        name = f"j{self.writer.names}"
        self.writer.names += 1
        inside = self._emit(f"(u64){value.text} < (u64)({self._index(size)})", torch.bool, value.depth).text
        # A wrong index is reported after the kernel; here it must only not leave the memory.
        self._flag(inside, value.depth, Fault.INDEX)
        self.lines[value.depth].append(f"const i64 {name} = {inside} ? {value.text} : 0;")
        self.depths[name] = value.depth
        return variable(name)

    def _flag(self, condition: str, depth: int, fault: Fault) -> None:
        flag = f"bad{self.writer.names}"
        self.writer.names += 1
        self.declared.append(f"int {flag} = 0;")
        self.lines[depth].append(f"{flag} |= !{condition};")
        self.finishing.append(f"bad |= {flag} * {fault.value};")
        if depth == len(self.loops):
            self.reductions.append(f"reduction(|:{flag})")

    def require(self, value: Value, condition: Value, fault: Fault) -> Value:
        self._flag(condition.text, len(self.loops), fault)  # where the loops run: nothing is required of no element
        return value

    def to_dtype(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        text = convert_text(value.text, dtype, value.dtype)
        return self._emit(text, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, value.depth)

    def bitcast(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        text = bitcast_text(value.text, dtype, source)
        return self._emit(text, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, value.depth)

    def apply(self, op: str, *args: Value) -> Value:
        result = ELEMENTWISE[op].result
        operand = args[1].dtype if result == "second" else args[0].dtype
        dtype = torch.bool if result == "bool" else operand
        depth = max(a.depth for a in args)
        if op == "pow" and operand.is_floating_point:
            text = _power(operand, args[0].text, args[1].text)
        else:
            text = OPERATIONS[op](operand, *[a.text for a in args])
        return self._emit(text, dtype, depth)

    def random_bits(self, seed: Value, index: IntExpr, stream: int) -> Value:
        return self._emit(
            f"philox({seed.text}, {self._index(index)}, {stream}u)", torch.int64, self._depth(index, seed)
        )

    def carried(self, key: str, dtype: torch.dtype) -> Value:
        made = self.writer.accumulators[key]
        have = torch.int64 if made.arg else made.dtype
        if self.plan.lanes is None:
            text, depth = made.name, 0
        else:
            text, depth = f"{made.name}[{self._lane()}]", self.lane_depth
        # A float32 sum is kept in a double, so that its type here is not `have`'s.
        return self._emit(f"({value_type(have)}){text}", have, depth)

    def _lane(self) -> str:
        return f"{self.plan.lanes} - {self.plan.lanes}_b"

    def reduce(
        self, kind: ReductionKind, key: str, value: Value, position: Value | None = None, about: str | None = None
    ) -> None:
        name = f"r{len(self.writer.accumulators)}"
        blocks = kind == "sum" and value.dtype == torch.float32 and self.plan.chunked
        made = Accumulator(name, kind, value.dtype, f"{name}_part" if blocks else None)
        self.writer.accumulators[key] = made
        if self.plan.lanes is not None:
            self._reduce_lanes(made, value, position)
        else:
            self._reduce_scalar(made, value, position)

    def _reduce_scalar(self, made: Accumulator, value: Value, position: Value | None) -> None:
        kind, name, v = made.kind, made.name, value.text
        type_ = value_type(made.dtype)
        inside = self.lines[len(self.loops)]
        if made.arg:
            assert position is not None
            sign = ">" if kind == "argmax" else "<"
            first = 0 if self.plan.ascending else -1
            self.declared += [f"{type_} {name}_v = {_lowest(kind, made.dtype)}; i64 {name} = {first};"]
            better = _better(sign, v, f"{name}_v", position.text, None if self.plan.ascending else name, made.dtype)
            inside.append(f"if (__builtin_expect({better}, 0)) {{ {name}_v = {v}; {name} = {position.text}; }}")
            self.sequential = True
        elif kind in ("amax", "amin"):
            sign = ">" if kind == "amax" else "<"
            self.declared.append(f"{type_} {name} = {_lowest(kind, made.dtype)};")
            inside.append(f"{name} = {v} {sign} {name} ? {v} : {name};")
            self.reductions.append(f"reduction({kind[1:]}:{name})")
            if made.dtype.is_floating_point:
                self.declared.append(f"int {name}_nan = 0;")
                inside.append(f"{name}_nan |= ({v} != {v});")
                self.reductions.append(f"reduction(|:{name}_nan)")
                self.finishing.append(f"if ({name}_nan) {name} = {constant_text(float('nan'), made.dtype)};")
        elif kind in ("any", "all"):
            self.declared.append(f"int {name} = {int(kind == 'all')};")
            sign = "|" if kind == "any" else "&"
            inside.append(f"{name} {sign}= (int){v};")
            self.reductions.append(f"reduction({sign}:{name})")
        else:
            sign = "+" if kind == "sum" else "*"
            target = name
            if made.part is not None:
                self.declared.append(f"double {name} = 0;")
                self.opening.append(f"float {made.part} = 0;")
                self.closing.append(f"{name} += (double){made.part};")
                target = made.part
            else:
                self.declared.append(f"{type_} {name} = {_IDENTITY[kind]};")
            inside.append(f"{target} {sign}= {v};")
            self.reductions.append(f"reduction({sign}:{target})")

    def _reduce_lanes(self, made: Accumulator, value: Value, position: Value | None) -> None:
        kind, name, v, lanes = made.kind, made.name, value.text, self.plan.lane_count
        type_, lane = value_type(made.dtype), self._lane()
        inside = self.lines[len(self.loops)]
        each = f"for (int k = 0; k < {lanes}; k++)"
        if made.arg:
            assert position is not None
            sign = ">" if kind == "argmax" else "<"
            self.declared.append(f"{type_} {name}_v[{lanes}]; i64 {name}[{lanes}];")
            first = 0 if self.plan.ascending else -1
            self.declared.append(f"{each} {{ {name}_v[k] = {_lowest(kind, made.dtype)}; {name}[k] = {first}; }}")
            better, at = f"{name}_better", None if self.plan.ascending else f"{name}[{lane}]"
            test = _better(sign, v, f"{name}_v[{lane}]", position.text, at, made.dtype)
            inside.append(f"const bool {better} = {test};")
            inside.append(f"{name}_v[{lane}] = {better} ? {v} : {name}_v[{lane}];")
            inside.append(f"{name}[{lane}] = {better} ? {position.text} : {name}[{lane}];")
            return
        identity = _lowest(kind, made.dtype) if kind in ("amax", "amin") else str(int(_IDENTITY[kind]))
        if made.part is not None:
            self.declared.append(f"double {name}[{lanes}]; float {made.part}[{lanes}];")
            self.declared.append(f"{each} {{ {name}[k] = 0; {made.part}[k] = 0; }}")
            inside.append(f"{made.part}[{lane}] += {v};")
            self.closing.append(f"{each} {{ {name}[k] += (double){made.part}[k]; {made.part}[k] = 0; }}")
            return
        self.declared.append(f"{type_} {name}[{lanes}];")
        self.declared.append(f"{each} {name}[k] = {identity};")
        op = {
            "sum": "add",
            "prod": "mul",
            "amax": "maximum",
            "amin": "minimum",
            "any": "bitwise_or",
            "all": "bitwise_and",
        }[kind]
        inside.append(f"{name}[{lane}] = {OPERATIONS[op](made.dtype, f'{name}[{lane}]', v)};")

    def scan(self, kind: ScanKind, value: Value, position: Value | None = None) -> tuple[Value, ...]:
        name = f"r{len(self.writer.accumulators)}"
        self.writer.accumulators[name] = Accumulator(name, kind, value.dtype, None)
        type_, v, depth = value_type(value.dtype), value.text, len(self.loops)
        # As in eager, what is carried on from element to element keeps more digits than it is stored with.
        wide = "double" if value.dtype == torch.float32 and not kind.startswith("cum") else type_
        lanes = self.plan.lanes
        start = (
            "0"
            if kind == "sum"
            else "1"
            if kind == "prod"
            else _lowest("max" if kind != "cummin" else "min", value.dtype)
        )
        places = [(wide, name, start)] + ([("i64", f"{name}_at", "0")] if position is not None else [])
        slot = f"[{self._lane()}]" if lanes is not None else ""
        for kind_text, state_name, first in places:
            if lanes is None:
                self.declared.append(f"{kind_text} {state_name} = {first};")
            else:
                self.declared.append(f"{kind_text} {state_name}[{self.plan.lane_count}];")
                self.declared.append(f"for (int k = 0; k < {self.plan.lane_count}; k++) {state_name}[k] = {first};")
        state = f"{name}{slot}"
        inside = self.lines[depth]
        if lanes is None:
            self.sequential = True
        if position is not None:
            sign = ">=" if kind == "cummax" else "<="
            nan = f" || {v} != {v}" if value.dtype.is_floating_point else ""
            inside.append(f"if ({v} {sign} {state}{nan}) {{ {state} = {v}; {name}_at{slot} = {position.text}; }}")
            return (self._emit(state, value.dtype, depth), self._emit(f"{name}_at{slot}", torch.int64, depth))
        if kind == "logcumsumexp":
            inside.append(f"{state} = log_add({state}, ({wide}){v});")
        else:
            inside.append(f"{state} {'+' if kind == 'sum' else '*'}= {v};")
        return (self._emit(f"({type_}){state}", value.dtype, depth),)


_OPPOSITE = str.maketrans("<>", "><")


def _better(sign: str, value: str, best: str, position: str, at: str | None, dtype: torch.dtype) -> str:
    """Whether an element takes the place of the best one. Where loops may run in any order, positions are compared."""
    greater, equal = f"({value} {sign} {best})", f"({value} == {best})"
    if at is None:
        if not dtype.is_floating_point:
            return greater
        return f"(!({value} {sign.translate(_OPPOSITE)}= {best}) && {best} == {best})"
    if dtype.is_floating_point:
        greater = f"({greater} | (({value} != {value}) & ({best} == {best})))"
        equal = f"({equal} | (({value} != {value}) & ({best} != {best})))"
    return f"({at} < 0) | {greater} | ({equal} & ({position} < {at}))"


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
