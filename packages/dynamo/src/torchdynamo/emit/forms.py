"""Forms of values: the expression by which generated code makes anew an object of each kind that a program may leave.

A form names the object (`Codegen.named`) before it asks for its parts, where these may lead back to it.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import inspect
import itertools
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from primtorch.fake import FakeTensor
from torchdynamo.arrays.values import Array, ArrayMethod, array_of
from torchdynamo.graph import numpy_values
from torchdynamo.graph.tensor_classes import hidden_method
from torchdynamo.interpreter import Interpreter, PlainWorld
from torchdynamo.interpreter.classes import native_base
from torchdynamo.interpreter.decode import flat_size
from torchdynamo.interpreter.exceptions import Traceback
from torchdynamo.interpreter.generators import InterpretedGenerator
from torchdynamo.interpreter.iterators import (
    EnumerateIterator,
    FilterIterator,
    LocalIterator,
    MapIterator,
    MappingIterator,
    ReversedIterator,
    Rounds,
    SequenceIterator,
    Start,
    Trampoline,
    ZipIterator,
)
from torchdynamo.interpreter.protocol import InterpreterObject
from torchdynamo.outside.externals import ATOMS, ITERATOR_FIELDS
from torchdynamo.outside.growing_lists import GrowingView, Refusal
from torchdynamo.outside.loops import OpenRange
from torchdynamo.reasons import BreakGraph, GeneratorOutlivesGraph, GivesUp
from torchdynamo.sources import table_shown

if TYPE_CHECKING:
    import numpy

    from torchdynamo.emit.codegen import Codegen


def _tuple(code: Codegen, obj: tuple[object, ...]) -> str:
    items = [code.value(item) for item in tuple.__iter__(obj)]
    text = "(" + "".join(f"{item}, " for item in items) + ")"
    kind = type(obj)
    if kind is tuple:
        return code.named(obj, text)
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types and other structure sequences
        return code.named(obj, f"{code.pin(kind)}({text})")
    base = torch.Size if issubclass(kind, torch.Size) else tuple
    return code.named(obj, f"{code.pin(base)}.__new__({code.pin(kind)}, {text})")


def _list(code: Codegen, obj: list[object]) -> str:
    kind = type(obj)
    name = code.named(obj, "[]" if kind is list else f"list.__new__({code.pin(kind)})")
    items = [code.value(item) for item in list.__iter__(obj)]
    if items:
        code.build.append(f"list.extend({name}, [{', '.join(items)}])")
    code.attributes(obj, name)
    return name


def _dict(code: Codegen, obj: dict[object, object]) -> str:
    kind = type(obj)
    base = next(b for b in (collections.OrderedDict, collections.defaultdict, dict) if isinstance(obj, b))
    name = code.named(obj, "{}" if kind is dict else f"{code.pin(base)}.__new__({code.pin(kind)})")
    if isinstance(obj, collections.defaultdict):
        code.build.append(f"{name}.default_factory = {code.value(obj.default_factory)}")
    setter = "dict" if base is not collections.OrderedDict else code.pin(base)
    for key in dict.keys(obj) if base is dict else list(base.keys(obj)):
        item = code.value(dict.__getitem__(obj, key))
        code.build.append(f"{setter}.__setitem__({name}, {code.value(key)}, {item})")
    code.attributes(obj, name)
    return name


def _set(code: Codegen, obj: Any) -> str:
    kind = type(obj)
    base = set if isinstance(obj, set) else frozenset
    items = "".join(f"{code.value(item)}, " for item in base.__iter__(obj))
    if kind is base:
        return code.named(obj, f"{base.__name__}(({items}))")
    if base is frozenset:
        name = code.named(obj, f"frozenset.__new__({code.pin(kind)}, ({items}))")
    else:
        name = code.named(obj, f"set.__new__({code.pin(kind)})")
        code.build.append(f"set.update({name}, ({items}))")
    code.attributes(obj, name)
    return name


def _deque(code: Codegen, obj: collections.deque[object]) -> str:
    base, kind = code.pin(collections.deque), type(obj)
    items = code.items(collections.deque.__iter__(obj))
    if kind is collections.deque:
        return code.named(obj, f"{base}([{items}], {obj.maxlen!r})")
    name = code.named(obj, f"{base}.__new__({code.pin(kind)})")
    code.build.append(f"{base}.__init__({name}, [{items}], {obj.maxlen!r})")
    code.attributes(obj, name)
    return name


def _namespace(code: Codegen, obj: types.SimpleNamespace) -> str:
    name = code.named(obj, f"{code.pin(types.SimpleNamespace)}.__new__({code.pin(type(obj))})")
    code.attributes(obj, name)
    return name


def _atom(code: Codegen, obj: object) -> str:
    """A number or text of a class of the program's."""
    if isinstance(obj, enum.Enum):
        return code.pin(obj)
    base = next(b for b in ATOMS if isinstance(obj, b))
    plain = base.__new__(base, obj) if base is not str else str.__str__(obj)
    name = code.named(obj, f"{code.pin(base)}.__new__({code.pin(type(obj))}, {code.value(plain)})")
    code.attributes(obj, name)
    return name


def _slice(code: Codegen, obj: slice) -> str:
    return code.named(obj, f"slice({code.items((obj.start, obj.stop, obj.step))})")


def _bound(code: Codegen, obj: types.MethodType) -> str:
    if isinstance(obj.__self__, FakeTensor):  # the fake's own method stands for the tensor's of that name
        return code.named(obj, f"{code.value(obj.__self__)}.{obj.__func__.__name__}")
    if isinstance(obj.__func__, Refusal):
        return code.named(obj, f"{code.value(obj.__self__)}.{obj.__func__.name}")
    function, native = obj.__func__, None
    if isinstance(obj.__self__, InterpretedGenerator):  # behind a break it is Python's own
        native = _NATIVE_METHODS.get(function)
    called = code.value(function) if native is None else code.pin(native)
    return code.named(obj, f"{code.pin(types.MethodType)}({called}, {code.value(obj.__self__)})")


def _builtin(code: Codegen, obj: types.BuiltinFunctionType | types.MethodWrapperType) -> str:
    owner = obj.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)) or not hasattr(type(owner), obj.__name__):
        return code.pin(obj)  # a function of a module, which keeps a private record of it
    hidden = hidden_method(owner, obj.__name__)
    if hidden is not None:
        return code.named(obj, f"{code.pin(hidden)}.__get__({code.value(owner)})")
    return code.named(obj, f"({code.value(owner)}).{obj.__name__}")  # of a number, too


def _partial(code: Codegen, obj: functools.partial[object]) -> str:
    base, kind = functools.partial, type(obj)
    func, args, keywords = (vars(base)[part].__get__(obj) for part in ("func", "args", "keywords"))
    parts = ", ".join([code.value(func), *map(code.value, args)]) + f", **{code.value(keywords)}"
    if kind is base:
        return code.named(obj, f"{code.pin(base)}({parts})")
    name = code.named(obj, f"{code.pin(base)}.__new__({code.pin(kind)}, {parts})")
    code.attributes(obj, name)
    return name


def _function(code: Codegen, obj: types.FunctionType) -> str:
    bare = obj.__closure__ is None and obj.__defaults__ is None and obj.__kwdefaults__ is None
    if bare and obj not in code.made_functions:
        return code.pin(obj)
    cells = "".join(f"{code.value(cell)}, " for cell in obj.__closure__ or ())
    name = code.named(
        obj,
        f"{code.pin(types.FunctionType)}({code.pin(obj.__code__)}, {code.pin(obj.__globals__)}, {obj.__name__!r}, "
        f"{code.value(obj.__defaults__)}, ({cells}))",
    )
    if obj.__kwdefaults__:
        code.build.append(f"{name}.__kwdefaults__ = {code.value(obj.__kwdefaults__)}")
    if obj.__dict__:
        code.build.append(f"{name}.__dict__.update({code.value(obj.__dict__)})")
    code.build.append(f"{name}.__qualname__ = {obj.__qualname__!r}")
    for attribute in ("__doc__", "__module__", "__annotations__"):  # what a decorator may have set
        code.build.append(f"{name}.{attribute} = {code.value(getattr(obj, attribute))}")
    return name


def _cell(code: Codegen, obj: types.CellType) -> str:
    name = code.named(obj, f"{code.pin(types.CellType)}()")
    try:
        contents = obj.cell_contents
    except ValueError:
        return name
    code.build.append(f"{name}.cell_contents = {code.value(contents)}")
    return name


def _remade(code: Codegen, obj: object, reduced: Any) -> str:
    """Of what `__reduce__` gave: a function, its arguments, and maybe a state."""
    function, arguments, *state = reduced
    name = code.named(obj, f"{code.value(function)}({code.items(arguments)})")
    if state and state[0] is not None:
        code.build.append(f"{name}.__setstate__({code.value(state[0])})")
    return name


def _reduced(code: Codegen, obj: object) -> str:
    """An iterator as far as it has come, `operator.itemgetter` and its kin."""
    name = _remade(code, obj, obj.__reduce__())
    if isinstance(obj, _OVER_DEQUES) and not _refused(obj):
        code.late.add(name)
    return name


def _refused(iterator: Any) -> bool:
    """Whether a deque has changed since the iterator began, which only the iterator knows. It is capture's own, which
    ends here."""
    try:
        next(iterator, None)
    except RuntimeError:
        return True
    return False


def _itertool(code: Codegen, obj: object) -> str:
    """An object of `itertools` as far as it has come: Python says how, up to 3.13."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = obj.__reduce__()
    except TypeError as error:
        raise BreakGraph("rebuild", f"an itertools.{type(obj).__name__}") from error
    return _remade(code, obj, reduced)


def _pairwise(code: Codegen, obj: itertools.pairwise[Any]) -> str:
    """It holds its iterator until that is at its end, the last item once it has begun, and from 3.12 a pair that
    it gives out anew."""
    held = [part for part in gc.get_referents(obj) if part is not itertools.pairwise]
    iterator, *last = held[: len(held) - (sys.version_info >= (3, 12))] or [()]
    source = code.value(iterator)
    if last:
        source = f"{code.pin(itertools.chain)}([{code.value(last[0])}], {source})"
    return code.named(obj, f"{code.pin(itertools.pairwise)}({source})")


def _trampoline(code: Codegen, obj: Trampoline) -> str:
    """What C code calls in the place of a function of the program's."""
    return code.named(obj, code.value(obj.fn))


def _array(code: Codegen, obj: numpy.ndarray) -> str:
    """An array made of numbers. A view is taken of the copy of what it is a view of."""
    if not numpy_values.is_array(obj):
        raise BreakGraph("rebuild", f"an array of {obj.dtype}")
    owner = numpy_values.memory_of(obj)
    if owner is obj and code.externals.arrays.is_shared(obj):
        return code.named(obj, code.value(code.arrays.current(obj)))
    if owner is obj:
        return _with_flags(code, obj, code.named(obj, f"{code.pin(numpy_values.copied)}({code.pin(obj)})"))
    place = numpy_values.address(obj) - numpy_values.address(owner)
    parts = f"{obj.shape}, {code.pin(obj.dtype)}, {code.value(owner)}, {place}, {obj.strides}"
    return _with_flags(code, obj, code.named(obj, f"{code.pin(type(obj))}({parts})"))


def _with_flags(code: Codegen, array: numpy.ndarray, name: str) -> str:
    if not array.flags.writeable:
        code.build.append(f"{name}.flags.writeable = False")
    return name


def _array_value(code: Codegen, obj: Array) -> str:
    """An array whose elements the graph computes: the one that has its tensor's memory."""
    tensor = code.value(obj.tensor)
    flipped, strides, writeable, scalar = obj.world.leaving(obj)
    if scalar:
        return code.named(obj, f"{tensor}.numpy()[()]")
    if not flipped and strides is None and writeable:
        return code.named(obj, f"{tensor}.numpy()")
    return code.named(obj, f"{code.pin(array_of)}({tensor}, {flipped}, {strides}, {writeable})")


def _array_method(code: Codegen, obj: ArrayMethod) -> str:
    return code.named(obj, f"{code.value(obj.array)}.{obj.name}")


def _match(code: Codegen, obj: re.Match[str] | re.Match[bytes]) -> str:
    return code.pin(obj)  # of a pattern and a text that are guarded


def _local_iterator(code: Codegen, obj: LocalIterator) -> str:
    """The interpreter's iterator: as it is for a part of the program that goes on, else CPython's."""
    kind = type(obj)
    fields = () if kind is Rounds else ITERATOR_FIELDS.get(kind)
    if fields is None:
        raise BreakGraph("rebuild", f"an iterator of kind {kind.__name__}")
    if not code.keep_iterators:
        return _native_iterator(code, obj)
    rounds = _rounds_of(obj)
    if rounds is not None:
        name = _native_iterator(code, obj)
        code.build.append(f"{name} = {code.pin(Rounds)}({name}, {rounds.over!r}, {rounds.reason!r})")
        return name
    if isinstance(obj, MappingIterator):
        text = f"{code.pin(kind)}({code.value(obj.container)}, {obj.view!r}{'' if obj.over else f', {obj.consumed}'})"
        name = _over_what_is_left(code, obj, text, not obj.outlived)
        code.build += [f"for _ in {name}: pass"] if obj.over else []
        return name
    name = code.named(obj, f"object.__new__({code.pin(kind)})")
    for field in fields:
        code.build.append(f"{name}.{field} = {code.value(getattr(obj, field))}")
    slots = getattr(kind, "__slots__", ())
    if "native" in slots:
        code.build.append(f"{name}.native = {code.pin(obj.native)}")
    if "world" in slots:
        code.build.append(f"{name}.world = {code.pin(plain_world())}")
    return name


def _rounds_of(obj: object) -> Rounds | None:
    """What an iterator that CPython can go on with has each of its items from, where that is advanced for real."""
    match obj:
        case Rounds():
            return obj
        case MapIterator() | ZipIterator():
            return next((found for part in obj.iterators if (found := _rounds_of(part)) is not None), None)
        case EnumerateIterator() | FilterIterator(keep=True):
            return _rounds_of(obj.iterator)
    return None


def _over_what_is_left(code: Codegen, obj: object, expression: str, late: bool = True) -> str:
    """An iterator that begins behind the effects, since it looks at once at what they change: how long a list is, that
    a dict has not grown. One that began before the program changed that is not `late`."""
    name = code.named(obj, expression)
    if late:
        code.late.add(name)
    return name


def _native_iterator(code: Codegen, obj: object) -> str:
    match obj:
        case Rounds(iterator=Start(begin=begin, iterable=iterable, taken=taken)):
            name = _over_what_is_left(code, obj, f"{begin.__name__}({code.value(iterable)})")
            if taken:
                code.build.append(f"for _ in range({taken}): next({name})")
        case SequenceIterator(index=-1, sequence=list()):
            name = code.named(obj, "iter([])")  # at its end, whatever the list gets
        case SequenceIterator(index=index):
            name = _over_what_is_left(code, obj, f"iter({code.value(obj.sequence)})")
            code.build.append(f"{name}.__setstate__({index if index >= 0 else len(obj.sequence)})")
        case MappingIterator():
            view = "" if obj.view is None else f".{obj.view}()"
            name = _over_what_is_left(code, obj, f"iter({code.value(obj.container)}{view})", not obj.outlived)
            code.build.append(f"for _ in {name}: pass" if obj.over else f"for _ in range({obj.consumed}): next({name})")
        case MapIterator():
            name = code.named(obj, f"map({code.value(obj.fn)}, *{code.value(obj.iterators)})")
        case FilterIterator(keep=True):
            name = code.named(obj, f"filter({code.value(obj.fn)}, {code.value(obj.iterator)})")
        case ZipIterator():
            name = code.named(obj, f"zip(*{code.value(obj.iterators)}, strict={obj.strict})")
        case EnumerateIterator():
            name = code.named(obj, f"enumerate({code.value(obj.iterator)}, {code.value(obj.count)})")
        case ReversedIterator(index=index):
            name = _over_what_is_left(code, obj, f"reversed({code.value(obj.sequence)})")
            code.build.append(f"{name}.__setstate__({index})")
        case _:
            raise BreakGraph("rebuild", f"an iterator of kind {type(obj).__name__}")
    return name


def _view(code: Codegen, obj: object) -> str:
    """`d.keys()`, `d.values()` or `d.items()`."""
    table = table_shown(obj)
    base = code.pin(collections.OrderedDict) if isinstance(table, collections.OrderedDict) else "dict"
    name = next(name for kind, name in _VIEWS.items() if isinstance(obj, kind))
    return code.named(obj, f"{base}.{name}({code.value(table)})")


def _proxy(code: Codegen, obj: object) -> str:
    return code.named(obj, f"{code.pin(types.MappingProxyType)}({code.value(table_shown(obj))})")


def _traceback(code: Codegen, obj: Traceback) -> NoReturn:
    """It is there once the exception is raised for real."""
    obj.refuse()


def _exception(code: Codegen, obj: BaseException) -> str:
    """One that was never raised: the traceback that it would have cannot be made."""
    ordinal = code.raises.get(id(obj), -1)
    if ordinal >= 0:
        raise GivesUp(f"{type(obj).__name__} outlives the graph", ordinal)
    kind, base = type(obj), native_base(type(obj))
    if kind is base:
        reduced: Any = obj.__reduce__()
        name = code.named(obj, f"{code.pin(kind)}({code.items(reduced[1])})")
        if len(reduced) > 2 and reduced[2] is not None:
            code.build.append(f"{name}.__setstate__({code.value(reduced[2])})")
    else:  # what its own __init__ did is in its attributes
        arguments = code.items(obj.args)
        name = code.named(obj, f"{code.pin(kind)}.__new__({code.pin(kind)}, {arguments})")
        code.build.append(f"{code.pin(base)}.__init__({name}{arguments and ', ' + arguments})")
        code.attributes(obj, name)
    for link in ("__cause__", "__context__"):
        linked = getattr(obj, link)
        if linked is not None:
            code.build.append(f"{name}.{link} = {code.value(linked)}")
    if obj.__suppress_context__:
        code.build.append(f"{name}.__suppress_context__ = True")
    return name


def _generator(code: Codegen, obj: object) -> str:
    """A generator none of whose body has run is made again by the same call."""
    if not isinstance(obj, InterpretedGenerator) or obj.gi_frame is None:
        raise BreakGraph("generator", f"{obj!r} outlives the graph")
    frame = obj.unstarted
    if frame is None:
        raise GeneratorOutlivesGraph(f"{obj!r} outlives the graph", obj.start)
    function, body = frame.function, frame.function.__code__
    if not code.keep_iterators:
        code.unstarted.append(function)
    given = [_contents(slot) for slot in frame.fast[: flat_size(body)]]
    named = body.co_argcount + body.co_kwonlyargcount
    parts = [code.value(value) for value in given[: body.co_argcount]]
    rest = given[named:]
    if body.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{code.value(rest.pop(0))}")
    keywords = zip(body.co_varnames[body.co_argcount : named], given[body.co_argcount : named], strict=True)
    parts += [f"{name}={code.value(value)}" for name, value in keywords]
    parts += [f"**{code.value(value)}" for value in rest]
    return code.named(obj, f"{code.value(function)}({', '.join(parts)})")


def _contents(slot: object) -> object:
    """An argument, also where an inner function shares it."""
    return slot.cell_contents if isinstance(slot, types.CellType) else slot


# Methods of generators that a program has at hand where it breaks, and Python's own.
_NATIVE_METHODS: dict[object, object] = {
    getattr(InterpretedGenerator, name): getattr(types.GeneratorType, name)
    for name in ("send", "throw", "close", "__next__", "__iter__")
}


def plain_world() -> PlainWorld:
    """The world of iterators that go on outside of capture."""
    world = PlainWorld()
    Interpreter(world)
    return world


_OVER_DEQUES: tuple[type, ...] = type(iter(collections.deque())), type(reversed(collections.deque()))
_TEE: type = type(itertools.tee(())[0])
_ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter({})), type(iter(set())), type(iter("")), type(iter(range(0))),
    *_OVER_DEQUES, zip, map, filter, enumerate, reversed, type(iter({}.values())), type(iter({}.items())),
)  # fmt: skip

# Those that say what they are made of; copies by `tee` share their items, a group its place with all groups.
_ITERTOOLS: tuple[type, ...] = (
    itertools.accumulate, itertools.chain, itertools.combinations, itertools.combinations_with_replacement,
    itertools.compress, itertools.count, itertools.cycle, itertools.dropwhile, itertools.filterfalse, itertools.groupby,
    itertools.islice, itertools.permutations, itertools.product, itertools.repeat, itertools.starmap,
    itertools.takewhile, itertools.zip_longest,
    _TEE, type(itertools.tee(())[0].__reduce__()[2][0]), type(next(itertools.groupby((0,)))[1]),
)  # fmt: skip

_VIEWS: dict[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}

# The form of a value by its built-in base, most specific first.
FORMS: tuple[tuple[Any, Callable[[Codegen, Any], str]], ...] = (
    (tuple, _tuple),
    (list, _list),
    (dict, _dict),
    ((set, frozenset), _set),
    (collections.deque, _deque),
    (slice, _slice),
    (types.SimpleNamespace, _namespace),
    (ATOMS, _atom),
    (BaseException, _exception),
    (types.MethodType, _bound),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    (functools.partial, _partial),
    ((operator.itemgetter, operator.attrgetter, operator.methodcaller), _reduced),
    (re.Match, _match),
    (numpy_values.ARRAY, _array),
    (types.FunctionType, _function),
    (types.CellType, _cell),
    (_ITERATORS, _reduced),
    (_ITERTOOLS, _itertool),
    (itertools.pairwise, _pairwise),
    (Trampoline, _trampoline),
    (tuple(_VIEWS), _view),
    (types.MappingProxyType, _proxy),
    (LocalIterator, _local_iterator),
    (OpenRange, lambda code, obj: code.named(obj, f"range({code.items(obj.numbers)})")),
    (GrowingView, lambda code, obj: code.named(obj, f"{code.value(obj.table)}.{obj.name}()")),
    (Traceback, _traceback),
    (Array, _array_value),
    (ArrayMethod, _array_method),
    (InterpreterObject, _generator),
)
