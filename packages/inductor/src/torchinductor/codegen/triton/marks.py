"""Numbers in generated text that a kernel may as well be given: marked where they are written, by what they are for.

A size, a stride or a number of programs is one of the kernel's own numbers until `families` knows what other kernels of
the program have in its place. What decides how the compiler makes the kernel is never marked: the sizes of tiles, short
loops, what elements' positions are divided by, but for those of a line.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable
from typing import Literal

import torch

from primtorch.frozen import record, remembering_record
from primtorch.once import cached_property

Use = Literal["n", "c", "f", "d", "<", ">", "/", "%", "@"]
"""An integer; one that only counts programs, iterations or elements, of which nothing else matters; a float of 32 or 64
bits; and the constant part of an address. That stands last, as the loads' own offset ("<" leaves its place empty), and
first where it is an argument (">" leaves its place empty): it is added once. What positions of a line are divided by,
behind their name ("/"), and what a remainder by it is taken of, behind that name and in front of the quotient's ("%").
"@": no number, but further arguments of a function that is named, with those that its own text has."""

_MARKED = re.compile("\u27e8(.)(.*?)\u27e9")
_FLOATS: dict[torch.dtype, Use] = {torch.float32: "f", torch.float64: "d"}
_TYPES = {"f": "fp32", "d": "fp64"}
_PACKED = {"f": ("<f", "<i"), "d": ("<d", "<q")}
_LARGEST = {"f": torch.finfo(torch.float32).max, "d": torch.finfo(torch.float64).max}
_MOST = 2**31 - 1
WIDEST = 16  # bytes of the widest load


@record
class Argument:
    """What a kernel is given in the place of a number: Triton's name of its type, its bits, and its greatest factor
    that is a power of two, up to which loads and stores may be wide."""

    kind: str
    cell: int
    multiple: int = 1


@remembering_record
class Mark:
    """A marked number: its use, and the text that it was written as."""

    use: Use
    text: str

    @property
    def integral(self) -> bool:
        """Whether it is no float."""
        return self.use not in ("f", "d")

    @property
    def divides(self) -> bool:
        """Whether it is a quotient's or a remainder's."""
        return self.use in ("/", "%")

    @property
    def _names(self) -> list[str]:
        """Those that stand beside the number of a quotient or a remainder."""
        return self.text.split()[::2] if self.divides else []

    @cached_property
    def value(self) -> int | float:
        """The number."""
        return float(self.text) if not self.integral else int(self.text.split()[1] if self.divides else self.text)

    def multiple(self, widest: int) -> int:
        """The greatest power of two, up to `widest`, that the integer is a multiple of."""
        number = int(self.value)
        return min(number & -number, widest)

    def argument(self, widest: int) -> Argument:
        """What stands for it. `widest`: elements of a kernel's widest load."""
        if not self.integral:
            of_float, of_bits = _PACKED[self.use]
            return Argument(_TYPES[self.use], struct.unpack(of_bits, struct.pack(of_float, self.value))[0])
        number, multiple = int(self.value), self.multiple(widest)
        if self.use == "/":  # as many positions in a row have one quotient
            return Argument("i64", reciprocal(number // multiple))
        return Argument("i32", number, multiple)

    def likeness(self, widest: int) -> str:
        """What numbers must have in common for one kernel to take either. What the compiler makes something better of
        than of a number that it does not know (a zero, a one, a power of two that a float is divided by) is alone."""
        if not self.integral:
            value = abs(float(self.text))
            plain = value <= _LARGEST[self.use] and math.frexp(value)[0] not in (0.0, 0.5)
            return self.use if plain else f"{self.use}{self.text}"
        number = int(self.value)
        if abs(number) <= 1 or abs(number) > _MOST:
            return f"{self.use}{number}"
        if self.use == "c":
            return self.use
        if self.use == "%":  # of what the quotient is the same for, its own likeness says
            return f"{self.use}{' '.join(self._names)}"
        return f"{self.use}{' '.join(self._names)}{'-' if number < 0 else ''}*{self.multiple(widest)}"

    @property
    def plain(self) -> str:
        """Its text as a constant."""
        if self.divides:
            return f"({self._names[0]} {'//' if self.use == '/' else '%'} ({self.value}))"
        return "" if self.use == "<" else f" + {self.text}" if self.use == ">" else self.text

    def named(self, name: str, multiple: int) -> str:
        """Its text as an argument of this name. `multiple`: what it is a multiple of, whatever it is."""
        if self.use == "/":
            return f"_over({self._names[0]}, {name}, {multiple})"
        if self.use == "%":
            return f"({self._names[0]} - {self._names[1]} * {name})"
        return f" + {name}" if self.use == "<" else "" if self.use == ">" else name


def reciprocal(divisor: int) -> int:
    """What `_over` multiplies by in the place of dividing, and how far it shifts the product: 32 bits each.

    With 2**(l - 1) < divisor < 2**l, the factor f = (2**(31 + l) + e) / divisor is an integer below 2**32 for one e in
    (0, divisor]. For 0 <= n < 2**31 the product is off by n * e / (divisor * 2**(31 + l)), less than 1 / divisor, so
    that its floor is that of n / divisor.
    """
    assert 2 < divisor <= _MOST and divisor & (divisor - 1)
    shift = divisor.bit_length() - 1
    return (1 << 32 + shift) // divisor + 1 | shift << 32


def marked(value: int, use: Use = "n") -> str:
    """The text of an integer that the kernel may be given."""
    return f"\u27e8{use}{value}\u27e9"


def marked_quotient(name: str, by: int) -> str:
    """The text of a quotient of positions, from 0 to 2**31 - 1, by a number that the kernel may be given."""
    return f"\u27e8/{name} {by}\u27e9" if _is_divided_by(by) else f"({name} // ({by}))"


def marked_remainder(name: str, by: int, quotient: str) -> str:
    """The same of what is left, where the quotient has a name."""
    return f"\u27e8%{name} {by} {quotient}\u27e9" if _is_divided_by(by) else f"({name} % ({by}))"


def _is_divided_by(number: int) -> bool:
    """Whether division by it is no shift."""
    return number & (number - 1) != 0 and number <= _MOST


def arguments_of(function: str) -> str:
    """Where a function's parameters, and those that it is called with, may be followed by numbers."""
    return f"\u27e8@{function}\u27e9"


def counting(text: str) -> str:
    """A text of which nothing matters but what it comes to."""
    return text.replace("\u27e8n", "\u27e8c")


def marked_float(value: bool | int | float, dtype: torch.dtype) -> str | None:
    """The text of a float that the kernel may be given; None where it is of another type, or no number."""
    if dtype not in _FLOATS or isinstance(value, bool) or not math.isfinite(value):
        return None
    return f"\u27e8{_FLOATS[dtype]}{value!r}\u27e9"


def number_of(cell: int, kind: str) -> int | float:
    """What a launch is given as an argument of this type, as a number."""
    use = next((use for use, name in _TYPES.items() if name == kind), None)
    if use is None:
        return cell
    of_float, of_bits = _PACKED[use]
    found: float = struct.unpack(of_float, struct.pack(of_bits, cell))[0]
    return found


def replaced(text: str, by: Callable[[Mark], str], called: Callable[[str], str] | None = None) -> str:
    """The text with other text for each number, in their order, and for further arguments, of which `called` is told
    the function; else these stay marked."""

    def put(found: re.Match[str]) -> str:
        mark = _mark(found[0])
        if mark.use != "@":
            return by(mark)
        return found[0] if called is None else called(mark.text)

    return _MARKED.sub(put, text)


def plain(text: str) -> str:
    """The text with all numbers as constants."""
    return replaced(text, lambda mark: mark.plain, lambda _: "") if "\u27e8" in text else text


def marks_of(text: str) -> list[Mark]:
    """The numbers of a text, in their order."""
    return [mark for found in _MARKED.finditer(text) if (mark := _mark(found[0])).use != "@"]


@functools.lru_cache(1 << 12)  # few numbers stand in most places
def _mark(written: str) -> Mark:
    return Mark(written[1], written[2:-1])  # type: ignore[arg-type]
