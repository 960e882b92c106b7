"""Function modes of the program's own, entered within compiled code: interpreted, call by call, as eager asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import torchcompile


class Noting(TorchFunctionMode):
    """Notes what it is asked, and leaves it as it is."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Scaling(TorchFunctionMode):
    """Gives another result of one function."""

    def __init__(self, function: Any, factor: float) -> None:
        super().__init__()
        self.function, self.factor = function, factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.factor if func is self.function else out


NET = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()


def notes_every_call(x: torch.Tensor) -> Any:
    log: list[str] = []
    with Noting(log):
        y = F.softmax(NET(x) + x[0] * 2, -1).mT.mT
        y = y.clone().add_(torch.ones(3, dtype=x.dtype)).to(torch.float64)
        y = torch.cat([y, y[:, 1:]], dim=1).sum(y.dim() - 1, keepdim=True) @ torch.eye(y.shape[0])[:1].double()
    return y, log


def one_in_the_other(x: torch.Tensor) -> Any:
    log: list[str] = []
    with Scaling(torch.sin, 2.0), Noting(log):
        y = torch.sin(x)
        with Scaling(torch.cos, 3.0):
            y = y + torch.cos(x) * torch.sin(x)
    return y, torch.sin(y), log


def left_by_an_exception(x: torch.Tensor) -> Any:
    log: list[str] = []
    try:
        with Noting(log):
            y = x.sin()
            raise KeyError("mine")
    except KeyError:
        pass
    return y * 2, log


def made_in_the_program(x: torch.Tensor) -> Any:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    with Doubling():
        return torch.sin(x)


MODE = Scaling(torch.Tensor.exp, 3.0)


def of_the_outside(x: torch.Tensor) -> Any:
    with MODE:
        y = x.exp()
    return y


WHOLE = (notes_every_call, one_in_the_other, left_by_an_exception, made_in_the_program, of_the_outside)


def results(program: Callable[..., Any]) -> tuple[Any, torch.Tensor]:
    x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    out = program(x)
    first = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad(first.sum(), x)[0]


@pytest.mark.parametrize("program", WHOLE, ids=lambda program: program.__name__)
def test_a_mode_is_part_of_the_graph(program: Callable[..., Any]) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        (found, gradient), (wanted, of_eager) = results(compiled), results(program)
        torch.testing.assert_close(gradient, of_eager)
        logs = [item for item in wanted if isinstance(item, list)] if isinstance(wanted, tuple) else []
        assert [item for item in found if isinstance(item, list)] == logs if logs else True
        tensors = lambda out: [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]  # noqa: E731
        torch.testing.assert_close(tensors(found), tensors(wanted))
    assert not torchcompile.report().events and torch._C._len_torch_function_stack() == 0


def breaks_within(x: torch.Tensor) -> Any:
    log: list[str] = []
    with Noting(log), Scaling(torch.sin, 2.0):
        y = torch.sin(x)
        print(end="")
        y = torch.sin(y) + 1
    return torch.sin(y), log


@pytest.mark.expected_eager(...)
def test_a_break_within_goes_on_under_the_mode() -> None:
    compiled = torchcompile.compile(breaks_within, backend="aot_eager")
    for _ in range(2):
        (found, gradient), (wanted, of_eager) = results(compiled), results(breaks_within)
        torch.testing.assert_close((found[0], gradient), (wanted[0], of_eager))
        assert found[1] == wanted[1] and torch._C._len_torch_function_stack() == 0
