"""What goes wrong around the compiler: no C++ compiler, a read-only cache, two processes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import torch, torchcompile
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).double()
compiled = torchcompile.compile(model)
x = torch.randn(4, 8, dtype=torch.float64)
torch.testing.assert_close(compiled(x), model(x))
compiled(x).sum().backward()
report = torchcompile.report()
print("kernels", report.kernels, "fallbacks", len(report.fallbacks))
print(*report.fallbacks)
"""


def run(cache: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(cache), "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_no_compiler_is_told_once_and_the_model_runs(tmp_path: Path) -> None:
    done = run(tmp_path, CXX="/nonexistent/c++", PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert "fallbacks 0" not in done.stdout
    assert "CXX" in done.stderr
    assert done.stderr.count("fallback to eager [no_compiler]") == 1


def script(folder: Path, text: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "text", ["echo 'internal compiler error' >&2; exit 4", "echo 'No space left on device' >&2; exit 1", "kill -9 $$"]
)
def test_a_compiler_that_fails_is_told_and_the_model_runs(tmp_path: Path, text: str) -> None:
    done = run(tmp_path / "cache", CXX=str(script(tmp_path, text)))
    assert done.returncode == 0, done.stderr
    assert "kernels 0" in done.stdout and "fallbacks 0" not in done.stdout
    assert done.stderr.count("fallback to eager [kernels_not_built]") == 1
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_what_is_no_program_is_no_compiler(tmp_path: Path) -> None:
    text = tmp_path / "c++"
    text.write_text("no program")
    text.chmod(0o755)
    done = run(tmp_path / "cache", CXX=str(text))
    assert done.returncode == 0, done.stderr
    assert "cannot be run" in done.stderr and "[kernels_not_built]" in done.stderr


def test_a_full_disk_under_the_cache_warns_once_and_kernels_are_built_elsewhere(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    full = (
        f'case "$*" in *{cache}*) echo \'cannot write: No space left on device\' >&2; exit 1;; *) exec g++ "$@";; esac'
    )
    done = run(cache, CXX=str(script(tmp_path, full)))
    assert done.returncode == 0, done.stderr
    assert "fallbacks 0" in done.stdout and "kernels 0" not in done.stdout
    assert done.stderr.lower().count("kernel cache") == 1, done.stderr


@pytest.mark.parametrize("cxx", ["g++ -O1", "env g++ -O1 -DNAME='a b'"])
def test_a_compiler_may_be_named_with_flags(tmp_path: Path, cxx: str) -> None:
    done = run(tmp_path, CXX=cxx)
    assert done.returncode == 0, done.stderr
    assert "fallbacks 0" in done.stdout and "kernels 0" not in done.stdout


def test_a_read_only_cache_warns_once(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.write_text("not a folder: nothing can be written below it, whoever runs the test")
    done = run(cache / "cache")
    assert done.returncode == 0, done.stderr
    assert "fallbacks 0" in done.stdout
    assert done.stderr.lower().count("kernel cache") == 1, done.stderr


def test_two_processes_fill_one_cache(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in both:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error.decode()
        assert b"fallbacks 0" in out
    third = run(tmp_path)
    assert "fallbacks 0" in third.stdout


INTERRUPTED = """
import copy, os, signal, sys, threading, time
import torch, torchcompile
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this process may ignore it
torch.manual_seed(0)
layers = [m for _ in range(30) for m in (torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))]
model = torch.nn.Sequential(*layers)
compiled = torchcompile.compile(model)
x = torch.randn(4, 16)
threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    for _ in range(10_000):
        compiled(x).sum().backward()
    print("finished before the signal")
except KeyboardInterrupt:
    print("interrupted")
assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
truth = copy.deepcopy(model).double()(x.double())
error = lambda found: float((found.double() - truth).norm() / truth.norm())
assert error(compiled(x)) <= 2 * error(model(x)) + 2e-6
doubles = x.double()
torch.testing.assert_close(torchcompile.compile(lambda a: a.sin())(doubles), doubles.sin())
print("usable")
"""


@pytest.mark.parametrize("delay", [0.05, 0.3, 0.8])
def test_ctrl_c_leaves_process_and_cache_usable(tmp_path: Path, delay: float) -> None:
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(delay)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout
    assert "usable" in done.stdout
    assert "fallbacks 0" in run(tmp_path).stdout


def test_interrupting_the_whole_process_leaves_the_cache_sound(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHCOMPILE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(3)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert "fallbacks 0" in run(tmp_path).stdout
