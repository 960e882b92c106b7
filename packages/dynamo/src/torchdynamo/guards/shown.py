"""Values as text for a person, by what Python's own classes tell: no `__repr__` of the program's runs, which may raise,
take long, or change something."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from typing import Any

import torch

_ATOMS = frozenset(
    {
        int, float, complex, bool, type(None), type(Ellipsis), range, torch.dtype, torch.device, torch.Size,
        torch.layout, torch.memory_format,
    }
)  # fmt: skip
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_DEPTH = 4


def short(value: object, limit: int = 80) -> str:
    """The text of a value, cut at `limit` characters."""
    return short_text(_text(value, limit, _DEPTH), limit)


def short_text(text: str, limit: int = 80) -> str:
    """A text, cut at `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _text(value: Any, limit: int, depth: int) -> str:
    kind = type(value)
    if kind in _ATOMS or (kind.__module__ == "numpy" and hasattr(value, "itemsize") and not hasattr(value, "__len__")):
        return repr(value)
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return f"<function {value.__qualname__}>"  # without its address, which is another in each process
    if kind in (str, bytes):
        return repr(value[:limit])
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, type):
        return type.__repr__(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value._name_}"
    if kind not in _BRACKETS:
        return f"an object of {kind.__module__}.{kind.__qualname__}"
    if not value and kind in (set, frozenset):
        return f"{kind.__name__}()"
    opening, closing = _BRACKETS[kind]
    parts = _parts(value, limit, depth)
    return f"{opening}{', '.join(parts)}{',' if kind is tuple and len(parts) == 1 else ''}{closing}"


def _parts(value: Any, limit: int, depth: int) -> list[str]:
    """The items of a container of Python's own, as many as there is room for."""
    parts: list[str] = []
    items: Iterable[Any] = value.items() if type(value) is dict else value
    for item in items:
        if not depth or sum(map(len, parts)) > limit:
            return [*parts, "..."]
        both = item if type(value) is dict else (item,)
        parts.append(": ".join(_text(part, limit, depth - 1) for part in both))
    return parts
