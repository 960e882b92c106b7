"""Conversions: C functions that ask one special method of their argument."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtin_rules import BuiltinRule, Rules
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.protocol import Args, InterpreterObject, Kwargs, World, is_text
from torchdynamo.interpreter.structural import show, shows_parts

RULES = Rules()


def _asks(native: Callable[..., object], *names: str) -> BuiltinRule:
    """For `native(obj)`: the first of the methods `names` that is Python code is interpreted.

    The native function then gets an object that answers with the result, so that it checks and converts
    the result itself.
    """

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if args and may_change(type(args[0])) and not isinstance(args[0], InterpreterObject):
            cls = type(args[0])
            for name in names:
                if not hasattr(cls, name):
                    continue
                method = python_method(cls, name)
                if method is None and getattr(cls, name) is object.__str__:
                    continue  # which asks for the next of them
                if method is None:
                    break
                answer = world.call(method, (args[0], *args[1:]), kwargs)
                if native in (str, repr) and isinstance(answer, InterpreterObject) and is_text(answer):
                    return answer
                return native(_answering(cls.__name__, name, answer))
        return world.call_leaf(native, args, kwargs)

    return rule


def _answering(class_name: str, method: str, answer: object) -> object:
    """An object whose special method returns `answer`; the class's name is in the messages of the checks."""
    return type(class_name, (), {method: lambda _self, *_args: answer})()


def _text(native: Callable[..., object], *names: str) -> BuiltinRule:
    """As `_asks`; the text of a container is put together from that of its parts where those have Python methods."""
    plain = _asks(native, *names)

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if len(args) == 1 and not kwargs and shows_parts(args[0]):
            return show(world, args[0])
        return plain(world, args, kwargs)

    return rule


for _native, _names in (
    (len, ("__len__",)),
    (hash, ("__hash__",)),
    (int, ("__int__", "__index__", "__trunc__")),
    (float, ("__float__", "__index__")),
    (complex, ("__complex__", "__float__", "__index__")),
    (bytes, ("__bytes__",)),
    (operator.index, ("__index__",)),
    (operator.length_hint, ("__len__",)),
):
    RULES[_native] = _asks(_native, *_names)


RULES[repr] = _text(repr, "__repr__")
RULES[str] = _text(str, "__str__", "__repr__")


def _asks_each(native: Callable[..., object], conversion: Callable[..., object], *names: str) -> BuiltinRule:
    """For a function of several numbers: one that a method of the program's tells is asked for before."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        return world.call_leaf(native, tuple(number_of(world, arg, conversion, *names) for arg in args), kwargs)

    return rule


def number_of(world: World, obj: object, conversion: Callable[..., object], *names: str) -> object:
    """What `conversion` gives where a method in Python would have to tell C code the number; else the object itself."""
    told = is_of_program(obj) and any(python_method(type(obj), name) is not None for name in names)
    return RULES[conversion](world, (obj,), {}) if told else obj


def is_of_program(obj: object) -> bool:
    """Whether an object is of a class in Python that is none of torch's, NumPy's or the interpreter's."""
    kind = type(obj)
    others = not may_change(kind) or isinstance(obj, InterpreterObject)
    return not others and kind.__module__.partition(".")[0] not in _NUMBERS_OF


_NUMBERS_OF = frozenset({"torch", "primtorch", "torchdynamo", "numpy"})  # have ways of their own
_WHOLE = (math.gcd, math.lcm, math.factorial, math.isqrt, math.comb, math.perm, chr, hex, oct, bin, range)
_REAL = (
    math.acos, math.acosh, math.asin, math.asinh, math.atan, math.atan2, math.atanh, math.copysign, math.cos, math.cosh,
    math.degrees, math.erf, math.erfc, math.exp, math.expm1, math.fabs, math.fmod, math.frexp, math.gamma, math.hypot,
    math.isclose, math.isfinite, math.isinf, math.isnan, math.ldexp, math.lgamma, math.log, math.log10, math.log1p,
    math.log2, math.modf, math.pow, math.radians, math.remainder, math.sin, math.sinh, math.sqrt, math.tan, math.tanh,
)  # fmt: skip
RULES.update({native: _asks_each(native, operator.index, "__index__") for native in _WHOLE})
RULES.update({native: _asks_each(native, float, "__float__", "__index__") for native in _REAL})


@RULES.interprets(ascii)
def call_ascii(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.convert(args[0], "ascii") if len(args) == 1 and not kwargs else ascii(*args, **kwargs)


def _delegates(native: object, name: str) -> BuiltinRule:
    """For `native(obj, ...)` that returns whatever the special method returns."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if args and may_change(type(args[0])):
            method = python_method(type(args[0]), name)
            if method is not None:
                return world.call(method, args, kwargs)
        return world.call_leaf(native, args, kwargs)

    return rule


def _rounded(world: World, args: Args, kwargs: Kwargs) -> object:
    if not args or kwargs.keys() - {"ndigits"}:
        return round(*args, **kwargs)
    given = (*args, *kwargs.values())
    if len(given) == 2 and given[1] is None:
        given = given[:1]
    return _delegates(round, "__round__")(world, given, {})


RULES[abs] = _delegates(abs, "__abs__")
RULES.update({native: _delegates(native, f"__{native.__name__}__") for native in (math.floor, math.ceil, math.trunc)})
RULES[round] = _rounded


@RULES.interprets(bool)
def call_bool(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.truth(args[0]) if len(args) == 1 and not kwargs else bool(*args, **kwargs)


@RULES.interprets(format)
def call_format(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 1 <= len(args) <= 2 or kwargs:
        return format(*args, **kwargs)
    return world.format_value(args[0], args[1] if len(args) == 2 else "")


@RULES.interprets(divmod)
def call_divmod(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs:
        return divmod(*args, **kwargs)
    return world.binary("divmod", args[0], args[1])


@RULES.interprets(pow)
def call_pow(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs:
        method = python_method(type(args[0]), "__pow__") if len(args) == 3 and is_of_program(args[0]) else None
        found = NotImplemented if method is None else world.call(method, args, kwargs)
        return world.call_leaf(pow, args, kwargs) if found is NotImplemented else found
    return world.binary("**", args[0], args[1])


class FormatArgument(InterpreterObject):
    """An argument of a format whose text is asked of the world."""

    __slots__ = ("value", "world")

    def __init__(self, world: World, value: object) -> None:
        self.world, self.value = world, value

    def __format__(self, spec: str) -> str:
        return self.world.format_value(self.value, spec)

    def __str__(self) -> str:
        return self.world.convert(self.value, "str")

    def __repr__(self) -> str:
        return self.world.convert(self.value, "repr")


class PartsArgument(FormatArgument):
    """An argument whose parts a format may name. Without `__getitem__` an object is no mapping to `%`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return _format_argument(self.world, self.world.getattr(self.value, name))

    def __getitem__(self, key: object) -> object:
        return _format_argument(self.world, self.world.getitem(self.value, key))


class NumberArgument(FormatArgument):
    """An argument that `%d` and `%f` ask for its number."""

    __slots__ = ()

    def _asked(self, conversion: object) -> Any:
        return self.world.call(conversion, (self.value,), {})

    def __int__(self) -> int:
        return int(self._asked(int))

    def __float__(self) -> float:
        return float(self._asked(float))

    def __index__(self) -> int:
        return int(self._asked(operator.index))


def _format_argument(world: World, value: object) -> object:
    return PartsArgument(world, value) if may_change(type(value)) else value


@RULES.interprets(str.format)
def call_str_format(world: World, args: Args, kwargs: Kwargs) -> object:
    values = tuple(_format_argument(world, value) for value in args[1:])
    return world.call_leaf(str.format, (*args[:1], *values), {k: _format_argument(world, v) for k, v in kwargs.items()})


@RULES.interprets(str.__mod__)
def call_str_mod(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs:
        return str.__mod__(*args, **kwargs)
    text, values = args
    if isinstance(values, tuple):
        values = tuple(_shown_argument(world, value) for value in values)
    elif type(values) is dict:
        values = {name: _shown_argument(world, value) for name, value in values.items()}
    else:
        values = _shown_argument(world, values)
    return world.call_leaf(str.__mod__, (text, values), {})


def _shown_argument(world: World, value: object) -> object:
    """What `%` prints in place of an object whose text is made by Python code; numbers stay what they are."""
    if isinstance(value, (int, float, str, bytes)):
        return value
    kind = type(value)
    made_by_python = any(python_method(kind, name) is not None for name in ("__str__", "__repr__"))
    if not made_by_python and not shows_parts(value):
        return value
    if any(hasattr(kind, name) for name in ("__int__", "__float__", "__index__")):
        return NumberArgument(world, value)
    base = PartsArgument if hasattr(kind, "__getitem__") else FormatArgument
    return _named(base, kind.__name__)(world, value)


@functools.lru_cache(1024)
def _named(base: type[FormatArgument], name: str) -> type[FormatArgument]:
    """A class of this name, which an error of `%d` tells."""
    return type(name, (base,), {"__slots__": ()})
