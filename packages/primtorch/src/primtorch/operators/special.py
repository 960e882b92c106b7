"""Special functions, and what is made of logarithms."""

from __future__ import annotations

import math

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Operand, Value, tensor_among
from primtorch.families import Family, Trait
from primtorch.layout import same_shape
from primtorch.operators.build import contiguous, elementwise
from primtorch.operators.elementwise import binary_formula, promoted, same, unary_formula
from primtorch.operators.refusals import refuse
from primtorch.prims import Prim
from primtorch.promotion import compute_dtype, float_of, result_type
from primtorch.samples import call, reals
from primtorch.spec import TensorSpec

OP = Family("special", elementwise=True)
OP.trait(Trait.CONVERTS_OUT, "mvlgamma")
OP.trait(Trait.EXACT_OUT, "frexp")


def _x_log(b: Builder, x: Operand, y: Operand, prim: Prim) -> Value:
    dtype = float_of(result_type((x, y)))
    compute = compute_dtype(dtype)
    x, y = promoted(b, (x, y), compute)
    like = tensor_among(x, y)
    x, y = (v if isinstance(v, Value) else b.full_like(like, v) for v in (x, y))
    product = b.where(x.eq(0), 0, x * y.map(prim))
    return b.where(y.map(prims.isnan), math.nan, product).to(dtype)


OP.formula("xlogy.Tensor|Scalar_Self|Scalar_Other special_xlog1py.|self_scalar|other_scalar")(binary_formula(float_of))


@OP.rule("xlogy.Tensor|Scalar_Other|Scalar_Self")
def _lower_xlogy(b: Builder, x: Operand, y: Operand) -> Value:
    return _x_log(b, x, y, prims.log)


OP.rule("special_xlog1py.|other_scalar|self_scalar")(lambda b, x, y: _x_log(b, x, y, prims.log1p))
OP.formula("sinc special_entr logit")(unary_formula(float_of))


@OP.rule("special_entr")
def _lower_entr(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    x = x.to(compute_dtype(dtype))
    out = b.where(x > 0.0, -x * x.map(prims.log), b.where(x.eq(0.0), 0.0, b.full_like(x, -math.inf)))
    return b.where(x.map(prims.isnan), x, out).to(dtype)


@OP.formula("frexp.Tensor")
def _frexp(x: TensorLike) -> tuple[TensorSpec, TensorSpec]:
    return elementwise((x,), x.dtype), elementwise((x,), torch.int32)


@OP.rule("frexp.Tensor")
def _lower_frexp(b: Builder, x: Value) -> tuple[Value, Value]:
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


OP.formula("logaddexp logaddexp2")(binary_formula(same))


@OP.rule("logaddexp")
def _lower_logaddexp(b: Builder, x: Value, y: Value) -> Value:
    dtype = float_of(result_type((x, y)))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    if x.dtype.is_complex:
        return _logaddexp_complex(b, x, y).to(dtype)
    top, low = x.maximum(y), x.minimum(y)
    same_inf = x.map(prims.isinf) & x.eq(y)
    return b.where(same_inf, x, top + (low - top).map(prims.exp).map(prims.log1p)).to(dtype)


@OP.rule("logaddexp2")
def _lower_logaddexp2(b: Builder, x: Value, y: Value) -> Value:
    dtype = float_of(result_type((x, y)))
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    top, low = x.maximum(y), x.minimum(y)
    same_inf = x.map(prims.isinf) & x.eq(y)
    return b.where(same_inf, x, top + (low - top).map(prims.exp2).map(prims.log1p) * (1 / math.log(2))).to(dtype)


@OP.rule("sinc")
def _lower_sinc(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    angle = x.to(compute_dtype(dtype)) * math.pi
    return b.where(angle.eq(0), 1, angle.map(prims.sin) / angle).to(dtype)


@OP.rule("logit")
def _lower_logit(b: Builder, x: Value, eps: float | None = None) -> Value:
    dtype = float_of(x.dtype)
    p = x.to(compute_dtype(dtype))
    if eps is not None:
        p = p.maximum(eps).minimum(1.0 - eps)
    return (p / (1.0 - p)).map(prims.log).to(dtype)


@OP.refuses("mvlgamma")
def _refuse_mvlgamma(x: TensorLike, p: int) -> None:
    refuse(p < 1, "p has to be greater than or equal to 1")


@OP.rule("mvlgamma")
def _lower_mvlgamma(b: Builder, x: Value, p: int) -> Value:
    dtype = float_of(x.dtype)
    wide = x.to(compute_dtype(dtype))
    out = b.full_like(wide, p * (p - 1) / 4 * math.log(math.pi))
    for i in range(p):
        out = out + (wide - i / 2).map(prims.lgamma)
    return out.to(dtype)


@OP.refuses("polygamma")
def _refuse_polygamma(n: int, x: TensorLike) -> None:
    refuse(n < 0, "polygamma(n, x) does not support negative n.")


@OP.formula("polygamma")
def _polygamma(n: int, x: TensorLike) -> TensorSpec:
    return elementwise((x,), float_of(x.dtype))


@OP.rule("polygamma")
def _lower_polygamma(b: Builder, n: int, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return b.emit(prims.polygamma, n, x.to(compute_dtype(dtype))).to(dtype)


def _by_integral_power(x: torch.dtype, exponent: torch.dtype) -> bool:
    """Whether ldexp scales by the exponent itself, whose power alone may be out of range; else it is a product."""
    return x.is_floating_point and not (exponent.is_floating_point or exponent.is_complex)


@OP.formula("ldexp.Tensor")
def _ldexp(x: TensorLike, exponent: TensorLike) -> TensorSpec:
    """One iterator over both, into memory like x's where that has the shape, or x * 2**exponent: a power of the number
    2 is contiguous, one of a tensor of x's dtype, which is taken where x is neither integral nor float32, lies as the
    exponent does."""
    dtype = float_of(result_type((x, exponent)))
    if _by_integral_power(x.dtype, exponent.dtype):
        found = elementwise((x, exponent), dtype)
        return elementwise((x,), dtype) if same_shape(found.shape, x.shape) else found
    if x.dtype is torch.float32 or not (x.dtype.is_floating_point or x.dtype.is_complex):
        power = contiguous(exponent, exponent.shape)
    else:
        power = elementwise((2, exponent), exponent.dtype)
    return elementwise((x, power), dtype, dtype)


LEAST_EXPONENT = {torch.float32: 126, torch.float64: 1022}
"""2 to this, and to its negative, are normal numbers."""


@OP.rule("ldexp.Tensor")
def _lower_ldexp(b: Builder, x: Value, exponent: Value) -> Value:
    dtype = float_of(result_type((x, exponent)))
    compute, integral = compute_dtype(dtype), _by_integral_power(x.dtype, exponent.dtype)
    x, exponent = promoted(b, (x, exponent), compute)
    if not integral:
        return (x * exponent.map(prims.exp2)).to(dtype)
    # From the least number to the largest it is not quite three times that far: none of three factors is out of range.
    most = 3 * LEAST_EXPONENT[compute]
    exponent = exponent.maximum(-most).minimum(most)
    third = (exponent / 3).map(prims.floor)
    power = third.map(prims.exp2)
    return (x * power * power * (exponent - 2 * third).map(prims.exp2)).to(dtype)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("polygamma_")
def _polygamma_in_place(x: TensorLike, n: int) -> TensorLike:
    _refuse_polygamma(n, x)
    if not x.dtype.is_floating_point:
        raise RuntimeError(f"result type Float can't be cast to the desired output type {x.dtype}")
    return x


# --- samples ---------------------------------------------------------------------------------------

OP.samples("mvlgamma", call(reals(2, 3, low=2.0, high=3.0), 2))
OP.samples("polygamma", call(2, reals(5, low=0.5, dtype=torch.float64)))
OP.samples("polygamma_", call(reals(5, low=0.5), 1))
