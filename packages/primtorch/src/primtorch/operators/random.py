"""Draws: shapes, limits, and distributions made of the Philox prims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch

from primtorch import prims
from primtorch.arguments import TENSORS, LikeOptions, TensorLike, TensorOptions
from primtorch.builder import Builder, Value, tensor_among
from primtorch.families import Family, Rule, Trait
from primtorch.layout import broadcast, broadcast_shapes, contiguous_strides, dense_like
from primtorch.operators.build import contiguous, elementwise
from primtorch.operators.creation import full_like, like, made, made_by, made_like
from primtorch.operators.refusals import WHOLE, is_empty, refuse, want
from primtorch.placement import resolved_device
from primtorch.prims import philox
from primtorch.promotion import compute_dtype
from primtorch.samples import after, call, listed, reals
from primtorch.spec import Size, TensorSpec

OP = Family("random")
OP.trait(Trait.ANYWHERE, "bernoulli bernoulli_")
OP.trait(Trait.TO_FIRST, "bernoulli.Tensor")
OP.trait(Trait.CONVERTS_OUT, "bernoulli normal rand randint randn randperm")
OP.trait(Trait.DTYPE_OF_OUT, "bernoulli rand randint randn randperm")
OP.trait(Trait.OVERLAPS, "multinomial rand randint randn randperm")
OP.formula("rand_like randn_like rand_like.generator? randn_like.generator?")(like)
OP.formula("randint_like randint_like.generator? randint_like.Tensor? randint_like.Tensor_generator?")(full_like)


@OP.formula("randint_like.low_dtype", "randint_like.low_generator_dtype?")
def _randint_like(x: TensorLike, low: Size, high: Size, **options: Unpack[LikeOptions]) -> TensorSpec:
    return like(x, **options)


# --- dropout -------------------------------------------------------------------------------------
def draw(b: Builder, shape: Sequence[Size], device: torch.device, dtype: torch.dtype = torch.float32) -> Value:
    """In [0, 1), with the dtype's digits and a seed of its own."""
    seed = b.emit(prims.random_seed, device)
    return b.emit(prims.random_uniform, seed, tuple(shape), 0, dtype)


_RARE = 2.0**-10


def chance(b: Builder, shape: Sequence[Size], device: torch.device, p: float) -> Value:
    """True with probability p. 24 random bits are too coarse for what happens, or fails, once in a thousand times."""
    coarse = p in (0.0, 1.0) or _RARE <= p <= 1 - _RARE
    return draw(b, shape, device, torch.float32 if coarse else torch.float64) < p


@OP.formula(
    "bernoulli.Tensor uniform normal_functional exponential geometric cauchy log_normal random random.from random.to"
)
def _random_like(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


def _draw(name: str, default: Sequence[float], right: Callable[..., bool], message: str) -> None:
    def check(x: TensorLike, *given: float, generator: object = None, **named: float) -> None:
        values = [*given, *named.values()]
        refuse(not right(*values, *default[len(values) :]), lambda: f"{name} expects {message}")

    OP.refuses(name)(check)


_draw("cauchy", (0.0, 1.0), lambda median, sigma: sigma > 0, "sigma > 0.0")
_draw("log_normal", (1.0, 2.0), lambda mean, std: std > 0, "std > 0.0")
_draw("exponential", (1.0,), lambda rate: rate > 0, "lambda > 0.0")
_draw("geometric", (), lambda p: 0 < p < 1, "p to be in (0, 1)")
_draw("uniform", (0.0, 1.0), lambda low, high: low <= high, "from <= to")
_draw("normal_functional", (0.0, 1.0), lambda mean, std: std >= 0, "std >= 0.0")
_draw("bernoulli.p", (0.5,), lambda p: 0 <= p <= 1, "p to be in [0, 1]")  # of `bernoulli_`: the function has none


def _drawn_integers(low: Size, high: Size | None, dtype: torch.dtype) -> None:
    """The limits of `random_`: in order, and within the dtype."""
    refuse(
        high is not None and low >= high,
        lambda: f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}",
    )
    if dtype.is_floating_point:
        least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    refuse(not least <= low <= most, lambda: f"from is out of bounds for {dtype}")
    refuse(high is not None and not least <= high - 1 <= most, lambda: f"to - 1 is out of bounds for {dtype}")


@OP.refuses("random.from")
def _refuse_random_from(x: TensorLike, low: Size, high: Size | None, *, generator: object = None) -> None:
    _drawn_integers(low, high, x.dtype)


@OP.refuses("random.to")
def _refuse_random_to(x: TensorLike, high: Size, *, generator: object = None) -> None:
    _drawn_integers(0, high, x.dtype)


@OP.refuses("random")
def _refuse_random(x: TensorLike, *, generator: object = None) -> None:
    wide = x.dtype in (torch.uint16, torch.uint32, torch.uint64)
    refuse(wide, lambda: f"random_ is not implemented for {x.dtype}", NotImplementedError)


@OP.formula("rrelu_with_noise_functional")
def _rrelu(x: TensorLike, noise: TensorLike, *args: object, **kwargs: object) -> tuple[TensorSpec, TensorSpec]:
    return _random_like(x), _random_like(noise)


@OP.rule("rrelu_with_noise_functional")
def _lower_rrelu(
    b: Builder,
    x: Value,
    noise: Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Value, Value]:
    if not training:
        return b.where(x > 0, x, (x.compute() * ((lower + upper) / 2)).to(x.dtype)), noise
    slope = (draw(b, x.shape, x.device, compute_dtype(x.dtype)) * (upper - lower) + lower).to(x.dtype)
    new_noise = b.where(x <= 0, slope, 1)
    return (x.compute() * new_noise.compute()).to(x.dtype), new_noise.to(noise.dtype)


@OP.formula("rrelu_with_noise_backward")
def _rrelu_backward(grad: TensorLike, x: TensorLike, noise: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return elementwise((grad, x, noise), grad.dtype)


@OP.rule("rrelu_with_noise_backward")
def _lower_rrelu_backward(
    b: Builder, grad: Value, x: Value, noise: Value, lower: float, upper: float, training: bool, self_is_result: bool
) -> Value:
    if training and upper - lower > 1e-6:
        return (grad.compute() * noise.compute()).to(grad.dtype)
    return b.where(x > 0, grad, (grad.compute() * ((lower + upper) / 2)).to(grad.dtype))


def _own(generator: torch.Generator | None) -> None:
    if generator is not None:
        raise NotImplementedError(
            "a generator of the program's own: draws in a graph come from the device's default "
            "generator; seed that one, or keep the draw out of the graph"
        )


def _bits(b: Builder, shape: Sequence[Size], device: torch.device, width: int = 32) -> Value:
    seed = b.emit(prims.random_seed, device)
    return b.emit(prims.random_bits, seed, tuple(shape), 0, width)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a distribution of results of `dtype` is computed."""
    return compute_dtype(dtype) if dtype.is_floating_point else torch.float64


def _of_parts(
    b: Builder, shape: Sequence[Size], dtype: torch.dtype, draw_real: Callable[[Sequence[Size], torch.dtype], Value]
) -> Value:
    """A draw in `dtype`; of a complex number, both parts are drawn."""
    if not dtype.is_complex:
        return draw_real(shape, dtype)
    return b.emit(prims.view_as_complex, draw_real((*shape, 2), dtype.to_real()))


def _fraction(b: Builder, shape: Sequence[Size], dtype: torch.dtype, device: torch.device) -> Value:
    return _of_parts(b, shape, dtype, lambda sizes, real: draw(b, sizes, device, real))


def _standard_normal(b: Builder, shape: Sequence[Size], device: torch.device, dtype: torch.dtype) -> Value:
    """By Box and Muller (1958) from two streams of one seed, in float32 or float64."""
    seed = b.emit(prims.random_seed, device)
    radius = b.emit(prims.random_uniform, seed, tuple(shape), 0, dtype)
    angle = b.emit(prims.random_uniform, seed, tuple(shape), 1, dtype)
    length = ((1.0 - radius).map(prims.log) * -2.0).map(prims.sqrt)
    return length * (angle * (2 * math.pi)).map(prims.cos)


def _normal_draw(
    b: Builder, shape: Sequence[Size], dtype: torch.dtype, device: torch.device, mean: float = 0.0, std: float = 1.0
) -> Value:
    """Normal numbers. A complex one's parts share the variance, and both have the mean."""
    part = std * math.sqrt(0.5) if dtype.is_complex else std

    def real(sizes: Sequence[Size], kind: torch.dtype) -> Value:
        z = _standard_normal(b, sizes, device, _wide(kind))
        return (z if (mean, part) == (0.0, 1.0) else z * part + mean).to(kind)

    return _of_parts(b, shape, dtype, real)


@OP.formula("bernoulli.|p poisson binomial _standard_gamma _standard_gamma_grad _sample_dirichlet _dirichlet_grad")
def _drawn(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(x, x.shape)


@OP.rule("bernoulli.Tensor")
def _lower_bernoulli_tensor(b: Builder, x: Value, p: Value, *, generator: torch.Generator | None = None) -> Value:
    _own(generator)
    want(b, (p >= 0) & (p <= 1), "bernoulli expects all elements of p to be in [0, 1]")
    return (draw(b, x.shape, x.device, _wide(p.dtype)) < p.to(_wide(p.dtype))).to(x.dtype)


@OP.rule("bernoulli")
def _lower_bernoulli(b: Builder, x: Value, *, generator: torch.Generator | None = None) -> Value:
    return _lower_bernoulli_tensor(b, x, x, generator=generator)


@OP.rule("bernoulli.p")
def _lower_bernoulli_p(b: Builder, x: Value, p: float, *, generator: torch.Generator | None = None) -> Value:
    _own(generator)
    return chance(b, x.shape, x.device, float(p)).to(x.dtype)


@OP.formula("rand", "randn", "rand.generator", "randn.generator")
def _rand(size: Sequence[Size], *, generator: object = None, **options: Unpack[TensorOptions]) -> TensorSpec:
    return made(size, options.get("dtype"), options.get("device"))


def _refuse_whole(dtype: torch.dtype | None) -> None:
    refuse(dtype in WHOLE, lambda: f"a uniform or normal draw is not implemented for {dtype}", NotImplementedError)


@OP.refuses("rand", "randn")
def _refuse_rand(size: object, *, dtype: torch.dtype | None = None, **options: object) -> None:
    _refuse_whole(dtype)


@OP.rule("rand")
def _lower_rand(
    b: Builder,
    size: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return _fraction(b, size, *made_by(options))


@OP.refuses("rand_like", "randn_like")
def _refuse_rand_like(x: TensorLike, *, dtype: torch.dtype | None = None, **options: object) -> None:
    _refuse_whole(dtype or x.dtype)


@OP.rule("rand_like")
def _lower_rand_like(
    b: Builder,
    x: Value,
    **options: Unpack[LikeOptions],
) -> Value:
    return _fraction(b, x.shape, *made_like(x, options))


@OP.rule("randn")
def _lower_randn(
    b: Builder,
    size: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return _normal_draw(b, size, *made_by(options))


@OP.rule("randn_like")
def _lower_randn_like(
    b: Builder,
    x: Value,
    **options: Unpack[LikeOptions],
) -> Value:
    return _normal_draw(b, x.shape, *made_like(x, options))


_FEW, _MANY = 2**16, 2**40
_LOWEST = -(2**63)


def _integers(b: Builder, low: Size, high: Size, shape: Sequence[Size], device: torch.device) -> Value:
    """int64 in [low, high), at most 2^64 of them, each as likely as the remainder of a 64-bit number makes it.

    Up to 2^16 of them are remainders of 32 bits; for symbolic limits and up to 2^40, of 63 bits: both are even to one
    part in 2^16.
    """
    count = high - low
    if not isinstance(count, int):
        return (_bits(b, shape, device, 64) & (2**63 - 1)) % count + low
    if count <= _FEW:
        return _bits(b, shape, device) % count + low
    bits = _bits(b, shape, device, 64)
    if count == 2**64:
        return bits
    if count & (count - 1) == 0:
        return (bits & (count - 1)) + low
    if count <= _MANY:
        return (bits & (2**63 - 1)) % count + low
    if count > 2**63:  # at most one of them fits into the unsigned number
        over = (bits ^ _LOWEST) >= (count - 2**64) ^ _LOWEST
        return b.where(over, bits - (count - 2**64), bits) + low
    # The remainder of the unsigned number, from that of its upper 63 bits.
    half, last = b.binary(prims.shift_right, bits, 1) & (2**63 - 1), bits & 1
    rest = half % count
    short = count - rest - last
    return b.where(rest >= short, rest - short, rest + rest + last) + low


@OP.formula("randint", "randint.generator")
def _randint(
    high: Size, size: Sequence[Size], *, generator: object = None, **options: Unpack[TensorOptions]
) -> TensorSpec:
    return made(size, options.get("dtype") or torch.int64, options.get("device"))


@OP.refuses("randint", "randint.generator")
def _refuse_randint(high: Size, size: object, *, dtype: torch.dtype | None = None, **options: object) -> None:
    _drawn_integers(0, high, dtype or torch.int64)


@OP.refuses("randint.low", "randint.low_generator")
def _refuse_randint_low(
    low: Size, high: Size, size: object, *, dtype: torch.dtype | None = None, **options: object
) -> None:
    _drawn_integers(low, high, dtype or torch.int64)


@OP.formula("randint.low", "randint.low_generator")
def _randint_low(
    low: Size, high: Size, size: Sequence[Size], *, generator: object = None, **options: Unpack[TensorOptions]
) -> TensorSpec:
    return _randint(high, size, **options)


@OP.rule("randint")
def _lower_randint(
    b: Builder,
    high: Size,
    size: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return _lower_randint_low(b, 0, high, size, **options)


@OP.rule("randint.low")
def _lower_randint_low(
    b: Builder,
    low: Size,
    high: Size,
    size: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    place = resolved_device(options.get("device"))
    return _integers(b, low, high, size, place).to(options.get("dtype") or torch.int64)


@OP.refuses("randint_like")
def _refuse_randint_like(x: TensorLike, high: Size, *, dtype: torch.dtype | None = None, **options: object) -> None:
    _drawn_integers(0, high, dtype or x.dtype)


@OP.refuses("randint_like.low_dtype")
def _refuse_randint_like_low(
    x: TensorLike, low: Size, high: Size, *, dtype: torch.dtype | None = None, **options: object
) -> None:
    _drawn_integers(low, high, dtype or x.dtype)


@OP.rule("randint_like")
def _lower_randint_like(
    b: Builder,
    x: Value,
    high: Size,
    **options: Unpack[LikeOptions],
) -> Value:
    dtype, place = made_like(x, options)
    return _integers(b, 0, high, x.shape, place).to(dtype)


@OP.rule("randint_like.low_dtype")
def _lower_randint_like_low(
    b: Builder,
    x: Value,
    low: Size,
    high: Size,
    **options: Unpack[LikeOptions],
) -> Value:
    dtype, place = made_like(x, options)
    return _integers(b, low, high, x.shape, place).to(dtype)


@OP.rule("uniform")
def _lower_uniform(
    b: Builder, x: Value, low: float = 0, high: float = 1, *, generator: torch.Generator | None = None
) -> Value:
    _own(generator)

    def real(sizes: Sequence[Size], kind: torch.dtype) -> Value:
        return (draw(b, sizes, x.device, kind).compute() * float(high - low) + float(low)).to(kind)

    return _of_parts(b, x.shape, x.dtype, real)


@OP.rule("normal_functional?")
def _lower_normal_functional(
    b: Builder, x: Value, mean: float = 0, std: float = 1, *, generator: torch.Generator | None = None
) -> Value:
    _own(generator)
    return _normal_draw(b, x.shape, x.dtype, x.device, float(mean), float(std))


@OP.rule("exponential")
def _lower_exponential(b: Builder, x: Value, rate: float = 1, *, generator: torch.Generator | None = None) -> Value:
    """Never zero, so that it may be divided by."""
    _own(generator)
    wide = _wide(x.dtype)
    times = (-draw(b, x.shape, x.device, wide)).map(prims.log1p) / -float(rate)
    return times.maximum(torch.finfo(x.dtype).tiny).to(x.dtype)


@OP.rule("cauchy")
def _lower_cauchy(
    b: Builder, x: Value, median: float = 0, sigma: float = 1, *, generator: torch.Generator | None = None
) -> Value:
    _own(generator)
    angle = (draw(b, x.shape, x.device, _wide(x.dtype)) - 0.5) * math.pi
    return (angle.map(prims.tan) * float(sigma) + float(median)).to(x.dtype)


@OP.rule("geometric")
def _lower_geometric(b: Builder, x: Value, p: float, *, generator: torch.Generator | None = None) -> Value:
    """The number of trials up to the first success, by inversion."""
    _own(generator)
    trials = (-draw(b, x.shape, x.device, _wide(x.dtype))).map(prims.log1p) / math.log1p(-float(p))
    return trials.map(prims.ceil).maximum(1.0).to(x.dtype)


@OP.rule("log_normal")
def _lower_log_normal(
    b: Builder, x: Value, mean: float = 1, std: float = 2, *, generator: torch.Generator | None = None
) -> Value:
    _own(generator)
    return _normal_draw(b, x.shape, _wide(x.dtype), x.device, float(mean), float(std)).map(prims.exp).to(x.dtype)


@OP.formula("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def _normal(
    mean: TensorLike | float, std: TensorLike | float = 1.0, *, generator: torch.Generator | None = None
) -> TensorSpec:
    tensors = [t for t in (mean, std) if isinstance(t, TENSORS)]
    return contiguous(tensors[0], elementwise(tensors, tensors[0].dtype).shape)


@OP.refuses("normal.Tensor_float", "normal.float_float")
def _refuse_normal(mean: TensorLike | float, std: float = 1.0, *args: object, **options: object) -> None:
    refuse(std < 0, lambda: f"normal expects std >= 0.0, but found std {std}")


@OP.refuses("normal.Tensor_float_out", "normal.float_Tensor_out")
def _refuse_normal_out(
    mean: TensorLike | float, std: TensorLike | float = 1.0, *, out: TensorLike, **options: object
) -> None:
    """What these draw into is not given the result's shape."""
    for given in (mean, std):
        if isinstance(given, TENSORS):
            shape = tuple(out.shape)
            refuse(
                broadcast(shape, tuple(given.shape)) != shape,
                lambda: f"output with shape {list(out.shape)} doesn't match the broadcast shape",
            )


@OP.formula("normal.float_float")
def _normal_filled(
    mean: float, std: float, size: Sequence[Size], *, generator: object = None, **options: Unpack[TensorOptions]
) -> TensorSpec:
    shape = tuple(size)
    place = resolved_device(options.get("device"))
    return TensorSpec(shape, contiguous_strides(shape), options.get("dtype") or torch.get_default_dtype(), place)


@OP.rule("normal.Tensor_float", "normal.Tensor_Tensor", "normal.float_Tensor")
def _lower_normal_of(
    b: Builder, mean: Value | float, std: Value | float = 1.0, *, generator: torch.Generator | None = None
) -> Value:
    _own(generator)
    like = tensor_among(mean, std)
    shape = broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Value)))
    kind = functools.reduce(torch.promote_types, (_wide(v.dtype) for v in (mean, std) if isinstance(v, Value)))
    if isinstance(std, Value):
        want(b, std >= 0, "normal expects all elements of std >= 0.0")
    z = _standard_normal(b, shape, like.device, kind)
    wide = [v.to(kind) if isinstance(v, Value) else v for v in (mean, std)]
    return b.binary(prims.add, b.binary(prims.mul, z, wide[1]), wide[0]).to(like.dtype)


@OP.rule("normal.float_float")
def _lower_normal_numbers(
    b: Builder,
    mean: float,
    std: float,
    size: Sequence[Size],
    *,
    generator: torch.Generator | None = None,
    **options: Unpack[TensorOptions],
) -> Value:
    _own(generator)
    return _normal_draw(b, size, *made_by(options), float(mean), float(std))


def _top(dtype: torch.dtype) -> int:
    """The largest number of `random_`: to it, the dtype holds all integers."""
    if dtype.is_floating_point:
        return int(2 ** philox.digits(dtype))
    return 1 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**63 - 1)


@OP.rule("random")
def _lower_random(b: Builder, x: Value, *, generator: torch.Generator | None = None) -> Value:
    _own(generator)
    return _integers(b, 0, _top(x.dtype) + 1, x.shape, x.device).to(x.dtype)


@OP.rule("random.to")
def _lower_random_below(b: Builder, x: Value, to: Size, *, generator: torch.Generator | None = None) -> Value:
    _own(generator)
    return _integers(b, 0, to, x.shape, x.device).to(x.dtype)


# In the schema `from` is a word that Python keeps for itself; FX passes it by position.
@OP.rule("random.from?")
def _lower_random_between(
    b: Builder, x: Value, low: Size, high: Size | None, *, generator: torch.Generator | None = None
) -> Value:
    """Without `high`, up to the largest number; from the least of all integers, each of them."""
    _own(generator)
    if high is None:
        high = 2**63 if isinstance(low, int) and low == _LOWEST else _top(x.dtype) + 1
    return _integers(b, low, high, x.shape, x.device).to(x.dtype)


@OP.rule("randint_like.Tensor?")
def _lower_randint_like_tensor(
    b: Builder,
    x: Value,
    high: Value,
    **options: Unpack[LikeOptions],
) -> Value:
    bits = _bits(b, x.shape, x.device, 64) & (2**63 - 1)
    return (bits % high.to(torch.int64)).to(options.get("dtype") or x.dtype)


def _with_generator(rule: Rule) -> Rule:
    """The same draw in the overload that has a generator."""

    def with_generator(
        b: Builder, *args: object, generator: torch.Generator | None = None, **options: object
    ) -> object:
        _own(generator)
        return rule(b, *args, **options)

    return with_generator


for _name, _rule in (
    ("rand.generator", _lower_rand),
    ("randn.generator", _lower_randn),
    ("randint.generator", _lower_randint),
    ("randint.low_generator", _lower_randint_low),
    ("rand_like.generator", _lower_rand_like),
    ("randn_like.generator", _lower_randn_like),
    ("randint_like.generator", _lower_randint_like),
    ("randint_like.low_generator_dtype", _lower_randint_like_low),
    ("randint_like.Tensor_generator", _lower_randint_like_tensor),
    ("randperm.generator", lambda b, n, **options: b.emit(prims.randperm, n, **options)),
):
    OP.rule(f"{_name}?")(_with_generator(_rule))


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("randperm", "randperm.generator")
def _randperm(n: Size, *, generator: object = None, **options: Unpack[TensorOptions]) -> TensorSpec:
    return made((n,), options.get("dtype") or torch.int64, options.get("device"))


@OP.formula("rrelu_with_noise")
def _rrelu_drawn(x: TensorLike, noise: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return contiguous(x, x.shape)


@OP.formula("multinomial")
def _multinomial(
    x: TensorLike, num_samples: Size, replacement: bool = False, *, generator: torch.Generator | None = None
) -> TensorSpec:
    shape = (*x.shape[:-1], num_samples)
    return TensorSpec(shape, contiguous_strides(shape), torch.int64, x.device)


@OP.refuses("multinomial")
def _refuse_multinomial(
    x: TensorLike, num_samples: Size, replacement: bool = False, *, generator: torch.Generator | None = None
) -> None:
    refuse(x.dim() not in (1, 2), "prob_dist must be 1 or 2 dim")
    refuse(
        not x.dtype.is_floating_point,
        lambda: f"multinomial only supports floating-point dtypes for input, got {x.dtype}",
    )
    refuse(is_empty(x.shape[-1]), "invalid multinomial distribution (sum of probabilities <= 0)")
    refuse(num_samples <= 0, "cannot sample n_sample <= 0 samples")
    refuse(
        not replacement and num_samples > x.shape[-1],
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )
    refuse(type(x.shape[-1]) is int and x.shape[-1] > 2**24, "number of categories cannot exceed 2^24")


# --- samples ---------------------------------------------------------------------------------------

OP.samples("rand randn", call([2, 3]), call([0]))
OP.samples("rand.generator randn.generator", call([2, 3], generator=None))
OP.samples("rand_like.generator randn_like.generator", call(reals(2, 3), generator=None))
OP.samples("randint", call(5, [2, 3]))
OP.samples("randint.generator", call(5, [2, 3], generator=None))
OP.samples("randint.low", call(2, 5, [2, 3]))
OP.samples("randint.low_generator", call(2, 5, [2, 3], generator=None))
OP.samples("randint_like", call(reals(2, 3), 5))
OP.samples("randint_like.Tensor", call(reals(2, 3), after(torch.squeeze, listed(5))))
OP.samples("randint_like.Tensor_generator", call(reals(2, 3), after(torch.squeeze, listed(5)), generator=None))
OP.samples("randint_like.generator", call(reals(2, 3), 5, generator=None))
OP.samples("randint_like.low_dtype", call(reals(2, 3), 2, 5))
OP.samples("randint_like.low_generator_dtype", call(reals(2, 3), 2, 5, generator=None))
OP.samples("random.from", call(reals(2, 3), 2, 5))
OP.samples("random.to", call(reals(2, 3), 5))
OP.samples("randperm", call(7))
OP.samples("randperm.generator", call(7, generator=None))
OP.samples("normal.float_float", call(0.5, 2.0, [2, 3]))
OP.samples("multinomial", call(reals(2, 5, low=0.0), 3))
OP.samples("binomial", call(reals(3, 4, low=6.0, high=6.1), reals(3, 4, low=0.1, high=0.9)))
OP.samples(
    "_dirichlet_grad", call(reals(3, 4, low=0.1, high=0.9), reals(3, 4, low=0.5), reals(3, 4, low=2.0, high=3.0))
)
