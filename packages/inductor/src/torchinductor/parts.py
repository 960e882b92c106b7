"""What the parts of a program are to a person: names, the user's lines, bytes, and the memory of the whole.

All of it is known when the program is made; a call costs nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx

from primtorch.ledger import own_line
from primtorch.once import cached_property
from primtorch.prims import PRIMS
from primtorch.schemas import UserFrame
from primtorch.symbolic import expr_of, hint_of
from torchinductor.cost import bytes_of, value_of
from torchinductor.ir import Buffer, Bundle, Kernel, Template, loops_of
from torchinductor.lowering.context import ExternCall
from torchinductor.program import (
    Alloc,
    AtenCall,
    Free,
    Instruction,
    KernelCall,
    Output,
    Part,
    Program,
    RandomSeed,
    Size,
    Slot,
    TensorInput,
    TritonCall,
    View,
)
from torchinductor.schemas import Memory

Launched: TypeAlias = Kernel | Template | Bundle | ExternCall

_NAMED = 4  # operators that a part's name tells
_SILENT = frozenset({"output", "clone", "alias", "detach", "getitem"})  # what says nothing of a kernel that does more
_COMMON = frozenset({"add", "sub", "mul", "div", "neg", "where", "full", "iota", "convert_element_type"})  # or little


@dataclass(frozen=True)
class Origins:
    """Where a graph comes from: the line behind each node, by the node's name, the nodes that each computes with,
    and sizes' values in the example. A size that only the data tells has none.
    """

    lines: Mapping[str, UserFrame] = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(gm: fx.GraphModule) -> Origins:
        """Those of a graph's nodes, read off their metadata."""
        lines, inputs, sizes = {}, {}, {}
        for node in gm.graph.nodes:
            line = own_line(node.meta.get("stack", ()))
            if line is not None:
                lines[node.name] = line
            if node.op == "call_function":
                inputs[node.name] = tuple(source.name for source in node.all_input_nodes)
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and node.op == "placeholder":
                size, (hint, known) = expr_of(value), _hint(value)
                if known and len(size.symbols()) == 1 and str(size) in size.symbols():
                    sizes[str(size)] = hint
        return Origins(lines, inputs, sizes)

    def behind(self, nodes: Sequence[str], stored: Set[str]) -> list[str]:
        """These nodes, and those that are computed where these read them: nothing stores them."""
        found = dict.fromkeys(nodes)
        waiting = list(nodes)
        while waiting:
            fresh = [name for name in self.inputs.get(waiting.pop(), ()) if name not in found and name not in stored]
            found.update(dict.fromkeys(fresh))
            waiting += fresh
        return sorted((name for name in found if name in self._order), key=self._order.__getitem__)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.inputs)}


NO_ORIGINS = Origins()


def _hint(value: torch.SymInt) -> tuple[int, bool]:
    try:
        return hint_of(value), True
    except ValueError:
        return 0, False


def parts_of(
    placed: Iterable[tuple[int, Launched]],
    buffers: Mapping[str, Buffer],
    origins: Origins,
    instructions: Sequence[Instruction],
) -> tuple[Part, ...]:
    """The parts of a program, from its instructions, and its operations with the place of each one's."""
    placed = tuple(placed)
    stored = {node for _, operation in placed for node in _origins(operation)}
    called = {node for _, operation in placed if isinstance(operation, ExternCall) for node in operation.origins}
    found = []
    for number, (position, operation) in enumerate(placed):
        if isinstance(operation, ExternCall):
            name = _operator(str(operation.op))
            line = own_line(operation.frames)
            frames: tuple[UserFrame, ...] = () if line is None else (line,)
            read = sum(_whole(buffers[b], origins) for b in operation.reads)
            written = sum(_whole(buffers[b], origins) for b in operation.outputs if b is not None)
        else:
            loops = operation.parts if isinstance(operation, Bundle) else (loops_of(operation),)
            nodes = origins.behind(_computed(_origins(operation), called, origins, stored), stored)
            name = _stem(nodes)
            frames = tuple(dict.fromkeys(origins.lines[node] for node in nodes if node in origins.lines))
            read, written = _traffic(loops, origins)
        launch = instructions[position]
        function = launch.name if isinstance(launch, (KernelCall, TritonCall)) else ""
        generated = not isinstance(operation, ExternCall)
        found.append(Part(position, f"{name}_{number}", generated, frames, read, written, function))
    return tuple(found)


def _computed(nodes: Sequence[str], called: Set[str], origins: Origins, stored: Set[str]) -> list[str]:
    """The nodes that a kernel computes: one that bears a call's name stores what the call takes."""
    found: dict[str, None] = {}
    for node in nodes:
        operands = [name for name in origins.inputs.get(node, ()) if name not in stored]
        found.update(dict.fromkeys(operands if node in called else (node,)))
    return list(found)


def _origins(operation: Launched) -> tuple[str, ...]:
    return operation.loops.origins if isinstance(operation, Template) else operation.origins


def _operator(text: str) -> str:
    """`mm` of `aten.mm.default`; as it is, in one word, what is no overload."""
    parts = text.split(".")
    return parts[1] if len(parts) == 3 else re.sub(r"\W+", "_", text)[:40].strip("_") or "call"


def _stem(nodes: Sequence[str]) -> str:
    """A few of a kernel's operators: those that say most of it, in the order in which they run."""
    plain = list(dict.fromkeys(map(_plain, nodes)))
    named = [name for name in plain if name not in _SILENT and not (name in PRIMS and PRIMS[name].family == "view")]
    telling = [name for name in named if name not in _COMMON]
    return "_".join((telling or named)[:_NAMED]) or "copy"


def _plain(node: str) -> str:
    """A node's name without what tells it from others."""
    name, _, number = node.rpartition("_")
    return (name if number.isdecimal() else node).removesuffix("_default")


def _traffic(kernels: Iterable[Kernel], origins: Origins) -> tuple[int, int]:
    """Bytes read and written; a place that is both counts as both."""
    read = written = 0
    for kernel in kernels:
        for name, count in bytes_of(kernel, origins.sizes).items():
            read += count if name in kernel.reads and name not in kernel.local else 0
            written += count if name in kernel.writes and name not in kernel.local else 0
    return read, written


def _whole(buffer: Buffer, origins: Origins) -> int:
    span = value_of(buffer.span, origins.sizes)
    return 0 if span is None else span * buffer.dtype.itemsize


def memory_of(program: Program, sizes: Mapping[str, int]) -> Memory:
    """The memory of a program: its instructions say when each piece comes and goes."""
    owner: dict[int, int] = {}  # slot -> the slot that its memory was made for
    nbytes: dict[int, int] = {}
    views: dict[int, int] = {}
    written = {part.position: part.written for part in program.parts}
    live = peak = inputs = 0
    for item in program.inputs:
        if isinstance(item, TensorInput):
            inputs += _span(item.shape, item.strides, sizes) * item.dtype.itemsize
    for position, instruction in enumerate(program.instructions):
        for slot, count in _made(position, instruction, written, sizes):
            owner[slot], nbytes[slot], views[slot] = slot, count, 1
            live += count
        match instruction:
            case View(dst, src) if src in owner:
                owner[dst] = owner[src]
                views[owner[src]] += 1
            case Free(slot) if slot in owner:
                made = owner.pop(slot)
                views[made] -= 1
                live -= nbytes[made] if not views[made] else 0
        peak = max(peak, live)
    last = program.instructions[-1] if program.instructions else None
    values = last.values if isinstance(last, Output) else ()
    returned = {owner[v.index] for v in values if isinstance(v, Slot) and v.index in owner}
    return Memory(peak, sum(nbytes[slot] for slot in returned), inputs)


def _made(
    position: int, instruction: object, written: Mapping[int, int], sizes: Mapping[str, int]
) -> Iterator[tuple[int, int]]:
    """(slot, bytes) of what an instruction makes."""
    match instruction:
        case Alloc(dst, shape, strides, dtype):
            yield dst, _span(shape, strides, sizes) * dtype.itemsize
        case RandomSeed(dst):
            yield dst, torch.int64.itemsize
        case AtenCall(_, _, _, dsts):
            made = [dst for dst in dsts if dst is not None]
            yield from ((dst, written.get(position, 0) // len(made)) for dst in made)


def _span(shape: Sequence[Size], strides: Sequence[Size], sizes: Mapping[str, int]) -> int:
    """Elements from the first to the last; none where a size is not known."""
    last = 1
    for size, stride in zip(shape, strides, strict=True):
        count, step = value_of(size, sizes), value_of(stride, sizes)
        if count is None or step is None or count == 0:
            return 0
        last += (count - 1) * step
    return last
