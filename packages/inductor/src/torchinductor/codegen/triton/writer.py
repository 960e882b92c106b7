"""Writes a kernel's Triton source from its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType

from primtorch.frozen import record
from primtorch.symbolic.expr import IntExpr
from torchinductor.codegen.naming import PLACEHOLDER, described, name_of
from torchinductor.indexing import number, product
from torchinductor.ir import Axis, Kernel, by_form

from .expressions import POINTER_TYPES, Unsupported, helpers_of
from .handler import NO_DIMS, Tile, TritonHandler, index_text, quotient_text, remainder_text
from .marks import Mark, Use, marked, plain, replaced
from .plan import Layout

HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice as m\n"


@record
class Form:
    """What the text of a kernel is made of.

    Attributes:
        title: what its name begins with.
        functions: those that it calls, by their names.
        parameters: (parameter, Triton's name of its type), pointers first.
        body: its statements, numbers marked.
    """

    title: str
    parameters: tuple[tuple[str, str], ...]
    warps: int
    body: str
    functions: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """All that has marks."""
        return "".join((*(text for _, text in self.functions), self.body))


@record
class Given:
    """The argument that stands for a number, and the power of two that it is a multiple of."""

    name: str
    multiple: int


@record
class TritonSource:
    """One kernel's text, and what compiling and launching it takes."""

    name: str
    text: str
    signature: tuple[tuple[str, str], ...]  # (parameter, Triton's name of its type), pointers first
    warps: int
    stages: int
    grid: tuple[IntExpr, IntExpr, IntExpr]
    buffers: tuple[str, ...]  # the pointer arguments
    symbols: tuple[str, ...]  # the integer arguments
    written: tuple[int, ...]  # positions in `buffers`
    divisors: tuple[tuple[int, int], ...] = ()  # (position in the signature, what the number is a multiple of)
    numbers: tuple[int, ...] = ()  # what the arguments behind the symbols are at this kernel's launches; floats' bits
    form: Form | None = None  # where the kernel may become one with others


# Iterations up to which the compiler may well write a loop's body several times, where it knows them, and where there
# are no loads of several of them under way.
_UNROLLED = 8
_VECTOR = 8  # elements of 16 bits that a thread loads at a time


def write(kernel: Kernel) -> TritonSource:
    """The source of a planned kernel. Raises Unsupported."""
    return replace(_written(kernel), buffers=kernel.arguments)


@by_form
def _written(kernel: Kernel) -> TritonSource:
    title = described((stage.body for stage in kernel.stages), kernel.laid_out(Layout).shape)
    return source_of(kernel, body_of(kernel), title, shareable=True)


@by_form
def body_of(kernel: Kernel) -> tuple[str, ...]:
    """The statements of a planned kernel; the first one asks for the program's number. Raises Unsupported."""
    layout = kernel.laid_out(Layout)
    if layout.walk is not None:
        return tuple(_WalkWriter(kernel).write())
    width = product(a.size for a in layout.x).as_int()
    if layout.shape == "rows" and width is not None and width % _VECTOR:
        return _whole_or_end(_LoopWriter(kernel, inside=True), _LoopWriter(kernel), width)
    return tuple(_LoopWriter(kernel).write())


def _whole_or_end(inside: _LoopWriter, checked: _LoopWriter, width: int) -> tuple[str, ...]:
    """Of rows that end within what a thread takes at a time, programs that reach no end check nothing: their loads and
    stores are as wide as they can be, where checked ones would go element by element."""
    whole, end = inside.write(), checked.write()
    shared = next(at for at, (a, b) in enumerate(zip(whole, end, strict=False)) if a != b)
    return (
        *whole[:shared],
        f"if {inside.handler.tiles['x'].start} + {inside.layout.x_block} <= {marked(width)}:",
        *("    " + line for line in whole[shared:]),
        "else:",
        *("    " + line for line in end[shared:]),
    )


def source_of(kernel: Kernel, body: Sequence[str], title: str, *, shareable: bool = False) -> TritonSource:
    """The function with a kernel's arguments and this body; its name begins with `title`. `shareable`: whether it may
    become one with others that differ in marked numbers. Raises Unsupported."""
    layout = kernel.laid_out(Layout)
    for name in kernel.arguments:
        if kernel.buffers[name].dtype not in POINTER_TYPES:
            raise Unsupported(f"Triton has no type {kernel.buffers[name].dtype} (buffer {name})")
    pointers = [(f"p{i}", POINTER_TYPES[kernel.buffers[b].dtype]) for i, b in enumerate(kernel.arguments)]
    integers = [(s, "i64") for s in kernel.symbols]
    form = Form(title, (*pointers, *integers), layout.warps, "\n".join("    " + line for line in body) + "\n")
    name, text = written_out(form)
    return TritonSource(
        name,
        text,
        form.parameters,
        layout.warps,
        layout.stages,
        (layout.grid, number(1), number(1)),
        kernel.arguments,
        kernel.symbols,
        tuple(i for i, b in enumerate(kernel.arguments) if b in kernel.writes),
        form=form if shareable else None,
    )


def written_out(
    form: Form,
    given: Mapping[int, Given] = MappingProxyType({}),
    numbers: Sequence[tuple[str, str]] = (),
    divisors: Sequence[tuple[int, int]] = (),
) -> tuple[str, str]:
    """The name and the whole text of a form.

    Args:
        given: by the places of the numbers (`marks_of(form.text)`) that have an argument.
        numbers: these arguments, and their types.
        divisors: their positions among the parameters, and what they are multiples of.
    """
    places = count()
    taken: dict[str, dict[str, None]] = {}  # the arguments that each function has in its text

    def put(function: str, text: str) -> str:
        own = taken.setdefault(function, {})

        def named(mark: Mark) -> str:
            found = given.get(next(places))
            if found is None:
                return mark.plain
            own[found.name] = None
            return mark.named(found.name, found.multiple)

        return replaced(text, named)

    made = [put(*function) for function in form.functions]
    parameters, multiples = (*form.parameters, *numbers), dict(divisors)
    # What the binary depends on stands in the text: kernels of equal text are one kernel.
    notes = [
        f"{name}: {kind}" + (f" (multiple of {multiples[place]})" if place in multiples else "")
        for place, (name, kind) in enumerate(parameters)
    ]
    head = f"@triton.jit\ndef {PLACEHOLDER}({', '.join(name for name, _ in parameters)}):\n"
    made.append(f"{head}    # {', '.join(notes)}; {form.warps} warps\n{put('', form.body)}")
    further = lambda function: "".join(f", {name}" for name in taken[function])
    return finished(form.title, replaced("\n\n".join(made), lambda mark: mark.plain, further))


def finished(title: str, function: str) -> tuple[str, str]:
    """The name of a function, and the whole text."""
    name = name_of(title, function)
    named = function.replace(f"def {PLACEHOLDER}(", f"def {name}(", 1)
    return name, "\n\n".join([HEADER, *helpers_of(function), named])


class Writer:
    """A kernel's positions as text: what a program, and each point of its tile, stands for."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.layout = kernel, kernel.laid_out(Layout)
        self.handler = TritonHandler(kernel)

    def begin(self) -> None:
        """The program's number."""
        self.line("pid = tl.program_id(0)" + (".to(tl.int64)" if self.layout.wide else ""))

    def line(self, text: str) -> None:
        """Adds a statement where the text has come to."""
        self.handler.statement(text)

    def place(self, dim: str, axes: Sequence[Axis], block: int, program: str, column: str) -> None:
        """A dimension of the tile of the program that has this number along it."""
        start = f"({program}) * {block}"
        self.line(f"{dim} = {start} + tl.arange(0, {block}){column}")
        self.handler.tiles[dim] = Tile(tuple(axes), start, block, column)
        self.bound(dim, dim, product(a.size for a in axes), block)
        self.split(dim, axes, dim, dim)

    def bound(self, dim: str, name: str, size: IntExpr, block: int) -> None:
        """A mask where the tile may reach over the end."""
        known = size.as_int()
        if not known or known % block:  # an empty reduction is all mask
            use: Use = "c" if dim == "r" and self.layout.down else "n"  # no thread's elements lie beside each other
            self.line(f"{name}_mask = {name} < {index_text(size, use=use)}")
            self.handler.masks[dim] = f"{name}_mask"

    def split(self, name: str, axes: Sequence[Axis], dim: str | None, text: str) -> None:
        """Axis variables from a row-major position over the axes."""
        if not axes:
            return
        if name != text:
            self.line(f"{name} = {text}")
        # A division by a number that is not known takes some twenty instructions: seldom enough where it is made once a
        # program, or once a row or column of a tile.
        once = dim is None or (dim != "r" and self.layout.shape in ("tiled", "reduction"))
        if dim == "x" and self.layout.shape in ("flat", "rows") and not self.layout.wide:
            return self._split_line(name, axes)
        step = number(1)
        for position in range(len(axes) - 1, -1, -1):
            axis = axes[position]
            counts = not dim or step.as_int() != 1  # nothing of the size matters but itself
            texts = index_text(step, use="n" if dim else "c"), index_text(axis.size, use="c" if counts else "n")
            by, size = (text if once else plain(text) for text in texts)
            quotient = name if step.as_int() == 1 else f"({name} // ({by}))"
            wrapped = quotient if position == 0 else f"{quotient} % ({size})"
            self.line(f"{axis.name} = {wrapped}")
            self.handler.dims[axis.name] = frozenset({dim}) if dim else NO_DIMS
            step = step * axis.size

    def _split_line(self, name: str, axes: Sequence[Axis]) -> None:
        """The same for each element of a line: quotients by what the axes step over, the outermost first, and what each
        leaves of the next."""
        names = [axes[0].name, *(f"{axis.name}_on" for axis in axes[1:])]
        for position in range(len(axes)):
            step = product(axis.size for axis in axes[position + 1 :])
            if step.as_int() == 1:
                names[position] = name
            else:
                self.line(f"{names[position]} = {quotient_text(name, step)}")
        if names[0] == name:
            self.line(f"{axes[0].name} = {name}")
        for position, axis in enumerate(axes[1:], 1):
            self.line(f"{axis.name} = {remainder_text(names[position], axis.size, names[position - 1])}")
        self.handler.dims.update({axis.name: frozenset({"x"}) for axis in axes})

    def wait(self, position: int) -> None:
        """In front of a stage: for what this program's other threads have stored, or have yet to load."""
        reads = self.kernel.stages[position].body.reads
        if self.handler.written & reads or position in self.handler.waits.stages:
            self.line("tl.debug_barrier()")


class _LoopWriter(Writer):
    """Stages one after the other, over a program's tile; `inside`: one that reaches over no end."""

    def __init__(self, kernel: Kernel, inside: bool = False) -> None:
        super().__init__(kernel)
        self.inside = inside

    def bound(self, dim: str, name: str, size: IntExpr, block: int) -> None:
        if not self.inside:
            super().bound(dim, name, size, block)

    def write(self) -> list[str]:
        layout = self.layout
        self.begin()
        self._tiles()
        if layout.r and layout.persistent:
            self._inner_tile("0")
        for position, stage in enumerate(self.kernel.stages):
            self.wait(position)
            if stage.kind == "inner" and not layout.persistent:
                self._looped(position)
            else:
                self.handler.replay(position)
        return self.handler.lines

    def _tiles(self) -> None:
        """Program id -> tile positions, masks, and the outer axes' variables."""
        layout = self.layout
        rest = "pid"
        for dim, axes, block in (("x", layout.x, layout.x_block), ("y", layout.y, layout.y_block)):
            if dim == "y" and not axes:
                continue
            last = not layout.fixed and (dim == "y" or not layout.y)
            rest = self._tile(dim, axes, block, rest, last)
        self.split("rest" if layout.fixed else rest, layout.fixed, None, rest)
        shape = {"tiled": [layout.y_block, layout.x_block], "reduction": [layout.x_block, 1]}
        self.handler.zeros_from_here(shape.get(layout.shape, [layout.x_block]))

    def _tile(self, dim: str, axes: Sequence[Axis], block: int, rest: str, last: bool) -> str:
        """Takes this dimension's share of the program id; returns the text of what is left of it."""
        suffix = {"tiled": {"x": "[None, :]", "y": "[:, None]"}, "reduction": {"x": "[:, None]"}}
        programs = index_text((product(a.size for a in axes) + number(block - 1)) // number(block), use="c")
        program = rest if last else f"({rest}) % ({programs})"
        self.place(dim, axes, block, program, suffix.get(self.layout.shape, {}).get(dim, ""))
        return f"({rest}) // ({programs})"

    def _inner_tile(self, start: str) -> None:
        layout = self.layout
        offset = "" if start == "0" else f"{start} + "
        self.line(f"r = {offset}tl.arange(0, {layout.r_block})[None, :]")
        self.handler.tiles["r"] = Tile(layout.r, start, layout.r_block, "[None, :]")
        self.bound("r", "r", product(a.size for a in layout.r), layout.r_block)
        self.split("r", layout.r, "r", "r")

    def _looped(self, position: int) -> None:
        handler = self.handler
        handler.begin_loop()
        self._inner_tile("r0")
        handler.replay(position)
        length, few = product(a.size for a in self.layout.r), _UNROLLED * self.layout.r_block
        size = index_text(length, use="c")
        if self.layout.stages == 1 and (length.as_int() or few + 1) <= few:
            size = plain(size)
        bounds = f"0, {size}, {self.layout.r_block}"
        ahead = f"tl.range({bounds}, num_stages={self.layout.stages})" if self.layout.stages > 1 else f"range({bounds})"
        handler.end_loop(f"for r0 in {ahead}:")


class _WalkWriter(_LoopWriter):
    """All stages for some rows, in a loop over tiles of rows; behind it what is done for each column."""

    def write(self) -> list[str]:
        layout, handler = self.layout, self.handler
        assert layout.walk is not None
        self.begin()
        self.line(f"{layout.walk.name} = pid")
        handler.zeros_from_here([layout.x_block, 1])
        self._inner_tile("0")
        handler.begin_loop("x")
        self.place("x", layout.x, layout.x_block, "tile", "[:, None]")
        for position, stage in enumerate(self.kernel.stages):
            if stage.kind != "columns":
                self.wait(position)
                handler.replay(position)
        tiles = (product(a.size for a in layout.x) + number(layout.x_block - 1)) // number(layout.x_block)
        bounds = f"pid, {index_text(tiles, use='c')}, {index_text(layout.walk.size, use='c')}"
        handler.end_loop(f"for tile in tl.range({bounds}, num_stages={layout.stages}):")
        for position, stage in enumerate(self.kernel.stages):
            if stage.kind == "columns":
                handler.replay(position)
        return handler.lines
