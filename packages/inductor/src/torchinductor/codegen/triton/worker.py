"""Compiles Triton sources in a process of its own: a JSON request a line on stdin, a JSON reply a line on stdout.

Started by path with a plain interpreter, so it imports triton and nothing else; its arguments are the architecture and
how many requests are served at a time. Each is served by a fork, which finds triton imported and warm. A request has
`id` (of the reply too), `source` (a file) and `text` (what is in it), `name`, `signature` ([[parameter, type], ...],
pointers first), `divisors` ([[position, number], ...]: what integers are multiples of), `warps`, `stages`, `arch` and
`target` (path of the result without suffix). The binary goes to `target`.cubin, then what launching needs to
`target`.json; all files appear by atomic rename."""

import collections
import functools
import gc
import importlib.util
import json
import os
import re
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

import triton
from triton import knobs
from triton._C.libtriton import llvm, nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager


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
    """Triton's cache, in which a fork of this process alone reads what it has written itself: that a file appears
    whole takes a folder each, which is a fifteenth of the time of a kernel."""

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


def fork(number: int, request: Request, pipe: int) -> int:
    """Starts serving a request; returns the process."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reply(pipe, number, serve(request))
        status = 0
    finally:
        os._exit(status)


def reap(running: dict[int, int], pipe: int) -> None:
    """Reports processes that ended without a reply."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        number = running.pop(process)
        if status != 0:
            reply(pipe, number, {"error": f"the compiling process ended with status {status}"})


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
    gc.disable()  # a fork ends with its kernel: to look through what the compiler made would take a tenth of its time
    parallel, ended = int(sys.argv[2]), told_of_ends()
    running: dict[int, int] = {}  # process -> request
    asked: collections.deque[Request] = collections.deque()
    text, last = b"", False
    while not last or running:
        while asked and not last and len(running) < parallel:
            request = asked.popleft()
            number = request.pop("id")  # type: ignore[typeddict-item]
            running[fork(number, request, pipe)] = number
        ready, _, _ = select.select([ended] if last else [0, ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 12)
            reap(running, pipe)
        if 0 in ready:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *lines, text = (text + piece).split(b"\n")
            asked.extend(json.loads(line) for line in lines if line)
            last = b"" in lines


if __name__ == "__main__":
    main()
