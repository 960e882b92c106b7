"""`min`, `max` and `sorted` of tensors: chosen and put in order in the graph, unless the program could tell that the choice is an operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import torchcompile

pytestmark = pytest.mark.warm

Program = Callable[[torch.Tensor], torch.Tensor]


def of_two(x: torch.Tensor) -> torch.Tensor:
    return min(x[0, 0], x[0, 1]) + x


def of_a_list(x: torch.Tensor) -> torch.Tensor:
    return max([x.sum(), x.mean(), x[0, 0]]) * 2


def with_a_nan(x: torch.Tensor) -> torch.Tensor:
    nan = x[0, 0] * float("nan")
    return torch.stack([max(nan, x[0, 1]) * 1, max(x[0, 1], nan) * 1, min(nan, x[0, 1]) * 1])


def returned(x: torch.Tensor) -> torch.Tensor:
    return min(x[0, 0], x[0, 1])


def a_view_returned(x: torch.Tensor) -> torch.Tensor:
    return max(x[0, 0], x[0, 1]).view(1)


def operand_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    least = min(y[0, 0], y[0, 1])
    y.add_(1)
    return least * 2


def choice_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    min(y[0, 0], y[0, 1]).add_(1)
    return y


def with_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + max(x[0, 0], float("-inf"))


def in_order(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(sorted([x[0, 0], x[0, 1], x[1, 0], x[0, 1] * 1], reverse=True)) * torch.arange(4)


def rows_in_order(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(sorted([x[0], x[1], x[0] * 2, x[0].flip(0)], key=lambda row: row.abs().sum())).cumsum(0)


def equal_keys_in_order(x: torch.Tensor) -> torch.Tensor:
    rows = [x[0], x[1] * 2, x[0] + x[1], x[1]]
    return torch.cat([torch.stack(sorted(rows, key=lambda r: (r > 0).sum(), reverse=way)) for way in (False, True)]) * 2


def order_returned(x: torch.Tensor) -> torch.Tensor:
    return sorted([x[0, 0], x[0, 1]])[0]


def ordered_is_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    sorted([y[0, 0], y[0, 1], y[1, 0]])[1].add_(1)
    return y


def made_and_returned(x: torch.Tensor) -> torch.Tensor:
    return max(x.sum(), x.mean(), (x * 2).amin())


def made_ordered_and_returned(x: torch.Tensor) -> torch.Tensor:
    return sorted([x.sum(), x.mean(), x.std()])[1]


WHOLE = (
    of_two, of_a_list, with_a_nan, in_order, rows_in_order, equal_keys_in_order, made_and_returned,
    made_ordered_and_returned,
)  # fmt: skip
BROKEN = (
    returned, a_view_returned, operand_written, choice_written, with_a_number, order_returned, ordered_is_written,
)  # fmt: skip


@pytest.mark.expected_eager("data_dependent_branch", "overlapping_inputs")
@pytest.mark.parametrize("program", (*WHOLE, *BROKEN), ids=lambda program: program.__name__)
def test_choices_are_eagers(program: Program) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        found, wanted = compiled(x), program(x)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        gradients: list[Any] = [torch.autograd.grad(out.sum(), x, allow_unused=True)[0] for out in (found, wanted)]
        torch.testing.assert_close(*gradients, equal_nan=True)
        assert (found._base is x) is (wanted._base is x)
    broke = any(event.kind.id == "data_dependent_branch" for event in torchcompile.report().events)
    assert broke is (program in BROKEN)


def told_apart(x: torch.Tensor) -> Any:
    total, mean = x.sum(), x.mean()
    return max(total, mean), total, mean


def by_another_choice(x: torch.Tensor) -> Any:
    first = max(x.sum(), x.mean())
    return min(first, x.std() + 9), first


def handed_to_a_list(x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
    total = x.sum()
    kept.append(total)
    return max(total, x.mean()), kept


@pytest.mark.expected_eager("data_dependent_branch")
@pytest.mark.parametrize("program", [told_apart, by_another_choice, lambda x: handed_to_a_list(x, [])])
def test_a_choice_that_is_handed_out_beside_its_operand_is_the_operand(program: Callable[..., Any]) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager")
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, dtype=torch.float64)
        for found, wanted in zip(pairs(compiled(x)), pairs(program(x)), strict=True):
            assert found == wanted


def pairs(results: Any) -> list[Any]:
    leaves = pytree.tree_leaves(results)
    return [(a is b, float(a)) for a in leaves for b in leaves]


@pytest.mark.expected_eager("data_dependent_branch")
def test_a_choice_of_what_has_a_gradient_and_what_has_none_keeps_its_own() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return max(x.sum(), x.detach().mean())

    compiled = torchcompile.compile(program, backend="aot_eager")
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        assert compiled(x).requires_grad is program(x).requires_grad


@pytest.mark.expected_eager("raise_was_handled")
def test_what_is_sorted_with_a_nan_is_in_the_order_of_eager() -> None:
    compiled = torchcompile.compile(in_order)
    for nan in (None, 0, 1, 3):
        x = torch.randn(2, 3, dtype=torch.float64)
        if nan is not None:
            x.view(-1)[nan] = float("nan")
        torch.testing.assert_close(compiled(x), in_order(x), equal_nan=True, rtol=0, atol=0)


def test_a_key_is_asked_for_once_and_in_order() -> None:
    for values in ([3, 1, 2], [(1, "b"), (0, "a"), (1, "a")], []):
        asked: list[Any] = []

        def program(x: torch.Tensor, values: Any = values, asked: list[Any] = asked) -> Any:
            return x + 1, sorted(values, key=lambda value: (asked.append(value), value)[1], reverse=True)

        assert torchcompile.compile(program)(torch.ones(1))[1] == sorted(values, reverse=True) and asked == values
