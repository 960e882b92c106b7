"""Programs of flex_attention, and what they compute by plain operators: masks, scores, types and sizes in one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

Tensor = torch.Tensor
F16, F32, F64 = torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """Attention over `shape` (batch, heads, queries, key's heads, keys, head, value's head).

    Attributes:
        score, mask: of the program's further tensors, as functions of positions that broadcast.
        tensors: makes these.
        block: the size of a block of the mask.
        made_within: the block mask is made by the program itself.
    """

    shape: tuple[int, int, int, int, int, int, int]
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    tensors: Callable[[], list[Tensor]] = field(default=list)
    dtype: torch.dtype = F32
    block: int = 32
    scale: float | None = None
    made_within: bool = False
    with_lse: bool = False

    def inputs(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        batch, heads, queries, shared, keys, head, of_value = self.shape
        draw = torch.Generator().manual_seed(0)
        shapes = ((batch, heads, queries, head), (batch, shared, keys, head), (batch, shared, keys, of_value))
        made = [torch.randn(shape, generator=draw).to(self.dtype) for shape in shapes]
        found = [t.to(dtype or self.dtype) for t in made]
        found += [t.to(dtype) if dtype and t.is_floating_point() else t for t in self.tensors()]
        return [t.requires_grad_() if t.is_floating_point() else t for t in found]

    def program(self) -> Callable[..., Any]:
        """As a user writes it."""
        _, _, queries, _, keys, _, _ = self.shape

        def blocks(more: tuple[Tensor, ...]) -> Any:
            if self.mask is None:
                return None
            mask = lambda b, h, i, j: self.mask(b, h, i, j, *more)  # type: ignore[misc]
            return create_block_mask(mask, None, None, queries, keys, "cpu", self.block)

        made = None if self.made_within else blocks(tuple(self.tensors()))

        def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
            score = None if self.score is None else lambda s, b, h, i, j: self.score(s, b, h, i, j, *more)  # type: ignore[misc]
            mask = blocks(more) if self.made_within else made
            return flex_attention(q, k, v, score, mask, self.scale, True, self.with_lse)

        return run

    def scored(self, q: Tensor, k: Tensor, *more: Tensor) -> Tensor:
        """The scores by plain operators, in the inputs' type; of what is masked, -inf."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(-2, -1) * (self.scale or 1 / math.sqrt(q.shape[-1]))
        lines = [
            torch.arange(size).view([-1 if d == at else 1 for d in range(4)]) for at, size in enumerate(scores.shape)
        ]
        if self.score is not None:
            scores = self.score(scores, *lines, *more)
        if self.mask is not None:
            scores = torch.where(self.mask(*lines, *more), scores, -math.inf)
        return scores

    def judged(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        """The same by plain operators, in the inputs' type."""
        scores = self.scored(q, k, *more)
        highest = scores.detach().amax(-1, keepdim=True)
        highest = highest.masked_fill(highest.isinf(), 0)
        weights = (scores - highest).exp()
        total = weights.sum(-1, keepdim=True)
        out = weights / total.where(total > 0, 1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        lse = torch.where(total > 0, total.where(total > 0, 1).log() + highest, -math.inf).squeeze(-1)
        return (out, lse) if self.with_lse else out

    def noise(self, draws: int = 16) -> list[float]:
        """How wrong the gradients by the function's tensors are if each score's is wrong by its weight, up or down.

        A score's gradient is its weight times a difference, which is computed to some ulps; these gradients are sums of
        the scores', each by the function's own slope, a distance for instance. The largest of so many draws.
        """
        q, k, _, *more = self.inputs(F64)
        scores, wanted = self.scored(q, k, *more), [t for t in more if t.requires_grad]
        weights = scores.detach().softmax(-1).nan_to_num(0)  # a query without keys
        draw = torch.Generator().manual_seed(2)
        found = [0.0] * len(wanted)
        for _ in range(draws):
            wrong = weights * (torch.randint(0, 2, weights.shape, generator=draw) * 2 - 1)
            slopes = torch.autograd.grad(scores, wanted, wrong, retain_graph=True) if wanted else ()
            found = [max(most, float(slope.abs().max())) for most, slope in zip(found, slopes, strict=True)]
        return found

    def tangents(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The random weights of the results, in float64."""
        draw = torch.Generator().manual_seed(1)
        return [torch.randn(result.shape, generator=draw, dtype=F64) for result in results]

    def slopes_of_weights(self, results: Sequence[Tensor]) -> Tensor:
        """What the gradients of the scores are differences of: each weight's own slope, less the mean of its row's."""
        values = self.inputs(F64)[2].detach()
        tangent = self.tangents(results)[0]
        return tangent @ values.repeat_interleave(tangent.shape[1] // values.shape[1], 1).transpose(-2, -1)

    def run(self, program: Callable[..., Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Results, and the gradients of their sum by random weights."""
        inputs = self.inputs(dtype)
        results = program(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        total: Any = 0
        for result, weights in zip(results, self.tangents(results), strict=True):
            total = total + (result.masked_fill(result.isinf(), 0) * weights).sum()
        wanted = [t for t in inputs if t.requires_grad]
        return [*results, *torch.autograd.grad(total, wanted)]


def causal(b: Any, h: Any, i: Any, j: Any, *more: Tensor) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any, *more: Tensor) -> Any:
    return (i >= j) & (i - j < 20)


def documents(b: Any, h: Any, i: Any, j: Any, document: Tensor) -> Any:
    return (document[i] == document[j]) & (i >= j)


def alibi(s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Tensor) -> Any:
    return s + slopes[h] * (j - i)


def biased(s: Any, b: Any, h: Any, i: Any, j: Any, bias: Tensor, scale: Tensor) -> Any:
    return 5 * torch.tanh((s * scale + bias[0, h, i, j]) / 5)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Tensor) -> Any:
    return s + table[(i - j).clamp(-8, 7) + 8]


def some_rows(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Queries of the second block have no key."""
    return (i >= j) & ((i < 32) | (i >= 64))


def of_heads(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) | (h == 1) & (b == 0)


SMALL = (1, 2, 70, 2, 70, 16, 16)

CASES: dict[str, Case] = {
    "plain": Case((2, 2, 50, 2, 37, 16, 16)),
    "grouped": Case((1, 4, 40, 2, 48, 24, 40), with_lse=True),
    "causal": Case((2, 2, 64, 1, 64, 32, 32), mask=causal, with_lse=True),
    "window": Case((1, 2, 70, 1, 70, 64, 64), mask=window, dtype=F16),
    "documents": Case(SMALL, mask=documents, tensors=lambda: [torch.arange(70) // 23], dtype=F16, made_within=True),
    "alibi": Case(SMALL, alibi, lambda *a: causal(*a[:4]), lambda: [torch.tensor([0.5, 0.1])]),
    "bias": Case(SMALL, biased, tensors=lambda: [torch.linspace(-1, 1, 9800).view(1, 2, 70, 70), torch.tensor(0.5)]),
    "relative": Case(SMALL, relative, lambda *a: window(*a[:4]), lambda: [torch.linspace(-1, 1, 16)]),
    "empty rows": Case((1, 1, 96, 1, 96, 16, 16), mask=some_rows, with_lse=True),
    "of heads": Case((2, 2, 64, 2, 64, 16, 16), mask=and_masks(of_heads, causal)),
    "a negative scale": Case(SMALL, mask=causal, scale=-0.5),
    "a large head": Case((1, 1, 33, 1, 33, 256, 96), mask=causal),
}
