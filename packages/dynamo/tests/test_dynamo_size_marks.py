"""What users promise of sizes: symbols at once, constants for ever, ranges that hold or are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo import CaptureOptions, mark_dynamic, mark_static, maybe_mark_dynamic


def marked(tensor: torch.Tensor, mark: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    mark(tensor, *args, **kwargs)
    return tensor


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.shape[0]


def compiles(calls: list[torch.Tensor], function: Callable[..., Any] = scaled, **options: Any) -> int:
    """Graphs given to the back end over these calls, each of which gives what eager gives."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torchdynamo.optimize(backend, options=CaptureOptions(strict=True, **options))(function)
    for x in calls:
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
    return len(graphs)


def test_marked_sizes_are_symbols_at_once() -> None:
    dynamic = [marked(torch.ones(n, 2), mark_dynamic, 0) for n in (3, 5, 8, 100)]
    assert compiles(dynamic) == 1
    assert compiles(dynamic, dynamic=False) == 1  # the user's word counts more
    assert compiles([marked(torch.ones(2, n), mark_dynamic, -1) for n in (3, 5, 8)], lambda x: x * 2) == 1
    assert compiles([marked(torch.ones(n, n + 1), mark_dynamic, (0, 1)) for n in (3, 5, 8)]) == 1
    maybe = [marked(torch.ones(n, 2), maybe_mark_dynamic, 0) for n in (3, 5, 8, 100)]
    assert compiles(maybe) == 1
    assert compiles(maybe, dynamic=False) == 4  # nothing was promised


def test_static_sizes_are_constants() -> None:
    static = [marked(torch.ones(n, 2), mark_static, 0) for n in (3, 5, 8)]
    assert compiles(static) == 3 and compiles(static, dynamic=True) == 3
    assert compiles([marked(torch.ones(n, 2), mark_static) for n in (3, 5, 8)], dynamic=True) == 3
    both = [marked(marked(torch.ones(n, 2), mark_dynamic, 0), mark_static, 0) for n in (3, 5, 8)]
    assert compiles(both) == 3  # the last word counts


def needs_four(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 4:
        return x + 1
    return x - 1


def at_most_ten(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.shape[0] <= 10 else x - 1


def test_a_program_that_fixes_a_marked_size_is_an_error() -> None:
    line = needs_four.__code__.co_firstlineno + 1
    told = rf"x.*can only be 4.*\n.*{__file__}:{line} in needs_four\n.*what to do"
    with pytest.raises(torchdynamo.SizeNotDynamic, match=told):
        compiles([marked(torch.ones(4, 2), mark_dynamic, 0)], needs_four)
    weight = torch.ones(4)
    with pytest.raises(torchdynamo.SizeNotDynamic, match="can only be 4"):
        compiles([marked(torch.ones(4), mark_dynamic, 0)], lambda x: x + weight)
    assert compiles([marked(torch.ones(n, 2), maybe_mark_dynamic, 0) for n in (4, 5, 6)], needs_four) == 2
    assert compiles([marked(torch.ones(n, 2), mark_dynamic, 0) for n in (5, 6, 9)], needs_four) == 1  # "not 4"
    assert compiles([marked(torch.ones(n, 2), mark_dynamic, 0) for n in (5, 6, 12)], at_most_ten) == 2


def test_a_promised_range_is_served_by_one_version_or_is_an_error() -> None:
    ranged = [marked(torch.ones(n, 2), mark_dynamic, 0, min=2, max=10) for n in (3, 10, 2, 7)]
    assert compiles(ranged, at_most_ten) == 1
    with pytest.raises(torchdynamo.SizeNotDynamic, match="cannot be 11, because the program relies on"):
        compiles([marked(torch.ones(3, 2), mark_dynamic, 0, max=11)], at_most_ten)
    with pytest.raises(torchdynamo.SizeNotDynamic, match="cannot be 2"):
        compiles([marked(torch.ones(30, 2), mark_dynamic, 0, min=2)], at_most_ten)
    beyond = [marked(torch.ones(3, 2), mark_dynamic, 0, 2, 10), torch.ones(11, 2), torch.ones(9, 2)]
    assert compiles(beyond) == 2  # the version of the range takes no other size


def test_a_promise_that_the_tensor_breaks_itself() -> None:
    x = torch.ones(5, 1)
    for arguments, message in (
        ((0, 6), "the size at dim 0 is 5, not within min=6"),
        ((0, 2, 4), "the size at dim 0 is 5, not within min=2, max=4"),
        ((0, 9, 3), "min=9 is above max=3"),
        ((0, 0, 1), "max=1: sizes below 2"),
        ((1,), "the size at dim 1 is 1: sizes below 2 are not symbolic; use maybe_mark_dynamic"),
    ):
        with pytest.raises(ValueError, match=message):
            mark_dynamic(x, *arguments)
    maybe_mark_dynamic(x, 1)
    assert compiles([x, marked(torch.ones(5, 2), maybe_mark_dynamic, 1)], lambda t: t * 2) == 2
    for mark in (mark_dynamic, mark_static, maybe_mark_dynamic):
        for dim in (2, -3, (0, 2)):
            with pytest.raises(IndexError, match="of a tensor with 2 dimensions"):
                mark(x, dim)


def torch_mark(x: torch.Tensor, dim: int, **bounds: int) -> None:
    torch._dynamo.mark_dynamic(x, dim, **bounds)


@pytest.mark.parametrize("mark", [mark_dynamic, torch_mark], ids=["ours", "torch's"])
@pytest.mark.parametrize("sizes", [(0, 3, 1, 9, 0, 40), (1, 0, 5, 1, 3), (7, 0, 1, 2, 0)], ids=str)
def test_sizes_zero_and_one_within_a_promised_range_have_versions_of_their_own(
    mark: Callable[..., None], sizes: tuple[int, ...]
) -> None:
    """What is compiled for a range decides as for sizes of at least two: an empty tensor is no case of it."""

    def program(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == 0:
            return t.sum(0) - 1
        return t.sum(0) * (2 if t.shape[0] == 1 else 3)

    inputs = [marked(torch.ones(n, 2), mark, 0, min=0, max=64) for n in sizes]
    assert compiles(inputs, program) == 3
