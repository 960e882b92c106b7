"""Weights and activations of few bits: products with them, and numbers rounded to the levels of a scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch.arguments import TensorLike
from primtorch.eager_kernels import Fact
from primtorch.errors import NoFormula
from primtorch.families import Family
from primtorch.operators.build import contiguous, elementwise
from primtorch.operators.contraction import grouped_product, matrix_product, refuse_groups
from primtorch.samples import after, call, integers, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("quantised")


# --- products ------------------------------------------------------------------------------------
@OP.formula("_int_mm")
def _int_mm(a: TensorLike, b: TensorLike) -> TensorSpec:
    """int8 by int8; on a CPU uint8 by int8, too. Raises RuntimeError for others, and for what no product takes."""
    first = (torch.int8, torch.uint8) if Fact.MULTIPLIES_UINT8.on(a.device) else (torch.int8,)
    if a.dtype not in first or b.dtype is not torch.int8:
        raise RuntimeError(f"_int_mm: expected int8 matrices, but got: {a.dtype} and {b.dtype}")
    return contiguous(matrix_product(contiguous(a, a.shape, torch.int8), b), (a.shape[0], b.shape[1]), torch.int32)


@OP.formula("_scaled_mm")
def _scaled_mm(
    a: TensorLike,
    b: TensorLike,
    scale_a: TensorLike,
    scale_b: TensorLike,
    bias: TensorLike | None = None,
    scale_result: TensorLike | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> TensorSpec:
    return _scaled(a, b, out_dtype)


def _scaled(a: TensorLike, b: TensorLike, out_dtype: torch.dtype | None) -> TensorSpec:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({list(a.shape)} and {list(b.shape)})")
    return contiguous(a, (a.shape[0], b.shape[1]), out_dtype)


@OP.formula("_scaled_mm_v2")
def _scaled_by_recipes(
    a: TensorLike,
    b: TensorLike,
    scales_a: Sequence[TensorLike],
    recipes_a: Sequence[int],
    swizzles_a: Sequence[int],
    scales_b: Sequence[TensorLike],
    recipes_b: Sequence[int],
    swizzles_b: Sequence[int],
    bias: TensorLike | None,
    out_dtype: torch.dtype | None,
    inner: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> TensorSpec:
    return _scaled(a, b, out_dtype)


@OP.formula("_scaled_grouped_mm")
def _scaled_groups(
    a: TensorLike,
    b: TensorLike,
    scale_a: TensorLike,
    scale_b: TensorLike,
    offsets: TensorLike | None = None,
    bias: TensorLike | None = None,
    scale_result: TensorLike | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> TensorSpec:
    refuse_groups(a, b, offsets)
    return grouped_product(a, b, offsets, out_dtype or torch.bfloat16)


@OP.formula("_scaled_grouped_mm_v2")
def _scaled_groups_by_recipes(
    a: TensorLike,
    b: TensorLike,
    scales_a: Sequence[TensorLike],
    recipes_a: Sequence[int],
    swizzles_a: Sequence[int],
    scales_b: Sequence[TensorLike],
    recipes_b: Sequence[int],
    swizzles_b: Sequence[int],
    offsets: TensorLike | None = None,
    bias: TensorLike | None = None,
    out_dtype: torch.dtype | None = None,
    inner: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> TensorSpec:
    refuse_groups(a, b, offsets)
    return grouped_product(a, b, offsets, out_dtype or torch.bfloat16)


@OP.formula("_weight_int8pack_mm")
def _weight_int8pack_mm(a: TensorLike, weight: TensorLike, scales: TensorLike) -> TensorSpec:
    return contiguous(a, (a.shape[0], weight.shape[0]))


@OP.formula("_convert_weight_to_int4pack_for_cpu")
def _int4_pack(weight: TensorLike, inner_tiles: int) -> TensorSpec:
    return contiguous(weight, (weight.shape[0], weight.shape[1] // 2), torch.uint8)


@OP.formula("_weight_int4pack_mm_for_cpu")
def _int4_packed_product(a: TensorLike, pack: TensorLike, group: int, scales_and_zeros: TensorLike) -> TensorSpec:
    return contiguous(a, (a.shape[0], pack.shape[0]))


@OP.formula("_dyn_quant_pack_4bit_weight")
def _int4_dynamic_pack(
    weight: TensorLike,
    scales: TensorLike,
    bias: TensorLike | None,
    group: int,
    in_features: Size,
    out_features: Size,
) -> TensorSpec:
    if torch.backends.kleidiai.is_available():
        raise NoFormula("aten::_dyn_quant_pack_4bit_weight", reason="KleidiAI alone knows the size of its packs")
    parts = [weight, scales] if bias is None else [weight, scales, bias]
    return contiguous(weight, (sum(part.numel() for part in parts),), torch.float32)


@OP.formula("_dyn_quant_matmul_4bit")
def _int4_dynamic_product(
    x: TensorLike, pack: TensorLike, group: int, in_features: Size, out_features: Size
) -> TensorSpec:
    return contiguous(x, (x.shape[0], out_features))


# --- rounding to levels --------------------------------------------------------------------------
@OP.formula(
    "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
)
def _fake_quantize(x: TensorLike, *parameters: object, **options: object) -> tuple[TensorSpec, TensorSpec]:
    return elementwise([x], x.dtype), elementwise([x], torch.bool)


@OP.formula("_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine")
def _learnable(x: TensorLike, *parameters: object) -> TensorSpec:
    return elementwise([x], x.dtype)


@OP.formula("_fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine_backward")
def _learnable_backward(
    gradient: TensorLike, x: TensorLike, scale: TensorLike, zero_point: TensorLike, *parameters: object
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    of_scale = contiguous(scale, scale.shape, torch.float32)
    return elementwise([x], torch.float32), of_scale, of_scale


def _observed(
    x: TensorLike,
    observer_on: TensorLike,
    rounding_on: TensorLike,
    lowest: TensorLike,
    highest: TensorLike,
    scale: TensorLike,
    zero_point: TensorLike,
    averaging: float,
    low: int,
    high: int,
    axis: int,
    by_rows: bool = False,
    symmetric: bool = False,
) -> tuple[TensorSpec, TensorSpec]:
    """Rounded to levels that follow the range of what came so far, and where that range was not left."""
    if by_rows and not lowest.shape[0]:
        raise NoFormula("aten::_fused_moving_avg_obs_fq_helper", reason="it gives empty statistics another shape")
    return elementwise([x], x.dtype), elementwise([x], torch.bool)


OP.formula("_fused_moving_avg_obs_fq_helper")(_observed)


@OP.formula("_fused_moving_avg_obs_fq_helper_functional")
def _observed_anew(
    x: TensorLike,
    observer_on: TensorLike,
    rounding_on: TensorLike,
    lowest: TensorLike,
    highest: TensorLike,
    scale: TensorLike,
    zero_point: TensorLike,
    *options: float,
) -> tuple[TensorSpec, ...]:
    statistics = (lowest, highest, scale, zero_point)
    levels = _observed(x, observer_on, rounding_on, *statistics, *options)  # type: ignore[arg-type]
    return (*levels, *(elementwise([one], one.dtype) for one in statistics))


# --- samples -------------------------------------------------------------------------------------
OP.samples("_int_mm", call(integers(32, 16, dtype=torch.int8), integers(16, 8, dtype=torch.int8)))
OP.samples(
    "_weight_int8pack_mm",
    call(reals(3, 16, dtype=torch.bfloat16), integers(4, 16, dtype=torch.int8), reals(4, dtype=torch.bfloat16)),
)
OP.samples("_convert_weight_to_int4pack_for_cpu", call(integers(16, 64, dtype=torch.int32), 1))
OP.samples(
    "_weight_int4pack_mm_for_cpu",
    call(
        reals(3, 64, dtype=torch.float32), integers(16, 32, dtype=torch.uint8), 32, reals(2, 16, 2, dtype=torch.float32)
    ),
)
OP.samples(
    "_scaled_mm",
    call(
        reals(16, 32, dtype=torch.float8_e4m3fn),
        after(torch.t, reals(16, 32, dtype=torch.float8_e4m3fn)),
        reals(1),
        reals(1),
    ),
)
_BYTES = reals(16, 32, dtype=torch.float8_e4m3fn)
_BYTE_GROUPS = after(torch.adjoint, reals(3, 16, 32, dtype=torch.float8_e4m3fn))
_BYTE_ENDS = listed(2, 5, 16, dtype=torch.int32)
OP.samples(
    "_scaled_mm_v2",
    call(_BYTES, after(torch.t, _BYTES), [reals(1)], [0], [], [reals(1)], [0], [], None, torch.bfloat16),
    call(_BYTES, after(torch.t, _BYTES), [reals(16, 1)], [1], [0], [reals(1, 16)], [1], [0], None, torch.float32),
)
OP.samples("_scaled_grouped_mm", call(_BYTES, _BYTE_GROUPS, reals(16), reals(3, 16), _BYTE_ENDS))
OP.samples(
    "_scaled_grouped_mm_v2",
    call(_BYTES, _BYTE_GROUPS, [reals(16)], [1], [], [reals(3, 16)], [1], [], _BYTE_ENDS),
)
OP.samples("fake_quantize_per_tensor_affine_cachemask", call(reals(3, 4), 0.1, 3, 0, 15))
OP.samples(
    "fake_quantize_per_channel_affine_cachemask",
    call(reals(3, 4), reals(3, low=0.1), integers(3, dtype=torch.int32), 0, 0, 15),
)
OP.samples(
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    call(reals(3, 4), reals(1, low=0.1), integers(1, dtype=torch.int32), listed(1), 0, 15),
)
_X, _SCALES = reals(3, 4, dtype=torch.float32), {n: reals(n, low=0.1, dtype=torch.float32) for n in (1, 4)}
OP.samples("_fake_quantize_learnable_per_tensor_affine", call(_X, _SCALES[1], _SCALES[1], 0, 15))
OP.samples("_fake_quantize_learnable_per_tensor_affine_backward", call(_X, _X, _SCALES[1], _SCALES[1], 0, 15))
OP.samples("_fake_quantize_learnable_per_channel_affine", call(_X, _SCALES[4], _SCALES[4], 1, 0, 15))
OP.samples("_fake_quantize_learnable_per_channel_affine_backward", call(_X, _X, _SCALES[4], _SCALES[4], 1, 0, 15))
OP.samples(
    "_fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional",
    call(_X, *[integers(1)] * 2, *[_SCALES[1]] * 3, integers(1, dtype=torch.int32), 0.01, 0, 255, 0),
)
_PACKED = integers(8, 32, dtype=torch.uint8), reals(8, 2, dtype=torch.float32), reals(8, dtype=torch.float32)
OP.samples(
    "_dyn_quant_pack_4bit_weight",
    call(*_PACKED, 32, 64, 8),
    call(*_PACKED[:2], None, 32, 64, 8),
)
OP.samples(
    "_dyn_quant_matmul_4bit",
    call(reals(3, 64, dtype=torch.float32), reals(32 * 64 // 2 + 32, dtype=torch.float32), 64, 64, 32),
)
