"""Programs with sizes that only the data tells: eager's results and gradients, a break for that reason at the most.

Nothing of them raises what eager does not, nor runs a whole function eagerly; empty and full selections are among the
calls, and a compiled function is called with data of other sizes each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchcompile
import torchdynamo

pytestmark = pytest.mark.warm

Program = Callable[..., Any]
Make = Callable[[int], tuple[torch.Tensor, ...]]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _mask(call: int, *shape: int) -> torch.Tensor:
    """Some, none, all, some."""
    return torch.rand(*shape) > (0.5, 2.0, -1.0, 0.3)[call]


def _masked(call: int) -> tuple[torch.Tensor, ...]:
    return _x(8, 4), _mask(call, 8)


def _longer(call: int) -> tuple[torch.Tensor, ...]:
    return _x(8 + call, 4), _mask(call, 8 + call)


def _rows(call: int) -> tuple[torch.Tensor, ...]:
    x, mask = _masked(call)
    return x, mask, _x(int(mask.sum()), 4)


def _elements(call: int) -> tuple[torch.Tensor, ...]:
    mask = _mask(call, 8, 4)
    return _x(8, 4), mask, _x(int(mask.sum()))


def _columns(call: int) -> tuple[torch.Tensor, ...]:
    mask = _mask(call, 4)
    return _x(8, 4), mask, _x(8, int(mask.sum()))


def _row(call: int) -> tuple[torch.Tensor, ...]:
    return *_masked(call), _x(*((4,), (1, 4), (1,), ())[call])


def puts(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> Any:
    y = x.clone()
    y[mask] = values
    return y


def adds_up(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> Any:
    return x.index_put((mask,), values, accumulate=True)


def puts_columns(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> Any:
    y = x.sin()
    y[:, mask] = values
    return y * 2


def puts_back_what_it_made(x: torch.Tensor, mask: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y[mask] = x[mask].exp()
    return y


def puts_by_a_mask_and_an_index(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x.index_put((mask, torch.tensor([2])), torch.tensor([7.0], dtype=x.dtype))


def mean_of_a_selection(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x[mask].mean(), x[mask].sum(0)


def softmax_of_a_selection(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x[mask].softmax(0)


def layer_on_a_selection(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return torch.relu(x[mask] @ x.T), x[mask].logsumexp(1)


def loss_at_a_mask(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return F.mse_loss(x[mask], x[mask].detach() * 2)


def pairwise_ranking(x: torch.Tensor, mask: torch.Tensor) -> Any:
    scores, labels = x[:, 0], mask.to(x.dtype)
    i, j = torch.triu_indices(len(scores), len(scores), 1)
    gaps, signs = (scores[None] - scores[:, None])[i, j], torch.sign(labels[None] - labels[:, None])[i, j]
    counted = signs != 0
    return F.margin_ranking_loss(gaps[counted], torch.zeros_like(gaps[counted]), signs[counted], margin=0.1)


def branches_on_a_size(x: torch.Tensor, mask: torch.Tensor) -> Any:
    y = x[mask]
    if len(y) == 0:
        return x.sum()
    return y.sum() if y.numel() > 16 else y.mean() * 2


def gives_a_number(x: torch.Tensor, mask: torch.Tensor) -> Any:
    at = mask.nonzero().squeeze(1)
    return x[at].sum(), at.numel()


def two_selections(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return torch.cat([x[mask], x[~mask]]) @ x.T


def products_of_selections(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return torch.bmm(x[mask][:, :, None], x[mask][:, None])


def differences_in_order(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return x[mask].flatten().sort()[0].diff()


def _sequences(call: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 6, 4).requires_grad_(), torch.randint(1, 7, (3,))


_LSTM = nn.LSTM(4, 5, batch_first=True, bidirectional=True)


def encodes_packed_sequences(x: torch.Tensor, lengths: torch.Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(_LSTM(packed)[0], batch_first=True)[0] * 2


def _labels(call: int) -> tuple[torch.Tensor, ...]:
    return _x(12, 3, 5), torch.tensor([[1, 2, 0], [1, 0, 0], [3, 4, 1]]).roll(call, 0)


def ctc_with_lengths_made_inside(x: torch.Tensor, labels: torch.Tensor) -> Any:
    times = torch.full((x.shape[1],), x.shape[0], dtype=torch.long)
    return F.ctc_loss(x.log_softmax(2), labels, times, (labels > 0).sum(1))


def counts_at_least_so_many(x: torch.Tensor, mask: torch.Tensor) -> Any:
    counts = torch.bincount(mask.nonzero().squeeze(1) // 2, minlength=x.shape[0])
    return counts[: x.shape[0], None] * x, counts.cumsum(0)


def picked_twice(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask] * x.sin()[mask] + F.mse_loss(x[mask], x.cos()[mask])


def picked_in_several_ways(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    places = mask.nonzero(as_tuple=True)[0]
    return x[mask] + x.exp()[places], x[:, 0].masked_select(mask) * x[mask, 1], x[mask.nonzero()[:, 0]] - x[mask]


def picked_and_written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[mask] = x[mask] * x.exp()[mask]
    return out


def picked_around_a_write(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each write is followed by another number of places: through the mask, a view of it, and without a version."""
    whole, mask, x = x.sum(), mask.clone(), x.detach()
    first = x[mask] + whole
    mask[0] = ~mask[0]
    second = x[mask]
    mask.view(-1)[2:4].fill_(True)
    third = x[mask] * 2
    mask.data.logical_not_()
    return first, second, third, x[mask] + x.sin()[mask]


def split_by_a_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[mask] = x[mask] * 3
    out[~mask] = x[~mask] * 2
    return out


CASES: list[tuple[Program, Make, bool]] = [  # the last: all of it is in graphs
    (picked_twice, _masked, True),
    (picked_twice, _longer, True),
    (picked_in_several_ways, _masked, True),
    (picked_and_written, _masked, True),
    (picked_around_a_write, _masked, True),
    (puts, _rows, True),
    (puts, _elements, True),
    (puts, _row, True),
    (adds_up, _rows, True),
    (adds_up, _row, True),
    (puts_columns, _columns, True),
    (puts_back_what_it_made, _masked, True),
    (puts_by_a_mask_and_an_index, _masked, True),
    (mean_of_a_selection, _masked, True),
    (softmax_of_a_selection, _masked, True),
    (layer_on_a_selection, _masked, True),
    (counts_at_least_so_many, _masked, True),
    (counts_at_least_so_many, _longer, True),
    (loss_at_a_mask, _masked, False),
    (pairwise_ranking, _masked, False),
    (branches_on_a_size, _masked, False),
    (gives_a_number, _masked, False),
    (two_selections, _masked, False),
    (products_of_selections, _masked, False),
    (differences_in_order, _masked, False),
    (encodes_packed_sequences, _sequences, False),
    (ctc_with_lengths_made_inside, _labels, False),
]


def _run(program: Program, arguments: tuple[torch.Tensor, ...]) -> tuple[Any, list[torch.Tensor | None]]:
    own = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    result = program(*own)
    parts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, torch.Tensor)]
    total = sum((part * torch.arange(1, part.numel() + 1).reshape(part.shape)).sum() for part in parts)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return result, [a.grad for a in own]


@pytest.mark.parametrize("ranks", [(r, m) for r in (1, 2, 3) for m in range(1, r + 1)], ids=str)
def test_a_choice_by_a_mask_of_any_rank_is_in_one_graph(ranks: tuple[int, int]) -> None:
    """What a mask picks is written where it picks, and where another mask picks; numbers are as many as the data say."""
    rank, dims = ranks
    seed = torch.seed()
    compiled = torchcompile.compile(split_by_a_mask, fullgraph=True)
    for call in range(4):
        x = torch.randn((2, 3, 4)[:rank], dtype=torch.float64, requires_grad=True)
        arguments = (x, _mask(call, *x.shape[:dims]))
        expected, result = _run(split_by_a_mask, arguments), _run(compiled, arguments)
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, msg=lambda m, call=call: f"seed {seed}, call {call}: {m}"
        )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_as_many_numbers_as_a_mask_of_two_dims_picks(count: int) -> None:
    x, values = torch.randn(6, 3), torch.randn(count)
    mask = (torch.arange(18) < count).reshape(6, 3)
    torch.testing.assert_close(
        torchcompile.compile(puts, fullgraph=True)(x, mask, values), puts(x, mask, values), rtol=0, atol=0
    )


@pytest.mark.expected_eager("data_dependent_shape", "tensor_to_number", "data_dependent_branch")
@pytest.mark.parametrize("program, make, whole", CASES, ids=[f"{p.__name__}-{m.__name__[1:]}" for p, m, _ in CASES])
def test_a_size_that_the_data_tells(program: Program, make: Make, whole: bool) -> None:
    seed = torch.seed()
    compiled = torchcompile.compile(program)
    for call in range(4):
        arguments = make(call)
        expected, result = _run(program, arguments), _run(compiled, arguments)
        torch.testing.assert_close(
            result, expected, equal_nan=True, msg=lambda m, call=call: f"seed {seed}, call {call}: {m}"
        )
    stats = torchdynamo.stats()
    assert not stats.fallbacks and not (whole and stats.break_details)


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("selected, given", [(5, 3), (2, 3), (0, 3), (3, 0), (1, 3)])
def test_a_wrong_number_of_values_is_refused(selected: int, given: int) -> None:
    x, mask, values = torch.randn(8, 4), torch.arange(8) < selected, torch.randn(given, 4)
    compiled = torchcompile.compile(puts)
    for program in (puts, compiled):
        with pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape"):
            program(x, mask, values)
    fits = torch.arange(8) < given
    torch.testing.assert_close(compiled(x, fits, values), puts(x, fits, values), rtol=0, atol=0)


def _parts(x: torch.Tensor, m: torch.Tensor) -> Any:
    chosen = x[m]
    return chosen[1:], chosen.view(-1), chosen.t()


def _counted(x: torch.Tensor, m: torch.Tensor) -> Any:
    chosen = (x * 2)[m.nonzero()[:, 0]]
    return chosen.cumsum(0), chosen.sin().sum(1), chosen.t()


@pytest.mark.expected_eager("data_dependent_shape", "tensor_to_number", "recompiled")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [_parts, _counted], ids=["parts", "counted"])
def test_a_program_of_such_sizes_that_is_found_again(program: Program, dynamic: bool, tmp_path: Path) -> None:
    """Each trace has names of its own for sizes of data: one that is made late fits what an earlier one kept."""
    for _ in range(3):
        torchcompile.reset()
        kept = {"cache": str(tmp_path), "check_kernels": False}  # programs with checked kernels are not kept
        compiled = torchcompile.compile(program, dynamic=dynamic, options=kept)
        for rows in (8, 9):
            x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
            chosen = torch.arange(rows) % 3 != 1
            for used in ((0, 1, 2), (0,), (1, 2)):  # the gradients of some results alone are traced late
                gradients = []
                for run in (compiled, program):
                    results = run(x * 1, chosen)
                    gradients += torch.autograd.grad(sum(results[k].sin().sum() for k in used), x)
                torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
