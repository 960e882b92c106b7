"""Tensors computed from plain numbers are known during capture: as sizes, indices, conditions and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo


def halves(x: torch.Tensor) -> Any:
    """A size computed by torch's own arithmetic on ints, as some models do."""
    count = torch.div(x.shape[0], 2, rounding_mode="trunc") - 1
    y = x.view(2, count + 1, -1)
    z = x.new_zeros((count + 1, 3)) + torch.div(7, 2)
    if count > 0:
        y = y + int(count)
    for i in range(count):
        y = y * (i + 2)
    return y, z, x[count], count, x[:count], x.sum() + count


def conditions(x: torch.Tensor) -> Any:
    length = torch.tensor(x.shape[0])
    found = [bool(length > 3), (length * 2).item(), float(length / 4), (-length).abs().tolist()]
    return x * found[1], found


def written(x: torch.Tensor) -> Any:
    n = torch.div(x.shape[0], 2, rounding_mode="trunc")
    n += 1
    return x + n, n


def shaped(x: torch.Tensor) -> Any:
    """The tensor itself is no size."""
    n = torch.tensor(4)
    made = n.view(1, -1), n.reshape(1), n.expand(2), torch.reshape(n, (1, 1)), n[None], n.repeat(2), n.new_zeros(2)
    return x * n.view(1, 1), made, torch.ones(n, n), torch.full((n,), 2.0)


def compared(x: torch.Tensor) -> Any:
    """Tensors whose sizes differ are not equal, whatever they hold."""
    return x * torch.equal(x, x[1:]), torch.equal(x, x[None]), x.equal(x.flatten()), torch.equal(x[:, :2], x)


PROGRAMS: list[Callable[..., Any]] = [halves, conditions, written, shaped, compared]


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_in_tensors(program: Callable[..., Any]) -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=options)(program)
    for rows in (6, 6, 8, 2, 10):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)


def test_a_number_that_was_written_to_is_not_known() -> None:
    def program(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        n = torch.div(x.shape[0], 2, rounding_mode="trunc")
        n += step
        return x[: int(n)]

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    x = torch.randn(6, 3)
    for step in (0, 1, -1):
        number = torch.tensor(step)
        torch.testing.assert_close(compiled(x, number), program(x, number), rtol=0, atol=0)
    (graph,) = [entry.info.graph for entry in compiled.entries]
    assert [node for node in graph.graph.nodes if node.target == "item"]  # read when the graph runs


def layers_dropped_at_random(x: torch.Tensor, probability: float) -> torch.Tensor:
    for _ in range(3):
        drawn = torch.rand([])
        if drawn < probability:
            continue
        x = x * 2 + torch.rand(3)
    return x


@pytest.mark.parametrize(("probability", "breaks"), [(0.0, 0), (0, 0), (1.0, 0), (-1.5, 0), (0.5, 1)])
def test_random_numbers_are_compared_with_a_bound_outside_of_their_range(probability: float, breaks: int) -> None:
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(layers_dropped_at_random)
    for seed in range(4):
        results = []
        for program in (layers_dropped_at_random, compiled):
            torch.manual_seed(seed)
            results += [program(torch.ones(3), probability), torch.rand(2)]
        torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)
    assert bool(torchdynamo.stats().breaks) is bool(breaks)


def test_a_draw_that_was_written_to_has_no_known_range() -> None:
    torchdynamo.reset()

    def program(x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand([])
        drawn -= 2
        return x + 1 if drawn < 0 else x - 1

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    torch.testing.assert_close(compiled(torch.ones(3)), program(torch.ones(3)), rtol=0, atol=0)
    assert [reason for _, reason, _ in torchdynamo.stats().breaks] == ["data_dependent_branch"]


def test_a_draw_that_nothing_uses_still_advances_the_generator() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.rand(5)
        torch.nn.functional.dropout(x, 0.5)
        return x + torch.rand(3)

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    torch.manual_seed(3)
    expected = program(torch.ones(3))
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(torch.ones(3)), expected, rtol=0, atol=0)


CONSTRUCTORS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor(2.0),
    "tensor of a list": lambda: torch.tensor([1, 2]),
    "tensor elsewhere": lambda: torch.tensor([1.0], device="meta"),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "scalar_tensor": lambda: torch.scalar_tensor(3),
    "full": lambda: torch.full((2,), 1.5),
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0]),
    "Tensor": lambda: torch.Tensor([1.0, 2.0]),
    "asarray": lambda: torch.asarray([True, False]),
}


@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constants_wherever_they_are_made(name: str, device: str, inference: bool) -> None:
    """In each grad mode and on each default device a program's constants are those of eager, in one graph."""
    make, x = CONSTRUCTORS[name], torch.ones(3)

    def program(x: torch.Tensor) -> Any:
        return x + 1, make()

    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=options)(program)
    with torch.inference_mode(inference), torch.device(device):
        try:
            expected = program(x)[1]
        except RuntimeError as error:
            pytest.skip(f"eager raises: {error}")
        for _ in range(2):
            ours = compiled(x)[1]
            assert (ours.shape, ours.dtype, ours.device) == (expected.shape, expected.dtype, expected.device)
            assert ours.is_inference() == expected.is_inference()
            assert ours.is_meta or torch.equal(ours, expected)
