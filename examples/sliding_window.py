"""A language model with attention in a sliding window: its own score and mask functions, compiled into the kernels.

    python examples/sliding_window.py

Each token looks at the few before it in its own document, with a penalty by distance that is learnt for each head
(`flex_attention`, grouped heads). The model is trained compiled, as one graph, beside one that computes all scores by
plain operators: the losses are the same. On a GPU the attention is one kernel forward and two backward, and looks at no
block that the mask leaves out; on the CPU all scores are computed, in the same graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchcompile

Tensor = torch.Tensor
WINDOW, HEADS, SHARED, HEAD = 24, 4, 2, 16
WIDTH, LENGTH, WORDS = HEADS * HEAD, 160, 64

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, document: Tensor) -> Tensor:
    """By flex_attention."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < WINDOW) & (document[i] == document[j])

    def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - F.softplus(slopes[h]) * (i - j)

    blocks = create_block_mask(seen, None, None, LENGTH, LENGTH, q.device, 32)
    return flex_attention(q, k, v, by_distance, blocks, enable_gqa=True)


def in_full(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, document: Tensor) -> Tensor:
    """The same by plain operators on all scores."""
    k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (k, v))
    line = torch.arange(LENGTH, device=q.device)
    far = line[:, None] - line
    seen = (far >= 0) & (far < WINDOW) & (document[:, None] == document)
    scores = q @ k.mT / math.sqrt(HEAD) - F.softplus(slopes)[:, None, None] * far
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.attend = attend
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.enter = nn.Linear(WIDTH, (HEADS + 2 * SHARED) * HEAD)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.slopes = nn.Parameter(torch.linspace(-4, 0, HEADS))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        parts = self.enter(self.first(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = parts.split((HEADS, SHARED, SHARED), 1)
        x = x + self.leave(self.attend(q, k, v, self.slopes, document).transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    """Two blocks between an embedding and its transpose."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))

    def forward(self, words: Tensor, document: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, document)
        logits = x[:, :-1] @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def train(model: nn.Module, steps: int = 8) -> list[float]:
    """The losses of a few steps on words that come again within the window."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    draw = torch.Generator().manual_seed(1)
    document = torch.arange(LENGTH) // 64
    losses = []
    for _ in range(steps):
        words = torch.randint(WORDS, (2, 10), generator=draw).repeat(1, LENGTH // 10)
        loss = model(words, document)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains both, and compares the losses."""
    torch.manual_seed(0)
    full, blocks = Model(in_full).double(), Model(in_blocks).double()
    blocks.load_state_dict(full.state_dict())
    compiled = torchcompile.compile(blocks, fullgraph=True)
    begun = time.perf_counter()
    ours, wanted = train(compiled), train(full)
    print("loss, compiled:", *(f"{loss:.4f}" for loss in ours))
    print("loss, in full: ", *(f"{loss:.4f}" for loss in wanted))
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)
    report = torchcompile.report()
    print(f"{report.captured} graph, {len(report.events)} events, {time.perf_counter() - begun:.1f} s with compiling")
    assert report.captured == 1 and not report.breaks and not report.fallbacks


if __name__ == "__main__":
    main()
