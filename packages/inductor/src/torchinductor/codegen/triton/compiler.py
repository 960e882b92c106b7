"""Turns Triton sources into binaries: a disk cache keyed by content, and a process that forks for what it lacks."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TypedDict

from primtorch import forks
from primtorch.frozen import record
from torchinductor.cache import MOST_WAITING, DiskCache, turn_at_once
from torchinductor.errors import BuildFailed
from torchinductor.schemas import Binaries

from .writer import TritonSource

_log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("worker.py")
Reply = dict[str, str]


class Record(TypedDict):
    """What the worker says of a kernel: the function's name, warps, bytes of shared memory, how many parameters it has
    beyond those of the source, and how many bytes of memory of its own one of them is to point to."""

    name: str
    warps: int
    shared: int
    scratch: int
    scratch_bytes: int


@record
class Binary:
    """A compiled kernel, and what the worker says of it."""

    key: str
    code: bytes
    record: Record
    hit: bool


@record
class Compiling:
    """Sources that are being compiled.

    Attributes:
        found: what was in a cache.
        wait: gives the others, by their places; None where nothing is lacking.
        anew: compiles all of them, for a forked process, where nobody waits for the replies.
        process: which is waiting for them.
    """

    found: Sequence[Binary | None]
    wait: Callable[[], Mapping[int, Binary]] | None
    anew: Callable[[], list[Binary]]
    process: int = field(default_factory=os.getpid)

    @property
    def apart(self) -> bool:
        """Whether the compiling process is at work."""
        return self.wait is not None

    def finish(self) -> list[Binary]:
        """Waits for the binaries, in the sources' order. Raises BuildFailed."""
        if self.wait is not None and self.process != os.getpid():
            return self.anew()
        built = self.wait() if self.wait is not None else {}
        return [built[place] if binary is None else binary for place, binary in enumerate(self.found)]


@functools.cache  # each kernel's key has it, and to look it up takes a millisecond
def triton_version() -> str:
    """That of the installed package; "" where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


class _Worker:
    """A compiling process and two threads: one hands it the requests, the other their replies to those who wait.

    The thread that compiles has the interpreter to itself nearly all the time, so that a request must not need it once
    more before it is under way: the process keeps the order of what it was asked for, and how much is done at a time.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.waiting: dict[int, Future[Reply]] = {}
        self._lock = forks.lock()
        self._ended = False
        for run in (self._hand_over, self._listen):
            threading.Thread(target=run, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return not self._ended and self.process.poll() is None

    def ask(self, requests: Mapping[int, Mapping[str, object]]) -> dict[int, Future[Reply]]:
        """The replies to requests by their numbers; an "error" entry where the kernel did not compile."""
        replies: dict[int, Future[Reply]] = {number: Future() for number in requests}
        lines = [json.dumps({"id": number, **request}) + "\n" for number, request in requests.items()]
        with self._lock:
            if not self._ended:
                self.waiting.update(replies)
                self.requests.put("".join(lines).encode())
                return replies
        for reply in replies.values():
            reply.set_result(self._over())
        return replies

    def close(self) -> None:
        """Ends the process, once it has compiled what it has begun; who waits for more is told."""
        self.requests.put(None)
        self.process.wait()

    def _over(self) -> Reply:
        return {"error": f"the compiling process ended with status {self.process.wait()}"}

    def _hand_over(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError), self.process.stdin as pipe:  # it has ended, which the other thread tells
            while (text := self.requests.get()) is not None:
                _send(pipe, text)
            _send(pipe, b"\n")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in _lines(self.process.stdout):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # a reply that was cut to the pipe's length
                number = re.search(rb'"id": (\d+)', line)
                found = {"id": int(number.group(1)) if number else -1, "error": line.decode(errors="replace")}
            reply = self.waiting.pop(found.pop("id"), None)
            if reply is not None:
                reply.set_result(found)
        over = self._over()
        with self._lock:
            self._ended = True
            lost = list(self.waiting.values())
        for reply in lost:
            reply.set_result(over)
        self.requests.put(None)


class Server:
    """The compiling process. One that died is replaced at the next request, and a forked process has one of its own."""

    def __init__(self, arch: int, scratch: forks.ScratchFolder, parallel: int) -> None:
        self._arch = arch
        self._scratch = scratch
        self._parallel = parallel
        self._lock = forks.lock()
        self._worker: _Worker | None = None
        self._count = 0
        forks.in_child(self._forked)

    def _forked(self) -> None:
        """The compiling process is another's, and those who wait for it are not here."""
        self._worker = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The process that was started last."""
        return self._worker.process if self._worker is not None else None

    def start(self) -> None:
        """Starts the process, which takes about a second to be ready; does not wait for it."""
        with self._lock:
            self._started()

    def _started(self) -> _Worker:
        if self._worker is None or not self._worker.alive:
            process = forks.process(
                [sys.executable, str(WORKER), str(self._arch), str(self._parallel)],
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
            self._worker = _Worker(process)
        return self._worker

    def ask(self, requests: Sequence[Mapping[str, object]]) -> list[Future[Reply]]:
        """The replies; an "error" entry where the kernel did not compile. They are served in this order."""
        with self._lock:
            numbers = range(self._count, self._count + len(requests))
            self._count = numbers.stop
            replies = self._started().ask(dict(zip(numbers, requests, strict=True)))
        return list(replies.values())

    def close(self) -> None:
        """Ends the process, once it has compiled what it has begun; who waits for more is told."""
        if self._worker is not None:
            self._worker.close()


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    text = b""
    while piece := pipe.read(1 << 16):
        *lines, text = (text + piece).split(b"\n")
        yield from lines


def _send(pipe: IO[bytes], text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[pipe.write(rest) :]


def _ended(over: Callable[[], None], reply: Future[Reply]) -> None:
    over()


def _nothing() -> None:
    """Ends the turn of who has none."""


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
        keys = [self.key(source) for source in sources]
        found = [self._read(key, brought) for key in keys]
        lacking = {place: keys[place] for place, binary in enumerate(found) if binary is None}
        missing = {key: sources[place] for place, key in lacking.items()}
        missing = dict(sorted(missing.items(), key=lambda item: -len(item[1].text)))
        replies = self._ask(missing) if missing else {}

        def wait() -> dict[int, Binary]:
            built = self._wait(missing, replies)
            return {place: built[key] for place, key in lacking.items()}

        return Compiling(found, wait if missing else None, functools.partial(self.compile, sources, brought))

    def _wait(self, sources: Mapping[str, TritonSource], replies: dict[str, Future[Reply]]) -> dict[str, Binary]:
        """The binaries by their keys. What another process or thread had begun is waited for, and compiled here where
        that made nothing of it, or takes too long."""
        built = {key: self._built(key, sources[key], reply) for key, reply in replies.items()}
        end = time.monotonic() + MOST_WAITING
        while rest := {key: source for key, source in sources.items() if key not in built}:
            built |= {key: binary for key in rest if (binary := self._read(key)) is not None}
            rest = {key: source for key, source in rest.items() if key not in built}
            late = bool(rest) and time.monotonic() > end
            if late:
                _log.warning("another process takes more than %.0f s for kernels: they are compiled here", MOST_WAITING)
            asked = self._ask(rest, in_turn=not late) if rest else {}
            built |= {key: self._built(key, sources[key], reply) for key, reply in asked.items()}
            if rest and not asked:
                time.sleep(0.01)
        return built

    def _ask(self, sources: Mapping[str, TritonSource], in_turn: bool = True) -> dict[str, Future[Reply]]:
        """The replies to requests for sources, by their keys. Ranks of one machine ask for the same kernels at the same
        time: `in_turn`, what another process or thread has the turn of is left to that."""
        ours: dict[str, Callable[[], None]] = {}
        with ExitStack() as stack:
            for key in sources:
                over = turn_at_once(self.folder / f"{key}.json") if in_turn else _nothing
                if over is not None and self._read(key) is not None:  # made since it was looked for
                    over()
                elif over is not None:
                    ours[key] = stack.callback(over)
            replies = self._server.ask([self._request(key, sources[key]) for key in ours]) if ours else []
            stack.pop_all()  # they end with the replies
        for over, reply in zip(ours.values(), replies, strict=True):
            reply.add_done_callback(functools.partial(_ended, over))
        return dict(zip(ours, replies, strict=True))

    def _request(self, key: str, source: TritonSource) -> dict[str, object]:
        return {
            "source": str(self.folder / f"{key}.py"),
            "text": source.text,
            "name": source.name,
            "signature": source.signature,
            "divisors": source.divisors,
            "warps": source.warps,
            "stages": source.stages,
            "arch": self.arch,
            "asserts": "tl.device_assert" in source.text,
            "target": str(self.folder / key),
        }

    def _built(self, key: str, source: TritonSource, reply: Future[Reply]) -> Binary:
        said = reply.result()
        if "error" in said:
            file = self.folder / f"{key}.py"
            raise BuildFailed(f"Triton could not compile {file}: {said['error']}\n{said.get('trace', '')}{source.text}")
        built = self._read(key)
        if built is None:
            raise BuildFailed(f"the compiled kernel {self.folder / key}.cubin disappeared")
        return Binary(key, built.code, built.record, hit=False)

    def files(self, source: TritonSource, brought: Binaries | None = None) -> dict[str, Path] | None:
        """The files of a source that was compiled before, by name."""
        key = self.key(source)
        for files in self._places(key, brought):
            if all(path.exists() for path in files.values()):
                return files
        return None

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
