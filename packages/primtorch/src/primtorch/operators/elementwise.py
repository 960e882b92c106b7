"""Elementwise operators: broadcasting, type promotion, TensorIterator's strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import torch

from primtorch import prims
from primtorch.arguments import TENSORS, Device, Number, Sizes, TensorLike
from primtorch.builder import Builder, Operand, Value, tensor_among
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Formula, Rule, Trait
from primtorch.layout import broadcast, broadcast_shapes, dense_like, iterator_strides
from primtorch.operators.build import as_cast, as_dense, contiguous, elementwise, strided, view
from primtorch.operators.refusals import WHOLE, refuse, refuse_overflow
from primtorch.prims import Prim
from primtorch.prims.record import Pointwise
from primtorch.promotion import (
    COMPUTE_DTYPE,
    complex_of,
    compute_dtype,
    float_of,
    number_as,
    promote_number,
    real_of,
    result_type,
)
from primtorch.samples import call, integers, reals, truths
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import depends_on_data
from primtorch.symbolic.numbers import is_symbolic

OP = Family("elementwise", elementwise=True)
OP.trait(Trait.ANYWHERE, "fill fill_ result_type")
OP.trait(Trait.TO_FIRST, "fill.Tensor")
OP.trait(
    Trait.EXACT_OUT,
    "abs ceil complex conj_physical floor frac heaviside isneginf isposinf lerp.Tensor_out nan_to_num neg polar "
    "round sgn sign signbit trunc where",
)
OP.trait(Trait.OVERLAPS, "conj_physical fill")
DtypeRule = Callable[[torch.dtype], torch.dtype]


def same(dtype: torch.dtype) -> torch.dtype:
    """The rule of results in the operand's dtype."""
    return dtype


def _bool(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


def unary_formula(rule: DtypeRule) -> Formula:
    """Formulas of one tensor; `rule` gives the result's dtype by the operand's."""

    def formula(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
        shape = tuple(x.shape)
        return TensorSpec(shape, iterator_strides(shape, ((shape, x.stride()),)), rule(x.dtype), x.device)

    return formula


def _computed_in(common: torch.dtype, result: torch.dtype) -> torch.dtype:
    """What an iterator casts its operands to: quotients of integers and the like are computed in a float's dtype."""
    return common if common.is_floating_point or common.is_complex or result is torch.bool else result


def binary_formula(rule: DtypeRule) -> Formula:
    """Formulas of two operands that are broadcast and promoted; `rule` gives the result's dtype by the common one."""

    def formula(a: TensorLike | Number, b: TensorLike | Number, *args: object, **kwargs: object) -> TensorSpec:
        if isinstance(a, TENSORS):
            if isinstance(b, TENSORS):
                dtype = a.dtype
                if b.dtype is not dtype:
                    dtype = result_type((a, b))
                shape, strides, device = tuple(a.shape), a.stride(), a.device
                if device == b.device:
                    found, layouts = rule(dtype), ((shape, strides), (tuple(b.shape), b.stride()))
                    computed = _computed_in(dtype, found)
                    if not a.dtype is b.dtype is computed:
                        layouts = as_cast(a, computed), as_cast(b, computed)
                    shape = broadcast(shape, layouts[1][0])
                    return TensorSpec(shape, iterator_strides(shape, layouts), found, device)
                return elementwise((a, b), rule(dtype))
            return elementwise((a, b), rule(promote_number(a.dtype, b)))
        assert isinstance(b, TENSORS)
        return elementwise((b, a), rule(promote_number(b.dtype, a)))

    return formula


Body = Callable[..., Value]


def _number(
    b: Builder, value: Number | None, dtype: torch.dtype, shape: Sizes, operands: tuple[Operand | None, ...]
) -> Operand | None:
    if value is None:
        return None
    if isinstance(value, torch.SymInt) and (dtype.is_floating_point or dtype.is_complex):
        device = next(o.device for o in operands if isinstance(o, Value))
        return b.full((), value, dtype, device).expand(shape)
    return number_as(value, dtype)


@overload
def promoted(b: Builder, operands: tuple[Value, ...], dtype: torch.dtype) -> list[Value]: ...
@overload
def promoted(b: Builder, operands: tuple[Operand, ...], dtype: torch.dtype) -> list[Operand]: ...
@overload
def promoted(b: Builder, operands: tuple[Operand | None, ...], dtype: torch.dtype) -> list[Operand | None]: ...
def promoted(b: Builder, operands: tuple[Operand | None, ...], dtype: torch.dtype) -> Sequence[Operand | None]:
    """Operands in one dtype and shape; numbers stay numbers, None stays None."""
    shapes = [o.spec.shape for o in operands if isinstance(o, Value)]
    shape = shapes[0] if len(shapes) == 1 else broadcast_shapes(*shapes)
    return [
        o.to(dtype).expand(shape) if isinstance(o, Value) else _number(b, o, dtype, shape, operands) for o in operands
    ]


def pointwise(body: Body, arity: int, *, to_float: bool = False, exact: bool = False, to_bool: bool = False) -> Rule:
    """A rule for an operator whose first `arity` arguments are operands.

    Args:
        body: body(*operands, *rest, **options) on values of one dtype and shape.
        to_float: integers become the default float.
        exact: the result is one of the operands' values or needs no rounding, so that reduced precision stays.
        to_bool: the body gives bool, operands are compared in their promoted dtype.
    """

    def rule(b: Builder, *args: Any, **kwargs: object) -> Value:
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


def _rounding(prim: Prim) -> Body:
    return lambda x: x.map(prim) if x.dtype.is_floating_point else x


for _prim in (prims.floor, prims.ceil, prims.trunc):
    OP.rule(_prim.name)(pointwise(_rounding(_prim), 1, exact=True))


OP.formula("abs")(unary_formula(real_of))


@OP.rule("abs")
def _lower_abs(b: Builder, x: Value) -> Value:
    return x if x.dtype is torch.bool else x.map(prims.abs)


OP.formula("sign sgn ceil floor round round.decimals trunc frac _conj_physical fill.Scalar")(unary_formula(same))
OP.formula("square")(unary_formula(lambda dtype: torch.int64 if dtype is torch.bool else dtype))  # a power


def filled(value: Number, dtype: torch.dtype, size: Sequence[Size], device: Device) -> None:
    """A fill. One element on the CPU is set without a check where the dtype is narrower than float."""
    single = all(type(n) is int and n == 1 for n in size)
    unchecked = Fact.SETS_ONE_ELEMENT_UNCHECKED.on(torch.device(device or "cpu"))
    if not (single and dtype in (torch.float16, torch.bfloat16) and unchecked):
        refuse_overflow(value, dtype)


@OP.refuses("fill.Scalar")
def _refuse_fill(x: TensorLike, value: Number) -> None:
    filled(value, x.dtype, x.shape, x.device)


@OP.rule("round", "round.decimals")
def _lower_round(b: Builder, x: Value, *, decimals: int = 0) -> Value:
    if not x.dtype.is_floating_point:
        return x
    if decimals == 0:
        return x.map(prims.round)
    scale = float(10 ** abs(decimals))
    wide = x.compute()
    out = (wide * scale).map(prims.round) / scale if decimals > 0 else (wide / scale).map(prims.round) * scale
    return out.to(x.dtype)


@OP.rule("sign")
def _lower_sign(b: Builder, x: Value) -> Value:
    return x if x.dtype is torch.bool else x.map(prims.sign)


@OP.rule("sgn")
def _lower_sgn(b: Builder, x: Value) -> Value:
    if not x.dtype.is_complex:
        return _lower_sign(b, x)
    size = x.map(prims.abs)
    zero = size.eq(0.0)
    return b.where(zero, 0j, x / b.where(zero, 1.0, size).to(x.dtype))


@OP.formula("angle")
def _angle(x: TensorLike) -> TensorSpec:
    if x.dtype.is_complex:  # computed as complex numbers, whose real parts are then copied into a tensor of their own
        return contiguous(x, x.shape, real_of(x.dtype))
    return elementwise((x,), float_of(x.dtype))


@OP.rule("angle")
def _lower_angle(b: Builder, x: Value) -> Value:
    if x.dtype.is_complex:
        return b.binary(prims.atan2, x.map(prims.imag), x.map(prims.real))
    dtype = float_of(x.dtype)
    x = x.to(dtype)
    out = b.where(x < 0.0, b.full_like(x, math.pi), 0.0)
    return b.where(x.map(prims.isnan), x, out)


@OP.formula("positive")
def _itself(x: TensorLike) -> TensorSpec:
    return view(x, x.shape, x.stride())


@OP.rule("positive")
def _lower_identity(b: Builder, x: Value) -> Value:
    return x


@OP.formula("conj_physical")
def _conj(x: TensorLike) -> TensorSpec:
    return elementwise((x,), x.dtype) if x.dtype.is_complex else _itself(x)


@OP.rule("conj_physical", "_conj_physical")
def _lower_conj(b: Builder, x: Value) -> Value:
    return x.map(prims.conj) if x.dtype.is_complex else x


def _part(x: TensorLike, place: int) -> TensorSpec:
    """A view of the real (0) or the imaginary (1) parts."""
    shared = view(x, x.shape, [2 * stride for stride in x.stride()], 2 * x.storage_offset() + place)
    return replace(shared, dtype=real_of(x.dtype))


OP.formula("real")(lambda x: _part(x, 0) if x.dtype.is_complex else _itself(x))
OP.formula("imag")(lambda x: _part(x, 1))


@OP.rule("real")
def _lower_real(b: Builder, x: Value) -> Value:
    return x.map(prims.real) if x.dtype.is_complex else x


@OP.rule("imag")
def _lower_imag(b: Builder, x: Value) -> Value:
    return x.map(prims.imag)


@OP.formula("complex")
def _complex(real: TensorLike, imag: TensorLike) -> TensorSpec:
    return elementwise((real, imag), complex_of(real.dtype))


@OP.refuses("complex")
def _refuse_complex(real: TensorLike, imag: TensorLike) -> None:
    floats = (torch.float16, torch.float32, torch.float64)
    refuse(
        real.dtype not in floats or imag.dtype not in floats,
        lambda: f"Expected both inputs to be Half, Float or Double tensors but got {real.dtype} and {imag.dtype}",
    )
    refuse(real.dtype is not imag.dtype, lambda: f"Expected {real.dtype} but got {imag.dtype} for second argument")


@OP.rule("complex")
def _lower_complex(b: Builder, re: Value, im: Value) -> Value:
    re, im = promoted(b, (re, im), result_type((re, im)))
    return b.emit(prims.complex, re, im)


@OP.formula("polar")
def _polar(magnitude: TensorLike, angle: TensorLike) -> TensorSpec:
    return elementwise((magnitude, angle), complex_of(magnitude.dtype))


@OP.rule("polar")
def _lower_polar(b: Builder, size: Value, angle: Value) -> Value:
    size, angle = promoted(b, (size, angle), result_type((size, angle)))
    return b.emit(prims.complex, size * angle.map(prims.cos), size * angle.map(prims.sin))


# --- arithmetic ----------------------------------------------------------------------------------
def _is_one(alpha: Number) -> bool:
    return not is_symbolic(alpha) and alpha == 1


def scaled(b: Builder, x: Operand, alpha: Number) -> Operand:
    """x * alpha; x itself where alpha is one."""
    if _is_one(alpha):
        return x
    if isinstance(x, Value):
        return b.binary(prims.mul, x, alpha)
    return x * alpha  # type: ignore[operator]  # torch does not say that symbolic floats multiply


def _as_held(number: Number, dtype: torch.dtype) -> Number:
    """The value of a number that a tensor of the dtype holds."""
    return torch.tensor(number, dtype=dtype, device="cpu").item() if isinstance(number, (int, float)) else number


def _terms(b: Builder, x: Operand, y: Operand, alpha: Number, dtype: torch.dtype) -> tuple[Operand, Operand, Number]:
    """The operands and alpha of a sum in the dtype that it is computed in. On the CPU eager rounds numbers too."""
    place = tensor_among(x, y).device
    if dtype in COMPUTE_DTYPE and Fact.ROUNDS_NUMBERS.on(place):
        x, y = (v.to(dtype) if isinstance(v, Value) else _as_held(v, dtype) for v in (x, y))
        alpha = _as_held(alpha, dtype)
    x, y = promoted(b, (x, y), compute_dtype(dtype))
    return x, y, alpha


def _is_boolean(x: TensorLike | Number) -> bool:
    return x.dtype is torch.bool if isinstance(x, TENSORS) else type(x) is bool


def _sum(*, booleans: bool) -> Formula:
    formula = binary_formula(same)

    def summed(a: TensorLike | Number, b: TensorLike | Number, alpha: Number = 1) -> TensorSpec:
        out: TensorSpec = formula(a, b)
        if type(alpha) is float and not (out.dtype.is_floating_point or out.dtype.is_complex):
            raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
        if not booleans and (_is_boolean(a) or _is_boolean(b)):
            raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported.")
        return out

    return summed


OP.formula("add.Tensor|Scalar")(_sum(booleans=True))


@OP.rule("add.Tensor|Scalar")
def _lower_add(b: Builder, x: Value, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type((x, y))
    left, right, alpha = _terms(b, x, y, alpha, dtype)
    return b.binary(prims.add, left, scaled(b, right, alpha)).to(dtype)


_difference = _sum(booleans=False)
OP.formula("sub.Tensor|Scalar")(_difference)


@OP.formula("rsub.Tensor|Scalar")
def _reversed_difference(x: TensorLike, y: TensorLike | Number, alpha: Number = 1) -> TensorSpec:
    """y - x: y has the first say on the layout."""
    out: TensorSpec = _difference(y, x, alpha)
    return out


@OP.rule("sub.Tensor|Scalar")
def _lower_sub(b: Builder, x: Value, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type((x, y))
    left, right, alpha = _terms(b, x, y, alpha, dtype)
    return b.binary(prims.sub, left, scaled(b, right, alpha)).to(dtype)


@OP.rule("rsub.Tensor|Scalar")
def _lower_rsub(b: Builder, x: Value, y: Operand, alpha: Number = 1) -> Value:
    dtype = result_type((x, y))
    right, left, alpha = _terms(b, x, y, alpha, dtype)
    return b.binary(prims.sub, left, scaled(b, right, alpha)).to(dtype)


def _binary(prim: Prim) -> Body:
    def body(x: Operand, y: Operand) -> Value:
        return tensor_among(x, y).b.binary(prim, x, y)

    return body


def _whole(prim: Prim) -> Body:
    """A prim of tensors only."""

    def body(x: Operand, y: Operand) -> Value:
        like = tensor_among(x, y)
        b = like.b
        x, y = (
            v if isinstance(v, Value) else b.full((), v, like.dtype, like.device).expand(like.shape) for v in (x, y)
        )
        return b.emit(prim, x, y)

    return body


OP.formula("div.Tensor|Scalar true_divide.Tensor")(binary_formula(float_of))


@OP.formula("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(a: TensorLike | Number, b: TensorLike | Number, *, rounding_mode: str | None) -> TensorSpec:
    dtype = result_type((a, b))
    if rounding_mode is None:
        dtype = float_of(dtype)
    return elementwise((a, b), dtype, dtype)


@OP.rule("div.Tensor|Scalar|Tensor_mode|Scalar_mode")
def _lower_div(b: Builder, x: Value, y: Operand, *, rounding_mode: str | None = None) -> Value:
    dtype = result_type((x, y))
    if rounding_mode is None:
        dtype = float_of(dtype)
    left, right = promoted(b, (x, y), compute_dtype(dtype))
    prim = {None: prims.div, "floor": prims.floor_div, "trunc": prims.trunc_div}[rounding_mode]
    return b.binary(prim, left, right).to(dtype)


OP.formula("floor_divide.|Scalar heaviside pow.Tensor_Tensor")(binary_formula(same))


@OP.formula("pow.Tensor_Scalar")
def _power(base: TensorLike, exponent: Number) -> TensorSpec:
    return elementwise((base,), promote_number(base.dtype, exponent))


@OP.formula("pow.Scalar")
def _power_of_number(base: Number, exponent: TensorLike) -> TensorSpec:
    """By rows, whatever the exponent's layout."""
    return contiguous(exponent, exponent.shape, promote_number(exponent.dtype, base))


@OP.refuses("pow.Tensor_Scalar")
def _refuse_pow(x: TensorLike, exponent: Number) -> None:
    wrong = x.dtype in WHOLE and type(exponent) is int and exponent < 0
    refuse(wrong, "Integers to negative integer powers are not allowed.")


@OP.rule("floor_divide.|Scalar")
def _lower_floor_divide(b: Builder, x: Value, y: Operand) -> Value:
    return _lower_div(b, x, y, rounding_mode="floor")


def _power_by_number(b: Builder, x: Value, exponent: Number, held: torch.dtype) -> Value | None:
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


@OP.rule("pow.Tensor_Tensor|Tensor_Scalar|Scalar")
def _lower_pow(b: Builder, x: Operand, y: Operand) -> Value:
    dtype = result_type((x, y))
    if dtype is torch.bool:
        dtype = torch.int64 if not isinstance(y, Value) or not isinstance(x, Value) else torch.bool
    compute = compute_dtype(dtype)
    if (
        isinstance(x, Value)
        and not isinstance(y, (Value, torch.SymInt))
        and not depends_on_data(y)
        and (compute.is_floating_point or compute.is_complex)
    ):
        rounds = dtype is torch.bfloat16 and Fact.ROUNDS_POWERS_OF_BFLOAT16.on(x.device)
        special = _power_by_number(b, x.to(compute), y, dtype if rounds else compute)
        if special is not None:
            return special.to(dtype)
    x, y = promoted(b, (x, y), compute)
    return b.binary(prims.pow, x, y).to(dtype)


# --- prims behind broadcasting and promotion -----------------------------------------------------
def _declare(prim: Prim, of: Pointwise) -> None:
    dtype = _bool if of.to_bool else float_of if of.to_float else same
    body = _unary(prim) if prim.operands == 1 else _binary(prim) if prim.aten is None else _whole(prim)
    rule = pointwise(body, prim.operands, to_float=of.to_float, to_bool=of.to_bool, exact=of.exact)
    OP.formula(of.overloads)((unary_formula if prim.operands == 1 else binary_formula)(dtype))
    OP.rule(of.overloads)(rule)


for _prim in prims.PRIMS.values():
    if _prim.pointwise is not None:
        _declare(_prim, _prim.pointwise)


# --- comparison and logic --------------------------------------------------------------------------
def truth(x: Value) -> Value:
    """Whether elements are not zero, as bool."""
    return x if x.dtype is torch.bool else x.ne(0)


OP.formula("isnan isfinite isposinf isneginf signbit logical_not isreal")(unary_formula(_bool))


@OP.formula("isinf")
def _isinf(x: TensorLike) -> TensorSpec:
    """A comparison of the absolute value with a number; no integer is infinite, which takes no comparison."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return elementwise((elementwise((x,), x.dtype), 0), torch.bool)
    return strided(x, x.shape, dense_like(tuple(x.shape), x.stride()), torch.bool)


@OP.rule("logical_not")
def _lower_logical_not(b: Builder, x: Value) -> Value:
    return ~x if x.dtype is torch.bool else x.eq(0)


def _truths(prim: Prim) -> Rule:
    return lambda b, x, y: b.binary(prim, truth(x), truth(y))


OP.formula("logical_and logical_or logical_xor")(binary_formula(_bool))
OP.rule("logical_and")(_truths(prims.bitwise_and))
OP.rule("logical_or")(_truths(prims.bitwise_or))
OP.rule("logical_xor")(_truths(prims.bitwise_xor))


@OP.rule("isnan")
def _lower_isnan(b: Builder, x: Value) -> Value:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return x.map(prims.isnan) if inexact else b.full(x.shape, False, torch.bool, x.device)


@OP.rule("isinf")
def _lower_isinf(b: Builder, x: Value) -> Value:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return x.map(prims.isinf) if inexact else b.full(x.shape, False, torch.bool, x.device)


@OP.rule("isposinf")
def _lower_isposinf(b: Builder, x: Value) -> Value:
    return x.eq(math.inf) if x.dtype.is_floating_point else b.full(x.shape, False, torch.bool, x.device)


@OP.rule("isneginf")
def _lower_isneginf(b: Builder, x: Value) -> Value:
    return x.eq(-math.inf) if x.dtype.is_floating_point else b.full(x.shape, False, torch.bool, x.device)


@OP.rule("signbit")
def _lower_signbit(b: Builder, x: Value) -> Value:
    if x.dtype is torch.bool:
        return b.full(x.shape, False, torch.bool, x.device)
    return x.map(prims.signbit) if x.dtype.is_floating_point else x < 0


# --- selection -----------------------------------------------------------------------------------
@OP.formula("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(condition: TensorLike, a: TensorLike | Number, b: TensorLike | Number) -> TensorSpec:
    return elementwise((condition, a, b), result_type((a, b)))


@OP.rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _lower_where(b: Builder, cond: Value, x: Operand, y: Operand) -> Value:
    dtype = result_type((x, y))
    x = x.to(dtype) if isinstance(x, Value) else b.full((), x, dtype, cond.device)
    y = y.to(dtype) if isinstance(y, Value) else y
    return b.where(truth(cond), x, y)


def _tensors(*operands: TensorLike | Number | None) -> list[TensorLike]:
    return [o for o in operands if isinstance(o, TENSORS)]


@OP.formula("clamp", "clip", "clamp.Tensor", "clip.Tensor")
def _clamp(x: TensorLike, min: TensorLike | Number | None = None, max: TensorLike | Number | None = None) -> TensorSpec:
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    dtype = result_type((x, min, max))
    return elementwise(_tensors(x, min, max), dtype, dtype)


@OP.refuses("clamp", "clamp_min", "clamp_max")
def _refuse_clamp(x: TensorLike, *limits: Number | None, **named: Number | None) -> None:
    for limit in (*limits, *named.values()):
        if type(limit) is int or type(limit) is float:
            refuse_overflow(limit, promote_number(x.dtype, limit))


@OP.rule("clamp", "clamp.Tensor")
def _lower_clamp(b: Builder, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    dtype = result_type((x, min, max))
    out, low, high = promoted(b, (x, min, max), dtype)
    assert isinstance(out, Value)
    if low is not None:
        out = out.maximum(low)
    return out if high is None else out.minimum(high)


@OP.formula("clamp_min", "clamp_max", "clamp_min.Tensor", "clamp_max.Tensor")
def _clamp_one(x: TensorLike, limit: TensorLike | Number) -> TensorSpec:
    dtype = result_type((x, limit))
    return elementwise(_tensors(x, limit), dtype, dtype)


@OP.rule("clamp_min", "clamp_min.Tensor")
def _lower_clamp_min(b: Builder, x: Value, min: Operand) -> Value:
    return _lower_clamp(b, x, min)


@OP.rule("clamp_max", "clamp_max.Tensor")
def _lower_clamp_max(b: Builder, x: Value, max: Operand) -> Value:
    return _lower_clamp(b, x, None, max)


@OP.rule("heaviside")
def _lower_heaviside(b: Builder, x: Value, values: Value) -> Value:
    x, values = promoted(b, (x, values), result_type((x, values)))
    step = (x > 0).to(values.dtype)
    out = b.where(x.eq(0), values, step)
    return b.where(x.map(prims.isnan), 0, out) if x.dtype.is_floating_point else out


@OP.formula("nan_to_num")
def _nan_to_num(x: TensorLike, *limits: object, **named: object) -> TensorSpec:
    return as_dense(x)


@OP.rule("nan_to_num")
def _lower_nan_to_num(
    b: Builder, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    out = b.where(x.map(prims.isnan), 0.0 if nan is None else nan, x)
    out = b.where(out.eq(math.inf), limits.max if posinf is None else posinf, out)
    return b.where(out.eq(-math.inf), limits.min if neginf is None else neginf, out)


# --- compounds -----------------------------------------------------------------------------------
@OP.formula("addcmul", "addcdiv")
def _addc(x: TensorLike, a: TensorLike, b: TensorLike, *, value: Number = 1) -> TensorSpec:
    return elementwise((x, a, b), result_type((x, a, b)))


@OP.rule("addcmul")
def _lower_addcmul(b: Builder, x: Value, u: Value, v: Value, *, value: Number = 1) -> Value:
    dtype = result_type((x, u, v))
    x, u, v = promoted(b, (x, u, v), compute_dtype(dtype))
    product = u * v if _is_one(value) else u * value * v
    return (x + product).to(dtype)


@OP.rule("addcdiv")
def _lower_addcdiv(b: Builder, x: Value, u: Value, v: Value, *, value: Number = 1) -> Value:
    dtype = result_type((x, u, v))
    x, u, v = promoted(b, (x, u, v), compute_dtype(dtype))
    return (x + (u if _is_one(value) else u * value) / v).to(dtype)


@OP.formula("lerp.Scalar", "lerp.Tensor")
def _lerp(start: TensorLike, end: TensorLike, weight: TensorLike | Number) -> TensorSpec:
    return elementwise(_tensors(start, end, weight), start.dtype)


@OP.rule("lerp.Scalar", "lerp.Tensor")
def _lower_lerp(b: Builder, start: Value, end: Value, weight: Value | float) -> Value:
    dtype = result_type((start, end))
    if is_symbolic(weight):  # it may lie on either side of a half, in each call anew
        weight = b.full((), weight, real_of(compute_dtype(dtype)), start.spec.device)
    if isinstance(weight, Value):
        start, end, weight = promoted(b, (start, end, weight), compute_dtype(dtype))
        near = start + weight * (end - start)
        return b.where(weight.map(prims.abs) < 0.5, near, end - (end - start) * (1 - weight)).to(dtype)
    start, end = promoted(b, (start, end), compute_dtype(dtype))
    out = start + (end - start) * weight if abs(weight) < 0.5 else end - (end - start) * (1 - weight)
    return out.to(dtype)


OP.formula("deg2rad rad2deg")(unary_formula(float_of))


@OP.rule("deg2rad")
def _lower_deg2rad(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return (x.to(compute_dtype(dtype)) * (math.pi / 180)).to(dtype)


@OP.rule("rad2deg")
def _lower_rad2deg(b: Builder, x: Value) -> Value:
    dtype = float_of(x.dtype)
    return (x.to(compute_dtype(dtype)) * (180 / math.pi)).to(dtype)


@OP.rule("frac")
def _lower_frac(b: Builder, x: Value) -> Value:
    return x - x.map(prims.trunc)


@OP.rule("square")
def _lower_square(b: Builder, x: Value) -> Value:
    return _lower_pow(b, x, 2)


@OP.formula("fill.Tensor")
def _fill_tensor(x: TensorLike, value: TensorLike) -> TensorSpec:
    return elementwise((x,), x.dtype)


@OP.rule("fill.Scalar", "fill.Tensor")
def _lower_fill(b: Builder, x: Value, value: Operand) -> Value:
    if isinstance(value, Value):
        return value.to(x.dtype).expand(x.shape)
    return b.full_like(x, value)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("isclose")
def _isclose(a: TensorLike, b: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    return elementwise((a, b), torch.bool)


@OP.refuses("neg")
def _refuse_neg(x: TensorLike) -> None:
    refuse(x.dtype is torch.bool, "Negation, the `-` operator, on a bool tensor is not supported")


@OP.refuses(
    *(f"bitwise_{op}.Tensor|Scalar|Scalar_Tensor" for op in ("and", "or", "xor")),
    *(f"bitwise_{side}_shift.Tensor|Tensor_Scalar|Scalar_Tensor" for side in ("left", "right")),
)
def _refuse_bitwise(a: TensorLike | Number, b: TensorLike | Number) -> None:
    for x in (a, b):
        whole = x.dtype in WHOLE if isinstance(x, TENSORS) else not isinstance(x, float | complex)
        refuse(not whole, "a bitwise operator is not implemented for floating point", NotImplementedError)


@OP.refuses("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar")
def _refuse_rest(a: TensorLike | Number, b: TensorLike | Number) -> None:
    truths = all(x.dtype is torch.bool if isinstance(x, TENSORS) else type(x) is bool for x in (a, b))
    refuse(truths, "the rest of a division is not implemented for 'Bool'", NotImplementedError)


# --- samples ---------------------------------------------------------------------------------------

OP.samples(
    "__and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor gcd lcm",
    call(integers(2, 3), integers(3)),
)
OP.samples(
    "__and__.Scalar __or__.Scalar __xor__.Scalar __lshift__.Scalar __rshift__.Scalar bitwise_and.Scalar "
    "bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar",
    call(integers(2, 3), 2),
)
OP.samples(
    "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor "
    "bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor",
    call(2, integers(2, 3)),
)
OP.samples(
    "__lshift__.Tensor __rshift__.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor",
    call(integers(2, 3), integers(3, below=3)),
)
OP.samples("bitwise_not", call(integers(2, 3)), call(truths(3)))
OP.samples("clamp clip", call(reals(2, 3), -1, 1), call(reals(2, 3), None, 1))
OP.samples("clamp.Tensor clip.Tensor", call(reals(2, 3), reals(3, high=0.0), None))
OP.samples("div.Scalar_mode", call(reals(2, 3), 2, rounding_mode="floor"))
OP.samples("div.Tensor_mode", call(reals(2, 3), reals(3, low=0.5), rounding_mode="trunc"))
OP.samples("fill.Tensor", call(reals(2, 3), reals()))
OP.samples("real imag conj_physical", call(reals(2, 3, dtype=torch.complex64)))
OP.samples("round.decimals", call(reals(2, 3), decimals=1))
OP.samples("where.Scalar", call(truths(2, 3), 1, 2.0))
OP.samples("where.ScalarOther", call(truths(2, 3), reals(3), 2))
OP.samples("where.ScalarSelf", call(truths(2, 3), 2, reals(3)))
OP.samples("where.self", call(truths(2, 3), reals(3), reals(2, 1)))
