"""Graphs that run as they are write sums over operands that nobody reads again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from aotautograd import aot_function, run_graph
from aotautograd.in_place import accumulate_in_place

aten = torch.ops.aten


def count_in_place(run: Callable[..., Any], *examples: torch.Tensor) -> int:
    gm = fx.symbolic_trace(run)
    values: dict[fx.Node, Any] = {}
    inputs = iter(examples)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        node.meta["val"] = values.get(node)
    return accumulate_in_place(gm.graph)


X, W = torch.randn(4, 4), torch.randn(4, 4)


def test_a_sum_goes_over_an_operand_that_dies() -> None:
    def run(x: Any, w: Any) -> Any:
        total = aten.add.Tensor(aten.mm.default(x, w), aten.mm.default(w, x))
        return (aten.add.Tensor(x, aten.view.default(total, [4, 4])),)

    assert count_in_place(run, X, W) == 2


def view_read_later(x: Any, w: Any) -> Any:
    product = aten.mm.default(x, w)
    view = aten.t.default(product)
    return aten.add.Tensor(product, w), aten.sin.default(view)


CASES: dict[str, Callable[..., Any]] = {
    "an input": lambda x, w: (aten.add.Tensor(x, w),),
    "a result of the graph": lambda x, w: (m := aten.mm.default(x, w), aten.add.Tensor(m, w)),
    "read later": lambda x, w: (aten.sin.default(aten.add.Tensor(m := aten.mm.default(x, w), w)), aten.cos.default(m)),
    "a view is read later": view_read_later,
    "a part of the same memory": lambda x, w: (aten.add.Tensor(m := aten.mm.default(x, w), aten.t.default(m)),),
    "another dtype": lambda x, w: (aten.add.Tensor(aten.gt.Tensor(x, w), x),),
    "another shape": lambda x, w: (aten.add.Tensor(aten.select.int(aten.mm.default(x, w), 0, 1), w),),
    "a view of an input": lambda x, w: (aten.add.Tensor(aten.view.default(x, [4, 4]), w),),
    "a composite operator may return the sum itself": lambda x, w: (
        aten.einsum.default("ij->ij", [aten.add.Tensor(aten.mm.default(x, w), w)]),
    ),
    "scaled": lambda x, w: (aten.add.Tensor(aten.mm.default(x, w), w, alpha=2),),
}


@pytest.mark.parametrize("name", CASES)
def test_no_sum_goes_over_what_is_needed(name: str) -> None:
    assert count_in_place(CASES[name], X, W) == 0


@pytest.mark.parametrize("repetition", range(10))
def test_values_and_gradients_of_random_programs(repetition: int) -> None:
    seed = random.randrange(1 << 30)  # not a parameter: workers have to collect the same names

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        draw = random.Random(seed)
        values = [x, w]
        for _ in range(20):
            a, b = draw.choice(values), draw.choice(values[-3:])
            rule = draw.choice(
                (
                    lambda a, b: a + b,
                    lambda a, b: (a @ b) * 0.2,
                    lambda a, b: a.t() + b,
                    lambda a, b: a.reshape(-1).view(4, 4) + b.sin(),
                    lambda a, b: torch.stack((a, b)).unbind()[draw.randrange(2)] + a,
                    lambda a, b: a[draw.randrange(4)] + b,
                )
            )
            values.append(rule(a, b).tanh() if draw.random() < 0.3 else rule(a, b))
        return sum((v.mean() for v in values[-4:]), (x * w).mean())

    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    kept = [x.detach().clone() for x in inputs]
    expected = torch.autograd.grad(program(*inputs), inputs)
    loss = aot_function(program, fw_compiler=run_graph)(*inputs)
    found = torch.autograd.grad(loss, inputs)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, msg=lambda text: f"seed {seed}: {text}")
    assert all(map(torch.equal, inputs, kept)), f"seed {seed}: an input was written"
