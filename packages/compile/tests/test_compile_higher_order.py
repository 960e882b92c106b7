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
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

import torchcompile
import torchdynamo

BACKENDS = ("eager", "aot_eager", "inductor")
pytestmark = pytest.mark.usefixtures("double")

Program = Callable[..., Any]


def _plain_cond(pred: Any, true_fn: Program, false_fn: Program, operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _slices(tree: Any, dim: int = 0) -> list[Any]:
    leaves, structure = pytree.tree_flatten(tree)
    return [pytree.tree_unflatten(list(row), structure) for row in zip(*(x.unbind(dim) for x in leaves), strict=True)]


def _stacked(rows: list[Any], dim: int = 0) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves, dim if dim <= leaves[0].dim() else 0), *rows)


def _plain_map(f: Program, xs: Any, *args: Any) -> Any:
    return _stacked([f(row, *args) for row in _slices(xs)])


def _plain_scan(combine_fn: Program, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    order = -1 if reverse else 1
    carry, rows = init, []
    for row in _slices(xs, dim)[::order]:
        carry, out = combine_fn(carry, row)
        rows.append(out)
    return carry, _stacked(rows[::order], dim)


def _plain_associative_scan(
    combine_fn: Program, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "generic"
) -> Any:
    order = -1 if reverse else 1
    first, *rest = _slices(xs, dim)[::order]
    rows = [first]
    for row in rest:
        rows.append(combine_fn(rows[-1], row))
    return _stacked(rows[::order], dim)


def _plain_while_loop(cond_fn: Program, body_fn: Program, carried_inputs: Any) -> Any:
    carry = carried_inputs
    while cond_fn(*carry):
        carry = body_fn(*carry)
    return carry


OPERATORS = SimpleNamespace(
    cond=torch.cond, map=hop_map, scan=scan, associative_scan=associative_scan, while_loop=while_loop
)
PYTHON = SimpleNamespace(
    cond=_plain_cond,
    map=_plain_map,
    scan=_plain_scan,
    associative_scan=_plain_associative_scan,
    while_loop=_plain_while_loop,
)


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


@case()
def a_mapped_function(ops: Any) -> Program:
    weight = torch.arange(16, dtype=torch.float64).view(4, 4) / 8

    def f(x: torch.Tensor) -> Any:
        scale = x.mean()
        return ops.map(lambda row, bias: (row @ weight * scale + bias, row.sum()), x, x[0])

    return f


@case()
def a_mapped_tree(ops: Any) -> Program:
    return lambda x: ops.map(lambda row: {"a": row["x"].sin() * row["y"]}, {"x": x, "y": x * 2})


class Recurrence(nn.Module):
    """A gated recurrence, as a loop over the rows of its input."""

    def __init__(self, ops: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ops, self.gate, self.new = ops, nn.Linear(8, 4).double(), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> Any:
        def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = torch.cat([state, row])
            share = self.gate(both).sigmoid()
            return share * state + (1 - share) * self.new(both).tanh(), state.sum() * row

        return self.ops.scan(step, torch.zeros(4), x)


@case()
def a_recurrence_of_modules(ops: Any) -> Program:
    return Recurrence(ops)


@case()
def a_loop_from_the_end_along_another_dimension(ops: Any) -> Program:
    def f(x: torch.Tensor) -> Any:
        def step(carry: Any, row: Any) -> Any:
            total = carry["total"] + row[0] * row[1]
            return {"total": total, "count": carry["count"] + 1}, (total * 2, row[0].sum())

        start = {"total": x[:, 0] * 0, "count": torch.zeros((), dtype=torch.int64)}
        carry, (rows, sums) = ops.scan(step, start, (x, x.cos()), dim=1, reverse=True)
        return carry["total"], carry["count"], rows, sums.sum()

    return f


@case(shapes=(((3, 4),), ((1, 4),), ((5, 4),)), dynamic_graphs=3)
def a_loop_over_one_slice(ops: Any) -> Program:
    return lambda x: ops.scan(lambda carry, row: (carry * row, carry + row), x[0] + 1, x)


@case()
def a_branch_within_a_loop(ops: Any) -> Program:
    def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
        carry = ops.cond(row.sum() > carry.sum(), lambda: carry + row.sin(), lambda: carry * row)
        return carry, carry * 2

    return lambda x: ops.scan(step, torch.ones(4), x)


@case()
def a_loop_within_a_branch(ops: Any) -> Program:
    def looped(t: torch.Tensor) -> Any:
        return ops.scan(lambda carry, row: (carry * row, carry.sin() + row), t[0] * 2, t)[1]

    return lambda x: ops.cond(x.sum() > 0, looped, lambda t: t.cos(), (x,))


@case()
def an_associative_loop(ops: Any) -> Program:
    def combine(a: Any, b: Any) -> Any:
        return {"decay": a["decay"] * b["decay"], "state": b["decay"] * a["state"] + b["state"]}

    def f(x: torch.Tensor) -> Any:
        tree = {"decay": x.sigmoid(), "state": x.sin()}
        return ops.associative_scan(combine, tree, 0, combine_mode="generic")["state"]

    return f


@case()
def an_associative_loop_from_the_end(ops: Any) -> Program:
    return lambda x: ops.associative_scan(lambda a, b: a * b, x, 1, reverse=True, combine_mode="generic")


@case()
def a_loop_while_a_condition_holds(ops: Any) -> Program:
    weight = torch.eye(4, requires_grad=True) / 2

    def f(x: torch.Tensor) -> Any:
        limit = x.abs().sum() / 4

        def holds(count: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return (state.abs().sum() > limit) & (count < 9)

        return ops.while_loop(holds, lambda n, state: (n + 1, state @ weight + x / 9), (torch.zeros(()), x))

    return f


@case()
def a_loop_without_a_step(ops: Any) -> Program:
    return lambda x: ops.while_loop(lambda t: t.sum() > 99, lambda t: (t * 2,), (x.sin(),))[0]


def _results(program: Program, arguments: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    leaves = pytree.tree_leaves(program(*arguments))
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parameters = list(program.parameters()) if isinstance(program, nn.Module) else []
    by = [*arguments, *parameters]
    found = torch.autograd.grad(sum(leaf.sin().sum() for leaf in wanted), by, allow_unused=True) if wanted else ()
    return leaves, [torch.zeros_like(x) if g is None else g for x, g in zip(by, found, strict=False)]


def _close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", True), ("inductor", False), ("inductor", True)]
)
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


TWICE = (
    "a_branch_of_modules", "a_recurrence_of_modules", "an_associative_loop", "a_branch_within_a_loop",
    "a_loop_within_a_branch", "a_loop_while_a_condition_holds",
)  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_second_derivatives(name: str, backend: str) -> None:
    made = CASES[name]
    plain, ours = made.make(PYTHON), torchcompile.compile(made.make(OPERATORS), backend=backend, fullgraph=True)
    for (x,) in made.calls():
        totals = [sum(leaf.sin().sum() for leaf in pytree.tree_leaves(f(x))) for f in (plain, ours)]
        slopes = [torch.autograd.grad(total, x, create_graph=True)[0] for total in totals]
        wanted, found = (torch.autograd.grad(slope.square().sum(), x)[0] for slope in slopes)
        _close(found, wanted)


def test_a_loop_of_data_dependent_length_has_no_third_derivative() -> None:
    made = CASES["a_loop_while_a_condition_holds"]
    ours = torchcompile.compile(made.make(OPERATORS), backend="aot_eager", fullgraph=True)
    x = torch.rand(3, 4, requires_grad=True)

    def bend(program: Program) -> torch.Tensor:
        (slope,) = torch.autograd.grad(program(x)[1].square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sin().sum(), x, create_graph=True)[0]

    _close(bend(ours), bend(made.make(PYTHON)))
    with pytest.raises(RuntimeError, match="while_loop has no third derivative"):
        bend(ours).sum().backward()


def _total(program: Program) -> Program:
    """The sum of what a program gives, a number to differentiate."""
    floats = lambda x: [leaf for leaf in pytree.tree_leaves(program(x)) if leaf.is_floating_point()]
    return lambda x: sum(leaf.sin().sum() for leaf in floats(x))


def _each(transform: Callable[[Program], Program]) -> tuple[Callable[[Program], Program], Callable[[Program], Program]]:
    """A transform under `vmap`, and the same example by example."""
    by_example = lambda f: lambda x: torch.stack([transform(f)(row) for row in x])
    return lambda f: torch.vmap(transform(f)), by_example


def _along(f: Program) -> Program:
    return lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1]


def _on_batch(transform: Callable[[Program], Program]) -> tuple[Callable[[Program], Program], ...]:
    """A transform of the sum over a batch."""
    summed = lambda each: lambda f: lambda x: transform(lambda t: each(f)(t).sum())(x)
    return tuple(map(summed, _each(lambda f: f)))


# (ours, the same of Python's: under `vmap` no program goes one way or the other by an example's data)
TRANSFORMS = {
    "grad": (torch.func.grad,) * 2,
    "jvp": (_along,) * 2,
    "hessian": (torch.func.hessian,) * 2,
    "vmap": _each(lambda f: f),
    "vmap of grad": _each(torch.func.grad),
    "vmap of jvp": _each(_along),
    "vmap of hessian": _each(torch.func.hessian),
    "grad of vmap": _on_batch(torch.func.grad),
    "jvp of vmap": _on_batch(_along),
}
NO_FUNCTIONS = frozenset({"a_branch_that_draws"})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_under_transforms(name: str, transform: str, backend: str) -> None:
    made, (ours, theirs) = CASES[name], TRANSFORMS[transform]
    plain, program = theirs(_total(made.make(PYTHON))), ours(_total(made.make(OPERATORS)))
    compiled = torchcompile.compile(lambda x: program(x), backend=backend, fullgraph=True)
    (x,) = made.calls()[0]
    x = x.detach()
    given = torch.stack([x, 0.5 - x, x * 2]) if "vmap" in transform else x
    _close(compiled(given), plain(given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_see_each_step(backend: str) -> None:
    def program(ops: Any) -> Program:
        def loop(t: torch.Tensor) -> torch.Tensor:
            return ops.scan(lambda carry, row: (carry * row.sin(), carry + row), t[0] + 1, t)[1].sum(0)

        return lambda x: (torch.vmap(loop)(x[None]), torch.func.grad(lambda t: loop(t).prod())(x))

    x = torch.rand(3, 4, requires_grad=True)
    ours = torchcompile.compile(program(OPERATORS), backend=backend, fullgraph=True)
    for found, wanted in zip(_results(ours, [x]), _results(program(PYTHON), [x]), strict=True):
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


def _switching(t: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return t * 2


def _over_an_iterator(x: torch.Tensor) -> Any:
    factors = iter([2.0, 3.0, 4.0])
    return scan(lambda carry, row: (carry * next(factors), carry + row), torch.ones(4), x)


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
    "a carry of another dtype": (
        lambda x: scan(lambda c, row: ((c + row).float(), row * 2), torch.zeros(4), x),
        "comes back with different dtypes",
    ),
    "a carry as a row": (lambda x: scan(lambda c, row: (c + row, c), torch.zeros(4), x), "given to it"),
    "a loop over nothing": (lambda x: hop_map(torch.sin, x[:0]), "of different lengths, or of none"),
    "a number carried": (
        lambda x: while_loop(lambda n, t: n < 3, lambda n, t: (n + 1, t * 2), (0, x)),
        "carried inputs that are no tensors",
    ),
    "a switch of grad mode": (_cond(_switching), "changes grad mode"),
    "an iterator": (_over_an_iterator, "holds an iterator"),
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
                with torch.enable_grad():
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


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_body_raises_is_the_programs(backend: str) -> None:
    def program(x: torch.Tensor, places: torch.Tensor) -> Any:
        try:
            return torch.cond(x.sum() > 0, lambda: x[places] * 2, lambda: x[places] + 1, ())
        except IndexError:
            return None

    ours = torchcompile.compile(program, backend=backend)
    x = torch.rand(3)
    _close(ours(x, torch.tensor([0, 2])), x[[0, 2]] * 2)
    assert ours(x, torch.tensor([0, 7])) is None


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


def _dropped(t: torch.Tensor) -> torch.Tensor:
    return torch.dropout(t, 0.5, True)


# Of each result its value is its gradient's, times the input.
DRAWING: dict[str, Program] = {
    "cond": lambda x: torch.cond(x.sum() > 0, _dropped, lambda t: t * 2, (x,)),
    "map": lambda x: hop_map(_dropped, x),
    "scan": lambda x: scan(lambda carry, row: (carry + 1, _dropped(row)), torch.zeros(()), x)[1],
    "while_loop": lambda x: while_loop(lambda n, t: n < 1, lambda n, t: (n + 1, _dropped(t)), (torch.zeros(()), x))[1],
    "the condition of while_loop": lambda x: while_loop(
        lambda n, t: torch.rand(()) < 0.9, lambda n, t: (n + 1, t * 2), (torch.zeros(()), x)
    )[1],
}


@pytest.mark.expected_eager("graph_not_compiled")
@pytest.mark.parametrize("name", DRAWING)
def test_a_derivative_draws_no_number_twice(name: str) -> None:
    x = torch.rand(64, 3, requires_grad=True)
    with pytest.warns(match="random numbers"):
        out = torchcompile.compile(DRAWING[name], backend="aot_eager")(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    _close(gradient * x, out)
    with torch.no_grad():  # what draws once is a graph
        torch.manual_seed(0)
        found = torchcompile.compile(DRAWING[name], backend="aot_eager", fullgraph=True)(x)
        torch.manual_seed(0)
        _close(found, torchcompile.compile(DRAWING[name], backend="eager", fullgraph=True)(x))


def test_graphs_print_their_bodies(tmp_path: Path) -> None:
    ours = torchcompile.compile(CASES["a_branch_within_a_branch"].make(OPERATORS), options={"dump": str(tmp_path)})
    ours(torch.rand(3, 4, requires_grad=True)).sum().backward()
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*.py")}
    for stage in ("torch_graph", "joint", "forward", "backward"):
        (text,) = (text for name, text in texts.items() if name.endswith(f"{stage}.py"))
        functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert sum(name.endswith("if_true") for name in functions) >= 2, stage
        assert "return ops.cond(t.max() > 0.9" in text, stage  # the user's line within a body
