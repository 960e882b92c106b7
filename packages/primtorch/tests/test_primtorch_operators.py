"""Operators without a rule are calls of themselves; what they write to is read off their schemas."""

from __future__ import annotations

import random

import pytest
import torch

from primtorch import interpret, lower, trace, verify
from primtorch.errors import NoFormula
from primtorch.fake import FakeMode
from primtorch.fake.overlap import may_meet
from primtorch.symbolic import ShapeEnv

library = torch.library.Library("primtorch_operators", "DEF")
library.define("scaled_(Tensor(a!) x, Tensor y, *, float by=2.0, int[] unused=[1, 2]) -> Tensor(a!)")
library.define("split(Tensor x, Tensor(a!)[] parts, Tensor(b!)? total=None) -> (Tensor, Tensor[])")
library.define("bare(Tensor x) -> Tensor")
library.define("picked(Tensor x) -> Tensor")
operators = torch.ops.primtorch_operators


def _scaled(x, y, *, by=2.0, unused=(1, 2)):
    return x.mul_(by).add_(y)


def _split(x, parts, total=None):
    for i, part in enumerate(parts):
        part.copy_(x * i)
    if total is not None:
        total += x.sum()
    return x + 1, [x * 2, x * 3]


library.impl("scaled_", _scaled, "CompositeExplicitAutograd")
library.impl("split", _split, "CPU")
library.impl("bare", lambda x: x * 2, "CPU")
library.impl("picked", lambda x: x[x > 0], "CPU")
torch.library.register_fake(
    "primtorch_operators::split",
    lambda x, parts, total=None: (torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]),
    lib=library,
)
torch.library.register_fake(
    "primtorch_operators::picked",
    lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size(max=x.numel())),
    lib=library,
)


def writes(x, y):
    z = x * 2
    back = operators.scaled_(z[1], y[0], by=3.0)
    parts = [torch.zeros_like(x), torch.zeros_like(x)]  # equal values, and two memories
    total = torch.zeros((), dtype=x.dtype)
    one, (two, three) = operators.split(z, parts, total)
    operators.split(one, parts[:1])
    return z, back, one, two + three, *parts, total


def test_written_arguments_become_results():
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    graph = trace(writes, x, y)
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in graph.graph.nodes)
    prims = lower(graph)
    verify(prims)
    for run in (graph, prims, interpret(prims, object())):
        torch.testing.assert_close(tuple(run(x, y)), writes(x, y))


def test_an_operator_that_nobody_reads_runs_as_often_as_in_eager():
    def program(x):
        operators.split(x, [])
        operators.split(x, [])
        return x.sin()

    graph = lower(trace(program, torch.randn(3)))
    assert sum("split" in str(node.target) for node in graph.graph.nodes) == 2


@pytest.mark.parametrize("rows", [3, "s"])
def test_a_registered_fake_gives_the_shape(rows):
    env = ShapeEnv()
    mode = FakeMode(env)
    x = mode.from_tensor(torch.randn(3, 4), dynamic={0: env.symbol(3, "rows")} if rows == "s" else None)
    with mode:
        one, (two, _) = operators.split(x, [])
        assert tuple(one.shape) == tuple(two.shape) == tuple(x.shape)
        assert operators.scaled_(x, x) is x
        assert str(operators.picked(x).shape[0]) in env.symbols
        with pytest.raises(NoFormula, match=r"bare.*registered no fake"):
            operators.bare(x)
    assert not env.guards


def test_memory_that_may_meet():
    for _ in range(400):
        seed = random.randrange(10**9)
        rng = random.Random(seed)

        def places():
            rank = rng.randint(0, 3)
            shape = [rng.randint(0 if rng.random() < 0.1 else 1, 4) for _ in range(rank)]
            return torch.arange(400).as_strided(shape, [rng.randint(0, 9) for _ in range(rank)], rng.randint(0, 40))

        a, b = places(), places()
        common = set(a.flatten().tolist()) & set(b.flatten().tolist())
        assert may_meet(a, b) == bool(common), f"seed {seed}"
