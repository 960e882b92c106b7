"""Where a call's time goes: each kernel and call of compiled code with its time, bytes and the user's lines."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Kernel
from torch.profiler import ProfilerActivity

from primtorch.frozen import record
from torchcompile import page
from torchcompile.errors import InvalidArgument
from torchcompile.journal import Journal
from torchcompile.page import PartRow, part_rows
from torchcompile.page.tables import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_COPIED = 1 << 26  # bytes that are copied to learn what the machine's memory allows: more than caches hold
_BEST_OF = 5


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        rows: kernels and calls of compiled code, those that took longest first; times are those of one run. The label
            of each is a row of torch.profiler, its `part.function` what the kernel is called there, in ncu and in perf.
        seconds: of one call of the function, without a profiler.
        bandwidth: bytes a second that the machine copies, read and written bytes together.
        device: whose memory that is.
        threads: that a kernel of the CPU may use.
    """

    rows: Sequence[PartRow]
    seconds: float
    bandwidth: float
    device: str
    threads: int
    calls: int

    @property
    def other(self) -> float:
        """Seconds of a call that no row accounts for: guards, autograd, what ran eagerly."""
        return max(0.0, self.seconds - sum((row.seconds or 0.0) * row.runs for row in self.rows))

    @property
    def notes(self) -> tuple[str, ...]:
        """How to read it."""
        on = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device == "cpu" else self.device
        return (
            f"A call takes {seconds_text(self.seconds)} (mean of {self.calls}), of which {seconds_text(self.other)} "
            "are in no row: guards, autograd, operators that ran eagerly.",
            f"This machine copies {bytes_text(self.bandwidth)} a second ({on}), read and written bytes together: the "
            "share of the memory's rate is a copy's time of as many bytes, through the row's time. More than 100 % "
            "came out of caches; matrix products compute more than they move, and have low ones.",
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Kernels and calls of compiled code", caption="\n".join(self.notes), caption_justify="left")
        for name in ("kernel or call", "runs"):
            table.add_column(name, overflow="fold", justify="left" if name != "runs" else "right")
        for name in ("time", "of the call", "bytes", "of memory's rate"):
            table.add_column(name, justify="right")
        table.add_column("your lines", overflow="fold")
        for row in self.rows:
            took = (row.seconds or 0.0) * row.runs
            cells = [f"{row.runs:g}", seconds_text(row.seconds), share_text(took / self.seconds)]
            cells += (bytes_text(row.part.moved), share_text(row.share), escape(row.lines))
            table.add_row(Text(row.label).append(f"\n{row.part.function}".rstrip(), style="dim"), *cells)
        yield table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with a picture and a table; written to `path`, too, if given."""
        text = page.render_profile("Where the time goes", self.notes, self.rows, self.other)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def profiled(journal: Journal, call: Callable[[], object], runs: int) -> Profile:
    """Calls a function that compiled code is part of, and measures its parts."""
    if runs < 1:
        raise InvalidArgument(f"profile takes runs of at least 1, not {runs!r}")
    for _ in range(2):  # the first one compiles
        call()
    seconds = _timed(call, runs)
    events = _events(call, runs)
    functions = {graph.label(part): part.function for graph in journal.graphs for part in graph.parts}
    times = times_of(events, functions)
    device = "cuda" if any(time.on_device for time in times.values()) else "cpu"
    bandwidth = copy_bandwidth(device, torch.get_num_threads())
    took = {label: time.seconds / time.runs for label, time in times.items()}
    rows = part_rows(journal.graphs, took, bandwidth, {label: time.runs / runs for label, time in times.items()})
    measured = [row for row in rows if row.seconds is not None]
    journal.measured({row.label: row.seconds or 0.0 for row in measured}, bandwidth)
    measured.sort(key=lambda row: -(row.seconds or 0.0) * row.runs)
    return Profile(measured, seconds, bandwidth, device, torch.get_num_threads(), runs)


def _events(call: Callable[[], object], runs: int) -> Sequence[FunctionEvent]:
    """What a profiler sees of calls. Of the CPU alone where there is no GPU: the libraries of the other one may take
    seconds to load."""

    def run() -> None:
        for _ in range(runs):
            call()
        _wait()

    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
        return profiler.events() or ()
    with torch.autograd.profiler.profile(use_kineto=False) as plain:
        run()
    return plain.function_events or ()


@record
class Time:
    """What a part took, in all of its runs together.

    Attributes:
        seconds: of the GPU's kernels; of the calls on the CPU where they launched none.
        runs: how many; where several parts launch a function and nobody knows which, those of each on average.
    """

    seconds: float
    runs: float
    on_device: bool


def times_of(events: Iterable[FunctionEvent], functions: Mapping[str, str]) -> dict[str, Time]:
    """The times of parts, by label, from the events of a profiler.

    A part's kernels are those that were launched within its ranges on the CPU, each once. What a CUDA graph replays was
    launched in no range: there the functions' names tell.

    Args:
        functions: what each part launches, by its label; "" for what has no name of ours.
    """
    ranges: dict[str, list[FunctionEvent]] = {}
    kernels: list[FunctionEvent] = []
    spans: set[str] = (
        set()
    )  # a range may have an event of its name on the device, too: from its first kernel to its last
    for event in events:
        if event.device_type != DeviceType.CPU:
            spans.update([event.name] if event.is_user_annotation else [])
            kernels += [] if event.is_user_annotation else [event]
        elif event.name in functions:
            ranges.setdefault(event.name, []).append(event)
    found: dict[str, Time] = {}
    within: dict[int, Kernel] = {}  # by identity: ranges may lie within ranges
    for label, group in ranges.items():
        launched = [kernel for event in group for kernel in _launched(event) if kernel.name not in spans]
        within.update((id(kernel), kernel) for kernel in launched)
        took = sum(k.duration for k in launched) if launched else sum(e.cpu_time_total for e in group)
        found[label] = Time(took / 1e6, len(group), bool(launched))
    return found | _replayed(kernels, within.values(), {k: v for k, v in functions.items() if k not in found})


def _launched(event: FunctionEvent) -> Iterator[Kernel]:
    """The kernels that were launched in a range, and in those within it."""
    yield from event.kernels
    for child in () if event.is_legacy else event.cpu_children:  # a legacy one's single kernel is all that it enqueued
        yield from _launched(child)


def _replayed(
    kernels: Iterable[FunctionEvent], within: Iterable[Kernel], functions: Mapping[str, str]
) -> dict[str, Time]:
    """The times of parts without ranges: of the kernels of their functions' names that were launched in none."""
    counts: Counter[str] = Counter()
    took: defaultdict[str, float] = defaultdict(float)
    for event in kernels:
        counts[event.name] += 1
        took[event.name] += event.time_range.elapsed_us()
    for kernel in within:
        counts[kernel.name] -= 1
        took[kernel.name] -= kernel.duration
    sharing = Counter(functions.values())
    return {
        label: Time(took[name] / sharing[name] / 1e6, counts[name] / sharing[name], True)
        for label, name in functions.items()
        if counts[name] > 0
    }


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _timed(call: Callable[[], object], runs: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    _wait()
    return (time.perf_counter() - start) / runs


@functools.cache
def copy_bandwidth(device: str, threads: int) -> float:
    """Bytes a second of a copy within a device's memory, read and written ones together: measured once a process, with
    as many threads as a CPU's kernels have (`threads` is there to be measured again for another number)."""
    # A GPU's cache is larger, and the call of a copy takes as long as the copy.
    count, runs = (4 * _COPIED, 10) if device == "cuda" else (_COPIED, 1)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / min(_timed(lambda: target.copy_(source), runs) for _ in range(_BEST_OF))
