"""Turns scheduled operations into the flat program: slots, allocation, reuse of dead memory, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch

from primtorch.frozen import record
from primtorch.symbolic import FloatExpr
from primtorch.symbolic.expr import IntExpr, constant, symbol
from torchinductor.codegen.base import CodegenBackend, KernelSource
from torchinductor.indexing import Index
from torchinductor.ir import Buffer, Bundle, Kernel, Template, loops_of
from torchinductor.lowering.context import ExternCall, Operation, ScalarRead, SeedCall, ViewRef, same_strides
from torchinductor.lowering.graph import Lowered
from torchinductor.ownership import last_uses, owned_by_graph
from torchinductor.parts import NO_ORIGINS, Launched, Origins, parts_of
from torchinductor.program import (
    Alloc,
    AtenCall,
    Claim,
    Expect,
    Free,
    Instruction,
    Output,
    Program,
    RandomSeed,
    ReadScalar,
    Require,
    Size,
    Slot,
    SymbolInput,
    TensorInput,
    View,
)

Bytes: TypeAlias = tuple[torch.device, IntExpr]

_SHAPE, _SELECT = torch.ops.aten._shape_as_tensor.default, torch.ops.aten.select.int


@record
class Handle:
    """A generated kernel: the back end and the source that launch it, and its number among the built kernels."""

    backend: CodegenBackend
    source: KernelSource
    number: int


def _size(expr: IntExpr) -> Size:
    known = expr.as_int()
    return expr if known is None else known


def _sizes(index: Index) -> tuple[Size, ...]:
    return tuple(map(_size, index))


@lru_cache(maxsize=4096)
def _bytes_of(span: IntExpr, itemsize: int) -> IntExpr:
    return span * constant(itemsize)


@dataclass
class _Emitter:
    lowered: Lowered
    instructions: list[Instruction] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    count: int = 0
    dead: list[tuple[Bytes, int, torch.dtype]] = field(default_factory=list)
    symbols: dict[str, None] = field(default_factory=dict)  # those that have a value by now
    placed: list[tuple[int, Launched]] = field(default_factory=list)  # the instruction that runs each
    known: dict[Bytes, Bytes] = field(default_factory=dict)  # one of all that are equal

    def launch(self, operation: Launched, instruction: Instruction) -> None:
        """The instruction that runs a kernel or a call."""
        self.placed.append((len(self.instructions), operation))
        self.instructions.append(instruction)

    def new_slot(self) -> int:
        self.count += 1
        return self.count - 1

    def bytes_of(self, buffer: Buffer) -> Bytes:
        """What a buffer takes, more than its elements where rows are padded: one object for all that take as much."""
        found = buffer.device, _bytes_of(buffer.span, buffer.dtype.itemsize)
        return self.known.setdefault(found, found)

    def make(self, names: Sequence[str]) -> None:
        """Memory for buffers that nobody has written yet: dead ones of the same size first. The rest of the dead is
        freed before anything is allocated."""
        fresh = [name for name in names if name not in self.slots]
        waiting = [name for name in fresh if not self._reuse(name)]
        self.free_dead()
        for name in waiting:
            buffer = self.lowered.buffers[name]
            made = self.slots[name] = self.new_slot()
            shape, strides = _sizes(buffer.shape), _sizes(buffer.strides)
            self.instructions.append(Alloc(made, shape, strides, buffer.dtype, buffer.device))

    def _reuse(self, name: str) -> bool:
        buffer = self.lowered.buffers[name]
        wanted = self.bytes_of(buffer)
        place = next((i for i, (have, _, _) in enumerate(self.dead) if have is wanted), None)
        if place is None:
            return False
        _, slot, dtype = self.dead.pop(place)
        self.share(name, slot, dtype)
        self.instructions.append(Free(slot))
        return True

    def write_over(self, name: str, read: str) -> None:
        """Lays a buffer into the memory of one that a kernel reads for the last time."""
        buffer, operand = self.lowered.buffers[name], self.lowered.buffers[read]
        if read not in self.lowered.donated:
            self.share(name, self.slots[read], operand.dtype)
            return
        slot, made = self.slots[read], self.new_slot()
        self.slots[name] = made
        shape, strides = _sizes(buffer.shape), _sizes(buffer.strides)
        self.instructions.append(Claim(made, slot, shape, strides, buffer.dtype, buffer.device))

    def share(self, name: str, slot: int, dtype: torch.dtype) -> None:
        """Lays a buffer into the memory of a slot."""
        buffer = self.lowered.buffers[name]
        made = self.slots[name] = self.new_slot()
        view_dtype = None if dtype == buffer.dtype else buffer.dtype
        self.instructions.append(View(made, slot, _sizes(buffer.shape), _sizes(buffer.strides), 0, view_dtype))

    def free_dead(self) -> None:
        self.instructions += [Free(slot) for _, slot, _ in self.dead]
        self.dead.clear()

    def view(self, ref: ViewRef, temporary: list[int], exact: bool = False) -> int:
        """The slot of a view; a new one, listed in `temporary`, unless the view is the whole buffer: `exact`ly, or but
        for strides that address nothing."""
        self.make((ref.buffer,))  # nobody has written what `empty` gives
        buffer, slot = self.lowered.buffers[ref.buffer], self.slots[ref.buffer]
        if ref.shape == buffer.shape and not ref.offset.terms:
            same = ref.strides == buffer.strides
            if same or (not exact and same_strides(ref.shape, ref.strides, buffer.strides)):
                return slot
        made = self.new_slot()
        temporary.append(made)
        self.instructions.append(View(made, slot, _sizes(ref.shape), _sizes(ref.strides), _size(ref.offset)))
        return made

    def extern(self, call: ExternCall) -> None:
        temporary: list[int] = []

        def lift(arg: object) -> object:
            if isinstance(arg, ViewRef):
                return Slot(self.view(arg, temporary))
            if isinstance(arg, (tuple, list)):
                return type(arg)(lift(a) for a in arg)
            return _size(arg) if isinstance(arg, IntExpr) else arg

        args = tuple(lift(a) for a in call.args)
        kwargs = tuple((k, lift(v)) for k, v in call.kwargs)
        outputs: list[int | None] = []
        for name in call.outputs:
            if name is None:
                outputs.append(None)
            else:
                self.slots[name] = self.new_slot()
                outputs.append(self.slots[name])
        self.launch(call, AtenCall(call.op, args, kwargs, tuple(outputs)))
        self.instructions += [Free(t) for t in temporary]
        for name in call.outputs:
            if name is not None:
                buffer = self.lowered.buffers[name]
                self.read_sizes(buffer)
                shape, strides = _sizes(buffer.shape), _sizes(buffer.strides)
                self.instructions.append(Expect(self.slots[name], shape, strides, str(call.op), call.frames))

    def read_sizes(self, buffer: Buffer) -> None:
        """Gives the symbols of an operator's result that only the data told their values."""
        for dim, size in enumerate(buffer.shape):
            names = size.symbols()
            if size.as_int() is not None or len(names) != 1 or size != symbol(*names) or names <= self.symbols.keys():
                continue
            (name,) = names
            if name in self.lowered.definitions:
                continue
            shape, place = self.new_slot(), self.new_slot()
            self.instructions.append(AtenCall(_SHAPE, (Slot(self.slots[buffer.name]),), (), (shape,)))
            self.instructions.append(AtenCall(_SELECT, (Slot(shape), 0, dim), (), (place,)))
            self.instructions += [ReadScalar(name, place), Free(place), Free(shape)]
            self.tell(name)

    def tell(self, name: str) -> None:
        """Notes that a symbol has a value from now on, and has what is required of it checked."""
        before = self._known()
        self.symbols[name] = None
        known = self._known()
        for condition, frames in self.lowered.requirements:
            if condition.symbols() <= known and not condition.symbols() <= before:
                self.instructions.append(Require(condition, frames))

    def _known(self) -> set[str]:
        """Symbols that have a value by now, those included that are computed from others."""
        known = set(self.symbols)
        for name, definition in self.lowered.definitions.items():  # each behind those that it is computed from
            if set().union(*(arg.symbols() for arg in definition.args)) <= known:
                known.add(name)
        return known


def emit(
    lowered: Lowered,
    operations: Sequence[Operation],
    handles: Mapping[str, Handle],
    reuse: bool,
    origins: Origins = NO_ORIGINS,
) -> Program:
    """The program of scheduled operations, without the kernels as built. `handles` maps kernels' names to their
    generated code; `origins` says where the graph's nodes come from."""
    emitter = _Emitter(lowered)
    inputs = [_input(emitter, lowered, item.name, item.buffer, item.symbol) for item in lowered.inputs]
    emitter.symbols.update((i.symbol, None) for i in inputs if isinstance(i, SymbolInput) and i.symbol is not None)
    constants = []
    for name, tensor in lowered.constants.items():
        emitter.slots[name] = emitter.new_slot()
        constants.append((emitter.slots[name], tensor))
    last = last_uses(operations)
    kept = {v.buffer for v in lowered.outputs if isinstance(v, ViewRef)} | set(lowered.constants)
    owned = owned_by_graph(operations)
    dying: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            dying.setdefault(position, []).append(name)
    for position, operation in enumerate(operations):
        _emit_one(emitter, operation, handles)
        lives_on = (
            {read for _, read in operation.in_place} if isinstance(operation, (Kernel, Template, Bundle)) else set()
        )
        for name in dying.get(position, ()):
            buffer = lowered.buffers[name]
            slot = emitter.slots[name]
            if reuse and name in owned and name not in lives_on and not isinstance(operation, ExternCall):
                emitter.dead.append((emitter.bytes_of(buffer), slot, buffer.dtype))
            else:
                emitter.instructions.append(Free(slot))
    emitter.free_dead()
    emitter.instructions.append(_output(emitter, lowered))
    return Program(
        tuple(inputs),
        tuple(emitter.symbols),
        emitter.count,
        tuple(constants),
        tuple(emitter.instructions),
        definitions=lowered.definitions,
        parts=parts_of(emitter.placed, lowered.buffers, origins, emitter.instructions),
    )


def _emit_one(emitter: _Emitter, operation: Operation, handles: Mapping[str, Handle]) -> None:
    match operation:
        case Kernel() | Template():
            handle, slots = handles[operation.name], _places(emitter, operation)
            emitter.launch(
                operation, handle.backend.instruction(loops_of(operation), handle.source, handle.number, slots)
            )
        case Bundle():
            handle, slots = handles[operation.name], _places(emitter, operation)
            emitter.launch(operation, handle.backend.bundle_instruction(operation, handle.source, handle.number, slots))
        case ExternCall():
            emitter.free_dead()
            emitter.extern(operation)
        case SeedCall(_, output, device):
            emitter.free_dead()
            emitter.slots[output] = emitter.new_slot()
            emitter.instructions.append(RandomSeed(emitter.slots[output], device))
        case ScalarRead(_, name, source):
            emitter.free_dead()
            temporary: list[int] = []
            emitter.instructions.append(ReadScalar(name, emitter.view(source, temporary)))
            emitter.tell(name)
            emitter.instructions += [Free(t) for t in temporary]


def _places(emitter: _Emitter, operation: Kernel | Template | Bundle) -> tuple[int, ...]:
    """The slots of a launch's arguments, with memory for what it writes."""
    for written, read in operation.in_place:
        emitter.write_over(written, read)
    emitter.make(operation.arguments)
    return tuple(emitter.slots[b] for b in operation.arguments)


def _input(
    emitter: _Emitter, lowered: Lowered, name: str, buffer_name: str | None, symbol: str | None
) -> TensorInput | SymbolInput:
    if buffer_name is None:
        return SymbolInput(name, symbol)
    buffer = lowered.buffers[buffer_name]
    slot = emitter.slots[buffer_name] = emitter.new_slot()
    return TensorInput(name, slot, buffer.dtype, buffer.device, _sizes(buffer.shape), _sizes(buffer.strides))


def _output(emitter: _Emitter, lowered: Lowered) -> Output:
    values: list[Slot | Size | FloatExpr | float | None] = []
    for value in lowered.outputs:
        if isinstance(value, ViewRef):
            values.append(Slot(emitter.view(value, [], exact=True)))
        else:
            values.append(_size(value) if isinstance(value, IntExpr) else value)
    return Output(tuple(values))
