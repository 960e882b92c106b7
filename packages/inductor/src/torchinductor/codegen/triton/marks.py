"""Numbers in generated text that a kernel may as well be given: marked where they are written, by what they are for.

A size, a stride or a number of programs is one of the kernel's own numbers until `families` knows what other kernels of
the program have in its place. What decides how the compiler makes the kernel is never marked: the sizes of tiles, short
loops, what elements are divided by one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal

import torch

from primtorch.frozen import record

Use = Literal["n", "c", "f", "d", "<", ">", "@"]
"""An integer; one that only counts programs or iterations, of which nothing else matters; a float of 32 or 64 bits;
and the constant part of an address. That stands last, as the loads' own offset ("<" leaves its place empty), and first
where it is an argument (">" leaves its place empty): it is added once. "@": no number, but further arguments of a
function that is named, with those that its own text has."""

_MARKED = re.compile("\u27e8(.)(.*?)\u27e9")
_FLOATS: dict[torch.dtype, Use] = {torch.float32: "f", torch.float64: "d"}
_LARGEST = {"f": torch.finfo(torch.float32).max, "d": torch.finfo(torch.float64).max}
_MOST = 2**31 - 1
_VECTOR = 16  # elements of the widest load


@record
class Mark:
    """A marked number: its use, and the text that it was written as."""

    use: Use
    text: str

    @property
    def integral(self) -> bool:
        """Whether it is no float."""
        return self.use not in ("f", "d")

    @property
    def value(self) -> int | float:
        """The number."""
        return int(self.text) if self.integral else float(self.text)

    @property
    def divisor(self) -> int:
        """The power of two that it is a multiple of, as far as this matters: to how wide loads and stores can be."""
        number = int(self.text)
        return min(number & -number, _VECTOR)

    @property
    def likeness(self) -> str:
        """What numbers must have in common for one kernel to take either. What the compiler makes something better of
        than of a number that it does not know (a zero, a one, a power of two that a float is divided by) is alone."""
        if not self.integral:
            value = abs(float(self.text))
            plain = value <= _LARGEST[self.use] and math.frexp(value)[0] not in (0.0, 0.5)
            return self.use if plain else f"{self.use}{self.text}"
        number = int(self.text)
        if abs(number) <= 1 or abs(number) > _MOST:
            return f"{self.use}{number}"
        if self.use == "c":
            return self.use
        return f"{self.use}{'-' if number < 0 else ''}*{self.divisor}"

    @property
    def plain(self) -> str:
        """Its text as a constant."""
        return "" if self.use == "<" else f" + {self.text}" if self.use == ">" else self.text

    def named(self, name: str) -> str:
        """Its text as an argument of this name."""
        return f" + {name}" if self.use == "<" else "" if self.use == ">" else name


def marked(value: int, use: Use = "n") -> str:
    """The text of an integer that the kernel may be given."""
    return f"\u27e8{use}{value}\u27e9"


def arguments_of(function: str) -> str:
    """Where a function's parameters, and those that it is called with, may be followed by numbers."""
    return f"\u27e8@{function}\u27e9"


def marked_float(value: bool | int | float, dtype: torch.dtype) -> str | None:
    """The text of a float that the kernel may be given; None where it is of another type, or no number."""
    if dtype not in _FLOATS or isinstance(value, bool) or not math.isfinite(value):
        return None
    return f"\u27e8{_FLOATS[dtype]}{value!r}\u27e9"


def replaced(text: str, by: Callable[[Mark], str], called: Callable[[str], str] | None = None) -> str:
    """The text with other text for each number, in their order, and for further arguments, of which `called` is told
    the function; else these stay marked."""

    def put(found: re.Match[str]) -> str:
        mark = _mark(found)
        if mark.use != "@":
            return by(mark)
        return found[0] if called is None else called(mark.text)

    return _MARKED.sub(put, text)


def plain(text: str) -> str:
    """The text with all numbers as constants."""
    return replaced(text, lambda mark: mark.plain, lambda _: "") if "\u27e8" in text else text


def marks_of(text: str) -> list[Mark]:
    """The numbers of a text, in their order."""
    return [mark for found in _MARKED.finditer(text) if (mark := _mark(found)).use != "@"]


def _mark(found: re.Match[str]) -> Mark:
    return Mark(found[1], found[2])  # type: ignore[arg-type]
