"""`torch.masked`: its functions on plain tensors, and masked tensors, which are traced through: one graph each."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import masked
from torch.masked import MaskedTensor, as_masked_tensor, masked_tensor
from torch.utils import _pytree as pytree

import torchcompile

Tensor = torch.Tensor
PROTOTYPE = (
    "ignore:The PyTorch API of MaskedTensors:UserWarning",
    "ignore:It is not recommended to create:UserWarning",
)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: lambda x, mask, f=getattr(masked, name): f(x, 1, mask=mask)  # type: ignore[misc]
    for name in (
        "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "logsumexp", "softmax", "log_softmax", "softmin",
        "cumsum", "cumprod", "median",
    )
} | {
    "sum of all": lambda x, mask: masked.sum(x, mask=mask),
    "mean kept": lambda x, mask: masked.mean(x, (0, 1), keepdim=True, mask=mask),
    "a row of a mask": lambda x, mask: masked.softmax(x, 1, mask=mask[:1]),
    "norm": lambda x, mask: masked.norm(x, 2.0, 1, mask=mask),
    "normalize": lambda x, mask: masked.normalize(x, 2.0, 1, mask=mask),
    "var": lambda x, mask: masked.var(x, 1, unbiased=True, mask=mask),
    "std": lambda x, mask: masked.std(x, 1, unbiased=False, mask=mask),
    "logaddexp": lambda x, mask: masked.logaddexp(x, x * 2, input_mask=mask, other_mask=mask),
}  # fmt: skip


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(5, rows, dtype=torch.float64, generator=numbers).t()  # not row-major
    mask = torch.rand(rows, 5, generator=numbers) > 0.4
    mask[0] = False
    return x.requires_grad_(), mask


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_tensor_and_a_mask_is_one_graph(name: str, dynamic: bool) -> None:
    function, seed = FUNCTIONS[name], random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(function, fullgraph=True, dynamic=dynamic)
    for call, rows in enumerate((4, 6)):
        observed = []
        for f in (function, compiled):
            x, mask = drawn(rows, seed + call)
            found = f(x, mask)
            gradient = torch.autograd.grad(found.nansum(), x)[0] if found.requires_grad else x.detach()
            observed.append((found.detach(), gradient))
        for a, b in zip(*observed, strict=True):
            assert a.dtype == b.dtype, f"seed {seed}"
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"seed {seed}: {m}")


def of(x: Tensor, mask: Tensor) -> MaskedTensor:
    return as_masked_tensor(x * 2, mask)  # type: ignore[return-value]


REDUCTIONS = ("sum", "mean", "prod", "amin", "amax", "argmin", "argmax")
UNARY = ("exp", "sin", "tanh", "sigmoid", "abs")
BINARY = ("add", "mul", "div")

WRAPPED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{f"{n} of all": lambda x, m, n=n: getattr(torch, n)(of(x, m)).to_tensor(0) for n in REDUCTIONS},
    **{f"{n} of a dim": lambda x, m, n=n: getattr(of(x, m), n)(1).to_tensor(0) for n in REDUCTIONS},
    **{n: lambda x, m, n=n: getattr(torch, n)(of(x, m)).to_tensor(0) for n in UNARY},
    **{n: lambda x, m, n=n: getattr(torch, n)(of(x, m), as_masked_tensor(x + 3, m)).to_tensor(0) for n in BINARY},
    "a number": lambda x, m: torch.sub(of(x, m), 3.0).to_tensor(0),
    "a tensor": lambda x, m: torch.mul(of(x, m), x + 3).to_tensor(0),
    "operators": lambda x, m: ((of(x, m) + 1) * 2 - of(x, m) / 3).to_tensor(0.0),
    "comparisons": lambda x, m: ((of(x, m) < 0).to_tensor(False), (of(x, m) > x).to_tensor(False)),
    "all": lambda x, m: as_masked_tensor(x > 0, m).all(1).to_tensor(False),
    "dims, kept": lambda x, m: torch.sum(of(x, m), (0, 1), keepdim=True).to_tensor(0.0),
    "masks of one value": lambda x, m: (of(x, m) * as_masked_tensor(x, m & (x > -100))).to_tensor(0.0),
    "data and mask": lambda x, m: (of(x, m).get_data() * 2, of(x, m).get_mask().logical_not()),
    "a plain tensor beside": lambda x, m: x.sin() * of(x, m).get_data(),
    "a whole": lambda x, m: of(x, m).sin(),
    "two results": lambda x, m: (of(x, m).sum(1), of(x, m).mean(0).to_tensor(0.0)),
    "where": lambda x, m: torch.where(x > 0, of(x, m), as_masked_tensor(x, m)).get_data().detach(),
    "functions of torch.masked": lambda x, m: masked.sum(of(x, m), 1, mask=m),
    "shapes": lambda x, m: torch.cat([of(x, m).t()[1:], of(x, m).t()[:1]]).unsqueeze(0).to_tensor(0.0),
    "another dtype": lambda x, m: of(x, m).to(torch.float32).to_tensor(0.0),
    "without history": lambda x, m: masked_tensor(x.detach() * 2, m).amax(0).to_tensor(0.0) * x.sum(),
    "the class": lambda x, m: MaskedTensor(x.detach(), m).exp().to_tensor(0.0) * x,
    "asked for": lambda x, m: x * of(x, m).shape[0] if masked.is_masked_tensor(of(x, m)) else x,
}  # fmt: skip


def with_breaks(program: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    def run(x: Tensor, mask: Tensor) -> Any:
        before = x * 3
        print(end="")
        found = program(before, mask)
        print(end="")
        return found, as_masked_tensor(x, mask).cos().to_tensor(1.0)

    return run


def parts(value: Any) -> list[Any]:
    """What can be compared: of a masked tensor the mask, and the data where it is true."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in parts(item)]
    if isinstance(value, MaskedTensor):
        return [MaskedTensor, value.get_mask(), value.detach().to_tensor(0)]
    return [type(value), value.detach() if isinstance(value, Tensor) else value]


def results(program: Callable[[Tensor, Tensor], Any], seed: int, gradient: bool, sizes: tuple[int, ...]) -> list[Any]:
    observed: list[Any] = []  # an exception is an observation
    for call, rows in enumerate(sizes):
        x, mask = drawn(rows, seed + call)
        found = program(x, mask) if gradient else program(x.detach(), mask)
        leaves = [t for t in pytree.tree_leaves(found) if t.requires_grad]
        observed += [*parts(pytree.tree_leaves(found)), [t.requires_grad for t in pytree.tree_leaves(found)]]
        if leaves and gradient:
            sums = (t.sum().to_tensor(0.0) if isinstance(t, MaskedTensor) else t.sum() for t in leaves)
            try:
                observed += parts(torch.autograd.grad(sum(sums), x, allow_unused=True))  # type: ignore[call-overload]
            except TypeError as error:  # of operators that the class has no derivative of
                observed.append((TypeError, str(error).partition(";")[0]))
    return observed


def compare(found: list[Any], expected: list[Any], seed: int) -> None:
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"seed {seed}: {m}")
        else:
            assert a == b, f"seed {seed}"


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_program_over_masked_tensors_is_one_graph(name: str, backend: str) -> None:
    """Forward, gradient and no_grad, of fixed sizes and of sizes that vary."""
    program, seed = WRAPPED[name], random.SystemRandom().randrange(1 << 30)
    for dynamic, sizes in ((False, (4, 4)), (True, (4, 6))):
        for gradient in (False, True):
            expected = results(program, seed, gradient, sizes)
            torchcompile.reset()
            compiled = torchcompile.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
            compare(results(compiled, seed, gradient, sizes), expected, seed)
    with torch.no_grad():
        compare(results(compiled, seed, True, sizes), results(program, seed, True, sizes), seed)


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.expected_eager("print")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["sum of a dim", "operators", "a whole", "two results", "masks of one value"])
def test_masked_tensors_between_breaks(name: str, backend: str) -> None:
    program, seed = with_breaks(WRAPPED[name]), random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(program, backend=backend)
    compare(results(compiled, seed, True, (4, 6, 5)), results(program, seed, True, (4, 6, 5)), seed)
    assert {event.kind.id for event in torchcompile.report().surprises} == {"print"}


INPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "reduced": lambda a, b: (a.sin() * 3).sum(1),
    "two of one mask": lambda a, b: ((a * b).to_tensor(0.0), a.get_mask()),
    "its data": lambda a, b: a.get_data().exp(),
    "with a plain tensor": lambda a, b: a + torch.ones(5, dtype=torch.float64),
    "handed back": lambda a, b: (a, a * 2),
}


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_masked_tensors_come_in_and_have_gradients_of_their_kind(name: str, gradient: bool, backend: str) -> None:
    program, seed = INPUTS[name], random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    observed: list[list[Any]] = []
    for run in (program, compiled):
        observed.append([])
        for call, rows in enumerate((3, 3, 5)):
            x, mask = drawn(rows, seed + call)
            given = [masked_tensor(t.detach(), mask, requires_grad=gradient) for t in (x, x.exp())]
            found = pytree.tree_leaves(run(*given))
            observed[-1] += parts(found)
            leaves = [t for t in found if t.requires_grad]
            if leaves:
                total: Any = sum(t.sum().to_tensor(0.0) if isinstance(t, MaskedTensor) else t.sum() for t in leaves)
                observed[-1] += parts(torch.autograd.grad(total, given, allow_unused=True))
    compare(*observed, seed)


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_masks_that_do_not_match_raise_as_eager(backend: str) -> None:
    """In the forward, and where only the backward asks."""

    def forward(x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return (of(x, mask) * as_masked_tensor(x, other)).to_tensor(0.0)

    def backward(x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return torch.where(x > 0, of(x, mask), as_masked_tensor(x * 3, other)).to_tensor(0.0)

    x, mask = drawn(4, 0)
    compiled = torchcompile.compile(forward, backend=backend)
    torch.testing.assert_close(compiled(x, mask, mask.clone()), forward(x, mask, mask))
    for function in (forward, compiled):
        with pytest.raises(ValueError, match="Input masks must match"):
            function(x, mask, ~mask)
    torch.testing.assert_close(compiled(x, mask, mask.clone()), forward(x, mask, mask))
    for function in (backward, torchcompile.compile(backward, backend=backend)):
        with pytest.raises(ValueError, match="Input masks must match"):
            function(x, mask, ~mask).sum().backward()


def plain(x: Tensor) -> Tensor:
    return x.sin() * 2 + x


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_program_of_plain_tensors_takes_a_masked_gradient(backend: str, dynamic: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(plain, backend=backend, fullgraph=True, dynamic=dynamic)
    observed: list[list[Any]] = []
    for run in (plain, compiled):
        observed.append([])
        for call, rows in enumerate((4, 6, 6)):
            x, mask = drawn(rows, seed + call)
            out = run(x)
            observed[-1] += parts(torch.autograd.grad(out, x, masked_tensor(torch.ones_like(out), mask)))
            x, mask = drawn(rows, seed + call)
            observed[-1] += parts(torch.autograd.grad(run(x), x, torch.ones_like(out)))  # a plain one behind it
    compare(*observed, seed)


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["sum of a dim", "exp", "mul", "a tensor", "a plain tensor beside"])
def test_a_derivative_of_the_backward_is_refused(name: str, backend: str) -> None:
    x, mask = drawn(4, 0)
    compiled = torchcompile.compile(WRAPPED[name], backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"wrap others[\s\S]*torchcompile\.disable"):
        torch.autograd.grad(compiled(x, mask).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("always")
def test_the_stage_of_the_interface_is_told_once_at_the_programs_line() -> None:
    def program(x: Tensor, mask: Tensor) -> Tensor:
        return of(x, mask).sum(1).to_tensor(0.0)

    compiled = torchcompile.compile(program, fullgraph=True)
    with warnings.catch_warnings(record=True) as told:
        for rows in (4, 4):
            x, mask = drawn(rows, 0)
            compiled(x.detach(), mask)
    (one,) = [w for w in told if "MaskedTensors" in str(w.message)]
    assert one.filename == __file__ and one.lineno == of.__code__.co_firstlineno + 1


LEAVING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sparse layout": lambda x, m: of(x, m).to_sparse().to_dense().to_tensor(0.0),
    "a write": lambda x, m: of(x.detach(), m).mul_(2).to_tensor(0.0) * x,
    "a leaf": lambda x, m: masked_tensor(x.detach(), m, requires_grad=True).to_tensor(0.0).detach() * x,
}


@pytest.mark.filterwarnings(*PROTOTYPE)
@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", LEAVING)
def test_what_no_graph_has_of_masked_tensors_breaks_and_is_told(name: str) -> None:
    program, seed = LEAVING[name], random.SystemRandom().randrange(1 << 30)
    compiled = torchcompile.compile(program)
    compare(results(compiled, seed, True, (4, 6)), results(program, seed, True, (4, 6)), seed)
    assert torchcompile.report().surprises


def test_under_the_filters_of_a_plain_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    """What a class's code warns of is written to the standard error there: no reason for a break of the graph."""
    from_python = lambda message, category, place, line, *_: sys.stderr.write(f"{place}:{line}: {message}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", from_python)
        compiled = torchcompile.compile(lambda x, m: torch.sum(of(x, m)).to_tensor(0), fullgraph=True)
        x, mask = drawn(4, 7)
        torch.autograd.grad(compiled(x, mask), x)
    told = [line for line in capsys.readouterr().err.splitlines() if "MaskedTensor" in line]
    assert len(told) == 2 and all(line.startswith(__file__) for line in told), told
