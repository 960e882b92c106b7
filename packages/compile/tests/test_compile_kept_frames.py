"""Frames that another process captured: found where all that capture read is the same, and nowhere else.

A program is the text of a module, which is imported anew for each run. A run stands for a process: nothing that was
compiled before it is known, but what lies in the cache folder. Some runs are processes.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_programs import NAME, Change, imported, run
from kept_programs import kept_folder as kept_folder
from torch import nn

import torchcompile
import torchdynamo
from primtorch import ambient
from torchcompile.store import Store

PLAIN = """
import math
import torch
from torch import nn
import torch.nn.functional as F

SCALE = 2.0
NOTES = []

def helper(x, by=3.0, *, shift=0.5):
    return x * by + shift

def activate(x):
    return F.relu(x)

class Base(nn.Module):
    factor = 1.5
    def scaled(self, x):
        return x * self.factor

class Layer(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
    @property
    def half(self):
        return 0.5
    def forward(self, x):
        return activate(helper(self.scaled(self.linear(x)))) * SCALE * self.half + round(math.sqrt(4.0))

def model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), nn.Tanh(), Layer()).double()

def make():
    torch.manual_seed(1)
    return model(), (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),)
"""


def test_a_second_process_captures_nothing(folder: Path) -> None:
    assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN) == 1
    with torch.no_grad():
        assert run(folder, PLAIN) == 0
        assert run(folder, PLAIN) == 1


def test_it_is_an_option(folder: Path) -> None:
    options = {"keep_frames": False}
    assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN, options=options) == 0
    assert run(folder, PLAIN.replace("SCALE = 2.0", "SCALE = 4.0"), options=options) == 0
    assert run(folder, PLAIN.replace("SCALE = 2.0", "SCALE = 4.0")) == 0


TEXTS = {
    "a global": ("SCALE = 2.0", "SCALE = 2.5"),
    "an inlined function": ("return x * by + shift", "return x * by - shift"),
    "a default": ("by=3.0", "by=3.5"),
    "a keyword's default": ("shift=0.5", "shift=0.25"),
    "a class attribute": ("factor = 1.5", "factor = 1.25"),
    "a method of a base": ("return x * self.factor", "return x / self.factor"),
    "a property": ("return 0.5", "return 0.75"),
    "another base": ("class Layer(Base):", "class Other(Base):\n    factor = 7.0\n\nclass Layer(Other):"),
    "an attribute of the class that is nearer": ("def forward", "factor = 9.0\n    def forward"),
    "a call of its own": ("def forward", "def __call__(self, x):\n        return self.forward(x) + 1\n    def forward"),
    "attributes found otherwise": (
        "def forward",
        "def __getattr__(self, name):\n        found = super().__getattr__(name)\n"
        "        return torch.neg if name == 'nothing' else found\n    def forward",
    ),
    "a function in the place of a class's": (
        "def model():",
        "Layer.forward = lambda self, x: self.linear(x)\n\ndef model():",
    ),
    "another import": ("import torch.nn.functional as F", "import torch.nn.functional as G, types\nF = "
                       "types.SimpleNamespace(relu=G.silu)"),
    "another structure": ("nn.Sequential(Layer(), nn.Tanh(), Layer())", "nn.Sequential(Layer(), nn.Sigmoid(), Layer())"),
    "one layer more": ("nn.Tanh(), ", "nn.Tanh(), nn.Tanh(), "),
    "no bias": ("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)"),
    "evaluation": (".double()", ".double().eval()"),
    "frozen parameters": (".double()", ".double().requires_grad_(False)"),
    "another shape": ("torch.randn(3, 4", "torch.randn(5, 4"),
    "other strides": (
        "torch.randn(3, 4, dtype=torch.float64, requires_grad=True)",
        "torch.randn(4, 3, dtype=torch.float64).t().requires_grad_()",
    ),
    "no gradient": ("requires_grad=True", "requires_grad=False"),
    "a line above": ("SCALE = 2.0", "\nSCALE = 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", TEXTS)
def test_another_program_is_captured(what: str, folder: Path) -> None:
    before, after = TEXTS[what]
    assert before in PLAIN
    assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN.replace(before, after)) == 0, what
    assert run(folder, PLAIN.replace(before, after)) == 1, what
    assert run(folder, PLAIN) == 1, "what was kept before is still there"


def set_in(owner: Callable[[Any], Any], name: str, value: Callable[[Any], Any]) -> Change:
    return lambda world: setattr(owner(world), name, value(world))


CHANGES: dict[str, Change] = {
    "a global": set_in(lambda w: w, "SCALE", lambda w: 3.0),
    "an inlined function": set_in(lambda w: w, "helper", lambda w: lambda x: x + 7),
    "its code": lambda w: setattr(w.helper, "__code__", (lambda x, by=1.0, *, shift=2.0: x + by + shift).__code__),
    "its defaults": lambda w: setattr(w.helper, "__defaults__", (11.0,)),
    "its keywords' defaults": lambda w: setattr(w.helper, "__kwdefaults__", {"shift": 11.0}),
    "a class attribute": set_in(lambda w: w.Base, "factor", lambda w: 11.0),
    "one of the class that is nearer": set_in(lambda w: w.Layer, "factor", lambda w: 11.0),
    "a method": set_in(lambda w: w.Base, "scaled", lambda w: lambda self, x: x - 1),
    "forward": set_in(lambda w: w.Layer, "forward", lambda w: lambda self, x: self.linear(x)),
    "a property": set_in(lambda w: w.Layer, "half", lambda w: property(lambda self: 0.125)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_process_has_replaced_is_captured(what: str, folder: Path) -> None:
    assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN, CHANGES[what]) == 0, what


REPLACED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a function of torch": (torch.nn.functional, "relu", lambda x, inplace=False: x * x),
    "a layer of torch": (nn.Linear, "forward", lambda self, x: x @ self.weight),
    "a function of Python's library": (math, "sqrt", lambda x, own=math.sqrt: own(x) + (x == 4.0)),
    "a builtin": (builtins, "round", lambda x, own=round: own(x) + 1),
    "a method of tensors": (torch.Tensor, "__mul__", lambda x, y: torch.add(x, y)),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_libraries_had_replaced_is_captured(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of torch's or of Python's means another function in this process, from its start on."""
    assert run(folder, PLAIN) == 0
    with monkeypatch.context() as patches:
        patches.setattr(*REPLACED[what])
        assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN) == 1


def test_hooks_are_captured(folder: Path) -> None:
    assert run(folder, PLAIN) == 0

    def hooked(world: Any) -> None:
        model = world.model

        def with_hook() -> nn.Module:
            made = model()
            made[0].register_forward_hook(lambda module, args, result: result + 1)
            return made

        world.model = with_hook

    assert run(folder, PLAIN, hooked) == 0


def test_states_of_the_process_are_captured(folder: Path) -> None:
    assert run(folder, PLAIN) == 0
    with torch.inference_mode():
        assert run(folder, PLAIN.replace("requires_grad=True", "requires_grad=False")) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = PLAIN.replace("float64", "float32").replace(".double()", "")
        for found in (0, 1):
            world = imported(folder, text)
            torchcompile.reset()
            program, args = world.make()
            torchcompile.compile(program)(*args)
            assert torchdynamo.stats().found == found
    torch.set_default_dtype(torch.float64)
    try:
        assert run(folder, PLAIN) == 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert run(folder, PLAIN) == 1


def test_what_torch_decides_at_its_first_use_is_decided_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attention on a GPU sets the order of its kernels: guards and keys that had read it before would hold for
    no later call, and for no other process."""

    def chosen(device: torch.device) -> None:
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])

    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ambient, "_choose_attention", chosen)
    try:
        for found in (0, 1):
            torch._C._set_sdp_priority_order(before)
            monkeypatch.setattr(ambient, "_SETTLED", set())
            world = imported(folder, PLAIN)
            torchcompile.reset()
            program, args = world.make()
            compiled = torchcompile.compile(program)
            compiled(*args), compiled(*args)
            stats = torchdynamo.stats()
            assert (stats.found, stats.graphs) == (found, 1)
    finally:
        torch._C._set_sdp_priority_order(before)


def test_marks_of_the_process_are_heeded(folder: Path) -> None:
    assert run(folder, PLAIN) == 0
    held = []

    def disabled(world: Any) -> None:
        held.append(torchcompile.disable(world.helper))

    world = imported(folder, PLAIN)
    disabled(world)
    torchcompile.reset()
    program, args = world.make()
    torch.testing.assert_close(torchcompile.compile(program)(*args), program(*args))
    assert torchdynamo.stats().found == 0 and torchdynamo.stats().breaks

    world = imported(folder, PLAIN)
    torchcompile.reset()
    program, args = world.make()
    torchcompile.mark_dynamic(args[0], 0)
    compiled = torchcompile.compile(program)
    for rows in (3, 5, 7):
        given = args[0] if rows == 3 else torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(compiled(given), program(given))
    assert torchdynamo.stats().found == 0 and torchdynamo.stats().graphs == 3  # the second is of another tensor


def marked(*places: int, **how: Any) -> Change:
    """The program with some of its layers marked; -1 is one that it does not have."""

    def change(world: Any) -> None:
        made = world.model

        def model() -> nn.Module:
            found = made()
            world.elsewhere = nn.Tanh()
            for place in places:
                torchcompile.disable(found[place] if place >= 0 else world.elsewhere, **how)
            return found

        world.model = model

    return change


def test_marks_of_modules_are_told_of_the_frames_that_reach_them(folder: Path) -> None:
    """Of these they have to be the same; no other frame is concerned."""
    assert [run(folder, PLAIN), run(folder, PLAIN)] == [0, 1]
    assert run(folder, PLAIN, marked(-1)) == 1, "no frame reaches it"
    breaks = {"disabled"}
    assert run(folder, PLAIN, marked(1), told=breaks) == 0
    broken = len(torchdynamo.stats().breaks)
    whole = run(folder, PLAIN, marked(1), told=breaks)
    assert whole > 1 and len(torchdynamo.stats().breaks) == broken > 0, "the same again"
    assert run(folder, PLAIN, marked(1, -1), told=breaks) == whole
    assert run(folder, PLAIN, marked(2), told=breaks) == 0, "another one"
    assert run(folder, PLAIN, marked(1, reason="slow"), told=breaks) == 0, "for another reason"
    assert run(folder, PLAIN) == 1, "none"


CLOSURES = """
import torch
NOTES = []

def scaled_by(factor, also):
    def scale(x):
        return also(x) * factor
    return scale

def twice(x):
    return x * 2

def make():
    return scaled_by(3.0, twice), (torch.arange(4.0, dtype=torch.float64),)
"""


def test_closures(folder: Path) -> None:
    assert run(folder, CLOSURES) == 0
    assert run(folder, CLOSURES) == 1
    assert run(folder, CLOSURES, lambda world: setattr(world, "twice", lambda x: x * 3)) == 0
    assert run(folder, CLOSURES.replace("scaled_by(3.0", "scaled_by(4.0")) == 0
    assert run(folder, CLOSURES.replace("x * 2", "x * 5")) == 0


DECORATED = """
import functools
import torch
NOTES = []

def plus(number):
    def decorate(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            return function(*args, **kwargs) + number
        return wrapped
    return decorate

class Config:
    def __init__(self):
        self.sizes, self.kind = [1, 2], {"a": 1.0}

class Meta(type):
    pass

class Thing(metaclass=Meta):
    __slots__ = ("value",)
    def __init__(self, value):
        self.value = value

@plus(1.0)
@plus(2.0)
def inner(x):
    return x.sin()

CONFIG = Config()

def program(x, thing):
    NOTES.append(len(CONFIG.sizes))
    return inner(x) * CONFIG.kind["a"] + sum(CONFIG.sizes) + thing.value

def make():
    return program, (torch.arange(4.0, dtype=torch.float64), Thing(3.0))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("@plus(1.0)", "@plus(5.0)"), ("@plus(2.0)\n", ""), (".sin()", ".cos()"), ("[1, 2]", "[1, 3]"), ("[1, 2]", "[1]"),
     ('{"a": 1.0}', '{"a": 4.0}'), ("Thing(3.0)", "Thing(4.0)"), ("kwargs) + number", "kwargs) - number")],
)  # fmt: skip
def test_decorators_containers_and_slots(before: str, after: str, folder: Path) -> None:
    assert run(folder, DECORATED) == 0
    assert run(folder, DECORATED) == 1
    assert before in DECORATED and run(folder, DECORATED.replace(before, after)) == 0


HELPED = """
import torch
import kept_helper
NOTES = []

def make():
    return (lambda x: kept_helper.outer(x)), (torch.arange(4.0, dtype=torch.float64),)
"""


def test_another_file(folder: Path) -> None:
    helper = "def outer(x):\n    return inner(x) + 1\n\ndef inner(x):\n    return x * 2\n"
    imported(folder, helper, "kept_helper")
    assert run(folder, HELPED) == 0
    imported(folder, helper, "kept_helper")
    assert run(folder, HELPED) == 1
    imported(folder, helper.replace("x * 2", "x * 3"), "kept_helper")
    assert run(folder, HELPED) == 0


WRITES = """
import torch
NOTES = []

class Counter:
    def __init__(self):
        self.calls = 0

COUNTER = Counter()

def program(x, y, held):
    COUNTER.calls += 1
    held["last"] = x * 2
    x.add_(1)
    NOTES.append(COUNTER.calls)
    return x[1:], (y * 2).t(), {"sum": x + y, "same": y}

def make():
    return program, (torch.ones(3, 4, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).reshape(3, 4), {})
"""


@pytest.mark.expected_eager("overlapping_inputs")
def test_writes_and_aliases(folder: Path) -> None:
    assert run(folder, WRITES) == 0
    assert run(folder, WRITES) == 1
    world = imported(folder, WRITES)
    torchcompile.reset()
    compiled = torchcompile.compile(world.program)
    x, y, held = world.make()[1]
    compiled(x, y, held)
    assert torchdynamo.stats().found == 1 and held["last"].sum() == 24
    shared = torch.zeros(24, dtype=torch.float64)
    for program in (compiled, world.program):  # two arguments over one memory, in a process that found the frame
        memory = shared.clone()
        first, second = memory[:12].view(3, 4), memory[6:18].view(3, 4)
        results = program(first, second, {})
        torch.testing.assert_close(memory.sum(), torch.tensor(12.0, dtype=torch.float64))
        torch.testing.assert_close(results[2]["sum"], first + second)


def test_what_means_something_in_one_process_alone_is_not_kept(folder: Path) -> None:
    for body in (
        "x + (id(torch) % 7)",
        "x + hash('a') % 5",
        "x + len(repr(object()))",
        "x + len(f'{object()}')",
        "x + len('%s' % object())",
    ):
        text = f"import torch\nNOTES = []\ndef program(x):\n    return {body}\n" + (
            "def make():\n    return program, (torch.ones(3, dtype=torch.float64),)\n"
        )
        assert run(folder, text) == 0
        assert run(folder, text) == 0, body


def test_sizes_become_symbols_as_ever(folder: Path) -> None:
    """The frame of a size, and the one for all others, which a second process finds."""
    text = CLOSURES.replace("also(x) * factor", "also(x).sum(0) * factor * x.shape[0]")
    for settings in ({"dynamic": True}, {"dynamic": None}):
        for process in range(2):
            world = imported(folder, text)
            torchcompile.reset()
            program = world.make()[0]
            compiled = torchcompile.compile(program, **settings)
            for rows in (4, 6, 9, 4):
                x = torch.randn(rows, 2, dtype=torch.float64)
                torch.testing.assert_close(compiled(x), program(x))
            graphs = 1 if settings["dynamic"] else 2
            assert (torchdynamo.stats().graphs, torchdynamo.stats().found) == (graphs, graphs * process)


def test_more_than_the_first_process_ran(folder: Path) -> None:
    """Backwards, other results' gradients and second derivatives of a graph that was not captured here."""
    text = """
import torch

def program(x, w):
    return (x * w).sin(), (x + w).exp()
"""
    imported(folder, text)
    torchcompile.reset()
    given = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torchcompile.compile(sys.modules[NAME].program)(*given)
    for _ in range(2):
        world = imported(folder, text)
        torchcompile.reset()
        compiled = torchcompile.compile(world.program)
        rows = []
        for program in (compiled, world.program):
            first, second = program(*given)
            one = torch.autograd.grad(first.sum(), given, retain_graph=True, create_graph=True)
            two = torch.autograd.grad(one[0].square().sum(), given, retain_graph=True)
            rows.append((one, two, torch.autograd.grad((first * second).sum(), given)))
        torch.testing.assert_close(*rows)
        assert torchdynamo.stats().found == 1


def test_code_that_holds_an_object(folder: Path) -> None:
    text = """
import torch

class By:
    number = 3

def program(x):
    return x * "by".number

program.__code__ = program.__code__.replace(
    co_consts=tuple(By() if constant == "by" else constant for constant in program.__code__.co_consts)
)

def make():
    return program, (torch.ones(3),)
"""
    assert [run(folder, text) for _ in range(2)] == [0, 0]


def test_what_was_found_is_saved(folder: Path) -> None:
    assert run(folder, PLAIN) == 0
    program, args = imported(folder, PLAIN).make()
    torchcompile.reset()
    compiled = torchcompile.compile(program)
    expected = compiled(*args)
    expected.sum().backward()
    assert torchdynamo.stats().found == 1
    torchcompile.save(compiled, folder / "saved")
    loaded = torchcompile.load(folder / "saved", program)
    torch.testing.assert_close(loaded(*args), expected)


def test_the_environment_is_read_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import os
import torch
NOTES = []

def program(x):
    return x * float(os.environ.get("KEPT_FACTOR", "1"))

def make():
    return program, (torch.ones(3, dtype=torch.float64),)
"""
    for factor in ("2", "3", "3"):
        monkeypatch.setenv("KEPT_FACTOR", factor)
        run(folder, text)


def test_torn_and_foreign_entries(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(folder, PLAIN) == 0
    (kept,) = (folder / "cache" / "programs").glob("*.frame_*.program")
    whole = kept.read_text()
    kept.write_text(whole[: len(whole) // 2])
    assert run(folder, PLAIN) == 0
    assert run(folder, PLAIN) == 1, "it was written again"
    kept.write_text(whole)
    kept.chmod(0o666)
    assert run(folder, PLAIN) == 0
    store, key = Store(str(folder / "cache")), kept.name.removesuffix(".program")
    kept.unlink()
    store.keep(key, '{"record":["Nothing",1]}')
    assert run(folder, PLAIN) == 0


PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torchcompile, torchdynamo, kept_world
program, args = kept_world.make()
out = torchcompile.compile(program)(*args)
out.square().sum().backward()
print(json.dumps([torchdynamo.stats().found, out.sum().item(), args[0].grad.sum().item()]))
"""


def started(folder: Path, seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.Popen([sys.executable, "-c", PROCESS, str(folder)], env=environment, text=True, stdout=-1)


def test_processes(folder: Path) -> None:
    """Two at once, then one more: of other hash seeds, each right."""
    (folder / f"{NAME}.py").write_text(PLAIN)
    both = [started(folder, seed) for seed in (1, 2)]
    rows = [json.loads(process.communicate(timeout=300)[0]) for process in both]
    rows.append(json.loads(started(folder, 3).communicate(timeout=300)[0]))
    assert rows[2][0] == 1
    program, args = imported(folder, PLAIN).make()
    out = program(*args)
    out.square().sum().backward()
    for row in rows:
        torch.testing.assert_close(torch.tensor(row[1:]), torch.tensor([out.sum().item(), args[0].grad.sum().item()]))
