"""What a forked process has to do without: the threads of the process that it was made of.

A lock that one of them held is held there by nobody who would let it go, and what it was about nobody ends. Locks that
are made here are free in a forked process, unless the thread that forked holds them; whoever leaves something half done
in another thread, or shares a pipe with another process, says what is to become of it. What the other process has made
for as long as it lives, such as a folder, is not this one's to remove.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

_File: TypeAlias = tuple[int, int]  # what tells an open file from others: its device and its number there
_Pipe: TypeAlias = tuple[int, _File | None]  # a descriptor, and what it was opened for

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()
_WHOLE = threading.RLock()  # who holds it does what no fork may divide
_STARTED: weakref.WeakKeyDictionary[subprocess.Popen[Any], tuple[_Pipe, ...]] = weakref.WeakKeyDictionary()
_TOLD: list[weakref.WeakMethod[Callable[[], None]]] = []


def lock() -> threading.Lock:
    """A `threading.Lock`. The thread that holds it does not fork."""
    made = threading.Lock()
    _LOCKS.add(made)
    return made


def rlock() -> threading.RLock:
    """A `threading.RLock`, which stays held where the thread that holds it forks."""
    made = threading.RLock()
    _LOCKS.add(made)
    return made


def in_child(method: Callable[[], None]) -> None:
    """Calls a bound method in each process that is forked from now on, before anything else of it runs, as long as its
    object lives. Locks are free by then, and no other thread is there."""
    _TOLD.append(weakref.WeakMethod(method, _TOLD.remove))


@contextmanager
def undivided() -> Iterator[None]:
    """A block during which no other thread forks: one that imports modules, say. A process forked amid it would wait
    for them in vain: Python's locks of imports are held there by a thread that it has not."""
    with _WHOLE:
        yield


def process(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """A `subprocess.Popen` whose pipes no forked process holds open: whoever reads these to their end would wait for
    that process. While it starts, no thread forks. Raises OSError."""
    with _WHOLE:
        started = subprocess.Popen(command, **options)
        opened = [pipe.fileno() for pipe in (started.stdin, started.stdout, started.stderr) if pipe is not None]
        _STARTED[started] = tuple((descriptor, _file_of(descriptor)) for descriptor in opened)
        return started


def _file_of(descriptor: int) -> _File | None:
    """What a descriptor stands for; None where it is closed."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    return None


def _leave(started: subprocess.Popen[Any], pipes: Sequence[_Pipe]) -> None:
    """Another process's: its pipes lead nowhere (what is in a buffer of them, too), and nobody waits for it here.

    Descriptors say what is open, not Python's files: a thread that closes one has let go of it there before the system
    closes it, and a process that is forked in between has it open.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor, file in pipes:
        if file is not None and _file_of(descriptor) == file:  # and nothing else, opened since
            os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)
    started.returncode = 0 if started.returncode is None else started.returncode


def _forked() -> None:
    _WHOLE.release()
    for started, pipes in list(_STARTED.items()):
        _leave(started, pipes)
    _STARTED.clear()
    for held in list(_LOCKS):
        if not getattr(held, "_is_owned", bool)():
            held._at_fork_reinit()
    for reference in list(_TOLD):
        method = reference()
        if method is not None:
            method()


class ScratchFolder:
    """A folder that lives as long as its object and the process, which makes it where it first asks for it. A forked
    process has one of its own, and leaves that of the other alone."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._made: dict[int, Path] = {}  # by process
        self._making = lock()
        weakref.finalize(self, _removed, self._made)

    @property
    def path(self) -> Path:
        """Where it is."""
        process = os.getpid()
        with self._making:
            if process not in self._made:
                self._made[process] = Path(tempfile.mkdtemp(prefix=self._prefix))
            return self._made[process]

    def remove(self) -> None:
        """Removes it and what is in it; whoever asks for it afterwards gets a new one."""
        _removed(self._made)


def _removed(made: dict[int, Path]) -> None:
    path = made.pop(os.getpid(), None)
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)


os.register_at_fork(before=_WHOLE.acquire, after_in_parent=_WHOLE.release, after_in_child=_forked)
