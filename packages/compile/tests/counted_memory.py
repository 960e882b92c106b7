"""The memory of a step on a GPU, counted without one: for tests, and for tools/bench/gpu_memory.py.

What a step computes is memory that nobody fills; its programs are planned for a GPU, and their instructions say when
each piece comes and goes. What is alive between them is asked of the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from counted_traffic import CUDA, Stand, memory_for, planning
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import torchcompile
import torchinductor
from torchinductor.compile import planned_program
from torchinductor.program import Alloc, AtenCall, Claim, Expect, Free, Instruction, Program, TensorInput, View
from torchinductor.source import on_device


@dataclass(frozen=True)
class Piece:
    """Memory that is alive at a graph's peak."""

    what: str
    nbytes: int


@dataclass(frozen=True)
class Peak:
    """The most that is alive while a program runs, and what that is, the largest first."""

    nbytes: int = 0
    at: str = ""
    pieces: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.nbytes / 2**20:10.1f} MiB at {self.at}"]
        return "\n".join(lines + [f"{p.nbytes / 2**20:10.1f} {p.what}" for p in self.pieces if p.nbytes >= 2**20])


@dataclass
class Held:
    """The storages of a step that were seen, whoever holds them."""

    known: dict[int, tuple[StorageWeakRef, Piece]] = field(default_factory=dict)

    def see(self, what: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known or self.known[key][0].expired():
            self.known[key] = (StorageWeakRef(storage), Piece(what, storage.nbytes()))

    def alive(self) -> dict[int, Piece]:
        return {key: piece for key, (ref, piece) in self.known.items() if not ref.expired()}


def peak_of(program: Program, held: Iterable[Piece], own: Mapping[int, Piece]) -> Peak:
    """The peak of a program's run. `held`: what others hold meanwhile. `own`: inputs that nobody else holds, by slot."""
    live: dict[int, Piece] = dict(own)
    owner = {slot: slot for slot in own}
    views = dict.fromkeys(own, 1)
    parts = {part.position: part for part in program.parts}
    now, most, at, pieces = sum(p.nbytes for p in own.values()), -1, "", ()
    labels = _labels(program)
    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Claim) and instruction.src not in own:
            instruction = Alloc(*(getattr(instruction, n) for n in ("dst", "shape", "strides", "dtype", "device")))
        for slot, nbytes in _made(program, position, instruction, parts.get(position)):
            live[slot], owner[slot], views[slot] = (
                Piece(f"{instruction_label(labels, position)} %{slot}", nbytes),
                slot,
                1,
            )
            now += nbytes
        match instruction:
            case View(dst, src) | Claim(dst, src) if src in owner:
                owner[dst] = owner[src]
                views[owner[src]] += 1
            case Free(slot) if slot in owner:
                made = owner.pop(slot)
                views[made] -= 1
                if not views[made]:
                    now -= live.pop(made).nbytes
        if now > most:
            most, at, pieces = now, instruction_label(labels, position), tuple(live.values())
    others = tuple(held)
    ordered = sorted((*others, *pieces), key=lambda p: -p.nbytes)
    return Peak(sum(p.nbytes for p in others) + most, at, tuple(ordered))


def _labels(program: Program) -> list[tuple[int, str]]:
    return [(part.position, part.name) for part in program.parts]


def instruction_label(labels: Sequence[tuple[int, str]], position: int) -> str:
    """The name of what runs at a position, or next behind it."""
    return next((name for place, name in labels if place >= position), "the end")


def _span(shape: Sequence[Any], strides: Sequence[Any]) -> int:
    return 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _made(program: Program, position: int, instruction: Instruction, part: Any) -> Iterator[tuple[int, int]]:
    """(slot, bytes) of what an instruction makes; the results of a call share what it writes by their elements."""
    match instruction:
        case Alloc(dst, shape, strides, dtype):
            yield dst, _span(shape, strides) * dtype.itemsize
        case AtenCall(_, _, _, dsts) if part is not None:
            behind = program.instructions[position : position + 4 * len(dsts) + 8]
            spans = {e.slot: _span(e.shape, e.strides) for e in behind if isinstance(e, Expect) and e.slot in dsts}
            whole = sum(spans.values())
            yield from ((slot, part.written * span // max(whole, 1)) for slot, span in spans.items())


def counted_memory(peaks: dict[str, Peak], held: Held) -> Callable[..., Any]:
    """Stands for `compile_graph`: notes a graph's peak under "forward", "backward" or "inference" when it runs."""

    def compile_graph(
        graph: fx.GraphModule, inputs: Sequence[Any], settings: Any, account: torchinductor.Account
    ) -> Any:
        program = planned_program(on_device(graph, CUDA))
        kind = account.title.rpartition(" ")[2]
        names = [node for node in graph.graph.nodes if node.op == "placeholder"]
        returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        slots = {item.name: item.slot for item in program.inputs if isinstance(item, TensorInput)}

        def run(values: list[Any]) -> list[Any]:
            given = dict(zip(names, values, strict=True))
            for node, value in given.items():
                if isinstance(value, torch.Tensor):
                    held.see(f"input {node.name} {tuple(value.shape)} {value.dtype}", value)
            before = held.alive()
            keys = {
                node.name: (value.untyped_storage()._cdata, value.data_ptr())
                for node, value in given.items()
                if isinstance(value, torch.Tensor)
            }
            own_results = {node: given[node] for node in returned if node in given}
            values.clear()
            given.clear()
            value = None
            left = held.alive()
            own = {slots[n]: before[key] for n, (key, _) in keys.items() if key not in left and n in slots}
            peak = peak_of(program, left.values(), own)
            if peak.nbytes > peaks.get(kind, Peak()).nbytes:
                peaks[kind] = peak
            made = [
                own_results[o] if o in own_results else memory_for(o.meta["val"]) if hasattr(o, "meta") else o
                for o in returned
            ]
            for node, result in zip(returned, made, strict=True):
                if isinstance(result, torch.Tensor):
                    held.see(f"result {node.name} of the {kind} {tuple(result.shape)} {result.dtype}", result)
            return made

        return Stand(consume=run, stats=torchinductor.GraphStats(0, 0, 0), kept=None)

    return compile_graph


def memory_of_step(
    net: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], train: bool = True, autocast: bool = True
) -> dict[str, Peak]:
    """The peaks of a step by kind of graph: parameters, inputs, results and gradients included."""
    peaks: dict[str, Peak] = {}
    held = Held()
    given = {
        "parameter": list(net.parameters()),
        "buffer": list(net.buffers()),
        "input": pytree.tree_leaves((args, kwargs)),
    }
    for what, tensors in given.items():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                held.see(f"{what} {tuple(tensor.shape)} {tensor.dtype}", tensor)
    with planning(counted_memory(peaks, held)):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), torch.set_grad_enabled(train):
            out = torchcompile.compile(net, fullgraph=True)(*args, **kwargs)
        if train:
            value = out if isinstance(out, torch.Tensor) else out.loss
            (value if value.dim() == 0 else value.float().sum()).backward()
    return peaks
