"""Where a call's time goes: each kernel and call of compiled code with its time, bytes and the user's lines."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from torch.profiler import ProfilerActivity

from torchcompile.errors import InvalidArgument
from torchcompile.journal import Journal
from torchcompile.page import PartRow, part_rows, render_profile
from torchcompile.page.tables import bytes_text, seconds_text, share_text

_COPIED = 1 << 26  # bytes that are copied to learn what the machine's memory allows: more than caches hold
_BEST_OF = 5


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        rows: kernels and calls of compiled code, those that took longest first; times are those of one run.
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
            table.add_row(escape(row.label), *cells)
        yield table

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with a picture and a table; written to `path`, too, if given."""
        page = render_profile("Where the time goes", self.notes, self.rows, self.other)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def profiled(journal: Journal, call: Callable[[], object], runs: int) -> Profile:
    """Calls a function that compiled code is part of, and measures its parts."""
    if runs < 1:
        raise InvalidArgument(f"profile takes runs of at least 1, not {runs!r}")
    for _ in range(2):  # the first one compiles
        call()
    seconds = _timed(call, runs)
    with _profiler() as profiler:
        for _ in range(runs):
            call()
        _wait()
    took: dict[str, float] = {}
    counts: dict[str, float] = {}
    on_device = False
    for event in profiler.key_averages():
        device_time = float(getattr(event, "device_time_total", 0.0) or 0.0)
        total = device_time or float(event.cpu_time_total)
        if event.count and total:
            took[event.key], counts[event.key] = total / event.count / 1e6, event.count / runs
            on_device |= device_time > 0
    device = "cuda" if on_device else "cpu"
    bandwidth = copy_bandwidth(device, torch.get_num_threads())
    rows = part_rows(journal.graphs, took, bandwidth, counts)
    measured = [row for row in rows if row.seconds is not None]
    journal.measured({row.label: row.seconds or 0.0 for row in measured}, bandwidth)
    measured.sort(key=lambda row: -(row.seconds or 0.0) * row.runs)
    return Profile(measured, seconds, bandwidth, device, torch.get_num_threads(), runs)


def _profiler() -> AbstractContextManager[Any]:
    """Of the CPU alone where there is no GPU: the libraries of the other one may take seconds to load."""
    if torch.cuda.is_available():
        return torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    return torch.autograd.profiler.profile(use_kineto=False)


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
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / min(_timed(lambda: target.copy_(source), 1) for _ in range(_BEST_OF))
