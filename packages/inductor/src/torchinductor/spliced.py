"""Programs of regions within the program that calls them: `InvokeSubgraph` costs nothing when it runs.

A region is compiled once, as a program of its own. Wherever the graph calls it, that program's instructions are put in
the place of the call, over slots of the program around it; kernels and constants are there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from primtorch.frozen import record
from torchinductor.codegen.base import KernelSource
from torchinductor.program import (
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
    Slot,
    SymbolInput,
    TensorInput,
    TritonCall,
    View,
)

Sources = tuple[tuple[str, tuple[KernelSource, ...]], ...]
"""What a program's kernels are built of: what is built together, by device type."""


@record
class Region:
    """A compiled region."""

    program: Program
    sources: Sources


RegionOf = Callable[[Callable[..., object]], Region | None]  # what a call runs, if that is a region


def spliced(program: Program, sources: Sources, region_of: RegionOf) -> tuple[Program, Sources]:
    """The program with the regions that it calls in it, and the sources of all. A call stays a call where the region
    reads a number out of a tensor, or is given other numbers than those that it was compiled for."""
    found = {id(i.op): region_of(i.op) for i in program.instructions if isinstance(i, AtenCall)}
    regions = {id(region.program): region for region in found.values() if region is not None}
    if not regions:
        return program, sources
    splicing = _Splicing(program, [region.program for region in regions.values()])
    skipped: set[int] = set()
    for position, instruction in enumerate(program.instructions):
        region = found[id(instruction.op)] if isinstance(instruction, AtenCall) else None
        if position in skipped:
            continue
        if isinstance(instruction, AtenCall) and region is not None and _fits(region.program, instruction):
            skipped |= splicing.region(position, instruction, region.program)
        else:
            splicing.own(position, instruction)
    return splicing.finished(), (*sources, *(group for region in regions.values() for group in region.sources))


def _fits(region: Program, call: AtenCall) -> bool:
    """Whether a region's program can stand in the place of its call."""
    if len(call.args) != len(region.inputs) or any(isinstance(i, ReadScalar) for i in region.instructions):
        return False
    for item, arg in zip(region.inputs, call.args, strict=True):
        if isinstance(item, TensorInput) != isinstance(arg, Slot):
            return False
        if isinstance(item, SymbolInput) and item.symbol is not None and str(arg) != item.symbol:
            return False
    given = {item.slot for item in region.inputs if isinstance(item, TensorInput)} | {s for s, _ in region.constants}
    returned = [value.index for value in _output(region).values if isinstance(value, Slot)]
    distinct = len(set(returned)) == len(_output(region).values)
    return distinct and given.isdisjoint(returned)


def _output(program: Program) -> Output:
    last = program.instructions[-1]
    assert isinstance(last, Output)
    return last


class _Splicing:
    """The program that grows."""

    def __init__(self, program: Program, regions: Sequence[Program]) -> None:
        self.program = program
        self.kernels, self.launchers, self.keepalive = program.kernels, program.launchers, program.keepalive
        self.first = {id(program): (0, 0)}  # where the kernels and the launchers of each program begin
        for region in regions:
            self.first[id(region)] = len(self.kernels), len(self.launchers)
            self.kernels += region.kernels
            self.launchers += region.launchers
            self.keepalive += region.keepalive
        self.slots = program.num_slots
        self.instructions: list[Instruction] = []
        self.parts: list[Part] = []
        self.names = {part.name for part in program.parts}
        self.constants = list(program.constants)
        self.constant_slots: dict[int, dict[int, int]] = {}  # of regions: their slots of constants to the program's
        self.definitions = dict(program.definitions)

    def own(self, position: int, instruction: Instruction) -> None:
        """An instruction of the program around the regions."""
        self.parts += [
            replace(p, position=len(self.instructions)) for p in self.program.parts if p.position == position
        ]
        self.instructions.append(_over(instruction, lambda slot: slot, *self.first[id(self.program)]))

    def region(self, position: int, call: AtenCall, region: Program) -> set[int]:
        """A region's instructions in the place of its call. Gives the positions of what they do already."""
        slots = self._constants(region)
        held = set(slots)
        given: dict[int, int] = {}
        for item, arg in zip(region.inputs, call.args, strict=True):
            if isinstance(item, TensorInput) and isinstance(arg, Slot):
                given[item.slot] = arg.index
        freed = _freed_behind(self.program.instructions, position)
        once = {slot for slot in given.values() if list(given.values()).count(slot) == 1}
        dropped = {slot for slot in given if given[slot] not in freed or given[slot] not in once}
        results = [value.index for value in _output(region).values if isinstance(value, Slot)]
        slots |= given | {r: dst for r, dst in zip(results, call.dsts, strict=True) if dst is not None}

        def place(slot: int) -> int:
            if slot not in slots:
                slots[slot], self.slots = self.slots, self.slots + 1
            return slots[slot]

        done: set[int] = set()
        alive: dict[int, None] = {}
        for number, instruction in enumerate(region.instructions[:-1]):
            if isinstance(instruction, Free):
                alive.pop(instruction.slot, None)
                if instruction.slot in dropped:
                    continue
                if instruction.slot in given:
                    done.add(freed[given[instruction.slot]])
            self._parts(region, number)
            self.instructions.append(_over(instruction, place, *self.first[id(region)]))
            alive.update(dict.fromkeys(_written(instruction)))
        wanted = {r for r, dst in zip(results, call.dsts, strict=True) if dst is not None}
        self.instructions += [Free(place(slot)) for slot in alive if slot not in wanted and slot not in held]
        self.definitions |= region.definitions
        return done

    def _parts(self, region: Program, number: int) -> None:
        for part in region.parts:
            if part.position == number:
                name, count = part.name, 1
                while name in self.names:
                    count += 1
                    name = f"{part.name}_{count}"
                self.names.add(name)
                self.parts.append(replace(part, name=name, position=len(self.instructions)))

    def _constants(self, region: Program) -> dict[int, int]:
        if id(region) not in self.constant_slots:
            made = {}
            for slot, tensor in region.constants:
                made[slot] = self.slots
                self.constants.append((self.slots, tensor))
                self.slots += 1
            self.constant_slots[id(region)] = made
        return dict(self.constant_slots[id(region)])

    def finished(self) -> Program:
        """The whole program."""
        return replace(
            self.program,
            num_slots=self.slots,
            constants=tuple(self.constants),
            instructions=tuple(self.instructions),
            kernels=self.kernels,
            launchers=self.launchers,
            keepalive=self.keepalive,
            definitions=self.definitions,
            parts=tuple(self.parts),
        )


def _freed_behind(instructions: Sequence[Instruction], position: int) -> dict[int, int]:
    """The slots that are freed at once behind an instruction, and where."""
    found: dict[int, int] = {}
    for place in range(position + 1, len(instructions)):
        instruction = instructions[place]
        if isinstance(instruction, Free):
            found[instruction.slot] = place
        elif not isinstance(instruction, (Expect, Require)):
            break
    return found


def _written(instruction: Instruction) -> Iterable[int]:
    """The slots that an instruction fills."""
    match instruction:
        case Alloc(dst) | View(dst) | Claim(dst) | RandomSeed(dst):
            return (dst,)
        case AtenCall(dsts=dsts):
            return [dst for dst in dsts if dst is not None]
    return ()


def _over(
    instruction: Instruction,
    slot: Callable[[int], int],
    kernels: int,
    launchers: int,
) -> Instruction:
    """The instruction over other slots; `kernels`, `launchers`: where those of its program begin."""
    match instruction:
        case Alloc() | RandomSeed():
            return replace(instruction, dst=slot(instruction.dst))
        case Free() | Expect():
            return replace(instruction, slot=slot(instruction.slot))
        case View() | Claim():
            return replace(instruction, dst=slot(instruction.dst), src=slot(instruction.src))
        case ReadScalar():
            return replace(instruction, src=slot(instruction.src))
        case KernelCall():
            buffers = tuple(map(slot, instruction.buffers))
            return replace(instruction, kernel=kernels + instruction.kernel, buffers=buffers)
        case TritonCall():
            buffers = tuple(map(slot, instruction.buffers))
            return replace(instruction, kernel=launchers + instruction.kernel, buffers=buffers)
        case AtenCall():
            args = tuple(_value(arg, slot) for arg in instruction.args)
            kwargs = tuple((name, _value(arg, slot)) for name, arg in instruction.kwargs)
            dsts = tuple(None if dst is None else slot(dst) for dst in instruction.dsts)
            return AtenCall(instruction.op, args, kwargs, dsts)
        case Require():
            return instruction
        case Output():
            return Output(tuple(_value(value, slot) for value in instruction.values))


def _value(value: object, slot: Callable[[int], int]) -> Any:
    if isinstance(value, Slot):
        return Slot(slot(value.index))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_value(item, slot) for item in value)
    return value
