"""C++ text of types, constants, index expressions and scalar operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from primtorch.symbolic.expr import Atom, Call, IntExpr, Symbol
from torchinductor.codegen.base import require_texts
from torchinductor.indexing import ONE, ZERO, Ranges, below, nonnegative, upper_bound
from torchinductor.ir import REDUCED_PRECISION, compute_dtype

# The type of an element in memory.
STORAGE: Mapping[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "u16",
    torch.float16: "_Float16",
    torch.bool: "u8",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}
_TYPES = frozenset(name for name in STORAGE.values() if name.startswith("u"))


def value_type(dtype: torch.dtype) -> str:
    """The C++ type that a value of `dtype` is computed in."""
    return "bool" if dtype == torch.bool else STORAGE[compute_dtype(dtype)]


def constant_text(value: bool | int | float, dtype: torch.dtype) -> str:
    """A literal."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        number_text = f"{int(value)}L" if value != -(2**63) else "-9223372036854775807L - 1"
        return number_text if dtype == torch.int64 and value >= 0 else f"(({value_type(dtype)})({number_text}))"
    suffix = "" if dtype == torch.float64 else "f"
    number = float(value)
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"({'-' if number < 0 else ''}__builtin_inf{suffix}())"
    return f"({number!r}{suffix})" if math.copysign(1.0, number) < 0 else f"{number!r}{suffix}"


def symbol_text(name: str) -> str:
    """A symbol as a variable: u8, the ninth number that a program takes out of its tensors, is a type here."""
    return f"{name}_" if name in _TYPES else name


def index_text(expr: IntExpr, ranges: Ranges, numbers: frozenset[str] = frozenset()) -> str:
    """An index as an i64 expression. Divisions of what is surely not negative are C++'s own; `numbers` are the symbols
    that may be negative."""
    parts: list[str] = []
    for monomial, coefficient in expr.ordered_terms():
        factors = [_atom_text(a, ranges, numbers) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, f"{abs(coefficient)}L")
        parts.append((" - " if coefficient < 0 else " + " if parts else "") + "*".join(factors))
    return "".join(parts) or "0L"


def _atom_text(atom: Atom, ranges: Ranges, numbers: frozenset[str]) -> str:
    if isinstance(atom, Symbol):
        return symbol_text(atom.key)
    left, right = index_text(atom.left, ranges, numbers), index_text(atom.right, ranges, numbers)
    if atom.op in ("min", "max"):
        return f"i{atom.op}<i64>({left}, {right})"
    turning = wrapped(atom, ranges, numbers)
    if turning is not None:
        return f"wrap({index_text(turning, ranges, numbers)}, {right})"
    if all(upper_bound(side, ranges) is not None and not side.symbols() & numbers for side in (atom.left, atom.right)):
        if wraps(atom, ranges):
            return f"wrap({left}, {right})"
        return f"(({left}) {'/' if atom.op == 'floordiv' else '%'} ({right}))"
    return f"{'floor_i' if atom.op == 'floordiv' else 'mod_i'}({left}, {right})"


def wraps(atom: Atom, ranges: Ranges) -> bool:
    """Whether an atom is the rest of a division of what is less than twice the divisor."""
    if isinstance(atom, Symbol) or atom.op != "mod" or atom.right.as_int() is None:
        return False
    return below(atom.left, atom.right + atom.right, ranges)


def wrapped(atom: Call, ranges: Ranges, numbers: frozenset[str]) -> IntExpr | None:
    """What is from zero on and less than twice the divisor, a symbol, of which an atom is the rest; `numbers` are the
    symbols that may be negative."""
    if atom.op != "mod" or atom.right.as_int() is not None or atom.right.symbols() & numbers:
        return None
    for left in (atom.left, atom.left + atom.right):
        least = ZERO  # a rest takes away at most its divisor less one
        for monomial, coefficient in left.terms.items():
            rests = [a for a in monomial if isinstance(a, Call) and a.op == "mod" and not a.right.symbols() & numbers]
            bounds: dict[Atom, IntExpr] = {a: a.right - ONE for a in rests if coefficient < 0}
            least = least + IntExpr({monomial: coefficient}).substitute(bounds)
        above = upper_bound(IntExpr({m: c for m, c in left.terms.items() if c > 0}), ranges)
        known = not least.symbols() & numbers and nonnegative(least) and above is not None
        if known and above is not None and nonnegative(atom.right + atom.right - ONE - above):
            return left
    return None


def load_text(element: str, dtype: torch.dtype, mask: str | None) -> str:
    """The value of an element."""
    if dtype == torch.bfloat16:
        text = f"bf_load({element})"
    elif dtype == torch.float16:
        text = f"(float){element}"
    elif dtype == torch.bool:
        text = f"({element} != 0)"
    else:
        text = element
    return text if mask is None else f"({mask} ? {text} : ({value_type(dtype)})0)"


def storage_text(value: str, dtype: torch.dtype, have: torch.dtype, short: bool = False) -> str:
    """A value as what is written into memory; `short`: it is a bfloat16's."""
    if dtype == torch.bfloat16 and short:
        return f"bf_upper({value})"
    if dtype == torch.bfloat16:
        return f"bf_bits({convert_text(value, torch.float32, have)})"
    if dtype == torch.float16:
        return f"(_Float16){convert_text(value, torch.float32, have)}"
    if dtype == torch.bool:
        return f"({convert_text(value, dtype, have)} ? (u8)1 : (u8)0)"
    return convert_text(value, dtype, have)


def convert_text(value: str, dtype: torch.dtype, have: torch.dtype) -> str:
    """A value converted to another type; to a reduced-precision type: rounded to it, but still a float."""
    if dtype == have:
        return value
    if dtype in REDUCED_PRECISION and have == torch.bool:
        return convert_text(value, torch.float32, have)
    if dtype == torch.bfloat16:
        return f"bf_round((float){value})"
    if dtype == torch.float16:
        return f"(float)(_Float16){value}"
    if dtype == torch.bool:
        return f"({value} != 0)"
    if have == torch.bool:  # a selection vectorises, a conversion of a bool does not
        return f"({value} ? {constant_text(1, dtype)} : {constant_text(0, dtype)})"
    if have.is_floating_point and dtype.itemsize < 4:
        return f"({value_type(dtype)})(i64){value}"  # out-of-range values wrap, as eager's do
    return f"({value_type(dtype)}){value}"


def bitcast_text(value: str, dtype: torch.dtype, source: torch.dtype, short: bool = False) -> str:
    """The bits of a value as another type of the same width; `short`: it is a bfloat16's."""
    if source == torch.bfloat16:
        value = f"{'bf_upper' if short else 'bf_bits'}({value})"
    elif source == torch.float16:
        value = f"(_Float16){value}"
    if dtype == torch.bfloat16:
        return f"bf_load((u16){value})"
    if dtype == torch.float16:
        return f"(float)__builtin_bit_cast(_Float16, {value})"
    return f"__builtin_bit_cast({STORAGE[dtype]}, {value})"


Text = Callable[..., str]


def _libm(name: str) -> Text:
    return lambda dtype, a: f"{name}{'' if dtype == torch.float64 else 'f'}({a})"


def _builtin(name: str) -> Text:
    return lambda dtype, a: f"__builtin_{name}{'' if dtype == torch.float64 else 'f'}({a})"


def _libm2(name: str, prefix: str = "") -> Text:
    return lambda dtype, a, b: f"{prefix}{name}{'' if dtype == torch.float64 else 'f'}({a}, {b})"


def _exp(dtype: torch.dtype, a: str) -> str:
    return f"exp({a})" if dtype == torch.float64 else f"fexp({a})"


def _erf(dtype: torch.dtype, a: str) -> str:
    return f"erf({a})" if dtype == torch.float64 else f"ferf({a})"


def _one(dtype: torch.dtype) -> str:
    return "1.0" if dtype == torch.float64 else "1.0f"


def _compare(sign: str) -> Text:
    return lambda dtype, a, b: f"({a} {sign} {b})"


def _arithmetic(sign: str, boolean: str | None = None) -> Text:
    def text(dtype: torch.dtype, a: str, b: str) -> str:
        if dtype == torch.bool:
            return f"(bool)({a} {boolean or sign} {b})"
        return f"({value_type(dtype)})({a} {sign} {b})" if not dtype.is_floating_point else f"({a} {sign} {b})"

    return text


def _by_kind(for_float: str, for_int: str) -> Text:
    return lambda dtype, *args: (
        f"{for_float if dtype.is_floating_point else for_int}<{value_type(dtype)}>({', '.join(args)})"
    )


def _float_or_int(for_float: Text, for_int: Text) -> Text:
    return lambda dtype, *args: (for_float if dtype.is_floating_point else for_int)(dtype, *args)


def _call(name: str) -> Text:
    return lambda dtype, *args: f"{name}({', '.join(args)})"


def _identity(dtype: torch.dtype, a: str) -> str:
    return a


def _signbit(dtype: torch.dtype, a: str) -> str:
    # By its bits: GCC 12 stops with an internal error where it vectorises __builtin_signbit.
    return f"(__builtin_bit_cast({'i64' if dtype == torch.float64 else 'i32'}, {a}) < 0)"


_LIBM = (
    "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erfc",
)  # fmt: skip
# op -> text(operand dtype, *operand texts)
OPERATIONS: Mapping[str, Text] = {
    **{name: _libm(name) for name in _LIBM},
    "exp": _exp,
    "erf": _erf,
    "abs": _float_or_int(_builtin("fabs"), lambda d, a: f"({value_type(d)})({a} < 0 ? -{a} : {a})"),
    "neg": lambda d, a: f"({value_type(d)})(-{a})",
    "sqrt": _builtin("sqrt"),
    "rsqrt": lambda d, a: f"({_one(d)} / {_builtin('sqrt')(d, a)})",
    "reciprocal": lambda d, a: f"({_one(d)} / {a})",
    "floor": _float_or_int(_builtin("floor"), _identity),
    "ceil": _float_or_int(_builtin("ceil"), _identity),
    "round": _float_or_int(_builtin("rint"), _identity),
    "trunc": _float_or_int(_builtin("trunc"), _identity),
    "sign": lambda d, a: f"({value_type(d)})(({a} > 0) - ({a} < 0))" if d != torch.bool else a,
    "relu": lambda d, a: f"({a} < 0 ? ({value_type(d)})0 : {a})",
    "bitwise_not": lambda d, a: f"(!{a})" if d == torch.bool else f"({value_type(d)})(~{a})",
    "logical_not": lambda d, a: f"(!{a})",
    "sigmoid": lambda d, a: f"({_one(d)} / ({_one(d)} + {_exp(d, '-' + a)}))",
    "isnan": lambda d, a: f"({a} != {a})",
    "isinf": _float_or_int(lambda d, a: f"({_builtin('fabs')(d, a)} == __builtin_inf())", lambda d, a: "false"),
    "isfinite": _float_or_int(lambda d, a: f"({_builtin('fabs')(d, a)} < __builtin_inf())", lambda d, a: "true"),
    "signbit": _float_or_int(_signbit, lambda d, a: f"({a} < 0)"),
    "add": _arithmetic("+", "|"),
    "sub": _arithmetic("-", "^"),
    "mul": _arithmetic("*", "&"),
    "div": _arithmetic("/"),
    "bitwise_and": _arithmetic("&"),
    "bitwise_or": _arithmetic("|"),
    "bitwise_xor": _arithmetic("^"),
    "maximum": _by_kind("max_nan", "imax"),
    "minimum": _by_kind("min_nan", "imin"),
    "fmax": _by_kind("fmax_", "imax"),
    "fmin": _by_kind("fmin_", "imin"),
    "floor_div": _float_or_int(_call("ffloor_div"), lambda d, a, b: f"ifloor_div<{value_type(d)}>({a}, {b})"),
    "trunc_div": _float_or_int(
        lambda d, a, b: _builtin("trunc")(d, f"{a} / {b}"), lambda d, a, b: f"idiv<{value_type(d)}>({a}, {b})"
    ),
    "fmod": _float_or_int(_libm2("fmod"), lambda d, a, b: f"imod<{value_type(d)}>({a}, {b})"),
    "remainder": _float_or_int(_call("fremainder"), lambda d, a, b: f"iremainder<{value_type(d)}>({a}, {b})"),
    "pow": _float_or_int(_libm2("pow"), lambda d, a, b: f"ipow<{value_type(d)}>({a}, {b})"),
    "atan2": _libm2("atan2"),
    "hypot": _libm2("hypot"),
    "nextafter": _libm2("nextafter"),
    "copysign": _libm2("copysign", "__builtin_"),
    "gcd": lambda d, a, b: f"igcd<{value_type(d)}>({a}, {b})",
    "lcm": lambda d, a, b: f"ilcm<{value_type(d)}>({a}, {b})",
    "shift_left": lambda d, a, b: f"shl<{value_type(d)}>({a}, {b})",
    "shift_right": lambda d, a, b: f"shr<{value_type(d)}>({a}, {b})",
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "where": lambda d, c, a, b: f"({c} ? {a} : {b})",
    "fma": lambda d, a, b, c: f"__builtin_fma{'' if d == torch.float64 else 'f'}({a}, {b}, {c})",
}
require_texts("C++", (OPERATIONS,))
