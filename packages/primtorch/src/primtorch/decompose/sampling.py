"""Random numbers from the Philox prims: the distributions are eager's, the streams are our own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.activations import chance, draw
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable
from primtorch.layout import broadcast_shapes
from primtorch.placement import resolved_device
from primtorch.prims import philox
from primtorch.promotion import compute_dtype

aten = torch.ops.aten
RULES = RuleTable()


def _own(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError(
            "a generator of the program's own: draws in a graph come from the device's default "
            "generator; seed that one, or keep the draw out of the graph"
        )


def _bits(b: Builder, shape: Sequence[Any], device: torch.device, width: int = 32) -> Value:
    seed = b.emit(prims.random_seed, device)
    return b.emit(prims.random_bits, seed, tuple(shape), 0, width)  # type: ignore[no-any-return]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a distribution of results of `dtype` is computed."""
    return compute_dtype(dtype) if dtype.is_floating_point else torch.float64


def _of_parts(
    b: Builder, shape: Sequence[Any], dtype: torch.dtype, draw_real: Callable[[Sequence[Any], torch.dtype], Value]
) -> Value:
    """A draw in `dtype`; of a complex number, both parts are drawn."""
    if not dtype.is_complex:
        return draw_real(shape, dtype)
    return b.emit(prims.view_as_complex, draw_real((*shape, 2), dtype.to_real()))  # type: ignore[no-any-return]


def _fraction(b: Builder, shape: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Value:
    return _of_parts(b, shape, dtype, lambda sizes, real: draw(b, sizes, device, real))


def _standard_normal(b: Builder, shape: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Value:
    """By Box and Muller (1958) from two streams of one seed, in float32 or float64."""
    seed = b.emit(prims.random_seed, device)
    radius = b.emit(prims.random_uniform, seed, tuple(shape), 0, dtype)
    angle = b.emit(prims.random_uniform, seed, tuple(shape), 1, dtype)
    length = ((1.0 - radius).map(prims.log) * -2.0).map(prims.sqrt)
    return length * (angle * (2 * math.pi)).map(prims.cos)  # type: ignore[no-any-return]


def _normal(
    b: Builder, shape: Sequence[Any], device: torch.device, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0
) -> Value:
    """Normal numbers. A complex one's parts share the variance, and both have the mean."""
    part = std * math.sqrt(0.5) if dtype.is_complex else std

    def real(sizes: Sequence[Any], kind: torch.dtype) -> Value:
        z = _standard_normal(b, sizes, device, _wide(kind))
        return (z if (mean, part) == (0.0, 1.0) else z * part + mean).to(kind)

    return _of_parts(b, shape, dtype, real)


def _want(b: Builder, fine: Value, message: str) -> None:
    b.emit(prims.assert_async, fine.reduce(prims.all, tuple(range(fine.rank))), message)


@RULES(aten.bernoulli.default)
def _bernoulli(b: Builder, x: Value, *, generator: Any = None) -> Value:
    return _bernoulli_tensor(b, x, x, generator=generator)  # type: ignore[no-any-return]


@RULES(aten.bernoulli.p)
def _bernoulli_p(b: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    _own(generator)
    return chance(b, x.shape, x.device, float(p)).to(x.dtype)


@RULES(aten.bernoulli.Tensor)
def _bernoulli_tensor(b: Builder, x: Value, p: Value, *, generator: Any = None) -> Value:
    _own(generator)
    _want(b, (p >= 0) & (p <= 1), "bernoulli expects all elements of p to be in [0, 1]")
    return (draw(b, x.shape, x.device, _wide(p.dtype)) < p.to(_wide(p.dtype))).to(x.dtype)


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
    return _fraction(b, size, resolved_device(device), dtype or torch.get_default_dtype())


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
    return _fraction(b, x.shape, resolved_device(device or x.device), dtype or x.dtype)


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
    return _normal(b, size, resolved_device(device), dtype or torch.get_default_dtype())


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
    return _normal(b, x.shape, resolved_device(device or x.device), dtype or x.dtype)


_FEW, _MANY = 2**16, 2**40
_LOWEST = -(2**63)


def _integers(b: Builder, low: Any, high: Any, shape: Sequence[Any], device: torch.device) -> Value:
    """int64 in [low, high), at most 2^64 of them, each as likely as the remainder of a 64-bit number makes it.

    Up to 2^16 of them are remainders of 32 bits; for symbolic limits and up to 2^40, of 63 bits: both are even to one
    part in 2^16.
    """
    count = high - low
    if not isinstance(count, int):
        return (_bits(b, shape, device, 64) & (2**63 - 1)) % count + low  # type: ignore[no-any-return]
    if count <= _FEW:
        return _bits(b, shape, device) % count + low  # type: ignore[no-any-return]
    bits = _bits(b, shape, device, 64)
    if count == 2**64:
        return bits
    if count & (count - 1) == 0:
        return (bits & (count - 1)) + low  # type: ignore[no-any-return]
    if count <= _MANY:
        return (bits & (2**63 - 1)) % count + low  # type: ignore[no-any-return]
    if count > 2**63:  # at most one of them fits into the unsigned number
        over = (bits ^ _LOWEST) >= (count - 2**64) ^ _LOWEST
        return b.where(over, bits - (count - 2**64), bits) + low  # type: ignore[no-any-return]
    # The remainder of the unsigned number, from that of its upper 63 bits.
    half, last = b.binary(prims.shift_right, bits, 1) & (2**63 - 1), bits & 1
    rest = half % count
    short = count - rest - last
    return b.where(rest >= short, rest - short, rest + rest + last) + low  # type: ignore[no-any-return]


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
    return _integers(b, 0, high, size, resolved_device(device)).to(dtype or torch.int64)


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
    return _integers(b, low, high, size, resolved_device(device)).to(dtype or torch.int64)


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
    return _integers(b, 0, high, x.shape, resolved_device(device or x.device)).to(dtype or x.dtype)


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
    return _integers(b, low, high, x.shape, resolved_device(device or x.device)).to(dtype or x.dtype)


@RULES(aten.uniform.default)
def _uniform(b: Builder, x: Value, low: float = 0, high: float = 1, *, generator: Any = None) -> Value:
    _own(generator)

    def real(sizes: Sequence[Any], kind: torch.dtype) -> Value:
        return (draw(b, sizes, x.device, kind).compute() * float(high - low) + float(low)).to(kind)

    return _of_parts(b, x.shape, x.dtype, real)


@RULES("aten::normal_functional.default")
def _normal_functional(b: Builder, x: Value, mean: float = 0, std: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    return _normal(b, x.shape, x.device, x.dtype, float(mean), float(std))


@RULES(aten.exponential.default)
def _exponential(b: Builder, x: Value, rate: float = 1, *, generator: Any = None) -> Value:
    """Never zero, so that it may be divided by."""
    _own(generator)
    wide = _wide(x.dtype)
    times = (-draw(b, x.shape, x.device, wide)).map(prims.log1p) / -float(rate)
    return times.maximum(torch.finfo(x.dtype).tiny).to(x.dtype)


@RULES(aten.cauchy.default)
def _cauchy(b: Builder, x: Value, median: float = 0, sigma: float = 1, *, generator: Any = None) -> Value:
    _own(generator)
    angle = (draw(b, x.shape, x.device, _wide(x.dtype)) - 0.5) * math.pi
    return (angle.map(prims.tan) * float(sigma) + float(median)).to(x.dtype)


@RULES(aten.geometric.default)
def _geometric(b: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    """The number of trials up to the first success, by inversion."""
    _own(generator)
    trials = (-draw(b, x.shape, x.device, _wide(x.dtype))).map(prims.log1p) / math.log1p(-float(p))
    return trials.map(prims.ceil).maximum(1.0).to(x.dtype)


@RULES(aten.log_normal.default)
def _log_normal(b: Builder, x: Value, mean: float = 1, std: float = 2, *, generator: Any = None) -> Value:
    _own(generator)
    return _normal(b, x.shape, x.device, _wide(x.dtype), float(mean), float(std)).map(prims.exp).to(x.dtype)


@RULES(aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor)
def _normal_of(b: Builder, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Value:
    _own(generator)
    like = mean if isinstance(mean, Value) else std
    shape = broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Value)))
    kind = functools.reduce(torch.promote_types, (_wide(v.dtype) for v in (mean, std) if isinstance(v, Value)))
    if isinstance(std, Value):
        _want(b, std >= 0, "normal expects all elements of std >= 0.0")
    z = _standard_normal(b, shape, like.device, kind)
    wide = [v.to(kind) if isinstance(v, Value) else v for v in (mean, std)]
    return b.binary(prims.add, b.binary(prims.mul, z, wide[1]), wide[0]).to(like.dtype)


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
    return _normal(b, size, resolved_device(device), dtype or torch.get_default_dtype(), float(mean), float(std))


def _top(dtype: torch.dtype) -> int:
    """The largest number of `random_`: to it, the dtype holds all integers."""
    if dtype.is_floating_point:
        return int(2 ** philox.digits(dtype))
    return 1 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**63 - 1)


@RULES(aten.random.default)
def _random(b: Builder, x: Value, *, generator: Any = None) -> Value:
    _own(generator)
    return _integers(b, 0, _top(x.dtype) + 1, x.shape, x.device).to(x.dtype)


@RULES(aten.random.to)
def _random_below(b: Builder, x: Value, to: Any, *, generator: Any = None) -> Value:
    _own(generator)
    return _integers(b, 0, to, x.shape, x.device).to(x.dtype)


# In the schema `from` is a word that Python keeps for itself; FX passes it by position.
@RULES("aten::random.from")
def _random_between(b: Builder, x: Value, low: Any, high: Any, *, generator: Any = None) -> Value:
    """Without `high`, up to the largest number; from the least of all integers, each of them."""
    _own(generator)
    if high is None:
        high = 2**63 if isinstance(low, int) and low == _LOWEST else _top(x.dtype) + 1
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
    bits = _bits(b, x.shape, x.device, 64) & (2**63 - 1)
    return (bits % high.to(torch.int64)).to(dtype or x.dtype)


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
