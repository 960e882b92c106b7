"""Random numbers: the backward's are the forward's, runs repeat, and eager's own stream where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from aotautograd import aot_function, min_cut


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.4),
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.2).cos(), 0.5),
    "rand": lambda x: x * torch.rand(5, 4),
    "rand_like": lambda x: x * torch.rand_like(x) + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((5, 4), 0.3)),
    "normal_": lambda x: x * torch.empty(5, 4).normal_(1, 2),
    "randint": lambda x: x * torch.randint(0, 9, (5, 4)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "randperm": lambda x: x[torch.randperm(5)],
    "gumbel": lambda x: F.gumbel_softmax(x),
}


def run(program: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(11)
    x = torch.linspace(-1, 1, 20).reshape(5, 4).requires_grad_()
    out = program(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return [out.detach(), gradient, torch.rand(3)]  # the last: where the generator is afterwards


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("partitioner", [None, min_cut(), min_cut(0.0)], ids=["default", "min_cut", "budget0"])
@pytest.mark.parametrize("opset", [None, "prims", "core_aten"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_eagers_stream(name: str, opset: Any, partitioner: Any) -> None:
    program = PROGRAMS[name]
    options = {} if partitioner is None else {"partitioner": partitioner}
    compiled = aot_function(program, fw_compiler=identity, decompositions=opset, eager_random=True, **options)
    for a, b in zip(run(program), run(compiled), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("name", PROGRAMS)
def test_aten_draws_as_eager_without_being_asked(name: str) -> None:
    program = PROGRAMS[name]
    for a, b in zip(run(program), run(aot_function(program, fw_compiler=identity)), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", PROGRAMS)
def test_own_stream_repeats(name: str) -> None:
    program = PROGRAMS[name]
    compiled = aot_function(program, fw_compiler=identity, decompositions="prims", partitioner=min_cut())
    again = aot_function(program, fw_compiler=identity, decompositions="prims")
    first = run(compiled)
    for other in (run(compiled), run(again)):
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("opset", [None, "prims"])
def test_backward_uses_the_masks_of_its_forward(opset: Any) -> None:
    compiled = aot_function(
        lambda x: F.dropout(x, 0.5), fw_compiler=identity, decompositions=opset, partitioner=min_cut()
    )
    x = torch.ones(1000, requires_grad=True)
    outputs = [compiled(x), compiled(x)]
    gradients = [torch.autograd.grad(o.sum(), x)[0] for o in outputs]
    for out, gradient in zip(outputs, gradients, strict=True):
        assert torch.equal(gradient, out.detach())
    assert not torch.equal(outputs[0], outputs[1])
