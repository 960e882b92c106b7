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
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TypedDict

from primtorch import forks
from torchinductor.cache import DiskCache, turn, turn_at_once
from torchinductor.errors import BuildFailed
from torchinductor.schemas import Binaries

from .writer import TritonSource

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
        lacking: the others by their places: each waits for its binary.
        anew: compiles all of them, for a forked process, where nobody waits for the replies.
        process: which is waiting for them.
    """

    found: Sequence[Binary | None]
    lacking: Mapping[int, Callable[[], Binary]]
    anew: Callable[[], list[Binary]]
    process: int = field(default_factory=os.getpid)

    @property
    def apart(self) -> bool:
        """Whether the compiling process is at work."""
        return bool(self.lacking)

    def finish(self) -> list[Binary]:
        """Waits for the binaries, in the sources' order. Raises BuildFailed."""
        if self.lacking and self.process != os.getpid():
            return self.anew()
        return [self.lacking[place]() if binary is None else binary for place, binary in enumerate(self.found)]


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


def _same(binary: Binary) -> Binary:
    return binary


def _ended(over: Callable[[], None], reply: Future[Reply]) -> None:
    over()


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
        missing = {key: source for key, source, binary in zip(keys, sources, found, strict=True) if binary is None}
        waits = self._begun(dict(sorted(missing.items(), key=lambda item: -len(item[1].text))))
        lacking = {place: waits[key] for place, key in enumerate(keys) if found[place] is None}
        return Compiling(found, lacking, functools.partial(self.compile, sources, brought))

    def _begun(self, sources: Mapping[str, TritonSource]) -> dict[str, Callable[[], Binary]]:
        """Asks for sources by their keys; what waits for each binary. Ranks of one machine ask for the same kernels at
        the same time: what another process has begun is waited for, and compiled here where that made nothing of it."""
        waits: dict[str, Callable[[], Binary]] = {}
        turns = {key: turn_at_once(self.folder / f"{key}.json") for key in sources}
        for key, over in turns.items():
            if over is None:
                waits[key] = functools.partial(self._waited, key, sources[key])
            elif (binary := self._read(key)) is not None:  # made since it was looked for
                over()
                waits[key] = functools.partial(_same, binary)
        asked = {key: over for key, over in turns.items() if over is not None and key not in waits}
        with ExitStack() as stack:
            for over in asked.values():
                stack.callback(over)
            replies = self._server.ask([self._request(key, sources[key]) for key in asked]) if asked else []
            stack.pop_all()  # they end with the replies
        for (key, over), reply in zip(asked.items(), replies, strict=True):
            reply.add_done_callback(functools.partial(_ended, over))
            waits[key] = functools.partial(self._built, key, sources[key], reply)
        return waits

    def _waited(self, key: str, source: TritonSource) -> Binary:
        """What another process, or another thread, was compiling."""
        with turn(self.folder / f"{key}.json"):
            found = self._read(key)
            return found or self._built(key, source, self._server.ask([self._request(key, source)])[0])

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
