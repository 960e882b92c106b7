"""Elementwise operators: type promotion, broadcasting, and reduced precision through float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import Rule, RuleTable
from primtorch.layout import broadcast_shapes
from primtorch.prims import Prim
from primtorch.promotion import COMPUTE_DTYPE, compute_dtype, float_of, number_as, result_type

aten = torch.ops.aten
RULES = RuleTable()

Body = Callable[..., Value]


def promoted(b: Builder, operands: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    """Operands in one dtype and shape; numbers stay numbers, None stays None."""
    shapes = [o.spec.shape for o in operands if isinstance(o, Value)]
    shape = shapes[0] if len(shapes) == 1 else broadcast_shapes(*shapes)
    return [
        o.to(dtype).expand(shape) if isinstance(o, Value) else _number(b, o, dtype, shape, operands) for o in operands
    ]


def _number(b: Builder, value: Any, dtype: torch.dtype, shape: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.SymInt) and (dtype.is_floating_point or dtype.is_complex):
        device = next(o.device for o in operands if isinstance(o, Value))
        return b.full((), value, dtype, device).expand(shape)
    return number_as(value, dtype)


def pointwise(body: Body, arity: int, *, to_float: bool = False, exact: bool = False, to_bool: bool = False) -> Rule:
    """A rule for an operator whose first `arity` arguments are operands.

    Args:
        body: body(*operands, *rest, **options) on values of one dtype and shape.
        to_float: integers become the default float.
        exact: the result is one of the operands' values or needs no rounding, so that reduced precision stays.
        to_bool: the body gives bool, operands are compared in their promoted dtype.
    """

    def rule(b: Builder, *args: Any, **kwargs: Any) -> Value:
        operands, rest = args[:arity], args[arity:]
        dtype = result_type(operands)
        if to_float:
            dtype = float_of(dtype)
        values = promoted(b, operands, dtype if exact or to_bool else compute_dtype(dtype))
        out = body(*values, *rest, **kwargs)
        return out if to_bool else out.to(dtype)

    return rule


def _unary(prim: Prim) -> Body:
    return lambda x: x.map(prim)


def _table_of_unaries() -> None:
    to_float = {
        aten.exp: prims.exp,
        aten.exp2: prims.exp2,
        aten.expm1: prims.expm1,
        aten.log: prims.log,
        aten.log2: prims.log2,
        aten.log10: prims.log10,
        aten.log1p: prims.log1p,
        aten.sqrt: prims.sqrt,
        aten.rsqrt: prims.rsqrt,
        aten.reciprocal: prims.reciprocal,
        aten.sin: prims.sin,
        aten.cos: prims.cos,
        aten.tan: prims.tan,
        aten.asin: prims.asin,
        aten.acos: prims.acos,
        aten.atan: prims.atan,
        aten.sinh: prims.sinh,
        aten.cosh: prims.cosh,
        aten.tanh: prims.tanh,
        aten.asinh: prims.asinh,
        aten.acosh: prims.acosh,
        aten.atanh: prims.atanh,
        aten.sigmoid: prims.sigmoid,
        aten.erf: prims.erf,
        aten.erfc: prims.erfc,
        aten.erfinv: prims.erfinv,
        aten.lgamma: prims.lgamma,
        aten.digamma: prims.digamma,
        aten.i0: prims.i0,
        aten.special_i0e: prims.i0e,
        aten.special_i1: prims.i1,
        aten.special_i1e: prims.i1e,
        aten.special_ndtri: prims.ndtri,
        aten.special_log_ndtr: prims.log_ndtr,
        aten.special_erfcx: prims.erfcx,
        aten.special_airy_ai: prims.airy_ai,
        aten.special_bessel_j0: prims.bessel_j0,
        aten.special_bessel_j1: prims.bessel_j1,
        aten.special_bessel_y0: prims.bessel_y0,
        aten.special_bessel_y1: prims.bessel_y1,
        aten.special_modified_bessel_k0: prims.modified_bessel_k0,
        aten.special_modified_bessel_k1: prims.modified_bessel_k1,
        aten.special_modified_bessel_i0: prims.modified_bessel_i0,
        aten.special_modified_bessel_i1: prims.modified_bessel_i1,
        aten.special_scaled_modified_bessel_k0: prims.scaled_modified_bessel_k0,
        aten.special_scaled_modified_bessel_k1: prims.scaled_modified_bessel_k1,
        aten.special_spherical_bessel_j0: prims.spherical_bessel_j0,
    }
    for packet, prim in to_float.items():
        RULES.add(packet.default, pointwise(_unary(prim), 1, to_float=True))
    keep_integers = {aten.floor: prims.floor, aten.ceil: prims.ceil, aten.trunc: prims.trunc}
    for packet, prim in keep_integers.items():
        RULES.add(packet.default, pointwise(_rounding(prim), 1, exact=True))
    RULES.add(aten.neg.default, pointwise(_unary(prims.neg), 1, exact=True))
    RULES.add(aten.bitwise_not.default, pointwise(_unary(prims.bitwise_not), 1, exact=True))


def _rounding(prim: Prim) -> Body:
    return lambda x: x.map(prim) if x.dtype.is_floating_point else x


_table_of_unaries()


@RULES(aten.abs.default)
def _abs(b: Builder, x: Value) -> Value:
    return x if x.dtype is torch.bool else x.map(prims.abs)


@RULES(aten.round.default, aten.round.decimals)
def _round(b: Builder, x: Value, *, decimals: int = 0) -> Value:
    if not x.dtype.is_floating_point:
        return x
    if decimals == 0:
        return x.map(prims.round)
    scale = float(10 ** abs(decimals))
    wide = x.compute()
    out = (wide * scale).map(prims.round) / scale if decimals > 0 else (wide / scale).map(prims.round) * scale
    return out.to(x.dtype)


@RULES(aten.sign.default)
def _sign(b: Builder, x: Value) -> Value:
    return x if x.dtype is torch.bool else x.map(prims.sign)


@RULES(aten.sgn.default)
def _sgn(b: Builder, x: Value) -> Value:
    if not x.dtype.is_complex:
        return _sign(b, x)  # type: ignore[no-any-return]
    size = x.map(prims.abs)
    zero = size.eq(0.0)
    return b.where(zero, 0j, x / b.where(zero, 1.0, size).to(x.dtype))


@RULES(aten.angle.default)
def _angle(b: Builder, x: Value) -> Value:
    if x.dtype.is_complex:
        return b.binary(prims.atan2, x.map(prims.imag), x.map(prims.real))
    dtype = float_of(x.dtype)
    x = x.to(dtype)
    out = b.where(x < 0.0, b.full_like(x, math.pi), 0.0)
    return b.where(x.map(prims.isnan), x, out)


@RULES(aten.positive.default, aten.resolve_conj.default, aten.resolve_neg.default)
def _identity(b: Builder, x: Value) -> Value:
    return x


@RULES(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default, "aten::_conj_copy.default")
def _conj(b: Builder, x: Value) -> Value:
    return x.map(prims.conj) if x.dtype.is_complex else x


@RULES(aten._neg_view.default, "aten::_neg_view_copy.default")
def _neg_view(b: Builder, x: Value) -> Value:
    return -x


@RULES(aten.real.default)
def _real(b: Builder, x: Value) -> Value:
    return x.map(prims.real) if x.dtype.is_complex else x


@RULES(aten.imag.default)
def _imag(b: Builder, x: Value) -> Value:
    return x.map(prims.imag)


@RULES(aten.view_as_real.default, "aten::view_as_real_copy.default")
def _view_as_real(b: Builder, x: Value) -> Value:
    return b.emit(prims.view_as_real, x)  # type: ignore[no-any-return]


@RULES(aten.view_as_complex.default, "aten::view_as_complex_copy.default")
def _view_as_complex(b: Builder, x: Value) -> Value:
    return b.emit(prims.view_as_complex, x)  # type: ignore[no-any-return]


@RULES(aten.complex.default)
def _complex(b: Builder, re: Value, im: Value) -> Value:
    re, im = promoted(b, (re, im), result_type((re, im)))
    return b.emit(prims.complex, re, im)  # type: ignore[no-any-return]


@RULES(aten.polar.default)
def _polar(b: Builder, size: Value, angle: Value) -> Value:
    size, angle = promoted(b, (size, angle), result_type((size, angle)))
    return b.emit(prims.complex, size * angle.map(prims.cos), size * angle.map(prims.sin))  # type: ignore[no-any-return]


# --- arithmetic ----------------------------------------------------------------------------------
def _is_one(alpha: Any) -> bool:
    return not isinstance(alpha, torch.SymInt) and alpha == 1


def _terms(b: Builder, x: Any, y: Any, alpha: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The operands and alpha of a sum in the dtype that it is computed in. On the CPU eager rounds numbers too."""
    place = (x if isinstance(x, Value) else y).device
    if dtype in COMPUTE_DTYPE and place.type == "cpu":
        x, y = (v.to(dtype) if isinstance(v, Value) else _as_held(v, dtype) for v in (x, y))
        alpha = _as_held(alpha, dtype)
    return (*promoted(b, (x, y), compute_dtype(dtype)), alpha)


def _as_held(number: Any, dtype: torch.dtype) -> Any:
    """The value of a number that a tensor of the dtype holds."""
    return torch.tensor(number, dtype=dtype, device="cpu").item() if isinstance(number, (int, float)) else number


@RULES(aten.add)
def _add(b: Builder, x: Value, y: Any, alpha: Any = 1) -> Value:
    dtype = result_type((x, y))
    x, y, alpha = _terms(b, x, y, alpha, dtype)
    if not _is_one(alpha):
        y = b.binary(prims.mul, y, alpha) if isinstance(y, Value) else y * alpha
    return b.binary(prims.add, x, y).to(dtype)


@RULES(aten.sub)
def _sub(b: Builder, x: Value, y: Any, alpha: Any = 1) -> Value:
    dtype = result_type((x, y))
    x, y, alpha = _terms(b, x, y, alpha, dtype)
    if not _is_one(alpha):
        y = b.binary(prims.mul, y, alpha) if isinstance(y, Value) else y * alpha
    return b.binary(prims.sub, x, y).to(dtype)


@RULES(aten.rsub)
def _rsub(b: Builder, x: Value, y: Any, alpha: Any = 1) -> Value:
    dtype = result_type((x, y))
    x, y, alpha = _terms(b, x, y, alpha, dtype)
    if not _is_one(alpha):
        x = b.binary(prims.mul, x, alpha)
    return b.binary(prims.sub, y, x).to(dtype)


def _binary(prim: Prim) -> Body:
    def body(x: Any, y: Any) -> Value:
        b = (x if isinstance(x, Value) else y).b
        return b.binary(prim, x, y)  # type: ignore[no-any-return]

    return body


RULES.add(aten.mul, pointwise(_binary(prims.mul), 2))
RULES.add(aten.fmod, pointwise(_binary(prims.fmod), 2))
RULES.add(aten.remainder, pointwise(_binary(prims.remainder), 2))
RULES.add(aten.maximum.default, pointwise(_binary(prims.maximum), 2, exact=True))
RULES.add(aten.minimum.default, pointwise(_binary(prims.minimum), 2, exact=True))
RULES.add(aten.fmax.default, pointwise(_binary(prims.fmax), 2, exact=True))
RULES.add(aten.fmin.default, pointwise(_binary(prims.fmin), 2, exact=True))
RULES.add(aten.atan2.default, pointwise(_binary(prims.atan2), 2, to_float=True))
RULES.add(aten.copysign, pointwise(_binary(prims.copysign), 2, to_float=True, exact=True))
RULES.add(aten.hypot.default, pointwise(_binary(prims.hypot), 2))
RULES.add(aten.nextafter.default, pointwise(_binary(prims.nextafter), 2, exact=True))
RULES.add(aten.gcd.default, pointwise(_binary(prims.gcd), 2))
RULES.add(aten.lcm.default, pointwise(_binary(prims.lcm), 2))
RULES.add(aten.bitwise_and, pointwise(_binary(prims.bitwise_and), 2))
RULES.add(aten.bitwise_or, pointwise(_binary(prims.bitwise_or), 2))
RULES.add(aten.bitwise_xor, pointwise(_binary(prims.bitwise_xor), 2))
for _shift in (aten.bitwise_left_shift, aten.__lshift__):
    RULES.add(_shift, pointwise(_binary(prims.shift_left), 2))
for _shift in (aten.bitwise_right_shift, aten.__rshift__):
    RULES.add(_shift, pointwise(_binary(prims.shift_right), 2))
for _name, _prim in (("__and__", prims.bitwise_and), ("__or__", prims.bitwise_or), ("__xor__", prims.bitwise_xor)):
    RULES.add(getattr(aten, _name), pointwise(_binary(_prim), 2))
RULES.add(aten.igamma.default, pointwise(_binary(prims.igamma), 2, to_float=True))
RULES.add(aten.igammac.default, pointwise(_binary(prims.igammac), 2, to_float=True))
for _name in (
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
    "zeta",
):

    def _whole(x: Any, y: Any, prim: Prim = prims.PRIMS[_name]) -> Value:
        b = (x if isinstance(x, Value) else y).b
        like = x if isinstance(x, Value) else y
        x, y = (
            v if isinstance(v, Value) else b.full((), v, like.dtype, like.device).expand(like.shape) for v in (x, y)
        )
        return b.emit(prim, x, y)  # type: ignore[no-any-return]

    RULES.add(getattr(aten, f"special_{_name}"), pointwise(_whole, 2, to_float=True))


@RULES(aten.div)
def _div(b: Builder, x: Value, y: Any, *, rounding_mode: str | None = None) -> Value:
    dtype = result_type((x, y))
    if rounding_mode is None:
        dtype = float_of(dtype)
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    prim = {None: prims.div, "floor": prims.floor_div, "trunc": prims.trunc_div}[rounding_mode]
    return b.binary(prim, x, y).to(dtype)


@RULES(aten.floor_divide)
def _floor_divide(b: Builder, x: Value, y: Any) -> Value:
    return _div(b, x, y, rounding_mode="floor")  # type: ignore[no-any-return]


@RULES(aten.pow)
def _pow(b: Builder, x: Any, y: Any) -> Value:
    dtype = result_type((x, y))
    if dtype is torch.bool:
        dtype = torch.int64 if not isinstance(y, Value) or not isinstance(x, Value) else torch.bool
    compute = compute_dtype(dtype)
    if (
        isinstance(x, Value)
        and not isinstance(y, (Value, torch.SymInt))
        and (compute.is_floating_point or compute.is_complex)
    ):
        rounds = dtype is torch.bfloat16 and x.device.type == "cpu"
        special = _power_by_number(b, x.to(compute), y, dtype if rounds else compute)
        if special is not None:
            return special.to(dtype)
    x, y = promoted(b, (x, y), compute)
    return b.binary(prims.pow, x, y).to(dtype)


def _power_by_number(b: Builder, x: Value, exponent: Any, held: torch.dtype) -> Value | None:
    """The exponents that eager computes without pow; `held` is the dtype that it keeps a square in."""
    if exponent == 2:
        return x * x
    if exponent == 3:
        return (x * x).to(held).to(x.dtype) * x
    if exponent == 0.5:
        return x.map(prims.sqrt)
    if exponent == -0.5:
        return x.map(prims.rsqrt)
    if exponent == -1:
        return x.map(prims.reciprocal)
    if exponent == -2:
        return (x * x).to(held).to(x.dtype).map(prims.reciprocal)
    if exponent == 1:
        return x
    if exponent == 0:
        return b.full_like(x, 1)
    return None


# --- comparison and logic --------------------------------------------------------------------------
for _packet, _prim in (
    (aten.eq, prims.eq),
    (aten.ne, prims.ne),
    (aten.lt, prims.lt),
    (aten.le, prims.le),
    (aten.gt, prims.gt),
    (aten.ge, prims.ge),
):
    RULES.add(_packet, pointwise(_binary(_prim), 2, to_bool=True))


def truth(x: Value) -> Value:
    return x if x.dtype is torch.bool else x.ne(0)


@RULES(aten.logical_not.default)
def _logical_not(b: Builder, x: Value) -> Value:
    return ~x if x.dtype is torch.bool else x.eq(0)


for _packet, _prim in (
    (aten.logical_and, prims.bitwise_and),
    (aten.logical_or, prims.bitwise_or),
    (aten.logical_xor, prims.bitwise_xor),
):

    def _logical(b: Builder, x: Value, y: Value, prim: Prim = _prim) -> Value:
        return b.binary(prim, truth(x), truth(y))

    RULES.add(_packet.default, _logical)


@RULES(aten.isnan.default)
def _isnan(b: Builder, x: Value) -> Value:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return x.map(prims.isnan) if inexact else b.full(x.shape, False, torch.bool, x.device)


@RULES(aten.isinf.default)
def _isinf(b: Builder, x: Value) -> Value:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return x.map(prims.isinf) if inexact else b.full(x.shape, False, torch.bool, x.device)


@RULES(aten.isposinf.default)
def _isposinf(b: Builder, x: Value) -> Value:
    return x.eq(math.inf) if x.dtype.is_floating_point else b.full(x.shape, False, torch.bool, x.device)


@RULES(aten.isneginf.default)
def _isneginf(b: Builder, x: Value) -> Value:
    return x.eq(-math.inf) if x.dtype.is_floating_point else b.full(x.shape, False, torch.bool, x.device)


@RULES(aten.signbit.default)
def _signbit(b: Builder, x: Value) -> Value:
    if x.dtype is torch.bool:
        return b.full(x.shape, False, torch.bool, x.device)
    return x.map(prims.signbit) if x.dtype.is_floating_point else x < 0


# --- selection -----------------------------------------------------------------------------------
@RULES(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(b: Builder, cond: Value, x: Any, y: Any) -> Value:
    dtype = result_type((x, y))
    x = x.to(dtype) if isinstance(x, Value) else b.full((), x, dtype, cond.device)
    y = y.to(dtype) if isinstance(y, Value) else y
    return b.where(truth(cond), x, y)


@RULES(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(b: Builder, x: Value, mask: Value, value: Any) -> Value:
    if isinstance(value, Value):
        value = value.to(x.dtype)
    return b.where(truth(mask), value, x)


@RULES(aten.clamp.default, aten.clamp.Tensor)
def _clamp(b: Builder, x: Value, min: Any = None, max: Any = None) -> Value:
    dtype = result_type((x, min, max))
    x, min, max = promoted(b, (x, min, max), dtype)
    if min is not None:
        x = x.maximum(min)
    return x if max is None else x.minimum(max)


@RULES(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(b: Builder, x: Value, min: Any) -> Value:
    return _clamp(b, x, min)  # type: ignore[no-any-return]


@RULES(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(b: Builder, x: Value, max: Any) -> Value:
    return _clamp(b, x, None, max)  # type: ignore[no-any-return]


@RULES(aten.heaviside.default)
def _heaviside(b: Builder, x: Value, values: Value) -> Value:
    x, values = promoted(b, (x, values), result_type((x, values)))
    step = (x > 0).to(values.dtype)
    out = b.where(x.eq(0), values, step)
    return b.where(x.map(prims.isnan), 0, out) if x.dtype.is_floating_point else out


@RULES(aten.nan_to_num.default)
def _nan_to_num(
    b: Builder, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    out = b.where(x.map(prims.isnan), 0.0 if nan is None else nan, x)
    out = b.where(out.eq(math.inf), limits.max if posinf is None else posinf, out)
    return b.where(out.eq(-math.inf), limits.min if neginf is None else neginf, out)


# --- compounds -----------------------------------------------------------------------------------
@RULES(aten.addcmul.default)
def _addcmul(b: Builder, x: Value, u: Value, v: Value, *, value: Any = 1) -> Value:
    dtype = result_type((x, u, v))
    x, u, v = promoted(b, (x, u, v), compute_dtype(dtype))
    product = u * v if _is_one(value) else u * value * v
    return (x + product).to(dtype)


@RULES(aten.addcdiv.default)
def _addcdiv(b: Builder, x: Value, u: Value, v: Value, *, value: Any = 1) -> Value:
    dtype = result_type((x, u, v))
    x, u, v = promoted(b, (x, u, v), compute_dtype(dtype))
    return (x + (u if _is_one(value) else u * value) / v).to(dtype)


@RULES(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(b: Builder, start: Value, end: Value, weight: Any) -> Value:
    dtype = result_type((start, end))
    if isinstance(weight, Value):
        start, end, weight = promoted(b, (start, end, weight), compute_dtype(dtype))
        near = start + weight * (end - start)
        return b.where(weight.map(prims.abs) < 0.5, near, end - (end - start) * (1 - weight)).to(dtype)
    start, end = promoted(b, (start, end), compute_dtype(dtype))
    out = start + (end - start) * weight if abs(weight) < 0.5 else end - (end - start) * (1 - weight)
    return out.to(dtype)  # type: ignore[no-any-return]


@RULES(aten.xlogy)
def _xlogy(b: Builder, x: Any, y: Any) -> Value:
    return _x_log(b, x, y, prims.log)


def _x_log(b: Builder, x: Any, y: Any, prim: Prim) -> Value:
    dtype = float_of(result_type((x, y)))
    compute = compute_dtype(dtype)
    x, y = promoted(b, (x, y), compute)
    like = x if isinstance(x, Value) else y
    x, y = (v if isinstance(v, Value) else b.full_like(like, v) for v in (x, y))
    product = b.where(x.eq(0), 0, x * y.map(prim))
    return b.where(y.map(prims.isnan), math.nan, product).to(dtype)


for _overload in (aten.special_xlog1py.default, aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar):
    RULES[_overload] = lambda b, x, y: _x_log(b, x, y, prims.log1p)


@RULES(aten.special_entr.default)
def _entr(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    x = x.to(compute_dtype(dtype))
    out = b.where(x > 0.0, -x * x.map(prims.log), b.where(x.eq(0.0), 0.0, b.full_like(x, -math.inf)))
    return b.where(x.map(prims.isnan), x, out).to(dtype)


@RULES(aten.frexp.Tensor)
def _frexp(b: Builder, x: Value) -> tuple[Value, Value]:
    """x = mantissa * 2**exponent with 0.5 <= |mantissa| < 1, read from the bits; 0, infinities and NaN keep exponent
    0."""
    wide = x.compute()
    bits, fraction, bias = (torch.int64, 52, 1023) if wide.dtype is torch.float64 else (torch.int32, 23, 127)
    mask = 2 * bias + 1
    small = wide.map(prims.abs) < torch.finfo(wide.dtype).tiny
    scaled = b.where(small, wide * 2.0 ** (fraction + 1), wide)
    pattern = b.emit(prims.bitcast, scaled, bits)
    exponent = (b.emit(prims.shift_right, pattern, fraction) & mask) - (bias - 1)
    exponent = b.where(small, exponent - (fraction + 1), exponent)
    # The bit of the sign makes the mask of the exponent's bits negative when inverted, which keeps the sign.
    mantissa = b.emit(prims.bitcast, (pattern & ~(mask << fraction)) | ((bias - 1) << fraction), wide.dtype)
    special = wide.eq(0.0) | ~wide.map(prims.isfinite)
    return b.where(special, wide, mantissa).to(x.dtype), b.where(special, 0, exponent).to(torch.int32)


def _logaddexp_complex(b: Builder, x: Value, y: Value) -> Value:
    """The term with the larger real part is taken out of the sum."""
    swap = x.map(prims.real) < y.map(prims.real)
    top, low = b.where(swap, y, x), b.where(swap, x, y)
    real = top.map(prims.real)
    same_inf = ~real.map(prims.isfinite) & real.eq(low.map(prims.real))
    return b.where(
        same_inf & (real < 0.0),
        low,
        b.where(
            same_inf,
            (low.map(prims.exp) + top.map(prims.exp)).map(prims.log),
            top + (low - top).map(prims.exp).map(prims.log1p),
        ),
    )


@RULES(aten.logaddexp.default)
def _logaddexp(b: Builder, x: Value, y: Value) -> Value:
    dtype = float_of(result_type((x, y)))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    if x.dtype.is_complex:
        return _logaddexp_complex(b, x, y).to(dtype)
    top, low = x.maximum(y), x.minimum(y)
    same_inf = x.map(prims.isinf) & x.eq(y)
    return b.where(same_inf, x, top + (low - top).map(prims.exp).map(prims.log1p)).to(dtype)


@RULES(aten.logaddexp2.default)
def _logaddexp2(b: Builder, x: Value, y: Value) -> Value:
    dtype = float_of(result_type((x, y)))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    top, low = x.maximum(y), x.minimum(y)
    same_inf = x.map(prims.isinf) & x.eq(y)
    return b.where(same_inf, x, top + (low - top).map(prims.exp2).map(prims.log1p) * (1 / math.log(2))).to(dtype)


@RULES(aten.sinc.default)
def _sinc(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    angle = x.to(compute_dtype(dtype)) * math.pi
    return b.where(angle.eq(0), 1, angle.map(prims.sin) / angle).to(dtype)


@RULES(aten.logit.default)
def _logit(b: Builder, x: Value, eps: float | None = None) -> Value:
    dtype = float_of(x.dtype)
    p = x.to(compute_dtype(dtype))
    if eps is not None:
        p = p.maximum(eps).minimum(1.0 - eps)
    return (p / (1.0 - p)).map(prims.log).to(dtype)


@RULES(aten.logit_backward.default)
def _logit_backward(b: Builder, grad: Value, x: Value, eps: float | None = None) -> Value:
    dtype = result_type((grad, x))
    g, p = promoted(b, (grad, x), compute_dtype(dtype))
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    inside = (p >= low) & (p <= high)
    return b.where(inside, g / (p * (1.0 - p)), math.nan if eps is None else 0.0).to(dtype)


@RULES(aten.deg2rad.default)
def _deg2rad(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return (x.to(compute_dtype(dtype)) * (math.pi / 180)).to(dtype)


@RULES(aten.rad2deg.default)
def _rad2deg(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return (x.to(compute_dtype(dtype)) * (180 / math.pi)).to(dtype)


@RULES(aten.frac.default)
def _frac(b: Builder, x: Value) -> Value:
    return x - x.map(prims.trunc)


@RULES(aten.square.default)
def _square(b: Builder, x: Value) -> Value:
    return _pow(b, x, 2)  # type: ignore[no-any-return]


@RULES(aten.mvlgamma.default)
def _mvlgamma(b: Builder, x: Value, p: int) -> Value:
    dtype = float_of(x.dtype)
    wide = x.to(compute_dtype(dtype))
    out = b.full_like(wide, p * (p - 1) / 4 * math.log(math.pi))
    for i in range(p):
        out = out + (wide - i / 2).map(prims.lgamma)
    return out.to(dtype)


@RULES(aten.polygamma.default)
def _polygamma(b: Builder, n: int, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return b.emit(prims.polygamma, n, x.to(compute_dtype(dtype))).to(dtype)  # type: ignore[no-any-return]


@RULES(aten.ldexp.Tensor)
def _ldexp(b: Builder, x: Value, exponent: Value) -> Value:
    dtype = float_of(result_type((x, exponent)))
    x, exponent = promoted(b, (x, exponent), compute_dtype(dtype))
    return (x * exponent.map(prims.exp2)).to(dtype)
