"""Programs after public reports of wrong results, written anew from what they describe, through the whole stack.

Values, gradients, what is left in the arguments, layouts, and which results share memory are eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchcompile

pytestmark = [pytest.mark.warm, pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]

Make = Callable[[], Sequence[Any]]
CASES: list[tuple[Callable[..., Any], Make]] = []


def reported(make: Make) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(program: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((program, make))
        return program

    return note


def grid(*shape: int, grad: bool = False) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(float(count)).reshape(shape) / 7 - 1).requires_grad_(grad)


# -- writes through aliases ---------------------------------------------------------------------


@reported(lambda: [grid(2, 2)])
def dropout_hands_back_its_input(x: Any) -> Any:
    y = F.dropout(x, 0.5, training=False)
    y += y
    return y


@reported(lambda: [grid(2, 4)])
def strided_over_a_diagonal(x: Any) -> Any:
    x.diagonal().as_strided((2,), (1,), 0).add_(1)
    return x * 2


@reported(lambda: [grid(2, 2, 10)])
def strided_over_a_copy_with_overlap(x: Any) -> Any:
    y = x.clone()
    z = y.as_strided((2, 2), (2, 1), 3)
    z.add_(1)
    return y, z


@reported(lambda: [grid(10)[::2]])
def stride_asked_after_a_write(x: Any) -> Any:
    x.add_(1)
    return torch.as_strided_copy(x, (3,), (2,))


@reported(lambda: [grid(12)])
def windows_with_gaps_are_written(x: Any) -> Any:
    windows = x.unfold(0, 2, 3)
    windows.mul_(10)
    return windows.sum(1)


@reported(lambda: [grid(3, 4)])
def a_view_of_a_view_is_written(x: Any) -> Any:
    x.t()[1:3].view(2, 3)[:, ::2].zero_()
    return x.sum(0)


@reported(lambda: [grid(4, 3)])
def rows_are_swapped(x: Any) -> Any:
    x[[0, 2]] = x[[2, 0]]
    x[1], x[3] = x[3].clone(), x[1].clone()
    return x + 1


@reported(lambda: [grid(6)])
def a_slice_is_copied_over_its_neighbour(x: Any) -> Any:
    x[1:].copy_(x[:-1].clone())
    return x


@reported(lambda: [grid(3, 3)])
def results_alias_each_other(x: Any) -> Any:
    y = x * 2
    return y, y[0], y.view(-1), y.t()


@reported(lambda: [grid(3, 3)])
def results_alias_the_input(x: Any) -> Any:
    return x, x[1:], x.t(), x.detach()


@reported(lambda: [grid(4)])
def one_result_twice(x: Any) -> Any:
    y = x.exp()
    return y, y, [y]


@reported(lambda: [grid(4), grid(4)])
def a_result_given_into_an_argument(x: Any, y: Any) -> Any:
    torch.mul(x, 3, out=y)
    return torch.add(y, 1, out=x)


@reported(lambda: [grid(3), grid(5)])
def data_is_assigned(x: Any, y: Any) -> Any:
    x.data = y * 2
    return x + 1


@reported(lambda: [grid(3)])
def a_view_is_resized(x: Any) -> Any:
    base = x + 1
    alias = base.view(-1)
    alias.resize_(2)
    return base + 1, alias


@reported(lambda: [grid(3)])
def storage_is_set(x: Any) -> Any:
    y = torch.zeros(2)
    y.set_(x[1:])
    y.add_(5)
    return y * 2


@reported(lambda: [grid(4)])
def number_then_arithmetic_in_place(x: Any) -> Any:
    value = x[0].item()
    x += value
    x *= 2
    return value, x[0].item(), x - value


@reported(lambda: [torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 0])])
def positions_repeat_in_a_scattered_write(x: Any, index: Any) -> Any:
    x.index_put_((index,), torch.ones(3, dtype=torch.int64), accumulate=True)
    return x.scatter_add(0, index, index)


@reported(lambda: [grid(2, 3), torch.tensor([[True, False, True], [False, True, False]])])
def a_mask_is_written(x: Any, mask: Any) -> Any:
    x[mask] = -1
    x.masked_fill_(~mask, 2)
    return x[mask], x


# -- gradients ----------------------------------------------------------------------------------


@reported(lambda: [grid(2, grad=True)])
def a_parameter_made_of_a_result(x: Any) -> Any:
    y = x + 1
    z = nn.Parameter(y)
    with torch.no_grad():
        z.mul_(2)
    return y + z


@reported(lambda: [grid(4, grad=True)])
def a_view_is_written_and_differentiated(x: Any) -> Any:
    y = x.clone()
    y[1:3].mul_(x[:2])
    return y.sin()


@reported(lambda: [grid(4, grad=True)])
def a_detached_alias_is_written(x: Any) -> Any:
    y = x * 2
    y.detach().add_(1)
    return y * x


@reported(lambda: [grid(4, grad=True)])
def a_branch_without_gradient(x: Any) -> Any:
    with torch.no_grad():
        scale = x.max() + 1
    return x * scale, scale


@reported(lambda: [grid(3, 3, grad=True)])
def a_result_is_a_view_of_a_leaf(x: Any) -> Any:
    return x[0], (x * x).t()


@reported(lambda: [grid(4, grad=True), grid(4, grad=True)])
def one_result_needs_no_gradient(x: Any, y: Any) -> Any:
    return x * y, (x > y), x.argmax(), y.detach()


@reported(lambda: [grid(2, 4, grad=True)])
def ties_share_the_gradient(x: Any) -> Any:
    y = torch.stack([x[0], x[0]])
    return y.amax(0), y.max(0).values, torch.maximum(y[0], y[1])


@reported(lambda: [torch.tensor([0.0, -1.0, 4.0], requires_grad=True)])
def kinks_have_eagers_gradients(x: Any) -> Any:
    return x.abs(), F.relu(x), x.clamp(0, 4), torch.where(x > 0, x, x.exp())


@reported(lambda: [torch.tensor([0.0, 1.0, 2.0], requires_grad=True)])
def powers_at_zero(x: Any) -> Any:
    return x**2, x**0, torch.pow(x, 1.0), (x + 1) ** 0.5


@reported(lambda: [grid(3, 4, grad=True)])
def an_expanded_tensor_collects_gradients(x: Any) -> Any:
    return x[:1].expand(3, 4) * x, x.sum(1, keepdim=True).expand_as(x) - x


# -- kernels ------------------------------------------------------------------------------------


@reported(lambda: [torch.tensor([float("nan"), 1.0, -float("inf"), float("inf"), -0.0])])
def what_is_no_number(x: Any) -> Any:
    y = torch.tensor([1.0, float("nan"), 1.0, -1.0, 0.0])
    return torch.maximum(x, y), torch.fmin(x, y), x.clamp(-1, 1), x.sign(), x.nan_to_num(), x == x, x.signbit(), x.max()


@reported(lambda: [torch.tensor([7, -7, 5, -5]), torch.tensor([3, 3, -3, -3])])
def signs_of_integer_division(x: Any, y: Any) -> Any:
    return x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y), x / y, x >> 1


@reported(lambda: [torch.tensor([250, 3, 255], dtype=torch.uint8)])
def small_integers_wrap(x: Any) -> Any:
    return x + 10, x * 2, -x, (x + 10).sum(), x.cumsum(0), x.float() + 10, x.prod()


@reported(lambda: [torch.tensor([2147483600], dtype=torch.int32)])
def int32_wraps(x: Any) -> Any:
    return x + 100, x * 3, (x + 100) // 7, x.sum(), x.to(torch.int64) + 100


@reported(lambda: [torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.675])])
def halves_are_rounded_to_even(x: Any) -> Any:
    return x.round(), x.round(decimals=2), x.trunc(), x.floor(), x.to(torch.int32)


@reported(lambda: [grid(3, 0), grid(0)])
def nothing_to_reduce(x: Any, y: Any) -> Any:
    return x.sum(1), x.prod(1), y.sum(), y.mean(), torch.cat([y, y]), F.softmax(x, 1), x.t() @ x, (y > 0).all()


@reported(lambda: [torch.tensor(3.0), torch.tensor(2, dtype=torch.int64)])
def tensors_without_dimensions(x: Any, n: Any) -> Any:
    return x * n, x.sum(), x.softmax(0), n.cumsum(0), x.expand(3), torch.stack([x, x * 2]).std(), x.sort().values


@reported(lambda: [grid(6, 5).t()])
def layouts_of_transposed_operands(x: Any) -> Any:
    other = grid(5, 6) + 3
    return torch.copysign(x, other), x + other, x.clone(), torch.empty_like(x).fill_(1), x.floor_divide(other), x.exp()


@reported(lambda: [grid(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)])
def channels_last_stays(x: Any) -> Any:
    return x * 2, F.relu(x) + 1, x.mean((2, 3)), F.avg_pool2d(x, 2), x.flatten(1)


@reported(lambda: [grid(8).to(torch.bfloat16), grid(8)])
def mixed_precisions_promote(x: Any, y: Any) -> Any:
    return x + y, x * 2.5, x * torch.tensor(2.5), x.sum(), torch.where(y > 0, x, 1.0), (x > y), torch.cat([x, y])


@reported(lambda: [grid(4, 6)])
def sorted_with_repeats(x: Any) -> Any:
    y = (x * 2).round()
    return torch.sort(y, dim=1, stable=True), y.argmax(1), y.flip(1).argmin(1), y.unique(), y.cummax(1)


@reported(lambda: [grid(5, 4), torch.tensor([0, -1, 2])])
def negative_positions(x: Any, index: Any) -> Any:
    return x[index], x[-2], x[:, -3:-1], x[index, index], x.index_select(0, index % 5), x.roll(-1, 0)


def memories(values: Sequence[Any]) -> list[int]:
    """Which tensors lie in one memory, as numbers in the order of their first."""
    seen: dict[int, int] = {}
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found.append(seen.setdefault(storage.data_ptr(), len(seen)) if storage.nbytes() else -1)
    return found


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def run(program: Callable[..., Any], make: Make) -> tuple[list[Any], list[Any], list[Any]]:
    """Results, arguments afterwards, gradients."""
    torch.manual_seed(0)
    arguments = list(make())
    results = leaves(program(*arguments))
    wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad and r.grad_fn is not None]
    if wanted:
        sum((r.float() * (i + 1)).sum() for i, r in enumerate(wanted)).backward()
    return results, arguments, [a.grad for a in arguments if isinstance(a, torch.Tensor) and a.is_leaf]


# What programs leave their graphs for.
EXPECTED = {
    "strided_over_a_diagonal": ("write_through_gaps",),
    "stride_asked_after_a_write": ("write_through_gaps",),
    "windows_with_gaps_are_written": ("write_through_gaps",),
    "data_is_assigned": ("tensor_metadata_write",),
    "a_view_is_resized": ("tensor_metadata_write",),
    "storage_is_set": ("tensor_to_number", "tensor_metadata_write"),
    "number_then_arithmetic_in_place": ("tensor_to_number",),
    "a_parameter_made_of_a_result": ("leaf", "overlapping_inputs"),
}


@pytest.mark.parametrize(
    "program, make",
    [pytest.param(*case, marks=pytest.mark.expected_eager(*EXPECTED.get(case[0].__name__, ()))) for case in CASES],
    ids=[program.__name__ for program, _ in CASES],
)
def test_a_reported_program(program: Callable[..., Any], make: Make) -> None:
    expected = run(program, make)
    compiled = torchcompile.compile(program)
    for _ in range(2):
        found = run(compiled, make)
        for mine, theirs in zip(found, expected, strict=True):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert type(a) is type(b)
                torch.testing.assert_close(a, b, equal_nan=True, check_stride=True)
                if isinstance(a, torch.Tensor):
                    assert a.requires_grad == b.requires_grad and a.storage_offset() == b.storage_offset()
        assert memories([*found[0], *found[1]]) == memories([*expected[0], *expected[1]])


def none_are_left(x: Any, mask: Any) -> Any:
    chosen = x[mask]
    return x * 3 if chosen.shape[0] == 0 else chosen * chosen.shape[0]


def sums_are_put_back(x: Any, mask: Any) -> Any:
    x = x * 2
    chosen = x[mask]
    chosen = chosen - chosen.sum()
    x[mask] = 0
    x[mask] = chosen
    return x


@pytest.mark.expected_eager("data_dependent_shape", "tensor_to_number")
@pytest.mark.parametrize(
    "program",
    [
        none_are_left,
        sums_are_put_back,
        lambda x, mask: x.sum() * torch.zeros(mask.nonzero().size(0), 2, dtype=x.dtype),
        lambda x, mask: x[mask] * torch.arange(x[mask].numel()),
        lambda x, mask: x.sum() + torch.ones(2 * torch.where(mask)[0].shape[0] + 1).cumsum(0),
        lambda x, mask: x * 2.0 + mask.nonzero().size(0),
    ],
)
def test_the_program_asks_for_a_size_that_only_data_tells(program: Any) -> None:
    compiled = torchcompile.compile(program, options={"strict": True})
    for count in (3, 0, 5, 1, 0, 6):
        mask = (torch.arange(6) < count)[torch.randperm(6)]
        x = torch.randn(6, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        expected, found = program(x, mask), compiled(y, mask)
        torch.testing.assert_close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.expected_eager("graph_raised")
def test_values_put_at_a_mask_of_another_count_are_refused() -> None:
    def put(x: Any, mask: Any, values: Any) -> Any:
        x = x + 1
        x[mask] = values
        return x

    compiled = torchcompile.compile(put, dynamic=False)
    x, mask = torch.randn(2, 5), torch.tensor([True, True, False, False, True])
    for values, columns in ((torch.randn(3), x[0]), (torch.randn(3, 2), x.t()), (torch.randn(1, 2), x.t())):
        assert torch.equal(compiled(columns, mask, values), put(columns, mask, values))
    for values, columns in ((torch.randn(2), x[0]), (torch.randn(0), x[0]), (torch.randn(4, 2), x.t())):
        for run in (put, compiled):
            with pytest.raises((RuntimeError, IndexError)):
                run(columns, mask, values)


@pytest.mark.expected_eager("data_dependent_shape", "tensor_to_number")
@pytest.mark.parametrize("counts", [(3, 1, 0, 4)])
def test_selections_by_a_mask_of_any_count(counts: tuple[int, ...]) -> None:
    def program(x: Any) -> Any:
        mask = x > 0
        chosen = x[mask] * 2
        places = mask.nonzero()
        return chosen, chosen.sum(), places + 1, torch.cat([chosen, x]), chosen.unsqueeze(1) * places.to(x.dtype)

    compiled = torchcompile.compile(program)
    for count in counts:
        x = -torch.ones(6)
        x[:count] = torch.arange(1.0, count + 1)
        results = []
        for f in (program, compiled):
            y = x.clone().requires_grad_()
            out = f(y)
            (out[0].pow(2).sum() + out[3].sum()).backward()
            results.append((*out, y.grad))
        torch.testing.assert_close(results[1], results[0])
