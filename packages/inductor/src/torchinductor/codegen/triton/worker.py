"""Compiles Triton sources in a process of its own: a JSON request a line on stdin, a JSON reply a line on stdout.

Started by path with a plain interpreter, so it imports triton and nothing else; its arguments are the architecture and
how many requests are served at a time. They are served by forks, which find triton imported and warm: as many as that,
and a fork takes the next request when it is done with one, since the pages that it has to make its own take longer than
half a kernel. A request has
`id` (of the reply too), `source` (a file) and `text` (what is in it), `name`, `signature` ([[parameter, type], ...],
pointers first), `divisors` ([[position, number], ...]: what integers are multiples of), `warps`, `stages`, `arch` and
`target` (path of the result without suffix). The binary goes to `target`.cubin, then what launching needs to
`target`.json; all files appear by atomic rename."""

import collections
import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import select
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import triton
from triton import knobs
from triton._C.libtriton import llvm, nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager

IDLE_SECONDS = 3.0  # for which a fork waits for more to do: a backward is lowered in less
MOST_KERNELS = 24  # that a fork serves
_DONE = struct.Struct("q")


class Request(TypedDict):
    """What a line on stdin asks for, beside its `id`: see above."""

    source: str
    text: str
    name: str
    signature: Sequence[tuple[str, str]]
    divisors: Sequence[tuple[int, int]]
    warps: int
    stages: int
    arch: int
    asserts: bool
    target: str


class Intermediate(FileCacheManager):
    """Triton's cache, in which a fork alone reads what it has written: that a file appears whole takes a folder each,
    which is a fifteenth of the time of a kernel."""

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Writes a file of the kernel; where it is."""
        path: str = self._make_path(filename)
        with open(path, "wb") as file:
            file.write(data if isinstance(data, bytes) else str(data).encode())
        return path


def compile_source(request: Request) -> None:
    """Writes the binary and the record of a request. Raises whatever the compiler does."""
    write(request["source"], request["text"].encode())
    spec = importlib.util.spec_from_file_location("generated_kernel", request["source"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = dict(request["signature"])
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    # The launcher hands over only pointers that are multiples of 16.
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    attributes |= {(i,): [["tt.divisibility", divisor]] for i, divisor in request["divisors"]}
    source = ASTSource(getattr(module, request["name"]), signature, {}, attributes)
    # Triton keeps assertions only in debug mode. It writes checks for overflow in any mode, and drops them later.
    options = {"num_warps": request["warps"], "num_stages": request["stages"], "sanitize_overflow": False}
    options |= {"debug": True} if request["asserts"] else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=options)
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.S)
    parameters = entry.group(1).count(".param") if entry else len(signature)
    record = {
        "name": compiled.metadata.name,
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "scratch": parameters - len(signature),
        "scratch_bytes": getattr(compiled.metadata, "global_scratch_size", 0),
    }
    write(request["target"] + ".ptx", compiled.asm["ptx"].encode())
    write(request["target"] + ".cubin", compiled.asm["cubin"])
    write(request["target"] + ".json", json.dumps(record).encode())


def write(path: str, data: bytes) -> None:
    """Writes a file that appears whole."""
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def link(module: object, libraries: Sequence[str], whole: Callable[[object, Sequence[str]], None]) -> None:
    """Takes the place of Triton's own linking, `whole`: libdevice is read where functions are left undefined alone."""
    whole(module, [str(Path(__file__).with_name("approximations.ll"))])
    if nvidia.has_extern_deps(module):
        whole(module, libraries)


WARM = """
import triton
import triton.language as tl


@triton.jit
def warm(p0):
    tl.store(p0 + tl.arange(0, 32), 0.0)
"""


def warm(arch: int) -> None:
    """Compiles a kernel, so that forks find the compiler's own start-up done."""
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "warm")
        compile_source(
            {
                "source": str(Path(folder) / "warm.py"),
                "text": WARM,
                "name": "warm",
                "signature": [("p0", "*fp32")],
                "divisors": [],
                "warps": 1,
                "stages": 1,
                "arch": arch,
                "asserts": False,
                "target": target,
            }
        )


def serve(request: Request) -> dict[str, str]:
    """Compiles; the reply is empty, or says what went wrong."""
    try:
        compile_source(request)
        return {}
    except Exception as error:  # any fault of the compiler is the reply
        return {"error": f"{type(error).__name__}: {error}"[:1500], "trace": traceback.format_exc()[-1500:]}


def reply(pipe: int, number: int, content: dict[str, str]) -> None:
    """One line, short enough that the pipe keeps it whole beside other processes' lines."""
    line = json.dumps({"id": number, **content}, ensure_ascii=False).encode()[: select.PIPE_BUF - 1]
    os.write(pipe, line + b"\n")


@dataclass(eq=False)
class Server:
    """A fork, the pipe by which it is given requests, and what it is serving."""

    process: int
    requests: int
    serving: int | None = None
    served: int = 0

    def give(self, number: int, request: Request) -> None:
        """Hands it a request: it is idle, and reads."""
        self.serving = number
        self.served += 1
        rest = memoryview(json.dumps([number, request]).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # it has died, which the parent is told of
            while rest:
                rest = rest[os.write(self.requests, rest) :]

    def end(self) -> None:
        """Lets it end once it is done."""
        os.close(self.requests)


class Pool:
    """The forks, no more than `most` at a time. They reply to `pipe`, and tell by `free` who is done."""

    def __init__(self, most: int, pipe: int) -> None:
        self.most, self.pipe = most, pipe
        self.free, self._done = os.pipe()
        self.servers: dict[int, Server] = {}

    @property
    def serving(self) -> bool:
        """Whether one is at work."""
        return any(server.serving is not None for server in self.servers.values())

    def idle(self) -> Server | None:
        """One that can take a request; None where all that may be are at work."""
        server = next((server for server in self.servers.values() if server.serving is None), None)
        if server is None and len(self.servers) < self.most:
            server = self._fork()
            self.servers[server.process] = server
        return server

    def freed(self) -> None:
        """Reads who is done. One that has served its number ends: what Triton keeps of each kernel is never looked
        through, which would take a tenth of the time."""
        for (process,) in struct.iter_unpack("q", os.read(self.free, _DONE.size << 8)):
            server = self.servers.get(process)
            if server is not None:
                server.serving = None
                if server.served >= MOST_KERNELS:
                    del self.servers[process]
                    server.end()

    def end_idle(self) -> None:
        """Ends those that have nothing to do."""
        for server in [server for server in self.servers.values() if server.serving is None]:
            del self.servers[server.process]
            server.end()

    def reap(self) -> None:
        """Reports what those were serving that ended without a reply."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                server = self.servers.pop(ended[0], None)
                if server is not None:
                    server.end()
                    if server.serving is not None:
                        told = f"the compiling process ended with status {ended[1]}"
                        reply(self.pipe, server.serving, {"error": told})

    def _fork(self) -> Server:
        requests, given = os.pipe()
        process = os.fork()
        if process:
            os.close(requests)
            return Server(process, given)
        status = 1
        try:
            for pipe in (given, *(other.requests for other in self.servers.values())):
                os.close(pipe)  # else it would not see the end of its own
            self._serve(requests)
            status = 0
        finally:
            os._exit(status)

    def _serve(self, requests: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with os.fdopen(requests) as lines:
            for line in lines:
                number, request = json.loads(line)
                reply(self.pipe, number, serve(request))
                os.write(self._done, _DONE.pack(os.getpid()))


def told_of_ends() -> int:
    """A pipe that can be read from when a process has ended."""
    ended, tell = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    return ended


def main() -> None:
    """Serves requests until an empty line, at which it ends what has begun, or until the end of stdin, which processes
    that were forked may hold open too."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # what triton prints must not mix with the replies
    knobs.cache.manager_class = Intermediate
    llvm.link_extern_libs = functools.partial(link, whole=llvm.link_extern_libs)
    warm(int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    gc.disable()  # a fork ends soon: to look through what the compiler made would take a tenth of its time
    pool, ended = Pool(int(sys.argv[2]), pipe), told_of_ends()
    asked: collections.deque[Request] = collections.deque()
    text, last = b"", False
    while not last or pool.serving:
        while asked and not last and (server := pool.idle()) is not None:
            request = asked.popleft()
            server.give(request.pop("id"), request)  # type: ignore[typeddict-item]
        watched = [pool.free, ended] if last else [0, pool.free, ended]
        ready, _, _ = select.select(watched, [], [], IDLE_SECONDS if pool.servers else None)
        if not ready:
            pool.end_idle()
        if pool.free in ready:  # before those that ended: it may have been done by then
            pool.freed()
        if ended in ready:
            os.read(ended, 1 << 12)
            pool.reap()
        if 0 in ready:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *lines, text = (text + piece).split(b"\n")
            asked.extend(json.loads(line) for line in lines if line)
            last = b"" in lines


if __name__ == "__main__":
    main()
