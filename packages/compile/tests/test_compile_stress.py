"""Threads, forks and interruptions at random, a few seconds each; `TORCHCOMPILE_STRESS=600` makes it ten minutes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("TORCHCOMPILE_STRESS", "6"))


def run(cache: Path, *command: str) -> str:
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    limit = 2 * SECONDS + 400
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("program", ["stressed_threads.py", "interrupted_calls.py"])
def test_stress(tmp_path: Path, program: str) -> None:
    told = run(tmp_path, str(HERE / program), str(SECONDS), str(random.randrange(1 << 20)))
    assert int(told.split()[0]) > 0, told


FORKED = """
import multiprocessing, os, sys, threading, traceback
import torch, torchcompile

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).double()
compiled = torchcompile.compile(model)

def check(size):
    x = torch.randn(size, 8, dtype=torch.float64, requires_grad=True)
    found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected)
    for got, want in zip(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)):
        torch.testing.assert_close(got, want)
    new = torchcompile.compile(lambda x: (x * size).exp().sum(-1))
    torch.testing.assert_close(new(x), (x * size).exp().sum(-1))
    assert not torchcompile.report().fallbacks

def busy(stop):
    number = 0
    while not stop.is_set():
        number += 1
        torchcompile.compile(lambda x, by=number: (x * by).sin().sum(-1))(torch.randn(3, 8))

def fork(size):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check(size)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0

if __name__ == "__main__":
    how = sys.argv[1]
    if how != "fork first":
        check(3)
    if how in ("fork", "fork first"):
        for size in (4, 5):
            fork(size)
    elif how == "fork beside threads":
        stop = threading.Event()
        threads = [threading.Thread(target=busy, args=(stop,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(8):
                fork(4)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    else:
        processes = [multiprocessing.get_context(how).Process(target=check, args=(size,)) for size in (4, 5)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0, 0]
    check(6)
"""


@pytest.mark.parametrize("how", ["fork", "fork first", "fork beside threads", "spawn", "forkserver"])
def test_processes_that_are_made_of_one_that_has_compiled(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKED)
    run(tmp_path / "cache", str(program), how)
