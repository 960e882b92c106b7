"""The user's functions: wrap a callable for capture, mark functions and sizes, ask what happened."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from primtorch.ledger import LEDGER, Event, Ledger
from torchdynamo._C import CompiledCallable
from torchdynamo.calls.transforms import is_transformed
from torchdynamo.convert import convert
from torchdynamo.emit.generated_code import forget_ended_code
from torchdynamo.events import DISABLED_FUNCTION, frame_of, refusal
from torchdynamo.function import Alike, Function, Nested
from torchdynamo.graph.torch_functions import is_leaf
from torchdynamo.marks import (
    Mark,
    MarkKind,
    error_on_graph_break,
    graph_break,
    is_compiling,
    mark_of,
    put_mark,
    put_stand_in,
)
from torchdynamo.schemas import Backend, CaptureOptions, Dump
from torchdynamo.size_marks import mark_dynamic, mark_static, mark_unbacked, maybe_mark_dynamic
from torchdynamo.stance import set_stance
from torchdynamo.stats import TOTAL, Stats

__all__ = [
    "allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph", "error_on_graph_break", "graph_break",
    "is_compiling", "mark_dynamic", "mark_static", "mark_unbacked", "maybe_mark_dynamic", "new_ledger", "optimize",
    "reset", "set_stance", "skip_frame", "stats", "substitute_in_graph",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., object])

# Every compiled callable that is alive, with its statistics: what reset() empties.
_LIVE: weakref.WeakKeyDictionary[Stats, weakref.ref[CompiledCallable]] = weakref.WeakKeyDictionary()


def optimize(
    backend: Backend,
    *,
    options: CaptureOptions | None = None,
    dump: Dump | None = None,
    ledger: Ledger | None = None,
) -> Callable[[F], F]:
    """A decorator that captures calls of a function, method or nn.Module and compiles their graphs with `backend`.

    Args:
        backend: `backend(gm, example_inputs) -> callable`, called once for each graph. The callable takes the
            graph's inputs (symbolic sizes first, as ints) and returns the outputs as a sequence.
        options: see `CaptureOptions`.
        dump: called with (file name, text) for each stage.
        ledger: where what does not run as asked is written; one that the back end writes to, too (`new_ledger`).

    Raises:
        TypeError: the argument of the decorator cannot be captured.
        Unsupported: at a call, under `fullgraph=True`, where the program leaves the graph or something would run
            eagerly; for a function that is marked to run as it is, at once.
    """
    if not callable(backend):
        raise TypeError(f"backend: expected a callable, got {type(backend).__name__}")
    chosen = options or CaptureOptions()
    written = ledger if ledger is not None else new_ledger(chosen)

    alike = Alike()

    def decorate(target: F) -> F:
        return cast(F, _wrap(target, (backend, chosen, dump), written, alike))

    return decorate


def new_ledger(options: CaptureOptions) -> Ledger:
    """A ledger for one `optimize`, which passes on what it is told to the process's own.

    With `fullgraph` it raises instead: `Unsupported`, `InternalError` or `RecompileLimitExceeded`.
    """
    return Ledger(LEDGER, refusal if options.fullgraph else None)


def _wrap(target: object, settings: tuple[Backend, CaptureOptions, Dump | None], ledger: Ledger, alike: Alike) -> Any:
    function = target.__func__ if isinstance(target, types.MethodType) else target
    mark = mark_of(function)
    if mark is not None and mark.kind is MarkKind.DISABLED:
        frames = (frame_of(function.__code__),) if isinstance(function, types.FunctionType) else ()
        name = getattr(function, "__qualname__", type(function).__name__)
        ledger.add(Event(DISABLED_FUNCTION, name, mark.reason or "", frames))
        return target
    if isinstance(target, CompiledCallable):
        return target
    if isinstance(target, types.FunctionType):
        if is_leaf(target) or is_transformed(target):  # known where it is called: its body is not the program's
            target = _caller_of(target)
        stats = Stats(ledger, TOTAL)
        setting = (convert, *settings, alike, stats)
        owner = Function(target, *setting, nested=Nested(*setting))
        compiled = owner.callable()
        _LIVE[stats] = weakref.ref(compiled)
        return compiled
    if isinstance(target, types.MethodType):
        return types.MethodType(_wrap(target.__func__, settings, ledger, alike), target.__self__)
    if isinstance(target, functools.partial):
        return functools.partial(_wrap(target.func, settings, ledger, alike), *target.args, **target.keywords)
    if isinstance(target, nn.Module) or (callable(target) and not isinstance(target, type)):
        return types.MethodType(_wrap(_call, settings, ledger, alike), target)
    raise TypeError(f"expected a function, a method, a callable object or an nn.Module, got {type(target).__name__}")


def _call(target: Any, /, *args: object, **kwargs: object) -> object:
    return target(*args, **kwargs)


def _caller_of(target: types.FunctionType) -> types.FunctionType:
    """A function of the user's side that calls `target` and goes by its name."""

    @functools.wraps(target)
    def caller(*args: object, **kwargs: object) -> object:
        return target(*args, **kwargs)

    return cast(types.FunctionType, caller)


def owner_of(compiled: object) -> Function:
    """The driver's record behind what `optimize` returned."""
    if isinstance(compiled, types.MethodType):
        return owner_of(compiled.__func__)
    if isinstance(compiled, functools.partial):
        return owner_of(compiled.func)
    if isinstance(compiled, CompiledCallable) and compiled.miss is not None:
        return cast(Function, compiled.miss.__self__)  # type: ignore[attr-defined]
    raise TypeError(f"not a compiled callable: {type(compiled).__name__}")


@overload
def disable(function: F, *, recursive: bool = True, reason: str | None = None) -> F: ...
@overload
def disable(function: None = None, *, recursive: bool = True, reason: str | None = None) -> Callable[[F], F]: ...
def disable(function: F | None = None, *, recursive: bool = True, reason: str | None = None) -> F | Callable[[F], F]:
    """Marks a function, method or nn.Module: a call of it breaks the graph and runs as it is. A function of C's and
    `Function.apply` of a class of autograd functions are not marked themselves: what is returned is.

    Also a decorator with arguments: `@disable(reason="talks to a server")`.

    Args:
        recursive: what it calls is not captured either; with False it is.
        reason: shown where the break is reported.

    Raises:
        TypeError: the argument is a class, or no callable.
    """
    mark = Mark(MarkKind.DISABLED if recursive else MarkKind.SKIPPED, reason)
    return _marking(mark) if function is None else _marking(mark)(function)


@overload
def skip_frame(function: F, *, reason: str | None = None) -> F: ...
@overload
def skip_frame(function: None = None, *, reason: str | None = None) -> Callable[[F], F]: ...
def skip_frame(function: F | None = None, *, reason: str | None = None) -> F | Callable[[F], F]:
    """`disable` for this function alone: what it calls is captured.

    Raises:
        TypeError: the argument is a class, or no callable.
    """
    mark = Mark(MarkKind.SKIPPED, reason)
    return _marking(mark) if function is None else _marking(mark)(function)


def allow_in_graph(function: F) -> F:
    """Marks a function: a call of it becomes one node of the graph; it must work on tensors alone, without effects.

    Raises:
        TypeError: the argument is a class, or no callable.
    """
    return _marking(Mark(MarkKind.ALLOWED))(function)


def disallow_in_graph(function: F) -> F:
    """Calls of a function, torch's own included, break the graph and run as they are. Functions captured before keep
    their graphs until `reset()`.

    Raises:
        TypeError: the argument is no callable.
    """
    put_stand_in(function, Mark(MarkKind.REFUSED, "disallow_in_graph"))
    return function


def substitute_in_graph(original: Callable[..., object], *, remove: bool = False) -> Callable[[F], F]:
    """A decorator: captured code calls the decorated function in the place of `original`, which capture cannot see into
    (a function of C, say). Elsewhere `original` is what it was.

    Args:
        remove: the decorator takes an earlier substitute back.

    Raises:
        TypeError: `original` is no callable, or what is decorated is no Python function.
    """

    def put(substitute: F) -> F:
        if not isinstance(substitute, types.FunctionType):
            raise TypeError(f"expected a Python function as a substitute, got a {type(substitute).__name__}")
        put_stand_in(original, None if remove else Mark(MarkKind.SUBSTITUTED, substitute=substitute))
        return cast(F, substitute)

    if not callable(original):
        raise TypeError(f"expected a function to substitute, got a {type(original).__name__}")
    return put


def assume_constant_result(function: F) -> F:
    """Marks a function: it is run once, when its caller is captured, and its result is a constant from then on.

    Its arguments must hold no tensors that the graph computes: such a call breaks the graph.

    Raises:
        TypeError: the argument is a class, or no callable.
    """
    return _marking(Mark(MarkKind.CONSTANT))(function)


def _marking(mark: Mark) -> Callable[[F], F]:
    def put(function: F) -> F:
        apart = mark.kind in (MarkKind.DISABLED, MarkKind.SKIPPED) and _is_shared(function)
        marked = _called_apart(function) if apart else function
        put_mark(marked, mark)
        return marked

    return put


def _is_shared(function: object) -> bool:
    """Whether others call the same function and mean something else: one of C, or the `apply` that all classes of
    autograd functions have of torch."""
    method = isinstance(function, types.MethodType) and function.__func__ is torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    return method or isinstance(function, types.BuiltinFunctionType)


def _called_apart(function: F) -> F:
    """A Python function that calls it."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return cast(F, call)


def stats() -> Stats:
    """What all compiled callables of this process did since the last `reset()`."""
    return TOTAL.copy()


def reset() -> None:
    """Forgets every compiled version; functions are captured anew at their next call."""
    for reference in list(_LIVE.values()):
        compiled = reference()
        if compiled is not None:
            compiled.entries.clear()
            owner = owner_of(compiled)
            owner.eager = None
            owner.changed.clear()
            owner.fixed.clear()
            if owner.nested is not None:
                owner.nested = Nested(*owner.nested.arguments)
    for kept in list(_LIVE):
        kept.clear()
    forget_ended_code()
    TOTAL.clear()
