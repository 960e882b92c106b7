"""The flat program that a compiled graph is: instructions over slots, run by `executor.py` (Python) and `_C` (C++).

A slot holds one tensor. The first slots are the graph's tensor inputs in order, then constants, then intermediates.
Sizes are integers or `IntExpr`s over the program's symbols; the symbols' values come from the graph's int inputs and,
for data-dependent ones, from `ReadScalar`. The executors evaluate them by their postfix programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TypeAlias

import torch

from primtorch.frozen import record
from primtorch.ledger import own_line
from primtorch.schemas import UserFrame
from primtorch.symbolic import Definition, FloatExpr, IntExpr
from primtorch.symbolic.relation import BoolExpr

Size: TypeAlias = int | IntExpr
Value: TypeAlias = torch.Tensor | int | float | None  # what a program takes and returns
Run: TypeAlias = Callable[[list[Value]], list[Value]]
Launcher: TypeAlias = Callable[
    [Sequence[torch.Tensor], Sequence[int], Sequence[int]], object
]  # of tensors, symbols, grid


@record
class Slot:
    """A reference to the tensor in a slot, inside an `AtenCall`'s arguments or an `Output`."""

    index: int


@record
class TensorInput:
    """A graph input that is a tensor: its strides are those that the kernels were generated for."""

    name: str
    slot: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


@record
class SymbolInput:
    """A graph input that is an int or a float (whose 64 bits the symbol holds): the value of `symbol`, or unused if it
    has no symbol."""

    name: str
    symbol: str | None


@record
class Alloc:
    """slots[dst] = empty_strided(shape, strides, dtype, device)."""

    dst: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device


@record
class Free:
    """Drops the tensor in `slot`."""

    slot: int


@record
class View:
    """slots[dst] = a strided view over the memory of slots[src].

    `offset` counts elements of `dtype` (or of src's dtype when None) from src's own first element, so the reuse of a
    dead buffer is `View(dst, src, ...)` followed by `Free(src)`.
    """

    dst: int
    src: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0
    dtype: torch.dtype | None = None


@record
class Claim:
    """slots[dst] = a strided view over the memory of slots[src], an input, from its first element on: where nobody but
    the program holds that memory, it is an allocator's, and long enough. Else slots[dst] = empty_strided(...)."""

    dst: int
    src: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device


@record
class KernelCall:
    """Calls `Program.kernels[kernel]` as `int(void* const* buffers, const int64_t* symbols)`.

    A result other than zero is the `ops.Fault` that the kernel met, which is raised.
    """

    kernel: int
    buffers: tuple[int, ...]
    symbols: tuple[Size, ...]
    name: str


@record
class TritonCall:
    """Launches `Program.launchers[kernel]` on a grid; its arguments are the buffers' pointers, then the symbols."""

    kernel: int
    grid: tuple[Size, Size, Size]
    buffers: tuple[int, ...]
    symbols: tuple[Size, ...]
    name: str


@record
class AtenCall:
    """Calls an overload (or another Python callable) on slots; nested tuples and lists may hold `Slot`s,
    `IntExpr`s and `FloatExpr`s.

    `dsts` has one entry a result; None where the result is not used.
    """

    op: Callable[..., object]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    dsts: tuple[int | None, ...]


@record
class RandomSeed:
    """slots[dst] = an int64 0-d tensor drawn from the device's default generator."""

    dst: int
    device: torch.device


@record
class ReadScalar:
    """The data-dependent `symbol` takes the value of the one-element tensor in `src` (on a GPU this synchronises)."""

    symbol: str
    src: int


@record
class Require:
    """Ends the run where a number that the data told is none that the program was compiled for. It stands behind the
    read of the number, before any kernel that reaches as far into memory as the number says.

    Attributes:
        condition: over symbols that are known by then.
        frames: the user's lines that asserted it, or whose operator takes such numbers alone.
    """

    condition: BoolExpr
    frames: tuple[UserFrame, ...] = ()

    @property
    def refusal(self) -> str:
        """What an error says, with the user's line first."""
        line = own_line(self.frames)
        where = f"{line.file}:{line.line}: " if line is not None else ""
        return f"{where}a number that the data told is refused: {self.condition} does not hold"


@record
class Expect:
    """Holds an ATen result to the layout that its readers were compiled for.

    Which strides a library gives a result may depend on its version and on the machine. Another size is an error;
    other strides are mended by a copy, which the ledger and a warning tell of.

    Attributes:
        source: the operator.
        frames: the user's lines behind it.
    """

    slot: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    source: str
    frames: tuple[UserFrame, ...] = ()


@record
class Output:
    """What the program returns; always the last instruction."""

    values: tuple[Slot | Size | FloatExpr | float | None, ...]


Instruction: TypeAlias = (
    Alloc
    | Free
    | View
    | Claim
    | KernelCall
    | TritonCall
    | AtenCall
    | RandomSeed
    | ReadScalar
    | Require
    | Expect
    | Output
)


@record
class Part:
    """What an instruction does that takes time: a generated kernel, or a call of an operator. For people alone.

    Attributes:
        position: that of the instruction in the program.
        name: for tables and profilers; no other part of the program has it.
        generated: whether it is a generated kernel.
        function: what a generated kernel is called in its binary, which is how ncu and perf know it. Equal kernels are
            one function; "" for a call.
        frames: the user's lines behind it.
        read, written: bytes, each place once, at the sizes of the example.
    """

    position: int
    name: str
    generated: bool
    frames: tuple[UserFrame, ...]
    read: int
    written: int
    function: str = ""

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes, at the sizes of the example."""
        return self.read + self.written


@record
class Program:
    """Everything an executor needs. `kernels` are function addresses; `keepalive` holds the libraries they live in."""

    inputs: tuple[TensorInput | SymbolInput, ...]
    symbols: tuple[str, ...]
    num_slots: int
    constants: tuple[tuple[int, torch.Tensor], ...]
    instructions: tuple[Instruction, ...]
    kernels: tuple[int, ...] = ()
    launchers: tuple[Launcher, ...] = ()
    keepalive: tuple[object, ...] = field(default=(), repr=False)
    definitions: Mapping[str, Definition] = field(default_factory=dict)  # of symbols computed from those of the inputs
    parts: tuple[Part, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"inputs: {', '.join(_input_text(i) for i in self.inputs)}"]
        lines += [f"%{slot} = constant {tuple(t.shape)} {t.dtype}" for slot, t in self.constants]
        lines += [instruction_text(i) for i in self.instructions]
        return "\n".join(lines)


def _sizes(sizes: tuple[Size, ...]) -> str:
    return "(" + ", ".join(str(s) for s in sizes) + ")"


def _input_text(item: TensorInput | SymbolInput) -> str:
    if isinstance(item, SymbolInput):
        return f"{item.name}: {'float' if (item.symbol or '').startswith('f') else 'int'}" + (
            f" = {item.symbol}" if item.symbol else ""
        )
    return f"%{item.slot} {item.name}: {str(item.dtype)[6:]}{_sizes(item.shape)} strides {_sizes(item.strides)}"


def _value_text(value: object) -> str:
    if isinstance(value, Slot):
        return f"%{value.index}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_value_text(v) for v in value) + "]"
    return str(value)


def instruction_text(instruction: Instruction) -> str:
    """One readable line for an instruction."""
    match instruction:
        case Alloc(dst, shape, strides, dtype, device):
            return f"%{dst} = alloc {str(dtype)[6:]}{_sizes(shape)} strides {_sizes(strides)} on {device}"
        case Free(slot):
            return f"free %{slot}"
        case View(dst, src, shape, strides, offset, dtype):
            kind = f" as {str(dtype)[6:]}" if dtype is not None else ""
            return f"%{dst} = view %{src}{kind} {_sizes(shape)} strides {_sizes(strides)} offset {offset}"
        case Claim(dst, src, shape, strides, dtype):
            return f"%{dst} = claim %{src} as {str(dtype)[6:]}{_sizes(shape)} strides {_sizes(strides)}"
        case KernelCall(_, buffers, symbols, name):
            return f"{name}({', '.join(f'%{b}' for b in buffers)}; {', '.join(map(str, symbols))})"
        case TritonCall(_, grid, buffers, symbols, name):
            return f"{name}<{_sizes(grid)}>({', '.join(f'%{b}' for b in buffers)}; {', '.join(map(str, symbols))})"
        case AtenCall(op, args, kwargs, dsts):
            inner = [_value_text(a) for a in args] + [f"{k}={_value_text(v)}" for k, v in kwargs]
            return f"{', '.join('_' if d is None else f'%{d}' for d in dsts)} = {op}({', '.join(inner)})"
        case RandomSeed(dst, device):
            return f"%{dst} = random_seed on {device}"
        case ReadScalar(symbol, src):
            return f"{symbol} = read %{src}"
        case Require(condition, frames):
            line = own_line(frames)
            return f"require {condition}" + (f" ({line})" if line is not None else "")
        case Expect(slot, shape, strides):
            return f"expect %{slot} {_sizes(shape)} strides {_sizes(strides)}"
        case Output(values):
            return f"return {', '.join(_value_text(v) for v in values)}"
