"""Elementwise operators: broadcasting, type promotion, TensorIterator's strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from primtorch.fake.build import Formula, Table, contiguous, elementwise
from primtorch.layout import broadcast, contiguous_strides, dense_like, iterator_strides
from primtorch.promotion import (
    TENSORS,
    complex_of,
    float_of,
    promote_number,
    real_of,
    result_type,
)
from primtorch.spec import TensorSpec

TABLE = Table()
DtypeRule = Callable[[torch.dtype], torch.dtype]


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _bool(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


def _unary(rule: DtypeRule) -> Formula:
    def formula(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
        shape = tuple(x.shape)
        return TensorSpec(shape, iterator_strides(shape, ((shape, x.stride()),)), rule(x.dtype), x.device)

    return formula


def _binary(rule: DtypeRule) -> Formula:
    def formula(a: Any, b: Any, *args: Any, **kwargs: Any) -> TensorSpec:
        if isinstance(a, TENSORS):
            if isinstance(b, TENSORS):
                dtype = a.dtype
                if b.dtype is not dtype:
                    dtype = result_type((a, b))
                shape, strides, device = tuple(a.shape), a.stride(), a.device
                if device == b.device:
                    other, layout = tuple(b.shape), (shape, strides)
                    shape = broadcast(shape, other)
                    return TensorSpec(
                        shape, iterator_strides(shape, (layout, (other, b.stride()))), rule(dtype), device
                    )
                return elementwise((a, b), rule(dtype))
            return elementwise((a,), rule(promote_number(a.dtype, b)))
        return elementwise((b,), rule(promote_number(b.dtype, a)))

    return formula


def _sum(*, booleans: bool) -> Formula:
    formula = _binary(_same)

    def scaled(a: Any, b: Any, alpha: Any = 1) -> TensorSpec:
        out: TensorSpec = formula(a, b)
        if type(alpha) is float and not (out.dtype.is_floating_point or out.dtype.is_complex):
            raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
        if not booleans and (_is_boolean(a) or _is_boolean(b)):
            raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported.")
        return out

    return scaled


def _is_boolean(x: Any) -> bool:
    return x.dtype is torch.bool if isinstance(x, TENSORS) else type(x) is bool


TABLE.each("add.Tensor add.Scalar", _sum(booleans=True))
TABLE.each("sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar", _sum(booleans=False))
TABLE.each(
    "neg positive relu sign sgn ceil floor round round.decimals trunc square nan_to_num frac bitwise_not "
    "hardtanh relu6 "
    "threshold leaky_relu elu celu selu gelu silu mish hardswish hardsigmoid softplus softshrink hardshrink "
    "conj_physical _conj_physical fill.Scalar",
    _unary(_same),
)
TABLE.each(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh "
    "acosh atanh "
    "sigmoid erf erfc erfinv lgamma digamma sinc special_entr special_erfcx special_i0e special_i1 special_i1e "
    "special_log_ndtr "
    "special_ndtri special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai i0 logit deg2rad rad2deg",
    _unary(float_of),
)
TABLE.each("isnan isinf isfinite isposinf isneginf signbit logical_not isreal", _unary(_bool))
TABLE.each("abs", _unary(real_of))
TABLE.each(
    "mul.Tensor mul.Scalar maximum minimum "
    "fmax fmin "
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor fmod.Tensor fmod.Scalar floor_divide "
    "floor_divide.Scalar "
    "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_or.Tensor bitwise_or.Scalar "
    "bitwise_or.Scalar_Tensor bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor __and__.Tensor "
    "__and__.Scalar "
    "__or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar __lshift__.Tensor __lshift__.Scalar __rshift__.Tensor "
    "__rshift__.Scalar bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor "
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor gcd lcm "
    "hypot nextafter "
    "heaviside pow.Tensor_Tensor pow.Tensor_Scalar logaddexp logaddexp2",
    _binary(_same),
)
TABLE.each(
    "div.Tensor div.Scalar true_divide.Tensor atan2 copysign.Tensor copysign.Scalar xlogy.Tensor xlogy.Scalar_Self "
    "xlogy.Scalar_Other special_xlog1py special_xlog1py.self_scalar special_xlog1py.other_scalar special_zeta "
    "special_zeta.self_scalar special_zeta.other_scalar igamma igammac special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_hermite_polynomial_h special_hermite_polynomial_he "
    "special_laguerre_polynomial_l special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w",
    _binary(float_of),
)
TABLE.each(
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar "
    "ge.Tensor ge.Scalar "
    "logical_and logical_or logical_xor",
    _binary(_bool),
)


@TABLE.op("pow.Scalar")
def _power_of_number(base: Any, exponent: Any) -> TensorSpec:
    """By rows, whatever the exponent's layout."""
    return contiguous(exponent, exponent.shape, promote_number(exponent.dtype, base))


@TABLE.op("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> TensorSpec:
    dtype = result_type((a, b))
    return elementwise((a, b), float_of(dtype) if rounding_mode is None else dtype)


@TABLE.op("ldexp.Tensor")
def _ldexp(x: Any, exponent: Any) -> TensorSpec:
    """x * 2**exponent: a product with the power, which is dense."""
    dtype = float_of(result_type((x, exponent)))
    return elementwise((x, elementwise((exponent,), dtype)), dtype)


@TABLE.op("polygamma")
def _polygamma(n: int, x: Any) -> TensorSpec:
    return elementwise((x,), float_of(x.dtype))


@TABLE.op("polygamma_")
def _polygamma_in_place(x: Any, n: int) -> Any:
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"result type Float can't be cast to the desired output type {x.dtype}")
    return x


@TABLE.op("angle")
def _angle(x: Any) -> TensorSpec:
    if x.dtype.is_complex:  # computed as complex numbers, whose real parts are then copied into a tensor of their own
        return contiguous(x, x.shape, real_of(x.dtype))
    return elementwise((x,), float_of(x.dtype))


@TABLE.op("complex")
def _complex(real: Any, imag: Any) -> TensorSpec:
    return elementwise((real, imag), complex_of(real.dtype))


@TABLE.op("polar")
def _polar(magnitude: Any, angle: Any) -> TensorSpec:
    return elementwise((magnitude, angle), complex_of(magnitude.dtype))


@TABLE.op("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(condition: Any, a: Any, b: Any) -> TensorSpec:
    return elementwise((condition, a, b), result_type((a, b)))


@TABLE.op("clamp", "clip", "clamp.Tensor", "clip.Tensor")
def _clamp(x: Any, min: Any = None, max: Any = None) -> TensorSpec:
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    return elementwise((x, min, max), result_type((x, min, max)))


@TABLE.op("clamp_min", "clamp_max", "clamp_min.Tensor", "clamp_max.Tensor")
def _clamp_one(x: Any, limit: Any) -> TensorSpec:
    return elementwise((x, limit), result_type((x, limit)))


@TABLE.op("lerp.Scalar", "lerp.Tensor")
def _lerp(start: Any, end: Any, weight: Any) -> TensorSpec:
    return elementwise((start, end, weight), start.dtype)


@TABLE.op("addcmul", "addcdiv")
def _addc(x: Any, a: Any, b: Any, *, value: Any = 1) -> TensorSpec:
    return elementwise((x, a, b), result_type((x, a, b)))


@TABLE.op("fill.Tensor")
def _fill_tensor(x: Any, value: Any) -> TensorSpec:
    return elementwise((x,), x.dtype)


@TABLE.op("isclose")
def _isclose(a: Any, b: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return elementwise((a, b), torch.bool)


@TABLE.op("_prelu_kernel")
def _prelu(x: Any, weight: Any) -> TensorSpec:
    return elementwise((x, weight), result_type((x, weight)))


@TABLE.op("_prelu_kernel_backward")
def _prelu_backward(grad: Any, x: Any, weight: Any) -> tuple[TensorSpec, TensorSpec]:
    result = elementwise((grad, x, weight), x.dtype)
    return result, result


@TABLE.op("log_sigmoid_forward")
def _log_sigmoid(x: Any) -> tuple[TensorSpec, TensorSpec]:
    if x.device.type == "cpu":
        shape = tuple(x.shape)
        out = TensorSpec(shape, contiguous_strides(shape), x.dtype, x.device)
        return out, out
    return elementwise((x,), x.dtype), TensorSpec((0,), (1,), x.dtype, x.device)


@TABLE.op("frexp.Tensor")
def _frexp(x: Any) -> tuple[TensorSpec, TensorSpec]:
    return elementwise((x,), x.dtype), elementwise((x,), torch.int32)


@TABLE.op("glu")
def _glu(x: Any, dim: int = -1) -> TensorSpec:
    wrapped = dim % x.dim()
    shape = list(x.shape)
    shape[wrapped] = shape[wrapped] // 2
    half = TensorSpec(tuple(shape), x.stride(), x.dtype, x.device)
    return elementwise((half, half), x.dtype)


def _grad_of(*positions: int) -> Formula:
    """A backward operator that iterates over the tensors at these positions; the dtype is theirs together."""

    def formula(*args: Any, **kwargs: Any) -> TensorSpec:
        operands = [args[p] for p in positions]
        dtype = operands[0].dtype
        if any(o.dtype is not dtype for o in operands):
            dtype = result_type(operands)
        return elementwise(operands, dtype)

    return formula


TABLE.each(
    "threshold_backward hardtanh_backward leaky_relu_backward gelu_backward silu_backward mish_backward "
    "hardswish_backward "
    "hardsigmoid_backward softplus_backward softshrink_backward hardshrink_backward sigmoid_backward tanh_backward "
    "logit_backward",
    _grad_of(0, 1),
)


@TABLE.op("elu_backward")
def _elu_backward(grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any) -> TensorSpec:
    return elementwise((grad, x), grad.dtype)


@TABLE.op("log_sigmoid_backward")
def _log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> TensorSpec:
    return elementwise((grad,), x.dtype)


@TABLE.op("native_dropout")
def _native_dropout(x: Any, p: float, train: bool | None) -> tuple[TensorSpec, TensorSpec]:
    strides = dense_like(tuple(x.shape), x.stride())
    out = TensorSpec(tuple(x.shape), strides, x.dtype, x.device)
    return out, TensorSpec(out.shape, strides, torch.bool, x.device)


@TABLE.op("native_dropout_backward")
def _native_dropout_backward(grad: Any, mask: Any, scale: float) -> TensorSpec:
    return elementwise((grad, mask), promote_number(grad.dtype, scale))


@TABLE.op("glu_backward")
def _glu_backward(grad: Any, x: Any, dim: int) -> TensorSpec:
    return TensorSpec(tuple(x.shape), contiguous_strides(tuple(x.shape)), x.dtype, x.device)
