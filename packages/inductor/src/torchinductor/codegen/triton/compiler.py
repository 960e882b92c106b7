"""Turns Triton sources into binaries: a disk cache keyed by content, and a process that forks for what it lacks."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TypedDict

from primtorch import forks
from torchinductor.cache import DiskCache, turn
from torchinductor.errors import BuildFailed
from torchinductor.schemas import Binaries

from .writer import TritonSource

WORKER = Path(__file__).with_name("worker.py")


class Record(TypedDict):
    """What the worker says of a kernel: the function's name, warps, bytes of shared memory, how many parameters it has
    beyond those of the source, and how many bytes of memory of its own one of them is to point to."""

    name: str
    warps: int
    shared: int
    scratch: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel, and what the worker says of it."""

    key: str
    code: bytes
    record: Record
    hit: bool


@dataclass(frozen=True, slots=True)
class Compiling:
    """Sources that are being compiled.

    Attributes:
        found: what was in a cache.
        replies: the others, by their places.
        anew: compiles all of them, for a forked process, where nobody waits for the replies.
        process: which is waiting for them.
    """

    found: Sequence[Binary | None]
    replies: Mapping[int, Future[Binary]]
    anew: Callable[[], list[Binary]]
    process: int = field(default_factory=os.getpid)

    @property
    def apart(self) -> bool:
        """Whether the compiling process is at work."""
        return bool(self.replies)

    def finish(self) -> list[Binary]:
        """Waits for the binaries, in the sources' order. Raises BuildFailed."""
        if self.replies and self.process != os.getpid():
            return self.anew()
        return [self.replies[place].result() if binary is None else binary for place, binary in enumerate(self.found)]


@functools.cache  # each kernel's key has it, and to look it up takes a millisecond
def triton_version() -> str:
    """That of the installed package; "" where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


class Server:
    """The compiling process. One that died is replaced at the next request, and a forked process has one of its own."""

    def __init__(self, arch: int, scratch: forks.ScratchFolder, parallel: int) -> None:
        self._arch = arch
        self._scratch = scratch
        self._parallel = parallel
        self._slots = threading.BoundedSemaphore(parallel)
        self._lock = forks.lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[dict[str, str]]] = {}
        self._count = 0
        forks.in_child(self._forked)

    def _forked(self) -> None:
        """The compiling process is another's, and those who wait for it are not here."""
        self._process, self._slots, self._waiting = None, threading.BoundedSemaphore(self._parallel), {}

    def start(self) -> None:
        """Starts the process, which takes about a second to be ready; does not wait for it."""
        with self._lock:
            self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = forks.process(
                [sys.executable, str(WORKER), str(self._arch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={
                    "TRITON_DISABLE_LINE_INFO": "1",  # lines of generated text cost a tenth of the time; "0" keeps them
                    **os.environ,
                    "TRITON_CACHE_DIR": str(self._scratch.path / "triton"),
                    "TRITON_INTERPRET": "0",
                },
            )
            threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Hands replies to those who wait for them, until the process ends."""
        assert process.stdout is not None
        mine: set[int] = set()
        for line in _lines(process.stdout):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # a reply that was cut to the pipe's length
                number = re.search(rb'"id": (\d+)', line)
                found = {"id": int(number.group(1)) if number else -1, "error": line.decode(errors="replace")}
            with self._lock:
                waiting = self._waiting.pop(found.pop("id"), None)
            if waiting is not None:
                waiting.set_result(found)
        status = process.wait()
        with self._lock:
            if self._process is process:
                mine = set(self._waiting)
            lost = [self._waiting.pop(number) for number in mine]
        for waiting in lost:
            waiting.set_result({"error": f"the compiling process ended with status {status}"})

    def compile(self, request: Mapping[str, object]) -> dict[str, str]:
        """The reply; an "error" entry when the kernel did not compile."""
        with self._slots:
            reply: Future[dict[str, str]] = Future()
            with self._lock:
                process = self._started()
                self._count += 1
                self._waiting[self._count] = reply
                line = json.dumps({"id": self._count, **request}) + "\n"
                try:
                    _send(process, line)
                except BrokenPipeError:
                    self._waiting.pop(self._count)
                    return {"error": f"the compiling process ended with status {process.wait()}"}
            return reply.result()

    def close(self) -> None:
        """Ends the process, once it has compiled what it was asked for."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                _send(self._process, "\n")
            self._process.stdin.close()
            self._process.wait()


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    text = b""
    while piece := pipe.read(1 << 16):
        *lines, text = (text + piece).split(b"\n")
        yield from lines


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    """Raises BrokenPipeError."""
    assert process.stdin is not None
    rest = memoryview(line.encode())
    while rest:
        rest = rest[process.stdin.write(rest) :]


class TritonCompiler:
    """Compiles sources for one GPU architecture (90 for sm_90). Safe to call from several threads and processes."""

    def __init__(self, arch: int, folder: Path | None = None, workers: int | None = None) -> None:
        self.arch = arch
        self._scratch = forks.ScratchFolder("torchinductor-triton-")
        atexit.register(self.close)
        cache = DiskCache(str(folder) if folder is not None else None)
        self._shared = cache.folder  # read from, even where it cannot be written to
        self._writable = cache.folder if cache.writable else None
        self._parallel = workers or min(16, os.cpu_count() or 1)
        self._server = Server(arch, self._scratch, self._parallel)

    @property
    def folder(self) -> Path:
        """Where binaries are written to."""
        return self._writable or self._scratch.path

    def start(self) -> None:
        """Gets the compiling process ready in the background."""
        self._server.start()

    def start_if_empty(self) -> None:
        """The same, where the cache has nothing at all."""
        if self._shared is None or next(self._shared.glob("*.json"), None) is None:
            self.start()

    def key(self, source: TritonSource) -> str:
        """What the binary depends on."""
        made = (source.text, source.name, source.signature, source.divisors, source.warps, source.stages)
        return hashlib.sha256(repr((*made, self.arch, triton_version())).encode()).hexdigest()[:32]

    def compile(self, sources: Sequence[TritonSource], brought: Binaries | None = None) -> list[Binary]:
        """Binaries in the sources' order; what was brought along is not compiled. Raises BuildFailed with the source's
        file when Triton refuses one."""
        return self.begin(sources, brought).finish()

    def begin(self, sources: Sequence[TritonSource], brought: Binaries | None = None) -> Compiling:
        """Begins what `compile` does: what is in no cache is compiled from now on, the longest text first."""
        found = [self._read(self.key(source), brought) for source in sources]
        lacking = [place for place, binary in enumerate(found) if binary is None]
        anew = functools.partial(self.compile, sources, brought)
        if not lacking:
            return Compiling(found, {}, anew)
        pool = ThreadPoolExecutor(max_workers=min(len(lacking), self._parallel))
        lacking.sort(key=lambda place: -len(sources[place].text))
        replies = {place: pool.submit(self._one, sources[place]) for place in lacking}
        pool.shutdown(wait=False)
        return Compiling(found, replies, anew)

    def files(self, source: TritonSource, brought: Binaries | None = None) -> dict[str, Path] | None:
        """The files of a source that was compiled before, by name."""
        key = self.key(source)
        for files in self._places(key, brought):
            if all(path.exists() for path in files.values()):
                return files
        return None

    def _one(self, source: TritonSource) -> Binary:
        key = self.key(source)
        with turn(self.folder / f"{key}.json"):  # ranks of one machine ask for the same kernels at the same time
            return self._read(key) or self._compiled(source, key)

    def _compiled(self, source: TritonSource, key: str) -> Binary:
        file = self.folder / f"{key}.py"
        fresh = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        fresh.write_text(source.text)
        fresh.replace(file)
        request = {
            "source": str(file),
            "name": source.name,
            "signature": source.signature,
            "divisors": source.divisors,
            "warps": source.warps,
            "stages": source.stages,
            "arch": self.arch,
            "asserts": "tl.device_assert" in source.text,
            "target": str(self.folder / key),
        }
        reply = self._server.compile(request)
        if "error" in reply:
            raise BuildFailed(
                f"Triton could not compile {file}: {reply['error']}\n{reply.get('trace', '')}{source.text}"
            )
        built = self._read(key)
        if built is None:
            raise BuildFailed(f"the compiled kernel {self.folder / key}.cubin disappeared")
        return Binary(key, built.code, built.record, hit=False)

    def _places(self, key: str, brought: Binaries | None) -> Iterator[dict[str, Path]]:
        """Where the record and the binary of a key may lie."""
        names = f"{key}.json", f"{key}.cubin"
        given = {name: path for name in names if brought is not None and (path := brought.find(name)) is not None}
        if len(given) == len(names):
            yield given
        for folder in dict.fromkeys((self._shared or self.folder, self.folder)):
            yield {name: folder / name for name in names}

    def _read(self, key: str, brought: Binaries | None = None) -> Binary | None:
        """The record is written last, so a kernel that has one is whole."""
        for files in self._places(key, brought):
            try:
                record = json.loads(files[f"{key}.json"].read_bytes())
                return Binary(key, files[f"{key}.cubin"].read_bytes(), record, hit=True)
            except (OSError, json.JSONDecodeError):
                continue  # not there, or not readable: it is compiled
        return None

    def close(self) -> None:
        """Ends the compiling process and removes the temporary folder."""
        self._server.close()
        self._scratch.remove()
