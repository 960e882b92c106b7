"""Ranks tell each other what they compile, and what became of it: a rank that fails there ends the others' wait.

A rank that raises or dies while it compiles takes part in no further collective, and the others would wait for it in
theirs: until the connection breaks, with a text about sockets, or for the group's time limit. So each compilation is
counted in the process group's store. A rank that has compiled its n-th graph waits while others are busy with theirs,
which it would do in the next collective anyway; where one of them fails, all raise `RankFailed` with its error. Ranks
that do not come to an n-th graph (they have compiled it before, or run eagerly) are waited for no longer than
`_PATIENCE`, and not again and again.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from torchdistributed.errors import RankFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PATIENCE: Final = 2.0  # seconds in which the other ranks begin to compile, or do not
_FRUITLESS: Final = 2  # times that they did not, after which they are not waited for
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds between questions
_FAREWELL: Final = 2.0  # seconds in which the others hear of a failure before the store may be gone
_LOOK: Final = 0.5  # seconds between looks at whether processes are still there
_NEIGHBOURS: Final = 64  # ranks that look at each other's processes: those of one machine are mostly among them
_LIMIT: Final = 1800.0  # seconds, where the group does not tell its own limit
_LONGEST_TEXT: Final = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """What a rank compiles, or compiled last."""

    rank: int
    what: str
    machine: str
    host: str
    pid: int
    started: str
    busy: bool

    @property
    def gone(self) -> bool:
        """Its process ended. Of other machines nothing is known."""
        if self.machine != _machine():
            return False
        state, started = _process(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} {'was compiling' if self.busy else 'had compiled'} {self.what}"


@functools.cache
def _machine() -> str:
    """Equal for processes that see each other's numbers; empty where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def _process(pid: int) -> tuple[str, str]:
    """State and time of start of a process, empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Board:
    """The compilations of one job, as one rank sees them."""

    def __init__(self, store: Store, rank: int, size: int, limit: float) -> None:
        self.store, self.rank, self.size, self.limit = store, rank, size, limit
        self.number = 0
        self._fruitless = 0
        self._failures = 0  # of other ranks, when this one began
        self._seen: dict[int, Row] = {}

    def begin(self, what: str) -> None:
        """Tells the other ranks that this one begins its next compilation, of `what`."""
        self.number += 1
        self._failures = self.store.add("failures", 0)
        self._write(what, busy=True)
        self.store.add(f"begun/{self.number}", 1)

    def end(self, what: str) -> None:
        """Tells the other ranks that the compilation begun last is done."""
        self._write(what, busy=False)
        self.store.add(f"ended/{self.number}", 1)

    def fail(self, text: str) -> None:
        """Ends the wait of the others, those that come later to this place included."""
        self.store.set(f"failed/{self.number}", text)
        self.store.set("failure", text)
        self.store.add("failures", 1)
        self._take_leave()

    def wait(self) -> None:
        """Until all ranks have compiled as many graphs, or for a while.

        Raises:
            RankFailed: one of them will not.
        """
        began, looked, pause = time.monotonic(), -_LOOK, _FIRST_PAUSE
        while True:
            self._raise_if_told()
            ended, begun = (self.store.add(f"{key}/{self.number}", 0) for key in ("ended", "begun"))
            waited = time.monotonic() - began
            if ended >= self.size:
                self._fruitless = 0
                return
            if begun <= ended and (self._fruitless >= _FRUITLESS or waited > _PATIENCE):
                self._fruitless += 1
                return
            if waited - looked > _LOOK and pause > _FIRST_PAUSE:
                looked = waited
                self._raise_if_gone()
            if waited > self.limit:
                busy = "; ".join(f"rank {row.rank}: {row}" for row in self._rows() if row.busy)
                raise RankFailed(f"other ranks were still compiling after {self.limit:.0f} s. {busy}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _write(self, what: str, *, busy: bool) -> None:
        pid = os.getpid()
        row = Row(self.rank, what, _machine(), socket.gethostname(), pid, _process(pid)[1], busy)
        self.store.set(f"rank/{self.rank}", json.dumps(asdict(row)))

    def _rows(self) -> Iterator[Row]:
        """Of the ranks beside this one."""
        first = self.rank // _NEIGHBOURS * _NEIGHBOURS
        for rank in range(first, min(first + _NEIGHBOURS, self.size)):
            if rank != self.rank and self.store.check([f"rank/{rank}"]):
                self._seen[rank] = row = Row(**json.loads(self.store.get(f"rank/{rank}")))
                yield row

    def _raise_if_told(self) -> None:
        for key in (f"failed/{self.number}", "failure"):
            if self.store.check([key]) and (key != "failure" or self.store.add("failures", 0) > self._failures):
                text = self.store.get(key).decode()
                self._take_leave()
                raise RankFailed(text)

    def _raise_if_gone(self) -> None:
        for row in self._rows():
            if row.gone:
                self.fail(_is_gone(row))
                raise RankFailed(_is_gone(row))

    def _take_leave(self) -> None:
        """The rank that keeps the store, the first one as a rule, may end with its error: the others hear it before."""
        heard, end = self.store.add(f"heard/{self.number}", 1), time.monotonic() + _FAREWELL
        while self.rank == 0 and heard < self.size and time.monotonic() < end:
            time.sleep(_LONGEST_PAUSE)
            heard = self.store.add(f"heard/{self.number}", 0)

    def without_store(self) -> str:
        """What this rank knows when the store is gone."""
        gone = [_is_gone(row) for row in self._seen.values() if row.gone]
        return ". ".join(gone) or "the process that keeps it, rank 0 as a rule, is gone, and its last words say why"


def _is_gone(row: Row) -> str:
    return (
        f"rank {row.rank} is gone: {row}. What it printed last says why; where it printed nothing, the system may have"
        " ended it (for memory, say)"
    )


class _Boards:
    """The board of the present process group."""

    def __init__(self) -> None:
        self._of: weakref.ref[object] | None = None
        self._board: Board | None = None
        self._count = 0

    def now(self) -> Board | None:
        if not dist.is_available() or not dist.is_initialized() or (world := dist.group.WORLD) is None:
            return None
        if self._of is None or self._of() is not world:
            self._of, self._count = weakref.ref(world), self._count + 1
            self._board = self._made(world) if world.size() > 1 else None
        return self._board

    def _made(self, world: dist.ProcessGroup) -> Board:
        c10d = dist.distributed_c10d
        store = c10d.PrefixStore(f"torchcompile/compilations/{self._count}", c10d._get_default_store())
        return Board(store, world.rank(), world.size(), _limit(world))


def _limit(world: dist.ProcessGroup) -> float:
    """The group's time limit."""
    for device in ("cpu", "cuda"):
        try:
            return float(world._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return _LIMIT


_BOARDS = _Boards()
_WITHIN = threading.local()


@contextmanager
def told_to_ranks(what: Callable[[], str], begins_anew: type[Exception]) -> Iterator[None]:
    """A block in which this rank compiles; behind it the other ranks have compiled, too.

    Args:
        begins_anew: an error that is no failure: the rank compiles once more.

    Raises:
        RankFailed: another rank raised there, died, or took longer than the group's time limit.
    """
    board = None if getattr(_WITHIN, "busy", False) else _BOARDS.now()
    if board is None:
        yield
        return
    _WITHIN.busy = True
    try:
        with _while_there_is_a_store(board):
            board.begin(what())
        try:
            yield
        except begins_anew:
            with _while_there_is_a_store(board):
                board.end(what())
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
            with suppress(dist.DistError):  # the error itself is what counts
                board.fail(f"rank {board.rank} failed while it compiled {what()}: {text}")
            raise
        with _while_there_is_a_store(board):
            board.end(what())
            board.wait()
    finally:
        _WITHIN.busy = False


@contextmanager
def _while_there_is_a_store(board: Board) -> Iterator[None]:
    """The store ends with the rank that keeps it."""
    try:
        yield
    except dist.DistError as error:
        text = f"the process group's store does not answer while this rank compiles: {board.without_store()}"
        raise RankFailed(text) from error
