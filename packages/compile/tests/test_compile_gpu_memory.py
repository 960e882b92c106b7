"""What a GPU holds at the peak of a step, counted without one, in tensors of the program's kind."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from counted_memory import Peak, memory_of_step
from torch import nn


class Out(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Head(nn.Module):
    """A classifier over a vocabulary: the scores are returned beside the loss, and the caller may write to them."""

    def __init__(self, words: int, width: int = 256, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=bias)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Out:
        logits = self.head(self.norm(x))
        return Out(F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1)), logits)


def as_large(peak: Peak, nbytes: int) -> int:
    """How many pieces are about as large as this, or larger."""
    return sum(piece.nbytes > 0.95 * nbytes for piece in peak.pieces)


@pytest.mark.parametrize("words", [2003, 2048])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_are_held_twice_in_training(words: int, autocast: bool, bias: bool) -> None:
    """As the caller's, and as what the backward reads and writes the gradient over. (The products are large enough for
    odd rows to have margins, of what is kept and of the gradient.)"""
    net = Head(words, bias=bias)
    x, labels = torch.randn(8, 512, 256), torch.randint(0, words, (8, 512))
    peaks = memory_of_step(net, (x, labels), {}, True, autocast)
    scores = 8 * 512 * words * (2 if autocast else 4)
    for kind, peak in peaks.items():
        assert as_large(peak, scores) <= 2, f"{kind}: {peak}"


def test_an_image_in_another_order_is_not_kept_beside_the_image() -> None:
    layers = (nn.Conv2d(3 if first else 16, 16, 3, 1, 1) for first in (True, False, False))
    net = nn.Sequential(*(m for layer in layers for m in (layer, nn.BatchNorm2d(16), nn.ReLU())), nn.Flatten())
    image = torch.randn(64, 3, 128, 128)
    peaks = memory_of_step(net, (image,), {}, True, autocast=False)
    same = [piece for piece in peaks["backward"].pieces if piece.nbytes == image.nbytes]
    assert [piece.what.split()[0] for piece in same] == ["input"], str(peaks["backward"])


@pytest.mark.parametrize("autocast", [False, True])
def test_what_was_kept_is_freed_before_a_gradient_as_large_is_made(autocast: bool) -> None:
    """The gradient of a layer's weight reads the activation for the last time, that of its input is as large: the
    backward holds no more of that size than was kept for it."""
    layer = lambda: nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64), nn.LayerNorm(64))
    net = nn.Sequential(*(layer() for _ in range(3)))
    peaks = memory_of_step(net, (torch.randn(4096, 64),), {}, True, autocast)
    hidden = 4096 * 1024 * (2 if autocast else 4)
    kept, held = (as_large(peaks[kind], hidden) for kind in ("forward", "backward"))
    assert held <= kept, str(peaks["backward"])


class Embedded(nn.Module):
    """Returns what it begins with, as models do that return all hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(50, 256), nn.Linear(256, 256), nn.Linear(256, 2048)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.table(ids)
        return self.head(self.layer(first).relu()), first


def test_what_inputs_alone_make_is_not_held_while_something_else_needs_the_most() -> None:
    ids = torch.randint(0, 50, (16, 512))
    (peak,) = memory_of_step(Embedded(), (ids,), {}, False, autocast=False).values()
    hidden = ids.numel() * 256 * 4
    assert as_large(peak, hidden) == 2, str(peak)  # the scores and what they are computed from
