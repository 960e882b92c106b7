"""Guards as text, bound to a call of the same program loaded anew: they hold where nothing differs, and nowhere else."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchdynamo
from primtorch.records import NotARecord
from torchdynamo.api import owner_of
from torchdynamo.guards.failure import first_failure
from torchdynamo.kept.frame_guards import Bound, Difference, NoForm, bind, keep, kept_of, text_of
from torchdynamo.sources import Scope

PROGRAM = """
import functools
import math
import torch
import torch.nn.functional as F

scale = 2.0
table = {"a": 1, "b": [2, 3]}
kinds = frozenset({"x", "y"})
absent = None

class Base:
    factor = 3
    def value(self, x):
        return x * self.factor

class Layer(Base):
    def __init__(self):
        self.size = 4
    @property
    def twice(self):
        return self.size * 2
    @staticmethod
    def fixed(x, by=1.5):
        return x + by
    def __call__(self, x):
        return self.fixed(self.value(x)) * self.twice

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.steps = 2
    def forward(self, x):
        for _ in range(self.steps):
            x = F.relu(self.linear(x))
        return x

def counted(count):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(x):
            return fn(x) * count
        return inner
    return wrap

def helper(x, *, alpha=0.5):
    return x.sin() * alpha

@counted(7)
def decorated(x):
    return x.cos() + 1

layer, net = Layer(), Net()

def run(x):
    x = helper(x) + layer(x) + decorated(x) + math.pi
    if "x" in kinds and table["b"][0] == 2:
        x = x * scale + table["a"]
    return net(x)
"""
NAME = "program_of_the_test"
# One thing that differs in the other process.
EDITS = [
    ("scale = 2.0", "scale = 2.5"), ("scale = 2.0", "scale = 2"), ('"a": 1', '"a": 3'), ("[2, 3]", "[2, 3, 4]"),
    ("[2, 3]", "(2, 3)"), ('{"x", "y"}', '{"x"}'), ("factor = 3", "factor = 4"), ("x * self.factor", "x + self.factor"),
    ("self.size = 4", "self.size = 5"), ("self.size * 2", "self.size * 3"), ("by=1.5", "by=1.25"), ("x + by", "x - by"),
    ("self.fixed(self.value(x))", "self.value(self.fixed(x))"), ("class Layer(Base)", "class Other(Base):\n    pass\nclass "
     "Layer(Other)"), ("self.size = 4", "self.size = 4; self.factor = 9"), ("Linear(4, 4)", "Linear(4, 4, bias=False)"),
    ("self.steps = 2", "self.steps = 3"), ("F.relu(", "F.gelu("), ("counted(7)", "counted(8)"), ("fn(x) * count",
     "fn(x) + count"), ("alpha=0.5", "alpha=-0.5"), ("x.sin()", "x.tanh()"), ("x.cos() + 1", "x.cos() + 2"),
    ("layer, net = Layer(), Net()", "layer, net = Layer(), Net().eval()\nnet.linear.weight.requires_grad_(False)"),
    ("layer, net = Layer(), Net()", "layer, net = Layer(), Net().double()"), ("return net(x)", "return net(x) + 1"),
    ("layer, net = Layer(), Net()", "layer, net = Layer(), Net()\nnet.register_forward_hook(print)"),
    ("layer, net = Layer(), Net()", "layer, net = Layer(), Net()\nnet.linear.forward = print"),
    ("def run(x):", "sub = type('Layer', (Layer,), {})\nlayer = sub()\ndef run(x):"),
    ("def run(x):", "helper = lambda x: x\ndef run(x):"), ("def run(x):", "del layer\ndef run(x):"),
    ("import math\n", "import cmath as math\n"),
]  # fmt: skip


def load(text: str) -> Any:
    """The program under the same name, as another process would have it."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def text() -> Iterator[str]:
    module = load(PROGRAM)
    yield kept_text(module.run, torch.ones(2, 4))
    sys.modules.pop(NAME, None)


def kept_text(function: Any, *args: object) -> str:
    """What is kept of the one version that a call makes; in this process it is bound to what it was made of."""
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(function)
    compiled(*args)
    (entry,) = owner_of(compiled).versions()
    info = entry.info
    kept = keep(function, info.guards, info.pinned)
    bound = bind(kept, function, args)
    assert isinstance(bound, Bound), bound
    assert bound.guards == info.guards
    assert all(map(lambda one, other: one is other, bound.pinned, info.pinned))
    return text_of(kept)


def test_the_same_program_is_bound_to_its_own_objects(text: str) -> None:
    module, x = load("# moved\n\n" + PROGRAM), torch.ones(2, 4)
    bound = bind(kept_of(text), module.run, (x,))
    assert isinstance(bound, Bound), bound
    assert any(held is module.helper for held in bound.pinned)
    assert first_failure(bound.guards, Scope.of(module.run, (x,), bound.pinned)) is None
    module.scale = 5.0  # what is bound goes on guarding
    assert first_failure(bound.guards, Scope.of(module.run, (x,), bound.pinned)) is not None


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_one_difference_of_the_program_is_found(old: str, new: str, text: str) -> None:
    assert old in PROGRAM
    module = load(PROGRAM.replace(old, new, 1))
    assert isinstance(bind(kept_of(text), module.run, (torch.ones(2, 4),)), Difference)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 4), torch.ones(2, 4, dtype=torch.float64), torch.ones(4, 2).t(), torch.ones(2, 4).requires_grad_(),
        torch.nn.Parameter(torch.ones(2, 4)), torch.ones(4), 3, None, torch.ones(2, 4, device="meta"),
    ],
    ids=str,
)  # fmt: skip
def test_another_argument_is_found(x: object, text: str) -> None:
    assert isinstance(bind(kept_of(text), load(PROGRAM).run, (x,)), Difference)


def test_the_state_of_the_process_is_compared(text: str) -> None:
    module, x = load(PROGRAM), torch.ones(2, 4)
    with torch.no_grad():
        assert isinstance(bind(kept_of(text), module.run, (x,)), Difference)
    with torch.autocast("cpu"):
        assert isinstance(bind(kept_of(text), module.run, (x,)), Difference)


def test_a_library_that_is_patched_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, relu = load(PROGRAM), torch.nn.functional.relu
    monkeypatch.setattr(torch.nn.functional, "relu", lambda x: relu(x) + 1)
    assert isinstance(bind(kept_of(text), module.run, (torch.ones(2, 4),)), Difference)


def test_one_object_where_there_were_two_is_found_and_two_where_there_was_one() -> None:
    program = "def a(x):\n    return x + 1\ndef b(x):\n    return x + 1\n{}\ndef run(x):\n    return f(x) * g(x)\n"
    two = [f"def make():\n{body}    return f\n" for body in ("    def f(x):\n        return x.sin()\n",)][0]
    one = f"{two}f = g = make()"
    other = f"{two}f, g = make(), make()"
    for first, second in ((one, other), (other, one)):
        module, x = load(program.format(first)), torch.ones(2)
        text = kept_text(module.run, x)
        assert isinstance(bind(kept_of(text), load(program.format(first)).run, (x,)), Bound)
        assert isinstance(bind(kept_of(text), load(program.format(second)).run, (x,)), Difference)
    sys.modules.pop(NAME, None)


def test_what_has_no_form_is_refused_with_a_reason() -> None:
    class Held:
        value = 3

    key = Held()
    table = {key: 2.0}

    def keyed(x: torch.Tensor) -> torch.Tensor:
        return x * table[key]

    with pytest.raises(NoForm) as refused:
        kept_text(keyed, torch.ones(2))
    assert refused.value.reason in ("text", "state")


def test_other_text_is_no_record(text: str) -> None:
    with pytest.raises(NotARecord):
        kept_of('{"record":["Popen","ls"]}')
