"""Pooling windows, matrix products, convolution and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from primtorch.arguments import Sizes
from primtorch.layout import (
    suggested_strides,
)
from primtorch.prims.record import Prim, meta_of, require, spec_like
from primtorch.spec import Size, TensorSpec

aten = torch.ops.aten


# --- windows -------------------------------------------------------------------------------------
def pooled_size(size: Size, kernel: Size, stride: Size, padding: Size, dilation: Size, ceil_mode: bool) -> Size:
    """Number of windows; with `ceil_mode` also one that passes the end, if it starts in the input or low padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    count = (span + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def _pooled(
    name: str,
    t: TensorSpec,
    kernel: Sequence[Size],
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    ceil_mode: bool,
) -> Sizes:
    rank = len(t.shape) - 2
    require(1 <= rank <= 3, name, lambda: f"expects (N, C, *spatial) with 1 to 3 spatial dims, got {tuple(t.shape)}")
    require(
        len(kernel) == len(stride) == len(padding) == len(dilation) == rank,
        name,
        lambda: f"window arguments must have {rank} entries",
    )
    spatial = [
        pooled_size(*window, ceil_mode) for window in zip(t.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    for size in spatial:
        require(not isinstance(size, int) or size >= 0, name, lambda: f"the windows do not fit {tuple(t.shape)}")
    return (*t.shape[:2], *spatial)


def offset_dtype(kernel: Sequence[Size]) -> torch.dtype:
    """The dtype of the offset of an element in its window: a byte where that is surely enough."""
    small = all(isinstance(k, int) for k in kernel) and math.prod(kernel) <= 256
    return torch.uint8 if small else torch.int32


def _max_pool_meta(
    t: TensorSpec,
    kernel: Sequence[Size],
    stride: Sequence[Size],
    padding: Sequence[Size],
    dilation: Sequence[Size],
    ceil_mode: bool,
) -> tuple[TensorSpec, TensorSpec]:
    shape = _pooled("max_pool", t, kernel, stride, padding, dilation, ceil_mode)
    strides = suggested_strides(t, shape)
    return spec_like(t, shape, strides), spec_like(t, shape, strides, offset_dtype(kernel))


def _max_pool(
    t: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    pool = (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)[len(kernel) - 1]
    if len(kernel) > 1:
        values, indices = pool.default(t, kernel, stride, padding, dilation, ceil_mode)
    else:
        out = pool.default(t.unsqueeze(2), [1, *kernel], [1, *stride], [0, *padding], [1, *dilation], ceil_mode)
        values, indices = out[0].squeeze(2).contiguous(), out[1].squeeze(2).contiguous()
    offsets, rest, inner = torch.zeros_like(indices), indices, 1
    for d in reversed(range(len(kernel))):
        size = t.shape[2 + d]
        start = torch.arange(values.shape[2 + d], device=t.device) * stride[d] - padding[d]
        place = (rest % size if d else rest) - start.reshape(-1, *[1] * (len(kernel) - 1 - d))
        offsets += (place // dilation[d]).clamp(0, kernel[d] - 1) * inner
        rest, inner = rest // size, inner * kernel[d]
    return values, offsets.to(offset_dtype(kernel))


def _avg_pool_meta(
    t: TensorSpec,
    kernel: Sequence[Size],
    stride: Sequence[Size],
    padding: Sequence[Size],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> TensorSpec:
    shape = _pooled("avg_pool", t, kernel, stride, padding, [1] * len(kernel), ceil_mode)
    return spec_like(t, shape, suggested_strides(t, shape))


def _avg_pool(
    t: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> torch.Tensor:
    options = (ceil_mode, count_include_pad, divisor)
    out: torch.Tensor
    if len(kernel) > 1:
        out = (aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d).default(t, kernel, stride, padding, *options)
        return out
    out = aten.avg_pool2d.default(t.unsqueeze(2), [1, *kernel], [1, *stride], [0, *padding], *options)
    return out.squeeze(2).contiguous()


max_pool = Prim(
    "max_pool(t: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil_mode: bool) "
    "-> (Tensor, Tensor)",
    "window",
    "t is (N, C, *spatial) with 1 to 3 spatial dims. The maximum over each window (padding counts as minus infinity; "
    "NaN wins, else the first maximum in row-major order) and its offset: its number in the row-major order of the "
    "window, uint8 for windows of at most 256 elements, else int32.",
    _max_pool_meta,
    _max_pool,
    frozenset({"window"}),
)
avg_pool = Prim(
    "avg_pool(t: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, ceil_mode: bool, count_include_pad: bool, "
    "divisor: int | None) -> Tensor",
    "window",
    "t is (N, C, *spatial) with 1 to 3 spatial dims. The sum over each window divided by `divisor`, or else by the "
    "number of elements of the window inside the input (inside the padded input when `count_include_pad`).",
    _avg_pool_meta,
    _avg_pool,
    frozenset({"window"}),
)


# --- matrix products -----------------------------------------------------------------------------
mm = Prim(
    "mm(a: Tensor, b: Tensor) -> Tensor",
    "contraction",
    "Matrix product (n, k) x (k, m) -> (n, m); reduced precision accumulates in float32.",
    meta_of(aten.mm.default),
    torch.mm,
    frozenset({"contraction"}),
    aten.mm.default,
)
bmm = Prim(
    "bmm(a: Tensor, b: Tensor) -> Tensor",
    "contraction",
    "Batch of matrix products (B, n, k) x (B, k, m) -> (B, n, m).",
    meta_of(aten.bmm.default),
    torch.bmm,
    frozenset({"contraction"}),
    aten.bmm.default,
)
addmm = Prim(
    "addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor",
    "contraction",
    "beta*bias + alpha*(a @ b); bias broadcasts to (n, m); beta = 0 ignores bias.",
    meta_of(aten.addmm.default),
    torch.addmm,
    frozenset({"contraction"}),
    aten.addmm.default,
)
baddbmm = Prim(
    "baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor",
    "contraction",
    "beta*bias + alpha*(a @ b) over a batch; bias broadcasts to (B, n, m).",
    meta_of(aten.baddbmm.default),
    torch.baddbmm,
    frozenset({"contraction"}),
    aten.baddbmm.default,
)
convolution = Prim(
    "convolution(t: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, "
    "transposed: bool, output_padding: Sizes, groups: int) -> Tensor",
    "contraction",
    "Cross-correlation of (N, C, *spatial) with (O, C/groups, *kernel), or its transpose, plus bias.",
    meta_of(aten.convolution.default),
    aten.convolution.default,
    frozenset({"contraction"}),
    aten.convolution.default,
)
convolution_backward = Prim(
    "convolution_backward(grad: Tensor, t: Tensor, weight: Tensor, bias_sizes: Sizes | None, stride: Sizes, "
    "padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int, output_mask: list[bool]) "
    "-> (Tensor | None, Tensor | None, Tensor | None)",
    "contraction",
    "Gradients of convolution for the input, the weight and the bias, each where `output_mask` asks for it.",
    meta_of(aten.convolution_backward.default),
    aten.convolution_backward.default,
    frozenset({"contraction"}),
    aten.convolution_backward.default,
)


# --- attention -----------------------------------------------------------------------------------
def _attention(overload: OpOverload, doc: str) -> Prim:
    """An attention op taken whole, with the metadata of its formula. A forward op with dropout draws random numbers."""
    name = overload._schema.name.split("::")[1].lstrip("_")
    arguments = str(overload._schema).split("(", 1)[1]
    tags = {"contraction"} if name.endswith("backward") else {"contraction", "random"}
    return Prim(f"{name}({arguments}", "attention", doc, meta_of(overload), overload, frozenset(tags), overload)


scaled_dot_product_flash_attention_for_cpu = _attention(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    "softmax(q k^T * scale + mask) v in tiles on the CPU, and the log-sum-exp of each row.",
)
scaled_dot_product_flash_attention_for_cpu_backward = _attention(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, "Gradients for q, k and v."
)
scaled_dot_product_efficient_attention = _attention(
    aten._scaled_dot_product_efficient_attention.default,
    "Memory-efficient attention on a GPU (Rabe and Staats 2021) with an optional bias.",
)
scaled_dot_product_efficient_attention_backward = _attention(
    aten._scaled_dot_product_efficient_attention_backward.default, "Gradients for q, k, v and the bias."
)
scaled_dot_product_flash_attention = _attention(
    aten._scaled_dot_product_flash_attention.default, "Flash attention on a GPU (Dao et al. 2022)."
)
scaled_dot_product_flash_attention_backward = _attention(
    aten._scaled_dot_product_flash_attention_backward.default, "Gradients for q, k and v."
)
scaled_dot_product_cudnn_attention = _attention(
    aten._scaled_dot_product_cudnn_attention.default, "Attention by cuDNN's fused kernel."
)
scaled_dot_product_cudnn_attention_backward = _attention(
    aten._scaled_dot_product_cudnn_attention_backward.default, "Gradients for q, k and v."
)
