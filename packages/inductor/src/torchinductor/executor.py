"""The reference executor: runs a `Program` one instruction after the other in Python.

It defines what the instructions mean, is the oracle of the tests of `_C`, and is short enough to be rewritten for
another device. `native.py` prepares the same program for the C++ executor, which has equal results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from primtorch.symbolic import SCALAR_OPS, IntExpr
from primtorch.symbolic.float_expr import FloatExpr, bits_float, float_bits

from .errors import DivisionByZero, InductorError, OutOfBounds
from .events import TELL_PROCESS, Mended
from .ops import Fault
from .program import (
    Alloc,
    AtenCall,
    Claim,
    Expect,
    Free,
    Instruction,
    KernelCall,
    Output,
    Program,
    RandomSeed,
    ReadScalar,
    Require,
    Size,
    Slot,
    SymbolInput,
    TensorInput,
    TritonCall,
    Value,
    View,
    instruction_text,
)


class InputMismatch(InductorError, ValueError):
    """The inputs are not those that the program was compiled for."""


class PythonExecutor:
    """`executor(inputs: list) -> list` with the semantics of `_C.CompiledProgram`."""

    def __init__(self, program: Program, mended: Mended = TELL_PROCESS) -> None:
        self.program = program
        self.mended = mended
        signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._kernels = [signature(address) for address in program.kernels]

    def __call__(self, inputs: list[Value]) -> list[Value]:
        """Raises `InputMismatch` for a wrong number, dtype, device or rank; else what an instruction raises."""
        slots: list[torch.Tensor | None] = [None] * self.program.num_slots
        symbols: dict[str, int] = {}
        self._bind(inputs, slots, symbols)
        self._derive(symbols)
        for slot, tensor in self.program.constants:
            slots[slot] = tensor
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for instruction in self.program.instructions:
                if isinstance(instruction, Output):
                    return cast("list[Value]", [fill(value, slots, symbols) for value in instruction.values])
                try:
                    self._run(instruction, cast("list[torch.Tensor]", slots), symbols)
                except Exception as error:
                    error.add_note(f"while running: {instruction_text(instruction)}")
                    raise
        raise InductorError("the program has no Output")

    def consume(self, inputs: list[Value]) -> list[Value]:
        """The same, with the list emptied, so that nothing but the program holds the inputs."""
        taken = list(inputs)
        inputs.clear()
        return self(taken)

    def _bind(self, inputs: list[Value], slots: list[torch.Tensor | None], symbols: dict[str, int]) -> None:
        expected = self.program.inputs
        if len(inputs) != len(expected):
            raise InputMismatch(f"the compiled program takes {len(expected)} inputs, not {len(inputs)}")
        for spec, value in zip(expected, inputs, strict=True):
            if isinstance(spec, SymbolInput):
                if spec.symbol is not None:
                    symbols[spec.symbol] = float_bits(value) if isinstance(value, float) else int(cast("int", value))
            elif value is not None:
                slots[spec.slot] = _checked(spec, value).detach()

    def _derive(self, symbols: dict[str, int]) -> None:
        """Computes the numbers that follow from symbols known by now; a float's symbol holds its 64 bits."""
        for name, definition in self.program.definitions.items():
            if all(arg.symbols() <= symbols.keys() for arg in definition.args):
                value = SCALAR_OPS[definition.op].function(*(fill(arg, (), symbols) for arg in definition.args))
                symbols[name] = float_bits(value) if isinstance(value, float) else value

    def _run(self, instruction: Instruction, slots: list[torch.Tensor], symbols: dict[str, int]) -> None:
        match instruction:
            case Alloc(dst, shape, strides, dtype, device) | Claim(dst, _, shape, strides, dtype, device):
                # Python's own references hide whether anybody else holds what could be claimed.
                sizes = evaluate_all(shape, symbols), evaluate_all(strides, symbols)
                slots[dst] = torch.empty_strided(*sizes, dtype=dtype, device=device)
            case Free(slot):
                slots[slot] = None  # type: ignore[call-overload]
            case View(dst, src, shape, strides, offset, dtype):
                slots[dst] = _view(slots[src], dtype, *(evaluate_all(s, symbols) for s in (shape, strides, (offset,))))
            case KernelCall(kernel, buffers, sizes, _):
                pointers = (ctypes.c_void_p * len(buffers))(*(slots[b].data_ptr() for b in buffers))
                numbers = (ctypes.c_int64 * len(sizes))(*evaluate_all(sizes, symbols))
                _raise_for(Fault(self._kernels[kernel](pointers, numbers)))
            case TritonCall(kernel, grid, buffers, sizes, _):
                tensors = [slots[b] for b in buffers]
                self.program.launchers[kernel](tensors, evaluate_all(sizes, symbols), evaluate_all(grid, symbols))
            case AtenCall(op, args, kwargs, dsts):
                result = op(*(fill(a, slots, symbols) for a in args), **{k: fill(v, slots, symbols) for k, v in kwargs})
                results = result if isinstance(result, (tuple, list)) else (result,)
                for target, value in zip(dsts, results, strict=False):
                    if target is not None:
                        slots[target] = cast("torch.Tensor", value)
            case RandomSeed(dst, device):
                slots[dst] = torch.empty((), dtype=torch.int64, device=device).random_()
            case ReadScalar(symbol, src):
                number = slots[src].item()
                symbols[symbol] = float_bits(number) if isinstance(number, float) else int(number)
                self._derive(symbols)
            case Require(condition):
                if not condition.evaluate(symbols):
                    raise InductorError(instruction.refusal)
            case Expect(slot, shape, strides):
                layout = evaluate_all(shape, symbols), evaluate_all(strides, symbols)
                slots[slot] = cast("torch.Tensor", _laid_out(slots[slot], *layout, instruction, self.mended))


def _laid_out(
    result: torch.Tensor | None, shape: Sequence[int], strides: Sequence[int], expected: Expect, mended: Mended
) -> torch.Tensor | None:
    """An operator's result in the strides that its readers were compiled for."""
    if result is None:
        return None
    if list(result.shape) != list(shape):
        raise InductorError(f"{expected.source} returned a tensor of sizes {list(result.shape)}, not {list(shape)}")
    if all(n == 1 or a == b for n, a, b in zip(shape, result.stride(), strides, strict=True)) or result.numel() == 0:
        return result
    mended(expected, f"returned strides {list(result.stride())} where {list(strides)} were expected")
    return torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def evaluate(size: Size, symbols: Mapping[str, int]) -> int:
    """A size's value."""
    return size.evaluate(symbols) if isinstance(size, IntExpr) else size


def evaluate_all(sizes: Sequence[Size], symbols: Mapping[str, int]) -> list[int]:
    """The values of sizes."""
    return [evaluate(size, symbols) for size in sizes]


def fill(
    value: object, slots: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor], symbols: Mapping[str, int]
) -> object:
    """An argument with its slots and expressions replaced by tensors and numbers."""
    if isinstance(value, Slot):
        return slots[value.index]
    if isinstance(value, IntExpr):
        return value.evaluate(symbols)
    if isinstance(value, FloatExpr):
        return bits_float(symbols[value.text]) if value.value is None else value.value
    if isinstance(value, (tuple, list)):
        return [fill(item, slots, symbols) for item in value]
    return value


def _checked(spec: TensorInput, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InputMismatch(f"input {spec.name} must be a tensor, not {type(value).__name__}")
    if (value.dtype, value.device, value.dim()) != (spec.dtype, spec.device, len(spec.shape)):
        raise InputMismatch(
            f"input {spec.name} must be a {len(spec.shape)}-d {spec.dtype} tensor on {spec.device}, "
            f"not a {value.dim()}-d {value.dtype} tensor on {value.device}"
        )
    return value


def _raise_for(met: Fault) -> None:
    if Fault.INDEX in met:
        raise OutOfBounds("index out of bounds: an index tensor holds a value outside the dimension that it indexes")
    if Fault.DIVISION in met:
        raise DivisionByZero("ZeroDivisionError: an integer is divided by zero")


def _view(
    src: torch.Tensor, dtype: torch.dtype | None, shape: list[int], strides: list[int], offset: list[int]
) -> torch.Tensor:
    """`src`'s storage seen with another dtype, shape and strides, from an offset relative to its first element."""
    kind = dtype or src.dtype
    start = src.storage_offset() * src.element_size() // kind.itemsize + offset[0]
    return torch.empty(0, dtype=kind, device=src.device).set_(src.untyped_storage(), start, shape, strides)
