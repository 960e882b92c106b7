"""Processes that are forked between a forward and its backward, or while another thread compiles: they go on by
themselves, in time, with eager's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 240

COMMON = """
import os, sys, threading, time, traceback
import torch, torchcompile

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).double()
compiled = torchcompile.compile(model)
x = torch.randn(5, 8, dtype=torch.float64)
torch.testing.assert_close(x, x)  # what it imports is imported: Python's own locks of imports stay held in a fork

def gradients(run):
    return torch.autograd.grad(run(x).square().sum(), list(model.parameters()))

def right(found):
    for got, want in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(got, want)

def fork(run):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child

def wait(child, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        time.sleep(0.02)
    os.kill(child, 9)
    raise TimeoutError(child)
"""

# Kernels are left to another process, as those for a GPU are; what runs is C++.
BEGUN = (
    COMMON
    + """
import signal
import primtorch
from torchinductor import CppBackend, InductorOptions, register_codegen
from torchinductor.codegen.base import Building, generated
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.source import planned_operations

compiler, begun, asked = TritonCompiler(90, workers=1), [], []

def pause(signal):
    os.kill(compiler._server.process.pid, signal)

class Apart(CppBackend):
    builds_apart = True

    def begin(self, sources, options):
        if begun:
            begun[0].finish()
            pause(signal.SIGSTOP)  # what the backward needs is under way until the forks have ended
        by = float(len(begun))
        gm = primtorch.lower(primtorch.trace(lambda x: torch.exp(x * by), torch.empty(64)))
        asked.append([generated(o, InductorOptions()).meta for o in planned_operations(gm, "cuda")])
        compiling = compiler.begin(asked[-1])
        begun.append(compiling)

        def finish():
            assert len(compiling.finish()) == 1
            return self.build(sources, options)

        return Building(finish, compiling.apart)

register_codegen("cpu", Apart())
loss = compiled(x).square().sum()
assert len(begun) == 2, "the backward is begun with the forward"
assert begun[1].apart and all(compiler.files(source) is None for source in asked[1])
parameters = list(model.parameters())
children = [fork(lambda: right(torch.autograd.grad(loss, parameters))) for _ in range(2)]
children.append(fork(lambda: right(gradients(compiled))))
for child in children:
    wait(child)
pause(signal.SIGCONT)
right(torch.autograd.grad(loss, parameters))
assert not torchcompile.report().fallbacks
"""
)

BESIDE = (
    COMMON
    + """
failed = []

def call():
    try:
        right(gradients(compiled))
    except BaseException as error:
        failed.append(error)

thread = threading.Thread(target=call)
thread.start()
children = []
while thread.is_alive() and len(children) < 12:
    time.sleep(0.5)
    children.append(fork(lambda: right(gradients(compiled))))
for child in children:
    wait(child)
thread.join()
assert not failed and len(children) > 2, (failed, len(children))
right(gradients(compiled))
"""
)


def run(folder: Path, text: str) -> None:
    program = folder / "program.py"
    program.write_text(text)
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    slow = folder / "g++"  # a compiler that takes its time
    slow.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]}\ncase "$*" in *-shared*) sleep 1 ;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    env["PATH"] = f"{folder}:{env['PATH']}"
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_fork_between_a_forward_and_its_backward_that_is_begun(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run(tmp_path, BEGUN)


def test_forks_while_another_thread_compiles_what_they_call(tmp_path: Path) -> None:
    run(tmp_path, BESIDE)
