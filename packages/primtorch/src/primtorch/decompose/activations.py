"""Activations and their gradients, dropout, elementwise losses."""

from __future__ import annotations

import math
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.pointwise import pointwise
from primtorch.decompose.table import RuleTable
from primtorch.promotion import compute_dtype, float_of, result_type

aten = torch.ops.aten
RULES = RuleTable()

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_GELU_CUBIC = 0.044715
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
# Derivatives of torch's read these from float32, in float64 as well.
_SIXTH = float.fromhex("0x1.555556p-3")  # of hardsigmoid
_LEAST_VARIANCE = float.fromhex("0x1.197998p-40")  # 1e-12, of binary cross entropy


def _sigmoid(x: Value) -> Value:
    return x.map(prims.sigmoid)


def _relu(b: Builder, x: Value) -> Value:
    return x.maximum(0)


RULES.add(aten.relu.default, _relu)
RULES.add(aten.relu6.default, lambda b, x: x.maximum(0).minimum(6))
RULES.add(
    aten.threshold.default, pointwise(lambda x, threshold, value: x.b.where(x <= threshold, value, x), 1, exact=True)
)
RULES.add(
    aten.threshold_backward.default,
    pointwise(lambda grad, x, threshold: grad.b.where(x <= threshold, 0, grad), 2, exact=True),
)


# --- smooth --------------------------------------------------------------------------------------
@RULES(aten.gelu.default)
def _gelu(b: Builder, x: Value, *, approximate: str = "none") -> Value:
    """x*Phi(x), Phi the normal distribution function; "tanh" is the approximation of Hendrycks and Gimpel (2016)."""
    t = x.compute()
    if approximate == "tanh":
        inner = (t + t * t * t * _GELU_CUBIC) * _SQRT_2_OVER_PI
        out = t * 0.5 * (inner.map(prims.tanh) + 1.0)
    else:
        out = t * 0.5 * ((t * _SQRT_HALF).map(prims.erf) + 1.0)
    return out.to(x.dtype)


def _gelu_backward(grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        square = x * x
        tanh = ((x + x * square * _GELU_CUBIC) * _SQRT_2_OVER_PI).map(prims.tanh)
        slope = (square * (3 * _GELU_CUBIC) + 1.0) * _SQRT_2_OVER_PI
        return grad * ((tanh + 1.0) * 0.5 + x * 0.5 * (1.0 - tanh * tanh) * slope)
    phi = ((x * _SQRT_HALF).map(prims.erf) + 1.0) * 0.5
    density = (x * x * -0.5).map(prims.exp) * _INV_SQRT_2PI
    return grad * (phi + x * density)


RULES.add(aten.gelu_backward.default, pointwise(_gelu_backward, 2))
RULES.add(aten.silu.default, pointwise(lambda x: x * _sigmoid(x), 1))


def _silu_backward(grad: Value, x: Value) -> Value:
    s = _sigmoid(x)
    return grad * s * (x * (1.0 - s) + 1.0)


RULES.add(aten.silu_backward.default, pointwise(_silu_backward, 2))


def _conj(derivative: Value) -> Value:
    """A holomorphic function's gradient is multiplied by the conjugate of its derivative."""
    return derivative.map(prims.conj) if derivative.dtype.is_complex else derivative


RULES.add(aten.sigmoid_backward.default, pointwise(lambda grad, y: grad * _conj(1 - y) * _conj(y), 2))
RULES.add(aten.tanh_backward.default, pointwise(lambda grad, y: grad * _conj(1 - y * y), 2))


def _softplus(x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    scaled = x * beta
    return x.b.where(scaled > threshold, x, scaled.map(prims.exp).map(prims.log1p) / beta)


def _softplus_backward(grad: Value, x: Value, beta: Any, threshold: Any) -> Value:
    scaled = x * beta
    return x.b.where(scaled > threshold, grad, grad * _sigmoid(scaled))


RULES.add(aten.softplus.default, pointwise(_softplus, 1))
RULES.add(aten.softplus_backward.default, pointwise(_softplus_backward, 2))


def _tanh_softplus(x: Value) -> Value:
    return _softplus(x).map(prims.tanh)


def _mish_backward(grad: Value, x: Value) -> Value:
    t = _tanh_softplus(x)
    return grad * (t + x * _sigmoid(x) * (1.0 - t * t))


RULES.add(aten.mish.default, pointwise(lambda x: x * _tanh_softplus(x), 1))
RULES.add(aten.mish_backward.default, pointwise(_mish_backward, 2))


def _log_sigmoid(x: Value) -> Value:
    return x.minimum(0.0) - (-x.map(prims.abs)).map(prims.exp).map(prims.log1p)


@RULES(aten.log_sigmoid_forward.default)
def _log_sigmoid_forward(b: Builder, x: Value) -> tuple[Value, Value]:
    t = x.compute()
    # The CPU kernel keeps exp(-|x|) for its backward, the CUDA kernel an empty tensor.
    kept = (
        (-t.map(prims.abs)).map(prims.exp).to(x.dtype) if x.device.type == "cpu" else b.full((0,), 0, x.dtype, x.device)
    )
    return _log_sigmoid(t).to(x.dtype), kept


@RULES(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(b: Builder, grad: Value, x: Value, buffer: Value) -> Value:
    return (grad.compute() * _sigmoid(-x.compute())).to(x.dtype)


# --- piecewise -----------------------------------------------------------------------------------
def _hardsigmoid(x: Value) -> Value:
    return (x + 3.0).maximum(0.0).minimum(6.0) / 6.0


def _inside(x: Value, low: float, high: float) -> Value:
    return (x > low) & (x < high)


def _hardswish_backward(grad: Value, x: Value) -> Value:
    b = grad.b
    return b.where(x < -3.0, 0.0, b.where(x <= 3.0, grad * (x / 3.0 + 0.5), grad))


RULES.add(aten.hardsigmoid.default, pointwise(_hardsigmoid, 1))
RULES.add(
    aten.hardsigmoid_backward.default,
    pointwise(lambda grad, x: grad.b.where(_inside(x, -3.0, 3.0), grad * _SIXTH, 0.0), 2),
)
RULES.add(aten.hardswish.default, pointwise(lambda x: x * (x + 3.0).maximum(0.0).minimum(6.0) / 6.0, 1))
RULES.add(aten.hardswish_backward.default, pointwise(_hardswish_backward, 2))
RULES.add(
    aten.hardtanh.default,
    pointwise(lambda x, min_val=-1, max_val=1: x.maximum(min_val).minimum(max_val), 1, exact=True),
)
RULES.add(
    aten.hardtanh_backward.default,
    pointwise(lambda grad, x, low, high: grad.b.where((x <= low) | (x >= high), 0, grad), 2, exact=True),
)
RULES.add(aten.leaky_relu.default, pointwise(lambda x, slope=0.01: x.b.where(x > 0, x, x * slope), 1))
RULES.add(
    aten.leaky_relu_backward.default,
    pointwise(lambda grad, x, slope, is_result: grad.b.where(x > 0, grad, grad * slope), 2),
)
RULES.add(aten.prelu.default, pointwise(lambda x, w: x.b.where(x > 0, x, x * w), 2))


@RULES(aten._prelu_kernel.default)
def _prelu_kernel(b: Builder, x: Value, weight: Value) -> Value:
    t, w = x.compute(), weight.compute()
    return b.where(t > 0, t, t * w).to(x.dtype)


@RULES(aten._prelu_kernel_backward.default)
def _prelu_kernel_backward(b: Builder, grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    g, t, w = grad.compute(), x.compute(), weight.compute()
    positive = t > 0
    return b.where(positive, g, g * w).to(x.dtype), b.where(positive, 0, g * t).to(x.dtype)


def _elu(x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    return x.b.where(x > 0, x * scale, (x * input_scale).map(prims.expm1) * (alpha * scale))


def _elu_backward(grad: Value, x: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool) -> Value:
    """Argument order of the rule's body; the ATen order puts the tensor last."""
    negative = (
        grad * input_scale * (x + alpha * scale)
        if is_result
        else (grad * (input_scale * alpha * scale) * (x * input_scale).map(prims.exp))
    )
    return grad.b.where(x <= 0, negative, grad * scale)


RULES.add(aten.elu.default, pointwise(_elu, 1))


@RULES(aten.elu_backward.default)
def _elu_backward_rule(
    b: Builder, grad: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Value
) -> Value:
    return pointwise(_elu_backward, 2)(b, grad, x, alpha, scale, input_scale, is_result)  # type: ignore[no-any-return]


RULES.add(aten.celu.default, pointwise(lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha), 1))
RULES.add(aten.selu.default, pointwise(lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1), 1))
RULES.add(
    aten.hardshrink.default,
    pointwise(lambda x, lambd=0.5: x.b.where((x >= -lambd) & (x <= lambd), 0, x), 1, exact=True),
)
RULES.add(
    aten.hardshrink_backward.default,
    pointwise(lambda grad, x, lambd: grad.b.where((x >= -lambd) & (x <= lambd), 0, grad), 2, exact=True),
)


def _softshrink(x: Value, lambd: Any = 0.5) -> Value:
    b = x.b
    out = b.where(x > lambd, x - lambd, b.where(x < -lambd, x + lambd, 0))
    return b.where(x.map(prims.isnan), x, out)


RULES.add(aten.softshrink.default, pointwise(_softshrink, 1))
RULES.add(
    aten.softshrink_backward.default,
    pointwise(lambda grad, x, lambd: grad.b.where((x >= -lambd) & (x <= lambd), 0, grad), 2, exact=True),
)


# --- gated linear unit -----------------------------------------------------------------------------
def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    half = x.shape[dim] // 2
    return x.slice(dim, 0, half), x.slice(dim, half, x.shape[dim])


@RULES(aten.glu.default)
def _glu(b: Builder, x: Value, dim: int = -1) -> Value:
    first, second = _halves(x.compute(), x.dim(dim))
    return (first * _sigmoid(second)).to(x.dtype)


@RULES(aten.glu_backward.default)
def _glu_backward(b: Builder, grad: Value, x: Value, dim: int) -> Value:
    dim = x.dim(dim)
    first, second = _halves(x.compute(), dim)
    s, g = _sigmoid(second), grad.compute()
    return b.cat([(g * s), (g * first * s * (1.0 - s))], dim).to(x.dtype)


# --- dropout -------------------------------------------------------------------------------------
def draw(b: Builder, shape: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Value:
    """In [0, 1), with the dtype's digits and a seed of its own."""
    seed = b.emit(prims.random_seed, device)
    return b.emit(prims.random_uniform, seed, tuple(shape), 0, dtype)  # type: ignore[no-any-return]


_RARE = 2.0**-10


def chance(b: Builder, shape: Any, device: torch.device, p: float) -> Value:
    """True with probability p. 24 random bits are too coarse for what happens, or fails, once in a thousand times."""
    coarse = p in (0.0, 1.0) or _RARE <= p <= 1 - _RARE
    return draw(b, shape, device, torch.float32 if coarse else torch.float64) < p


@RULES(aten.native_dropout.default)
def _native_dropout(b: Builder, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False or p == 0:
        return x, b.full(x.shape, True, torch.bool, x.device)
    keep = chance(b, x.shape, x.device, 1.0 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return b.where(keep, x.compute() * scale, 0.0).to(x.dtype), keep


@RULES(aten.native_dropout_backward.default)
def _native_dropout_backward(b: Builder, grad: Value, mask: Value, scale: float) -> Value:
    dtype = float_of(grad.dtype)
    return b.where(mask.ne(0) if mask.dtype is not torch.bool else mask, grad.to(compute_dtype(dtype)) * scale, 0.0).to(
        dtype
    )


@RULES(aten.rrelu_with_noise_functional.default)
def _rrelu(
    b: Builder,
    x: Value,
    noise: Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Value, Value]:
    if not training:
        return b.where(x > 0, x, (x.compute() * ((lower + upper) / 2)).to(x.dtype)), noise
    slope = (draw(b, x.shape, x.device, compute_dtype(x.dtype)) * (upper - lower) + lower).to(x.dtype)
    new_noise = b.where(x <= 0, slope, 1)
    return (x.compute() * new_noise.compute()).to(x.dtype), new_noise.to(noise.dtype)


@RULES(aten.rrelu_with_noise_backward.default)
def _rrelu_backward(
    b: Builder, grad: Value, x: Value, noise: Value, lower: float, upper: float, training: bool, self_is_result: bool
) -> Value:
    if training and upper - lower > 1e-6:
        return (grad.compute() * noise.compute()).to(grad.dtype)
    return b.where(x > 0, grad, (grad.compute() * ((lower + upper) / 2)).to(grad.dtype))


# --- losses that reduce pointwise terms --------------------------------------------------------------
_NONE, _MEAN, _SUM = 0, 1, 2


def reduced(loss: Value, reduction: int, dtype: torch.dtype) -> Value:
    dims = tuple(range(loss.rank))
    if reduction == _MEAN:
        loss = loss.mean(dims) if dims else loss
    elif reduction == _SUM:
        loss = loss.sum(dims)
    return loss.to(dtype)


def _loss(body: Any, *names: Any) -> None:
    def rule(b: Builder, x: Value, target: Value, reduction: int = _MEAN, *rest: Any, **options: Any) -> Value:
        dtype = result_type((x, target))
        t, y = x.to(compute_dtype(dtype)), target.to(compute_dtype(dtype))
        return reduced(body(t, y, *rest, **options), reduction, dtype)

    for name in names:
        RULES.add(name, rule)


def _loss_backward(slope: Any, *names: Any) -> None:
    """slope(x, target, *rest): the derivative of one term for x."""

    def rule(b: Builder, grad: Value, x: Value, target: Value, reduction: int, *rest: Any, **options: Any) -> Value:
        dtype = result_type((x, target))
        compute = compute_dtype(dtype)
        t, y, g = x.to(compute), target.to(compute), grad.to(compute)
        out = slope(t, y, *rest, **options)
        if reduction == _MEAN:
            g = g / out.numel()
        return (out * g).to(dtype)  # type: ignore[no-any-return]

    for name in names:
        RULES.add(name, rule)


def _huber(x: Value, y: Value, delta: float = 1.0) -> Value:
    z = (x - y).map(prims.abs)
    return x.b.where(z <= delta, z * z * 0.5, (z - 0.5 * delta) * delta)


def _huber_slope(x: Value, y: Value, delta: float) -> Value:
    return (x - y).maximum(-delta).minimum(delta)


def _smooth_l1(x: Value, y: Value, beta: float = 1.0) -> Value:
    z = (x - y).map(prims.abs)
    return z if beta == 0 else x.b.where(z < beta, z * z * (0.5 / beta), z - 0.5 * beta)


def _smooth_l1_slope(x: Value, y: Value, beta: float) -> Value:
    z = x - y
    sign = z.map(prims.sign)
    return sign if beta == 0 else x.b.where(z.map(prims.abs) < beta, z / beta, sign)


_loss(lambda x, y: (x - y) * (x - y), aten.mse_loss.default)
_loss_backward(lambda x, y: (x - y) * 2.0, aten.mse_loss_backward.default)
_loss(_huber, aten.huber_loss.default)
_loss_backward(_huber_slope, aten.huber_loss_backward.default)
_loss(_smooth_l1, aten.smooth_l1_loss.default)
_loss_backward(_smooth_l1_slope, aten.smooth_l1_loss_backward.default)
_loss(lambda x, y: (-x * y).map(prims.exp).map(prims.log1p), aten.soft_margin_loss.default)
_loss_backward(lambda x, y: -y * _sigmoid(-x * y), aten.soft_margin_loss_backward.default)


def _clamped_log(x: Value) -> Value:
    return x.map(prims.log).maximum(-100.0)


@RULES(aten.binary_cross_entropy.default)
def _bce(b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = _MEAN) -> Value:
    t, y = x.compute(), target.compute()
    loss = (y - 1.0) * (-t).map(prims.log1p).maximum(-100.0) - y * _clamped_log(t)
    return reduced(loss if weight is None else loss * weight.compute(), reduction, x.dtype)


@RULES(aten.binary_cross_entropy_backward.default)
def _bce_backward(
    b: Builder, grad: Value, x: Value, target: Value, weight: Value | None = None, reduction: int = _MEAN
) -> Value:
    t, y, g = x.compute(), target.compute(), grad.compute()
    out = g * (t - y) / ((1.0 - t) * t).maximum(_LEAST_VARIANCE)
    if weight is not None:
        out = out * weight.compute()
    return (out / x.numel() if reduction == _MEAN else out).to(x.dtype)


@RULES(aten.binary_cross_entropy_with_logits.default)
def _bce_logits(
    b: Builder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = _MEAN,
) -> Value:
    t, y = x.compute(), target.compute()
    if pos_weight is None:
        loss = (1.0 - y) * t - _log_sigmoid(t)
    else:
        loss = (1.0 - y) * t - ((pos_weight.compute() - 1.0) * y + 1.0) * _log_sigmoid(t)
    return reduced(loss if weight is None else loss * weight.compute(), reduction, x.dtype)
