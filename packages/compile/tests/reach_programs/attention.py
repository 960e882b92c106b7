"""Attention's functions and their kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .record import part

ATTENTION = "Attention"


def heads() -> list[tuple[Any, ...]]:
    return [tuple(torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3)) for _ in range(2)]


@part(ATTENTION, "scaled_dot_product_attention, causal", calls=heads)
def causal(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@part(ATTENTION, "with a mask and enable_gqa", calls=heads)
def grouped(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], mask, enable_gqa=True)


@part(ATTENTION, "sdpa_kernel", calls=heads)
def chosen_kernel(q: Any, k: Any, v: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def by_distance(q: Any, k: Any, v: Any) -> Any:
    """What `flexible` computes: eager would run that by a compiler, and on the CPU without gradients."""
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = q @ k.transpose(-2, -1) / q.shape[3] ** 0.5 + (queries - keys)
    return scores.masked_fill(queries < keys, -torch.inf).softmax(-1) @ v


@part(ATTENTION, "flex_attention", calls=heads, judge=by_distance)
def flexible(q: Any, k: Any, v: Any) -> Any:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], "cpu")
    return flex_attention(q, k, v, lambda score, b, h, i, j: score + (i - j), mask)
