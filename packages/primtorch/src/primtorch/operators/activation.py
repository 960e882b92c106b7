"""Activations and their gradients, dropout."""

from __future__ import annotations

import math
from typing import Any

import torch

from primtorch import prims
from primtorch.arguments import Number, TensorLike
from primtorch.builder import Builder, Operand, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Formula, Trait
from primtorch.layout import broadcast_shapes, contiguous_strides, dense_like, same_shape, wrap_dim
from primtorch.operators.build import as_dense, elementwise
from primtorch.operators.elementwise import pointwise, promoted, same, scaled, unary_formula
from primtorch.operators.random import chance
from primtorch.operators.refusals import refuse
from primtorch.promotion import compute_dtype, float_of, promote_number, result_type
from primtorch.samples import call, integers, listed, reals, truths
from primtorch.spec import TensorSpec

OP = Family("activation", elementwise=True)
OP.trait(Trait.EXACT_OUT, "gelu hardshrink log_sigmoid_forward softplus softshrink")
OP.trait(Trait.OVERLAPS, "threshold")


OP.formula(
    "relu relu6 threshold leaky_relu elu celu selu gelu silu mish hardswish hardsigmoid softplus softshrink hardshrink"
)(unary_formula(same))


@OP.refuses("softshrink")
def _refuse_softshrink(x: TensorLike, lambd: float = 0.5) -> None:
    refuse(not (torch.is_tensor(lambd) or lambd >= 0), lambda: f"lambda must be in range [0, inf), but found {lambd}")


@OP.refuses("gelu", "gelu_backward")
def _refuse_gelu(*args: object, approximate: str = "none") -> None:
    refuse(approximate not in ("none", "tanh"), "approximate argument must be either none or tanh.")


_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_GELU_CUBIC = 0.044715
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
# Derivatives of torch's read these from float32, in float64 as well.
_SIXTH = float.fromhex("0x1.555556p-3")  # of hardsigmoid
LEAST_VARIANCE = float.fromhex("0x1.197998p-40")  # 1e-12, of binary cross entropy


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x)), in the dtype of x."""
    return x.map(prims.sigmoid)


def _relu(b: Builder, x: Value) -> Value:
    return x.maximum(0)


OP.rule("relu")(_relu)
OP.rule("relu6")(lambda b, x: x.maximum(0).minimum(6))
OP.rule("threshold")(pointwise(lambda x, threshold, value: x.b.where(x <= threshold, value, x), 1, exact=True))


def _grad_of(*positions: int) -> Formula:
    """A backward operator that iterates over the tensors at these positions; the first has the first say on the
    layout. The dtype is theirs together."""

    def formula(*args: Any, **kwargs: object) -> TensorSpec:
        operands = [args[p] for p in positions]
        dtype = operands[0].dtype
        if any(o.dtype is not dtype for o in operands):
            dtype = result_type(operands)
        return elementwise(operands, dtype)

    return formula


OP.formula(
    "hardtanh_backward gelu_backward silu_backward mish_backward hardswish_backward hardsigmoid_backward "
    "softplus_backward softshrink_backward hardshrink_backward sigmoid_backward tanh_backward logit_backward"
)(_grad_of(0, 1))
OP.formula("threshold_backward leaky_relu_backward")(_grad_of(1, 0))
OP.rule("threshold_backward")(
    pointwise(lambda grad, x, threshold: grad.b.where(x <= threshold, 0, grad), 2, exact=True)
)


# --- smooth --------------------------------------------------------------------------------------
@OP.rule("gelu")
def lower_gelu(b: Builder, x: Value, *, approximate: str = "none") -> Value:
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


OP.rule("gelu_backward")(pointwise(_gelu_backward, 2))
OP.rule("silu")(pointwise(lambda x: x * sigmoid(x), 1))


def _silu_backward(grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return grad * s * (x * (1.0 - s) + 1.0)


OP.rule("silu_backward")(pointwise(_silu_backward, 2))


def _conj(derivative: Value) -> Value:
    """A holomorphic function's gradient is multiplied by the conjugate of its derivative."""
    return derivative.map(prims.conj) if derivative.dtype.is_complex else derivative


OP.rule("sigmoid_backward")(pointwise(lambda grad, y: grad * _conj(1 - y) * _conj(y), 2))
OP.rule("tanh_backward")(pointwise(lambda grad, y: grad * _conj(1 - y * y), 2))


def _softplus(x: Value, beta: Number = 1, threshold: float = 20) -> Value:
    scaled = x * beta
    return x.b.where(scaled > threshold, x, scaled.map(prims.exp).map(prims.log1p) / beta)


def _softplus_backward(grad: Value, x: Value, beta: Number, threshold: float) -> Value:
    scaled = x * beta
    return x.b.where(scaled > threshold, grad, grad * sigmoid(scaled))


OP.rule("softplus")(pointwise(_softplus, 1))
OP.rule("softplus_backward")(pointwise(_softplus_backward, 2))


def _tanh_softplus(x: Value) -> Value:
    return _softplus(x).map(prims.tanh)


def _mish_backward(grad: Value, x: Value) -> Value:
    t = _tanh_softplus(x)
    return grad * (t + x * sigmoid(x) * (1.0 - t * t))


OP.rule("mish")(pointwise(lambda x: x * _tanh_softplus(x), 1))
OP.rule("mish_backward")(pointwise(_mish_backward, 2))


def log_sigmoid(x: Value) -> Value:
    """log(1 / (1 + exp(-x))) as min(x, 0) - log1p(exp(-abs(x))), which does not overflow."""
    return x.minimum(0.0) - (-x.map(prims.abs)).map(prims.exp).map(prims.log1p)


@OP.formula("log_sigmoid_forward")
def _log_sigmoid(x: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    if Fact.LOG_SIGMOID_BY_ROWS.on(x.device):
        shape = tuple(x.shape)
        out = TensorSpec(shape, contiguous_strides(shape), x.dtype, x.device)
        return out, out
    return elementwise((x,), x.dtype), TensorSpec((0,), (1,), x.dtype, x.device)


@OP.rule("log_sigmoid_forward")
def _lower_log_sigmoid_forward(b: Builder, x: Value) -> tuple[Value, Value]:
    t = x.compute()
    keeps = Fact.KEEPS_EXP_OF_LOG_SIGMOID.on(x.device)
    kept = (-t.map(prims.abs)).map(prims.exp).to(x.dtype) if keeps else b.full((0,), 0, x.dtype, x.device)
    return log_sigmoid(t).to(x.dtype), kept


@OP.formula("log_sigmoid_backward")
def _log_sigmoid_backward(grad: TensorLike, x: TensorLike, buffer: TensorLike) -> TensorSpec:
    return elementwise((grad,), x.dtype)


@OP.rule("log_sigmoid_backward")
def _lower_log_sigmoid_backward(b: Builder, grad: Value, x: Value, buffer: Value) -> Value:
    return (grad.compute() * sigmoid(-x.compute())).to(x.dtype)


# --- piecewise -----------------------------------------------------------------------------------
def _hardsigmoid(x: Value) -> Value:
    return (x + 3.0).maximum(0.0).minimum(6.0) / 6.0


def _inside(x: Value, low: float, high: float) -> Value:
    return (x > low) & (x < high)


def _hardswish_backward(grad: Value, x: Value) -> Value:
    b = grad.b
    return b.where(x < -3.0, 0.0, b.where(x <= 3.0, grad * (x / 3.0 + 0.5), grad))


OP.rule("hardsigmoid")(pointwise(_hardsigmoid, 1))
OP.rule("hardsigmoid_backward")(pointwise(lambda grad, x: grad.b.where(_inside(x, -3.0, 3.0), grad * _SIXTH, 0.0), 2))
OP.rule("hardswish")(pointwise(lambda x: x * (x + 3.0).maximum(0.0).minimum(6.0) / 6.0, 1))
OP.rule("hardswish_backward")(pointwise(_hardswish_backward, 2))


@OP.formula("hardtanh")
def _hardtanh(x: TensorLike, *limits: object) -> TensorSpec:
    return as_dense(x)


OP.rule("hardtanh")(pointwise(lambda x, min_val=-1, max_val=1: x.maximum(min_val).minimum(max_val), 1, exact=True))
OP.rule("hardtanh_backward")(
    pointwise(lambda grad, x, low, high: grad.b.where((x <= low) | (x >= high), 0, grad), 2, exact=True)
)
OP.rule("leaky_relu")(pointwise(lambda x, slope=0.01: x.b.where(x > 0, x, x * slope), 1))
OP.rule("leaky_relu_backward")(pointwise(lambda grad, x, slope, is_result: grad.b.where(x > 0, grad, grad * slope), 2))


@OP.formula("prelu")
def _prelu_by_channel(x: TensorLike, weight: TensorLike) -> TensorSpec:
    return elementwise((x,), result_type((x, weight)))


@OP.rule("prelu")
def _lower_prelu(b: Builder, x: Value, weight: Value) -> Value:
    """One slope, or one for each channel, the second dim."""
    if x.rank > 1 and weight.rank == 1:
        weight = weight.reshape((weight.shape[0], *(1,) * (x.rank - 2)))
    return b.where(x > 0, x, x * weight)


@OP.formula("_prelu_kernel")
def _prelu(x: TensorLike, weight: TensorLike) -> TensorSpec:
    found = elementwise((x, weight), result_type((x, weight)))
    alike = same_shape(found.shape, tuple(x.shape))  # then it is written to memory like that of x
    return elementwise((x,), found.dtype) if alike else found


@OP.rule("_prelu_kernel")
def _lower_prelu_kernel(b: Builder, x: Value, weight: Value) -> Value:
    t, w = x.compute(), weight.compute()
    return b.where(t > 0, t, t * w).to(x.dtype)


@OP.formula("_prelu_kernel_backward")
def _prelu_backward(grad: TensorLike, x: TensorLike, weight: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    result = elementwise((x, weight, grad), x.dtype)
    return result, result


@OP.rule("_prelu_kernel_backward")
def _lower_prelu_kernel_backward(b: Builder, grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    shape = broadcast_shapes(x.shape, weight.shape, grad.shape)
    t, w, g = (v.compute().expand(shape) for v in (x, weight, grad))
    positive = t > 0
    return b.where(positive, g, g * w).to(x.dtype), b.where(positive, 0, g * t).to(x.dtype)


def _elu(x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return x.b.where(x > 0, x * scale, (x * input_scale).map(prims.expm1) * (alpha * scale))


def _elu_slope(grad: Value, x: Value, alpha: float, scale: float, input_scale: float, is_result: bool) -> Value:
    """Argument order of the rule's body; the ATen order puts the tensor last."""
    negative = (
        grad * input_scale * (x + alpha * scale)
        if is_result
        else (grad * (input_scale * alpha * scale) * (x * input_scale).map(prims.exp))
    )
    return grad.b.where(x <= 0, negative, grad * scale)


OP.rule("elu")(pointwise(_elu, 1))


@OP.formula("elu_backward")
def _elu_backward(
    grad: TensorLike, alpha: float, scale: float, input_scale: float, is_result: bool, x: TensorLike
) -> TensorSpec:
    return elementwise((grad, x), grad.dtype)


@OP.rule("elu_backward")
def _lower_elu_backward(
    b: Builder, grad: Value, alpha: float, scale: float, input_scale: float, is_result: bool, x: Value
) -> Value:
    return pointwise(_elu_slope, 2)(b, grad, x, alpha, scale, input_scale, is_result)  # type: ignore[no-any-return]


OP.rule("celu")(pointwise(lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha), 1))
OP.rule("selu")(pointwise(lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE, 1), 1))
OP.rule("hardshrink")(pointwise(lambda x, lambd=0.5: x.b.where((x >= -lambd) & (x <= lambd), 0, x), 1, exact=True))
OP.rule("hardshrink_backward")(
    pointwise(lambda grad, x, lambd: grad.b.where((x >= -lambd) & (x <= lambd), 0, grad), 2, exact=True)
)


def _softshrink(x: Value, lambd: float = 0.5) -> Value:
    b = x.b
    out = b.where(x > lambd, x - lambd, b.where(x < -lambd, x + lambd, 0))
    return b.where(x.map(prims.isnan), x, out)


OP.rule("softshrink")(pointwise(_softshrink, 1))
OP.rule("softshrink_backward")(
    pointwise(lambda grad, x, lambd: grad.b.where((x >= -lambd) & (x <= lambd), 0, grad), 2, exact=True)
)


# --- gated linear unit -----------------------------------------------------------------------------
def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    half = x.shape[dim] // 2
    return x.slice(dim, 0, half), x.slice(dim, half, x.shape[dim])


@OP.formula("glu")
def _glu(x: TensorLike, dim: int = -1) -> TensorSpec:
    refuse(x.dim() == 0, "glu does not support 0-dimensional tensors")
    wrapped = wrap_dim(dim, x.dim())
    shape = list(x.shape)
    refuse(
        shape[wrapped] % 2 != 0,
        lambda: f"Halving dimension must be even, but dimension {wrapped} is size {shape[wrapped]}",
    )
    shape[wrapped] = shape[wrapped] // 2
    half = TensorSpec(tuple(shape), x.stride(), x.dtype, x.device)
    return elementwise((half, half), x.dtype)


@OP.rule("glu")
def _lower_glu(b: Builder, x: Value, dim: int = -1) -> Value:
    first, second = _halves(x.compute(), x.dim(dim))
    return (first * sigmoid(second)).to(x.dtype)


@OP.formula("glu_backward")
def _glu_backward(grad: TensorLike, x: TensorLike, dim: int) -> TensorSpec:
    return TensorSpec(tuple(x.shape), contiguous_strides(tuple(x.shape)), x.dtype, x.device)


@OP.rule("glu_backward")
def _lower_glu_backward(b: Builder, grad: Value, x: Value, dim: int) -> Value:
    dim = x.dim(dim)
    first, second = _halves(x.compute(), dim)
    s, g = sigmoid(second), grad.compute()
    return b.cat([(g * s), (g * first * s * (1.0 - s))], dim).to(x.dtype)


@OP.formula("native_dropout")
def _native_dropout(x: TensorLike, p: float, train: bool | None) -> tuple[TensorSpec, TensorSpec]:
    strides = dense_like(tuple(x.shape), x.stride())
    out = TensorSpec(tuple(x.shape), strides, x.dtype, x.device)
    return out, TensorSpec(out.shape, strides, torch.bool, x.device)


@OP.rule("native_dropout")
def _lower_native_dropout(b: Builder, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False or p == 0:
        return x, b.full(x.shape, True, torch.bool, x.device)
    keep = chance(b, x.shape, x.device, 1.0 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return b.where(keep, x.compute() * scale, 0.0).to(x.dtype), keep


@OP.formula("native_dropout_backward")
def _native_dropout_backward(grad: TensorLike, mask: TensorLike, scale: float) -> TensorSpec:
    return elementwise((grad, mask), promote_number(grad.dtype, scale))


@OP.rule("native_dropout_backward")
def _lower_native_dropout_backward(b: Builder, grad: Value, mask: Value, scale: float) -> Value:
    dtype = float_of(grad.dtype)
    return b.where(mask.ne(0) if mask.dtype is not torch.bool else mask, grad.to(compute_dtype(dtype)) * scale, 0.0).to(
        dtype
    )


# --- fused ---------------------------------------------------------------------------------------
@OP.rule("_add_relu.Tensor", "_add_relu.Scalar")
def _lower_add_relu(b: Builder, x: Value, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type((x, y))
    wide = x.to(dtype).compute()
    other = y.to(wide.dtype) if isinstance(y, Value) else y
    other = scaled(b, other, alpha)
    return (wide + other).maximum(0).to(dtype)


@OP.rule("_masked_scale")
def _lower_masked_scale(b: Builder, x: Value, mask: Value, scale: float) -> Value:
    wide = x.compute()
    return (wide * mask.to(wide.dtype) * scale).to(x.dtype)


@OP.rule("_fused_dropout")
def _lower_fused_dropout(
    b: Builder, x: Value, p: float, generator: torch.Generator | None = None
) -> tuple[Value, Value]:
    """Keeps each element with probability p, unlike dropout."""
    if generator is not None:
        raise NotImplementedError("_fused_dropout with a generator of its own: draws come from the device's generator")
    keep = chance(b, x.shape, x.device, float(p))
    return b.where(keep, x.compute() / float(p), 0.0).to(x.dtype), keep.to(torch.uint8)


@OP.rule("logit_backward")
def _lower_logit_backward(b: Builder, grad: Value, x: Value, eps: float | None = None) -> Value:
    dtype = result_type((grad, x))
    g, p = promoted(b, (grad, x), compute_dtype(dtype))
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    inside = (p >= low) & (p <= high)
    return b.where(inside, g / (p * (1.0 - p)), math.nan if eps is None else 0.0).to(dtype)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("_fused_dropout", call(reals(3, 4), 0.5))
OP.samples("native_dropout", call(reals(3, 4), 0.5, True))
OP.samples("_masked_scale", call(reals(3, 4), integers(3, 4, below=2, dtype=torch.uint8), 2.0))
OP.samples("native_dropout_backward", call(reals(3, 4), truths(3, 4), 2.0))
OP.samples("glu_backward", call(reals(3, 2), reals(3, 4), 1))
OP.samples("prelu", call(reals(2, 3, 4), reals(3)))
OP.samples("log_sigmoid_backward", call(reals(2), listed(0.0, -1.0), listed(1.0, 0.36787944)))
