"""Gradients through exported graphs, in each form: what has no history in the program has none in the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dynamo_export import FORMS
from torch import nn
from torch.utils import _pytree as pytree

import torchdynamo
from primtorch.errors import TraceError
from primtorch.trace import trace

Program = Callable[..., Any]


def detached(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.detach() * x + y, x.detach()


def computed_apart(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        scale, place = x.sin().max(-1)
        rest = y.view(-1) * 2
    return x * scale[:, None] + place[:, None], rest, scale


def computed_apart_in_place(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        table = torch.zeros_like(x)
        table[0] = x[1]
        table += y
    return x * table, table


def a_history_within_what_is_apart(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = x.sin()
        with torch.enable_grad():
            out = x.cos() * scale
    return out * y


def an_argument_gets_a_history(x: torch.Tensor, y: torch.Tensor) -> Any:
    y.mul_(x)
    return y * x


def an_argument_is_written_after_its_use(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        y.add_(1)
    return x * y


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        detached,
        computed_apart,
        computed_apart_in_place,
        a_history_within_what_is_apart,
        an_argument_gets_a_history,
        an_argument_is_written_after_its_use,
    )
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_has_no_history_gives_no_gradient(name: str, dynamic: bool | None, form: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]

    def example() -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        x, y = (torch.randn(4, 3, dtype=torch.float64, generator=draw) for _ in range(2))
        return x.requires_grad_(), y

    exported = torchdynamo.export(program, dynamic=dynamic, **FORMS[form])(*example())
    torchdynamo.save(exported, tmp_path / "program")
    for call in (exported, torchdynamo.load(tmp_path / "program")):
        observed = []
        for function in (program, call):
            x, y = example()
            tensors = [t for t in pytree.tree_leaves((function(x, y), y)) if isinstance(t, torch.Tensor)]
            total = sum(t.pow(2).sum() for t in tensors if t.requires_grad)
            observed.append(([t.requires_grad for t in tensors], tensors, torch.autograd.grad(total, x)[0]))
        assert observed[0][0] == observed[1][0]
        for a, b in zip(observed[0][1], observed[1][1], strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(observed[0][2], observed[1][2])


@pytest.mark.parametrize("form", FORMS)
def test_running_statistics_are_numbers_of_the_past(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)).double()
    exported = torchdynamo.export(model, **FORMS[form])(torch.randn(5, 3, dtype=torch.float64))
    twin = copy.deepcopy(model)
    for _ in range(3):
        x = torch.randn(5, 3, dtype=torch.float64)
        for module, call in ((model, exported), (twin, twin)):
            module.zero_grad()
            call(x).pow(2).sum().backward()
        for (name, a), b in zip(model.state_dict(keep_vars=True).items(), twin.state_dict(keep_vars=True).values()):
            assert a.requires_grad == b.requires_grad and (a.grad_fn is None), name
            torch.testing.assert_close(a, b, check_stride=False)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def written_apart(y: torch.Tensor) -> None:
    with torch.no_grad():
        y.mul_(3)


def a_part_is_written_apart(y: torch.Tensor) -> None:
    with torch.no_grad():
        y[0].zero_()


def what_is_detached_is_written(y: torch.Tensor) -> None:
    y.detach().mul_(3)


def the_data_is_written(y: torch.Tensor) -> None:
    y.data.mul_(3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "write", [written_apart, a_part_is_written_apart, what_is_detached_is_written, the_data_is_written]
)
def test_a_write_that_autograd_does_not_see(write: Callable[[torch.Tensor], None], own: bool, form: str) -> None:
    """Gradients go on as if nothing had been written; a tensor of the caller's is written, too, and stays a leaf."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if own else x
        write(y)
        return y * x

    example = lambda: torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    exported = torchdynamo.export(program, **FORMS[form])(example())
    observed = []
    for call in (program, exported, exported):
        x = example()
        out = call(x)
        (gradient,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        observed.append((out, x, gradient, torch.autograd.grad(gradient.pow(2).sum(), x)[0]))
        assert x.is_leaf and out.requires_grad
    for found in observed[1:]:
        for a, b in zip(observed[0], found, strict=True):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        exported = torchdynamo.export(program, **FORMS[form])(example())
        torch.testing.assert_close(exported(example()), program(example()))


def of_what_is_kept(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.data.mul_(2)
    return y


def of_two_histories(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.detach().mul_(x)
    return y * x


@pytest.mark.parametrize("form", [form for form in FORMS if form != "torch"])
@pytest.mark.parametrize("program", [of_what_is_kept, of_two_histories])
def test_what_no_graph_can_say_is_refused_with_the_line(program: Program, form: str) -> None:
    with pytest.raises(TraceError, match=rf"{Path(__file__).name}.*in {program.__name__}"):
        torchdynamo.export(program, **FORMS[form])(torch.ones(3, dtype=torch.float64, requires_grad=True))
    assert torch.is_grad_enabled()


class Opposite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def test_a_function_that_the_trace_itself_meets_is_refused() -> None:
    """Below autograd it is its forward's operators, with no history."""
    with pytest.raises(TraceError, match=f"Opposite has a derivative of its own.*{Path(__file__).name}"):
        trace(lambda x: Opposite.apply(x) * 2, torch.ones(3, requires_grad=True))
    trace(lambda x: Opposite.apply(x) * 2, torch.ones(3))


def test_an_alias_that_a_graph_has_as_a_copy_is_not_written() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = Opposite.apply(y)
        y.data.mul_(3)
        return z * y

    with pytest.raises(TraceError, match="two names"):
        torchdynamo.export(program, aten_graph=True)(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_derivative_within_the_program_has_the_history_of_what_autograd_kept(form: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        (gradient,) = torch.autograd.grad((y * y.tanh()).sum(), x, create_graph=True)
        return gradient * x

    example = lambda: torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    exported = torchdynamo.export(program, **FORMS[form])(example())
    gradients = [torch.autograd.grad(call(x := example()).sum(), x)[0] for call in (program, exported)]
    torch.testing.assert_close(*gradients)


class WithoutHistory(torch.autograd.Function):
    """Its backward computes under no_grad, so that its own derivative is that of a constant factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            factor = x.cos()
        return gradient * factor


class WithHistory(WithoutHistory):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            return gradient * x.cos()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [WithoutHistory, WithHistory])
def test_a_backward_that_turns_grad_mode_has_no_derivative_in_operators(kind: Any, form: str, tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return kind.apply(x * 2) * x  # type: ignore[no-any-return]

    example = lambda: torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
    exported = torchdynamo.export(program, **FORMS[form])(example())
    calls = [exported]
    if form != "torch":
        torchdynamo.save(exported, tmp_path / "program")
        calls.append(torchdynamo.load(tmp_path / "program"))
    for call in calls:
        observed = []
        for function in (program, call):
            x = example()
            out = function(x)
            (gradient,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
            observed.append((out, gradient))
        for a, b in zip(*observed, strict=True):
            torch.testing.assert_close(a, b)
        if form == "torch":  # the graph calls the function
            torch.testing.assert_close(torch.autograd.grad(gradient.sum(), x)[0], second(program, example()))
            continue
        with pytest.raises(RuntimeError, match="turns grad mode"):
            torch.autograd.grad(gradient.sum(), x)


def second(function: Program, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def marks_dirty(x: torch.Tensor) -> torch.Tensor:
    return Dirty.apply(x * 3)  # type: ignore[no-any-return]


def registers_a_hook(x: torch.Tensor) -> torch.Tensor:
    y = x * 3
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin()


def hooks_what_is_saved(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
        return x.sin() * x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("program", [marks_dirty, registers_a_hook, hooks_what_is_saved])
def test_what_autograd_is_told_by_the_side_is_refused_with_line_and_remedy(program: Program, form: str) -> None:
    with pytest.raises(torchdynamo.Unsupported, match=rf"what to do: [\s\S]*{Path(__file__).name}.*{program.__name__}"):
        torchdynamo.export(program, **FORMS[form])(torch.ones(3, dtype=torch.float64, requires_grad=True))
