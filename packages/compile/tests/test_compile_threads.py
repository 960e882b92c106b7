"""The first calls of a process, from several threads at once: what is made lazily is made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, traceback
import torch, torchcompile
from primtorch import ambient

torch.library.define("threads::add_to", "(Tensor(a!) x, Tensor y) -> ()")
torch.library.impl("threads::add_to", "CPU", lambda x, y: (x.add_(y), None)[1])

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double()

def program(x, y):
    made = x.clone()
    torch.ops.threads.add_to(made, y)
    return (made @ y.mT).softmax(-1) @ model(x)

def own():  # a function of the thread's own, with code of its own
    return torchcompile.compile(lambda x: (x * 2).sin().sum(0))

shared = torchcompile.compile(program)
wrong, barrier = [], threading.Barrier(8)

def work(seed):
    torch.manual_seed(seed)
    mine = own()
    barrier.wait()
    try:
        for size in (2, 3, 5, 7):
            x = torch.randn(size, 4, dtype=torch.float64, requires_grad=True)
            y = torch.randn(size, 4, dtype=torch.float64)
            got, want = shared(x, y), program(x, y)
            torch.testing.assert_close(got, want)
            for g, w in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)):
                torch.testing.assert_close(g, w)
            torch.testing.assert_close(mine(x), (x * 2).sin().sum(0))
    except BaseException:
        wrong.append((seed, traceback.format_exc()))

before = ambient.snapshot()
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
sys.setswitchinterval(1e-5)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.setswitchinterval(0.005)
assert not wrong, wrong[0][1]
assert not ambient.changed(before)
report = torchcompile.report()
print("fallbacks", len(report.fallbacks), "graphs", len(report.graphs))
print(*report.fallbacks)
"""


@pytest.mark.parametrize("cached", [True, False])
def test_eight_threads_compile_first(tmp_path: Path, cached: bool) -> None:
    cache = tmp_path if cached else Path(os.devnull)
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    # A version for the first size and one for every size: of the shared function, forward and backward, and of each
    # thread's own, which asks for no gradients.
    assert "fallbacks 0 graphs 20" in done.stdout, done.stdout
