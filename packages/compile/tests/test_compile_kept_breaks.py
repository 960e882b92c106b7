"""Programs with graph breaks over one cache folder: what goes on behind a break is found as well, where all is the same.

See `kept_programs`: a run stands for a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kept_programs import NAME, imported, run
from kept_programs import kept_folder as kept_folder

import torchdynamo

pytestmark = pytest.mark.expected_eager(...)


HEAD = """
import functools, torch, torchcompile
from torch import nn

NOTES = []
FACTOR = 2.0

def note(x):
    print(end="")
    NOTES.append(float(x.detach().sum()))

@torchcompile.disable
def apart(x):
    NOTES.append("apart")
    return x * 3

def helper(x):
    y = x.sin()
    note(y)
    return y * FACTOR

@torchcompile.disable(recursive=False)
def outside(x):
    NOTES.append("outside")
    return helper(x) + helper(x * 2)

def refuses(x):
    apart(x)
    raise ValueError("no")

class Manager:
    def __enter__(self):
        NOTES.append("in")
        return self
    def __exit__(self, *exc):
        NOTES.append(exc[0].__name__ if exc[0] else "out")
        return True

def decorated(function):
    @functools.wraps(function)
    def around(*args):
        return function(*args) + 1
    return around

@decorated
def inner(x):
    return apart(x.cos()) * 0.5

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
    def forward(self, x):
        y = torch.relu(self.linear(x))
        self.calls += 1
        y = apart(y)
        return self.linear(y) + x

"""
TAIL = """
def make():
    torch.manual_seed(1)
    return PROGRAM, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),)
"""

# Bodies of `program(x)`.
BODIES = {
    "a call that is apart": "    y = x.exp()\n    return apart(y) + y.sin()",
    "within a call": "    return helper(x * 2).cos() + 1",
    "in each round": "    for number in range(3):\n        x = apart(x.sin()) + number\n    return x",
    "a branch by data": "    y = x.sin()\n    return y * 2 if y.sum() > 100 else y.cos()",
    "a number of data": "    y = x.sin()\n    n = float(y.detach().sum())\n    return apart(y) * n",
    "an open block": "    with torch.no_grad():\n        y = apart(x.sin())\n        z = y * 2\n    return x.cos() + z",
    "a manager of the program's": "    with Manager():\n        y = apart(x.sin())\n        refuses(y)\n    return y.cos()",
    "a handler": (
        "    y = x.sin()\n    try:\n        refuses(y)\n    except ValueError as error:\n        NOTES.append(str(error))\n"
        "        y = y * 2\n    finally:\n        y = y + 1\n    return y.cos()"
    ),
    "a decorated function": "    return inner(x.sin()).exp()",
    "a closure": (
        "    scale = x.sin()\n    def by(z):\n        return z * scale\n    apart(scale)\n    scale = scale + 1\n    return by(x).cos()"
    ),
    "functions that are called for real": "    return outside(x.sin()).cos()",
    "a generator": "    def pairs():\n        for n in range(2):\n            yield x * n\n    return sum(apart(z).sin() for z in pairs())",
    "an import": "    y = apart(x.sin())\n    import math\n    return y * math.sqrt(4.0)",
    "a list that grows": "    found = [x.sin()]\n    for _ in range(2):\n        found.append(apart(found[-1]).cos())\n    return torch.cat(found)",
    "autocast": (
        "    with torch.autocast('cpu', torch.bfloat16, enabled=False):\n        y = apart(x.sin()) @ x.T\n    return y.cos()"
    ),
    "an object": "    thing = Manager()\n    thing.value = x.sin()\n    apart(thing.value)\n    return thing.value.cos()",
}  # fmt: skip
# More rounds than there are versions of one continuation: from some round on, each is a part of its own.
LAYERS = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        y = self.linear(x)
        NOTES.append("inner")
        print(end="")
        return torch.softmax(y, -1) * y

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = Inner(), nn.LayerNorm(4)
    def forward(self, x):
        return self.inner(self.norm(x)).cos() + x

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(12))
    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x) + number
        return x

torch.manual_seed(0)
PROGRAM = Stack().double()
"""
PROGRAMS = {
    "layers": LAYERS,
    **{what: f"def program(x):\n{body}\nPROGRAM = program\n" for what, body in BODIES.items()},
    "modules": "torch.manual_seed(0)\nPROGRAM = nn.Sequential(Block(), nn.Tanh(), Block()).double()\n",
    "a method": (
        "class Thing:\n    def __init__(self):\n        self.by = 3.0\n    def run(self, x):\n        y = apart(x * self.by)\n"
        "        self.by += 1\n        return y.sin()\nPROGRAM = Thing().run\n"
    ),
    "a function of a function": (
        "def outer(by):\n    def program(x):\n        y = apart(x.sin())\n        return y * by\n    return program\nPROGRAM = outer(2.5)\n"
    ),
}


def counts() -> tuple[int, int]:
    """Graphs, and breaks that were met."""
    stats = torchdynamo.stats()
    return stats.graphs, sum(count for count, *_ in stats.breaks)


def _refused(*args: object) -> None:
    raise AssertionError("a call is captured")


class _All:
    """Every kind of event."""

    def __contains__(self, kind: object) -> bool:
        return True


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_second_process_captures_nothing(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HEAD + PROGRAMS[what] + TAIL
    assert run(folder, text, told=_All()) == 0
    before = counts()
    assert before[1], "the program breaks"
    monkeypatch.setattr(torchdynamo.convert, "interpret", _refused)
    assert run(folder, text, told=_All()) >= before[0]
    assert counts() == before, "graphs and breaks are as they were"


SPLIT = HEAD + (
    "SCALE = [3.0]\ndef behind(y):\n    return y.cos() * SCALE[0]\n"
    "def program(x):\n    y = apart(x.sin())\n    z = behind(y) + 1\n    apart(z)\n    return z.exp() * FACTOR\nPROGRAM = program\n"
) + TAIL  # fmt: skip


def test_what_is_the_same_in_front_of_a_change_is_found(folder: Path) -> None:
    """Three frames: up to the first break, up to the second, and the rest."""
    assert [run(folder, SPLIT, told=_All()) for _ in range(2)] == [0, 3]
    assert run(folder, SPLIT.replace("y.cos() * SCALE", "y.tan() * SCALE"), told=_All()) == 2, "a function behind it"
    assert run(folder, SPLIT.replace("[3.0]", "[4.0]"), told=_All()) == 2, "a value that is read behind it"
    assert run(folder, SPLIT.replace("FACTOR = 2.0", "FACTOR = 5.0"), told=_All()) == 2
    assert run(folder, SPLIT.replace("z.exp()", "z.sin()"), told=_All()) == 0, "the function itself"
    run(folder, SPLIT.replace("return x * 3", "return x * 4"), told=_All())  # what runs as it is


def test_what_breaks_is_another_one(folder: Path) -> None:
    """The function at which the graph broke is captured in the process in which it is not apart any more."""
    assert [run(folder, SPLIT, told=_All()) for _ in range(2)] == [0, 3]
    assert run(folder, SPLIT.replace("@torchcompile.disable\ndef apart", "def apart"), told=_All()) == 0
    assert not counts()[1]


def test_a_way_that_the_first_process_did_not_go(folder: Path) -> None:
    """A handler, and a branch, that are taken in the second process alone."""
    text = HEAD + (
        "LIMIT = 1e9\ndef check(x):\n    NOTES.append('checked')\n    print(end='')\n    if float(x.detach().sum()) ** 2 > LIMIT:\n"
        "        raise ValueError('large')\n"
        "check = torchcompile.disable(check)\n"
        "def program(x):\n    y = x.sin()\n    try:\n        check(y)\n    except ValueError as error:\n"
        "        NOTES.append(str(error))\n        return y.cos()\n    return y * 2\nPROGRAM = program\n"
    ) + TAIL  # fmt: skip
    assert [run(folder, text, told=_All()) for _ in range(2)] == [0, 2]
    assert run(folder, text, lambda world: setattr(world, "LIMIT", -1.0), told=_All()) == 1
    assert run(folder, text, lambda world: setattr(world, "LIMIT", -1.0), told=_All()) == 2


def test_a_torn_entry_is_one_frame_s(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(folder, SPLIT, told=_All()) == 0
    kept = sorted((folder / "cache" / "programs").glob("*.frame_*.program"))
    assert len(kept) == 3
    for place, file in enumerate(kept):
        whole = file.read_text()
        file.write_text(whole.replace("continuation", "continuatiom").replace('"NOTES"', '"NOTEZ"') + " ")
        caplog.clear()
        assert run(folder, SPLIT, told=_All()) == 2, place
        told = [record.message for record in caplog.records if "left out" in record.message]
        assert len(told) <= 1 and all(file.name in message for message in told)
        assert run(folder, SPLIT, told=_All()) == 3, "it was written again"


PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torchcompile, torchdynamo, kept_world
program, args = kept_world.make()
out = torchcompile.compile(program)(*args)
out.square().sum().backward()
stats = torchdynamo.stats()
print(json.dumps([stats.found, stats.graphs, out.sum().item(), args[0].grad.sum().item()]))
"""


def test_processes(folder: Path) -> None:
    """Of other hash seeds."""
    text = HEAD + PROGRAMS["modules"] + TAIL
    (folder / f"{NAME}.py").write_text(text)
    rows = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROCESS, str(folder)]
        rows.append(json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout))
    program, args = imported(folder, text).make()
    out = program(*args)
    out.square().sum().backward()
    assert rows[0][0] == 0 and rows[1][0] >= rows[1][1] == rows[0][1] > 1
    for row in rows:
        assert args[0].grad is not None
        torch.testing.assert_close(torch.tensor(row[2:]), torch.tensor([out.sum().item(), args[0].grad.sum().item()]))
