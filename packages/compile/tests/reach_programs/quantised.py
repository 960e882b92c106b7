"""Weights and activations of few bits."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import Embedding, EmbeddingBag
from torch.ao.quantization import (
    DeQuantStub,
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    QuantStub,
    convert,
    float_qparams_weight_only_qconfig,
    get_default_qconfig,
    prepare,
    quantize_dynamic,
)

from .record import Program, maker, part

QUANTISED = "Quantised"


def floats(*shape: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape),)


def batches(*shape: int) -> list[tuple[Any, ...]]:
    """Batches of 32, 32 and 48 rows of float32."""
    return [floats(rows, *shape) for rows in (32, 32, 48)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x))) * 2


class Recurrent(nn.Module):
    """A layer over a sequence whose results are doubled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        result = self.layer(x)
        return result[0] * 2 if isinstance(result, tuple) else result * 2


def dynamic(model: nn.Module, kind: type[nn.Module], dtype: torch.dtype = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(model.eval(), {kind}, dtype=dtype)


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


@part(QUANTISED, "quantize_per_tensor and dequantize", gradient=False)
def quantised_and_back(x: torch.Tensor) -> Any:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize() + x


maker(QUANTISED, "quantize_dynamic: linear layers", calls=lambda: batches(16))(lambda: dynamic(Layers(), nn.Linear))


@maker(QUANTISED, "quantize_dynamic: linear layers of float16", calls=lambda: batches(16), gradient=False)
def linear_of_halves() -> Program:
    model = Layers()
    for layer in (model.first, model.second):
        layer.bias = None  # one that requires a gradient breaks the graph
    return dynamic(model, nn.Linear, torch.float16)


def lstm() -> Program:
    return dynamic(Recurrent(nn.LSTM(16, 8, 2, bidirectional=True)), nn.LSTM)


maker(QUANTISED, "quantize_dynamic: LSTM", calls=lambda: batches(3, 16), gradient=False)(lstm)
maker(QUANTISED, "quantize_dynamic: GRU", calls=lambda: batches(3, 16), gradient=False)(
    lambda: dynamic(Recurrent(nn.GRU(16, 8, batch_first=True)), nn.GRU)
)
for _cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    maker(QUANTISED, f"quantize_dynamic: {_cell.__name__}", calls=lambda: batches(16), gradient=False)(
        lambda cell=_cell: dynamic(Recurrent(cell(16, 8)), cell)  # type: ignore[misc]
    )


def rows_of(count: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 20, (count,)),)


def indices() -> list[tuple[Any, ...]]:
    return [rows_of(6), rows_of(6), rows_of(10)]


@maker(QUANTISED, "an embedding of bytes", calls=indices, gradient=False)
def embedding_of_bytes() -> Program:
    table = nn.Embedding(20, 16)
    table.qconfig = float_qparams_weight_only_qconfig
    quantised = Embedding.from_float(table)
    return lambda rows: quantised(rows) * 2


@maker(QUANTISED, "bags of an embedding of bytes", calls=indices, gradient=False)
def bags_of_bytes() -> Program:
    table = nn.EmbeddingBag(20, 16, mode="sum")
    table.qconfig = float_qparams_weight_only_qconfig  # type: ignore[assignment]
    quantised = EmbeddingBag.from_float(table)
    return lambda rows: quantised(rows, torch.arange(0, rows.numel(), 2)) * 2


@part(QUANTISED, "int8 weights, packed", calls=lambda: batches(64), gradient=False)
def int8_packed(x: torch.Tensor) -> Any:
    levels = (torch.arange(32 * 64) % 200 - 100).to(torch.int8).reshape(32, 64)
    return torch.ops.aten._weight_int8pack_mm(x.bfloat16() * 2, levels, torch.full((32,), 0.5).bfloat16()) * 2


@part(QUANTISED, "int4 weights, dynamic activations", calls=lambda: batches(64), gradient=False)
def int4_dynamic(x: torch.Tensor) -> Any:
    packed = (torch.arange(32 * 32 + 32) % 16).float()  # a layout that any machine's kernel takes
    return torch.ops.aten._dyn_quant_matmul_4bit(x * 2, packed, 64, 64, 32).shape[1] + x


@part(QUANTISED, "_scaled_mm, a scale a row", calls=lambda: batches(32), gradient=False)
def scaled_rows(x: torch.Tensor) -> Any:
    b = (torch.arange(16 * 32) % 7).float().reshape(16, 32).to(torch.float8_e4m3fn).t()
    of_rows, of_columns = torch.ones(x.shape[0], 1), torch.full((1, 16), 0.5)
    return torch._scaled_mm(x.to(torch.float8_e4m3fn), b, of_rows, of_columns, out_dtype=torch.bfloat16) * 2


@part(QUANTISED, "fake_quantize, with gradients", calls=lambda: batches(16))
def fake_quantized_with_gradients(x: torch.Tensor) -> Any:
    return torch.fake_quantize_per_tensor_affine(x * 2, 0.1, 0, -10, 10) * 2


@part(QUANTISED, "fake_quantize, its scale a tensor", calls=lambda: batches(16))
def fake_quantized_by_tensors(x: torch.Tensor) -> Any:
    zero = torch.tensor(0, dtype=torch.int32)
    return torch.fake_quantize_per_tensor_affine(x * 2, torch.tensor(0.1), zero, -10, 10) * 2


@part(QUANTISED, "fake_quantize, its scale learnt", calls=lambda: batches(16))
def learnt_scale(x: torch.Tensor) -> Any:
    scale = x[:1, 0] * 0 + 0.1
    return torch._fake_quantize_learnable_per_tensor_affine(x * 2, scale, scale * 2, -10, 10, 0.5) * 2


@part(QUANTISED, "fake_quantize, its scales learnt by channels", calls=lambda: batches(16))
def learnt_scales(x: torch.Tensor) -> Any:
    scales = x[0] * 0 + 0.1
    return torch._fake_quantize_learnable_per_channel_affine(x * 2, scales, scales * 2, 1, -10, 10, 0.5) * 2


maker(QUANTISED, "FakeQuantize, fused with its observer", calls=lambda: batches(16))(FusedMovingAvgObsFakeQuantize)
maker(
    QUANTISED,
    "FakeQuantize",
    "data_dependent_branch",
    calls=lambda: batches(16),
    why="torch's module asks a buffer's data whether it is switched on; instead: FusedMovingAvgObsFakeQuantize, or"
    " torch.fake_quantize_per_tensor_affine",
)(FakeQuantize)
maker(QUANTISED, "an observer of the range", calls=lambda: batches(16), gradient=False)(MinMaxObserver)


@part(
    QUANTISED,
    "packed parameters made within",
    "special_tensor",
    calls=lambda: batches(16),
    gradient=False,
    why="packed weights are an object of the library's, made of data that the graph has; instead: pack them once, outside"
    " of the compiled function",
)
def packed_within(x: torch.Tensor) -> Any:
    weight = torch.quantize_per_tensor(torch.ones(8, 16), 0.1, 0, torch.qint8)
    return torch.ops.quantized.linear_dynamic(x, torch.ops.quantized.linear_prepack(weight, None))


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers, self.leave = QuantStub(), nn.Linear(16, 8), DeQuantStub()

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(torch.relu(self.layers(self.enter(x)))) * 2


@maker(QUANTISED, "a static model, converted", calls=lambda: batches(16), gradient=False)
def static() -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Static().eval()
        model.qconfig = get_default_qconfig("x86")  # type: ignore[assignment]
        prepared = prepare(model)
        prepared(torch.randn(32, 16))
        return convert(prepared)
