"""Processes that differ in one thing: a frame that one of them kept is no other's, where that thing has a say in it.

Each row is a program and what its second process has otherwise. That process runs with the frames of the first, and has
to give what eager gives there. Processes are forks of one that has imported torch and nothing of the programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_rows import ROWS, Row

_SERVER = """
import json, os, sys, traceback
import torch, torchcompile, torchdynamo

sys.dont_write_bytecode = True
torch.autograd.set_multithreading_enabled(False)

def flat(value):
    if isinstance(value, torch.Tensor):
        numbers = value.detach().as_subclass(torch.Tensor).double().flatten().tolist()
        return [str(value.dtype), list(value.shape), [float(f"{number:.4g}") for number in numbers]]
    if isinstance(value, (tuple, list)):
        return [flat(item) for item in value]
    return repr(value)

def answer(job):
    sys.path.insert(0, job["folder"])
    os.environ.update(job["environment"])
    exec(compile(job["before"], "<before>", "exec"), {"torch": torch, "sys": sys})
    world = __import__("kept_program")
    exec(compile(job["after"], "<after>", "exec"), {"torch": torch, "sys": sys, "world": world})
    program, args = world.make()
    run = torchcompile.compile(program, options=job["options"]) if job["compiled"] else program
    try:
        result = run(*args)
        leaves = getattr(world, "LEAVES", ())
        result = flat((result, torch.autograd.grad(result.sum(), leaves)) if leaves else result)
    except Exception as error:
        result = [type(error).__name__, str(error)]
    notes = [flat(note) for note in getattr(world, "NOTES", ())]
    ended = [str(event) for event in torchdynamo.stats().surprises] if job["compiled"] else []
    return {"found": torchdynamo.stats().found, "result": [result, notes], "surprises": ended}

for line in sys.stdin:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = answer(json.loads(line))
        except BaseException:
            told = {"found": 0, "result": traceback.format_exc(), "surprises": ["it raised"]}
        with os.fdopen(writer, "w") as file:
            file.write(json.dumps(told))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        print(file.read(), flush=True)
    os.waitpid(child, 0)
"""


class Processes:
    """Starts a process for each job."""

    def __init__(self, cache: Path, seed: int) -> None:
        environment = {**os.environ, "TORCHCOMPILE_CACHE": str(cache), "PYTHONHASHSEED": str(seed)}
        environment.pop("TORCHCOMPILE_CHECK_KERNELS", None)
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=-1, stdout=-1, text=True, env=environment
        )

    def run(self, folder: Path, row: Row, second: bool, compiled: bool) -> Any:
        """What a process gives that runs a row's program."""
        assert self._server.stdin is not None and self._server.stdout is not None
        job = {
            "folder": str(folder), "compiled": compiled, "options": {"keep_frames": True},
            "before": row.before if second else "", "after": row.after if second else "",
            "environment": row.environment if second else {},
        }  # fmt: skip
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def end(self) -> None:
        """Ends the process that all others come from."""
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(cache: Path) -> Iterator[Processes]:
    processes = Processes(cache, seed=1)
    yield processes
    processes.end()


@pytest.fixture(scope="module")
def second(cache: Path) -> Iterator[Processes]:
    processes = Processes(cache, seed=2)
    yield processes
    processes.end()


_HEAD = "import torch\nfrom torch import nn\n"
_MAKE = """
def make():
    return program, (torch.arange(1.0, 5.0, dtype=torch.float64),)
"""


def written(folder: Path, row: Row, second: bool) -> None:
    """The modules of a process."""
    text = row.text if "def make" in row.text else row.text + _MAKE
    for name, whole, (old, new) in (
        ("kept_program", _HEAD + text, row.change),
        ("kept_helper", row.helper, row.helper_change),
    ):
        assert old in whole
        (folder / f"{name}.py").write_text(whole.replace(old, new) if second and old else whole)


@pytest.mark.parametrize("what", ROWS)
def test_a_process_that_differs(what: str, tmp_path: Path, first: Processes, second: Processes) -> None:
    row = ROWS[what]
    written(tmp_path, row, second=False)
    expected = first.run(tmp_path, row, second=False, compiled=False)
    kept = first.run(tmp_path, row, second=False, compiled=True)
    again = first.run(tmp_path, row, second=False, compiled=True)
    assert kept["result"] == again["result"] == expected["result"], kept["surprises"] + again["surprises"]
    assert bool(again["found"]) == row.kept, "whether a process of the same program finds the frame"
    written(tmp_path, row, second=True)
    eager = second.run(tmp_path, row, second=True, compiled=False)
    found = second.run(tmp_path, row, second=True, compiled=True)
    assert found["result"] == eager["result"], found["surprises"]
    assert (eager["result"] != expected["result"]) == row.differs, "whether the row says anything"
