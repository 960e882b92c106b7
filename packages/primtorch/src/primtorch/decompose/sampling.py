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
from primtorch.prims.layout import broadcast_shapes

aten = torch.ops.aten
RULES = RuleTable()


def _place(device: Any) -> torch.device:
    return torch.device(device) if device is not None else torch.get_default_device()


def _own(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError(
            "a generator of the program's own: draws in a graph come from the device's default "
            "generator; seed that one, or keep the draw out of the graph"
        )


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
    _own(generator)
    return (draw(b, x.shape, x.device) < x.to(torch.float32)).to(x.dtype)


@RULES(aten.bernoulli.p)
def _bernoulli_p(b: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    _own(generator)
    return (draw(b, x.shape, x.device) < float(p)).to(x.dtype)


@RULES(aten.bernoulli.Tensor)
def _bernoulli_tensor(b: Builder, x: Value, p: Value, *, generator: Any = None) -> Value:
    _own(generator)
    return (draw(b, x.shape, x.device) < p.to(torch.float32)).to(x.dtype)


@RULES(aten.rand.default)
def _rand(
    b: Builder,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return draw(b, size, _place(device)).to(dtype or torch.get_default_dtype())


@RULES(aten.rand_like.default)
def _rand_like(
    b: Builder,
    x: Value,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return draw(b, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.randn.default)
def _randn(
    b: Builder,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _normal(b, size, _place(device)).to(dtype or torch.get_default_dtype())


@RULES(aten.randn_like.default)
def _randn_like(
    b: Builder,
    x: Value,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return _normal(b, x.shape, _place(device or x.device)).to(dtype or x.dtype)


def _integers(b: Builder, low: Any, high: Any, shape: Sequence[Any], device: torch.device) -> Value:
    return _bits(b, shape, device) % (high - low) + low  # type: ignore[no-any-return]


@RULES(aten.randint.default)
def _randint(
    b: Builder,
    high: Any,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _integers(b, 0, high, size, _place(device)).to(dtype or torch.int64)


@RULES(aten.randint.low)
def _randint_low(
    b: Builder,
    low: Any,
    high: Any,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _integers(b, low, high, size, _place(device)).to(dtype or torch.int64)


@RULES(aten.randint_like.default)
def _randint_like(
    b: Builder,
    x: Value,
    high: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return _integers(b, 0, high, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.randint_like.low_dtype)
def _randint_like_low(
    b: Builder,
    x: Value,
    low: Any,
    high: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return _integers(b, low, high, x.shape, _place(device or x.device)).to(dtype or x.dtype)


@RULES(aten.uniform.default)
def _uniform(b: Builder, x: Value, low: float = 0, high: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    return (draw(b, x.shape, x.device) * float(high - low) + float(low)).to(x.dtype)


@RULES("aten::normal_functional.default")
def _normal_functional(b: Builder, x: Value, mean: float = 0, std: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    return (_normal(b, x.shape, x.device) * float(std) + float(mean)).to(x.dtype)


@RULES(aten.exponential.default)
def _exponential(b: Builder, x: Value, rate: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    return ((-draw(b, x.shape, x.device)).map(prims.log1p) / -float(rate)).to(x.dtype)


@RULES(aten.cauchy.default)
def _cauchy(b: Builder, x: Value, median: float = 0, sigma: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    angle = (draw(b, x.shape, x.device) - 0.5) * math.pi
    return (angle.map(prims.tan) * float(sigma) + float(median)).to(x.dtype)


@RULES(aten.geometric.default)
def _geometric(b: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    """The number of trials up to the first success, by inversion."""
    _own(generator)
    trials = (-draw(b, x.shape, x.device)).map(prims.log1p) / math.log1p(-float(p))
    return trials.map(prims.ceil).maximum(1.0).to(x.dtype)


@RULES(aten.log_normal.default)
def _log_normal(b: Builder, x: Value, mean: float = 1, std: float = 2, *, generator: Any = None) -> Value:
    _own(generator)
    return (_normal(b, x.shape, x.device) * float(std) + float(mean)).map(prims.exp).to(x.dtype)


@RULES(aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor)
def _normal_of(b: Builder, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Value:
    _own(generator)
    like = mean if isinstance(mean, Value) else std
    shape = broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Value)))
    z = _normal(b, shape, like.device)
    wide = [v.to(torch.float32) if isinstance(v, Value) and v.dtype is not torch.float64 else v for v in (mean, std)]
    if any(isinstance(v, Value) and v.dtype is torch.float64 for v in wide):
        z, wide = z.to(torch.float64), [v.to(torch.float64) if isinstance(v, Value) else v for v in wide]
    out = b.binary(prims.add, b.binary(prims.mul, z, wide[1]), wide[0])
    return out.to(like.dtype)


@RULES(aten.normal.float_float)
def _normal_numbers(
    b: Builder,
    mean: float,
    std: float,
    size: Sequence[Any],
    *,
    generator: Any = None,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    _own(generator)
    z = _normal(b, size, _place(device)) * float(std) + float(mean)
    return z.to(dtype or torch.get_default_dtype())


@RULES(aten.random.default)
def _random(b: Builder, x: Value, *, generator: Any = None) -> Value:
    """Integers that the dtype holds exactly, from 0."""
    _own(generator)
    if x.dtype.is_floating_point:
        bits = min(-int(math.log2(torch.finfo(x.dtype).eps)) + 1, 31)
    else:
        bits = 1 if x.dtype is torch.bool else min(torch.iinfo(x.dtype).bits - int(torch.iinfo(x.dtype).min < 0), 31)
    return (_bits(b, x.shape, x.device) & (2**bits - 1)).to(x.dtype)  # type: ignore[no-any-return]


@RULES(aten.random.to)
def _random_below(b: Builder, x: Value, to: Any, *, generator: Any = None) -> Value:
    _own(generator)
    return _integers(b, 0, to, x.shape, x.device).to(x.dtype)


# In the schema `from` is a word that Python keeps for itself; FX passes it by position.
@RULES("aten::random.from")
def _random_between(b: Builder, x: Value, low: Any, high: Any, *, generator: Any = None) -> Value:
    _own(generator)
    return _integers(b, low, high, x.shape, x.device).to(x.dtype)


@RULES("aten::randint_like.Tensor")
def _randint_like_tensor(
    b: Builder,
    x: Value,
    high: Value,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return (_bits(b, x.shape, x.device) % high.to(torch.int64)).to(dtype or x.dtype)


def _with_generator(rule: Any) -> Any:
    """The same draw in the overload that has a generator."""

    def with_generator(b: Builder, *args: Any, generator: Any = None, **options: Any) -> Any:
        _own(generator)
        return rule(b, *args, **options)

    return with_generator


for _name, _rule in (
    ("rand.generator", _rand),
    ("randn.generator", _randn),
    ("randint.generator", _randint),
    ("randint.low_generator", _randint_low),
    ("rand_like.generator", _rand_like),
    ("randn_like.generator", _randn_like),
    ("randint_like.generator", _randint_like),
    ("randint_like.low_generator_dtype", _randint_like_low),
    ("randint_like.Tensor_generator", _randint_like_tensor),
    ("randperm.generator", lambda b, n, **options: b.emit(prims.randperm, n, **options)),
):
    RULES.add(f"aten::{_name}", _with_generator(_rule))
