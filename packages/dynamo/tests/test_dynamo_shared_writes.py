"""A write to an input whose memory another input shares is done for real; what is around it stays captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchdynamo


def adds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.sin()
    b += 1
    return c + a.cos()


def copies(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.copy_(a[:2].exp())
    return a * 2


def sets_items(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:] = b.sum()
    return a + b.sum()


def writes_out(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.mul(a[:2], 3, out=b)
    return a.sum() + b


def _scale(t: torch.Tensor) -> torch.Tensor:
    t.mul_(2)
    return t.sin()


def in_a_call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _scale(b).sum() + a


def writes_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += 1
    c = b.sin()
    b -= 3
    return a + c.sum()


@pytest.mark.parametrize("program", [adds, copies, sets_items, writes_out, in_a_call, writes_both])
def test_a_write_to_shared_memory_splits_the_graph(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    seed = torch.seed()
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    for shares in (True, False, True):
        memory = torch.randn(4, dtype=torch.float64)
        twin = memory.clone()
        other = torch.randn(2, dtype=torch.float64)
        expected = program(twin, twin[:2] if shares else other.clone())
        result = compiled(memory, memory[:2] if shares else other)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda m: f"seed {seed}: {m}")
        torch.testing.assert_close(memory, twin, rtol=0, atol=0, msg=lambda m: f"seed {seed}: {m}")
    stats = torchdynamo.stats()
    assert not stats.fallbacks
    assert stats.graphs
    assert {found.reason for found in stats.break_details} == {"overlapping_inputs"}


def test_a_range_of_the_profiler_around_a_break_breaks_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("work"):
            y = x.sin()
            torchdynamo.graph_break()
            y = y.cos()
        return y + 1

    torchdynamo.reset()
    x = torch.randn(3)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    with torch.profiler.profile() as profile:
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
    assert [event.count for event in profile.key_averages() if event.key == "work"] == [2]
    stats = torchdynamo.stats()
    assert (stats.graphs, len(stats.break_details)) == (2, 1)


def unsqueezes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.unsqueeze_(0)
    return b + b.dim()


def transposes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = b * 2
    a.t_()
    return c.sum(0) + b.shape[0]


def there_and_back(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.unsqueeze_(0)
    b.unsqueeze_(0)
    c = a * b.dim()
    b.squeeze_(0)
    return c + a.dim()


@pytest.mark.parametrize("program", [unsqueezes, transposes, there_and_back])
def test_a_tensor_of_another_shape_has_it_under_each_of_its_names(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    for same in (False, True, False):
        results = []
        for function in (program, compiled):
            given = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
            other = given if same else given.clone()
            results.append((function(given, other).tolist(), given.shape, other.shape))
        assert results[1] == results[0], same
