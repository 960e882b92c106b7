"""Scaled dot product attention, each of ATen's kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch.arguments import Sizes, TensorLike
from primtorch.families import Family
from primtorch.layout import dense_like, strides_in_order
from primtorch.operators.build import contiguous, strided
from primtorch.promotion import compute_dtype
from primtorch.samples import call, integers, reals
from primtorch.spec import Size, TensorSpec

OP = Family("attention")


_HEADS_INSIDE = (3, 1, 2, 0)
"""Memory order of the output of most kernels, innermost first: that of a (N, L, H, E) tensor transposed."""


def _transposed(like: TensorLike, shape: Sizes) -> TensorSpec:
    return strided(like, shape, strides_in_order(shape, _HEADS_INSIDE))


def _seed(query: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    number = TensorSpec((), (), torch.int64, query.device)
    return number, number


@OP.formula("_scaled_dot_product_flash_attention_for_cpu")
def _flash_cpu(
    query: TensorLike, key: TensorLike, value: TensorLike, *args: object, **options: object
) -> tuple[TensorSpec, TensorSpec]:
    n, heads, length, _ = query.shape
    shape = (n, heads, length, value.shape[3])
    out = strided(query, shape, dense_like(shape, query.stride()))  # in the order of the query's memory
    statistics = (n, heads, length)
    return out, strided(query, statistics, strides_in_order(statistics, (1, 2, 0)), compute_dtype(query.dtype))


@OP.formula("_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward")
def _flash_backward(
    grad: TensorLike, query: TensorLike, key: TensorLike, value: TensorLike, *args: object, **kwargs: object
) -> tuple[TensorSpec, ...]:
    return tuple(_transposed(t, tuple(t.shape)) for t in (query, key, value))


def _round_up(size: Size, multiple: int) -> Size:
    return (size + multiple - 1) // multiple * multiple


@OP.formula("_scaled_dot_product_flash_attention")
def _flash(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **options: object,
) -> tuple[TensorSpec | Size | None, ...]:
    n, heads, length, _ = query.shape
    keys = key.shape[2]
    out = _transposed(query, (n, heads, length, value.shape[3]))
    logsumexp = contiguous(query, (n, heads, length), torch.float32)
    # CUDA versions with the merged Philox state give it as one uint64 pair; the unused half is an empty scalar.
    state = TensorSpec((2,), (1,), torch.uint64, query.device)
    unused = TensorSpec((), (), torch.uint64, query.device)
    mask_shape: Sizes = (n, heads, length, keys) if return_debug_mask else (0,)
    return out, logsumexp, None, None, length, keys, state, unused, contiguous(query, mask_shape)


@OP.formula("_scaled_dot_product_efficient_attention")
def _efficient(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_bias: TensorLike | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: object,
) -> tuple[TensorSpec, ...]:
    n, heads, length, _ = query.shape
    out = _transposed(query, (n, heads, length, value.shape[3]))
    logsumexp = contiguous(query, (n, heads, _round_up(length, 32) if compute_log_sumexp else 0), torch.float32)
    # The kernel draws its seed on the host, with and without dropout (seen on CUDA outside of graph capture).
    seed = TensorSpec((), (), torch.int64, torch.device("cpu"))
    return out, logsumexp, seed, seed


@OP.formula("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(
    grad: TensorLike,
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_bias: TensorLike | None,
    out: TensorLike,
    logsumexp: TensorLike,
    philox_seed: TensorLike,
    philox_offset: TensorLike,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    **options: object,
) -> tuple[TensorSpec | None, ...]:
    grads: list[TensorSpec | None] = [
        _transposed(t, tuple(t.shape)) if wanted else None
        for t, wanted in zip((query, key, value), grad_input_mask, strict=False)
    ]
    bias = None
    if grad_input_mask[3] and attn_bias is not None:
        shape = tuple(attn_bias.shape)
        # The kernel wants rows aligned to 16 elements, so the gradient is a slice of a padded tensor.
        padded = (*shape[:-1], _round_up(shape[-1], 16))
        bias = strided(attn_bias, shape, contiguous(attn_bias, padded).strides)
    return (*grads, bias)


class _Key:
    __slots__ = ("value",)

    def __init__(self, value: Size) -> None:
        self.value = value

    def __lt__(self, other: _Key) -> bool:
        return bool(self.value < other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # a symbolic size does not hash


@OP.formula("_scaled_dot_product_cudnn_attention")
def _cudnn(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_bias: TensorLike | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **options: object,
) -> tuple[TensorSpec | Size | None, ...]:
    n, heads, length, _ = query.shape
    shape = (n, heads, length, value.shape[3])
    like = tuple(query.shape)
    order = sorted(range(4), key=lambda d: (_Key(query.stride()[d]), -d))
    out = strided(query, shape, strides_in_order(shape, order) if like else ())
    logsumexp = contiguous(query, (n, heads, length, 1), torch.float32) if compute_log_sumexp else None
    return out, logsumexp, None, None, length, key.shape[2], *_seed(query), None


@OP.formula("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(
    grad: TensorLike, query: TensorLike, key: TensorLike, value: TensorLike, *args: object, **kwargs: object
) -> tuple[TensorSpec, ...]:
    return tuple(strided(t, t.shape, dense_like(tuple(t.shape), t.stride())) for t in (query, key, value))


# --- samples ---------------------------------------------------------------------------------------

_QKV = (reals(2, 3, 8, 16), reals(2, 3, 8, 16), reals(2, 3, 8, 16))
_OUT = (reals(2, 3, 8, 16), reals(2, 3, 8, low=3.0, high=4.0))
_DRAWS = (integers(), integers())
OP.samples("_scaled_dot_product_flash_attention_for_cpu", call(*_QKV), call(*_QKV, 0.0, True))
OP.samples("_scaled_dot_product_flash_attention_for_cpu_backward", call(reals(2, 3, 8, 16), *_QKV, *_OUT, 0.0, False))
OP.samples("_scaled_dot_product_flash_attention", call(*_QKV))
OP.samples("_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention", call(*_QKV, None, True))
OP.samples(
    "_scaled_dot_product_flash_attention_backward",
    call(reals(2, 3, 8, 16), *_QKV, *_OUT, integers(2), integers(2), 8, 8, 0.0, False, *_DRAWS),
)
OP.samples(
    "_scaled_dot_product_cudnn_attention_backward",
    call(reals(2, 3, 8, 16), *_QKV, *_OUT, *_DRAWS, None, integers(2), integers(2), 8, 8, 0.0, False),
)
OP.samples(
    "_scaled_dot_product_efficient_attention_backward",
    call(reals(2, 3, 8, 16), *_QKV, None, *_OUT, *_DRAWS, 0.0, [True, True, True, False]),
)
