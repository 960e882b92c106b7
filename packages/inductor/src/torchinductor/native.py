"""Prepares a `Program` for the C++ executor: symbols become numbers, size expressions a table, arguments IValues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import torch

from primtorch.errors import DataDependentValue
from primtorch.symbolic import FloatExpr, IntExpr
from primtorch.symbolic.expr import Program as Postfix
from primtorch.symbolic.expr import symbol
from primtorch.symbolic.float_expr import float_bits
from primtorch.symbolic.relation import BoolExpr, Condition
from torchinductor._C import Builder, CompiledProgram, TritonKernel

from .errors import InductorError
from .events import TELL_PROCESS, Mended
from .executor import fill
from .program import (
    Alloc,
    AtenCall,
    Claim,
    Expect,
    Free,
    Instruction,
    KernelCall,
    Output,
    Part,
    Program,
    RandomSeed,
    ReadScalar,
    Require,
    Size,
    Slot,
    SymbolInput,
    TritonCall,
    View,
    instruction_text,
)


def label_of(title: str, part: Part) -> str:
    """What profilers call a part of the graph of this title: `graph_0.forward.amax_sub_exp_2`."""
    return f"{title.replace(' ', '.')}.{part.name}"


Computed: TypeAlias = IntExpr | FloatExpr | BoolExpr  # what a run evaluates, once its symbols are known


class MixedDevices(InductorError):
    """A program runs on one accelerator at a time."""


def prepare(
    program: Program, mended: Mended = TELL_PROCESS, title: str = "graph", choices: Path | None = None
) -> CompiledProgram:
    """The callable that runs the program: `callable(inputs: list) -> list`, and `consume`, which empties the list.

    Profilers show each part under the title and its own name. `mended` is called, with the results computed, for each
    `Expect` that did not hold. With a file of `choices`, matrix products on a GPU are measured.
    """
    builder = Builder()
    if choices is not None:
        builder.tune_products(str(choices))
    encode(program, builder, mended, title)
    return builder.build(program.num_slots, len(program.symbols))


def encode(program: Program, builder: Builder, mended: Mended, title: str) -> None:
    """Makes the calls of a builder that a program is; all but the last, `build`."""
    _Encoder(program, builder, mended, title).encode()


def accelerator_of(program: Program) -> torch.device | None:
    """The one device beside the CPU that a program uses. Raises MixedDevices if there are several."""
    devices = {i.device for i in program.inputs if not isinstance(i, SymbolInput)}
    devices |= {i.device for i in program.instructions if isinstance(i, (Alloc, RandomSeed))}
    found = {d for d in devices if d.type != "cpu"}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise MixedDevices(f"one compiled graph works on several devices ({names}): compile the part on each by itself")
    return found.pop() if found else None


class _Encoder:
    def __init__(self, program: Program, builder: Builder, mended: Mended, title: str) -> None:
        self.program = program
        self.builder = builder
        self.mended = mended
        self.labels = {part.position: label_of(title, part) for part in program.parts}
        self.symbols = {name: i for i, name in enumerate(program.symbols)}
        self.known = {i.symbol for i in program.inputs if isinstance(i, SymbolInput) and i.symbol is not None}
        self.values: dict[Computed, int] = {}
        self.device = accelerator_of(program) or torch.device("cpu")

    def encode(self) -> None:
        self._read_sizes()
        if self.device.type == "cuda":
            # Asked once a call, so that kernels follow torch.cuda.stream(...) and a capture's stream.
            getter = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            if getter is None:
                raise InductorError("a program for CUDA needs a PyTorch that is built with CUDA")
            self.builder.stream(getter, self.device.index or 0)
        for item in self.program.inputs:
            if isinstance(item, SymbolInput):
                self.builder.input_symbol(item.name, -1 if item.symbol is None else self.symbols[item.symbol])
            else:
                self.builder.input_tensor(item.name, item.slot, item.dtype, item.device, len(item.shape))
        for slot, tensor in self.program.constants:
            self.builder.constant(slot, tensor.detach())
        for position, instruction in enumerate(self.program.instructions):
            self._instruction(instruction)
            if position in self.labels:
                self.builder.label(self.labels[position])

    # ---- sizes: every distinct expression is evaluated once a call, as soon as its symbols are known -----------

    def _read_sizes(self) -> None:
        exprs = [*_expressions(self.program)]
        if any(isinstance(i, AtenCall) and not _is_boxed(i) for i in self.program.instructions):
            exprs += map(symbol, (*self.symbols, *self.program.definitions))  # a Python callable is given them all
        for expr in dict.fromkeys(exprs):
            if expr.symbols():
                self.values[expr] = self.builder.value(self._steps(expr.program()), self._roots(expr) <= self.known)

    def _steps(self, program: Postfix) -> list[tuple[str, int]]:
        """A postfix program over the symbols of the inputs; what is computed from them is spelt out."""
        steps: list[tuple[str, int]] = []
        for op, argument in program:
            definition = self.program.definitions.get(str(argument)) if op == "sym" else None
            if definition is not None:
                for operand in definition.args:
                    steps += self._steps(operand.program())
                steps.append((definition.op, 0))
            elif op == "sym":
                if str(argument) not in self.symbols:
                    why = "an operator's result has it, and no value of the program tells it"
                    raise DataDependentValue(f"the size {argument}", why, "Keep this part out of the compiled region.")
                steps.append((op, self.symbols[str(argument)]))
            elif op == "fconst":
                steps.append(("const", float_bits(float(argument))))
            else:
                steps.append((op, int(argument)))
        return steps

    def _roots(self, expr: Computed) -> set[str]:
        """The symbols that an expression is computed from in the end."""
        found: set[str] = set()
        for name in expr.symbols():
            definition = self.program.definitions.get(name)
            found |= {name} if definition is None else set().union(*map(self._roots, definition.args))
        return found

    def _size(self, size: Size) -> tuple[bool, int]:
        number = size.as_int() if isinstance(size, IntExpr) else int(size)
        if number is not None:
            return False, number
        assert isinstance(size, IntExpr)
        return True, self.values[size]

    def _sizes(self, sizes: Iterable[Size]) -> list[tuple[bool, int]]:
        return [(False, s) if type(s) is int else self._size(s) for s in sizes]

    def _refreshed(self, symbol: str) -> list[int]:
        """The values that can be computed now that `symbol` is known too."""
        self.known.add(symbol)
        return [i for e, i in self.values.items() if symbol in self._roots(e) and self._roots(e) <= self.known]

    # ---- instructions ------------------------------------------------------------------------------------------

    def _instruction(self, instruction: Instruction) -> None:
        name = instruction_text(instruction)
        match instruction:
            case Alloc(dst, shape, strides, dtype, device):
                self.builder.alloc(dst, self._sizes(shape), self._sizes(strides), dtype, device, name)
            case Free(slot):
                self.builder.free(slot, name)
            case View(dst, src, shape, strides, offset, dtype):
                self.builder.view(dst, src, self._sizes(shape), self._sizes(strides), self._size(offset), dtype, name)
            case Claim(dst, src, shape, strides, dtype, device):
                self.builder.claim(dst, src, self._sizes(shape), self._sizes(strides), dtype, device, name)
            case KernelCall(kernel, buffers, sizes, _):
                self.builder.kernel(self.program.kernels[kernel], list(buffers), self._sizes(sizes), name)
            case TritonCall():
                self._triton(instruction, name)
            case AtenCall():
                self._aten(instruction, name)
            case RandomSeed(dst, device):
                self.builder.alloc(dst, [], [], torch.int64, device, name)
                self.builder.aten("aten::random_", "", [("slot", dst), ("fixed", None)], [None], [], name)
            case ReadScalar(symbol, src):
                self.builder.read_scalar(self.symbols[symbol], src, self._refreshed(symbol), name)
            case Require(condition):
                self.builder.require(self.values[condition], name, instruction.refusal)
            case Expect(slot, shape, strides, source):
                tell = functools.partial(self.mended, instruction)
                self.builder.expect(slot, self._sizes(shape), self._sizes(strides), source, tell)
            case Output(values):
                for value in values:
                    self._output(value)

    def _triton(self, call: TritonCall, name: str) -> None:
        launcher = self.program.launchers[call.kernel]
        handle = getattr(launcher, "handle", None)
        if isinstance(handle, TritonKernel):
            grid, sizes = self._sizes(call.grid), self._sizes(call.symbols)
            written = list(cast("Sequence[int]", getattr(launcher, "written", ())))
            self.builder.triton(handle, grid, list(call.buffers), written, sizes, self.device, name)
            return

        def launch(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple[()]:
            launcher(tensors, list(numbers[3:]), list(numbers[:3]))
            return ()

        self.builder.python(launch, list(call.buffers), self._sizes((*call.grid, *call.symbols)), [], name)

    def _aten(self, call: AtenCall, name: str) -> None:
        if not _is_boxed(call):
            self._python(call, name)
            return
        assert isinstance(call.op, torch._ops.OpOverload)
        schema = call.op._schema
        given = dict(zip((a.name for a in schema.arguments), call.args, strict=False)) | dict(call.kwargs)
        arguments = [self._argument(given.get(a.name, a.default_value)) for a in schema.arguments]
        results: list[object] = [None if d is None else ("slot", d) for d in call.dsts]
        if len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType):
            results = [("list", results)]
        self.builder.aten(schema.name, schema.overload_name, arguments, results, [], name)

    def _python(self, call: AtenCall, name: str) -> None:
        slots = list(dict.fromkeys(_slots((call.args, call.kwargs))))
        names = [s for s in (*self.symbols, *self.program.definitions) if self._roots(symbol(s)) <= self.known]
        run = _python_call(call, slots, names)
        destinations = [None if d is None else ("slot", d) for d in call.dsts]
        self.builder.python(run, slots, self._sizes(map(symbol, names)), destinations, name)

    def _argument(self, value: object) -> tuple[str, object]:
        if isinstance(value, Slot):
            return "slot", value.index
        if isinstance(value, IntExpr):
            is_value, number = self._size(value)
            return ("value" if is_value else "fixed"), number
        if isinstance(value, FloatExpr):
            return ("fixed", value.value) if value.value is not None else ("float", self.values[value])
        if isinstance(value, (tuple, list)):
            items = [self._argument(item) for item in value]
            if all(tag == "fixed" for tag, _ in items):
                return "fixed", [item for _, item in items]
            return "list", items
        return "fixed", value

    def _output(self, value: Slot | Size | FloatExpr | float | None) -> None:
        if value is None:
            self.builder.output_none()
        elif isinstance(value, Slot):
            self.builder.output_slot(value.index)
        elif isinstance(value, float):
            self.builder.output_float(value)
        elif isinstance(value, FloatExpr):
            self.builder.output_float_value(self.values[value])
        else:
            self.builder.output_size(self._size(value))


def _is_boxed(call: AtenCall) -> bool:
    """Whether the dispatcher's boxed entry point can be called."""
    return isinstance(call.op, torch._ops.OpOverload)


def _python_call(
    call: AtenCall, slots: Sequence[int], names: Sequence[str]
) -> Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[object]]:
    """The call as a function of the tensors in `slots` and the values of the symbols `names`."""

    def run(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Sequence[object]:
        table, symbols = dict(zip(slots, tensors, strict=True)), dict(zip(names, numbers, strict=True))
        args = [fill(a, table, symbols) for a in call.args]
        result = call.op(*args, **{k: fill(v, table, symbols) for k, v in call.kwargs})
        return result if isinstance(result, (tuple, list)) else (result,)

    return run


def _leaves(value: object) -> list[object]:
    """What is in tuples and lists, in order."""
    if not isinstance(value, (tuple, list)):
        return [value]
    found: list[object] = []
    for item in value:
        found += _leaves(item) if isinstance(item, (tuple, list)) else (item,)
    return found


def _slots(value: object) -> Iterable[int]:
    return (leaf.index for leaf in _leaves(value) if isinstance(leaf, Slot))


def _sizes_of(instruction: Instruction) -> tuple[object, ...]:
    match instruction:
        case Alloc(_, shape, strides) | Claim(_, _, shape, strides):
            return *shape, *strides
        case View(_, _, shape, strides, offset):
            return *shape, *strides, offset
        case Expect(_, shape, strides):
            return *shape, *strides
        case KernelCall(_, _, sizes):
            return sizes
        case TritonCall(_, grid, _, sizes):
            return *grid, *sizes
        case AtenCall(_, args, kwargs):
            return args, kwargs
        case Output(values):
            return values
        case Require(condition):
            return (condition,)
        case Free() | RandomSeed() | ReadScalar():
            return ()


def _expressions(program: Program) -> Iterable[Computed]:
    for instruction in program.instructions:
        leaves = _leaves(_sizes_of(instruction))
        yield from (leaf for leaf in leaves if isinstance(leaf, (IntExpr, FloatExpr, Condition)))
