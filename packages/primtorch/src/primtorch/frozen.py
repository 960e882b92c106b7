"""Records: dataclasses that only the type checker sees frozen, and that compile little when their module is loaded.

A frozen dataclass pays `object.__setattr__` for each field, which is three quarters of what it takes to make one, and
compiles six functions where its class is defined: of the hundreds of classes here, a third of what it takes to import
them. A record has one, its constructor; that compares and that hashes are compiled where they are first called, which
of most classes nobody does. Nothing in these packages assigns to a field.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass with slots."""
    return _with_methods(dataclasses.dataclass(slots=True, eq=False, repr=False)(cls))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def remembering_record(cls: type[T]) -> type[T]:
    """A frozen dataclass without slots, which remembers its cached properties."""
    return _with_methods(dataclasses.dataclass(eq=False, repr=False)(cls))


def _with_methods(cls: type[T]) -> type[T]:
    """Adds the methods of a frozen dataclass that the class does not define itself."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    own = vars(cls)
    hashes = own.get("__hash__") is not None
    if "__repr__" not in own:
        cls.__repr__ = _shown  # type: ignore[method-assign,assignment]
    if "__eq__" not in own:
        compared = [field.name for field in fields if field.compare]
        _compile_late(
            cls,
            "__eq__(self, other)",
            f"{_tuple('self', compared)} == {_tuple('other', compared)} "
            "if other.__class__ is self.__class__ else NotImplemented",
        )
    if not hashes:
        hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
        _compile_late(cls, "__hash__(self)", f"hash({_tuple('self', hashed)})")
    return cls


def _tuple(owner: str, names: Iterable[str]) -> str:
    return f"({''.join(f'{owner}.{name}, ' for name in names)})"


def _compile_late(cls: type, head: str, value: str) -> None:
    """Gives a class a method that returns `value`, whose text is compiled at its first call."""
    name = head.partition("(")[0]

    @functools.cache
    def compiled() -> Callable[..., object]:
        names: dict[str, Any] = {}
        exec(f"def {head}:\n return {value}", names)
        return names[name]  # type: ignore[no-any-return]

    def first_call(*args: object) -> object:
        method = compiled()
        if vars(cls)[name] is first_call:  # nobody has wrapped it
            setattr(cls, name, method)
        return method(*args)

    setattr(cls, name, first_call)


@reprlib.recursive_repr()
def _shown(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"
