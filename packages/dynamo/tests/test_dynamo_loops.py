"""Loops whose bodies break the graph: as many versions for a hundred rounds as for ten, and eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo
from torchdynamo.api import owner_of
from torchdynamo.stats import TOTAL


class Region:
    """A context manager of the user's."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __enter__(self) -> Region:
        self.log.append("in")
        return self

    def __exit__(self, *raised: object) -> bool:
        self.log.append("out")
        return False


class Scaled:
    def __init__(self) -> None:
        self.scale, self.rounds = 2, 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        print(end="")
        return y - x


def shown(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x


def over_a_range(x: torch.Tensor, n: int) -> Any:
    for i in range(n):
        x = x + i
        print(end="")
        x = x / 2
    return x


def over_a_list(x: torch.Tensor, n: int) -> Any:
    for i in list(range(n)):
        x = x + i
        print(end="")
    return x


def over_a_zip(x: torch.Tensor, n: int) -> Any:
    for a, b in zip(range(n), range(1, n + 1), strict=True):
        x = x + a * b
        print(end="")
    return x


def over_an_enumeration(x: torch.Tensor, n: int) -> Any:
    for i, value in enumerate([x] * n, start=3):
        x = x + value / i
        print(end="")
    return x


def over_a_dict(x: torch.Tensor, n: int) -> Any:
    for value in {str(i): i for i in range(n)}.values():
        x = x + value
        print(end="")
    return x


def over_a_map(x: torch.Tensor, n: int) -> Any:
    for value in map(lambda i: i * 2, reversed(range(n))):
        x = x + value
        print(end="")
    return x


def over_rows(x: torch.Tensor, n: int) -> Any:
    for row in torch.ones(n, 4):
        x = x + row
        print(end="")
    return x


def while_counting(x: torch.Tensor, n: int) -> Any:
    i = 0
    while i < n:
        x = x + i
        print(end="")
        i += 1
    return x


def while_data_says_so(x: torch.Tensor, n: int) -> Any:
    while x.sum() < n * 10:
        x = x + 1
    return x


def within_regions(x: torch.Tensor, n: int) -> Any:
    log: list[Any] = []
    with Region(log), torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(n):
            with torch.no_grad():
                x = x + i
                print(end="")
                x = x / 2
    return x, len(log)


def within_handlers(x: torch.Tensor, n: int) -> Any:
    for i in range(n):
        try:
            x = x + i
            print(end="")
            if i % 2:
                raise ValueError(i)
        except ValueError:
            x = x / 2
            continue
        finally:
            x = x - 1
        if i > 1000:
            break
    return x


def loops_in_loops(x: torch.Tensor, n: int) -> Any:
    for i in range(n):
        for j in range(3):
            x = x + j
            print(end="")
        x = x / (i + 1)
    return x


def inner_loop(x: torch.Tensor, n: int) -> torch.Tensor:
    for j in range(n):
        x = x + j
        print(end="")
    return x


def in_a_called_function(x: torch.Tensor, n: int) -> Any:
    y = inner_loop(x, n) / 2
    return inner_loop(y, n) + x


def a_method_that_breaks(x: torch.Tensor, n: int) -> Any:
    obj = Scaled()
    for _ in range(n):
        x = obj.step(x)
    return x


def in_a_comprehension(x: torch.Tensor, n: int) -> Any:
    return sum([shown(x + i) for i in range(n)])


def results_in_a_list(x: torch.Tensor, n: int) -> Any:
    found = []
    for i in range(n):
        found.append(shown(x + i) * 2)
    return torch.stack(found).sum(0), len(found)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + 1 if y.sum() > 0 else y - 1


torch.manual_seed(0)
LAYERS = nn.ModuleList(Layer() for _ in range(60))


def over_layers(x: torch.Tensor, n: int) -> Any:
    for layer in LAYERS[:n]:
        x = layer(x)
    return x


LOOPS = [
    over_a_range, over_a_list, over_a_zip, over_an_enumeration, over_a_dict, over_a_map, over_rows, while_counting,
    while_data_says_so, within_regions, within_handlers, loops_in_loops, in_a_called_function, a_method_that_breaks,
    in_a_comprehension, results_in_a_list, over_layers,
]  # fmt: skip


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_a_loop_costs_a_fixed_number_of_versions(program: Callable[..., Any]) -> None:
    made = []
    for rounds in (12, 60):
        options = torchdynamo.CaptureOptions(strict=True, on_recompile="continue", recompile_limit=8)
        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
        x = torch.linspace(-1, 1, 4)
        for _ in range(2):
            torch.testing.assert_close(compiled(x, rounds), program(x, rounds), rtol=0, atol=0)
        owner = owner_of(compiled)
        assert owner.nested is not None and not owner.stats.fallbacks
        made.append(owner.stats.graphs)
    assert made[0] == made[1] and made[0] > 0, made


def test_a_list_that_grows_at_each_call_is_not_guarded_as_a_whole() -> None:
    log: list[Any] = []

    def program(x: torch.Tensor, read: bool) -> Any:
        log.append(x.sum())
        log.extend([1, 2])
        if read:
            return x + len(log), log[-1], type(log), isinstance(log, list)
        return x * 2

    options = torchdynamo.CaptureOptions(strict=True, recompile_limit=8)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for call in range(20):
        compiled(torch.ones(2), False)
        assert len(log) == 3 * call + 3 and torch.equal(log[-3], torch.tensor(2.0))
    assert owner_of(compiled).stats.graphs <= 3
    x, last, kind, known = compiled(torch.ones(2), True)
    assert torch.equal(x, torch.ones(2) + 63) and (last, kind, known) == (2, list, True)


def fills_a_list(x: torch.Tensor, n: int) -> Any:
    found: list[Any] = []
    while len(found) < n:
        if x.sum().item() == -1.0:
            break
        found.append(x.argmax())
        x = x.roll(1)
    return torch.stack(found), x


def fills_two_lists(x: torch.Tensor, n: int) -> Any:
    odd: list[Any] = []
    even: list[Any] = []
    while len(odd) + len(even) < n:
        (odd if x.argmax().item() % 2 else even).append(x[0] + len(odd))
        x = x.roll(1)
    return odd, even, len(odd)


@pytest.mark.parametrize(("program", "limit"), [(fills_a_list, 8), (fills_two_lists, 16)])
def test_a_loop_until_a_list_is_full_has_no_version_for_each_length(program: Any, limit: int) -> None:
    """59 rounds in all; a version for each way through a round, for a limit that is a constant and one that is not."""
    options = torchdynamo.CaptureOptions(strict=True, recompile_limit=limit)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for n in (12, 30, 17):
        torch.testing.assert_close(compiled(torch.arange(4.0), n), program(torch.arange(4.0), n))
    stats = owner_of(compiled).stats
    assert not stats.fallbacks and stats.graphs <= limit, stats


def keeps_until_none_is_left(scores: torch.Tensor) -> Any:
    kept: list[Any] = []
    while scores.numel() > 0:
        kept.append(scores[0].item())
        scores = scores[1:][scores[1:] > 0.0]
    return torch.tensor(kept), kept


def stacks(parts: list[torch.Tensor]) -> Any:
    y = parts[0] * 2
    for part in parts:
        y = y + part
    return torch.stack(parts) + y, len(parts)


def appends_and_joins(parts: list[torch.Tensor]) -> Any:
    parts.append(parts[0] + 1)
    return torch.cat(parts).sum(), [part * 2 for part in parts]


@pytest.mark.parametrize("program", [keeps_until_none_is_left, stacks, appends_and_joins])
def test_lists_that_are_read_at_any_length_leave_no_function_to_eager(program: Any) -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for n in (3, 5, 12, 4, 7, 6, 1, 9, 2, 14, 8):
        x = torch.arange(1.0, n + 1)
        given = [x.clone() if program is keeps_until_none_is_left else list(x.unbind()) for _ in range(2)]
        if program is appends_and_joins:
            given = [[part.reshape(1) for part in parts] for parts in given]
        torch.testing.assert_close(compiled(given[0]), program(given[1]))
        torch.testing.assert_close(given[0], given[1])
    assert not owner_of(compiled).stats.fallbacks, TOTAL.events


@pytest.mark.parametrize("fails", ["raises", "refuses the number", "breaks and raises"])
def test_a_call_raises_behind_the_length_of_a_list_that_grows(fails: str) -> None:
    log: list[Any] = []

    def program(x: torch.Tensor, n: int) -> Any:
        log.append(len(log) % 4)
        if n:
            return x + len(log)
        if fails == "breaks and raises":
            print(end="")
        if fails == "refuses the number":
            return None + len(log)  # type: ignore[operator]
        raise KeyError(len(log))

    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for run, n in enumerate((1, 1, 1, 0, 1, 0, 0, 1)):
        if n:
            assert torch.equal(compiled(torch.ones(2), n), torch.full((2,), 2.0 + run))
        else:
            with pytest.raises((TypeError, KeyError), match=f"NoneType|^{run + 1}$"):
                compiled(torch.ones(2), n)
        assert log == [at % 4 for at in range(run + 1)]
