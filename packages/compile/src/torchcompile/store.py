"""The folder in which compiled programs are kept for other processes: text by key, of which nothing is executed.

It lies in the folder of the kernel cache, and belongs to the user alone: one that others own or write to is not used.
A file says what it holds by a hash of its text; one that does not is left out, and told of once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from primtorch.files import is_trusted
from primtorch.frozen import record
from primtorch.once import cached_property

_log = logging.getLogger("torchcompile")

SUFFIX = ".program"
MOST_BYTES = 4 << 30  # of the whole cache folder, kernels included
MOST_DAYS = 60.0
_DAY = 86400.0
_EVERY = 3600.0  # seconds between two looks at the folder's size


@record
class Entry:
    """A file of the cache folder."""

    path: Path
    nbytes: int
    used: float  # seconds since the epoch


@functools.lru_cache(1024)
def _tell_once(message: str) -> None:
    _log.warning("%s", message)


def _is_ours(path: Path) -> bool:
    """Whether a folder or file is the user's own or the system's, and nobody else may write to it."""
    return is_trusted(path, stat.S_IWGRP | stat.S_IWOTH)


class Store:
    """Texts by key, in the folder `programs` of a cache folder."""

    def __init__(self, cache: str) -> None:
        self.cache = Path(cache)
        self.folder = self.cache / "programs"

    @cached_property
    def usable(self) -> bool:
        """Whether the folder is there, or can be made, and is the user's own."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours(self.folder):
                return True
            _tell_once(f"{self.folder} is not yours alone: compiled programs are neither kept in it nor taken from it")
        except OSError as error:
            _tell_once(f"compiled programs cannot be kept in {self.folder}: {error}")
        return False

    def _path(self, key: str) -> Path:
        return self.folder / (key + SUFFIX)

    def find(self, key: str) -> str | None:
        """The text of a key."""
        if not self.usable:
            return None
        path = self._path(key)
        try:
            if not _is_ours(path):
                _tell_once(f"{path} is not yours alone: it is not used")
                return None
            digest, _, text = path.read_text(encoding="utf-8").partition("\n")
            with contextlib.suppress(PermissionError):  # the system's, which was filled for all its users
                os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            self.refuse(key, str(error))
            return None
        if digest != _digest(text):
            self.refuse(key, "it is torn, or was not written by torchcompile")
            return None
        return text

    def refuse(self, key: str, why: str) -> None:
        """Leaves an entry out from now on, and tells of it."""
        _tell_once(f"an entry of the compile cache is left out, {self._path(key)}: {why}; it is compiled again")

    def keep(self, key: str, text: str) -> None:
        """Keeps a text. It appears whole, and the last of concurrent writers wins."""
        if not self.usable:
            return
        try:
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")  # for the owner alone
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(f"{_digest(text)}\n{text}")
                os.replace(name, self._path(key))
            except BaseException:
                Path(name).unlink(missing_ok=True)  # the folder may be full
                raise
            self._evict_sometimes()
        except OSError as error:
            _tell_once(f"compiled programs cannot be kept in {self.folder}: {error}")

    # -- what is in the folder, kernels included --------------------------------------------

    def entries(self) -> list[Entry]:
        """All files of the cache, those used last first."""
        found = sorted(_files(self.cache, _ENTRY), key=lambda entry: entry.used, reverse=True)
        return found

    def clear(self) -> list[Entry]:
        """Deletes them all; processes that have loaded kernels keep them."""
        found = self.entries()
        for entry in found:
            entry.path.unlink(missing_ok=True)
        self._drop_leavings()
        return found

    def _drop_leavings(self) -> None:
        """Deletes what processes that were killed had begun to write."""
        for entry in _files(self.cache, _LEAVING):
            if entry.used < time.time() - _EVERY:
                entry.path.unlink(missing_ok=True)

    def evict(self, most_bytes: int = MOST_BYTES, most_days: float = MOST_DAYS) -> list[Entry]:
        """Deletes what was not used for long, and then what was used longest ago, until the rest fits."""
        oldest, left, gone = time.time() - most_days * _DAY, most_bytes, []
        self._drop_leavings()
        for entry in self.entries():
            left -= entry.nbytes
            if left < 0 or entry.used < oldest:
                entry.path.unlink(missing_ok=True)
                gone.append(entry)
        return gone

    def _evict_sometimes(self) -> None:
        looked = self.folder / "looked"
        if not looked.exists() or time.time() - looked.stat().st_mtime > _EVERY:
            looked.touch(mode=0o600)
            self.evict()


def is_entry(name: str) -> bool:
    """Whether a file's name is one that this stack gives: a kernel's or a program's key, and what the file holds."""
    return _ENTRY.fullmatch(name) is not None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path, names: re.Pattern[str]) -> Iterator[Entry]:
    """Files that this stack has written, and no others: the folder may be one that the user keeps other things in."""
    for where, _, files in os.walk(folder):  # leaves out what cannot be read, or is deleted meanwhile
        for path in (Path(where, name) for name in files if names.fullmatch(name)):
            try:
                found = path.lstat()
            except OSError:  # another process has deleted it
                continue
            if stat.S_ISREG(found.st_mode):
                yield Entry(path, found.st_size, max(found.st_mtime, found.st_atime))


_ENTRY = re.compile(r"[0-9a-f]{32,40}(\.so|\.cubin|\.json|(\.\w+)?\.program)")  # keys are hashes
_LEAVING = re.compile(r"(tmp\w{8}|[0-9a-f]{32,40}[\w.]*)\.tmp")
