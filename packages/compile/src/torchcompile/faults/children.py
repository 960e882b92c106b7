"""Work that may kill or stop the process, done in a forked one: what it gives, how it died, or that it does not end.

A child is forked, not spawned: a reduction asks hundreds of times, and what it asks about (graphs, back ends that are
closures, whatever was changed in this process) is in memory alone. No other thread is forked with it: a pool of OpenMP
would be waited for without end, so that a child of a process that has several threads computes on one. Where even this
does not do (a device, a group of processes), `possible` says so. All that comes back is lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

import aotautograd
import primtorch
import torchdistributed
import torchdynamo
import torchinductor
from primtorch.frozen import record
from primtorch.schemas import TORCH, UserFrame

Json: TypeAlias = Any  # what `json` writes: it comes back as it was, with lists for tuples
Kind: TypeAlias = Literal["crashes", "hangs", "exits"]
DEATHS: tuple[Kind, ...] = ("crashes", "hangs", "exits")

_OURS = tuple(
    os.path.dirname(str(module.__file__)) + os.sep
    for module in (aotautograd, primtorch, torchdistributed, torchdynamo, torchinductor)
)
_PACKAGES = (*_OURS, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_OPENMP = re.compile(r"/lib(?:g|i)?omp[^/]*\.so[^/]*$")
_FRAME = re.compile(r'File "(.+?)", line (\d+) in (\S+)')
_PDEATHSIG = 1  # of Linux's prctl
_POLL = 0.02  # seconds between looks at a child whose pipe somebody else holds open


@record
class Death:
    """A child that gave nothing.

    Attributes:
        what: the signal's name, the seconds that it was silent for, or the status that it ended with.
        at: what it said last that it would do.
        frame: the program's line that Python was at; known of signals alone.
    """

    kind: Kind
    what: str
    at: str = ""
    frame: UserFrame | None = None


class ChildFailed(RuntimeError):
    """What was done in a child raised an error there."""


@record
class Teller:
    """A child's way to tell its parent of how far it is."""

    pipe: int

    def at(self, what: str) -> None:
        """What will be done now: a death is told with it."""
        self._send("at", what)

    def progress(self, text: str) -> None:
        """A line for whoever looks on."""
        self._send("progress", text)

    def _send(self, kind: str, value: Json) -> None:
        left = memoryview((json.dumps([kind, value]) + "\n").encode())
        while left:
            left = left[os.write(self.pipe, left) :]


def possible() -> bool:
    """Whether a child of this process can run graphs. A device's context is not forked, nor are connections to other
    processes, which would wait for it."""
    grouped = dist.is_available() and dist.is_initialized()
    return hasattr(os, "fork") and not torch.cuda.is_initialized() and not grouped


def in_child(
    call: Callable[[Teller], Json],
    seconds: float | None,
    progress: Callable[[str], None] = lambda text: None,
    quiet: bool = True,
) -> Json | Death:
    """What `call` gives in a child.

    Args:
        seconds: of silence, after which the child is killed; None waits for ever.
        progress: is handed what the child tells.
        quiet: nothing that the child prints is seen.

    Raises:
        ChildFailed: it raised an error there.
    """
    alone = _is_alone()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    folder = tempfile.mkdtemp(prefix="torchcompile-child-")  # all that it makes for a while is in it
    reader, writer = os.pipe()
    child = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: see above
            child = os.fork()
        if child == 0:
            os.close(reader)
            _run(call, Teller(writer), folder, quiet, alone)
        os.close(writer)
        writer = -1
        heard = _Heard(reader, progress)
        status = heard.until_the_end_of(child, seconds)
        child = 0 if status is not None else child
        return _outcome(heard, status, seconds, folder)
    finally:
        if child:
            _end(child)
        os.close(reader)
        if writer >= 0:
            os.close(writer)
        shutil.rmtree(folder, ignore_errors=True)


def _is_alone() -> bool:
    """Whether this process has no other thread, of whatever kind."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # another system: nobody knows
        return False


def _end(child: int) -> None:
    """Kills a child and what it started, and leaves no zombie."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@dataclass
class _Heard:
    """What a child has told."""

    reader: int
    progress: Callable[[str], None]
    at: str = ""
    last: tuple[str, Json] | None = None  # its result or error
    _rest: bytes = b""
    _since: float = field(default_factory=time.monotonic)

    def until_the_end_of(self, child: int, seconds: float | None) -> int | None:
        """Listens until the child has ended, and gives its status; None where it was silent for too long."""
        os.set_blocking(self.reader, False)
        open_ = True
        while True:
            if open_ and select.select([self.reader], [], [], _POLL)[0]:
                open_ = self._listen()
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                while open_ and self._listen():
                    pass
                return status
            if seconds is not None and time.monotonic() - self._since > seconds:
                return None
            if not open_:
                time.sleep(_POLL / 10)

    def _listen(self) -> bool:
        """Whether there may be more to hear."""
        try:
            got = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return False
        self._since = time.monotonic()
        *lines, self._rest = (self._rest + got).split(b"\n")
        for line in lines:
            kind, value = json.loads(line)
            match kind:
                case "at":
                    self.at = value
                case "progress":
                    self.progress(value)
                case _:
                    self.last = kind, value
        return bool(got)


def _outcome(heard: _Heard, status: int | None, seconds: float | None, folder: str) -> Json | Death:
    if status is None:
        return Death("hangs", f"nothing for {seconds:.0f} s", heard.at)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Death("crashes", _name_of(number), heard.at, _frame_in(Path(folder, "trace")))
    if heard.last is None:
        return Death("exits", f"status {os.waitstatus_to_exitcode(status)}", heard.at)
    kind, value = heard.last
    if kind == "error":
        raise ChildFailed(value)
    return value


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def _frame_in(trace: Path) -> UserFrame | None:
    """The innermost line of a trace of faulthandler's that is neither torch's nor of these packages."""
    with contextlib.suppress(OSError):
        for file, line, function in _FRAME.findall(trace.read_text(errors="replace")):
            if not file.startswith((TORCH, *_PACKAGES, "<")) and not file.startswith(sys.base_prefix):
                return UserFrame(file, int(line), function)
    return None


def _run(call: Callable[[Teller], Json], tell: Teller, folder: str, quiet: bool, alone: bool) -> None:
    """The child's life. It never returns, and does nothing that the parent would do when it ends."""
    status = 1
    try:
        _settle(folder, quiet, alone)
        try:
            tell._send("result", call(tell))
        except BaseException as error:
            tell._send("error", f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        status = 0
    finally:
        os._exit(status)


def _settle(folder: str, quiet: bool, alone: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)  # it outlives nobody
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(os.open(os.path.join(folder, "trace"), os.O_WRONLY | os.O_CREAT, 0o600), all_threads=False)
    if quiet:  # else it is the terminal's, for a script that reads of it
        os.setpgid(0, 0)  # whoever kills it kills the compilers that it started
        gc.disable()  # what is garbage is the parent's to finalize
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    else:  # what stands in their place may wait for a thread of the parent's
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    if not alone:
        _one_thread()


def _one_thread() -> None:
    """Whatever runs in parallel runs on this thread. Each OpenMP that is loaded has its own number of threads; one that
    is loaded later reads it of the environment."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        for path in {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}:
            if _OPENMP.search(path):
                ctypes.CDLL(path).omp_set_num_threads(1)
