"""Texts that the compiled code makes at each call: of numbers that are symbols, and of texts that differ between calls.
Rounded numbers, too: what `round(loss, 3)` gives is for people to read.

`f"loss {loss.item():.3f}"` needs no value while a program is captured as long as the program only keeps the text, joins
it to others, prints or logs it, or hands it on: a `RunTimeText` stands for it, and generated code calls the function
that Python would have called. Whatever looks at such a text raises `TextNeeded`; then capture begins anew, and the text
is made there as any other: its numbers are guarded, or the graph ends before they are taken out of a tensor.
"""

from __future__ import annotations

import decimal
import re
import string
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from torchdynamo.interpreter.protocol import MISSING, Args, Escape, InterpreterObject, Kwargs
from torchdynamo.sources import Source

Place = tuple[UserFrame, ...]


@record
class Origins:
    """Where texts come from: the user's stack where they were made, and what they were outside of the program."""

    places: frozenset[Place] = frozenset()
    sources: frozenset[Source] = frozenset()

    def __or__(self, other: Origins) -> Origins:
        return Origins(self.places | other.places, self.sources | other.sources)


class TextNeeded(Escape):
    """The program, or C code, looks at texts that are known only at each call."""

    def __init__(self, origins: Origins) -> None:
        super().__init__(origins)
        self.origins = origins


class _Needs:
    """A special method that asks for the text. No Python function: the interpreter would run it as the program's."""

    def __get__(self, text: RunTimeText | None, kind: type) -> object:
        return self if text is None else text.need


class RunTimeText(InterpreterObject):
    """What `function(*args)` gives at each call, where some of `args` are known only then; or the text at a source.

    Attributes:
        sample: a text that it could be.
    """

    __slots__ = ("args", "function", "origins", "sample", "source")
    native: type = str

    def __init__(
        self,
        function: Callable[..., object],
        args: Args,
        origins: Origins,
        sample: object,
        source: Source | None = None,
    ) -> None:
        self.function, self.args, self.origins, self.sample, self.source = function, args, origins, sample, source

    def need(self, *_: object) -> NoReturn:
        """Raises TextNeeded: what asks has to have the text itself."""
        raise TextNeeded(self.origins)

    def attribute(self, name: str) -> object:
        """An attribute. Of a text's methods, `encode` goes without the text itself."""
        return types.MethodType(str.encode, self) if type(self) is RunTimeText and name == "encode" else self.need()

    __str__ = __repr__ = __format__ = __len__ = __iter__ = __contains__ = __getitem__ = __hash__ = _Needs()  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _Needs()  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __bool__ = _Needs()
    __int__ = __float__ = __index__ = __fspath__ = _Needs()


class RunTimeFloat(RunTimeText):
    """A float that is made as such texts are."""

    __slots__ = ()
    native = float


class RunTimeBytes(RunTimeText):
    """Bytes of the outside, of each call, such as `struct.pack` gives behind a break."""

    __slots__ = ()
    native = bytes


class RunTimeDecimal(RunTimeText):
    """A decimal number of the outside, of each call."""

    __slots__ = ()
    native = decimal.Decimal


# Constants of the outside that programs hand on as they are, by their type: those that changed need not be looked at.
HANDED_ON: dict[type, type[RunTimeText]] = {kind.native: kind for kind in (RunTimeText, RunTimeBytes, RunTimeDecimal)}
MADE_AT_EACH_CALL: frozenset[type[RunTimeText]] = frozenset({RunTimeFloat, *HANDED_ON.values()})


def is_run_time(value: object) -> bool:
    """Whether a value is a number or a text that is known only at each call."""
    return type(value) in _RUN_TIME


_RUN_TIME = frozenset({*MADE_AT_EACH_CALL, torch.SymInt, torch.SymFloat})


def holds_run_time(value: object) -> bool:
    """The same of anything in tuples, lists and dicts."""
    return any(is_run_time(part) for part in parts_of(value))


def parts_of(value: Any) -> Iterator[object]:
    """A value, or whatever is in its tuples, lists and dicts."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind not in (tuple, list, dict):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            todo += value if kind is not dict else value.values()


class RunTimeTexts:
    """Those of one capture.

    Args:
        user_frames: the user's stack now.
        plain: where texts are made of the numbers' values.
    """

    def __init__(self, user_frames: Callable[[], Place], plain: Collection[Place]) -> None:
        self.user_frames = user_frames
        self.plain = plain
        self.made = Origins()  # of all

    def of(self, function: Callable[..., object], *args: object) -> object:
        """What `function(*args)` gives, or MISSING: nothing in it is of run time, or capture has to know it."""
        if not any(map(is_run_time, args)):
            return MISSING
        if not all(type(arg) in _PARTS for arg in args):
            return MISSING
        place = self.user_frames()
        if place in self.plain:
            return MISSING
        try:
            sample = function(*map(_sample, args))
        except (TypeError, ValueError, LookupError, OverflowError):
            return MISSING  # for the program to see
        origins = Origins(frozenset({place}))
        for arg in args:
            if isinstance(arg, RunTimeText):
                origins |= arg.origins
        self.made |= origins
        return _MADE[type(sample)](function, args, origins, sample)

    def given(self, text: object, source: Source) -> RunTimeText:
        """A text of the outside, of each call, or another constant that is handed on."""
        origins = Origins(sources=frozenset({source}))
        self.made |= origins
        return HANDED_ON[type(text)](type(text), (), origins, text, source)

    def format(self, value: object, spec: object) -> object:
        """`format(value, spec)` as a text of run time, or MISSING where it is none."""
        if type(value) is RunTimeText and spec == "":
            return value
        if type(spec) is not str or spec.endswith("c"):  # a number's letter: not all have one
            return MISSING
        return self.of(format, value, spec)

    def convert(self, value: object, how: str) -> object:
        """The value's text by "str", "repr" or "ascii"."""
        if type(value) is RunTimeText and how == "str":
            return value
        return self.of(_CONVERSIONS[how], value)

    def binary(self, op: str, a: object, b: object) -> object:
        """`a + b` of texts, `a % b`, `a * b` of a text and a number."""
        if op == "*":
            text, number = (a, b) if isinstance(a, (str, RunTimeText)) else (b, a)
            fits = type(text) in (str, RunTimeText) and type(number) in (int, torch.SymInt)
            return self.of(repeated, text, number) if fits else MISSING
        if op == "+" and (type(a) is RunTimeText or type(b) is RunTimeText):
            both = all(type(side) in (str, RunTimeText) for side in (a, b))
            return self.of(joined, "", a, b) if both else MISSING
        if op != "%" or type(a) is not str:
            return MISSING
        if type(b) is dict:
            named = all(type(name) is str for name in b)
            return self._percent(a, _of_names, tuple(b.values()), tuple(b)) if named else MISSING
        return self._percent(a, _of_places, b if type(b) is tuple else (b,))

    def _percent(self, text: str, function: Callable[..., str], values: Args, *names: tuple[str, ...]) -> object:
        if not any(map(is_run_time, values)):
            return MISSING
        # `%d` refuses an infinite number.
        kinds = set(_CONVERSION.findall(text))
        whole = not any(type(value) in (torch.SymFloat, RunTimeFloat) for value in values)
        if not kinds <= (_OF_ALL | _OF_INTEGERS if whole else _OF_ALL) or "*" in text:
            return MISSING
        return self.of(function, text, *map(_Names, names), *values)

    def call(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        """A call of `str`, `repr`, `round`, `hex` and the like, or of a method of a text; MISSING where it is none, or
        nothing is of run time."""
        if fn is str or fn is repr or fn is ascii:
            one = len(args) == 1 and not kwargs and is_run_time(args[0])
            return self.convert(args[0], fn.__name__) if one else MISSING
        if fn is hex or fn is oct or fn is bin:
            one = len(args) == 1 and not kwargs and type(args[0]) is torch.SymInt
            return self.of(fn, args[0]) if one else MISSING
        if fn is round:
            return self._round(*args, **kwargs) if args else MISSING
        if type(fn) is types.BuiltinFunctionType and type(fn.__self__) is str:
            fn, args = getattr(str, fn.__name__), (fn.__self__, *args)
        if fn is str.join and len(args) == 2 and not kwargs:
            return self._join(*args)
        if type(fn) is types.MethodType and fn.__func__ is str.encode:  # of a text of numbers, whose sample tells
            text: Any = fn.__self__  # whether the rest of it has bytes in that encoding
            return MISSING if kwargs or text.origins.sources else self.of(str.encode, text, *args)
        return self._format(args, kwargs) if fn is str.format and args else MISSING

    def _round(self, number: object, ndigits: object = None) -> object:
        if type(number) is not torch.SymFloat or type(ndigits) is not int or not 0 <= ndigits <= _MOST_DIGITS:
            return MISSING  # of less than no digits it may overflow
        return self.of(round, number, ndigits)

    def refused(self, error: TypeError) -> None:
        """C code did not take what stands for a text: raises TextNeeded where that is what the error says."""
        if any(kind.__name__ in str(error) for kind in MADE_AT_EACH_CALL):
            raise TextNeeded(self.made) from error

    def _join(self, separator: object, parts: Any) -> object:
        if type(parts) not in (list, tuple) or not any(type(part) is RunTimeText for part in parts):
            return MISSING
        return self.of(joined, separator, *parts)

    def _format(self, args: Args, kwargs: Kwargs) -> object:
        """`text.format(...)`, where the text names whole arguments."""
        text, *values = args
        if type(text) is not str or not any(map(is_run_time, (*values, *kwargs.values()))):
            return MISSING
        try:
            fields = list(string.Formatter().parse(text))
        except ValueError:
            return MISSING
        for _, name, spec, _ in fields:
            if name is not None and not (name == "" or name.isdigit() or name.isidentifier()):
                return MISSING
            if spec and ("{" in spec or spec.endswith("c")):
                return MISSING
        return self.of(_formatted, text, _Names(tuple(kwargs)), *values, *kwargs.values())


# -- what generated code calls ---------------------------------------------------------------------


class _Names(tuple[str, ...]):
    """Names of the last of the values that follow."""

    __slots__ = ()

    def __new__(cls, names: tuple[str, ...]) -> _Names:
        return tuple.__new__(cls, names)


def joined(separator: str, *parts: str) -> str:
    """The parts with the separator between them."""
    return separator.join(parts)


def repeated(text: str, count: int) -> str:
    """The text so many times."""
    return text * count


def _of_places(text: str, *values: object) -> str:
    return text % values


def _of_names(text: str, names: tuple[str, ...], *values: object) -> str:
    return text % dict(zip(names, values, strict=True))


def _formatted(text: str, names: tuple[str, ...], *values: object) -> str:
    split = len(values) - len(names)
    return text.format(*values[:split], **dict(zip(names, values[split:], strict=True)))


def _sample(arg: object) -> object:
    if isinstance(arg, RunTimeText):
        return arg.sample
    return 1.5 if type(arg) is torch.SymFloat else 1 if type(arg) is torch.SymInt else arg


_MADE: dict[type, type[RunTimeText]] = {str: RunTimeText, bytes: RunTimeBytes, float: RunTimeFloat}
_PARTS = frozenset({int, float, bool, str, type(None), _Names, RunTimeText, RunTimeFloat, torch.SymInt, torch.SymFloat})
_CONVERSIONS: dict[str, Callable[..., str]] = {"str": str, "repr": repr, "ascii": ascii}
_CONVERSION = re.compile(r"%(?:\(\w*\))?[#0\- +]*\d*(?:\.\d*)?[hlL]?(.)", re.DOTALL)
_MOST_DIGITS = 300
_OF_ALL = frozenset("srafFeEgG%")
_OF_INTEGERS = frozenset("diuxXo")
