"""Processes that are forked while kernels are being built: they build what they need, by a compiling process of their
own, and keep nothing of the other process's open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import proc_files  # tools/check
import pytest
import torch

import primtorch
from torchinductor import CppBackend, InductorOptions, begin_graph, codegen_for, register_codegen
from torchinductor.cache import turn, turn_at_once
from torchinductor.codegen.base import Building, Built, generated
from torchinductor.errors import BuildFailed
from torchinductor.source import planned_operations

pytest.importorskip("triton")

from torchinductor.codegen.triton.compiler import TritonCompiler  # noqa: E402
from torchinductor.codegen.triton.writer import TritonSource  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SECONDS = 60.0


def of_child(run: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> bool:
    """What a forked process says, in time; `meanwhile` is done by this one."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            torch.set_num_threads(1)  # the others of torch's own are the other process's: it would wait for them
            code = 0 if run() else 1
        finally:
            os._exit(code)
    meanwhile()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def sources(number: int) -> list[TritonSource]:
    """Kernels that nobody has built."""
    x = torch.empty(64, 64)
    programs = (lambda x: torch.exp(x * number), lambda x: (x + number).sum(-1))
    found = []
    for program in programs:
        planned = planned_operations(primtorch.lower(primtorch.trace(program, x)), "cuda")
        found += [generated(operation, InductorOptions()).meta for operation in planned]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("cached", [True, False])
def test_what_was_begun_is_compiled_in_either_process(tmp_path: Path, cached: bool) -> None:
    compiler = TritonCompiler(90, tmp_path / "cache" if cached else None, workers=2)
    begun = compiler.begin(sources(3))
    assert begun.apart

    def child() -> bool:
        found = begun.finish()
        more = compiler.compile(sources(4))
        compiler.close()
        return all(binary.code[:4] == b"\x7fELF" for binary in (*found, *more)) and len(found) == 2

    assert of_child(child)
    assert [binary.code[:4] for binary in begun.finish()] == [b"\x7fELF"] * 2
    assert all(binary.hit == cached for binary in compiler.compile(sources(4)))
    compiler.close()


def test_a_forked_process_keeps_no_compiling_process_alive() -> None:
    compiler = TritonCompiler(90, workers=1)
    compiler.compile(sources(5)[:1])
    server = compiler._server.process
    assert server is not None

    def meanwhile() -> None:
        begun = time.monotonic()
        compiler.close()
        assert server.returncode == 0 and time.monotonic() - begun < SECONDS / 2

    def child() -> bool:
        time.sleep(2)
        return compiler._server.process is None and len(compiler.compile(sources(6)[:1])) == 1

    assert of_child(child, meanwhile)


def test_a_compiling_process_ends_with_the_one_that_asks_it_though_its_children_live(tmp_path: Path) -> None:
    """Its requests end where they are held open by no forked process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "from torchinductor.codegen.triton.compiler import TritonCompiler\n"
        "compiler = TritonCompiler(90, workers=1)\n"
        "compiler.start()\n"
        "if os.fork() == 0:\n"
        "    os.close(1)\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
        "print(compiler._server.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=SECONDS
    )
    server, end = int(done.stdout), time.monotonic() + 25
    while proc_files.running(server):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_requests_need_nothing_more_of_the_process_that_asked(tmp_path: Path) -> None:
    """A thread that computes in Python lets others run 200 times a second: none may have to, for a kernel to be
    compiled. Here all of them are stopped."""
    program, folder = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from test_inductor_forks import sources\n"
        "from torchinductor.codegen.triton.compiler import TritonCompiler\n"
        "compiler = TritonCompiler(90, Path(sys.argv[1]), workers=1)\n"
        "begun = compiler.begin([*sources(8), *sources(9)])\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "assert [binary.hit for binary in begun.finish()] == [False] * 4\n"
        "compiler.close()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    stopped = subprocess.Popen([sys.executable, str(program), str(folder)], env={**os.environ, "PYTHONPATH": path})
    try:
        # Else kernels that are ready before it stops would have it go on before, and stop for good.
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        end = time.monotonic() + SECONDS
        while len(list(folder.glob("*.json"))) < 4:
            assert time.monotonic() < end and stopped.poll() is None
            time.sleep(0.05)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(SECONDS) == 0


def test_requests_of_a_process_that_dies_or_is_ended_are_told(tmp_path: Path) -> None:
    """Also those that it has not begun; the next request starts another, and nobody holds a turn."""
    compiler = TritonCompiler(90, tmp_path / "cache", workers=1)
    for end in (lambda: os.kill(compiler._server.process.pid, signal.SIGKILL), compiler._server.close):  # type: ignore[union-attr]
        compiler.start()
        begun = compiler.begin([*sources(10), *sources(11), *sources(12)])
        end()
        with pytest.raises(BuildFailed, match="the compiling process ended with status"):
            begun.finish()
        until = time.monotonic() + SECONDS
        while list((tmp_path / "cache").glob("*.lock")):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert len(compiler.compile([*sources(10), *sources(11), *sources(12)])) == 6
    compiler.close()


def forks_of(process: int) -> set[int]:
    """The processes that one has started and that run."""
    return {child for child in proc_files.children(process) if proc_files.running(child)}


def test_forks_serve_several_kernels_and_one_that_dies_takes_its_own_along() -> None:
    compiler = TritonCompiler(90, workers=2)
    good = [source for number in range(20, 25) for source in sources(number)]
    requests = [compiler._request(compiler.key(source), source) for source in good]
    deadly = {**requests[0], "text": "import os\nos.kill(os.getpid(), 9)\n", "name": "none"}
    seen: set[int] = set()
    compiler.compile(sources(19))  # it starts others while it gets ready
    replies = compiler._server.ask([*requests[:4], deadly, *requests[4:]])
    server = compiler._server.process
    assert server is not None
    for reply in replies:
        while not reply.done():
            assert len(now := forks_of(server.pid)) <= 2
            seen |= now
            time.sleep(0.001)
    told = [reply.result().get("error", "") for reply in replies]
    assert [bool(text) for text in told] == [place == 4 for place in range(len(replies))], told
    assert told[4] == "the compiling process ended with status 9"
    assert 2 <= len(seen) <= 4  # two, and who took the place of the one that died
    until = time.monotonic() + SECONDS
    while forks_of(server.pid):  # they do not wait for ever
        assert time.monotonic() < until
        time.sleep(0.05)
    assert [len(compiler._server.ask(requests[:1])[0].result())] == [0]
    compiler.close()


def test_what_another_process_did_not_come_to_is_compiled_at_once(tmp_path: Path) -> None:
    """All that it had the turn of is asked for together, when it has let go."""
    wanted, folder = [*sources(13), *sources(14)], tmp_path / "cache"
    compiler, other = (TritonCompiler(90, folder, workers=workers) for workers in (2, 1))
    turns = [turn_at_once(folder / f"{other.key(source)}.json") for source in wanted]
    begun, asked = compiler.begin(wanted), []
    ask = compiler._server.ask
    compiler._server.ask = lambda requests: (asked.append(len(requests)), ask(requests))[1]  # type: ignore[method-assign]
    threading.Timer(0.5, lambda: [over() for over in turns if over is not None]).start()
    assert [binary.hit for binary in begun.finish()] == [False] * 4 and None not in turns
    assert sum(asked) == 4 and len(asked) <= 2  # one, if it did not look while they were let go
    compiler.close()


def test_a_turn_of_another_thread_is_the_other_processs(tmp_path: Path) -> None:
    """A forked process waits for the turn's end, not for its own end."""
    file, inside, leave = tmp_path / "file", threading.Event(), threading.Event()

    def stay() -> None:
        with turn(file):
            inside.set()
            leave.wait()
            file.write_text("made")

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()

    def child() -> bool:
        with turn(file, seconds=SECONDS):
            return file.read_text() == "made"

    def meanwhile() -> None:
        time.sleep(0.3)
        leave.set()

    assert of_child(child, meanwhile)
    thread.join()


class Apart(CppBackend):
    """Leaves kernels to a process that compiles for GPUs; what runs here is C++."""

    builds_apart = True
    compiler: TritonCompiler

    def begin(self, sources_: object, options: InductorOptions) -> Building:
        compiling = self.compiler.begin(sources(7))

        def finish() -> Built:
            assert len(compiling.finish()) == 2
            return self.build(sources_, options)  # type: ignore[arg-type]

        return Building(finish, compiling.apart)


def test_a_begun_graph_is_finished_in_either_process(tmp_path: Path) -> None:
    own, apart = codegen_for("cpu"), Apart()
    apart.compiler = TritonCompiler(90, tmp_path / "gpu", workers=2)
    x = torch.randn(5, 7)
    register_codegen("cpu", apart)
    try:
        gm = primtorch.lower(primtorch.trace(lambda x: torch.exp(x).sum(-1), x))
        begun = begin_graph(gm, (x,), InductorOptions(cache_dir=str(tmp_path / "cpu")))
        assert begun.apart
        right = lambda: torch.allclose(begun()(x)[0], torch.exp(x).sum(-1))  # noqa: E731
        assert of_child(right) and right()
    finally:
        register_codegen("cpu", own)
        apart.compiler.close()


def test_libraries_that_another_thread_builds_are_built_here_too(tmp_path: Path) -> None:
    compiler = tmp_path / "slow++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) sleep 2 ;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    x = torch.randn(4, 6)
    gm = primtorch.lower(primtorch.trace(lambda x: torch.sin(x).cumsum(0), x))
    for folder in (str(tmp_path / "cache"), None):
        options = InductorOptions(cache_dir=folder, cxx=str(compiler))
        begun = begin_graph(gm, (x,), options)
        thread = threading.Thread(target=begun)
        thread.start()
        time.sleep(0.7)
        assert of_child(lambda begun=begun: torch.allclose(begun()(x)[0], torch.sin(x).cumsum(0)))  # type: ignore[misc]
        thread.join()
