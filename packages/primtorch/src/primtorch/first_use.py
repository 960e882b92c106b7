"""Builds an extension at its first use, once for all processes of a user, and finds it built from then on.

It lies in the folder of the user's caches, under a name made of all that decides it: sources, headers, flags, torch
and Python. The folder is the user's alone: what lies in it is code that runs. Where it is (`XDG_CACHE_HOME`) and the
compiler (`CXX`) are read from the environment, since they are needed when the package is imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from primtorch.building import FLAGS, NotBuilt, build_of, compile_objects, headers_of, link_all

WAIT = 900.0  # seconds that a process waits for another one that builds the same
POLL = 0.1


def built(package: str, sources: Path) -> Path:
    """The extension of a package, of the C++ files in `sources`.

    Raises:
        NotBuilt: with what to do.
    """
    files = sorted(sources.glob("*.cpp"))
    release = build_of(Path()).parent.name
    folder = _folder() / f"{package}-{release}-{_key([*files, *sorted(headers_of(sources))])}"
    target = folder / build_of(folder).name
    _make(folder)
    if target.exists():
        return target
    with _alone(folder / "lock", package):
        if not target.exists():  # else another process has built it meanwhile
            _build(package, release, files, target)
    return target


def _build(package: str, release: str, files: list[Path], target: Path) -> None:
    line = _Line(f"{package}: building its C++ extension for {release}, once, into {target.parent}")
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            objects = {source: Path(work) / f"{source.stem}.o" for source in files}
            line.show(f"0 of {len(files)} files")
            compile_objects(objects, lambda done: line.show(f"{done} of {len(files)} files"))
            link_all(package, objects, target)
    except OSError as error:
        line.end("failed")
        raise NotBuilt(f"{target.parent} cannot be written ({error}): name another folder by XDG_CACHE_HOME") from error
    except BaseException:
        line.end("failed")
        raise
    line.end(f"{time.perf_counter() - start:.0f} s")


class _Line:
    """A line on stderr that tells how far it is; on a terminal it is written over."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        if sys.stderr is not None:
            print(text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def show(self, state: str) -> None:
        if self.terminal:
            print(f"\r\x1b[K{self.text}: {state}", end="", file=sys.stderr, flush=True)

    def end(self, state: str) -> None:
        if self.terminal:
            self.show(f"{state}\n")
        elif sys.stderr is not None:
            print(f"{self.text}: {state}", file=sys.stderr, flush=True)


def _key(files: list[Path]) -> str:
    content = hashlib.sha256()
    said = (
        *FLAGS,
        torch.__version__,
        torch.version.git_version,
        sysconfig.get_config_var("SOABI"),
        os.path.realpath(torch.__file__),
    )
    content.update("\n".join(map(str, said)).encode())  # where torch lies: the extension is linked to that one
    for file in files:
        content.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "torchcompile" / "extensions"


def _make(folder: Path) -> None:
    """Makes the folder, or sees that it is the user's own and nobody else writes there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise NotBuilt(f"{folder} cannot be made ({error}): name another folder by XDG_CACHE_HOME") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuilt(
            f"{folder} belongs to another user, or others may write to it, and what lies there would run as you: make "
            "it your own (chmod 700), or name another folder by XDG_CACHE_HOME"
        )


@contextmanager
def _alone(lock: Path, package: str) -> Iterator[None]:
    """One process at a time. The lock ends with the process that holds it.

    Raises:
        NotBuilt: another one holds it for longer than `WAIT`.
    """
    try:
        file = lock.open("w")
    except OSError as error:
        raise NotBuilt(f"{lock} cannot be written ({error}): name another folder by XDG_CACHE_HOME") from error
    with file:
        start, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - start > WAIT:
                    text = f"another process holds {lock} for more than {WAIT:.0f} s: end it, or delete the file"
                    raise NotBuilt(text) from None
                if not told and sys.stderr is not None:
                    print(f"{package}: waits for the process that builds its C++ extension", file=sys.stderr)
                told = True
                time.sleep(POLL)
        yield
