"""Elementwise prims: unary, predicates, binary, comparisons, where.

All tensor operands have one shape and one dtype; a Python number may stand for one operand of a binary
prim and takes the tensor's dtype. The result is dense, in the operands' order of dimensions.
"""

# ruff: noqa: B023 -- the messages of checks are built at once, in the iteration that fails
from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from primtorch.arguments import Number
from primtorch.layout import dense_like, elementwise_strides, same_shape
from primtorch.prims.record import Pointwise, Prim, Reference, require
from primtorch.promotion import category, real_of
from primtorch.spec import TensorSpec

aten = torch.ops.aten

_KIND_RANK = {bool: 0, int: 1, torch.SymInt: 1, float: 2, torch.SymFloat: 2, complex: 3}


def _operands(name: str, *args: TensorSpec | Number) -> TensorSpec:
    """Check a pointwise prim's operands and give the spec of a result with their dtype."""
    specs = [a for a in args if isinstance(a, TensorSpec)]
    require(bool(specs), name, lambda: "needs at least one tensor")
    first = specs[0]
    for other in specs[1:]:
        require(other.dtype == first.dtype, name, lambda: f"operands have dtypes {first.dtype} and {other.dtype}")
        require(
            same_shape(first.shape, other.shape),
            name,
            lambda: f"operands have shapes {tuple(first.shape)} and {tuple(other.shape)}",
        )
        require(other.device == first.device, name, lambda: f"operands on {first.device} and {other.device}")
    if len(specs) < len(args):
        rank = category(first.dtype)
        for arg in args:
            if not isinstance(arg, TensorSpec):
                require(
                    _KIND_RANK.get(type(arg), 4) <= rank,
                    name,
                    lambda: f"the number {arg!r} does not fit dtype {first.dtype}",
                )
    if len(specs) == 1:
        return TensorSpec(first.shape, dense_like(first.shape, first.strides), first.dtype, first.device)
    strides = elementwise_strides(tuple(first.shape), [tuple(s.strides) for s in specs])
    return TensorSpec(first.shape, strides, first.dtype, first.device)


def _with_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(spec.shape, spec.strides, dtype, spec.device)


def _unary(
    name: str,
    reference: Reference,
    doc: str,
    *tags: str,
    kinds: str = "f",
    aten: OpOverload | None = None,
    of: Pointwise | None = None,
) -> Prim:
    """A prim t -> t. `kinds` says which dtypes it takes: b(ool) i(nteger) f(loat) c(omplex)."""
    accepted = frozenset("bifc".index(k) for k in kinds)

    def meta(t: TensorSpec) -> TensorSpec:
        require(category(t.dtype) in accepted, name, lambda: f"does not take dtype {t.dtype}")
        return TensorSpec(t.shape, dense_like(t.shape, t.strides), t.dtype, t.device)

    return Prim(
        f"{name}(t: Tensor) -> Tensor",
        "elementwise unary",
        doc,
        meta,
        reference,
        frozenset({"pointwise", *tags}),
        aten,
        of,
    )


def _function(
    name: str, reference: Reference, doc: str, *tags: str, kinds: str = "fc", aten: OpOverload | None = None
) -> Prim:
    """A function of floats, and costly; the ATen operator of its name takes integers too, as the default float."""
    of = Pointwise(name if aten is None else aten._schema.name.removeprefix("aten::"), to_float=True)
    light = name in ("sqrt", "rsqrt", "reciprocal")
    return _unary(name, reference, doc, *tags, *([] if light else ["heavy"]), kinds=kinds, aten=aten, of=of)


def _predicate(name: str, reference: Reference, doc: str) -> Prim:
    def meta(t: TensorSpec) -> TensorSpec:
        return TensorSpec(t.shape, dense_like(t.shape, t.strides), torch.bool, t.device)

    return Prim(f"{name}(t: Tensor) -> Tensor", "predicate", doc, meta, reference, frozenset({"pointwise"}))


def _as_tensors(a: torch.Tensor | complex, b: torch.Tensor | complex) -> tuple[torch.Tensor, torch.Tensor]:
    """A number as a 0-d tensor of the other operand's dtype."""
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    first, second = (
        v if isinstance(v, torch.Tensor) else torch.scalar_tensor(v, dtype=like.dtype, device=like.device)
        for v in (a, b)
    )
    return first, second


def _of_tensors(reference: Reference) -> Reference:
    """A reference that takes numbers, too, as tensors of the other operand's dtype."""

    def run(a: torch.Tensor | complex, b: torch.Tensor | complex) -> torch.Tensor:
        result: torch.Tensor = reference(*_as_tensors(a, b))
        return result

    return run


def _binary(
    name: str,
    reference: Reference,
    doc: str,
    *tags: str,
    aten: OpOverload | None = None,
    of: Pointwise | None = None,
) -> Prim:
    inexact = name == "div" or (of is not None and of.to_float)

    def meta(a: TensorSpec | Number, b: TensorSpec | Number) -> TensorSpec:
        result = _operands(name, a, b)
        require(
            not inexact or result.dtype.is_floating_point or result.dtype.is_complex,
            name,
            lambda: f"takes floating operands, got {result.dtype}; convert them first",
        )
        return result

    return Prim(
        f"{name}(a: Tensor | Number, b: Tensor | Number) -> Tensor",
        "elementwise binary",
        doc,
        meta,
        _of_tensors(reference),
        frozenset({"pointwise", *tags}),
        aten,
        of,
    )


def _comparison(name: str, reference: Reference, doc: str, *tags: str) -> Prim:
    def meta(a: TensorSpec | Number, b: TensorSpec | Number) -> TensorSpec:
        return _with_dtype(_operands(name, a, b), torch.bool)

    return Prim(
        f"{name}(a: Tensor | Number, b: Tensor | Number) -> Tensor",
        "comparison",
        doc,
        meta,
        _of_tensors(reference),
        frozenset({"pointwise", *tags}),
        pointwise=Pointwise(f"{name}.Tensor|Scalar", to_bool=True),
    )


def _real_result(name: str, reference: Reference, doc: str, kinds: str) -> Prim:
    """A prim whose result is real when its operand is complex."""
    accepted = frozenset("bifc".index(k) for k in kinds)

    def meta(t: TensorSpec) -> TensorSpec:
        require(category(t.dtype) in accepted, name, lambda: f"does not take dtype {t.dtype}")
        return TensorSpec(t.shape, dense_like(t.shape, t.strides), real_of(t.dtype), t.device)

    return Prim(f"{name}(t: Tensor) -> Tensor", "elementwise unary", doc, meta, reference, frozenset({"pointwise"}))


def _dense(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give a function that returns a view the dense result that the meta promises."""

    def run(t: torch.Tensor) -> torch.Tensor:
        out = function(t)
        return torch.empty_like(t, dtype=out.dtype).copy_(out)

    return run


def _where_meta(cond: TensorSpec, a: TensorSpec | Number, b: TensorSpec | Number) -> TensorSpec:
    require(cond.dtype is torch.bool, "where", lambda: f"cond has dtype {cond.dtype}, expected torch.bool")
    out = _operands("where", a, b)
    require(
        same_shape(cond.shape, out.shape),
        "where",
        lambda: f"cond has shape {tuple(cond.shape)}, the values {tuple(out.shape)}",
    )
    operands = [tuple(s.strides) for s in (cond, a, b) if isinstance(s, TensorSpec)]
    return TensorSpec(out.shape, elementwise_strides(tuple(out.shape), operands), out.dtype, out.device)


# --- unary, exact on every dtype they take -------------------------------------------------------
abs = _real_result("abs", torch.abs, "|t|; the modulus sqrt(re^2 + im^2), real, for a complex t.", "ifc")
neg = _unary("neg", torch.neg, "-t.", kinds="ifc", of=Pointwise("neg", exact=True))
sign = _unary("sign", torch.sign, "-1, 0 or 1 with the sign of t; 0 for NaN as eager has it.", kinds="if")
floor = _unary("floor", torch.floor, "The largest integer <= t.")
ceil = _unary("ceil", torch.ceil, "The smallest integer >= t.")
round = _unary("round", torch.round, "The nearest integer; halves go to the even one.")
trunc = _unary("trunc", torch.trunc, "t without its fraction, toward zero.")
bitwise_not = _unary(
    "bitwise_not",
    torch.bitwise_not,
    "Every bit inverted; logical not for bool.",
    kinds="bi",
    of=Pointwise("bitwise_not", exact=True),
)
conj = _unary(
    "conj", lambda t: t.conj().resolve_conj() if t.is_complex() else t.clone(), "re - i*im; materialised.", kinds="c"
)
real = _real_result("real", _dense(torch.real), "The real part, as a dense real tensor.", "c")
imag = _real_result("imag", _dense(torch.imag), "The imaginary part, as a dense real tensor.", "c")

# --- unary, transcendental -----------------------------------------------------------------------
exp = _function("exp", torch.exp, "e^t.")
exp2 = _function("exp2", torch.exp2, "2^t.")
expm1 = _function("expm1", torch.expm1, "e^t - 1, accurate near 0.")
log = _function("log", torch.log, "Natural logarithm.")
log2 = _function("log2", torch.log2, "Logarithm to base 2.")
log10 = _function("log10", torch.log10, "Logarithm to base 10.")
log1p = _function("log1p", torch.log1p, "log(1 + t), accurate near 0.")
sqrt = _function("sqrt", torch.sqrt, "Square root; NaN below 0.")
rsqrt = _function("rsqrt", torch.rsqrt, "1 / sqrt(t).")
reciprocal = _function("reciprocal", torch.reciprocal, "1 / t.")
sin = _function("sin", torch.sin, "Sine of radians.")
cos = _function("cos", torch.cos, "Cosine of radians.")
tan = _function("tan", torch.tan, "Tangent of radians.")
asin = _function("asin", torch.asin, "Inverse sine.")
acos = _function("acos", torch.acos, "Inverse cosine.")
atan = _function("atan", torch.atan, "Inverse tangent.")
sinh = _function("sinh", torch.sinh, "(e^t - e^-t) / 2.")
cosh = _function("cosh", torch.cosh, "(e^t + e^-t) / 2.")
tanh = _function("tanh", torch.tanh, "sinh(t) / cosh(t).")
asinh = _function("asinh", torch.asinh, "Inverse of sinh.")
acosh = _function("acosh", torch.acosh, "Inverse of cosh.")
atanh = _function("atanh", torch.atanh, "Inverse of tanh.")
sigmoid = _function("sigmoid", torch.sigmoid, "1 / (1 + e^-t).")
erf = _function("erf", torch.erf, "2/sqrt(pi) * integral of e^(-x^2) from 0 to t.", kinds="f")
erfc = _function("erfc", torch.erfc, "1 - erf(t), accurate for large t.", kinds="f")

# --- unary, special functions: `aten` is set, a backend may run the whole op ----------------------
erfinv = _function("erfinv", torch.erfinv, "The inverse of erf.", "special", kinds="f", aten=aten.erfinv.default)
lgamma = _function("lgamma", torch.lgamma, "log |Gamma(t)|.", "special", kinds="f", aten=aten.lgamma.default)
digamma = _function(
    "digamma", torch.digamma, "The derivative of lgamma.", "special", kinds="f", aten=aten.digamma.default
)
i0 = _function(
    "i0", torch.i0, "Modified Bessel function of the first kind, order 0.", "special", kinds="f", aten=aten.i0.default
)
i0e = _function("i0e", torch.special.i0e, "e^-|t| * i0(t).", "special", kinds="f", aten=aten.special_i0e.default)
i1 = _function(
    "i1",
    torch.special.i1,
    "Modified Bessel function of the first kind, order 1.",
    "special",
    kinds="f",
    aten=aten.special_i1.default,
)
i1e = _function("i1e", torch.special.i1e, "e^-|t| * i1(t).", "special", kinds="f", aten=aten.special_i1e.default)
ndtri = _function(
    "ndtri",
    torch.special.ndtri,
    "The inverse of the standard normal distribution function.",
    "special",
    kinds="f",
    aten=aten.special_ndtri.default,
)
log_ndtr = _function(
    "log_ndtr",
    torch.special.log_ndtr,
    "Logarithm of the standard normal distribution function.",
    "special",
    kinds="f",
    aten=aten.special_log_ndtr.default,
)
erfcx = _function(
    "erfcx", torch.special.erfcx, "e^(t^2) * erfc(t).", "special", kinds="f", aten=aten.special_erfcx.default
)

# --- predicates ----------------------------------------------------------------------------------
isnan = _predicate("isnan", torch.isnan, "Whether t is NaN (in either part).")
isinf = _predicate("isinf", torch.isinf, "Whether t is infinite (in either part).")
isfinite = _predicate("isfinite", torch.isfinite, "Whether t is neither infinite nor NaN.")
signbit = _predicate("signbit", torch.signbit, "Whether the sign bit is set; true for -0.0.")

# --- binary --------------------------------------------------------------------------------------
add = _binary("add", torch.add, "a + b; or for bool.", "commutative")
sub = _binary("sub", torch.sub, "a - b.")
mul = _binary("mul", torch.mul, "a * b; and for bool.", "commutative", of=Pointwise("mul.Tensor|Scalar"))
div = _binary("div", torch.div, "a / b, true division; float and complex only.")
floor_div = _binary(
    "floor_div",
    lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor(a / b): toward minus infinity, for integers and floats.",
)
trunc_div = _binary(
    "trunc_div",
    lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "trunc(a / b): toward zero, for integers and floats.",
)
fmod = _binary("fmod", torch.fmod, "a - b*trunc(a / b): the sign of a.", of=Pointwise("fmod.Tensor|Scalar"))
remainder = _binary(
    "remainder",
    torch.remainder,
    "a - b*floor(a / b): the sign of b.",
    of=Pointwise("remainder.Tensor|Scalar|Scalar_Tensor"),
)
pow = _binary("pow", torch.pow, "a^b.", "heavy")
maximum = _binary(
    "maximum", torch.maximum, "The larger; NaN when either is NaN.", "commutative", of=Pointwise("maximum", exact=True)
)
minimum = _binary(
    "minimum", torch.minimum, "The smaller; NaN when either is NaN.", "commutative", of=Pointwise("minimum", exact=True)
)
fmax = _binary(
    "fmax", torch.fmax, "The larger; the other when one is NaN.", "commutative", of=Pointwise("fmax", exact=True)
)
fmin = _binary(
    "fmin", torch.fmin, "The smaller; the other when one is NaN.", "commutative", of=Pointwise("fmin", exact=True)
)
atan2 = _binary("atan2", torch.atan2, "The angle of the point (b, a).", "heavy", of=Pointwise("atan2", to_float=True))
copysign = _binary(
    "copysign",
    torch.copysign,
    "|a| with the sign bit of b.",
    of=Pointwise("copysign.Tensor|Scalar", to_float=True, exact=True),
)
hypot = _binary(
    "hypot", torch.hypot, "sqrt(a^2 + b^2) without overflow in between.", "commutative", "heavy", of=Pointwise("hypot")
)
nextafter = _binary(
    "nextafter", torch.nextafter, "The representable number after a toward b.", of=Pointwise("nextafter", exact=True)
)
gcd = _binary(
    "gcd", torch.gcd, "Greatest common divisor, non-negative; gcd(0, 0) = 0.", "commutative", of=Pointwise("gcd")
)
lcm = _binary("lcm", torch.lcm, "Least common multiple, non-negative.", "commutative", of=Pointwise("lcm"))
bitwise_and = _binary(
    "bitwise_and",
    torch.bitwise_and,
    "Bits set in both; logical and for bool.",
    "commutative",
    of=Pointwise("bitwise_and.Tensor|Scalar|Scalar_Tensor __and__.Tensor|Scalar"),
)
bitwise_or = _binary(
    "bitwise_or",
    torch.bitwise_or,
    "Bits set in either; logical or for bool.",
    "commutative",
    of=Pointwise("bitwise_or.Tensor|Scalar|Scalar_Tensor __or__.Tensor|Scalar"),
)
bitwise_xor = _binary(
    "bitwise_xor",
    torch.bitwise_xor,
    "Bits set in one only; logical xor for bool.",
    "commutative",
    of=Pointwise("bitwise_xor.Tensor|Scalar|Scalar_Tensor __xor__.Tensor|Scalar"),
)
shift_left = _binary(
    "shift_left",
    torch.bitwise_left_shift,
    "a * 2^b for integers; 0 when b is the width or more.",
    of=Pointwise("bitwise_left_shift.Tensor|Tensor_Scalar|Scalar_Tensor __lshift__.Tensor|Scalar"),
)
shift_right = _binary(
    "shift_right",
    torch.bitwise_right_shift,
    "floor(a / 2^b), arithmetic for signed a.",
    of=Pointwise("bitwise_right_shift.Tensor|Tensor_Scalar|Scalar_Tensor __rshift__.Tensor|Scalar"),
)
igamma = _binary(
    "igamma",
    torch.special.gammainc,
    "Regularised lower incomplete gamma function P(a, b).",
    "special",
    aten=aten.igamma.default,
    of=Pointwise("igamma", to_float=True),
)
igammac = _binary(
    "igammac",
    torch.special.gammaincc,
    "Regularised upper incomplete gamma function Q(a, b).",
    "special",
    aten=aten.igammac.default,
    of=Pointwise("igammac", to_float=True),
)
zeta = _binary(
    "zeta",
    torch.special.zeta,
    "Hurwitz zeta: sum over k >= 0 of (k + b)^-a.",
    "special",
    aten=aten.special_zeta.default,
    of=Pointwise("special_zeta.|self_scalar|other_scalar", to_float=True),
)

# --- comparisons ---------------------------------------------------------------------------------
eq = _comparison("eq", torch.eq, "a == b; false for NaN.", "commutative")
ne = _comparison("ne", torch.ne, "a != b; true for NaN.", "commutative")
lt = _comparison("lt", torch.lt, "a < b.")
le = _comparison("le", torch.le, "a <= b.")
gt = _comparison("gt", torch.gt, "a > b.")
ge = _comparison("ge", torch.ge, "a >= b.")

# --- ternary -------------------------------------------------------------------------------------
where = Prim(
    "where(cond: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor",
    "ternary",
    "a where cond is true, else b. cond is bool; a and b are not both numbers.",
    _where_meta,
    torch.where,
    frozenset({"pointwise"}),
)
