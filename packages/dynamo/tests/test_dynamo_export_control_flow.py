"""Exported programs with branches and loops: a graph of operators keeps each as a node over graphs of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torchdynamo
from primtorch.higher_order import HigherOrder
from torchdynamo import export

weight = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FORMS = {
    "torch": {},
    "aten": {"aten_graph": True},
    "core_aten": {"decompositions": "core_aten"},
    "prims": {"decompositions": "prims"},
}


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(
        x.sum() > 0, lambda x: torch.softmax(x @ weight, -1), lambda x: F.layer_norm(x, [x.shape[-1]]), (x,)
    )


def branches_of_other_layouts(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x * 2).t(), lambda x: x.new_ones(x.shape).t(), (x,)) + 1


def branches_that_write_to_their_own(x: torch.Tensor) -> torch.Tensor:
    def written(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[0] = x[1]
        out[:, 1:].add_(1)
        return out

    return torch.cond(x.sum() > 0, written, lambda x: x - 1, (x,))


def branches_with_tables(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x: x * torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype),
        lambda x: x + torch.tensor(5.0),
        (x,),
    )


def branches_and_writes(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0].mul_(2)
    out = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    x.add_(out)
    out.mul_(x)
    return x + out


def an_input_is_written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def a_loop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(
        lambda i, x: (i < 6) & (x.abs().sum() < 50), lambda i, x: (i + 1, F.silu(x @ weight) * 2), (start, x)
    )


def a_scan(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scan(lambda c, y: (torch.tanh(c + y), torch.softmax(c * y, -1)), x.new_zeros(3), x)


def a_scan_backwards(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scan(lambda c, y: (c * 0.5 + y, c - y), x.new_zeros(3), x, reverse=True)


def sums(x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


def rows(x: torch.Tensor) -> torch.Tensor:
    return mapped(lambda row, w: F.gelu(row) @ w, x, weight)


def branches_in_a_scan_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    def step(c: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = lambda c, y: torch.tanh(c + y)
        return torch.cond(c.sum() > 0, more, lambda c, y: F.silu(c - y), (c, y)), c * y

    return torch.cond(x.sum() > 0, lambda x: scan(step, x.new_zeros(3), x)[1], lambda x: x.clone(), (x,))


def twice(x: torch.Tensor) -> torch.Tensor:
    first = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return torch.cond(first.sum() > 1, lambda x, y: x * y, lambda x, y: x + y, (x, first))


PROGRAMS = {
    program.__name__: program
    for program in (
        branches,
        branches_of_other_layouts,
        branches_that_write_to_their_own,
        branches_with_tables,
        branches_and_writes,
        an_input_is_written,
        a_loop,
        a_scan,
        a_scan_backwards,
        sums,
        rows,
        branches_in_a_scan_in_a_branch,
        twice,
    )
}


def _over_graphs(graph: fx.GraphModule) -> Iterator[HigherOrder]:
    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrder):
            yield node.target
            for body in node.target.bodies:
                assert isinstance(body, fx.GraphModule)
                yield from _over_graphs(body)


def _points(rows: int = 4) -> Iterator[torch.Tensor]:
    x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    yield from (x, -x, x.abs(), -x.abs(), x * 0, x * 1e-3)


def _same(exported: Callable[..., object], program: Callable[..., object], x: torch.Tensor) -> None:
    ours, theirs = x.clone(), x.clone()
    found, expected = pytree.tree_leaves(exported(ours)), pytree.tree_leaves(program(theirs))
    assert len(found) == len(expected)
    for a, b in zip([*found, ours], [*expected, theirs], strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_branches_and_loops_take_the_way_of_the_data(name: str, form: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    for dynamic in (None, True):
        exported = export(program, dynamic=dynamic, **FORMS[form])(next(_points()))
        operators = list(_over_graphs(exported.graph))
        assert operators or name == "sums"
        torchdynamo.save(exported, tmp_path / "program")
        loaded = torchdynamo.load(tmp_path / "program")
        for x in (*_points(), *(_points(7) if dynamic else ())):
            _same(exported, program, x)
            _same(loaded, program, x)


def test_bodies_are_graphs_of_operators() -> None:
    exported = export(branches_in_a_scan_in_a_branch, aten_graph=True)(next(_points()))
    operators = list(_over_graphs(exported.graph))
    assert [operator.name for operator in operators] == ["cond", "scan", "cond"]
    for operator in operators:
        for body in operator.bodies:
            assert isinstance(body, fx.GraphModule)
            for node in (node for node in body.graph.nodes if node.op == "call_function"):
                assert (
                    isinstance(node.target, (torch._ops.OpOverload, HigherOrder)) or node.target.__name__ == "getitem"
                )
                assert node.meta["stack"][-1].file == __file__


@pytest.mark.parametrize("form", ["torch", "aten"])  # an opset draws by operators of its own
def test_random_numbers_of_a_branch_are_drawn_where_it_is_taken(form: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        noisy = torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 2, (x,))
        return noisy + torch.rand_like(x)

    exported = export(program, **FORMS[form])(next(_points()))
    for x in _points():
        torch.manual_seed(3)
        expected = program(x)
        torch.manual_seed(3)
        torch.testing.assert_close(exported(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["branches", "a_scan", "rows", "branches_in_a_scan_in_a_branch", "twice"])
def test_exported_branches_and_loops_have_gradients(name: str, form: str) -> None:
    program = PROGRAMS[name]
    exported = export(program, **FORMS[form])(next(_points()).requires_grad_())
    reference = export(program)(next(_points()).requires_grad_())
    for x in (*_points(),):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        totals = [sum(t.pow(2).sum() for t in pytree.tree_leaves(f(i))) for f, i in zip((exported, reference), inputs)]
        first, second = (torch.autograd.grad(total, i)[0] for total, i in zip(totals, inputs, strict=True))
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["aten", "core_aten", "prims"])
def test_the_derivative_of_a_branch_within(form: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = torch.cond(x.sum() > 0, torch.sin, lambda x: x * 3, (x,))
        return torch.autograd.grad(out.sum(), x)[0]

    exported = export(program, **FORMS[form])(next(_points()))
    for x in _points():
        torch.testing.assert_close(exported(x), torch.cos(x) if x.sum() > 0 else torch.full_like(x, 3.0))
