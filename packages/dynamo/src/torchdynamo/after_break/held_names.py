"""What guards read of a resume function's list, or of what only hands on its arguments, by the program's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import FunctionType

from torchdynamo.after_break.resume import Entry, StackSlot, origin_of
from torchdynamo.handed_on import body_of


def held_names(function: FunctionType, given: Sequence[object]) -> dict[str, str]:
    """`state[1][2]` -> `x`, of the functions that a resume function goes on in; `args[0]` -> `x` of what hands on."""
    body = body_of(function)
    if body is not function and origin_of(function) is None:
        code = body.__code__
        taken = code.co_varnames[1 : code.co_argcount]  # the first is what is called
        keywords = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        positions = {f"args[{place}]": name for place, name in enumerate(taken)}
        return positions | {f"kwargs[{name!r}]": name for name in keywords}
    found: dict[str, str] = {}
    parameter = function.__code__.co_varnames[:1]
    if origin_of(function) is not None and parameter and given:
        _note(function, given[0], parameter[0], found)
    return found


def _note(function: object, held: object, path: str, found: dict[str, str]) -> None:
    origin = origin_of(function) if isinstance(function, FunctionType) else None
    if origin is None or not isinstance(held, list):
        return
    entrance = origin.entrance
    place = sum(slot is not StackSlot.NULL for slot in entrance.stack)
    found.update({f"{path}[{number}]": "a value of the expression that broke" for number in range(place)})
    if entrance.entry is Entry.CALL and len(held) > place + 1:
        inner = held[place]
        _note(getattr(inner, "function", inner), held[place + 1], f"{path}[{place + 1}]", found)
    place = len(held) - len(entrance.locals)
    found.update({f"{path}[{place + number}]": name for number, name in enumerate(entrance.locals)})


def in_the_programs_words(text: str, names: Mapping[str, str]) -> str:
    """A text in which what a list holds is named as the program does."""
    for path in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.\]]){re.escape(path)}", lambda _, name=names[path]: name, text)  # type: ignore[misc]
    return text
