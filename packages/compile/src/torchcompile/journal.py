"""What was compiled in this process: the facts behind `torchcompile.report()` beside those of the ledger."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from primtorch import forks
from primtorch.frozen import record
from primtorch.schemas import UserFrame
from torchcompile.dumps import DumpFolder, Text
from torchinductor import NO_MEMORY, CompiledGraph, Memory, Part, label_of

Kind = Literal["forward", "backward", "inference"]


@record
class CapturedGraphRecord:
    """One graph as it was captured. `lines`: the user's lines behind its operators, each once, in order."""

    title: str
    operators: int
    lines: tuple[UserFrame, ...]


@record
class CompiledGraphRecord:
    """One graph that was turned into kernels.

    Attributes:
        seconds: wall time of lowering, code generation and building.
        parts: its kernels and calls in order, with the user's lines and the bytes that they move.
        memory: bytes that a call takes, at the sizes of the example.
    """

    title: str
    kind: Kind
    prims: int
    kernels: int
    aten_calls: int
    seconds: float
    cache_hits: int
    parts: tuple[Part, ...] = ()
    memory: Memory = NO_MEMORY

    def label(self, part: Part) -> str:
        """What profilers call a part."""
        return label_of(f"{self.title} {self.kind}", part)


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of a compilation. `lane`: the graph, or one half of it; times are those of time.perf_counter."""

    lane: str
    stage: str
    began: float
    ended: float


@record
class StageRecord:
    """One stage of a graph's backward, which gives the gradients of one of DistributedDataParallel's buckets.

    Attributes:
        planned: the reducer had not made its buckets yet; these are those that it will make.
    """

    title: str
    stage: int
    bucket: int
    parameters: tuple[str, ...]
    nbytes: int
    planned: bool


@record
class PieceRecord:
    """One piece of a graph that several back ends share.

    Attributes:
        number: the pieces of a graph run in this order.
        backend: "PyTorch" for pieces of views alone.
        operators: each with how often it occurs.
        why: it went there.
        lines: of the user's, as "file:line".
    """

    title: str
    kind: Kind
    number: int
    backend: str
    operators: tuple[tuple[str, int], ...]
    why: str
    lines: tuple[str, ...]

    @property
    def listed(self) -> str:
        """The operators on one line."""
        return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in self.operators)

    def __str__(self) -> str:
        return f"{self.title} {self.kind} piece {self.number}: {self.backend} ({self.why}): {self.listed}"


class Journal:
    """The last `limit` of each kind of record. Safe under threads; `clear()` belongs to `torchcompile.reset()`."""

    def __init__(self, limit: int = 10_000) -> None:
        self._lock = forks.lock()
        self._graphs: deque[CompiledGraphRecord] = deque(maxlen=limit)
        self._stages: deque[StageRecord] = deque(maxlen=limit)
        self._spans: deque[Span] = deque(maxlen=limit)
        self._captured: deque[CapturedGraphRecord] = deque(maxlen=limit)
        self._programs: dict[tuple[str, Kind], weakref.ref[CompiledGraph]] = {}  # compiled code lives as ever
        self._dumps: dict[DumpFolder, None] = {}
        self._seconds: dict[str, float] = {}  # measured, by the part's label
        self._pieces: deque[PieceRecord] = deque(maxlen=limit)
        self.bandwidth: float | None = None
        self._captures = 0

    def next_title(self) -> str:
        """`graph_N`, N counting the captured graphs of this process since the last reset."""
        with self._lock:
            self._captures += 1
            return f"graph_{self._captures - 1}"

    def captured(self, record: CapturedGraphRecord) -> None:
        """Keeps what was captured."""
        with self._lock:
            self._captured.append(record)

    def add(self, record: CompiledGraphRecord, compiled: CompiledGraph | None = None) -> None:
        """Keeps what became of a graph."""
        with self._lock:
            self._graphs.append(record)
            if compiled is not None:
                self._programs[record.title, record.kind] = weakref.ref(compiled)

    def span(self, lane: str, stage: str, began: float, ended: float) -> None:
        """Keeps when a stage ran."""
        with self._lock:
            self._spans.append(Span(lane, stage, began, ended))

    def dumped_to(self, dumps: DumpFolder) -> None:
        """Remembers whose files are stages of this process."""
        with self._lock:
            self._dumps[dumps] = None

    def measured(self, seconds: Mapping[str, float], bandwidth: float | None) -> None:
        """Keeps what parts were measured to take, by label, and the bytes a second that the machine copies."""
        with self._lock:
            self._seconds.update(seconds)
            self.bandwidth = bandwidth or self.bandwidth

    def texts(self) -> tuple[Text, ...]:
        """Every stage that was dumped; where none was, what compiled code holds anyway: its program, and its source."""
        with self._lock:
            dumps, programs = tuple(self._dumps), tuple(self._programs.items())
            titles = {record.title for record in self._captured}
        found = [text for folder in dumps for text in folder.texts(titles)]
        dumped = {text.title for text in found}
        for (title, kind), reference in programs:
            compiled = reference()
            if compiled is None or title in dumped:
                continue
            found.append(Text(f"{title}_{kind}_program.txt", title, f"{compiled.program}\n"))
            found += (Text(f"{title}_{kind}_{name}", title, text) for name, text in compiled.sources.items())
        return tuple(found)

    def place(self, records: Sequence[PieceRecord]) -> None:
        """Keeps which back end got which pieces of a graph."""
        with self._lock:
            self._pieces.extend(records)

    def split(self, title: str, stages: Sequence[StageRecord]) -> None:
        """Keeps the stages that a graph's backward has from now on, for the parameters in them: modules that are built
        alike share a graph."""
        named = {name for stage in stages for name in stage.parameters}
        with self._lock:
            left = [r for r in self._stages if r.title != title or named.isdisjoint(r.parameters)]
            self._stages.clear()
            self._stages.extend((*left, *stages))

    @property
    def stages(self) -> Sequence[StageRecord]:
        """The stages of each backward that comes in several."""
        with self._lock:
            return tuple(self._stages)

    @property
    def pieces(self) -> Sequence[PieceRecord]:
        """The pieces of graphs that several back ends share."""
        with self._lock:
            return tuple(self._pieces)

    @property
    def graphs(self) -> Sequence[CompiledGraphRecord]:
        """What became of each compiled graph, in order."""
        with self._lock:
            return tuple(self._graphs)

    @property
    def all_captured(self) -> Sequence[CapturedGraphRecord]:
        """What was captured, in order."""
        with self._lock:
            return tuple(self._captured)

    @property
    def spans(self) -> Sequence[Span]:
        """When each stage ran, in order."""
        with self._lock:
            return tuple(self._spans)

    @property
    def seconds(self) -> Mapping[str, float]:
        """What parts were last measured to take, by label."""
        with self._lock:
            return dict(self._seconds)

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._captures

    def clear(self) -> None:
        """Forgets all of it."""
        with self._lock:
            self._graphs.clear()
            self._stages.clear()
            self._spans.clear()
            self._captured.clear()
            self._programs.clear()
            self._seconds.clear()
            self._pieces.clear()
            self._captures = 0
