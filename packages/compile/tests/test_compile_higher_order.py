"""Operators that take functions (`torch.cond`, loops) in compiled functions: nodes with graphs inside, and the values
and gradients that Python's own `if` and loops have."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchcompile
import torchdynamo

BACKENDS = ("eager", "aot_eager", "inductor")
pytestmark = pytest.mark.usefixtures("double")

Program = Callable[..., Any]


def _plain_cond(pred: Any, true_fn: Program, false_fn: Program, operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


OPERATORS = SimpleNamespace(cond=torch.cond)
PYTHON = SimpleNamespace(cond=_plain_cond)


class Gate(nn.Module):
    """Two layers, one of which a call takes."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ops, self.wide, self.narrow = ops, nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.ops.cond(x.sum() > 0, lambda t: self.wide(t).relu(), lambda t: self.narrow(t).sin(), (x,)) + x


@dataclass(frozen=True)
class Case:
    """A program written with operators that it is given.

    Attributes:
        shapes: of its arguments, call by call: one more of a shape that was there needs no other graph.
        graphs: how many graphs of static sizes, then of dynamic ones, its calls make.
    """

    make: Callable[[Any], Program]
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = (((3, 4),), ((3, 4),), ((5, 4),), ((7, 4),))
    dynamic_graphs: int = 2

    def calls(self) -> list[list[torch.Tensor]]:
        torch.manual_seed(1)
        signs = (1, -1)
        return [
            [(torch.rand(shape) * signs[call % 2]).requires_grad_() for shape in shapes]
            for call, shapes in enumerate(self.shapes)
        ]


CASES: dict[str, Case] = {}


def case(**given: Any) -> Callable[[Callable[[Any], Program]], Callable[[Any], Program]]:
    def register(make: Callable[[Any], Program]) -> Callable[[Any], Program]:
        CASES[make.__name__] = Case(make, **given)
        return make

    return register


@case()
def a_branch(ops: Any) -> Program:
    return lambda x: ops.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


@case()
def a_branch_of_modules(ops: Any) -> Program:
    return Gate(ops)


@case()
def branches_that_return_trees(ops: Any) -> Program:
    def f(x: torch.Tensor) -> Any:
        y = x * 2
        return ops.cond(
            y.mean() > 0,
            lambda t: {"a": t["x"] * 2, "b": (t["x"].sum(), t["y"] + 1)},
            lambda t: {"a": t["y"].exp(), "b": (t["x"].prod(), t["x"] - t["y"])},
            ({"x": x, "y": y},),
        )

    return f


@case()
def a_branch_that_closes_over_sizes_and_tensors(ops: Any) -> Program:
    weight = torch.arange(4, dtype=torch.float64)

    def f(x: torch.Tensor) -> Any:
        length, scale = x.shape[0], x.sum(0)
        return ops.cond(scale.sum() > 0, lambda: x * length + weight, lambda: (x * scale).view(length, -1) - 1)

    return f


@case()
def a_branch_within_a_branch(ops: Any) -> Program:
    def f(x: torch.Tensor) -> Any:
        def inner(t: torch.Tensor) -> Any:
            return ops.cond(t.max() > 0.9, lambda u: u.sin() * x, lambda u: u.cos() * 3, (t * 2,))

        return ops.cond(x.sum() > 0, inner, lambda t: t.exp() - x, (x,)).sum(0)

    return f


@case()
def a_branch_that_writes_to_its_own_tensors(ops: Any) -> Program:
    def taken(t: torch.Tensor) -> Any:
        t = t.clone()
        t[0] = 1
        return t.mul_(2)

    return lambda x: ops.cond(x.sum() > 0, taken, lambda t: t * 3, (x,))


@case()
def a_branch_without_gradient(ops: Any) -> Program:
    def taken(t: torch.Tensor) -> Any:
        with torch.no_grad():
            held = t.exp()
        return held * t, t.detach() * 2

    return lambda x: ops.cond(x.sum() > 0, taken, lambda t: (t * 3, t.detach() + 1), (x,))


@case()
def several_branches(ops: Any) -> Program:
    def f(x: torch.Tensor) -> Any:
        for row in (0, 1):
            x = ops.cond(x[row].sum() > 0, lambda t: t * 2 - 1, lambda t: t.sin() + t, (x,))
        return x

    return f


@case()
def a_predicate_of_sizes(ops: Any) -> Program:
    return lambda x: ops.cond(x.shape[0] > 4, lambda t: t.sin(), lambda t: t[:1], (x,))


@case()
def a_predicate_of_python(ops: Any) -> Program:
    return lambda x: ops.cond(True, lambda t: t.sin(), lambda t: t.sum(), (x,))


def _results(program: Program, arguments: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    leaves = pytree.tree_leaves(program(*arguments))
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parameters = list(program.parameters()) if isinstance(program, nn.Module) else []
    by = [*arguments, *parameters]
    found = torch.autograd.grad(sum(leaf.sin().sum() for leaf in wanted), by, allow_unused=True) if wanted else ()
    return leaves, [torch.zeros_like(x) if g is None else g for x, g in zip(by, found, strict=False)]


def _close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, backend: str, dynamic: bool) -> None:
    made = CASES[name]
    plain = made.make(PYTHON)
    ours = torchcompile.compile(made.make(OPERATORS), backend=backend, dynamic=dynamic, fullgraph=True)
    for arguments in made.calls():
        leaves, gradients = _results(plain, arguments)
        found, of_ours = _results(ours, arguments)
        assert [x.requires_grad for x in found] == [x.requires_grad for x in leaves]
        _close(found, leaves)
        _close(of_ours, gradients)
        with torch.no_grad():
            _close(pytree.tree_leaves(ours(*arguments)), leaves)
    if dynamic:
        assert torchdynamo.stats().graphs <= made.dynamic_graphs * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_second_derivatives(backend: str) -> None:
    made = CASES["a_branch_of_modules"]
    plain, ours = made.make(PYTHON), torchcompile.compile(made.make(OPERATORS), backend=backend, fullgraph=True)
    for (x,) in made.calls():
        slopes = [torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)[0] for f in (plain, ours)]
        wanted, found = (torch.autograd.grad(slope.square().sum(), x)[0] for slope in slopes)
        _close(found, wanted)


@pytest.mark.expected_eager("graph_break")
@pytest.mark.parametrize("name", CASES)
def test_a_break_before_and_after(name: str) -> None:
    made = CASES[name]

    def broken(program: Program) -> Program:
        def f(x: torch.Tensor) -> Any:
            y = x + 1 - 1
            torchdynamo.graph_break()
            out = program(y)
            torchdynamo.graph_break()
            return pytree.tree_map(lambda leaf: leaf * 2, out)

        return f

    plain = broken(made.make(PYTHON))
    ours = torchcompile.compile(broken(made.make(OPERATORS)), backend="aot_eager")
    for arguments in made.calls():
        for found, wanted in zip(_results(ours, arguments), _results(plain, arguments), strict=True):
            _close(found, wanted)


def _logs(log: list[int], t: torch.Tensor) -> torch.Tensor:
    log.append(1)
    return t * 2


LOG: list[int] = []
COUNTS = {"calls": 0}


def _counts(t: torch.Tensor) -> torch.Tensor:
    COUNTS["calls"] += 1
    return t * 2


def _local_log(x: torch.Tensor) -> Any:
    log: list[int] = []
    return torch.cond(x.sum() > 0, lambda t: _logs(log, t), lambda t: t.sin(), (x,))


def _nonlocal(x: torch.Tensor) -> Any:
    count = 0

    def taken(t: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return t * count

    return torch.cond(x.sum() > 0, taken, lambda t: t.sin(), (x,))


def _cond(true_fn: Program, false_fn: Program = torch.sin) -> Program:
    return lambda x: torch.cond(x.sum() > 0, true_fn, false_fn, (x,))


# Programs that no graph takes, with a part of what is told. Eager refuses most of them.
REFUSED: dict[str, tuple[Program, str]] = {
    "shapes": (_cond(lambda t: t[1:] * 2), "different shapes"),
    "dtypes": (_cond(lambda t: t.float()), "different dtypes"),
    "structures": (_cond(lambda t: (t * 2, t * 3)), "different structures"),
    "numbers": (_cond(lambda t: (t * 2, 3), lambda t: (t * 3, 4)), "something else than tensors"),
    "an operand returned": (_cond(lambda t: t), "given to it"),
    "a view returned": (_cond(lambda t: t.view(-1), lambda t: t.flatten() * 2), "given to it"),
    "a tensor returned twice": (_cond(lambda t: (t.sin(),) * 2, lambda t: (t * 2, t * 3)), "one tensor twice"),
    "a write to an operand": (_cond(lambda t: t.detach().add_(1).clone()), "made before"),
    "a list outside": (_cond(lambda t: _logs(LOG, t)), "changes objects outside"),
    "a dict outside": (_cond(_counts), "changes objects outside"),
    "a list of the program's": (_local_log, "changes objects outside"),
    "a variable of the program's": (_nonlocal, "changes objects outside"),
    "a break within": (_cond(lambda t: t * t.sum().item()), "tensor_to_number"),
    "an error within": (_cond(lambda t: t @ torch.ones(99, 1)), "raises RuntimeError"),
}


@pytest.mark.expected_eager("higher_order_operator", ...)
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_takes_is_eagers(name: str) -> None:
    program, told = REFUSED[name]
    LOG.clear()
    COUNTS["calls"] = 0
    ours = torchcompile.compile(program, backend="aot_eager")
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        ends: list[Any] = []
        for run in (program, ours):
            try:
                ends.append(run(x))
            except Exception as error:
                ends.append(type(error))
        if isinstance(ends[0], type):
            assert ends[1] is ends[0]
        else:
            _close(ends[1], ends[0])
    events = [event for event in torchcompile.report().events if event.kind.id == "higher_order_operator"]
    assert events and told in events[0].detail
    assert events[0].frames[-1].file == __file__
    with pytest.raises(torchdynamo.Unsupported, match="higher_order_operator"):
        torchcompile.compile(program, backend="aot_eager", fullgraph=True)(torch.rand(3, 4))


def test_what_a_body_reads_is_guarded() -> None:
    scale = [2.0]
    ours = torchcompile.compile(
        lambda x: torch.cond(x.sum() > 0, lambda t: t * scale[0], lambda t: t - scale[0], (x,)), fullgraph=True
    )
    x = torch.rand(3)
    for scale[0] in (2.0, 3.0):
        _close(ours(x), x * scale[0])
        _close(ours(-x), -x - scale[0])


def test_casts_of_a_body_are_its_own_in_the_derivative() -> None:
    weight = torch.rand(4, 4, dtype=torch.float32, requires_grad=True)
    ours = torchcompile.compile(
        lambda x: torch.cond(x.sum() > 0, lambda t: t @ weight, lambda t: (t @ weight).sin(), (x,)),
        backend="aot_eager",
        fullgraph=True,
    )
    x = torch.rand(3, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = ours(x), x @ weight
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted)
    pairs = [torch.autograd.grad(out.float().square().sum(), weight)[0] for out in (found, wanted)]
    torch.testing.assert_close(*pairs)


@pytest.mark.expected_eager("graph_not_compiled")
def test_a_derivative_draws_no_number_twice() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: torch.dropout(t, 0.5, True), lambda t: t * 2, (x,))

    x = torch.rand(64, requires_grad=True)
    with pytest.warns(match="random numbers"):
        out = torchcompile.compile(f, backend="aot_eager")(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    _close(gradient * x, out)


def test_graphs_print_their_bodies(tmp_path: Path) -> None:
    ours = torchcompile.compile(CASES["a_branch_within_a_branch"].make(OPERATORS), options={"dump": str(tmp_path)})
    ours(torch.rand(3, 4, requires_grad=True)).sum().backward()
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.py")}
    for stage in ("torch_graph", "joint", "forward", "backward"):
        (text,) = (text for name, text in texts.items() if name.endswith(f"{stage}.py"))
        functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert sum(name.endswith("if_true") for name in functions) >= 2, stage
