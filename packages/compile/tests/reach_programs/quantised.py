"""Weights and activations of few bits."""

from __future__ import annotations

from typing import Any

import torch

from .record import part

QUANTISED = "Quantised"


@part(QUANTISED, "int8 weights, dequantised", gradient=False)
def int8_weight(x: torch.Tensor) -> Any:
    weight = torch.arange(-6, 6, dtype=torch.int8).reshape(4, 3)
    return x @ (weight.double() * 0.1).mT


@part(QUANTISED, "float8 casts", gradient=False)
def float8(x: torch.Tensor) -> Any:
    return x.to(torch.float8_e4m3fn).to(torch.float64)


@part(QUANTISED, "fake_quantize", gradient=False)
def fake_quantized(x: torch.Tensor) -> Any:
    return torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127)


@part(QUANTISED, "fake_quantize, with gradients, by channels")
def fake_quantized_by_channels(x: torch.Tensor) -> Any:
    scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x.float(), scales, zeros, 1, -128, 127).double()


@part(QUANTISED, "int4 weights, unpacked")
def int4_weight(x: torch.Tensor) -> Any:
    packed = torch.arange(40, 46, dtype=torch.uint8).reshape(2, 3)
    levels = torch.stack([(packed & 0xF).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8], 1).reshape(4, 3)
    return x @ (levels.double() * 0.1).mT


@part(QUANTISED, "int8 activations, scaled by rows", gradient=False)
def dynamic_int8(x: torch.Tensor) -> Any:
    scale = x.abs().amax(1, keepdim=True) / 127
    levels = (x / scale).round().clamp(-128, 127).to(torch.int8)
    weight = torch.arange(-12, 12, dtype=torch.int8).reshape(3, 8)
    return torch._int_mm(levels.repeat(8, 1), weight)[: x.shape[0]] * scale


@part(QUANTISED, "_scaled_mm of float8", gradient=False)
def scaled_mm(x: torch.Tensor) -> Any:
    a, b = (torch.full((16, 16), v).to(torch.float8_e4m3fn) for v in (1.0, 0.5))
    return torch._scaled_mm(a, b.t(), torch.tensor(0.5), torch.tensor(2.0), out_dtype=torch.float32).double().sum() + x


@part(QUANTISED, "int4 weights, packed for the CPU", gradient=False)
def int4_packed(x: torch.Tensor) -> Any:
    levels = (torch.arange(16 * 64) % 16).int().reshape(16, 64)
    packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
    rows = x.float()[:, :1].expand(-1, 64).contiguous()
    return torch._weight_int4pack_mm_for_cpu(rows, packed, 32, torch.ones(2, 16, 2))


@part(QUANTISED, "quantize_per_tensor and dequantize", "operator_without_meta", gradient=False)
def quantised_and_back(x: torch.Tensor) -> Any:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize() + x
