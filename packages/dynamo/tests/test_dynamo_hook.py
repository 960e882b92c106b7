"""The callable, structural guards and the frame hook (`hook_programs.py`) on every interpreter installed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primtorch.building import SHARED
from torchdynamo import _C

HERE = Path(__file__).parent
CPP = HERE.parent / "cpp"


def run(interpreter: str, extension: str) -> None:
    script = str(HERE / "hook_programs.py")
    done = subprocess.run([interpreter, script, extension], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert int(done.stdout) >= 15


def test_this_interpreter() -> None:
    assert _C.__file__ is not None
    run(sys.executable, _C.__file__)


def test_without_torch(installed_python: str, tmp_path: Path) -> None:
    query = "import sysconfig; print(sysconfig.get_path('include'))"
    include = subprocess.run([installed_python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    if not (Path(include) / "Python.h").exists():
        pytest.skip(f"{installed_python} has no headers")
    target = tmp_path / "_C.so"
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-DTORCHDYNAMO_WITHOUT_TORCH", f"-I{include}", f"-I{SHARED}"]
    sources = [str(path) for path in sorted(CPP.glob("*.cpp"))]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, *sources, "-o", str(target)], check=True)
    run(installed_python, str(target))


BY_TURNS = """
import torch
from torch._C._dynamo import eval_frame
from torchdynamo._C import Hook, hook_enabled

def add(x):
    return x + 1

hook = Hook(lambda function: None)
for outer in range(3):
    with hook_enabled(hook):
        add(1)
        before = eval_frame.set_eval_frame(False)  # torch's evaluator is put in front of the hook's ...
        add(1)
    with hook_enabled(hook):  # ... and the hook's in front of torch's, which hands on what it leaves alone
        add(1)
        eval_frame.set_eval_frame(before)
        eval_frame.set_eval_frame(False)
        total = sum(add(x) for x in range(3))
    add(1)
    eval_frame.set_eval_frame(before)
print(total)
"""


def test_two_evaluators_that_were_each_put_in_front_of_the_other() -> None:
    """As it is after an error of torch's own compiler: a frame went from one to the other, and back, for ever."""
    done = subprocess.run([sys.executable, "-c", BY_TURNS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr[-4000:]
