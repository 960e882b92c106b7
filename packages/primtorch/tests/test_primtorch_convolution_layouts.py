"""Convolutions on the CPU, drawn: results and gradients lie as the library that eager chooses lays them out, in dims of
size 1 too."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from primtorch.fake import FakeMode

SEED = random.SystemRandom().randrange(1 << 40)
FORMATS = ("contiguous", "channels last", "permuted", "gapped", "sizes of one by other strides")
aten = torch.ops.aten


def in_format(t: torch.Tensor, name: str) -> torch.Tensor:
    rank = t.dim()
    if name == "permuted" or (name == "channels last" and rank == 3):
        return t.permute(0, *range(2, rank), 1).contiguous().permute(0, rank - 1, *range(1, rank - 1))
    if name == "channels last":
        return t.contiguous(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
    if name == "gapped":
        return torch.stack([t, t], -1)[..., 0]
    if name == "contiguous":
        return t.contiguous()
    return t.as_strided(
        t.shape, [1000 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    )


def drawn(draw: random.Random) -> tuple[list[torch.Tensor], tuple[object, ...]]:
    """Image and filters, and what else a convolution is given."""
    rank, transposed, dtype = draw.choice((1, 2, 2, 3)), draw.random() < 0.3, draw.choice(_DTYPES)
    groups = draw.choice((1, 1, 2, 4))
    inner, outer = groups * draw.choice((1, 2, 3)), groups * draw.choice((1, 2))
    sides = [draw.choice((1, 1, 3, 5)) if draw.random() < 0.3 else draw.choice((1, 3)) for _ in range(rank)]
    strides, dilation = [draw.choice((1, 1, 2)) for _ in range(rank)], [draw.choice((1, 1, 1, 2)) for _ in range(rank)]
    image = torch.randn(draw.choice((1, 2, 3, 17)), inner, *(draw.choice((1, 4, 7)) for _ in range(rank)), dtype=dtype)
    shape = (inner, outer // groups) if transposed else (outer, inner // groups)
    filters = torch.randn(*shape, *sides, dtype=dtype)
    padding = [d * (side - 1) // 2 for d, side in zip(dilation, sides, strict=True)]
    more = [draw.randrange(s) if transposed else 0 for s in strides]
    tensors = [in_format(t, draw.choice(FORMATS)) for t in (image, filters)]
    return tensors, (strides, padding, dilation, transposed, more, groups)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def eager_can(image: torch.Tensor, strides: list[int]) -> bool:
    """Whether eager computes it at all: oneDNN's gradient of the bfloat16 filters of volumes, with strides, writes
    beyond its memory (torch 2.13 on processors with instructions for bfloat16), and the process ends some time later."""
    return image.dtype is not torch.bfloat16 or image.dim() < 5 or max(strides) == 1


@pytest.mark.parametrize("part", range(4))
def test_results_and_gradients_lie_as_eagers(part: int) -> None:
    run = 0
    for number in itertools.count():
        draw = random.Random(f"{SEED} {part} {number}")
        torch.manual_seed(number)
        (image, filters), rest = drawn(draw)
        wanted = None, *rest, [True, True, False]
        if not eager_can(image, rest[0]):  # type: ignore[arg-type]
            continue
        try:
            result = aten.convolution.default(image, filters, None, *rest)
            gradient = in_format(torch.randn_like(result), draw.choice(FORMATS))
            expected = result, *aten.convolution_backward.default(gradient, image, filters, *wanted)[:2]
        except RuntimeError:  # sizes and strides that eager has no result for
            continue
        mode = FakeMode()
        with mode:
            fakes = [mode.from_tensor(t) for t in (image, filters, gradient)]
            found = (
                aten.convolution.default(*fakes[:2], None, *rest),
                *aten.convolution_backward.default(fakes[2], *fakes[:2], *wanted)[:2],
            )
        told = f"seed {SEED}, part {part}, number {number}: {image.dtype} {rest}, {image.stride()} {filters.stride()}"
        assert [t.stride() for t in found] == [t.stride() for t in expected], told
        run += 1
        if run == 100:
            break
