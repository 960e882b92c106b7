"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.errors import NoFormula
from primtorch.fake.build import Table, contiguous, elementwise, strided
from primtorch.layout import (
    Sizes,
    broadcast,
    channels_last_strides,
    contiguous_strides,
    suggests_channels_last,
)
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def _check_inner(a: Any, b: Any) -> None:
    if a.dtype is not b.dtype:
        raise RuntimeError(f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({a.shape[0]}x{a.shape[-1]} and {b.shape[-2]}x{b.shape[-1]})"
        )


@TABLE.op("mm")
def _mm(a: Any, b: Any) -> TensorSpec:
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError("mm: both arguments must be matrices")
    _check_inner(a, b)
    return contiguous(a, (a.shape[0], b.shape[1]))


@TABLE.op("addmm", "_addmm_activation")
def _addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False) -> TensorSpec:
    out = _mm(a, b)
    _expand_to(c, out.shape)
    return out


def _expand_to(x: Any, shape: Sizes) -> None:
    if len(x.shape) > len(shape) or broadcast(tuple(x.shape), shape) != shape:
        raise RuntimeError(f"The expanded size {list(shape)} does not fit the tensor of sizes {list(x.shape)}")


@TABLE.op("_int_mm")
def _int_mm(a: Any, b: Any) -> TensorSpec:
    return contiguous(_mm(a, b), (a.shape[0], b.shape[1]), torch.int32)


@TABLE.op("_scaled_mm")
def _scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> TensorSpec:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({list(a.shape)} and {list(b.shape)})")
    return contiguous(a, (a.shape[0], b.shape[1]), out_dtype)


@TABLE.op("_weight_int8pack_mm")
def _weight_int8pack_mm(a: Any, weight: Any, scales: Any) -> TensorSpec:
    return contiguous(a, (a.shape[0], weight.shape[0]))


@TABLE.op(
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
def _fake_quantize(x: Any, *parameters: Any, **options: Any) -> tuple[TensorSpec, TensorSpec]:
    return elementwise([x], x.dtype), elementwise([x], torch.bool)


@TABLE.op("bmm")
def _bmm(a: Any, b: Any) -> TensorSpec:
    if a.dim() != 3 or b.dim() != 3:
        raise RuntimeError("batch1 must be a 3D tensor")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise RuntimeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{a.shape[0]}, {a.shape[2]}] but got: "
            f"[{b.shape[0]}, {b.shape[1]}]."
        )
    if a.dtype is not b.dtype:
        raise RuntimeError(f"expected scalar type {a.dtype} but found {b.dtype}")
    return contiguous(a, (a.shape[0], a.shape[1], b.shape[2]))


@TABLE.op("baddbmm")
def _baddbmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    out = _bmm(a, b)
    _expand_to(c, out.shape)
    return out


@TABLE.op("addbmm")
def _addbmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    return contiguous(a, (a.shape[1], b.shape[2]))


@TABLE.op("addbmm_")
def _addbmm_in_place(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if tuple(c.shape) != (a.shape[1], b.shape[2]):
        raise NoFormula("aten::addbmm_", reason="it gives the tensor that it writes to another shape")
    return c


@TABLE.op("mv")
def _mv(a: Any, v: Any) -> TensorSpec:
    if a.shape[1] != v.shape[0]:
        raise RuntimeError(
            f"size mismatch, got input ({a.shape[0]}), mat ({a.shape[0]}x{a.shape[1]}), vec ({v.shape[0]})"
        )
    return contiguous(a, (a.shape[0],))


@TABLE.op("addmv")
def _addmv(c: Any, a: Any, v: Any, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    return _mv(a, v)


@TABLE.op("addr")
def _addr(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    column = TensorSpec((a.shape[0], 1), (*a.stride(), 1), a.dtype, a.device)
    dtype = torch.promote_types(c.dtype, torch.promote_types(a.dtype, b.dtype))
    return elementwise((c, column, b), dtype)


@TABLE.op("dot", "vdot")
def _dot(a: Any, b: Any) -> TensorSpec:
    if a.dim() != 1 or b.dim() != 1 or a.dtype is not b.dtype or a.shape[0] != b.shape[0]:
        raise RuntimeError(
            f"dot: expected two 1D tensors of one size and dtype, got {list(a.shape)} and {list(b.shape)}"
        )
    return contiguous(a, ())


def window_size(size: Size, kernel: Size, stride: int, padding: int, dilation: int) -> Size:
    """Output length of a convolution: floor((size + 2*padding - dilation*(kernel-1) - 1) / stride) + 1."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _per_dim(values: Sequence[int], count: int) -> list[int]:
    return [values[0]] * count if len(values) == 1 else list(values)


@TABLE.op("convolution", "convolution_overrideable")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> TensorSpec:  # fmt: skip
    spatial = x.dim() - 2
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != expected:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(x.shape)} to "
            f"have {expected} "
            f"channels, but got {x.shape[1]} channels instead"
        )
    if x.dtype is not weight.dtype:
        raise RuntimeError(f"Input type ({x.dtype}) and weight type ({weight.dtype}) should be the same")
    s, p, d = _per_dim(stride, spatial), _per_dim(padding, spatial), _per_dim(dilation, spatial)
    o = _per_dim(output_padding, spatial)
    shape: list[Size] = [x.shape[0], channels]
    for i in range(spatial):
        size, kernel = x.shape[2 + i], weight.shape[2 + i]
        if transposed:
            shape.append((size - 1) * s[i] - 2 * p[i] + d[i] * (kernel - 1) + o[i] + 1)
        else:
            shape.append(window_size(size, kernel, s[i], p[i], d[i]))
    out = tuple(shape)
    if any(size <= 0 for size in out[2:]):
        raise RuntimeError(f"Calculated output size: {list(out)}. Output size is too small")
    return strided(x, out, _conv_strides(x, weight, out, transposed))


def _conv_strides(x: Any, weight: Any, shape: Sizes, transposed: bool) -> Sizes:
    """channels_last when the input or the weight suggests it, as ATen's convolution back ends choose.

    The CPU's own transposed convolution of volumes is by rows.
    """
    by_rows = transposed and len(shape) == 5 and x.device.type == "cpu"
    if not by_rows and any(suggests_channels_last(tuple(t.shape), t.stride()) for t in (x, weight)):
        return channels_last_strides(shape)
    return contiguous_strides(shape)


@TABLE.op("convolution_backward")
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Sequence[Size] | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:  # fmt: skip
    def laid_out(like: Any) -> TensorSpec:
        shape = tuple(like.shape)
        return strided(like, shape, _conv_strides(x, weight, shape, transposed))

    return (
        laid_out(x) if output_mask[0] else None,
        laid_out(weight) if output_mask[1] else None,
        contiguous(grad, (weight.shape[1] * groups if transposed else weight.shape[0],)) if output_mask[2] else None,
    )
