"""What stands for a name of torch's is replaced between calls, and put back: compiled code always calls what eager calls."""

from __future__ import annotations

import functools
import os.path
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdynamo
from torchdynamo.stats import TOTAL


@dataclass(frozen=True)
class Replaced:
    """A program, and a name that it reaches. It calls what stands for the name with the tensor first."""

    owner: Any
    name: str
    program: Callable[[torch.Tensor], Any]


class Derived(nn.Linear):
    pass


def _attention(x: torch.Tensor) -> torch.Tensor:
    return F.multi_head_attention_forward(  # type: ignore[return-value]
        x, x, x, 2, 1, torch.ones(6, 2), None, None, None, False, 0.0, torch.ones(2, 2), None, need_weights=False
    )[0]


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y += 1
    return y


LINEAR, DERIVED = nn.Linear(2, 2), Derived(2, 2)
CASES = {
    "a builtin of torch.nn.functional": Replaced(F, "gelu", lambda x: F.gelu(x)),
    "a function of torch.nn.functional": Replaced(F, "softplus", lambda x: F.softplus(x)),
    "a dispatching function": Replaced(F, "dropout", lambda x: F.dropout(x, 0.0)),
    "a function of torch": Replaced(torch, "sin", lambda x: torch.sin(x)),
    "a function of torch in Python": Replaced(torch, "norm", lambda x: torch.norm(x)),
    "a function of torch.linalg": Replaced(torch.linalg, "vector_norm", lambda x: torch.linalg.vector_norm(x)),
    "in the code of a module": Replaced(F, "relu", nn.ReLU()),
    "in the code of a layer within a layer": Replaced(F, "linear", nn.Sequential(nn.Sequential(LINEAR))),
    "in the code of a function": Replaced(F, "linear", _attention),
    "behind a function": Replaced(torch, "relu", lambda x: F.relu(x)),
    "in a closure": Replaced(torch, "max_pool1d", lambda x: F.max_pool1d(x, 1)),
    "a method of tensors": Replaced(torch.Tensor, "sin", lambda x: x.sin()),
    "a method of tensors in Python": Replaced(torch.Tensor, "norm", lambda x: x.norm()),
    "a method of a result": Replaced(torch.Tensor, "cos", lambda x: (x + 1).cos()),
    "an operator": Replaced(torch.Tensor, "__mul__", lambda x: x * x),
    "a reflected operator": Replaced(torch.Tensor, "__rsub__", lambda x: 1 - x),
    "an operator in place": Replaced(torch.Tensor, "__iadd__", _in_place),
    "an index": Replaced(torch.Tensor, "__getitem__", lambda x: x[0]),
    "a method of a layer": Replaced(nn.Linear, "forward", LINEAR),
    "a method of a layer within": Replaced(nn.Linear, "forward", nn.Sequential(LINEAR)),
    "an inherited method": Replaced(nn.Linear, "forward", DERIVED),
    "a method that was inherited": Replaced(Derived, "forward", nn.Sequential(DERIVED)),
    "the call of all layers": Replaced(nn.Module, "__call__", nn.Sequential(LINEAR)),
    "an operator's overload packet": Replaced(torch.ops.aten, "tanh", lambda x: torch.ops.aten.tanh(x)),
}


def replacement(*args: Any, **kwargs: Any) -> Any:
    tensor = next(value for value in args if isinstance(value, torch.Tensor))
    return torch.full_like(tensor, 7.0)


@pytest.mark.parametrize("name", CASES)
def test_what_is_replaced_is_called(name: str) -> None:
    case = CASES[name]
    compiled: Any = torchdynamo.optimize(lambda graph, inputs: graph.forward)(case.program)
    x = torch.tensor([[0.5, 1.5]])
    with torch.no_grad():
        before = case.program(x)
        torch.testing.assert_close(compiled(x), before)
        own, original = case.name in vars(case.owner), getattr(case.owner, case.name)
        setattr(case.owner, case.name, replacement)
        try:
            wanted = case.program(x)
            found = compiled(x)
        finally:
            if own:
                setattr(case.owner, case.name, original)
            else:
                delattr(case.owner, case.name)
        assert not torch.equal(wanted, before), "the program does not reach the name"
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(compiled(x), before)
    assert [event.kind.id for event in TOTAL.events] == ["recompiled"] and TOTAL.events[0].count == 1


@pytest.mark.parametrize(
    "wrapped", [F.relu, F.softplus, torch.Tensor.norm, np.reshape, np.kron, os.path.join, torch.optim.SGD.step]
)
def test_a_wrapper_is_not_of_the_module_that_it_names(wrapped: Callable[..., Any]) -> None:
    """`functools.wraps` gives a function the name and module of what it wraps: its code and what it reads are its own."""
    state = {"factor": 2.0, "calls": 0}

    def counting(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        state["calls"] += 1
        return x.reshape(-1).exp() * state["factor"] * scale

    wrapper = functools.wraps(wrapped)(counting)
    compiled: Any = torchdynamo.optimize(lambda graph, inputs: graph.forward)(lambda x: wrapper(x) + 1)
    x = torch.randn(2, 3, dtype=torch.float64)
    for call, factor in enumerate((2.0, 5.0, 7.0), 1):
        state["factor"] = factor
        torch.testing.assert_close(compiled(x), x.reshape(-1).exp() * factor + 1, rtol=0, atol=0)
        assert state["calls"] == call
    wrapper.__defaults__ = (3.0,)
    torch.testing.assert_close(compiled(x), x.reshape(-1).exp() * 7.0 * 3.0 + 1, rtol=0, atol=0)
    assert {event.kind.id for event in TOTAL.events} == {"recompiled"}
