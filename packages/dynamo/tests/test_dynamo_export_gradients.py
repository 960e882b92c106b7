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


@pytest.mark.parametrize("form", [form for form in FORMS if form != "torch"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "write", [written_apart, a_part_is_written_apart, what_is_detached_is_written, the_data_is_written]
)
def test_a_write_that_autograd_does_not_see(write: Callable[[torch.Tensor], None], own: bool, form: str) -> None:
    """In eager gradients go on as if nothing had been written. No functional graph can say so: it is refused with the
    line, and where nobody asks for gradients it is a write like any other."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() if own else x
        write(y)
        return y * x

    example = lambda: torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    with pytest.raises(TraceError, match=rf"{Path(__file__).name}.*in {write.__name__}"):
        torchdynamo.export(program, **FORMS[form])(example().requires_grad_())
    assert torch.is_grad_enabled()
    with torch.no_grad():
        exported = torchdynamo.export(program, **FORMS[form])(example().requires_grad_())
        torch.testing.assert_close(exported(example().requires_grad_()), program(example()))
