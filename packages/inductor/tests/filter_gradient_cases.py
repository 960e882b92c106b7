"""Depthwise convolutions whose filters' gradients are sums of ours: drawn at random, for tests by structure and value."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Pair = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A convolution by a filter for each channel, and which of its gradients are asked for beside the filters'."""

    batch: int
    channels: int
    size: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    image: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float16
    multiplier: int = 1
    rows: bool = False  # images by rows, rather than channels-last
    sliced: bool = False  # images that are a part of larger ones
    outlier: bool = False  # an infinity of the image, which belongs to few of the sums

    @property
    def made(self) -> Pair:
        """The size of the result."""
        pairs = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        high, wide = ((size + 2 * pad - gap * (k - 1) - 1) // step + 1 for size, k, step, pad, gap in pairs)
        return high, wide

    def inputs(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The gradient, the image and the filters."""
        draw = torch.Generator().manual_seed(0)
        dense = torch.contiguous_format if self.rows else torch.channels_last

        def images(channels: int, size: Pair) -> Tensor:
            made = torch.randn(self.batch, channels, *size, generator=draw).to(self.dtype).to(dtype or self.dtype)
            return made.contiguous(memory_format=dense)

        filters = torch.randn(self.channels * self.multiplier, 1, *self.kernel, generator=draw)
        gradient = images(self.channels * self.multiplier, self.made)
        image = images(self.channels, self.size)
        if self.outlier:
            image[-1, 0, self.size[0] // 2, self.size[1] // 2] = float("inf")
        if self.sliced:
            image = torch.cat([image, image], 0)[self.batch :]
        return [gradient, image, filters.to(self.dtype).to(dtype or self.dtype)]

    def program(self, gradient: Tensor, image: Tensor, filters: Tensor) -> tuple[Tensor, ...]:
        """The gradients that are asked for."""
        if self.sliced:
            image = torch.cat([image, image], 0)[self.batch :]
        settings = self.stride, self.padding, self.dilation, False, [0, 0], self.channels
        wanted = [self.image, True, self.bias]
        found = torch.ops.aten.convolution_backward(gradient, image, filters, [filters.shape[0]], *settings, wanted)
        return tuple(part for part, asked in zip(found, wanted, strict=True) if asked)


def drawn(draw: random.Random) -> Case:
    """Any convolution that kernels of ours may be made for."""
    pair = lambda low, high: (draw.randint(low, high), draw.randint(low, high))  # noqa: E731
    kernel = draw.choice([(3, 3), (5, 5), (3, 3), (5, 5), (1, 3), (4, 2), (2, 5)])
    dilation = draw.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    padding = pair(0, 4)
    least = [gap * (k - 1) + 1 for gap, k in zip(dilation, kernel, strict=True)]
    size = tuple(max(1, n, low - 2 * pad) for n, low, pad in zip(pair(1, 15), least, padding, strict=True))
    return Case(
        draw.choice([0, 1, 1, 2, 3, 5]),
        draw.choice([1, 3, 8, 12, 20, 72]),
        (size[0], size[1]),
        kernel,
        draw.choice([(1, 1), (2, 2), (1, 2), (3, 1)]),
        padding,
        dilation,
        draw.random() < 0.3,
        draw.random() < 0.3,
        draw.choice([torch.float16, torch.bfloat16]),
        sliced=draw.random() < 0.2,
    )


CASES: dict[str, Case] = {
    "three by three": Case(2, 8, (9, 14), (3, 3), padding=(1, 1)),
    "by two": Case(2, 8, (10, 14), (3, 3), (2, 2), (1, 1)),
    "five by five": Case(3, 24, (7, 7), (5, 5), padding=(2, 2), image=True),
    "five by five, by two": Case(2, 24, (14, 14), (5, 5), (2, 2), (2, 2), bias=True),
    "with a bias": Case(2, 20, (6, 8), (3, 3), padding=(1, 1), bias=True, image=True),
    "the bias alone beside": Case(2, 20, (6, 8), (3, 3), padding=(1, 1), bias=True),
    "spread": Case(2, 16, (9, 11), (3, 3), (2, 1), (2, 3), (2, 3)),
    "one column": Case(4, 16, (9, 1), (3, 3), padding=(1, 1)),
    "many lines": Case(16, 12, (13, 10), (3, 3), padding=(1, 1)),
    "a part of larger images": Case(2, 8, (6, 6), (3, 3), padding=(1, 1), sliced=True),
    "an infinity": Case(2, 8, (7, 15), (3, 3), padding=(1, 1), outlier=True),
    "in bfloat16": Case(2, 72, (14, 14), (3, 3), padding=(1, 1), dtype=torch.bfloat16),
    "32 bits": Case(2, 8, (9, 14), (3, 3), padding=(1, 1), dtype=torch.float32),
}
"""With a kernel of ours."""

LEFT: dict[str, Case] = {
    "by rows": Case(2, 8, (9, 14), (3, 3), padding=(1, 1), rows=True),
    "two results of a channel": Case(2, 8, (9, 14), (3, 3), padding=(1, 1), multiplier=2),
    "many taps": Case(2, 8, (9, 14), (7, 7), padding=(3, 3)),
    "no images": Case(0, 8, (9, 14), (3, 3), padding=(1, 1), image=True, bias=True),
}
"""What is left to the library."""
