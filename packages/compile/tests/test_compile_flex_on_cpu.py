"""flex_attention's kernels for the CPU: drawn sizes, types, layouts and functions beside float64; memory and threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from flex_programs import F16, F32, F64, Case, alibi, biased, causal, documents, relative, some_rows, window
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchcompile
from primtorch.ledger import REFUSED

# Units in the last place of the largest number, which an error may have beside twice eager's: scores are computed again.
ULPS = 8
BF16 = torch.bfloat16


def drawn(draw: random.Random) -> Case:
    """A call of any sizes."""
    keys_heads = draw.choice([1, 1, 2, 3])
    batch, heads = draw.randint(1, 2), keys_heads * draw.choice([1, 1, 2, 4])
    queries, keys = (draw.choice([1, 2, 15, 16, 17, 63, 64, 65, 96, 100, 130, 200]) for _ in range(2))
    head, of_value = (draw.choice([1, 3, 8, 16, 24, 32, 64, 80, 128, 136]) for _ in range(2))
    longest = max(queries, keys)
    score, tensors = draw.choice(
        [
            (None, list),
            (None, list),
            (alibi, lambda: [torch.linspace(0.1, 0.5, heads)]),
            (relative, lambda: [torch.linspace(-1, 1, 16)]),
            (lambda s, b, h, i, j, t, u: biased(s, 0, h, i, j, t, u), lambda: _bias(heads, queries, keys)),
        ]
    )
    mask = draw.choice([None, causal, window, some_rows, documents])
    if mask is documents and score is None:
        tensors = lambda: [torch.arange(longest) // 23]
    elif mask is documents:
        mask = causal
    if mask is not None and mask is not documents:
        plain = mask
        mask = lambda b, h, i, j, *more: plain(b, h, i, j)
    return Case(
        (batch, heads, queries, keys_heads, keys, head, of_value),
        score,
        mask,
        tensors,
        draw.choice([F32, F32, F64, BF16, F16]),
        draw.choice([16, 20, 32, 96, 128]),
        draw.choice([None, None, -0.05]),
        with_lse=draw.random() < 0.5,
    )


def _bias(heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, heads * queries * keys).view(1, heads, queries, keys), torch.tensor(0.5)]


class Turned(Case):
    """Heads beside each other in memory, as a projection gives them."""

    def inputs(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        q, k, v, *more = (t.detach() for t in super().inputs(dtype))
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        return [t.requires_grad_() if t.is_floating_point() else t for t in (*turned, *more)]


@pytest.mark.parametrize("number", range(12))
def test_drawn_calls(number: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    case = drawn(draw)
    case = Turned(**{name: getattr(case, name) for name in case.__dataclass_fields__}) if number % 2 else case
    told = f"seed {seed}: {case.shape}, {case.dtype}, blocks of {case.block}"
    compiled = torchcompile.compile(case.program(), fullgraph=True)
    found = case.run(compiled, F64 if case.dtype is F64 else None)
    made = [part.function for graph in torchcompile.report().graphs for part in graph.parts]
    assert not [event for event in torchcompile.report().events if event.effect in REFUSED], told
    for direction in ("forward", "queries", "keys"):
        assert any(f"attention_{direction}" in name for name in made), (told, made)
    # Of the inputs as they are, rounded to their type: what is judged is the computation. A half is computed in float32.
    dtype = F32 if case.dtype.itemsize == 2 else case.dtype
    eager, exact = _wider(case, dtype), _wider(case, F64)
    largest = max(float(t.detach().masked_fill(t.isinf(), 0).abs().max()) for t in exact)
    # A score's gradient is a difference, dO.V - dO.O, of numbers that no result shows. Where a query sees one key, O is V
    # and eager's difference is 0 to the bit; ours has the roundings of two sums in different orders. Measured over rows of
    # 136 products in float32: 2.8 ulps of the largest product as it is, 2.4 with dO.O in float64 (dO.V has them, too),
    # and 0 with dO.O added up in the tile product's order, which the kernel that computes it has not.
    between = max(largest, float(case.slopes_of_weights(exact[:1]).abs().max()))
    results = 1 + case.with_lse
    by_value = results + 2  # whose gradient is no difference
    noise = case.noise()  # of the gradients by what a function closes over, sums over all scores
    if dtype is not case.dtype:  # such sums of what is rounded to a half
        found, noise = found[: len(found) - len(noise)], []
    for place, (ours, theirs, right) in enumerate(zip(found, eager, exact, strict=False)):
        assert ours.shape == theirs.shape, told
        error, allowed = (_gap(t, right) for t in (ours, theirs.to(ours.dtype)))
        ulps = max(torch.finfo(t).eps for t in (case.dtype, ours.dtype)) * (
            largest if place < results or place == by_value else between
        )
        ulps *= max(1.0, noise[place - len(found)]) if place >= len(found) - len(noise) else 1
        if case.dtype is F64:  # eager's is the truth
            allowed = 1e-9 * largest + 1e-11
        assert error <= 2 * allowed + ULPS * ulps, f"{told}: {error} in {place} beside eager's {allowed}, {ulps} an ulp"


def _wider(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The results in a type of inputs that have been rounded to their own."""
    inputs = [t.detach() for t in case.inputs()]

    class Given(Case):
        def inputs(self, unused: torch.dtype | None = None) -> list[torch.Tensor]:
            wide = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
            return [t.requires_grad_() if t.is_floating_point() else t for t in wide]

    given = Given(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    return given.run(given.judged)


def _gap(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, of what is finite; where one is infinite, the other is, too."""
    found = found.to(F64)
    assert torch.equal(found.isinf(), right.isinf()) and not found.isnan().any()
    gap = (found - right).masked_fill(right.isinf(), 0)
    return float(gap.abs().max()) if gap.numel() else 0.0


def test_lengths_that_vary() -> None:
    def program(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        blocks = create_block_mask(window, None, None, q.shape[2], k.shape[2], "cpu", 32)
        found: Any = flex_attention(q, k, k, lambda s, b, h, i, j: s + slopes[h] * (i - j), blocks)
        return found  # type: ignore[no-any-return]

    compiled = torchcompile.compile(program, fullgraph=True)
    slopes = torch.tensor([0.5, -0.1], dtype=F64, requires_grad=True)
    for queries, keys in ((70, 70), (90, 100), (33, 64), (200, 130), (5, 3)):
        case = Case((1, 2, queries, 2, keys, 16, 16), lambda s, b, h, i, j, t: s + t[h] * (i - j), _window)
        q, k, _ = (t.detach().requires_grad_() for t in case.inputs(F64))
        for run in (compiled, lambda q, k, t: case.judged(q, k, k, t)):
            result = run(q, k, slopes)
            gradients = torch.autograd.grad(result.square().sum(), (q, k, slopes))
            if run is compiled:
                found = [result, *gradients]
        for ours, right in zip(found, [result, *gradients], strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-11)
    assert torchcompile.report().captured <= 4


def _window(b: Any, h: Any, i: Any, j: Any, *more: torch.Tensor) -> Any:
    return window(b, h, i, j)


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_grows_with_the_length(gradient: bool) -> None:
    """Scores are never all there."""
    peaks = []
    for length in (256, 1024):
        compiled = torchcompile.compile(lambda q, k, v: flex_attention(q, k, v, alike), fullgraph=True)
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=gradient) for _ in range(3))
        result = compiled(q, k, v)
        if gradient:
            result.sum().backward()
        peaks.append(sum(graph.memory.peak for graph in torchcompile.report().graphs))
        torchcompile.reset()
    assert peaks[1] <= 4.2 * peaks[0] and peaks[1] < 1024 * 1024 * 4


def alike(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * 0.5


def test_threads_give_the_same_bits() -> None:
    """Gradients of what the functions close over are added up in one order."""
    table = torch.linspace(-1, 1, 16, requires_grad=True)
    compiled = torchcompile.compile(
        lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: relative(s, b, h, i, j, table)), fullgraph=True
    )
    q = torch.randn(2, 2, 150, 24, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4, 4, 3):
            torch.set_num_threads(threads)
            found.append(torch.autograd.grad(compiled(q).square().sum(), (q, table)))
    finally:
        torch.set_num_threads(before)
    for gradients in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], gradients, strict=True))


@pytest.mark.expected_eager(...)
def test_a_place_outside_of_a_table() -> None:
    table = torch.linspace(-1, 1, 16)
    compiled = torchcompile.compile(
        lambda q, rows: flex_attention(q, q, q, lambda s, b, h, i, j: s + table[rows[i]]), fullgraph=True
    )
    q = torch.randn(1, 1, 40, 16)
    compiled(q, torch.arange(40) % 16)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        compiled(q, torch.arange(40))


def _scores_beside_tables(*given: torch.Tensor) -> torch.Tensor:
    """The attention that `test_tables_whose_sizes_vary` compiles, by hand."""
    q, k, v, slopes, table = given
    places = torch.arange(q.shape[2])
    away = places[:, None] - places
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + slopes[None, :, :1, None] * away + table[None, :, :, None]
    return torch.softmax(torch.where((away >= 0) & (away < 5), scores, -torch.inf), -1) @ v


@pytest.mark.parametrize("gradient", [False, True])
def test_tables_whose_sizes_vary(gradient: bool) -> None:
    """The sizes of what a score function closes over are the kernel's own numbers, though no other size is theirs."""

    def program(q: Any, k: Any, v: Any, slopes: Any, table: Any) -> Any:
        score = lambda s, b, h, i, j: s + slopes[h, 0] * (i - j) + table[h, i]
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < 5), None, None, q.shape[2], q.shape[2], device="cpu"
        )
        return flex_attention(q, k, v, score, mask)

    torchcompile.reset()
    compiled = torchcompile.compile(program, fullgraph=True, dynamic=True)
    for heads, length in ((2, 16), (2, 23), (3, 70)):
        shapes = (*((1, heads, length, 8),) * 3, (heads, 2), (heads, length))
        given = [torch.randn(shape, dtype=F64).requires_grad_(gradient) for shape in shapes]
        found, expected = compiled(*given), _scores_beside_tables(*given)
        torch.testing.assert_close(found, expected)
        if gradient:
            pairs = (torch.autograd.grad(out.pow(2).sum(), given) for out in (found, expected))
            for a, b in zip(*pairs, strict=True):
                torch.testing.assert_close(a, b)
    assert not torchcompile.report().surprises
