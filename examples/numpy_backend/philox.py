"""Philox4x32-10 on numpy: the random prims are defined by it, so every backend draws the same numbers."""

import math

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def bits(seed, shape, stream=0, width=32):
    if width == 64:
        pairs = bits(seed, (*shape, 2), stream)
        return pairs[..., 0] | pairs[..., 1] << 32
    count = math.prod(shape)
    block = np.arange(-(-count // 4), dtype=np.uint64)
    number = int(seed)
    key = [np.uint64(number & 0xFFFFFFFF), np.uint64(number >> 32 & 0xFFFFFFFF)]
    words = [block & _MASK, block >> _HALF, np.full_like(block, stream), np.zeros_like(block)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [second >> _HALF ^ words[1] ^ key[0], second & _MASK, first >> _HALF ^ words[3] ^ key[1], first & _MASK]
        key = [(k + np.uint64(step)) & _MASK for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack(words, 1).reshape(-1)[:count].reshape(shape).astype(np.int64)


def uniform(seed, shape, stream=0, dtype=np.float32):
    """As many random bits as the dtype's significand has digits."""
    digits, width = np.finfo(dtype).nmant + 1, 64 if dtype == np.float64 else 32
    high = bits(seed, shape, stream, width) >> (width - digits) & ((1 << digits) - 1)
    return high.astype(dtype) * dtype(2.0**-digits)
