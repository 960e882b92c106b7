"""Sizes and Python values that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotautograd import AotAutogradError, aot_function, min_cut, trace_joint
from primtorch.errors import DataDependentValue

pytestmark = pytest.mark.usefixtures("double")


def identity(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


class Counting:
    """Runs graphs as they are and counts forwards."""

    def __init__(self) -> None:
        self.forwards = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.forwards += 1
        return gm


def with_gradients(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outputs = torch.utils._pytree.tree_leaves(function(*leaves))
    ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not ends:
        return outputs
    torch.manual_seed(0)
    tangents = [torch.randn(o.shape, dtype=o.dtype) for o in ends]
    needing = [t for t in leaves if t.requires_grad]
    return outputs + list(torch.autograd.grad(ends, needing, tangents, allow_unused=True))


SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mask": lambda x: x[x > 0] * 2,
    "masked rows": lambda x: x[x[:, 0] > 0].sin() @ torch.ones(4, 2),
    "masked select": lambda x: torch.masked_select(x, x > 0).exp(),
    "nonzero": lambda x: x[(x > 0).nonzero()[:, 0]],
    "nonzero, tuple": lambda x: x[(x > 0).nonzero(as_tuple=True)].cos(),
    "broadcast": lambda x: x[x > 0][:, None] * torch.ones(3),
    "sum": lambda x: x[x > 0].square().mean(),
    "write": lambda x: x.clone().index_put((x > 0,), torch.zeros(())) * x,
    "sizes in use": lambda x: x[x > 0].sum() / x[x > 0].shape[0],
    "two masks": lambda x: torch.cat([x[x > 0], x[x < 0].exp()]),
}


@pytest.mark.parametrize("partitioner", [None, min_cut(), min_cut(0.0)], ids=["default", "min_cut", "budget0"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_depend_on_data_need_no_new_trace(name: str, partitioner: Any) -> None:
    program, counting = SIZES[name], Counting()
    options = {} if partitioner is None else {"partitioner": partitioner}
    compiled = aot_function(program, fw_compiler=counting, bw_compiler=identity, **options)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(5, 4)
        for a, b in zip(with_gradients(program, [x]), with_gradients(compiled, [x]), strict=True):
            torch.testing.assert_close(b, a)
    assert counting.forwards == 1


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * x.max().item(),
    "branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "equal": lambda x: (x, torch.equal(x, x.abs())),
    "allclose": lambda x: (x, torch.allclose(x, x + 1e-12)),
    "integer in a branch": lambda x: x.sin() if (x > 0).sum().item() > 9 else x.cos(),
    "sections": lambda x: torch.tensor_split(x, torch.tensor([1, 3])),
    "number of sections": lambda x: torch.tensor_split(x, (x[0, 0] > -5).sum() + 1),
    "size in a branch": lambda x: x[x > 0] if x[x > 0].shape[0] > 9 else x,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_checked_before_each_call(name: str) -> None:
    program = VALUES[name]
    compiled = aot_function(program, fw_compiler=identity)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(5, 4)
        for a, b in zip(with_gradients(program, [x]), with_gradients(compiled, [x]), strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(b, a)
            else:
                assert b == a


def test_one_trace_for_one_value() -> None:
    counting = Counting()
    compiled = aot_function(VALUES["branch"], fw_compiler=counting)
    for sign in (1.0, 1.0, -1.0, 1.0, -1.0):
        compiled(torch.full((3,), sign))
    assert counting.forwards == 2


def test_many_values_are_refused() -> None:
    compiled = aot_function(lambda x: x * int(x.sum()), fw_compiler=identity)  # int() is C code, and takes no symbol
    with pytest.raises(AotAutogradError, match="takes a Python value out of a tensor"):
        for k in range(100):
            compiled(torch.full((3,), float(k)))


def test_numbers_need_no_new_trace() -> None:
    counting = Counting()
    compiled = aot_function(lambda x: x * x.sum().item() * torch.rand(()).item() ** 0, fw_compiler=counting)
    for k in range(5):
        torch.testing.assert_close(compiled(torch.full((3,), float(k))), torch.full((3,), 3.0 * k * k))
    assert counting.forwards == 1


def test_values_of_random_numbers_are_refused() -> None:
    with pytest.raises(DataDependentValue, match="random"):
        aot_function(lambda x: x * int(torch.rand(()) * 9), fw_compiler=identity)(torch.ones(3))


def test_assumptions_are_in_the_table() -> None:
    joint = trace_joint(lambda x: [VALUES["branch"](x)], [torch.ones(3)])
    assert joint.guard is not None
    assert "value of" in str(joint.metadata)
    assert "= True" in str(joint.metadata)


def test_double_backward_through_a_mask() -> None:
    program = lambda x: x[x > 0] ** 3
    compiled = aot_function(program, fw_compiler=identity)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(6, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 6 * x.detach() * (x > 0))


def test_a_derivative_checks_its_condition() -> None:
    """The gradient of a complex svd is defined for losses that do not depend on the phase of the vectors."""
    a = torch.randn(3, 3, dtype=torch.complex128)
    program = lambda a: torch.linalg.svd(a)[0].abs()
    x, y = a.clone().requires_grad_(), a.clone().requires_grad_()
    compiled = aot_function(program, fw_compiler=identity)
    program(x).sum().backward()
    compiled(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    with pytest.raises(RuntimeError, match="not defined for these inputs"):
        aot_function(lambda a: torch.linalg.svd(a)[0].real, fw_compiler=identity)(y).sum().backward()


def test_a_number_that_is_read_twice_is_two_symbols() -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.new_zeros(n[0].item()).sum()
        return x * 2 + first, x.new_ones(n[0].item()).sum() * x

    for decompositions in (None, "prims"):
        compiled = aot_function(program, fw_compiler=identity, decompositions=decompositions)
        for size in (3, 5):
            inputs = [torch.randn(4), torch.tensor([size, 2])]
            for a, b in zip(with_gradients(compiled, inputs), with_gradients(program, inputs), strict=True):
                torch.testing.assert_close(a, b)
