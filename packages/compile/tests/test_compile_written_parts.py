"""Tensors that are written part by part, some of it copied from what was written before: drawn programs, bit by bit as in
eager, and circular borders as one kernel."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from primtorch.ledger import LEDGER, Effect, of

Tensor = torch.Tensor
Write = tuple[int, int, int, int, int]  # dim, start, length, and where what is copied begins; -1: the input; doubled
SIDE = 12
SIZES = ((SIDE, SIDE + 1), (SIDE + 3, SIDE + 2), (SIDE + 9, SIDE + 14))
# What is written from the back begins within what is written in front of it at the first size, and behind it at others.
MEETING: list[Write] = [(1, 0, 6, 2, 1), (0, 4, 6, 6, 1), (0, 0, 6, -1, 1)]


def drawn(draw: random.Random) -> list[Write]:
    writes: list[Write] = []
    for _ in range(draw.randint(2, 6)):
        dim, length = draw.choice((0, 1, 1)), draw.randint(1, 6)
        start, source = (draw.randint(0, SIDE - length) for _ in range(2))
        writes.append((dim, start, length, -1 if draw.random() < 0.3 else source, draw.randint(1, 2)))
    return writes


def program(writes: list[Write], fresh: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Into fresh memory or into a copy, by places that count from the front, or from the back where a size tells them;
    what is written is of a fixed length, or of all but so much."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        made = torch.zeros_like(x) if fresh else y.clone()
        for number, (dim, start, length, source, factor) in enumerate(writes):
            more = x.shape[dim] - SIDE
            back, length = (more, length) if number % 2 else (0, length + (more if number % 4 == 2 else 0))
            taken = (x if source < 0 else made).narrow(dim, start if source < 0 else source + back, length)
            made.narrow(dim, start + back, length).copy_(taken * factor)
        return made * 2 + x - y

    return run


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
def test_drawn_writes(dynamic: bool) -> None:
    first = random.randrange(2**31)
    draws = {seed: random.Random(seed) for seed in range(first, first + 12)}
    cases = [(seed, drawn(draw), draw.random() < 0.5) for seed, draw in draws.items()]
    for seed, writes, fresh in (*cases, (first, MEETING, False), (first, MEETING, True)):
        generator, function = torch.Generator(), program(writes, fresh)
        torchcompile.reset()
        compiled = torchcompile.compile(function, fullgraph=True, dynamic=True if dynamic else None)
        for rows, columns in SIZES if dynamic else SIZES[:1]:
            found = []
            for call in (compiled, function):
                generator.manual_seed(seed)
                x, y = (torch.randn(rows, columns, generator=generator).requires_grad_() for _ in range(2))
                result = call(x, y)
                steps = torch.arange(result.numel()).view(result.shape)
                grads = torch.autograd.grad((result * steps).sum(), (x, y), allow_unused=True)
                found.append([result, *grads])
            for ours, theirs in zip(*found, strict=True):
                assert (ours is None) == (theirs is None), f"seed {seed}: {writes}"
                if theirs is not None:
                    torch.testing.assert_close(
                        ours, theirs, rtol=0, atol=0, msg=lambda m: f"seed {seed}: {writes}: {m}"
                    )  # noqa: B023


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("last", [False, True], ids=["by rows", "channels last"])
def test_circular_borders_are_one_kernel(last: bool, dynamic: bool) -> None:
    def border(x: Tensor) -> Tensor:
        return F.pad(x, (2, 1, 3, 2), mode="circular")

    for dtype in (torch.float32, torch.bfloat16):
        torchcompile.reset()
        compiled = torchcompile.compile(border, fullgraph=True, dynamic=True if dynamic else None)
        for side in (9, 17) if dynamic else (9,):
            x = torch.randn(2, 70, side, side + 2).to(dtype)  # channels beyond one block of a tile
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            found, wanted = compiled(x), border(x)
            assert found.stride() == wanted.stride() and torch.equal(found, wanted)
        assert torchcompile.report().kernels == 1, torchcompile.report()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 4),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "means of channels in groups": lambda x: x.unflatten(1, (4, -1)).mean((2, 3, 4)),
    "a norm of images": lambda x: x / x.square().sum((1, 2, 3), keepdim=True).sqrt(),
    "adaptive averages": lambda x: F.adaptive_avg_pool2d(x, 3),
}


@pytest.mark.parametrize("last", [False, True], ids=["by rows", "channels last"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_short_and_long_rows_of_symbolic_sizes(name: str, last: bool) -> None:
    """A sum for each place of a row, in blocks of rows and of places: of fewer and of more of both."""
    seed = random.randrange(2**31)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    compiled = torchcompile.compile(SUMS[name], fullgraph=True, dynamic=True)
    for channels in (8, 4 * draw.randint(3, 40), 4 * draw.choice((64, 65, 129))):
        height, width = draw.randint(3, 9), draw.randint(4, 40)
        x = torch.randn(2, channels, height, width, generator=generator) + 1
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        found, eager, exact = compiled(x), SUMS[name](x), SUMS[name](x.double())
        unit = torch.finfo(torch.float32).eps * max(float(exact.abs().max()), 1.0)
        bound = 2 * float((eager.double() - exact).abs().max()) + 4 * unit
        assert float((found.double() - exact).abs().max()) <= bound, f"seed {seed}: {tuple(x.shape)}"
        assert found.stride() == eager.stride(), f"seed {seed}: {tuple(x.shape)}"


def test_more_rows_are_written_than_python_has_frames() -> None:
    """Each write stands on the one before: who looks back through them must not call itself for each."""
    rows = sys.getrecursionlimit() + 100

    def program(x: Tensor) -> Tensor:
        written = torch.zeros_like(x)
        for row in range(rows):
            written[row : row + 1] = x[row : row + 1] * (row % 7)
        return written

    LEDGER.clear()
    x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
    found = torchcompile.compile(program, fullgraph=True)(x)
    found.sum().backward()
    assert (
        torch.equal(found, program(x))
        and x.grad is not None
        and torch.equal(x.grad[:, 0], torch.arange(rows).double() % 7)
    )
    assert not of(LEDGER.events, Effect.FALLBACK)
