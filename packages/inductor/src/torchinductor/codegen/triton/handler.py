"""The op protocol's Triton handler: replaying a body on it appends statements to the kernel's text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from primtorch.frozen import remembering_record
from primtorch.once import cached_property
from primtorch.symbolic.expr import Call, IntExpr, Symbol
from torchinductor.indexing import ZERO, coefficient_of, contiguous_strides, dot, nonnegative, number, product, variable
from torchinductor.ir import Axis, Kernel, Replay, compute_dtype
from torchinductor.ops import ELEMENTWISE, Fault, OpsHandler, ReductionKind, ScanKind, StoreMode

from .expressions import (
    ATOMICS,
    ONE_MORE,
    REDUCTIONS,
    SCANS,
    Combine,
    Unsupported,
    Value,
    apply_one_more,
    apply_text,
    convert_text,
    literal,
    stored_text,
    tl_type,
)
from .marks import Use, counting, marked, marked_float, marked_quotient, marked_remainder, plain
from .plan import Layout
from .precision import Coarse, coarse_kernel, coarse_values
from .waits import waits_of

NO_DIMS: frozenset[str] = frozenset()
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


@remembering_record
class Tile:
    """A tile dimension: position = start + arange(block), row-major over the axes."""

    axes: tuple[Axis, ...]
    start: str
    block: int
    suffix: str  # what turns a line into the dimension of a two-dimensional tile

    @cached_property
    def position(self) -> IntExpr:
        """That of a point, by its axes."""
        return row_major(self.axes)

    @property
    def along_rows(self) -> bool:
        """Whether neighbours along it are neighbours in a row of the tile."""
        return bool(self.axes) and self.suffix != "[:, None]"


def row_major(axes: Sequence[Axis]) -> IntExpr:
    """The position of a point in the row-major order of its axes."""
    return dot([a.var for a in axes], contiguous_strides([a.size for a in axes]))


def index_text(expr: IntExpr, numbers: frozenset[str] = frozenset(), use: Use = "n") -> str:
    """An index as Triton text, its numbers marked. `numbers`: the symbols that may be negative. Where a dividend may be
    (a roll by a number that is not known), the language's truncating division is not the right one. `use`: of the
    marks."""
    parts: list[str] = []
    for monomial, coefficient in expr.ordered_terms():
        factors = [a.name if isinstance(a, Symbol) else _call_text(a, numbers) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.append(marked(abs(coefficient), use))
        sign = " - " if coefficient < 0 else " + "
        parts.append((sign if parts else sign.strip().replace("+", "")) + " * ".join(factors))
    return "".join(parts) or "0"


def _call_text(call: Call, numbers: frozenset[str]) -> str:
    left, right = index_text(call.left, numbers), index_text(call.right, numbers)
    right = right if call.op in ("min", "max") else plain(right)  # a division by a constant is a product
    if call.op in ("min", "max"):
        return f"tl.{call.op}imum({left}, {right})"
    if all(nonnegative(side) and not side.symbols() & numbers for side in (call.left, call.right)):
        return f"(({left}) {'//' if call.op == 'floordiv' else '%'} ({right}))"
    return f"{'_floor_div' if call.op == 'floordiv' else '_remainder'}({left}, {right})"


def quotient_text(name: str, by: IntExpr) -> str:
    """Positions of a line divided by a number, each."""
    known = by.as_int()
    return f"({name} // ({plain(index_text(by))}))" if known is None else marked_quotient(name, known)


def remainder_text(name: str, by: IntExpr, quotient: str) -> str:
    """What is left of positions, or of a quotient of them, whose own quotient by this number has a name."""
    known = by.as_int()
    return f"({name} % ({plain(index_text(by))}))" if known is None else marked_remainder(name, known, quotient)


class TritonHandler(OpsHandler[Value]):
    """Values are names. Equal expressions share a name while both stand in one scope (the kernel, or one loop)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.layout = kernel, kernel.laid_out(Layout)
        self.numbers = kernel.numbers
        self.lines: list[str] = []  # of the kernel's own level
        self.loop: list[str] | None = None  # of the loop being written
        self.moves = "r"  # the tile's dimension that moves from iteration to iteration of it
        self.after: list[str] = []  # what follows that loop
        self.dims: dict[str, frozenset[str]] = {}  # of axes and indirect indices
        self.pointers = {name: f"p{i}" for i, name in enumerate(kernel.arguments)}
        self.carried_values: dict[str, Value] = {}
        self.written: set[str] = set()
        self.waits = waits_of(kernel)
        self.tiles: dict[str, Tile] = {}
        self.masks: dict[str, str] = {}  # tile dimension -> name of its bound check, where it needs one
        self._narrow: dict[str, str] = {}  # int64 values that are positions -> their 32-bit text
        self.coarse = coarse_kernel(kernel)  # whether what is being computed may be a few units in the last place off
        self._constants: dict[str, float] = {}  # float32 numbers by their names
        self._more: dict[str, str] = {}  # the texts of values plus one, where there is a better one than the sum
        self._coarse: Coarse | None = None  # by stage and operation, once it is asked for
        self._shared: dict[str, Value] = {}
        self._loop_shared: dict[str, Value] = {}
        self._places: dict[tuple[str, IntExpr], str] = {}  # (value, size) -> its name as an index
        self._loads: dict[str, set[str]] = {}  # buffer -> load texts that are shared
        self._count = 0
        self._zeros: tuple[int, str] | None = None  # where a tile of zeros is to be named, and how

    def replay(self, position: int) -> None:
        """Writes the body of a stage of the kernel."""
        if self._coarse is None:
            self._coarse = coarse_values(self.kernel)
        run: Replay[Value] = Replay(self, {})
        for op, coarse in zip(self.kernel.stages[position].body.ops, self._coarse[position], strict=True):
            self.coarse = coarse
            run.values.append(op.replay(run))  # type: ignore[arg-type]

    # ---- statements ------------------------------------------------------------------------------------------

    def name(self, prefix: str = "t") -> str:
        """A name that the text does not have yet."""
        self._count += 1
        return f"{prefix}{self._count}"

    def emit(self, text: str, dtype: torch.dtype, dims: Iterable[str], *, hoist: bool = True) -> Value:
        """Gives the expression a name. What does not vary with the loop goes in front of it."""
        dims = frozenset(dims)
        found = self._shared.get(text) or self._loop_shared.get(text)
        if found is not None:
            return found
        value = Value(self.name(), dtype, dims)
        if self.loop is not None and (self.moves in dims or not hoist):
            self.loop.append(f"{value.name} = {text}")
            self._loop_shared[text] = value
        else:
            self.lines.append(f"{value.name} = {text}")
            self._shared[text] = value
        return value

    def statement(self, text: str) -> None:
        """Adds a line, within the loop that is open."""
        (self.lines if self.loop is None else self.loop).append(text)

    def zeros_from_here(self, shape: Sequence[int]) -> None:
        """The tile whose addresses are one number's has this shape; its statement stands here if anything reads it."""
        self._zeros = len(self.lines), f"zero = tl.full({list(shape)}, 0, tl.int32)"

    def _as_tile(self, address: str) -> str:
        if self._zeros is not None:
            self.lines.insert(*self._zeros)
            self._zeros = None
        return f"{address} + zero"

    def begin_loop(self, moves: str = "r") -> None:
        """What follows is in a loop, along this dimension of the tile."""
        self.loop, self.after, self.moves = [], [], moves

    def end_loop(self, head: str) -> None:
        """Closes the loop, whose first line is `head`; then comes what was to follow it."""
        self.lines.append(head)
        self.lines += ["    " + line for line in self.loop or []]
        self.lines += self.after
        self.loop = None
        self._loop_shared.clear()

    def dims_of(self, expr: IntExpr) -> frozenset[str]:
        """The dimensions of the tile along which an index varies."""
        return NO_DIMS.union(*(self.dims.get(s, NO_DIMS) for s in expr.symbols()))

    def mask_text(self, dims: Iterable[str], extra: Value | None = None) -> str:
        """The conjunction of the bound checks of these dimensions and a mask value; empty if none is needed."""
        names = [self.masks[d] for d in sorted(dims) if d in self.masks]
        if extra is not None:
            names.append(extra.name)
        return " & ".join(names)

    # ---- memory ----------------------------------------------------------------------------------------------

    def load(self, buffer: str, index: IntExpr, dtype: torch.dtype, mask: Value | None = None) -> Value:
        tl_type(dtype)
        dims = self.dims_of(index) | (mask.dims if mask else NO_DIMS)
        address = self._address(buffer, index, block=mask is not None and bool(mask.dims) and not self.dims_of(index))
        guard = self.mask_text(dims, mask)
        text = f"tl.load({address}" + (f", mask={guard}, other=0)" if guard else ")")
        if compute_dtype(dtype) is not dtype:
            text += ".to(tl.float32)"
        self._loads.setdefault(buffer, set()).add(text)
        return self.emit(text, compute_dtype(dtype), dims, hoist=buffer not in self.written)

    def store(
        self, buffer: str, index: IntExpr, value: Value, mode: StoreMode = "set", mask: Value | None = None
    ) -> None:
        """Raises Unsupported for a combination that the GPU has no atomic operation of."""
        dtype = self.kernel.buffers[buffer].dtype
        reached = self.dims_of(index)
        dims = reached | (mask.dims if mask else NO_DIMS) | value.dims
        stored = stored_text(value, dtype)
        address = self._address(buffer, index, block=True)
        if mode != "set":
            dims |= self.meeting
            address = self._as_tile(address) if reached and dims - reached else address
        guard = self.mask_text(dims, mask)
        arguments = f"{address}, {stored}" + (f", mask={guard}" if guard else "")
        if buffer in self.waits.stores:
            self.statement("tl.debug_barrier()")
        if mode == "set":
            self.statement(f"tl.store({arguments})")
        elif mode in ATOMICS:
            self.statement(f'{ATOMICS[mode]}({arguments}, sem="relaxed")')
        else:
            raise Unsupported(f"no atomic {mode} on the GPU")
        self.written.add(buffer)
        for text in self._loads.pop(buffer, set()):
            self._shared.pop(text, None)
            self._loop_shared.pop(text, None)
        if mode == "set" and mask is None and (self.loop is None or "r" not in dims or self.layout.walk is not None):
            self._forward(buffer, address, dims, value, dtype)

    @property
    def meeting(self) -> frozenset[str]:
        """The tile's dimensions that an addition in memory is made for every point of, though neither its value nor its
        place varies over them; what lies past the tile's end adds nothing."""
        return frozenset(self.tiles) - {"r"}

    def _forward(self, buffer: str, address: str, dims: frozenset[str], value: Value, dtype: torch.dtype) -> None:
        """A later load at the same address is the stored value, rounded as the memory would."""
        guard = self.mask_text(dims)
        text = f"tl.load({address}" + (f", mask={guard}, other=0)" if guard else ")")
        if compute_dtype(dtype) is not dtype:
            text += ".to(tl.float32)"
        known = value if value.dtype is dtype else self.to_dtype(value, dtype, value.dtype)
        self._shared[text] = known
        self._loads.setdefault(buffer, set()).add(text)

    def _address(self, buffer: str, index: IntExpr, *, block: bool) -> str:
        """`block`: a tile of addresses is needed even where the index is one number."""
        index = self._by_positions(index)
        # The constant goes last and by itself: neighbours share the rest, and it becomes the instruction's own offset.
        constant = sum(c for monomial, c in index.ordered_terms() if not monomial)
        text = index_text(index - number(constant), self.numbers)
        if block and not self.dims_of(index):
            text = self._as_tile(text)
        pointer = self.pointers[buffer] if text == "0" else f"{self.pointers[buffer]} + ({text})"
        if constant == 0:
            return pointer
        head, _, rest = pointer.partition(" ")
        return f"{head}{marked(constant, '<')}{' ' if rest else ''}{rest}{marked(constant, '>')}"

    def _by_positions(self, index: IntExpr) -> IntExpr:
        """An index that moves on by as much from each position of a tile to the next, of the position itself: nothing
        is divided for it, and the compiler sees what lies beside each other."""
        for dim, tile in self.tiles.items():
            if len(tile.axes) < 2:
                continue
            step = coefficient_of(index, tile.axes[-1].name)
            if step is not None and step != ZERO:
                rest = index - tile.position * step
                if rest.symbols().isdisjoint(axis.name for axis in tile.axes):
                    self.dims[dim] = frozenset({dim})
                    index = rest + variable(dim) * step
        return index

    # ---- values ----------------------------------------------------------------------------------------------

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        kind = compute_dtype(dtype)
        number = marked_float(value, kind)
        text = literal(value, kind) if number is None else f"tl.full([], {number}, {tl_type(kind)})"
        found = self.emit(text, kind, NO_DIMS)
        if found.dtype is torch.float32:
            self._constants[found.name] = float(value)
        return found

    def index_expr(self, expr: IntExpr, dtype: torch.dtype) -> Value:
        kind = compute_dtype(dtype)
        text = index_text(expr, self.numbers)
        known = expr.as_int()
        if known is not None:
            if kind.is_floating_point:
                return self.constant(known, kind)
            value = self.emit(f"tl.full([], {marked(known, 'c')}, {tl_type(kind)})", kind, NO_DIMS)
            if abs(known) < 2**31:
                self._narrow[value.name] = marked(known)
            return value
        value = self.emit(f"({text}).to({tl_type(kind)})", kind, self.dims_of(expr))
        if kind is torch.int64 and not self.layout.wide:
            self._narrow[value.name] = f"({text})"
        return value

    def indirect(self, value: Value, size: IntExpr) -> IntExpr:
        known = self._places.get((value.name, size))
        if known is not None:
            return variable(known)
        name = self._places[value.name, size] = self.name("j")
        kind = "tl.int64" if self.layout.wide else "tl.int32"
        line = f"{name} = {value.name}.to({kind})"
        inside = self.loop is not None and self.moves in value.dims
        lines = self.loop if inside and self.loop is not None else self.lines
        # As in eager, an index out of bounds stops the kernel before it touches memory. What lies past the tile's end
        # is computed too, but neither loaded nor stored.
        fits = f"({name} >= 0) & ({name} < {index_text(size)})"
        bounds = self.mask_text(value.dims)
        fits = f"({fits}) | (({bounds}) == 0)" if bounds else fits
        lines += [line, f'tl.device_assert({fits}, "index out of bounds")']
        self.dims[name] = value.dims
        return variable(name)

    def require(self, value: Value, condition: Value, fault: Fault) -> Value:
        """Nothing is reported: eager on the device does not look at divisors either."""
        return value

    def to_dtype(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        if dtype is value.dtype:
            return value
        return self.emit(convert_text(value, dtype), compute_dtype(dtype), value.dims)

    def bitcast(self, value: Value, dtype: torch.dtype, source: torch.dtype) -> Value:
        bits = value.name if compute_dtype(source) is source else f"{value.name}.to({tl_type(source)})"
        text = f"{bits}.to({tl_type(dtype)}, bitcast=True)"
        if compute_dtype(dtype) is not dtype:
            text += ".to(tl.float32)"
        return self.emit(text, compute_dtype(dtype), value.dims)

    def apply(self, op: str, *args: Value) -> Value:
        result = ELEMENTWISE[op].result
        dtype = torch.bool if result == "bool" else args[1].dtype if result == "second" else args[0].dtype
        text = self._one_more(op, args) or self._by_reciprocal(op, args)
        text = text or apply_text(op, self._narrowed(op, args), coarse=self.coarse)
        found = self.emit(text, dtype, NO_DIMS.union(*(a.dims for a in args)))
        if op in ONE_MORE and dtype is torch.float32:
            self._more[found.name] = apply_one_more(op, args[0], coarse=self.coarse)
        return found

    def _one_more(self, op: str, args: Sequence[Value]) -> str | None:
        """The text of a sum of one and what has a better text for it."""
        if op != "add" or sum(self._constants.get(a.name) == 1 for a in args) != 1:
            return None
        return next((self._more[a.name] for a in args if a.name in self._more), None)

    def _by_reciprocal(self, op: str, args: Sequence[Value]) -> str | None:
        """The text of a division by a constant of what is rounded to 16 bits. An element's quotient takes some ten
        instructions and is up to two units off; a product takes one, and is off by no more. ATen's kernels for the
        device divide by numbers in this way, too."""
        divisor = self._constants.get(args[1].name) if op == "div" and self.coarse else None
        if divisor is None or not 2.0**-100 < abs(divisor) < 2.0**100:
            return None
        return f"({args[0].name} * {self.constant(1 / divisor, torch.float32).name})"

    def _narrowed(self, op: str, args: Sequence[Value]) -> list[Value]:
        """Comparisons of positions are made in the positions' own 32 bits."""
        if op not in COMPARISONS or not all(a.name in self._narrow for a in args):
            return list(args)
        # A check that no thread's neighbouring elements differ in does not make a load narrower.
        apart = self.layout.down and all(a.dims <= {"r"} for a in args)
        texts = ((counting if apart else str)(self._narrow[a.name]) for a in args)
        return [Value(text, torch.int32, a.dims) for text, a in zip(texts, args, strict=True)]

    def random_bits(self, seed: Value, index: IntExpr, stream: int) -> Value:
        line = self._random_line(seed, index, stream)
        if line is not None:
            return line
        position = self.index_expr(index, torch.int64)
        return self.emit(f"_philox({seed.name}, {position.name}, {stream})", torch.int64, position.dims | seed.dims)

    def _random_line(self, seed: Value, index: IntExpr, stream: int) -> Value | None:
        """Where a tile's index runs on without a gap along a dimension: a fourth of the rounds, all words used."""
        for dim, tile in self.tiles.items():
            rest = index - row_major(tile.axes)
            crosses = dim in self.dims_of(rest) or not tile.along_rows or tile.block % 4
            if crosses or any(coefficient % 4 for _, coefficient in rest.ordered_terms()):
                continue
            line = f"{tile.start} + tl.arange(0, {tile.block // 4}){tile.suffix} * 4"
            first = f"({index_text(rest, self.numbers)} + {line}).to(tl.int64)"
            across = self.dims_of(rest)
            length = [tile.block] if not tile.suffix else [self.layout.across(dim) if across else 1, tile.block]
            text = f"_philox_line({seed.name}, {first}, {stream}, {length})"
            return self.emit(text, torch.int64, across | {dim} | seed.dims)
        return None

    # ---- inner axes ------------------------------------------------------------------------------------------

    def carried(self, key: str, dtype: torch.dtype) -> Value:
        return self.carried_values[key]

    def reduce(
        self, kind: ReductionKind, key: str, value: Value, position: Value | None = None, about: str | None = None
    ) -> None:
        if about is not None and self.layout.persistent:
            kind, value = "sum", self._centred(kind, about, value)
        elif about is not None:
            (self._sum_exp if kind == "sum_exp" else self._moments)(about, key, value)
            return
        combine = REDUCTIONS[kind]
        if kind in ("any", "all") and value.dtype is not torch.bool:
            value = self.to_dtype(value, torch.bool, value.dtype)
        values = [value] if position is None else [value, position]
        starts = [literal(combine.identity(value.dtype), value.dtype)]
        if position is not None:
            starts.append(literal(torch.iinfo(torch.int64).max, torch.int64))
        shape = f"[{self.layout.x_block}, {self.layout.r_block}]"
        tiles = [f"tl.broadcast_to({v.name}, {shape})" for v in values]
        mask = f"tl.broadcast_to({self.masks['r']}, {shape})" if "r" in self.masks else ""
        if self.layout.persistent:
            tiles = [f"tl.where({mask}, {t}, {s})" if mask else t for t, s in zip(tiles, starts, strict=True)]
            totals = [self.emit(t, v.dtype, {"x", "r"}) for t, v in zip(tiles, values, strict=True)]
        else:
            totals = self._accumulate(combine, values, tiles, starts, mask, shape)
        self._finish(combine, key, totals)

    def _accumulate(
        self, combine: Combine, values: list[Value], tiles: list[str], starts: list[str], mask: str, shape: str
    ) -> list[Value]:
        """Accumulators that live across the loop's iterations, one a tile element."""
        totals = [Value(self.name("acc"), v.dtype, frozenset({"x", "r"})) for v in values]
        for total, start in zip(totals, starts, strict=True):
            self.lines.append(f"{total.name} = tl.broadcast_to({start}, {shape})")
        names = ", ".join(t.name for t in totals)
        fresh = [self.name() for _ in totals]
        if mask and not combine.pair:  # what lies outside changes nothing
            tiles, mask = [f"tl.where({mask}, {tiles[0]}, {starts[0]})"], ""
        interleaved = _pairs(names.split(", "), tiles)
        self.statement(f"{', '.join(fresh)} = {combine.function}({interleaved})")
        for total, new in zip(totals, fresh, strict=True):
            self.statement(f"{total.name} = " + (f"tl.where({mask}, {new}, {total.name})" if mask else new))
        return totals

    def _lanes(self, start: str, dtype: torch.dtype) -> str:
        """A number for each element of the tile that lives across the loop's iterations."""
        name = self.name("lane")
        shape = f"[{self.layout.x_block}, {self.layout.r_block}]"
        self.lines.append(f"{name} = tl.full({shape}, {start}, {tl_type(dtype)})")
        return name

    def _update(self, fresh: dict[str, str]) -> None:
        """Assigns to lanes where the tile lies inside the row."""
        for lane, text in fresh.items():
            self.statement(
                f"{lane} = " + (f"tl.where({self.masks['r']}, {text}, {lane})" if "r" in self.masks else text)
            )

    def _centred(self, kind: ReductionKind, first: str, value: Value) -> Value:
        """What a joined reduction adds up, where the row is in registers and the first result is there already."""
        row = self.carried_values[first]
        if kind == "sum_exp":
            return self.apply("exp", self.apply("sub", value, row))
        size = index_text(product(a.size for a in self.layout.r))
        gap = self.emit(f"{value.name} - {row.name} / ({size})", value.dtype, value.dims | row.dims)
        return self.apply("mul", gap, gap)

    def _sum_exp(self, maximum: str, key: str, value: Value) -> None:
        """The sum of exp(value - the row's maximum), by each lane's sum of exp(value - its maximum so far)."""
        # The exponents are at most 0 and the sum at least 1, so that the fast form's error, which grows with the
        # exponent, is lost in the sum's own rounding.
        exp = "m.fast_expf({})" if value.dtype is torch.float32 else "m.exp({})"
        if "r" in self.masks:
            lowest = literal(-math.inf, value.dtype)
            shape = f"[{self.layout.x_block}, {self.layout.r_block}]"
            inside = f"tl.broadcast_to({self.masks['r']}, {shape})"
            tile = f"tl.where({inside}, tl.broadcast_to({value.name}, {shape}), {lowest})"
            value = self.emit(tile, value.dtype, {"x", "r"})
        high = self._lanes(repr(torch.finfo(value.dtype).min), value.dtype)  # finite: -inf - -inf would be a NaN
        total = self._lanes("0.0", value.dtype)
        gap, above, factor = (self.name() for _ in range(3))
        self.statement(f"{gap} = {value.name} - {high}")
        self.statement(f"{above} = {gap} > 0")
        self.statement(f"{factor} = tl.where({above}, -{gap}, {gap})")
        self.statement(f"{factor} = {exp.format(factor)}")
        grown = f"tl.where({above}, {total} * {factor} + 1, {total} + {factor})"
        self.statement(f"{total} = {grown}")
        self.statement(f"{high} = tl.maximum({high}, {value.name})")
        row, gap = self.carried_values[maximum], self.name()
        self.after.append(f"{gap} = {high} - {row.name}")
        self._carry_sum(key, f"{total} * {exp.format(gap)}", value.dtype)

    def _moments(self, total: str, key: str, value: Value) -> None:
        """The sum of (value - mean)^2, by each lane's mean and squares about it."""
        kind, block = tl_type(value.dtype), self.layout.r_block
        mean, squares = self._lanes("0.0", value.dtype), self._lanes("0.0", value.dtype)
        gap, moved = self.name(), self.name()
        self.statement(f"{gap} = {value.name} - {mean}")
        self.statement(f"{moved} = {mean} + {gap} * (1 / tl.cast(r0 // {block} + 1, {kind}))")
        self._update({squares: f"{squares} + {gap} * ({value.name} - {moved})", mean: moved})
        size = index_text(product(a.size for a in self.layout.r), use="c")
        count, off = self.name(), self.name()
        self.after.append(f"{count} = (({size} - tl.arange(0, {block})[None, :] + {block - 1}) // {block}).to({kind})")
        self.after.append(f"{off} = {mean} - {self.carried_values[total].name} / ({size})")
        self._carry_sum(key, f"{squares} + {count} * {off} * {off}", value.dtype)

    def _carry_sum(self, key: str, lanes: str, dtype: torch.dtype) -> None:
        result = self.name("carry")
        self.after.append(f"{result} = tl.sum({lanes}, 1)[:, None]")
        self.carried_values[key] = Value(result, dtype, frozenset({"x"}))

    def _finish(self, combine: Combine, key: str, totals: list[Value]) -> None:
        lines = self.lines if self.loop is None else self.loop if self.layout.persistent else self.after
        result = self.name("carry")
        dtype = totals[-1].dtype
        if combine.builtin is not None:
            lines.append(f"{result} = {combine.builtin}({totals[0].name}, 1)[:, None].to({tl_type(dtype)})")
        elif len(totals) == 1:
            name = totals[0].name
            if dtype is torch.bool:  # Triton reduces no one-bit integers
                function = "tl.max" if combine.function == "_or" else "tl.min"
                lines.append(f"{result} = ({function}({name}.to(tl.int32), 1) != 0)[:, None]")
            else:
                lines.append(f"{result} = tl.reduce({name}, 1, {combine.function})[:, None]")
        else:
            pair = ", ".join(t.name for t in totals)
            spare = self.name()
            lines.append(f"{spare}, {result} = tl.reduce(({pair}), 1, {combine.function})")
            lines.append(f"{result} = {result}[:, None]")
        self.carried_values[key] = Value(result, dtype, frozenset({"x"}))

    def reduce_column(self, kind: ReductionKind, key: str, value: Value) -> None:
        combine, shape = REDUCTIONS[kind], f"[{self.layout.x_block}, {self.layout.r_block}]"
        start, name, result = literal(combine.identity(value.dtype), value.dtype), self.name("acc"), self.name("carry")
        tile = f"tl.broadcast_to({value.name}, {shape})"
        if "x" in self.masks:
            tile = f"tl.where(tl.broadcast_to({self.masks['x']}, {shape}), {tile}, {start})"
        self.lines.append(f"{name} = tl.full({shape}, {start}, {tl_type(value.dtype)})")
        self.statement(f"{name} = {combine.function}({name}, {tile})")
        self.after.append(f"{result} = tl.reduce({name}, 0, {combine.function})[None, :]")
        self.carried_values[key] = Value(result, value.dtype, frozenset({"r"}))

    def scan(self, kind: ScanKind, value: Value, position: Value | None = None) -> tuple[Value, ...]:
        combine = SCANS[kind]
        values = [value] if position is None else [value, position]
        shape = f"[{self.layout.x_block}, {self.layout.r_block}]"
        starts = [literal(combine.identity(value.dtype), value.dtype), literal(0, torch.int64)][: len(values)]
        results = [Value(self.name("scan"), v.dtype, frozenset({"x", "r"})) for v in values]
        tiles = [f"tl.broadcast_to({v.name}, {shape})" for v in values]
        if "r" in self.masks:
            mask = f"tl.broadcast_to({self.masks['r']}, {shape})"
            tiles = [f"tl.where({mask}, {t}, {s})" for t, s in zip(tiles, starts, strict=True)]
        operand = tiles[0] if len(tiles) == 1 else f"({', '.join(tiles)})"
        names = ", ".join(r.name for r in results)
        self.statement(f"{names} = tl.associative_scan({operand}, 1, {combine.function})")
        if not self.layout.persistent:
            self._carry_scan(combine, values, starts, operand, results)
        return tuple(results)

    def _carry_scan(
        self, combine: Combine, values: list[Value], starts: list[str], operand: str, results: list[Value]
    ) -> None:
        """Joins this tile's scan to what the tiles before it came to."""
        carries = [self.name("run") for _ in values]
        for carry, start in zip(carries, starts, strict=True):
            self.lines.append(f"{carry} = tl.broadcast_to({start}, [{self.layout.x_block}, 1])")
        names = [r.name for r in results]
        ends = [self.name() for _ in values]
        self.statement(f"{', '.join(ends)} = tl.reduce({operand}, 1, {combine.function})")
        self.statement(f"{', '.join(names)} = {combine.function}({_pairs(carries, names)})")
        self.statement(f"{', '.join(carries)} = {combine.function}({_pairs(carries, [f'{e}[:, None]' for e in ends])})")


def _pairs(left: list[str], right: list[str]) -> str:
    """The operands of a combining function: (a, b), or (a, i, b, j)."""
    return ", ".join([*left, *right])
