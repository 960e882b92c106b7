"""The guards of a captured frame as text, and bound again to a call of another process.

Sources say where an object is in any process. What stands there is kept by its content, and a guard that is bound
compares with what it has found: so the bound guards are those that a capture of this call would have made of the same
reads. An object that the compiled code holds is kept with the path by which it is found. What has no form is refused.

    kept = keep(function, info.guards, info.pinned)     # KeptGuards; text_of(kept) is one line of JSON
    bound = bind(kept_of(text), function, flat)         # Bound, or Difference: what is not as it was
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from primtorch.records import NotAsText, Records
from torchdynamo import sources as paths
from torchdynamo.guards.failure import first_failure
from torchdynamo.kept.content import Digests, NoContent, digest_of
from torchdynamo.schemas import AmbientRead, GlobalState, Guard, GuardKind, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.sources import Attribute, Item, Pinned, Scope, Source, TypeOf, base_of, own_keys, resolve

# Why a frame has no form, by the id in `NoForm.reason`; what has no content is refused with a reason of that table.
REASONS: Mapping[str, str] = {
    "no_path": "nothing leads from the call, or from a module's name, to an object that the compiled code holds",
    "text": "something that has no form as text",
    "predicate": "a guard that asks a function of the program's state",
}


class NoForm(Exception):
    """The guards of a frame cannot be kept; `reason` is of `REASONS` or of those of `NoContent`."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TheFunction:
    """The captured function itself."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a module that is loaded has under a qualified name, or a part of it (`fget` of a property)."""

    module: str
    qualname: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class At:
    """What is at a source of the call."""

    source: Source


Path = TheFunction | Named | At


@dataclass(frozen=True, slots=True)
class KeptPin:
    """An object that the compiled code holds: the function, what `_digest` gives of it, and other ways to it."""

    index: int
    path: Path
    digest: str
    others: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """In the place of a payload: that of what a guard reads. `same`: a number for each object whose identity counts,
    that of a pin for what is pinned."""

    digest: str
    same: int = -1


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor's guard without its class, which is kept by its content."""

    kind: Content
    guard: TensorGuard


@dataclass(frozen=True, slots=True)
class KeptGuard:
    """A guard whose payload says the same in any process."""

    source: Source | None
    kind: GuardKind
    payload: Any


@dataclass(frozen=True, slots=True)
class KeptGuards:
    """The guards of a frame in their order, and what they and the code hold, in an order in which it can be found."""

    code: str
    pins: tuple[KeptPin, ...]
    guards: tuple[KeptGuard, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """Guards that hold for a call, as if it had been captured, and the objects that they hold by reference."""

    guards: tuple[Guard, ...]
    pinned: list[object]


@dataclass(frozen=True, slots=True)
class Difference:
    """What of a call, or of its program, is not what it was where the guards were kept."""

    text: str


_SOURCES = (
    paths.Argument, paths.Global, paths.ClosureCell, Pinned, Attribute, paths.InstanceAttribute, paths.CellContents,
    paths.InstanceDict, Item, paths.DictKeyAt, TypeOf, paths.Referent, paths.TensorSize, paths.TensorStride,
    paths.TensorOffset,
)  # fmt: skip
_RECORDS = Records(
    (
        TheFunction, Named, At, KeptPin, Content, KeptTensor, KeptGuard, KeptGuards, GuardKind, TensorGuard,
        ShapeProgram, WrittenMemory, GlobalState, *_SOURCES,
    )
)  # fmt: skip


def text_of(kept: KeptGuards) -> str:
    """One line of JSON. Raises NoForm."""
    try:
        return _RECORDS.text(kept)
    except NotAsText as error:
        raise NoForm("text", str(error)) from error


def kept_of(text: str) -> KeptGuards:
    """What `text_of` wrote. Raises `primtorch.records.NotARecord` for anything else."""
    kept: KeptGuards = _RECORDS.value(text)
    return kept


# -- keeping ---------------------------------------------------------------------------------------


def keep(function: types.FunctionType, guards: Sequence[Guard], pinned: Sequence[object]) -> KeptGuards:
    """The guards of a version of `function` that hold `pinned`. Raises NoForm."""
    try:
        numbers, digests = {id(value): index for index, value in enumerate(pinned)}, Digests()
        kept = tuple(KeptGuard(guard.source, guard.kind, _kept_payload(guard, numbers, digests)) for guard in guards)
        candidates = _candidates(guards, pinned)
        pins = []
        for index, path in _paths(function, candidates, pinned).items():
            digest = "" if isinstance(path, TheFunction) else _digest(pinned[index], digests)
            others = candidates.get(id(pinned[index]), ()) if type(pinned[index]) in _BY_PATH else ()
            pins.append(KeptPin(index, path, digest, tuple(others)))
        return KeptGuards(digest_of(function.__code__), tuple(pins), kept)
    except NoContent as error:
        raise NoForm(error.reason, str(error)) from error


def _kept_payload(guard: Guard, numbers: dict[int, int], digests: Digests) -> object:
    payload = guard.payload
    for step in _steps(guard.source):
        if isinstance(step, Item) and step.pin is not None:
            raise NoForm("text", f"the key of {step.expression()}")
    if guard.kind in (GuardKind.IDENTITY, GuardKind.TYPE):
        return _identified(payload, numbers, digests)
    if guard.kind in _BY_CONTENT:
        return Content(digest_of(payload))
    if guard.kind is GuardKind.TENSOR:
        return KeptTensor(_identified(payload.type, numbers, digests), replace(payload, type=None))
    if guard.kind is GuardKind.PREDICATE or isinstance(payload, AmbientRead):
        raise NoForm("predicate", str(payload))
    return payload


def _identified(value: object, numbers: dict[int, int], digests: Digests) -> Content:
    return Content(_digest(value, digests), numbers.setdefault(id(value), len(numbers)))


def _digest(value: object, digests: Digests) -> str:
    """Its content; none of a cell or of a namespace, which are known by their paths: what they hold is guarded."""
    return "" if type(value) in _BY_PATH else digests.of(value)


_BY_PATH = frozenset({types.CellType, dict})


def _steps(source: Source | None) -> Iterator[Source]:
    while source is not None:
        yield source
        source = base_of(source)


def _paths(
    function: types.FunctionType, candidates: Mapping[int, Sequence[Source]], pinned: Sequence[object]
) -> dict[int, Path]:
    """A path to each object that is held, over none but those before it."""
    found: dict[int, Path] = {}
    for index, value in enumerate(pinned):
        path = TheFunction() if value is function else _named(value)
        if path is not None:
            found[index] = path
    while len(found) < len(pinned):
        known = len(found)
        for index, value in enumerate(pinned):
            if index not in found:
                at = (source for source in candidates.get(id(value), ()) if _root_in(source, found))
                source = next(at, None)
                if source is not None:
                    found[index] = At(source)
        if len(found) == known:
            lost = [value for index, value in enumerate(pinned) if index not in found]
            names = (getattr(value, "__qualname__", type(value).__qualname__) for value in lost)
            raise NoForm("no_path", ", ".join(names))
    return found


def _candidates(guards: Sequence[Guard], pinned: Sequence[object]) -> dict[int, list[Source]]:
    """Sources of objects, by their identity: those of guards, and cells of functions that are held."""
    found: dict[int, list[Source]] = {}
    for guard in guards:
        if guard.source is None:
            continue
        if guard.kind is GuardKind.IDENTITY:
            found.setdefault(id(guard.payload), []).append(guard.source)
            for part in _PARTS:
                value = getattr(guard.payload, part, None)
                if type(value) is types.FunctionType:
                    found.setdefault(id(value), []).append(Attribute(guard.source, part, native=True))
            if type(guard.payload) is types.FunctionType:
                space = Attribute(guard.source, "__globals__", native=True)
                found.setdefault(id(guard.payload.__globals__), []).append(space)
        elif guard.kind is GuardKind.TYPE:
            found.setdefault(id(guard.payload), []).append(TypeOf(guard.source))
    for index, value in enumerate(pinned):
        if type(value) is types.FunctionType:
            held = Pinned(index, value.__name__)
            found.setdefault(id(value.__globals__), []).append(Attribute(held, "__globals__", native=True))
            for place, cell in enumerate(value.__closure__ or ()):
                found.setdefault(id(cell), []).append(Item(Attribute(held, "__closure__", native=True), place))
    return found


def _root_in(source: Source, found: Mapping[int, Path]) -> bool:
    return all(step.key in found for step in _steps(source) if isinstance(step, Pinned))


def _named(value: Any) -> Path | None:
    """The name by which a module, a function or a class is found."""
    if type(value) is types.ModuleType:
        return Named(value.__name__, "")
    if value is sys.modules:
        return Named("sys", "modules")
    if type(value) is dict and isinstance(value.get("__name__"), str):
        path = Named(value["__name__"], "", "__dict__")
        return path if _look_up(path) is value else None
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and isinstance(module, str):
        for part in ("", *_PARTS):
            path = Named(module, str(qualname), part)
            if _look_up(path) is value:
                return path
    return None


def _look_up(path: Named) -> object:
    """What has the name; None where nothing has. No code of the program's runs."""
    found: Any = sys.modules.get(path.module)
    for name in path.qualname.split(".") if path.qualname else ():
        if not isinstance(found, (types.ModuleType, type)):
            return None
        found = vars(found).get(name)
    return getattr(found, path.part, None) if path.part and type(found) in _OWNERS else None if path.part else found


_PARTS = ("__func__", "fget", "fset", "fdel")
_OWNERS = frozenset({staticmethod, classmethod, property, types.ModuleType})
# Guards that are kept by the content of their payload, and what they compare of the object at their source.
_BY_CONTENT: Mapping[GuardKind, Callable[[Any], object]] = {
    GuardKind.TYPE: type,
    GuardKind.IDENTITY: lambda value: value,
    GuardKind.EQUALS: lambda value: value,
    GuardKind.DICT_KEYS: own_keys,
    GuardKind.SET_ITEMS: frozenset,
}


# -- binding ---------------------------------------------------------------------------------------


class _Differs(Exception):
    """What is not as it was."""


def bind(kept: KeptGuards, function: types.FunctionType, flat: Sequence[object]) -> Bound | Difference:
    """The guards for a call of `function` with the flat argument vector, if they hold for it."""
    binder = _Binder(kept, function, flat)
    try:
        guards = binder.guards(kept)
    except (_Differs, NoContent) as error:
        return Difference(str(error))
    failure = first_failure(guards, binder.scope)
    return Bound(guards, binder.pinned) if failure is None else Difference(str(failure))


class _Binder:
    """Finds what was kept in one call. Objects that were one are one here, and those that were several are several."""

    def __init__(self, kept: KeptGuards, function: types.FunctionType, flat: Sequence[object]) -> None:
        self.function = function
        self.pinned: list[object] = [None] * len(kept.pins)
        self.scope = Scope.of(function, flat, self.pinned)
        self._objects: dict[int, object] = {}  # by their number
        self._numbers: dict[int, int] = {}  # by their identity
        self._digests = Digests()

    def guards(self, kept: KeptGuards) -> tuple[Guard, ...]:
        """Raises _Differs or NoContent."""
        if digest_of(self.function.__code__) != kept.code:
            raise _Differs(f"the code of {self.function.__qualname__}")
        for pin in kept.pins:
            self.pinned[pin.index] = self._found(pin)
        for pin in kept.pins:
            if any(self._read(source) is not self.pinned[pin.index] for source in pin.others):
                raise _Differs(f"what is one object in {pin.others[0].expression()} and elsewhere")
        return tuple(Guard(item.source, item.kind, self._payload(item)) for item in kept.guards)

    def _found(self, pin: KeptPin) -> object:
        match pin.path:
            case TheFunction():
                return self._as(pin.index, self.function, self.function.__qualname__)
            case Named() as path:
                value, what = _look_up(path), f"{path.module}.{path.qualname}"
            case At(source=source):
                value, what = self._read(source), source.expression()
        return self._held(Content(pin.digest, pin.index), value, what)

    def _held(self, content: Content, value: object, what: str) -> object:
        """An object by its content, and by its number."""
        known = type(value) in _BY_PATH if not content.digest else self._digests.of(value) == content.digest
        known = known or (not content.digest and value is self.function)
        if not known:
            raise _Differs(what)
        return value if content.same < 0 else self._as(content.same, value, what)

    def _as(self, number: int, value: object, what: str) -> object:
        one_object = self._objects.setdefault(number, value) is value
        if not one_object or self._numbers.setdefault(id(value), number) != number:
            raise _Differs(f"which object is {what}")
        return value

    def _read(self, source: Source) -> Any:
        try:
            return resolve(source, self.scope)
        except Exception as error:  # an attribute may ask the program's code
            raise _Differs(f"{source.expression()}: {type(error).__name__}: {error}") from error

    def _payload(self, kept: KeptGuard) -> object:
        payload = kept.payload
        if not isinstance(payload, (Content, KeptTensor)):
            return payload
        assert kept.source is not None
        value, what = self._read(kept.source), kept.source.expression()
        if isinstance(payload, KeptTensor):
            kind: Any = self._held(payload.kind, type(value), f"the type of {what}")
            return replace(payload.guard, type=kind)
        try:
            value = _BY_CONTENT[kept.kind](value)
        except TypeError as error:
            raise _Differs(f"{what}: {error}") from error
        return self._held(payload, value, what)
