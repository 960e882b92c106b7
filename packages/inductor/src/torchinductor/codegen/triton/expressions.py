"""Triton text of the scalar operations: tables from the protocol's names, by kind of operand.

`m.` is libdevice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from torchinductor.codegen.base import require_texts
from torchinductor.errors import InductorError

TL_TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.uint16: "tl.uint16",
    torch.uint32: "tl.uint32",
    torch.uint64: "tl.uint64",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}

POINTER_TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


class Unsupported(InductorError):
    """The Triton back end has no text for an operation on a type; the node must run as an ATen call."""


class Value(NamedTuple):
    """A name in the generated code: its type, and the tile dimensions ("x", "y", "r") over which it varies."""

    name: str
    dtype: torch.dtype
    dims: frozenset[str] = frozenset()

    @property
    def is_float(self) -> bool:
        """Whether its type is a floating-point one."""
        return self.dtype.is_floating_point


def tl_type(dtype: torch.dtype) -> str:
    """The language's name of a type. Raises Unsupported for those that it lacks (complex)."""
    try:
        return TL_TYPES[dtype]
    except KeyError:
        raise Unsupported(f"Triton has no type {dtype}") from None


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """A scalar of exactly this type."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'tl.full([], float("{value}"), {tl_type(dtype)})'
    return f"tl.full([], {value!r}, {tl_type(dtype)})"


# ---- one operand ----------------------------------------------------------------------------------------------------

# fmt: off
LIBDEVICE_UNARY = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
]
# fmt: on

FLOAT_UNARY: Mapping[str, str] = {
    **{name: f"m.{name}({{0}})" for name in LIBDEVICE_UNARY},
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "m.rsqrt({0})",
    "reciprocal": "(1 / {0})",
    "sigmoid": "(1 / (1 + m.exp(-{0})))",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "m.trunc({0})",
    "round": "m.nearbyint({0})",
    "isnan": "({0} != {0})",
    "isinf": '(tl.abs({0}) == float("inf"))',
    "isfinite": '(tl.abs({0}) < float("inf"))',
    "relu": "tl.where({0} <= 0, 0, {0})",
}

ANY_UNARY: Mapping[str, str] = {
    "abs": "tl.abs({0})",
    "neg": "(-{0})",
    "sign": "(tl.where({0} > 0, 1, 0) - tl.where({0} < 0, 1, 0)).to({0}.dtype)",
    "relu": "tl.maximum({0}, 0)",
    "bitwise_not": "(~{0})",
    "logical_not": "({0} == 0)",
    "isnan": "({0} != {0})",
    "isfinite": "({0} == {0})",
    "isinf": "({0} != {0})",
    "signbit": "({0} < 0)",
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), "{0}"),
}

# ---- two operands ---------------------------------------------------------------------------------------------------

ANY_BINARY: Mapping[str, str] = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "shift_left": "({0} << {1})",
    "shift_right": "({0} >> {1})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "floor_div": "_floor_div({0}, {1})",
    "trunc_div": "({0} // {1})",
    "fmod": "({0} % {1})",
    "remainder": "_remainder({0}, {1})",
    "gcd": "_gcd({0}, {1})",
    "lcm": "_lcm({0}, {1})",
    "pow": "_int_pow({0}, {1})",
}

FLOAT_BINARY: Mapping[str, str] = {
    "div": "({0} / {1})",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "fmax": "tl.where(({0} > {1}) | ({1} != {1}), {0}, {1})",
    "fmin": "tl.where(({0} < {1}) | ({1} != {1}), {0}, {1})",
    "floor_div": "_float_floor_div({0}, {1}, m.fmod({0}, {1}))",
    "trunc_div": "m.trunc({0} / {1})",
    "fmod": "m.fmod({0}, {1})",
    "remainder": "_float_remainder({0}, {1}, m.fmod({0}, {1}))",
    "pow": "m.pow({0}, {1})",
    "atan2": "m.atan2({0}, {1})",
    "hypot": "m.hypot({0}, {1})",
    "copysign": "m.copysign({0}, {1})",
    "nextafter": "m.nextafter({0}, {1})",
}

FLOAT32: Mapping[str, str] = {
    "rsqrt": "tl.rsqrt({0})",
    "signbit": "({0}.to(tl.int32, bitcast=True) < 0)",
    "div": "tl.div_rn({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
}

# In kernels that store only 16-bit floats: errors of a few units in the last place of a float32 are rounded away.
COARSE: Mapping[str, str] = {
    "exp": "m.fast_expf({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "sigmoid": "m.fast_dividef(tl.full([], 1.0, tl.float32), 1 + m.fast_expf(-{0}))",
    "div": "({0} / {1})",
}

# Of float32, one more than the function: the sum as one computation, which is cheaper than the function and, where the
# two cancel, more exact. They are the gates of GELU.
ONE_MORE: Mapping[str, str] = {"erf": "_erfc(-{0})", "tanh": "2 * {sigmoid}"}

FLOAT64: Mapping[str, str] = {"sqrt": "m.sqrt({0})", "signbit": "({0}.to(tl.int64, bitcast=True) < 0)"}

BOOL_OPS: Mapping[str, str] = {
    "logical_not": "({0} == 0)",
    "bitwise_not": "({0} == 0)",
    "add": "({0} | {1})",
    "mul": "({0} & {1})",
    "maximum": "({0} | {1})",
    "minimum": "({0} & {1})",
}

TERNARY: Mapping[str, str] = {"where": "tl.where({0}, {1}, {2})", "fma": "tl.fma({0}, {1}, {2})"}


require_texts("Triton", (FLOAT_UNARY, FLOAT_BINARY, ANY_UNARY, ANY_BINARY, TERNARY))


def _tables(kind: torch.dtype, coarse: bool) -> list[Mapping[str, str]]:
    if kind is torch.bool:
        return [BOOL_OPS, ANY_UNARY, ANY_BINARY]
    if not kind.is_floating_point:
        return [ANY_UNARY, ANY_BINARY]
    special = FLOAT32 if kind is torch.float32 else FLOAT64
    first = [COARSE] if coarse and kind is torch.float32 else []
    return [*first, special, FLOAT_UNARY, FLOAT_BINARY, ANY_UNARY, ANY_BINARY]


def apply_text(op: str, operands: list[Value], *, coarse: bool = False) -> str:
    """The expression of an elementwise operation on named operands. Raises Unsupported where there is none.

    `coarse`: the results will be rounded to 16 bits.
    """
    names = [v.name for v in operands]
    if op in TERNARY:
        return TERNARY[op].format(*names)
    kind = operands[0].dtype
    for table in _tables(kind, coarse):
        if op in table:
            return table[op].format(*names)
    raise Unsupported(f"the Triton back end has no {op} of {kind}")


def apply_one_more(op: str, operand: Value, *, coarse: bool = False) -> str:
    """The expression of one more than a function of `ONE_MORE`."""
    twice = operand._replace(name=f"(2 * {operand.name})")
    return ONE_MORE[op].format(operand.name, sigmoid=apply_text("sigmoid", [twice], coarse=coarse))


def convert_text(value: Value, dtype: torch.dtype) -> str:
    """A conversion; to bfloat16 and float16 it rounds, and the value stays a float32."""
    if dtype is torch.bool:
        return f"({value.name} != 0)"
    if dtype in (torch.bfloat16, torch.float16):
        return f"{_rounded(value, dtype)}.to(tl.float32)"
    if value.is_float and dtype is torch.uint8:  # negative floats wrap around as on the CPU
        return f"{value.name}.to(tl.int32).to(tl.uint8)"
    return f"{value.name}.to({tl_type(dtype)})"


def stored_text(value: Value, dtype: torch.dtype) -> str:
    """The value in a buffer's own type."""
    if value.dtype is dtype:
        return value.name
    return _rounded(value, dtype) if dtype in (torch.bfloat16, torch.float16) else convert_text(value, dtype)


def _rounded(value: Value, dtype: torch.dtype) -> str:
    through = "" if value.dtype is torch.float32 else ".to(tl.float32)"  # as eager: from float64 in two roundings
    return f"{value.name}{through}.to({tl_type(dtype)})"


# ---- reductions and scans -------------------------------------------------------------------------------------------


class Combine(NamedTuple):
    """How a reduction combines: the prelude's function, the start value by type, and a faster built-in over an axis."""

    function: str
    identity: Callable[[torch.dtype], bool | int | float]
    builtin: str | None = None
    pair: bool = False


def _lowest(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _zero(dtype: torch.dtype) -> bool | int | float:
    return 0.0 if dtype.is_floating_point else 0


def _one(dtype: torch.dtype) -> bool | int | float:
    return 1.0 if dtype.is_floating_point else 1


REDUCTIONS: Mapping[str, Combine] = {
    "sum": Combine("_add", _zero, "tl.sum"),
    "prod": Combine("_mul", _one),
    "amax": Combine("_max", _lowest),
    "amin": Combine("_min", _highest),
    "any": Combine("_or", lambda _: False),
    "all": Combine("_and", lambda _: True),
    "argmax": Combine("_argmax", _lowest, pair=True),
    "argmin": Combine("_argmin", _highest, pair=True),
}

SCANS: Mapping[str, Combine] = {
    "sum": Combine("_add", _zero),
    "prod": Combine("_mul", _one),
    "cummax": Combine("_last_max", _lowest, pair=True),
    "cummin": Combine("_last_min", _highest, pair=True),
    "logcumsumexp": Combine("_logaddexp", _lowest),
}

ATOMICS: Mapping[str, str] = {"add": "tl.atomic_add", "amax": "tl.atomic_max", "amin": "tl.atomic_min"}

# Functions that generated kernels call. Comparisons with a NaN are false, which the forms below rely on.
_HELPERS = """
@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _max(a, b):
    if a.dtype == tl.float32:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _min(a, b):
    if a.dtype == tl.float32:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((a < b) | (a != a), a, b)


@triton.jit
def _over(x, by, run: tl.constexpr):
    product = tl.umulhi(x.to(tl.uint32) // run, by.to(tl.uint32))
    return tl.max_constancy(product >> (by >> 32).to(tl.uint32), [run]).to(tl.int32)


@triton.jit
def _argmax(a, i, b, j):
    first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def _argmin(a, i, b, j):
    first = (a < b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def _last_max(a, i, b, j):
    second = (b >= a) | (b != b)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def _last_min(a, i, b, j):
    second = (b <= a) | (b != b)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def _logaddexp(a, b):
    high = tl.where((a > b) | (a != a), a, b)
    low = tl.where((a > b) | (a != a), b, a)
    return tl.where(low == float("-inf"), high, high + tl.log(1 + tl.exp(low - high)))


@triton.jit
def _remainder(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def _erfc(x):
    # 2^-p(|x|), p fitted to -log2 of the function, so that the result is within 6e-8; mirrored below zero.
    t = tl.abs(x)
    p = t * 1.5291634554159828e-06 - 2.8568429115694016e-05
    p = tl.fma(p, t, 0.00023079717357177287)
    p = tl.fma(p, t, -0.001040303148329258)
    p = tl.fma(p, t, 0.0025524094235152006)
    p = tl.fma(p, t, -0.0003247954009566456)
    p = tl.fma(p, t, -0.027603020891547203)
    p = tl.fma(p, t, 0.1482742577791214)
    p = tl.fma(p, t, 0.9184473156929016)
    p = tl.fma(p, t, 1.6279070377349854)
    y = tl.exp2(-p * t)
    return tl.where(x < 0, 2 - y, y)


@triton.jit
def _floor_div(a, b):
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)


@triton.jit
def _gcd(a, b):
    a = tl.abs(a) + b * 0  # of both operands' shape
    b = tl.abs(b) + a * 0
    for _ in range(93):  # Euclid's longest run on 64 bits: neighbours in the Fibonacci numbers
        done = b == 0
        r = a % tl.where(done, 1, b).to(b.dtype)
        a = tl.where(done, a, b)
        b = tl.where(done, b, r)
    return a


@triton.jit
def _lcm(a, b):
    g = _gcd(a, b)
    return tl.abs(a // tl.where(g == 0, 1, g).to(g.dtype) * b)


@triton.jit
def _int_pow(a, b):
    base = a + b * 0
    left = b + a * 0
    result = (base * 0 + 1).to(base.dtype)
    for _ in range(64):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    unit = tl.where(a == 1, 1, tl.where((a + 1 == 0) & (a < 0), 1 - 2 * (b & 1), 0)).to(result.dtype)
    return tl.where(b < 0, unit, result)


@triton.jit
def _float_remainder(a, b, r):
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def _float_floor_div(a, b, r):
    q = (a - r) / b
    q = tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
    near = tl.floor(q)
    near = tl.where(q - near > 0.5, near + 1, near)
    return tl.where(b == 0, a / b, tl.where(q == 0, q * 0, near))


@triton.jit
def _philox_block(seed, block, stream):
    # Philox4x32-10: key = the seed's halves, counter = (block's halves, stream, 0).
    bits = seed.to(tl.uint64)
    k0 = (bits & 0xFFFFFFFF).to(tl.uint32)
    k1 = (bits >> 32).to(tl.uint32)
    wide = block.to(tl.uint64)
    c0 = (wide & 0xFFFFFFFF).to(tl.uint32)
    c1 = (wide >> 32).to(tl.uint32)
    c2 = c0 * 0 + stream
    c3 = c0 * 0
    m0 = tl.full([], 0xD2511F53, tl.uint32)
    m1 = tl.full([], 0xCD9E8D57, tl.uint32)
    w0 = tl.full([], 0x9E3779B9, tl.uint32)
    w1 = tl.full([], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, m0)
        h1 = tl.umulhi(c2, m1)
        l0 = c0 * m0
        l1 = c2 * m1
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _philox(seed, index, stream):
    # Word index % 4 of block index // 4.
    c0, c1, c2, c3 = _philox_block(seed, index >> 2, stream)
    odd = (index & 1) != 0
    return tl.where((index & 2) != 0, tl.where(odd, c3, c2), tl.where(odd, c1, c0)).to(tl.int64)


@triton.jit
def _philox_line(seed, first, stream, shape: tl.constexpr):
    # The words of a tile whose index runs on without a gap; `first` holds each fourth index, a multiple of 4.
    c0, c1, c2, c3 = _philox_block(seed, first >> 2, stream)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), shape).to(tl.int64)
"""

_NAMED: Mapping[str, str] = {
    text.split("(", 1)[0]: f"@triton.jit\ndef {text.strip()}\n" for text in _HELPERS.split("@triton.jit\ndef ")[1:]
}
_WORDS = {name: re.compile(rf"\b{name}\b") for name in _NAMED}


def helpers_of(text: str) -> list[str]:
    """The helpers that a function calls, and those that these call: reading each takes Triton about a millisecond."""
    wanted: set[str] = set()
    texts = [text]
    while texts:
        text = texts.pop()
        fresh = {name for name in _NAMED if name in text and name not in wanted and _WORDS[name].search(text)}
        wanted |= fresh
        texts += [_NAMED[name] for name in fresh]
    return [helper for name, helper in _NAMED.items() if name in wanted]
