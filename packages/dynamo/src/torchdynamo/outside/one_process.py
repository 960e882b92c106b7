"""What capture takes over from this process: held against another one's world, or it keeps the frame from being kept.

`Externals.unkept` says why no other process may have what was captured; `Outside.answers` and `Outside.builtins` hold
what another process is asked before it has.
"""

from __future__ import annotations

import abc
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from primtorch.fake import FakeTensor
from primtorch.frozen import record
from torchdynamo.outside.externals import Externals, is_trusted_module
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import own_items, own_length

Made = TypeVar("Made")

_PLAIN = frozenset({str, int, float, bool, type(None), torch.device, torch.dtype, torch.layout})
_SETS = (set, frozenset)
_OF_THIS_PROCESS = frozenset({"hash", "__hash__", "id"})  # C functions whose answers are its own
_CLASS_QUESTIONS = (isinstance, issubclass)
# Types whose objects have the same hash in every process; texts have another one in each.
_HASHED_ALIKE = frozenset({int, float, complex, bool})
# Of sets and what is asked about them, what gives the same whatever their order.
_WITHOUT_ORDER: tuple[object, ...] = (len, bool, set, frozenset, isinstance)
_SHOW_ORDER = frozenset({"pop", "__iter__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__format__"})


def note_call(outside: Outside, fn: Any, args: tuple[object, ...]) -> None:
    """A function of C is called, whose answer may be one of this process alone."""
    if getattr(fn, "__module__", None) == "sys" or getattr(fn, "__name__", None) in _OF_THIS_PROCESS:
        outside.externals.unkept = f"what {getattr(fn, '__qualname__', fn)}() gives here"
    if any(isinstance(arg, _SETS) for arg in (*args, getattr(fn, "__self__", None))) and _asks_order(fn):
        note_order(outside.externals, *args, getattr(fn, "__self__", None))
    if any(fn is question for question in _CLASS_QUESTIONS) and len(args) == 2:
        _note_registered(outside, fn, *args)


def is_builtin(name: str, value: Any) -> bool:
    """Whether a builtin is what Python has by that name."""
    made_by_python = isinstance(value, (type, types.BuiltinFunctionType)) and value.__module__ == "builtins"
    own = made_by_python and value.__name__ in (name, *_OTHER_NAMES.get(name, ()))
    return own or any(value is constant for constant in _CONSTANTS)


_CONSTANTS = (True, False, None, NotImplemented, ..., __debug__)
_OTHER_NAMES = {"IOError": ("OSError",), "EnvironmentError": ("OSError",)}


def note_text(outside: Outside, made: Made) -> Made:
    """What C code has made: a text that tells an address tells it in this process alone.

    Raises:
        BreakGraph: it is that of a method of what stands in for a tensor.
    """
    if isinstance(made, str) and " at 0x" in made:
        if f"of {FakeTensor.__name__} object at" in made:
            raise BreakGraph("tensor_repr", "the text of a tensor's method")
        outside.externals.unkept = "the text of an object tells its address"
    return made


@record
class Answer:
    """A guard: a question of torch's about the process is answered as it was."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    answer: object

    @property
    def __name__(self) -> str:
        return f"answers_{self.answer!r}"

    def __call__(self, question: Callable[..., object]) -> bool:
        found = question(*self.args, **self.kwargs)
        return found is self.answer or (type(found) is type(self.answer) and found == self.answer)


def note_answer(
    outside: Outside, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], answer: object
) -> None:
    """torch has answered a question about the process, which each call asks again, and another process before it has
    the frame."""
    plain = _are_plain((*args, *kwargs.values()))  # no ==, and no guard, asks a tensor
    known = plain and any(asked is fn and _are_plain(given) and given == args for asked, given, _ in outside.answers)
    outside.answers.append((fn, args, answer))
    if kwargs:
        outside.externals.unkept = f"what {fn.__name__}() gives here"
    if plain and (kwargs or not known) and is_of_settings(fn):
        outside.externals.guard(outside.externals.pins.source(fn), GuardKind.PREDICATE, Answer(args, kwargs, answer))


def _are_plain(values: tuple[object, ...]) -> bool:
    return all(type(value) in _PLAIN for value in values)


def is_of_settings(question: Callable[..., object]) -> bool:
    """Whether a question of torch's is about settings that the global state does not have. Of the machinery that
    capture itself works by it is answered otherwise while a program is captured."""
    name = question.__name__
    return name not in _GUARDED_ANYWAY and not any(part in name for part in _OF_MACHINERY)


_GUARDED_ANYWAY = frozenset(
    {
        "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cache_enabled",
        "get_default_dtype", "are_deterministic_algorithms_enabled", "_get_deterministic_algorithms",
        "_get_privateuse1_backend_name",
    }
)  # fmt: skip
_OF_MACHINERY = ("torch_function", "stack", "dispatch", "tls", "trac", "functorch", "interpreter", "level", "fake")


# -- sets --------------------------------------------------------------------------------------


def note_order(externals: Externals, *values: object) -> None:
    """Something hangs on the order of what is in these, which for sets of texts differs between processes."""
    for value in values:
        if isinstance(value, _SETS) and own_length(value) > 1 and not all(map(_is_hashed_alike, own_items(value))):
            externals.unkept = "the order of a set"


def _is_hashed_alike(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_hashed_alike, value))
    return type(value) in _HASHED_ALIKE


def _asks_order(fn: Any) -> bool:
    if any(fn is one for one in _WITHOUT_ORDER):
        return False
    owner = getattr(fn, "__objclass__", None) or type(getattr(fn, "__self__", None))
    return not issubclass(owner, _SETS) or fn.__name__ in _SHOW_ORDER


# -- classes that are registered with others ---------------------------------------------------


def _note_registered(outside: Outside, fn: Callable[..., object], asked: object, classes: object) -> None:
    """`isinstance` and `issubclass` by an abstract class hang on what was registered with it, and guards read none of
    that: another process is asked the same."""
    kind = asked if fn is issubclass else outside.type_of(asked)
    for abstract in _classes_in(classes):
        if type(abstract) is type or not isinstance(abstract, abc.ABCMeta):
            continue
        if type(abstract) is not abc.ABCMeta or not isinstance(kind, type) or _asks_the_program(abstract):
            outside.externals.unkept = f"what is a {abstract.__qualname__} here"
        else:
            outside.answers.append((issubclass, (kind, abstract), issubclass(kind, abstract)))


def _classes_in(classes: object) -> Iterator[type]:
    parts: Iterable[object] = classes if isinstance(classes, tuple) else getattr(classes, "__args__", (classes,))
    for part in parts:
        if isinstance(part, (tuple, types.UnionType)):
            yield from _classes_in(part)
        elif isinstance(part, type):
            yield part


def _asks_the_program(abstract: type) -> bool:
    """Whether code of the program's has a say in what an abstract class's instances are."""
    hooks = (vars(klass).get("__subclasshook__") for klass in abstract.__mro__)
    functions = (getattr(hook, "__func__", None) for hook in hooks)
    return any(
        isinstance(function, types.FunctionType) and not _is_of_python(function.__module__) for function in functions
    )


def _is_of_python(module: str) -> bool:
    return is_trusted_module(module) or module.partition(".")[0] in sys.stdlib_module_names | {"_collections_abc"}
