"""Programs that read state and change it between calls: compiled code always sees what eager sees."""

from __future__ import annotations

import collections
import copy
import types
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchdynamo

SCALE = 2


class Box:
    shared = 3

    def __init__(self) -> None:
        self.number = 1
        self.flag = True
        self.items = [1, 2]
        self.table: dict[str, Any] = {"a": 1.5}
        self.inner = types.SimpleNamespace(depth=1, pair=(1, 2))
        self.queue = collections.deque([1], maxlen=3)
        self.names = {"x"}
        self.weight = torch.tensor([1.0, 2.0])

    @property
    def twice(self) -> int:
        return self.number * 2

    def bump(self, by: int = 1) -> None:
        self.number += by


def program(box: Any, x: torch.Tensor, step: int) -> Any:
    """Reads and writes every part of the box."""
    y = x * box.number + box.twice
    if box.flag:
        y = y + box.weight
    for item in box.items:
        y = y + item
    for key, value in box.table.items():
        y = y * value + len(key)
    if "x" in box.names:
        box.inner.depth += 1
    y = y + box.inner.depth + box.shared + sum(box.inner.pair) + sum(box.queue)
    box.queue.append(step)
    box.bump()
    if step == 1:
        box.items.append(step)
    elif step == 2 and box.items:
        box.items.pop()
    box.table["last"] = y.shape[0]
    if hasattr(box, "extra"):
        y = y - box.extra
        del box.extra
    if step == 3:
        box.extra = step
    return y, box.items, dict(box.table)


def _swap_flag(box: Any) -> None:
    box.flag = not box.flag


def _grow(box: Any) -> None:
    box.items = [*box.items, 7]


def _rename(box: Any) -> None:
    box.names ^= {"x"}


def _weigh(box: Any) -> None:
    box.weight = torch.tensor([3.0, -1.0])


def _pair(box: Any) -> None:
    box.inner.pair = (box.inner.pair[0] + 1, 0)


def _shadow_class(box: Any) -> None:
    box.shared = 11


def _table(box: Any) -> None:
    box.table = {"b": 2.0, **box.table}


def _float(box: Any) -> None:
    box.number = float(box.number)


CHANGES = [_swap_flag, _grow, _rename, _weigh, _pair, _shadow_class, _table, _float, lambda box: None]


def _state(box: Any) -> Any:
    state = dict(vars(box))
    state["inner"] = vars(state["inner"])
    state["weight"] = state["weight"].tolist()
    return state


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 3), st.sampled_from([2, 2, 2, 1])), max_size=7))
def test_state_between_calls(steps: list[Any]) -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True, recompile_limit=100)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    ours, theirs = Box(), Box()
    for change, step, size in steps:
        change(ours)
        change(theirs)
        x = torch.randn(3, size)
        got, want = compiled(ours, x, step), program(theirs, copy.copy(x), step)
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
        assert got[1] is ours.items and got[1:] == want[1:]
        assert _state(ours) == _state(theirs)


def scaled(x: torch.Tensor) -> torch.Tensor:
    global SCALE
    SCALE += 1
    return x * SCALE


def test_globals_are_read_and_written() -> None:
    global SCALE
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(scaled)
    x = torch.ones(2)
    for value in (2, 2, 5):
        SCALE = value
        assert compiled(x).tolist() == [value + 1.0] * 2
        assert value + 1 == SCALE


def test_monkeypatched_functions_and_classes() -> None:
    def f(box: Any, x: torch.Tensor) -> torch.Tensor:
        return x * box.twice + box.shared

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(f)
    box, x = Box(), torch.ones(2)
    torch.testing.assert_close(compiled(box, x), f(box, x), rtol=0, atol=0)
    saved = Box.shared
    try:
        Box.shared = 9
        torch.testing.assert_close(compiled(box, x), f(box, x), rtol=0, atol=0)
    finally:
        Box.shared = saved
