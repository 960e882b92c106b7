"""Scaled dot product attention, each of ATen's kernels, forward and backward; a transformer's layers in inference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.families import Family
from primtorch.layout import dense_like, strides_in_order
from primtorch.operators.build import contiguous, strided
from primtorch.operators.contraction import batched_matmul, lower_addmm_activation
from primtorch.operators.normalization import lower_layer_norm
from primtorch.operators.refusals import refuse
from primtorch.operators.softmax import lower_masked_softmax, lower_softmax
from primtorch.promotion import compute_dtype
from primtorch.samples import call, integers, reals, truths
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


# --- the layers of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` without gradients ----------------------
def _split_heads(qkv: Value, qkv_bias: Value, num_heads: int) -> tuple[Value, ...]:
    """(N, L, 3E) with its bias as three of (N, H, L, E/H), the queries divided by the root of E/H."""
    n, length, width = qkv.shape
    heads = (n, length, 3, num_heads, width // 3 // num_heads)
    parts = (qkv.compute() + qkv_bias.compute()).reshape(heads).permute((2, 0, 3, 1, 4))
    query, key, value = (parts.select(0, i) for i in range(3))
    return (query * (1 / _root(heads[-1]))).to(qkv.dtype), key.to(qkv.dtype), value.to(qkv.dtype)


def _root(size: Size) -> float:
    root: float = math.sqrt(size)
    return root


@OP.refuses("_native_multi_head_attention")
def _refuse_attention(
    query: TensorLike, key: TensorLike, value: TensorLike, embed_dim: int, num_head: int, *args: object, **more: object
) -> None:
    refuse(len(query.shape) != 3, lambda: f"expected 3-D `query`, got {len(query.shape)}-D tensor")
    refuse(query.shape[2] != embed_dim, lambda: f"passed-in embed_dim {embed_dim} didn't match last dim of query")
    refuse(embed_dim % num_head != 0, lambda: "`embed_dim` must divide evenly by `num_heads`")


@OP.formula("_native_multi_head_attention")
def _attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    embed_dim: int,
    num_head: int,
    qkv_weight: TensorLike,
    qkv_bias: TensorLike,
    proj_weight: TensorLike,
    proj_bias: TensorLike,
    mask: TensorLike | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[TensorSpec, TensorSpec | None]:
    n, length, _ = query.shape
    out = contiguous(query, (n, length, embed_dim))
    heads = () if average_attn_weights else (num_head,)
    return out, contiguous(query, (n, *heads, length, key.shape[1])) if need_weights else None


@OP.rule("_native_multi_head_attention")
def _lower_attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    num_head: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Value, Value | None]:
    """softmax(q k^T / sqrt(E/H)) v of each head, projected (Vaswani et al. 2017); `mask` is true where not to look.

    The weights are those of each head, (N, H, L, S), or their mean over the heads.
    """
    if query.node is key.node is value.node:
        q, k, v = _split_heads(_linear(b, query, qkv_weight), qkv_bias, num_head)
    else:
        q, k, v = (_head_of(b, x, qkv_weight, qkv_bias, place, num_head) for place, x in enumerate((query, key, value)))
        q = (q.compute() * (1 / _root(q.shape[-1]))).to(q.dtype)
    scores = batched_matmul(b, q, k.transpose(-2, -1))
    if mask is None:
        weights = lower_softmax(b, scores, 3)
    else:
        weights = lower_masked_softmax(b, scores, mask.to(torch.bool), 3, mask_type)
    n, length, _ = query.shape
    heard = batched_matmul(b, weights, v).transpose(1, 2).reshape((n, length, embed_dim))
    out = _linear(b, heard, proj_weight, proj_bias)
    if not need_weights:
        return out, None
    if average_attn_weights:
        weights = (weights.compute().sum((1,)) / num_head).to(weights.dtype)
    return out, weights


def _head_of(b: Builder, x: Value, weight: Value, bias: Value, place: int, heads: int) -> Value:
    """One of the three projections, (N, L, E) to (N, H, L, E/H)."""
    n, length, width = x.shape
    rows = (place * width, (place + 1) * width)
    projected = _linear(b, x, weight.slice(0, *rows), bias.slice(0, *rows))
    return projected.reshape((n, length, heads, width // heads)).transpose(1, 2)


def _linear(b: Builder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x W^T + bias over the last dim."""
    rows = x.reshape((x.shape[0] * x.shape[1], x.shape[2]))
    turned = weight.transpose(0, 1)
    out = b.emit(prims.mm, rows, turned) if bias is None else b.emit(prims.addmm, bias, rows, turned)
    return out.reshape((*x.shape[:2], weight.shape[0]))


@OP.formula("_transformer_encoder_layer_fwd")
def _encoder_layer(src: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(src, tuple(src.shape))


@OP.rule("_transformer_encoder_layer_fwd")
def _lower_encoder_layer(
    b: Builder,
    src: Value,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None = None,
    mask_type: int | None = None,
) -> Value:
    """Attention and two linear layers, a residual around each, normalised before them or behind."""

    def norm(x: Value, weight: Value, bias: Value) -> Value:
        return lower_layer_norm(b, x, (embed_dim,), weight, bias, eps)[0]

    def feed_forward(x: Value) -> Value:
        rows = x.reshape((x.shape[0] * x.shape[1], embed_dim))
        inner = lower_addmm_activation(b, ffn_bias_1, rows, ffn_weight_1.transpose(0, 1), use_gelu=use_gelu)
        return b.emit(prims.addmm, ffn_bias_2, inner, ffn_weight_2.transpose(0, 1)).reshape(x.shape)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    attended, _ = _lower_attention(
        b, x, x, x, embed_dim, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
    )
    x = (attended.compute() + src.compute()).to(src.dtype)
    if norm_first:
        return (feed_forward(norm(x, norm_weight_2, norm_bias_2)).compute() + x.compute()).to(src.dtype)
    x = norm(x, norm_weight_1, norm_bias_1)
    return norm((feed_forward(x).compute() + x.compute()).to(src.dtype), norm_weight_2, norm_bias_2)


_PROJECTIONS = (reals(24, 8), reals(24), reals(8, 8), reals(8))
_NORM = (reals(8), reals(8))
OP.samples(
    "_native_multi_head_attention",
    call(*[reals(2, 3, 8)] * 3, 8, 2, *_PROJECTIONS),
    call(*[reals(2, 3, 8)] * 3, 8, 2, *_PROJECTIONS, truths(2, 3), False, True, 1),
    call(*[reals(2, 3, 8)] * 3, 8, 2, *_PROJECTIONS, truths(2, 2, 3, 3), True, False, 2),
)
_FEED_FORWARD = (reals(12, 8), reals(12), reals(8, 12), reals(8))
_WEIGHTS = (*_NORM, *_NORM, *_FEED_FORWARD)
OP.samples(
    "_transformer_encoder_layer_fwd",
    call(reals(2, 3, 8), 8, 2, *_PROJECTIONS, True, False, 1e-5, *_WEIGHTS),
    call(reals(2, 3, 8), 8, 2, *_PROJECTIONS, False, True, 1e-5, *_WEIGHTS, truths(3, 3), 0),
)
