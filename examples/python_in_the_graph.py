"""A training loss in ordinary Python, compiled as one graph: sentences of several lengths in one batch.

    python examples/python_in_the_graph.py

The batch is one tensor of all tokens and one of lengths. The loss reads the lengths as Python numbers, splits the
tokens by them, keeps its statistics in a dataclass, asserts what has to hold of the data, and sums over a distribution:
eager and compiled, forward and backward, for batches of other lengths without another compilation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import torchcompile


@dataclasses.dataclass
class Statistics:
    """What one batch adds up to."""

    loss: torch.Tensor
    tokens: int = 0


class Reader(nn.Module):
    """Gives each sentence a mean and a deviation, from a softmax over its own tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, 1)
        self.value = nn.Linear(features, features)
        self.head = nn.Linear(features, 2)

    def forward(self, sentence: torch.Tensor) -> torch.distributions.Normal:
        weights = self.score(sentence).softmax(0)
        mean, spread = self.head((weights * self.value(sentence).tanh()).sum(0)).unbind()
        return torch.distributions.Normal(mean, nn.functional.softplus(spread) + 1e-3)


def sentences(tokens: torch.Tensor, lengths: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of a batch with their lengths."""
    counts = lengths.tolist()
    yield from zip(counts, tokens.split(counts), strict=True)


def loss(reader: Reader, tokens: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> Statistics:
    """How unlikely the targets are. Tokens: (sum of lengths, features); targets: one for each sentence."""
    assert torch.isfinite(tokens).all(), "tokens that are no numbers"
    found = Statistics(tokens.new_zeros(()))
    for (count, sentence), target in zip(sentences(tokens, lengths), targets, strict=True):
        found.loss = found.loss - reader(sentence).log_prob(target)
        found.tokens += count
    found.loss = found.loss / len(targets)
    return found


def batch(lengths: list[int], features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randn(sum(lengths), features, dtype=torch.float64)
    return tokens, torch.tensor(lengths), torch.randn(len(lengths), dtype=torch.float64)


def step(
    of: Callable[..., Statistics], reader: Reader, given: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    found = of(reader, *given)
    return found.loss, found.tokens, list(torch.autograd.grad(found.loss, list(reader.parameters())))


def main() -> None:
    torch.manual_seed(0)
    features = 32
    reader = Reader(features).double()
    compiled = torchcompile.compile(loss)
    batches = [batch(lengths, features) for lengths in ([5, 9, 3, 7], [1, 2, 30, 4], [6, 6, 6, 6], [40, 1, 1, 8])]
    for given in batches:
        torch.testing.assert_close(step(compiled, reader, given), step(loss, reader, given), rtol=1e-9, atol=1e-12)
    report = torchcompile.report()
    assert report.clean, report
    times = []
    for run in (loss, compiled):
        began = time.perf_counter()
        for given in batches * 5:
            step(run, reader, given)
        times.append((time.perf_counter() - began) / len(batches) / 5 * 1e3)
    print(f"batches of {len(batches)} forms, {report.captured} graphs, no break")
    print(f"a step: eager {times[0]:.2f} ms, compiled {times[1]:.2f} ms")


if __name__ == "__main__":
    main()
