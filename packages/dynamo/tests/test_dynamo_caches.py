"""Functions with a cache: what the graph computes at each call is what the cache would have kept, or the graph ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

Tensor = torch.Tensor


@functools.lru_cache
def noise(n: int) -> Tensor:
    return torch.randn(n, dtype=torch.float64)


@functools.lru_cache
def filled(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.float64).uniform_()


@functools.cache
def table(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64).sin()


@functools.cache
def tables(n: int) -> tuple[Tensor, Tensor]:
    return table(n).cos(), torch.ones(n)


@functools.cache
def names(n: int) -> list[int]:
    return [n]


@functools.cache
def doubled(x: Tensor) -> Tensor:
    return x * 2


def reads_noise(x: Tensor) -> Any:
    return x + noise(3)


def reads_a_filled_one(x: Tensor) -> Any:
    return x + filled(3)


def writes_to_a_table(x: Tensor) -> Any:
    kept = table(3)
    kept.add_(1)
    return x + kept


def writes_to_a_view(x: Tensor) -> Any:
    tables(3)[0][1:].mul_(2)
    return x + tables(3)[0]


def hands_out_a_table(x: Tensor) -> Any:
    return x * 2, table(3)


def fills_a_list(x: Tensor) -> Any:
    names(3).append(len(names(3)))
    return x * len(names(3))


def asks_by_a_tensor(x: Tensor) -> Any:
    return doubled(WEIGHT) + x


WEIGHT = torch.ones(3, dtype=torch.float64)
CACHES = (noise, filled, table, tables, names, doubled)


def observed(program: Callable[[Tensor], Any]) -> list[Any]:
    for cache in CACHES:
        cache.cache_clear()
    torch.manual_seed(3)
    found = []
    for _ in range(3):
        found.append(program(torch.ones(2, 3, dtype=torch.float64)))
        with torch.no_grad():
            WEIGHT.add_(1)
    WEIGHT.fill_(1)
    return found


@pytest.mark.parametrize(
    "program",
    [reads_noise, reads_a_filled_one, writes_to_a_table, writes_to_a_view, hands_out_a_table, fills_a_list,
     asks_by_a_tensor],
)  # fmt: skip
def test_what_a_cache_keeps_between_calls_is_kept(program: Callable[[Tensor], Any]) -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    wanted, found = observed(program), observed(compiled)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)
    if program is hands_out_a_table:
        assert found[0][1] is found[1][1] is table(3)
    assert any("has a cache" in event.detail for event in torchdynamo.stats().events)


@functools.cache
def angles(n: int) -> Tensor:
    return table.__wrapped__(n)


def test_a_table_that_is_only_read_is_in_the_graph() -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True)

    @torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)
    def program(x: Tensor) -> Tensor:
        return x * angles(3) + float(angles(3) is angles(3))

    x = torch.randn(2, 3, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(program(x), x * angles(3) + 1)


def test_a_cache_of_the_program_s_own_is_one() -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True)

    def program(x: Tensor) -> Any:
        asked = []

        @functools.lru_cache(maxsize=2)
        def scaled(n: float) -> Tensor:
            asked.append(n)
            return x * n + torch.rand(3, dtype=x.dtype)

        first = scaled(1), scaled(2), scaled(1.0), scaled(3), scaled(3), scaled(2)
        told = scaled.cache_info()
        scaled.cache_clear()
        return (*first, scaled(2)), asked, told, scaled.cache_info()

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    results = []
    for run in (program, compiled):
        torch.manual_seed(0)
        results.append(run(torch.ones(3, dtype=torch.float64)))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[1][1:] == results[0][1:]
    for a in range(7):
        assert [results[1][0][a] is t for t in results[1][0]] == [results[0][0][a] is t for t in results[0][0]]
