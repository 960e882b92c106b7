"""Replays a program as one CUDA graph, so that the host launches once a call.

A program is run as it is at its first call, recorded at the second, and replayed from then on. Inputs that stayed
where they were (parameters, another graph's results) are read in place; the others are copied to fixed memory first.
What moved only once is read in place again: a backward's inputs move when its forward begins to be replayed.

Results lie in the graph's own memory. While anybody holds a result of the last replay, the next call runs the program
as it is: a result is never overwritten under its holder. A small result that was held so (a loop's `loss` and `output`
live until the next call has returned) is given out as a copy from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from primtorch import forks
from primtorch.frozen import record

from .program import (
    Alloc,
    AtenCall,
    KernelCall,
    Program,
    RandomSeed,
    ReadScalar,
    Run,
    SymbolInput,
    Value,
    View,
)

MAX_GRAPHS = 8  # of a program: one for each set of sizes and each stream
MAX_RECORDINGS = 8  # of one graph: each learns which further inputs move, or move no longer
MAX_SETTLED = 2  # recordings of one graph because inputs move no longer
COPIED_RESULT = 64 << 20  # bytes of a result that is rather copied than waited for

Replay = Callable[[], object]


class GraphDevice(Protocol):
    """What records a run of kernels."""

    def stream(self) -> int | None:
        """Identifies the current stream; None where nothing can be recorded or replayed on it."""

    def record(self, run: Callable[[], list[Value]]) -> tuple[Replay, list[Value]]:
        """Runs once without effect; returns what repeats it, and the results, which each replay writes again."""


class CudaDevice:
    """CUDA graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> int | None:
        """The current stream's handle."""
        index = self.device.index or 0
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.stream()
        if torch.cuda.is_current_stream_capturing():
            return None
        return int(torch._C._cuda_getCurrentRawStream(index))  # type: ignore[attr-defined]

    def record(self, run: Callable[[], list[Value]]) -> tuple[Replay, list[Value]]:
        """Raises RuntimeError where CUDA records no such run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs


@dataclass(slots=True)
class GraphRuns:
    """How a program's calls were made: counts that grow, and why calls ran without a graph."""

    recorded: int = 0
    replayed: int = 0
    plain: Counter[str] = field(default_factory=Counter)


def refusal(program: Program) -> str | None:
    """Why a program cannot be a CUDA graph; None if it can."""
    for item in program.inputs:
        if not isinstance(item, SymbolInput) and item.device.type != "cuda":
            return f"input {item.name} is on {item.device.type}"
    if any(tensor.device.type != "cuda" for _, tensor in program.constants):
        return "a constant is not on the GPU"
    if _first_written_input(program) is not None:
        return "an input is written"
    for instruction in program.instructions:
        match instruction:
            case Alloc(_, _, _, _, device) | RandomSeed(_, device) if device.type != "cuda":
                return f"it allocates on {device.type}"
            case KernelCall():
                return "it has kernels for the CPU"
            case ReadScalar():
                return "it reads a number back from the GPU"
            case AtenCall(op) if not isinstance(op, torch._ops.OpOverload):
                return "it calls Python"
            case AtenCall(op) if isinstance(op, torch._ops.OpOverload) and {
                torch.Tag.dynamic_output_shape,
                torch.Tag.data_dependent_output,
            } & set(op.tags):
                return f"the shape of {op}'s result depends on data"
    return None


def _first_written_input(program: Program) -> int | None:
    """The slot of an input whose memory some call writes. A kernel writes over an input that its result replaces, and
    the result says so."""
    owners = {i.slot: i.slot for i in program.inputs if not isinstance(i, SymbolInput)}
    for instruction in program.instructions:
        match instruction:
            case Alloc(dst):
                owners.pop(dst, None)
            case View(dst, src):
                owners.pop(dst, None)
                if src in owners:
                    owners[dst] = owners[src]
            case AtenCall(op, args) if isinstance(op, torch._ops.OpOverload):
                for given, argument in zip(args, op._schema.arguments, strict=False):
                    slot = getattr(given, "index", None)
                    if argument.alias_info is not None and argument.alias_info.is_write and slot in owners:
                        return owners[slot]
    return None


@dataclass(slots=True)
class _Seen:
    """A key that has been run once."""

    addresses: list[int]
    moving: set[int] = field(default_factory=set)  # inputs that do not stay where they were
    recordings: int = 0
    settled: int = 0  # recordings because inputs stayed again
    given_away: set[int] = field(default_factory=set)  # results that callers hold while they call again


@record
class _Copied:
    """An input that is copied before each replay."""

    input: int
    own: torch.Tensor  # the program's
    target: torch.Tensor  # what a copy writes to
    address: int  # where the input lay when the graph was recorded


@dataclass(slots=True)
class _Recorded:
    seen: _Seen
    replay: Replay
    fixed: list[tuple[int, int]]  # (input, address) of those read in place
    copied: list[_Copied]
    outputs: list[Value]
    passed: dict[int, int]  # output -> input that it is
    holds: list[tuple[torch.UntypedStorage, int, list[int]]]
    """Results' memory, how many hold it when only the graph does, and the results that lie there."""

    def held(self) -> bool:
        """Whether somebody holds a result. One that is small and alone in its memory is copied from now on."""
        found = [(storage, places) for storage, count, places in self.holds if _holders(storage) > count]
        for storage, places in found:
            if len(places) == 1 and storage.nbytes() <= COPIED_RESULT:
                self.seen.given_away.update(places)
        return bool(found)

    def settled(self, inputs: list[Value]) -> set[int]:
        """The inputs that are copied although they lie where they did when the graph was recorded, if these are most of
        what is copied."""
        same = [c for c in self.copied if _address(inputs[c.input]) == c.address]
        bytes_of = lambda copies: sum(c.target.nbytes for c in copies)
        return {c.input for c in same} if 2 * bytes_of(same) > bytes_of(self.copied) else set()


_FIRST = "first call"


class GraphedProgram:
    """Takes the place of a prepared program: call it with a list of inputs. Safe to call from several threads."""

    def __init__(
        self, program: Program, run: Run, device: GraphDevice, passed_by: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`passed_by` is told why a call ran without a graph, other than the first of its sizes."""
        self.runs = GraphRuns()
        self._passed_by = passed_by
        self._run = run
        self._device = device
        self._tensors = [i for i, item in enumerate(program.inputs) if not isinstance(item, SymbolInput)]
        self._symbols = [i for i, item in enumerate(program.inputs) if isinstance(item, SymbolInput)]
        self._states: dict[tuple[object, ...], _Seen | _Recorded | str] = {}
        self._lock = forks.lock()

    def consume(self, inputs: list[Value]) -> list[Value]:
        """As a call, but the list is emptied."""
        values = list(inputs)
        inputs.clear()
        return self(values)

    def __call__(self, inputs: list[Value]) -> list[Value]:
        if not self._lock.acquire(blocking=False):
            return self._plain(inputs, "another thread is in the graph")
        try:
            return self._locked(inputs)
        finally:
            self._lock.release()

    def _plain(self, inputs: list[Value], reason: str) -> list[Value]:
        self.runs.plain[reason] += 1
        if reason != _FIRST:
            self._passed_by(reason)
        return self._run(inputs)

    def _locked(self, inputs: list[Value]) -> list[Value]:
        stream = self._device.stream()
        if stream is None:
            return self._plain(inputs, "the caller is recording a graph")
        key = (stream, *(inputs[i] for i in self._symbols))
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= MAX_GRAPHS:
                return self._plain(inputs, "too many sizes or streams")
            self._states[key] = _Seen(self._addresses(inputs))
            return self._plain(inputs, _FIRST)
        if isinstance(state, str):
            return self._plain(inputs, state)
        if isinstance(state, _Recorded):
            moved = {i for i, address in state.fixed if _address(inputs[i]) != address}
            seen = state.seen
            stayed = state.settled(inputs) if not moved and seen.settled < MAX_SETTLED else set()
            if not moved and (not stayed or seen.recordings >= MAX_RECORDINGS or state.held()):
                return self._replay(state, inputs)
            if moved and (seen.recordings >= MAX_RECORDINGS or state.held()):
                return self._plain(inputs, "an input moved")
            seen.moving = (seen.moving | moved) - stayed
            seen.settled += bool(stayed)
            seen.addresses = self._addresses(inputs)
            state = seen
        return self._record(key, state, inputs)

    def _addresses(self, inputs: list[Value]) -> list[int]:
        return [_address(inputs[i]) for i in self._tensors]

    def _record(self, key: tuple[object, ...], seen: _Seen, inputs: list[Value]) -> list[Value]:
        now = self._addresses(inputs)
        seen.moving |= {i for i, old, new in zip(self._tensors, seen.addresses, now, strict=True) if old != new}
        seen.recordings += 1
        given = list(inputs)
        copied: list[_Copied] = []
        for i in seen.moving:
            moving = inputs[i]
            if isinstance(moving, torch.Tensor):
                own, target = _double(moving)
                given[i] = own
                copied.append(_Copied(i, own, target, _address(moving)))
        try:
            replay, outputs = self._device.record(lambda: self._run(given))
        except RuntimeError as error:
            self._states[key] = reason = f"recording failed: {error}"
            return self._plain(inputs, reason)
        positions = {id(t): i for i, t in enumerate(given) if isinstance(t, torch.Tensor)}
        results = list(enumerate(outputs))
        passed = {o: positions[id(t)] for o, t in results if id(t) in positions}
        made = [t for o, t in results if o not in passed and isinstance(t, torch.Tensor)]
        memory = {c.own.untyped_storage().data_ptr() for c in copied}
        if any(t.untyped_storage().data_ptr() in memory for t in made if t.numel()):
            self._states[key] = reason = "a result is a view of an input that moves"
            return self._plain(inputs, reason)
        theirs = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        fresh: dict[int, tuple[torch.UntypedStorage, list[int]]] = {}
        for o, t in results:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in theirs:
                fresh.setdefault(t.untyped_storage().data_ptr(), (t.untyped_storage(), []))[1].append(o)
        fixed = [(i, a) for i, a in zip(self._tensors, now, strict=True) if i not in seen.moving]
        state = _Recorded(seen, replay, fixed, copied, outputs, passed, [])
        state.holds = [(s, _holders(s), places) for s, places in fresh.values()]
        self._states[key] = state
        self.runs.recorded += 1
        return self._replay(state, inputs)

    def _replay(self, state: _Recorded, inputs: list[Value]) -> list[Value]:
        if state.held():
            return self._plain(inputs, "a result of the last replay is still held")
        if state.copied:
            with torch.no_grad():
                for c in state.copied:
                    _fill(c.own, c.target, inputs[c.input])
        state.replay()
        self.runs.replayed += 1
        results: list[Value] = []
        for position, output in enumerate(state.outputs):
            if position in state.passed:
                results.append(inputs[state.passed[position]])
            elif isinstance(output, torch.Tensor) and position in state.seen.given_away:
                with torch.no_grad():
                    own, target = _double(output)
                    _fill(own, target, output)
                results.append(own)
            else:
                results.append(output.detach() if isinstance(output, torch.Tensor) else output)
        return results


def _address(value: Value) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def _fill(own: torch.Tensor, target: torch.Tensor, source: Value) -> None:
    """Writes a tensor's elements to its double."""
    assert isinstance(source, torch.Tensor)
    target.copy_(_dense(source) if target is not own else source)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last."""
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach if tensor.numel() else 0,), (1,))


def _double(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of its own for a tensor of the same layout, and the tensor through which it is filled."""
    if not _overlaps(tensor):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made, made
    line = torch.empty_like(_dense(tensor))
    return line.as_strided(tensor.shape, tensor.stride()), line
