"""Records as text and back: JSON of plain values, of torch's own constants, and of dataclasses that the reader knows.

Nothing is imported, unpickled or called while text is read but the constructors of the classes that the reader names.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx.immutable_collections import immutable_list

from primtorch.frozen import record
from primtorch.spec import TensorSpec

Json: TypeAlias = Any  # what json.loads gives


class NotAsText(TypeError):
    """A value has no form as text."""


class NotARecord(ValueError):
    """Text is none that `Records.text` writes, or names a class or operator that the reader does not know."""


@record
class Codec:
    """How values of a class that is no dataclass are written: the values that one is made of, and what makes it again.

    Attributes:
        made: raises ValueError for values that `parts` gives of none.
    """

    kind: type
    parts: Callable[[Any], tuple[object, ...]]
    made: Callable[..., Any]


_CONSTANTS: Mapping[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "format"}
_NAN = '{"float":"nan"}'


class Records:
    """Writes and reads values of these classes (dataclasses and enumerations), whatever plain values are in them.

    Args:
        namespaces: of operators that may stand in a record.
        codecs: of classes that are neither.
        shared: those of these classes whose values are equal at many places of a record: each is written once, where it
            comes first.
    """

    def __init__(
        self,
        classes: Collection[type],
        namespaces: Collection[str] = ("aten",),
        codecs: Collection[Codec] = (),
        shared: Collection[type] = (),
    ) -> None:
        self.classes = {kind.__name__: kind for kind in (*classes, TensorSpec)}
        self.codecs = {codec.kind.__name__: codec for codec in codecs}
        self.shared = frozenset(shared)
        self._tuples = {name: _tuple_fields(kind) for name, kind in self.classes.items()}
        self._namespaces = frozenset(namespaces)

    def text(self, value: object) -> str:
        """One line of JSON.

        Raises:
            NotAsText: something in it is of no known class, or would not be what it was after it is read again.
        """
        return _Writer(self).text(value)

    def value(self, text: str) -> object:
        """What `text` wrote.

        Raises:
            NotARecord: it is nothing that `text` wrote.
        """
        said: dict[int, object] = {}

        def made(written: dict[str, Json]) -> object:
            """What one object of JSON stands for; those within it are made already."""
            ((form, held),) = written.items()
            if form == "record":
                return self._record(held, said)
            return said[held] if form == "again" else self._FORMS[form](self, held)

        try:
            return json.loads(text, object_hook=made)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
            raise NotARecord(f"{type(error).__name__}: {error}") from error

    def _record(self, held: Json, said: dict[int, object]) -> object:
        name, *values = held
        kind = self.classes.get(name)
        if kind is not None:
            for place in self._tuples[name]:
                if type(values[place]) is list:
                    values[place] = tuple(values[place])
            found = kind(*values)
        else:
            codec = self.codecs.get(name)
            if codec is None:
                raise NotARecord(f"the record {name}, which is not known here")
            found, kind = codec.made(*values), codec.kind
        if kind in self.shared:
            said[len(said)] = found
        return found

    def operator_named(self, held: str) -> OpOverload:
        """The operator of a name. Raises NotARecord for what may not stand in a record."""
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
        "operator": operator_named,
        "member": lambda self, held: self.classes[held[0]][held[1]],  # type: ignore[index]
        **{
            form: lambda self, held, kind=kind: self._constant(kind, held)  # type: ignore[misc]
            for kind, form in _CONSTANTS.items()
        },
    }


Write: TypeAlias = Callable[[Any], str]


class _Writer(dict[type, Write]):
    """What writes a value of each class into one text.

    Nothing is read again to see whether it is what it was: each form is of a class whose values it says whole. Where
    that is the class's own matter (a codec, a constructor that does more than to hold its fields) each value is asked.
    """

    def __init__(self, records: Records) -> None:
        super().__init__(_LEAVES)
        self.records = records
        self.said: dict[object, int] = {}  # places of the values of shared classes
        self.fields = _FieldWriter(self)
        self.update({tuple: self._tuple, torch.Size: self._tuple, list: self._list, immutable_list: self._list})
        self.update({frozenset: self._set, dict: self._dict})

    def text(self, value: object) -> str:
        return self[type(value)](value)

    def several(self, values: Iterable[object]) -> str:
        return ",".join([self[type(value)](value) for value in values])

    def __missing__(self, kind: type) -> Write:
        records, name = self.records, kind.__name__
        codec = records.codecs.get(name)
        if issubclass(kind, OpOverload):
            write: Write = self._operator
        elif records.classes.get(name) is kind:
            write = self._record(kind) if dataclasses.is_dataclass(kind) else self._member
        elif codec is not None and codec.kind is kind:
            write = self._by_codec(codec)
        else:
            raise NotAsText(f"a {kind.__module__}.{kind.__qualname__}")
        self[kind] = write = self._once(write) if kind in records.shared else write
        return write

    def _tuple(self, value: tuple[object, ...]) -> str:
        return f'{{"tuple":[{self.several(value)}]}}'

    def _list(self, value: list[object]) -> str:  # FX has one of its own in a node
        return f"[{self.several(value)}]"

    def _set(self, value: frozenset[object]) -> str:
        return f'{{"set":[{",".join(sorted(map(self.text, value)))}]}}'

    def _dict(self, value: dict[object, object]) -> str:
        return f'{{"dict":[{",".join([f"[{self.text(k)},{self.text(v)}]" for k, v in value.items()])}]}}'

    def _operator(self, value: OpOverload) -> str:
        name = str(value)
        try:
            found = self.records.operator_named(name)
        except (NotARecord, ValueError, AttributeError):
            found = None
        if found is not value:
            raise NotAsText(f"the operator {name}")
        return f'{{"operator":{_quoted(name)}}}'

    def _member(self, value: enum.Enum) -> str:
        return f'{{"member":[{_quoted(type(value).__name__)},{_quoted(value.name)}]}}'

    def _record(self, kind: Any) -> Write:
        """Writes values of a dataclass: what the constructor is given, in its order."""
        declared = dataclasses.fields(kind)
        read = _reader([field.name for field in declared])
        tuples = _tuple_fields(kind)
        writers = tuple(self.fields if place in tuples else self for place in range(len(declared)))
        head = f'{{"record":[{_quoted(kind.__name__)}{"," if declared else ""}'
        holds = _holds_its_fields(kind)

        def write(value: object) -> str:
            parts = read(value)
            text = ",".join([by[type(part)](part) for by, part in zip(writers, parts)])  # noqa: B905 - one for each
            if not holds and kind(*parts) != value:
                raise NotAsText(f"a {kind.__name__} that differs when it is read again")
            return f"{head}{text}]}}"

        return write

    def _by_codec(self, codec: Codec) -> Write:
        head = f'{{"record":[{_quoted(codec.kind.__name__)}'

        def write(value: object) -> str:
            parts = codec.parts(value)
            text, again = self.several(parts), codec.made(*parts)
            same = again == value or (_NAN in text and self.several(codec.parts(again)) == text)  # which says it is one
            if not same:
                raise NotAsText(f"a {codec.kind.__name__} that differs when it is read again")
            return f"{head},{text}]}}" if parts else f"{head}]}}"

        return write

    def _once(self, write: Write) -> Write:
        """Of equal values the first is written, of the others its place among those of shared classes."""

        def again(value: object) -> str:
            try:
                place = self.said.get(value)
            except TypeError:
                write(value)  # whose parts are told, if one of them is to blame
                raise NotAsText(f"a {type(value).__name__} of what cannot be hashed") from None
            if place is not None:
                return f'{{"again":{place}}}'
            text = write(value)
            self.said[value] = len(self.said)
            return text

        return again


class _FieldWriter(dict[type, Write]):
    """What writes a value where a tuple is declared, which says so without a form."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__({tuple: writer._list, torch.Size: writer._list})
        self.writer = writer

    def __missing__(self, kind: type) -> Write:
        if kind is list or kind is immutable_list:
            raise NotAsText("a list where a tuple is declared")
        self[kind] = write = self.writer[kind]
        return write


def _constant_text(value: object) -> str:
    return f'{{"{_CONSTANTS[type(value)]}":{_quoted(str(value).removeprefix("torch."))}}}'


# Values that hold no others. Of what torch has few of, each is spelt once.
_LEAVES: Mapping[type, Write] = {
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: int.__repr__,
    str: _quoted,
    float: lambda value: f'{{"float":"{value.hex()}"}}',
    torch.device: functools.cache(lambda value: f'{{"device":{_quoted(str(value))}}}'),
    **dict.fromkeys(_CONSTANTS, functools.cache(_constant_text)),
}


def _reader(names: Sequence[str]) -> Callable[[Any], tuple[object, ...]]:
    """Reads these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _holds_its_fields(kind: Any) -> bool:
    """Whether a dataclass, called with its fields in their order, does no more than to hold them."""
    own = "__dataclass_params__" in vars(kind) and kind.__dataclass_params__.init
    placed = all(field.init and not field.kw_only for field in dataclasses.fields(kind))
    return own and placed and kind.__new__ is object.__new__ and not hasattr(kind, "__post_init__")


def _tuple_fields(kind: type) -> tuple[int, ...]:
    """The places of the fields that are tuples by their declarations: those are written as lists, without a form."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(i for i, field in enumerate(dataclasses.fields(kind)) if str(field.type).startswith("tuple["))
