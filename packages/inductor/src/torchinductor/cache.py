"""The disk cache of built kernels: files named by a hash of everything that went into them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path

from primtorch import forks
from primtorch.files import is_trusted

_log = logging.getLogger(__name__)

MOST_WAITING = 300.0  # seconds for what another process makes


def content_key(*parts: str) -> str:
    """A name for content."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(len(part)).encode())
        digest.update(part.encode())
    return digest.hexdigest()[:40]


@lru_cache(maxsize=64)
def _trusted(folder: str) -> bool:
    """Whether what a folder holds can be loaded: machine code of a stranger's is not; warns once."""
    path = Path(os.path.realpath(folder))  # the user says which folder, by a link if he likes
    with suppress(OSError):
        if not is_trusted(path):
            _log.warning(
                "the kernel cache %s is not used: it belongs to another user, or everybody can write to it", folder
            )
            return False
    return True


@lru_cache(maxsize=64)
def _usable(folder: str) -> bool:
    """Whether files can be written into a folder; warns once for one where they cannot."""
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        _warn_once(folder, str(error))
        return False


@lru_cache(maxsize=64)
def _warn_once(folder: str, error: str) -> None:
    _log.warning(
        "the kernel cache %s cannot be written to (%s): kernels are built again in each process", folder, error
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


_SCRATCH = forks.ScratchFolder("torchinductor-")  # for kernels that are not cached


class _Turns:
    """The files that this process has locked. A forked process holds them open too, and would keep them locked."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        forks.in_child(self._forked)

    def _forked(self) -> None:
        while self.taken:
            os.close(self.taken.pop())

    def begin(self, path: Path) -> int:
        """The descriptor of a file that is to be locked. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        self.taken.add(descriptor)
        return descriptor

    def end(self, descriptor: int) -> None:
        """Lets a file go."""
        if descriptor in self.taken:
            self.taken.remove(descriptor)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


_TURNS = _Turns()


@contextmanager
def turn(path: Path, seconds: float = MOST_WAITING) -> Iterator[None]:
    """A block in which no other process makes a file: those that want it wait and find it then. The turn of a process
    that dies is over; one that takes longer than `seconds` is not waited for."""
    end = time.monotonic() + seconds
    while (over := turn_at_once(path)) is None:
        if time.monotonic() > end:
            _log.warning("another process takes more than %.0f s to make %s: it is made here, too", seconds, path)
            over = lambda: None
            break
        time.sleep(0.01)
    try:
        yield
    finally:
        over()


def turn_at_once(path: Path) -> Callable[[], None] | None:
    """The turn at making a file, where no other process or thread has it: what ends it. None where one has."""
    beside = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _TURNS.begin(beside)
    except OSError:  # no room, say: who writes the file finds out, and tells
        return lambda: None
    if not _taken(descriptor):
        _TURNS.end(descriptor)
        return None

    def over() -> None:
        beside.unlink(missing_ok=True)
        _TURNS.end(descriptor)

    return over


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


class DiskCache:
    """Files by key. A file appears whole: it is written under another name, then renamed. A folder, or a file in it,
    that is another user's is not used."""

    def __init__(self, folder: str | None) -> None:
        self.folder = Path(folder) if folder is not None and _trusted(folder) else None
        self.writable = self.folder is not None and _usable(str(folder))

    def give_up(self, error: Exception) -> bool:
        """Uses the folder no more to write to, where an error says that there is no room in it. Returns whether it was
        used until then."""
        full = getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL)
        if not (full and self.writable):
            return False
        self.writable = False
        _warn_once(str(self.folder), str(error))
        return True

    def _path(self, key: str, suffix: str) -> Path | None:
        return None if self.folder is None else self.folder / key[:2] / (key + suffix)

    def find(self, key: str, suffix: str) -> Path | None:
        """The file of a key, if somebody has published it."""
        path = self._path(key, suffix)
        with suppress(OSError):
            return path if path is not None and is_trusted(path) else None
        return None

    def shared(self, name: str) -> Path:
        """A file that processes add to, beside those of the keys."""
        folder = self.folder if self.folder is not None and self.writable else _SCRATCH.path
        return folder / name

    def turn(self, key: str, suffix: str) -> AbstractContextManager[None]:
        """A block in which no other process makes the file of a key."""
        path = self._path(key, suffix)
        return turn(path) if path is not None and self.writable else nullcontext()

    def temporary(self, key: str, suffix: str) -> Path:
        """A new path to write a file to before publishing it."""
        path = self._path(key, suffix)
        folder = path.parent if path is not None and self.writable else _SCRATCH.path
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".tmp", prefix=key, dir=folder)
        os.close(handle)
        return Path(name)

    def publish(self, written: Path, key: str, suffix: str) -> Path:
        """Gives a written file its final name and returns that. The last of concurrent writers wins; all are right."""
        path = self._path(key, suffix)
        if path is None or not self.writable:
            return written
        os.replace(written, path)
        return path
