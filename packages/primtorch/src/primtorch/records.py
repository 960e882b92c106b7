"""Records as text and back: JSON of plain values, of torch's own constants, and of dataclasses that the reader knows.

Nothing is imported, unpickled or called while text is read but the constructors of the classes that the reader names.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx.immutable_collections import immutable_list

from primtorch.spec import TensorSpec

Json: TypeAlias = Any  # what json.loads gives


class NotAsText(TypeError):
    """A value has no form as text."""


class NotARecord(ValueError):
    """Text is none that `Records.text` writes, or names a class or operator that the reader does not know."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How values of a class that is no dataclass are written: the values that one is made of, and what makes it again.

    Attributes:
        made: raises ValueError for values that `parts` gives of none.
    """

    kind: type
    parts: Callable[[Any], tuple[object, ...]]
    made: Callable[..., Any]


_CONSTANTS: Mapping[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "format"}


_PLAIN = frozenset((bool, int, str, type(None)))  # what JSON has

_NAN = '{"float":"nan"}'


class Records:
    """Writes and reads values of these classes (dataclasses and enumerations), whatever plain values are in them.

    Args:
        namespaces: of operators that may stand in a record.
        codecs: of classes that are neither.
    """

    def __init__(
        self, classes: Collection[type], namespaces: Collection[str] = ("aten",), codecs: Collection[Codec] = ()
    ) -> None:
        self._classes = {kind.__name__: kind for kind in (*classes, TensorSpec)}
        self._tuples = {name: _tuple_fields(kind) for name, kind in self._classes.items()}
        self._fields: dict[type, tuple[str, ...]] = {
            kind: tuple(field.name for field in dataclasses.fields(kind))
            for kind in self._classes.values()
            if dataclasses.is_dataclass(kind)
        }
        self._codecs = {codec.kind.__name__: codec for codec in codecs}
        self._namespaces = frozenset(namespaces)

    def text(self, value: object) -> str:
        """One line of JSON.

        Raises:
            NotAsText: something in it is of no known class, or is not what it was after it is read again.
        """
        written = self._json(value)
        again = self.value(written)
        if again != value and (_NAN not in written or self._json(again) != written):  # of NaN the text says it is one
            raise NotAsText("a value that differs when it is read again")
        return written

    def _json(self, value: object) -> str:
        return json.dumps(self._write(value), separators=(",", ":"), allow_nan=False)

    def value(self, text: str) -> object:
        """What `text` wrote.

        Raises:
            NotARecord: it is nothing that `text` wrote.
        """
        try:
            return json.loads(text, object_hook=self._made)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
            raise NotARecord(f"{type(error).__name__}: {error}") from error

    def _write(self, value: object) -> Json:
        kind = type(value)
        if kind in _PLAIN:
            return value
        names = self._fields.get(kind)
        if names is not None:  # nearly all that there is
            parts = [getattr(value, name) for name in names]
            written = [part if type(part) in _PLAIN else self._write(part) for part in parts]
            for place in self._tuples[kind.__name__]:
                if type(written[place]) is dict and "tuple" in written[place]:
                    written[place] = written[place]["tuple"]
            return {"record": [kind.__name__, *written]}
        if kind is list or kind is immutable_list:  # as FX has one in a node
            return [self._write(item) for item in value]  # type: ignore[attr-defined]
        if kind is tuple or kind is torch.Size:
            return {"tuple": [self._write(item) for item in value]}  # type: ignore[attr-defined]
        if kind is frozenset:
            return {"set": sorted((self._write(item) for item in value), key=json.dumps)}  # type: ignore[attr-defined]
        if kind is dict:
            return {"dict": [[self._write(k), self._write(v)] for k, v in value.items()]}  # type: ignore[attr-defined]
        if kind is float:
            return {"float": value.hex()}  # type: ignore[attr-defined]
        if kind in _CONSTANTS:
            return {_CONSTANTS[kind]: str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, OpOverload):
            if value.namespace not in self._namespaces:
                raise NotAsText(f"the operator {value}")
            return {"operator": str(value)}
        codec = self._codecs.get(kind.__name__)
        if codec is not None and codec.kind is kind:
            return {"record": [kind.__name__, *map(self._write, codec.parts(value))]}
        if self._classes.get(kind.__name__) is not kind:
            raise NotAsText(f"a {kind.__module__}.{kind.__qualname__}")
        assert isinstance(value, enum.Enum)
        return {"member": [kind.__name__, value.name]}

    def _made(self, written: dict[str, Json]) -> object:
        """What one object of JSON stands for; those within it are made already."""
        ((form, held),) = written.items()
        return self._FORMS[form](self, held)

    def _record(self, held: Json) -> object:
        name, *values = held
        kind = self._classes.get(name)
        if kind is not None:
            for place in self._tuples[name]:
                if type(values[place]) is list:
                    values[place] = tuple(values[place])
            return kind(*values)
        codec = self._codecs.get(name)
        if codec is None:
            raise NotARecord(f"the record {name}, which is not known here")
        return codec.made(*values)

    def _operator(self, held: Json) -> object:
        namespace, name, overload = held.split(".")
        if namespace not in self._namespaces:
            raise NotARecord(f"the operator {held}")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if not isinstance(found, OpOverload):
            raise NotARecord(f"the operator {held}")
        return found

    def _constant(self, kind: type, held: Json) -> object:
        found = getattr(torch, held)
        if type(found) is not kind:
            raise NotARecord(f"the constant {held}")
        return found

    _FORMS: Mapping[str, Callable[[Records, Json], Any]] = {
        "tuple": lambda self, held: tuple(held),
        "set": lambda self, held: frozenset(held),
        "dict": lambda self, held: dict(held),
        "float": lambda self, held: float.fromhex(held),
        "device": lambda self, held: torch.device(held),
        "operator": _operator,
        "member": lambda self, held: self._classes[held[0]][held[1]],  # type: ignore[index]
        "record": _record,
        **{
            form: lambda self, held, kind=kind: self._constant(kind, held)  # type: ignore[misc]
            for kind, form in _CONSTANTS.items()
        },
    }


def _tuple_fields(kind: type) -> tuple[int, ...]:
    """The places of the fields that are tuples by their declarations: those are written as lists, without a form."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(i for i, field in enumerate(dataclasses.fields(kind)) if str(field.type).startswith("tuple["))
