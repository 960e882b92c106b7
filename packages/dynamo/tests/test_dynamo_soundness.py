"""Random programs read state of every kind; between calls any of it changes. Compiled equals eager on every call.

A program is a list of reads, each adding to the result, over one world: an object with attributes, a class, globals,
a closure, containers, tensors and their aliases. A history is a list of changes to that world, one before each call.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import types
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdynamo

# Each reads `s` (an object), `k` (a closure's list), globals, or the arguments `x`, `y`, and changes the tensor `r`.
READS = (
    "r = r + s.number",
    "r = r * s.ratio",
    "r = r + s.twice",
    "r = r + s.gain",
    "r = s.scale(r)",
    "r = r + len(s.items)",
    "r = r + sum(s.items)",
    "r = r + (s.items[0] if s.items else 9)",
    "for i in s.items: r = r * 1.5 + i",
    "r = r + sum(v for v in s.table.values())",
    "r = r + (s.table['a'] if 'a' in s.table else -1)",
    "r = r + s.table.get('b', 4)",
    "for key in s.table: r = r + len(key)",
    "r = r + s.inner.depth",
    "r = r + getattr(s, 'extra', 0)",
    "r = r + (1 if hasattr(s, 'extra') else 2)",
    "r = r + (3 if s.flag else 5)",
    "r = r + (7 if 'x' in s.names else 11)",
    "r = r + len(s.queue)",
    "r = r + s.pair[1]",
    "r = r + (2 if s.missing is None else 3)",
    "r = r + GLOBAL",
    "r = r + helper(r, 1)",
    "r = r + TABLE['g']",
    "r = r + k[0]",
    "r = r + len(k)",
    "r = r + cell",
    "r = r + s.weight",
    "r = r + s.weight.shape[0]",
    "r = r + (1 if s.weight.requires_grad else 2)",
    "r = r + (4 if s.weight is s.other else 6)",
    "r = r + (1 if s.items is s.shared else 2)",
    "r = r + (1 if x is y else 2)",
    "r = r + y.sum()",
    "r = r + y.dim() + (1 if y.dtype == torch.float64 else 2)",
    "r = r + (1 if y.is_contiguous() else 2) + y.stride()[0]",
    "r = r + (1 if torch.is_grad_enabled() else 2)",
    "r = r + (5 if isinstance(s.inner, dict) else 6)",
    "r = s.layer(r)",
    "r = r + (1 if s.layer.training else 2)",
    "s.number += 1",
    "s.items.append(1)",
    "s.table['n'] = s.number",
    "s.last = r",
    "r = r + (s.last if hasattr(s, 'last') else 0)",
    "s.weight.add_(1) if not s.weight.requires_grad else None",
    "k.append(2)",
    "TABLE['g'] += 1",
    "global GLOBAL; GLOBAL += 1",
    "s.queue.append(3)",
)
CHANGES = (
    "pass",
    "s.number = 5",
    "s.number = 5.0",
    "s.ratio = 0.5",
    "type(s).gain = 8",
    "s.gain = 3",
    "Base.gain = 6",
    "type(s).scale = lambda self, r: r - 1",
    "type(s).twice = property(lambda self: 77)",
    "s.items.append(4)",
    "s.items.clear()",
    "s.items[:1] = [9, 8]",
    "s.items = s.shared",
    "s.items = tuple(s.items)",
    "s.table['a'] = 6",
    "s.table.pop('a', None)",
    "s.table['b'] = 2",
    "s.table = dict(reversed(s.table.items()))",
    "s.inner.depth = 4",
    "s.inner = types.SimpleNamespace(depth=9)",
    "s.extra = 13",
    "s.__dict__.pop('extra', None)",
    "s.flag = not s.flag",
    "s.names ^= {'x'}",
    "s.queue.appendleft(0)",
    "s.pair = (4, 5, 6)",
    "s.missing = 0",
    "g['GLOBAL'] = 21",
    "g['helper'] = lambda r, n: r * n",
    "g['helper'].__defaults__ = (5,)",
    "g['TABLE']['g'] = 30",
    "g['TABLE'] = {'g': 31}",
    "k[0] = 6",
    "k.append(1)",
    "f.__closure__[0].cell_contents = 12",
    "s.weight = s.weight * 2",
    "s.weight = s.other",
    "s.weight = torch.ones(3, requires_grad=True)",
    "s.weight = torch.ones(1)",
    "s.weight.data.mul_(3)",
    "a[1] = a[0]",
    "a[1] = torch.ones(3, 2).t()[0]",
    "a[1] = torch.ones(3, dtype=torch.float64)",
    "a[1] = torch.ones(2, 3)",
    "a[0] = torch.ones(2, 3)",
    "s.layer.eval()",
    "s.layer.train()",
    "s.layer.register_forward_hook(lambda m, i, o: o + 1)",
    "s.layer.scale = 4.0",
    "s.layer.weight = torch.nn.Parameter(torch.full((3,), 2.0))",
    "s.layer.forward = lambda r: r - 3",
    "no_grad[0] = not no_grad[0]",
)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, r: torch.Tensor) -> torch.Tensor:
        return r * self.weight * self.scale + (1 if self.training else 0)


def make_world(lines: list[str]) -> dict[str, Any]:
    """A fresh world and the program `f` in it."""

    class Base:
        gain = 2

        def scale(self, r: torch.Tensor) -> torch.Tensor:
            return r * self.gain  # type: ignore[no-any-return]

        @property
        def twice(self) -> Any:
            return self.number * 2  # type: ignore[attr-defined]

    class Derived(Base):
        pass

    s: Any = Derived()
    s.number, s.ratio, s.flag, s.missing = 1, 1.25, True, None
    s.items, s.shared, s.pair, s.names = [1, 2], [3], (1, 2), {"x"}
    s.table, s.inner = {"a": 1, "bb": 2}, types.SimpleNamespace(depth=1)
    s.queue = collections.deque([1], maxlen=3)
    s.weight, s.other, s.layer = torch.ones(3), torch.full((3,), 2.0), Layer()
    names: dict[str, Any] = {
        "torch": torch, "GLOBAL": 1, "TABLE": {"g": 3}, "helper": lambda r, n, m=2: r + n * m,
    }  # fmt: skip
    first = [line for line in lines if line.startswith("global")][:1]
    body = [line.removeprefix("global GLOBAL; ") for line in lines]
    source = ["def make(cell, k):", "    def f(x, y, s):"]
    source += ["        global GLOBAL"] * len(first) + ["        r = x + 0"]
    source += [f"        {line}" for line in body] + ["        cell, k", "        return r", "    return f"]
    exec("\n".join(source), names)
    f = names["make"](1, k := [1])
    return {
        "s": s, "g": names, "k": k, "f": f, "Base": Base, "torch": torch, "types": types,
        "a": [torch.arange(3.0), torch.ones(3)], "no_grad": [False],
    }  # fmt: skip


def outcome(world: dict[str, Any], run: Any) -> Any:
    """What a call gives: the result's values and kind, or the error, and the state that it leaves."""
    s = world["s"]
    try:
        with torch.set_grad_enabled(not world["no_grad"][0]):
            r = run(*world["a"], s)
        result: Any = (r.detach().tolist(), str(r.dtype), r.requires_grad)
    except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        if isinstance(error, torchdynamo.TorchDynamoError):
            raise
        result = type(error).__name__
    state = (
        s.number,
        list(s.items),
        dict(s.table),
        list(s.queue),
        world["k"],
        world["g"]["TABLE"],
        world["g"]["GLOBAL"],
    )
    return copy.deepcopy((result, state, s.weight.tolist(), s.last.detach().tolist() if hasattr(s, "last") else None))


COUNT = int(os.environ.get("SOUNDNESS_PROGRAMS", "300"))


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(READS), min_size=1, max_size=4), st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)
)
def test_state_that_changes_between_calls_is_seen(reads: list[str], changes: list[str]) -> None:
    eager, traced = make_world(reads), make_world(reads)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=torchdynamo.CaptureOptions(strict=True))(
        traced["f"]
    )
    for change in ("pass", *changes, "pass"):
        for world in (eager, traced):
            with contextlib.suppress(TypeError, AttributeError):  # a tuple where an earlier change took the list away
                exec(change, world)
        assert outcome(traced, compiled) == outcome(eager, eager["f"]), f"after {change!r}"
