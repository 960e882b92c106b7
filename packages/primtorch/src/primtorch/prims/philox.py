"""Philox4x32-10 on int64 tensors: the reference of the random prims.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). int64 arithmetic holds
32-bit words; a 32x32 bit product needs 64 unsigned bits, so it is put together from 16-bit halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of constant * word."""
    low_half = (constant & 0xFFFF) * word
    high_half = (constant >> 16) * word + (low_half >> 16)
    return high_half >> 16, ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)


def bits(seed: torch.Tensor, shape: Sequence[int], stream: int = 0, width: int = 32) -> torch.Tensor:
    """Word i mod 4 of block i // 4 at each row-major index i, int64 in [0, 2^32); of width 64: words 2i and 2i + 1."""
    if width == 64:
        pairs = bits(seed, (*shape, 2), stream)
        return pairs[..., 0] | (pairs[..., 1] << 32)
    count = 1
    for size in shape:
        count *= size
    index = torch.arange(-(-count // 4), dtype=torch.int64, device=seed.device)
    key = [seed & _MASK, (seed >> 32) & _MASK]
    zero = torch.zeros_like(index)
    words = [index & _MASK, index >> 32, zero + stream, zero]
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], words[0])
        high1, low1 = _multiply(_MULTIPLIERS[1], words[2])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(k + step) & _MASK for k, step in zip(key, _KEY_STEPS, strict=True)]
    return torch.stack(words, 1).reshape(-1)[:count].reshape(tuple(shape))


def digits(dtype: torch.dtype) -> int:
    """Bits of a floating-point type's significand, the hidden one included: a uniform number's random bits."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def uniform(
    seed: torch.Tensor, shape: Sequence[int], stream: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """In [0, 1) with as many random bits as the dtype has digits: each multiple of 2^-digits is as likely."""
    kept, width = digits(dtype), 64 if dtype is torch.float64 else 32
    high = (bits(seed, shape, stream, width) >> (width - kept)) & ((1 << kept) - 1)
    return high.to(dtype) * 2.0**-kept
