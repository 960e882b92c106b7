"""Random numbers from the Philox prims: the distributions are eager's, the streams are our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.activations import draw
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable

aten = torch.ops.aten
RULES = RuleTable()


def _place(device: Any) -> torch.device:
    return torch.device(device) if device is not None else torch.get_default_device()


def _bits(b: Builder, shape: Sequence[Any], device: torch.device) -> Value:
    seed = b.emit(prims.random_seed, device)
    return b.emit(prims.random_bits, seed, tuple(shape), 0)  # type: ignore[no-any-return]


def _normal(b: Builder, shape: Sequence[Any], device: torch.device) -> Value:
    """Standard normal float32 by Box and Muller (1958) from two streams of one seed."""
    seed = b.emit(prims.random_seed, device)
    radius = b.emit(prims.random_uniform, seed, tuple(shape), 0)
    angle = b.emit(prims.random_uniform, seed, tuple(shape), 1)
    length = ((1.0 - radius).map(prims.log) * -2.0).map(prims.sqrt)
    return length * (angle * (2 * math.pi)).map(prims.cos)  # type: ignore[no-any-return]


@RULES(aten.bernoulli.default)
def _bernoulli(b: Builder, x: Value, *, generator: Any = None) -> Value:
    return (draw(b, x.shape, x.device) < x.to(torch.float32)).to(x.dtype)


@RULES(aten.bernoulli.p)
def _bernoulli_p(b: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    return (draw(b, x.shape, x.device) < float(p)).to(x.dtype)


@RULES(aten.bernoulli.Tensor)
def _bernoulli_tensor(b: Builder, x: Value, p: Value, *, generator: Any = None) -> Value:
    return (draw(b, x.shape, x.device) < p.to(torch.float32)).to(x.dtype)


@RULES(aten.rand.default)
def _rand(b: Builder, size: Sequence[Any], *, dtype: Any = None, layout: Any = None, device: Any = None,
          pin_memory: Any = None) -> Value:
    return draw(b, size, _place(device)).to(dtype or torch.get_default_dtype())


@RULES(aten.rand_like.default)
def _rand_like(b: Builder, x: Value, *, dtype: Any = None, layout: Any = None, device: Any = None,
               pin_memory: Any = None, memory_format: Any = None) -> Value:
    return draw(b, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.randn.default)
def _randn(b: Builder, size: Sequence[Any], *, dtype: Any = None, layout: Any = None, device: Any = None,
           pin_memory: Any = None) -> Value:
    return _normal(b, size, _place(device)).to(dtype or torch.get_default_dtype())


@RULES(aten.randn_like.default)
def _randn_like(b: Builder, x: Value, *, dtype: Any = None, layout: Any = None, device: Any = None,
                pin_memory: Any = None, memory_format: Any = None) -> Value:
    return _normal(b, x.shape, _place(device or x.device)).to(dtype or x.dtype)


def _integers(b: Builder, low: Any, high: Any, shape: Sequence[Any], device: torch.device) -> Value:
    return _bits(b, shape, device) % (high - low) + low  # type: ignore[no-any-return]


@RULES(aten.randint.default)
def _randint(b: Builder, high: Any, size: Sequence[Any], *, dtype: Any = None, layout: Any = None, device: Any = None,
             pin_memory: Any = None) -> Value:
    return _integers(b, 0, high, size, _place(device)).to(dtype or torch.int64)


@RULES(aten.randint.low)
def _randint_low(b: Builder, low: Any, high: Any, size: Sequence[Any], *, dtype: Any = None, layout: Any = None,
                 device: Any = None, pin_memory: Any = None) -> Value:
    return _integers(b, low, high, size, _place(device)).to(dtype or torch.int64)


@RULES(aten.randint_like.default)
def _randint_like(b: Builder, x: Value, high: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                  pin_memory: Any = None, memory_format: Any = None) -> Value:
    return _integers(b, 0, high, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.randint_like.low_dtype)
def _randint_like_low(b: Builder, x: Value, low: Any, high: Any, *, dtype: Any = None, layout: Any = None,
                      device: Any = None, pin_memory: Any = None, memory_format: Any = None) -> Value:
    return _integers(b, low, high, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.uniform.default)
def _uniform(b: Builder, x: Value, low: float = 0, high: float = 1, *, generator: Any = None) -> Value:
    return (draw(b, x.shape, x.device) * float(high - low) + float(low)).to(x.dtype)


@RULES("aten::normal_functional.default")
def _normal_functional(b: Builder, x: Value, mean: float = 0, std: float = 1, *, generator: Any = None) -> Value:
    return (_normal(b, x.shape, x.device) * float(std) + float(mean)).to(x.dtype)


@RULES(aten.exponential.default)
def _exponential(b: Builder, x: Value, rate: float = 1, *, generator: Any = None) -> Value:
    return ((-draw(b, x.shape, x.device)).map(prims.log1p) / -float(rate)).to(x.dtype)
