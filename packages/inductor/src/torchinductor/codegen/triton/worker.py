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
import inspect
import json
import os
import re
import select
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import triton
from triton import knobs
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.compiler import ASTSource, make_backend

IDLE_SECONDS = 3.0  # for which a fork waits for more to do: a backward is lowered in less
MOST_KERNELS = 24  # that a fork serves
STARTED_WITH = ["target", "options", "codegen_fns", "module_map", "context"]  # what a source's first module is made of
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


# What a kernel without matrix products, descriptors and copies by other units is made of. An operation that is not here
# keeps all passes, so that one which a later Triton brings costs time at most.
PLAIN = re.compile(
    r"(arith|math|cf|ub)\.\w+|builtin\.module|scf\.(if|for|while|condition|yield)|(gpu|ttg)\.barrier|"
    r"tt\.(func|return|get_program_id|assert|make_range|splat|unsplat|broadcast|expand_dims|reshape|trans|join|split|cat|"
    r"addptr|load|store|atomic_rmw|bitcast|int_to_ptr|ptr_to_int|fp_to_fp|clampf|mulhiui|precise_divf|precise_sqrt|"
    r"extern_elementwise|elementwise_inline_asm|reduce(\.return)?|scan(\.return)?)|"
    r"ttg\.(convert_layout|async_copy_global_to_local|async_commit_group|async_wait|memdesc_index|"
    r"local_(alloc|dealloc|load|store|barrier))"
)
LOOPS = frozenset({"scf.for", "scf.while"})
OTHERS: frozenset[str] = frozenset()  # operations that a plain kernel has none of

# Which operations a pass is about, for those that find nothing to do in most kernels: what they look for, and what is
# verified behind each, takes a fifth of a kernel's time. Not every Triton has all of them.
CONCERNS = {
    "ttgpuir.f32_dot_tc": OTHERS,
    "ttgpuir.accelerate_matmul": OTHERS,
    "ttgpuir.optimize_dot_operands": OTHERS,
    "ttgpuir.optimize_accumulator_init": OTHERS,
    "ttgpuir.prefetch": OTHERS,
    "ttgpuir.reduce_data_duplication": OTHERS,
    "ttgpuir.hoist_tmem_alloc": OTHERS,
    "ttgpuir.warp_specialize": OTHERS,
    "ttgpuir.optimize_partition_warps": OTHERS,
    "hopper.hopper_warpspec": OTHERS,
    "ttnvgpuir.plan_cta": OTHERS,
    "ttnvgpuir.promote_lhs_to_tmem": OTHERS,
    "ttnvgpuir.remove_tmem_tokens": OTHERS,
    "ttnvgpuir.optimize_descriptor_encoding": OTHERS,
    "ttnvgpuir.optimize_tmem_layouts": OTHERS,
    "ttnvgpuir.tmem_load_reduce": OTHERS,
    "ttnvgpuir.interleave_tmem": OTHERS,
    "ttnvgpuir.tma_lowering": OTHERS,
    "ttnvgpuir.fence_insertion": OTHERS,
    "ttnvgpuir.lower_mma": OTHERS,
    "ttnvgpuir.allocate_tensor_memory": OTHERS,
    "ttnvgpuir.check_matmul_two_cta": OTHERS,
    "ttnvgpuir.proxy_fence_insertion": OTHERS,
    "ttnvgpuir.tmem_barrier_insertion": OTHERS,
    "ttnvgpuir.initialize_ws_cluster_barriers": OTHERS,
    "ttnvgpuir.warp_specialize_to_llvm": OTHERS,
    "gluon.inliner": OTHERS,
    "ttgpuir.fuse_nested_loops": LOOPS,
    "ttir.triton_licm": LOOPS,
    "ttgpuir.assign_latencies": LOOPS,
    "ttgpuir.schedule_loops": LOOPS,
    "ttgpuir.pipeline": LOOPS,
    "ttgpuir.coalesce_async_copy": LOOPS,
    "ttgpuir.optimize_thread_locality": LOOPS | {"tt.reshape"},
    "ttgpuir.combine_tensor_select_and_if": frozenset({"scf.if"}),
    "convert.scf_to_cf": LOOPS | {"scf.if"},
}
TIDY = frozenset({"common.canonicalizer", "common.cse", "ttir.loop_aware_cse"})  # once is enough where nothing loops


def chosen(names: Sequence[str], operations: Set[str]) -> list[int]:
    """The places, among the passes of a manager, of those that a module with these operations needs."""
    if not all(map(PLAIN.fullmatch, operations)):
        return list(range(len(names)))
    needed = [at for at, name in enumerate(names) if not CONCERNS.get(name, operations).isdisjoint(operations)]
    # What stood between two runs of a pass may have been left out, and with it what the second one was for.
    needed = [at for place, at in enumerate(needed) if not place or names[at] != names[needed[place - 1]]]
    last = {names[at]: at for at in needed if names[at] in TIDY and operations.isdisjoint(LOOPS)}
    return [at for at in needed if last.get(names[at], at) == at]


class Manager:
    """Takes the place of Triton's pass manager: runs the passes that the module needs, of those that it was given."""

    def __init__(self, context: object) -> None:
        self._whole = ir.pass_manager(context)
        self._added: list[tuple[str, Callable[[object], None]]] = []

    def add(self, name: str, add: Callable[..., None], *arguments: object) -> None:
        """Takes a pass, which `add` gives to Triton's manager."""
        self._added.append((name, lambda manager: add(manager, *arguments)))

    def run(self, module: Any, name: str) -> None:
        """Changes the module."""
        operations: set[str] = set()
        module.walk(lambda operation: operations.add(operation.get_name()))
        for place in chosen([name for name, _ in self._added], operations):
            self._added[place][1](self._whole)
        self._whole.run(module, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def recorded(passes: ModuleType) -> SimpleNamespace:
    """What is in one of Triton's modules, where the functions that add a pass to a manager give it to a Manager."""
    found = {}
    for name, value in vars(passes).items():
        if isinstance(value, ModuleType):
            value = recorded(value)
        elif name.startswith("add_"):
            kind = f"{passes.__name__.rpartition('.')[2]}.{name.removeprefix('add_')}"
            value = functools.partial(_record, kind, value)
        found[name] = value
    return SimpleNamespace(**found)


def _record(name: str, add: Callable[..., None], manager: Manager, *arguments: object) -> None:
    manager.add(name, add, *arguments)


def choose_passes() -> None:
    """From now on kernels are compiled by the passes that they need. Where Triton is not as this takes it to be, it
    goes its own way."""
    if hasattr(ir.module, "walk") and hasattr(ir.operation, "get_name") and isinstance(nvidia_compiler.ir, ModuleType):
        nvidia_compiler.passes = recorded(nvidia_compiler.passes)
        nvidia_compiler.nvidia = recorded(nvidia_compiler.nvidia)
        nvidia_compiler.ir = SimpleNamespace(**{**vars(ir), "pass_manager": Manager})


@functools.cache  # a process makes one, which takes as long as a small kernel's passes
def context(target: GPUTarget) -> Any:
    """What modules are made in."""
    made = ir.context()
    ir.load_dialects(made)
    make_backend(target).load_dialects(made)
    return made


Compiled = tuple[str, bytes, dict[str, Any]]  # PTX, the binary, and what Triton says of them


def by_stages(source: ASTSource, target: GPUTarget, options: dict[str, object]) -> Compiled:
    """Takes the place of Triton's own driver of its stages, which also keeps what they make: to find out what a source
    depends on, and to print each module, takes a twentieth of the time."""
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    made = {"source": source.make_ir(target, parsed, functions, modules, context(target))}
    metadata = {"target": target, **vars(parsed)}
    for name, stage in stages.items():
        made[name] = stage(next(reversed(made.values())), metadata)
    return made["ptx"], made["cubin"], metadata


def by_triton(source: ASTSource, target: GPUTarget, options: dict[str, object]) -> Compiled:
    """By Triton's own driver."""
    compiled = triton.compile(source, target=target, options=options)
    return compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata._asdict()


def driver() -> Callable[[ASTSource, GPUTarget, dict[str, object]], Compiled]:
    """Triton's own where its stages are not known to be driven in this way, or where it is told to write them out or to
    take them from files."""
    known = list(inspect.signature(ASTSource.make_ir).parameters)[1:] == STARTED_WITH
    asked = knobs.compilation.dump_ir or knobs.compilation.override
    return by_stages if known and not asked else by_triton


def block(lines: Sequence[str], whole: Callable[[Sequence[str]], Sequence[str]]) -> Sequence[str]:
    """Takes the place of `inspect.getblock`, `whole`, which takes a text's tokens apart to find out where a function
    ends: in the texts that are compiled here, the next thing begins at the margin."""
    at = next((at for at, line in enumerate(lines) if line.startswith("def ")), None)
    if at is None:
        return whole(lines)
    return lines[: next((end for end in range(at + 1, len(lines)) if lines[end][0] not in " \n)"), len(lines))]


def executed(source: str) -> ModuleType:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location("generated_kernel", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    whole = inspect.getblock
    inspect.getblock = functools.partial(block, whole=whole)  # type: ignore[assignment]
    try:
        spec.loader.exec_module(module)
    finally:
        inspect.getblock = whole
    return module


def compile_source(request: Request) -> None:
    """Writes the binary and the record of a request. Raises whatever the compiler does."""
    write(request["source"], request["text"].encode())
    module = executed(request["source"])
    signature = dict(request["signature"])
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    # The launcher hands over only pointers that are multiples of 16.
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    attributes |= {(i,): [["tt.divisibility", divisor]] for i, divisor in request["divisors"]}
    source = ASTSource(getattr(module, request["name"]), signature, {}, attributes)
    # Triton keeps assertions only in debug mode. It writes checks for overflow in any mode, and drops them later.
    options: dict[str, object] = {
        "num_warps": request["warps"],
        "num_stages": request["stages"],
        "sanitize_overflow": False,
    }
    options |= {"debug": True} if request["asserts"] else {}
    ptx, binary, metadata = driver()(source, GPUTarget("cuda", request["arch"], 32), options)
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.S)
    parameters = entry.group(1).count(".param") if entry else len(signature)
    record = {
        "name": metadata["name"],
        "warps": metadata["num_warps"],
        "shared": metadata["shared"],
        "scratch": parameters - len(signature),
        "scratch_bytes": metadata.get("global_scratch_size") or 0,
    }
    write(request["target"] + ".ptx", ptx.encode())
    write(request["target"] + ".cubin", binary)
    write(request["target"] + ".json", json.dumps(record).encode())


def write(path: str, data: bytes) -> None:
    """Writes a file that appears whole."""
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def link(module: Any, libraries: Sequence[str], whole: Callable[[object, Sequence[str]], None]) -> None:
    """Takes the place of Triton's own linking, `whole`: libdevice is read where functions of its are left undefined
    alone. What reports a failed assertion is the driver's."""
    whole(module, [str(Path(__file__).with_name("approximations.ll"))])
    if any(function.is_declaration() and function.name.startswith("__nv_") for function in module.get_functions()):
        whole(module, libraries)


WARM = """
import triton
import triton.language as tl
from triton.language.extra import libdevice as m


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
    sys.dont_write_bytecode = True  # a source is read once
    choose_passes()
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
