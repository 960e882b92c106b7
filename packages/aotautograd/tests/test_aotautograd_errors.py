"""Bad programs raise what eager raises, and errors lead to the user's line."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotautograd import AotAutogradError, aot_function, aot_module
from primtorch.schemas import UserFrame


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


def leaf() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).clone().requires_grad_()


def plain() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


Program = Callable[[torch.Tensor], Any]
BAD: dict[str, tuple[Callable[[], torch.Tensor], Program]] = {
    "write to a leaf": (leaf, lambda x: x.add_(1)),
    "write to a view of a leaf": (leaf, lambda x: x[0].mul_(2)),
    "item of a leaf": (leaf, lambda x: x.__setitem__(0, 1.0)),
    "out= to a leaf": (leaf, lambda x: torch.add(x.detach(), 1, out=x)),
    "write to an expanded tensor": (plain, lambda x: x[:, :1].expand(2, 3).add_(1)),
    "write to an expanded input": (lambda: plain()[:1].expand(4, 3), lambda x: x.mul_(2)),
    "overload's write to an expanded tensor": (
        plain,
        lambda x: torch.ops.aten.add_.Tensor(x[:, :1].expand(2, 3), 1),
    ),
    "item of an expanded tensor": (plain, lambda x: x[0].expand(4, 3).__setitem__(slice(0, 2), 0.0)),
    "write to an item of unbind": (leaf, lambda x: (x * 1).unbind(0)[0].add_(1)),
    "write to a part of chunk": (leaf, lambda x: (x * 1).chunk(2)[0].sin_()),
    "write that needs a larger shape": (plain, lambda x: x.add_(torch.ones(4, 2, 3))),
    "write that needs another dtype": (lambda: torch.arange(3), lambda x: x.add_(0.5)),
    "write of a bool difference": (lambda: torch.ones(3, dtype=torch.bool), lambda x: x.sub_(x)),
    "shapes": (plain, lambda x: x @ x),
    "broadcast": (plain, lambda x: x + torch.ones(4)),
    "view": (plain, lambda x: x.t().view(6)),
    "view size": (plain, lambda x: x.view(4)),
    "dim": (plain, lambda x: x.sum(5)),
    "cat": (plain, lambda x: torch.cat([x, x[0]])),
    "stack": (plain, lambda x: torch.stack([x, x[0]])),
    "dtypes": (plain, lambda x: torch.mm(x, x.t().double())),
    "index out of range": (plain, lambda x: x[7]),
    "embedding dtype": (plain, lambda x: torch.nn.functional.embedding(x, x)),
    "conv channels": (plain, lambda x: torch.nn.functional.conv1d(x[None], torch.ones(1, 5, 1))),
    "detach a view": (leaf, lambda x: (x * 1)[0].detach_()),
    "no gradient for integers": (lambda: torch.arange(3), lambda x: x.requires_grad_()),
    "gradient of no scalar": (leaf, lambda x: torch.autograd.grad(x * 2, x)),
    "gradient of a constant": (leaf, lambda x: torch.autograd.grad(x.detach().sum(), x)),
    "Python error": (plain, lambda x: x + {}["missing"]),  # type: ignore[typeddict-item]
}


def raised(function: Program, x: torch.Tensor) -> BaseException:
    try:
        function(x)
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


@pytest.mark.parametrize("name", BAD)
def test_raises_what_eager_raises(name: str) -> None:
    make, program = BAD[name]
    eager, ours = raised(program, make()), raised(aot_function(program, fw_compiler=identity), make())
    assert type(ours) is type(eager)
    assert first_line(ours) == first_line(eager)
    frames = traceback.extract_tb(ours.__traceback__)
    assert any(f.filename == __file__ and f.name == "<lambda>" for f in frames)  # the user's line


@pytest.mark.parametrize("name", [n for n in BAD if n not in ("Python error",)])
def test_nothing_is_written_before_it_raises(name: str) -> None:
    make, program = BAD[name]
    x = make()
    raised(aot_function(program, fw_compiler=identity), x)
    assert x._version == make()._version
    torch.testing.assert_close(x, make(), rtol=0, atol=0)


REFUSED: dict[str, Program] = {
    "resize": lambda x: x.resize_(3),
    "resize as": lambda x: x.resize_as_(torch.ones(4)),
    "set_": lambda x: x.set_(torch.ones(2)),
    "data": lambda x: setattr(x, "data", torch.ones(2, 3)) or x * 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_an_error(name: str) -> None:
    x = plain()
    with pytest.raises(AotAutogradError) as caught:
        aot_function(REFUSED[name], fw_compiler=identity)(x)
    assert any(f.filename == __file__ for f in traceback.extract_tb(caught.value.__traceback__))
    torch.testing.assert_close(x, plain())


def captured(program: Program, line: int) -> torch.fx.GraphModule:
    """A graph of a program whose nodes all belong to one line of a user's file."""
    gm = torch.fx.symbolic_trace(program)
    for node in gm.graph.nodes:
        node.meta["stack"] = (UserFrame("model.py", line, "forward"),)
    return gm


@pytest.mark.parametrize(
    "program, make",
    [(lambda x: x.add_(1), leaf), (lambda x: x.expand(2, 2, 3).mul_(2), plain), (lambda x: x @ x, plain)],
)
def test_errors_in_a_graph_name_the_users_line(program: Program, make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError) as caught:
        aot_module(captured(program, 17), [make()], fw_compiler=identity)
    assert 'File "model.py", line 17, in forward' in "".join(traceback.format_exception(caught.value))


def test_refusals_in_a_graph_name_the_users_line() -> None:
    with pytest.raises(AotAutogradError, match='File "model.py", line 23, in forward'):
        aot_module(captured(lambda x: x.resize_(3), 23), [plain()], fw_compiler=identity)


def test_a_write_to_what_backward_needs_raises_in_backward() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z

    for function in (program, aot_function(program, fw_compiler=identity)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(leaf()).sum().backward()


def test_second_backward_and_written_input_raise() -> None:
    compiled = aot_function(lambda x, w: (x * w).sin(), fw_compiler=identity)
    out = compiled(leaf(), plain())
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    w = plain()
    out = compiled(leaf(), w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_derivative_that_torch_lacks_is_told_by_eagers_class() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.special.gammainc(x, x.detach() + 1)

    for run in (program, aot_function(program, fw_compiler=identity)):
        out = run(torch.rand(3, requires_grad=True))
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="is not implemented"):
                out.sum().backward(retain_graph=True)


READERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (  # of their argument, of their result, of neither
    lambda y: y * y,
    lambda y: y.sin(),
    lambda y: y.exp(),
    lambda y: y.relu(),
    lambda y: y.sigmoid() + 1,
    lambda y: y * 3,
    lambda y: y[:1],
)
WRITERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda y: y.add_(1),
    lambda y: y.mul_(2),
    lambda y: y[0].fill_(0.5),
    lambda y: y.detach().zero_(),
    lambda y: torch.relu_(y),
)


def overwritten(generator: random.Random) -> Program:
    """Some values, read and written to at random: several outputs, of which eager differentiates some, or none."""
    steps = [(generator.randrange(2), generator.random()) for _ in range(6)]

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        values = [x * 1, x.cos()]
        for kind, choice in steps:
            target = values[int(choice * 997) % len(values)]
            if kind:
                WRITERS[int(choice * len(WRITERS))](target)
            else:
                values.append(READERS[int(choice * len(READERS))](target))
        return values[2:] or values

    return program


@pytest.mark.parametrize("seed", range(25))
def test_a_backward_that_eager_refuses_is_refused_where_it_is_run(seed: int) -> None:
    """A write to what a derivative reads is no error of the forward; outputs that it does not concern have gradients."""
    fresh = random.SystemRandom().randrange(2**32)
    print(f"seed {fresh}")
    program = overwritten(random.Random(fresh))
    compiled = aot_function(program, fw_compiler=identity)
    expected, found = leaf().double().detach().requires_grad_(), leaf().double().detach().requires_grad_()
    theirs, ours = program(expected), compiled(found)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)
    for chosen in [[place] for place in range(len(theirs))] + [list(range(len(theirs)))]:
        gradients = []
        for x, outputs in ((expected, theirs), (found, ours)):
            try:
                gradients.append(torch.autograd.grad([outputs[i].sum() for i in chosen], x, retain_graph=True)[0])
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                gradients.append(None)
        assert (gradients[0] is None) == (gradients[1] is None), chosen
        if gradients[0] is not None:
            torch.testing.assert_close(gradients[0], gradients[1])
