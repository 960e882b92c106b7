"""The driver: from one call of a function to an entry of its compiled callable.

interpret -> (break? again, stopping there) -> finish the graph -> guards -> back end -> generated code -> Entry
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import logging
import os
import sys
import sysconfig
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from primtorch import graph_text
from primtorch.ambient import preserved
from primtorch.errors import DataDependent
from primtorch.ledger import Event
from primtorch.schemas import UserFrame, calling_frames
from torchdynamo._C import CompiledCallable, Entry, GuardTree, Hook, hook_enabled
from torchdynamo.after_break.break_step import Resume, continue_after, has_rule, started
from torchdynamo.after_break.rerun import Rerun, has_casts, has_effects, raise_at_entry, unflatten
from torchdynamo.after_break.resume import Entrance, make_resume, origin_of
from torchdynamo.capture import Captured, as_user_frames, interpret
from torchdynamo.emit.codegen import GENERATED, Codegen, flat_size, parameter_name
from torchdynamo.emit.graph_inputs import GraphInput, finish_graph, takes_floats
from torchdynamo.errors import InternalError, RecompileLimitExceeded, TorchDynamoError, Unsupported
from torchdynamo.events import (
    CAPTURE_FAULT,
    DISABLED_FUNCTION,
    LIBRARY_CODE,
    NOTHING_TO_COMPILE,
    PROGRAM_RAISED,
    RECOMPILE_LIMIT,
    RECOMPILE_REFUSED,
    RECOMPILED,
    SUSPENDING_FRAME,
    UNSPLIT_FRAME,
    UNSTARTED_GENERATOR,
    frame_of,
    of_function,
)
from torchdynamo.graph import numpy_values
from torchdynamo.graph.recorder import as_break
from torchdynamo.graph.regions import graph_module
from torchdynamo.guards.failure import Failure, first_failure
from torchdynamo.guards.global_state import function_modes, global_state
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.guards.memory_guards import guard_written_memory, guard_written_objects, written_inputs
from torchdynamo.guards.shape_guards import add_shape_guards, shape_guards
from torchdynamo.guards.shape_program import same_constant
from torchdynamo.interpreter.bytecode_text import bytecode_text
from torchdynamo.interpreter.protocol import Position
from torchdynamo.marks import Mark, MarkKind, mark_of
from torchdynamo.outside.dynamic_policy import DynamicPolicy
from torchdynamo.outside.imports import is_import_machinery
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph, OutlivesGraph, describe
from torchdynamo.schemas import AmbientRead, Backend, CaptureOptions, Dump, GlobalState, GraphBreak, Guard, GuardKind
from torchdynamo.sources import Attribute, Scope, Source, TensorSize, resolve
from torchdynamo.stats import Stats
from torchdynamo.watchers import other_compiler_off, watcher

_log = logging.getLogger("torchdynamo")
_names = iter(range(1 << 60))


_capturing = threading.RLock()  # one thread captures at a time: those that come meanwhile find what it has made


# The thread that was capturing is not there in a forked process.
os.register_at_fork(after_in_child=_capturing._at_fork_reinit)  # type: ignore[attr-defined]
_CAPTURES_OF_A_CALL = 4  # as often as another thread may get in between before it is taken for a fault of capture


@dataclass(slots=True)
class Compiled:
    """What an entry was made from (`Entry.info`)."""

    guards: tuple[Guard, ...]
    graph: fx.GraphModule | None
    source: str
    graph_break: GraphBreak | None
    pinned: list[Any]


@dataclass(slots=True)
class Function:
    """One function under capture, over all its versions."""

    function: types.FunctionType
    backend: Backend
    options: CaptureOptions
    dump: Dump | None
    stats: Stats
    changed: set[Source] = field(default_factory=set)
    fixed: set[Source] = field(default_factory=set)  # integers that are no symbols, lists that are read as a whole
    breaks_at_data: bool = False  # where a size depends on data, since the back end cannot do without it
    refused: set[tuple[UserFrame, ...]] = field(default_factory=set)  # stacks of calls that it cannot do even so
    shared: set[Source] = field(default_factory=set)  # inputs that shared memory which the program writes to
    eager: Event | None = None  # why calls run as they are from now on
    found: bool = False  # by the frame hook, in a call that runs for real
    raised: set[tuple[type, int]] = field(default_factory=set)  # exceptions of the program that ended calls, and lines
    nested: Nested | None = None
    unheld: int = 0  # captures in a row of one call whose guards did not hold: other threads change what it reads
    made: list[weakref.ref[CompiledCallable]] = field(default_factory=list)

    def callable(self) -> CompiledCallable:
        compiled = CompiledCallable(self.function, self.miss)
        self.made.append(weakref.ref(compiled))
        return compiled

    def compiled(self) -> CompiledCallable | None:
        return self.made[-1]() if self.made else None

    def versions(self) -> list[Entry]:
        """The entries of this function and of its continuations."""
        parts = self.nested.parts if self.nested is not None else []
        callables = [part.compiled() for part in (self, *parts)]
        return [entry for compiled in callables if compiled is not None for entry in compiled.entries]

    def miss(self, compiled: CompiledCallable, flat: tuple[Any, ...], *unheld: Guard | None) -> Entry | None:
        """A version for this call, or None to run the function as it is.

        unheld: what does not hold of the version that was just made for this call, if one was: a guard, or None where
            an input is missing.
        """
        watched_by = watcher(flat)
        if watched_by is not None:
            if not self.found:  # else the outermost function has told it
                name = self.function.__qualname__
                self.stats.ledger.add(Event(watched_by.kind, name, watched_by.detail, calling_frames(1)))
            return None
        self.unheld = self.unheld + 1 if unheld else 0
        if self.unheld == _CAPTURES_OF_A_CALL and self.eager is None:
            text = print_guards(guard for guard in unheld if guard is not None)
            _fault(self, None, InternalError(f"guards just made do not hold for the call they were made for: {text}"))
            return None
        if self.eager is not None:
            self.stats.ledger.add(self.eager)
            return None
        with _capturing:
            return self._version(compiled, flat, again=bool(unheld))

    def _version(self, compiled: CompiledCallable, flat: tuple[Any, ...], again: bool) -> Entry | None:
        began, in_backend = time.perf_counter(), self.stats.backend_seconds
        try:
            why: list[str] = []
            for entry in compiled.entries:
                failure = self._failure(entry, flat)
                if failure is None and entry.tree is not None and not again:
                    return entry  # another thread has made it, or changed back what it reads
                why.append(str(failure or "a guard that holds now failed before"))
            if why and not self._may_recompile(why):
                return None
            with other_compiler_off():
                return convert(self, flat)
        except BaseException as error:
            if origin_of(self.function) is None:
                raise
            return self._raising(error)
        finally:
            in_backend = self.stats.backend_seconds - in_backend
            self.stats.add(seconds=time.perf_counter() - began - in_backend)

    def _raising(self, error: BaseException) -> Entry:
        """What raises in a continuation that was to be compiled, under the handlers of the place where it begins."""
        raised = [error]

        def run(inputs: list[Any], *flat: Any) -> Any:
            compiled = self.compiled()
            if compiled is not None:
                compiled.entries[:] = [other for other in compiled.entries if other is not entry]
            return raise_at_entry(self.function, flat, raised.pop())

        entry = Entry(None, run, Compiled((), None, "", None, []))
        return entry

    def scope(self, flat: Sequence[Any], pinned: Sequence[Any]) -> Scope:
        function = self.function
        return Scope(flat, function.__globals__, function.__closure__ or (), pinned, sys.modules)

    def _failure(self, entry: Entry, flat: Sequence[Any]) -> Failure | None:
        """Why a version does not fit a call. Notes what has changed."""
        info: Compiled = entry.info
        scope = self.scope(flat, info.pinned)
        failure = first_failure(info.guards, scope)
        if failure is not None:
            self.changed.update(_changed_sizes(info.guards, scope))
        return failure

    def _may_recompile(self, why: Sequence[str]) -> bool:
        """Notes why the versions do not fit, each of them; False when no more may be made."""
        policy, full = self.options.on_recompile, len(why) >= self.options.recompile_limit
        if not full and policy in ("continue", "warn"):
            event = of_function(RECOMPILED, self.function, "\n".join(why))
            self.stats.ledger.add(event)
            if policy == "warn":
                _log.warning("%s", event)
            return True
        table = "\n".join(f"  {index}: {reason}" for index, reason in enumerate(why))
        text = f"it has {len(why)} compiled versions, and none fits this call:\n{table}"
        event = of_function(RECOMPILE_LIMIT if full else RECOMPILE_REFUSED, self.function, text)
        if policy == "error":
            raise RecompileLimitExceeded(str(event))
        self.stats.ledger.add(event)
        if full:
            _log.warning("%s", event)
            self.eager = event
        return False


class Nested:
    """Captures functions that broken code calls for real: found by the frame hook while such a call runs."""

    def __init__(self, backend: Backend, options: CaptureOptions, dump: Dump | None, stats: Stats) -> None:
        self.arguments = (backend, options, dump, stats)
        self.parts: list[Function] = []
        self.resumes: dict[tuple[Any, ...], Any] = {}
        self._plain: set[types.CodeType] = set()
        self.hook = Hook(self.found)

    def leave_alone(self, function: types.FunctionType) -> None:
        self._plain.add(function.__code__)

    def found(self, function: types.FunctionType) -> CompiledCallable | Literal[False] | None:
        code = function.__code__
        if code in self._plain:
            return None
        if is_import_machinery(code):
            return False  # a module's own code makes modules, classes and tables, once: none of it is the program
        ledger = self.arguments[-1].ledger
        mark, marked = _users_mark(function)
        if mark is not None:
            if mark.kind in (MarkKind.DISABLED, MarkKind.SKIPPED):
                ledger.add(of_function(DISABLED_FUNCTION, marked, mark.reason or ""))
            return _as_it_is(function) if mark.kind is MarkKind.DISABLED else None
        if code.co_filename.startswith(_LEFT_ALONE):
            if code.co_filename.startswith(_TORCH):
                ledger.add(Event(LIBRARY_CODE, os.path.relpath(code.co_filename, os.path.dirname(_TORCH))))
            return None
        if code.co_flags & _SUSPENDS or code.co_name in _COMPREHENSIONS:
            ledger.add(of_function(SUSPENDING_FRAME, function))
            return None
        part = Function(function, *self.arguments)
        part.nested = self
        part.found = True
        self.parts.append(part)
        return part.callable()


def _users_mark(function: types.FunctionType) -> tuple[Mark | None, types.FunctionType]:
    """The mark of a function, and the program's own function where another compiler's decorator has wrapped that. By
    the same decorator torch keeps that compiler from functions of its own; it says nothing of them here."""
    mark = mark_of(function)
    if mark is None or not function.__code__.co_filename.startswith(_TORCH):
        return mark, function
    wrapped = function.__dict__.get("__wrapped__")
    wrapped = getattr(wrapped, "__func__", wrapped)
    if isinstance(wrapped, types.FunctionType) and not wrapped.__code__.co_filename.startswith(_TORCH):
        return mark, wrapped
    return None, function


def _as_it_is(function: types.FunctionType) -> CompiledCallable:
    """Runs the function as compiled code is run: with the hook off, for all that it calls."""

    def run(inputs: list[Any], *flat: Any) -> Any:
        args, kwargs = unflatten(function.__code__, flat)
        return function(*args, **kwargs)

    entry = Entry(None, run, Compiled((), None, "", None, []))
    return CompiledCallable(function, lambda compiled, flat: entry)


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Their argument is an iterator, which capture may not advance; what they call is captured.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Files whose functions are not captured on their own: Python's library, torch, NumPy, this package, generated code.
_LEFT_ALONE = (
    sysconfig.get_paths()["stdlib"] + os.sep,
    _TORCH,
    *numpy_values.FOLDER,
    os.path.dirname(__file__) + os.sep,
    "<",
)


# Names of generated functions that are gone. Their text is dropped when the next capture begins: a collection of
# garbage may come while the program walks the cache of lines.
_ended: deque[str] = deque()


def forget_ended_code() -> None:
    """Drops the text of generated functions that no longer live."""
    with contextlib.suppress(IndexError):  # of an empty deque, which another thread may have emptied
        while True:
            linecache.cache.pop(_ended.popleft(), None)


def convert(state: Function, flat: tuple[Any, ...]) -> Entry | None:
    """One capture, start to end. Afterwards it holds none of the program's objects."""
    opened: list[Captured] = []
    forget_ended_code()
    try:
        return _convert(state, flat, opened)
    except Exception as error:
        raises = state.options.strict or state.options.fullgraph
        told = isinstance(error, TorchDynamoError) and (raises or not isinstance(error, InternalError))
        if told or _raised_in(error, _call_backend.__code__):
            raise
        _fault(state, None, error)
        return None
    finally:
        for captured in opened:
            captured.release()


def _convert(state: Function, flat: tuple[Any, ...], opened: list[Captured]) -> Entry | None:
    if state.dump is not None:
        state.dump("bytecode.txt", bytecode_text(state.function.__code__))
    ambient = global_state()
    found = _capture_and_generate(state, flat, ambient, opened)
    if not isinstance(found, Generated):
        return found
    captured, codegen, tail = found.captured, found.codegen, found.tail
    for function in codegen.unstarted:
        state.stats.ledger.add(of_function(UNSTARTED_GENERATOR, function))
    outside = captured.outside
    shared = guard_written_memory(outside)
    if shared is not None:
        if state.shared.issuperset(shared):
            text = " and ".join(source.expression() for source in shared)
            return _no_graph(state, GraphBreak("overlapping_inputs", text, _frames(state, None)))
        state.shared.update(shared)
        return _convert(state, flat, opened)
    guard_written_objects(outside, codegen.written)
    inputs = finish_graph(outside, codegen, takes_floats(state.backend))
    guards = _guards(outside, ambient)
    graph = _graph_module(outside, state.function.__name__)
    has_graph = graph is not None
    if graph is None and captured.stopped is None and state.found:
        state.eager = of_function(NOTHING_TO_COMPILE, state.function)
        state.stats.ledger.add(state.eager)
        return None
    if state.dump is not None:
        state.dump("guards.txt", print_guards(guards))
        if graph is not None:
            state.dump("torch_graph.py", graph_text(graph, "graph"))
    compiled_graph = None
    if graph is not None:
        asked = len(outside.shape_env.guards)
        try:
            compiled_graph = _call_backend(state, graph, inputs)
        except DataDependent as error:  # it needs to know a size that only the data tells
            if _break_there(state, error):
                return _convert(state, flat, opened)
            if state.options.fullgraph:
                raise
            broke = as_break(error)
            frames = error.frames or _frames(state, None)
            return _no_graph(state, GraphBreak(broke.reason, broke.detail, frames))
        guards += shape_guards(outside, asked)  # what the back end took for granted of numbers
        state.stats.add(graphs=1)
    if captured.stopped is not None:
        state.stats.record_break(state.function.__qualname__, captured.stopped.graph_break)
    effects = graph is not None and has_effects(graph)
    text = codegen.source_text(_parameters(state.function), has_graph, effects, tail)
    rerun = Rerun(state.function, state.stats.ledger, _written(outside, inputs), graph is not None and has_casts(graph))
    code = _load(text, state, outside, compiled_graph, rerun)
    if captured.stopped is not None and origin_of(state.function) is None:
        code = started(code)
    if state.dump is not None:
        state.dump("compiled.py", text)
    sources = [item.source for item in inputs if item.source is not None] if has_graph else []
    tree = GuardTree(guards, sources, state.function, outside.externals.pins.objects)
    info = Compiled(
        guards, graph, text, captured.stopped.graph_break if captured.stopped else None, outside.externals.pins.objects
    )
    return Entry(tree, code, info)


def _break_there(state: Function, error: DataDependent) -> bool:
    """Lets the graph end before a size that the back end has to know; False where it does already."""
    if not state.breaks_at_data:
        state.breaks_at_data = True
        return True
    if not error.frames or error.frames in state.refused:
        return False
    state.refused.add(error.frames)
    return True


@dataclass(frozen=True, slots=True)
class Generated:
    """A capture with the code of its values and effects; `tail` ends the generated function."""

    captured: Captured
    codegen: Codegen
    tail: list[str]


def _capture_and_generate(
    state: Function, flat: tuple[Any, ...], ambient: GlobalState, opened: list[Captured]
) -> Generated | Entry | None:
    """The deepest capture whose state generated code can hand over to what follows a break."""
    depth: int | None = None
    refused_start = -1
    while True:
        captured = _capture(state, flat, depth, refused_start, opened)
        if not isinstance(captured, Captured):
            return captured
        try:
            return Generated(captured, *_generate(state, captured, ambient))
        except OutlivesGraph as error:
            refused_start, depth = error.start, None
        except BreakGraph as error:
            if error.reason == "data_dependent_shape" and not state.breaks_at_data:
                state.breaks_at_data, depth = True, None
                continue
            frames = captured.stopped.frames if captured.stopped is not None else []
            if len(frames) < 2:
                return _no_graph(state, GraphBreak(error.reason, error.detail, _frames(state, None)))
            depth = len(frames) - 1  # the innermost frame runs for real, and is captured on its own


def _capture(
    state: Function, flat: tuple[Any, ...], depth: int | None, refused_start: int, opened: list[Captured]
) -> Captured | Entry | None:
    """Interprets the call; at a break, again up to the instruction that broke, in the outer `depth` frames (or any)."""
    stop_at: tuple[int, ...] = ()
    reason: GraphBreak | None = None
    refused_raise = -1
    cut_at: int | None = None
    never = state.options.dynamic is False
    for _ in range(64):
        changed = frozenset(state.changed - state.fixed)
        compiled = state.compiled()
        versions = len(compiled.entries) if compiled is not None else 0
        everything = state.options.dynamic is True and not never
        lines, shared = frozenset(state.refused), frozenset(state.shared)
        policy = DynamicPolicy(everything, changed, never, versions, state.breaks_at_data, lines, shared)
        captured = interpret(state.function, flat, policy, stop_at, reason, refused_raise, refused_start, cut_at)
        opened.append(captured)
        if captured.cut_at is not None:
            cut_at, stop_at, reason = captured.cut_at, (), None
            continue
        if captured.read_whole is not None:
            state.fixed.add(captured.read_whole)
            continue
        if isinstance(captured.error, DataDependent) and not state.breaks_at_data:
            state.breaks_at_data = True  # the program itself asks for such a size: what follows gets it as a number
            stop_at, reason = (), None
            continue
        if captured.error is not None:
            numbers = captured.outside.run_time_numbers()
            if numbers:  # C code may refuse a symbol where it takes a number
                state.fixed |= numbers
                continue
            refused_raise = captured.raises.get(id(captured.error), -1)
            settled = _place_of(captured) in state.raised and not isinstance(captured.error, RecursionError)
            if state.options.fullgraph or refused_raise < 0 or not settled:
                return _failed(state, captured, captured.error)
            continue  # eager raised it there, too: the graph ends before it
        if captured.refused_raise >= 0:
            refused_raise, stop_at, reason = captured.refused_raise, (), None
            continue
        if captured.broke is not None:
            reason, stop_at = captured.broke[0], captured.broke[1][:depth]
            if not reason.user_frames:  # it broke before the first instruction, or behind the last
                reason = replace(reason, user_frames=_frames(state, None))
            refused = reason.reason == "exception" and refused_raise >= 0  # for a break behind it
            if reason.reason == "symbolic_size" and state.options.fullgraph and not never:
                never, stop_at, reason = True, (), None  # one graph for these sizes
                continue
            if state.options.fullgraph or (captured.breaks_are_errors and not refused):
                raise Unsupported(describe(reason))
            if not stop_at:
                return _no_graph(state, reason)
            continue
        if captured.stopped is None:
            return captured
        if len(stop_at) > 1 and not has_rule(captured.stopped):
            stop_at = stop_at[:-1]  # the innermost frame runs for real, and is captured on its own
            continue
        refused_raise = _raise_to_refuse(captured)
        if refused_raise < 0:
            return captured
        stop_at, reason = (), None
    raise InternalError("capture did not settle on a place to break")


def _raise_to_refuse(captured: Captured) -> int:
    """The raise of an exception that the program has at hand where it stopped, if the graph cannot hold it, or -1.

    Generated code could make an exception, or hand on that of an earlier part, but not the traceback that it has got
    on its way: it is raised for real instead.
    """
    assert captured.stopped is not None
    held = [
        value
        for frame in captured.stopped.frames
        for value in (*frame.handled.values(), *frame.stack, *frame.locals.values())
        if isinstance(value, BaseException)
    ]
    ordinals = [captured.raises.get(id(error), captured.passes.get(id(error), -1)) for error in held]
    return min((ordinal for ordinal in ordinals if ordinal >= 0), default=-1)


def _failed(state: Function, captured: Captured, error: BaseException) -> Entry | None:
    """The program raised, or capture is at fault: the eager run of this one call shows which."""
    if _is_own_fault(error):
        _fault(state, captured.where, error)
        return None
    function, place, where = state.function, _place_of(captured), captured.where
    held: list[tuple[Entry, BaseException]] = []  # taken out by the run: the error's traceback leads to the arguments

    def run(inputs: list[Any], *flat: Any) -> Any:
        entry, error = held.pop() if held else (None, None)
        compiled = state.compiled()
        if compiled is not None:
            compiled.entries[:] = [other for other in compiled.entries if other is not entry]
        args, kwargs = unflatten(function.__code__, flat)
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:
            if error is not None and type(raised) is not type(error) and isinstance(raised, Exception):
                _fault(state, where, error)
            else:
                state.raised.add(place)
                what = f"{type(raised).__name__}: {raised}"
                state.stats.ledger.add(Event(PROGRAM_RAISED, function.__qualname__, what, _frames(state, where)))
            raise
        else:
            if error is not None:
                _fault(state, where, error)
            return result
        finally:
            del error, flat, args, kwargs  # a traceback of what the program raised holds this frame

    entry = Entry(None, run, Compiled((), None, "", None, []))
    held.append((entry, error))
    return entry


def _place_of(captured: Captured) -> tuple[type, int]:
    """The type of the error that ended a capture, and its line in the root frame."""
    return type(captured.error), captured.where.line if captured.where is not None else 0


def _fault(state: Function, place: Position | None, error: BaseException) -> None:
    """Tells of an error that capture made and the program did not; raises it under `strict` and `fullgraph`."""
    function = state.function.__qualname__
    event = Event(CAPTURE_FAULT, function, f"{type(error).__name__}: {error}", _frames(state, place))
    if state.options.strict:
        raise InternalError(str(event)) from error
    state.stats.ledger.add(event, error)
    state.eager = event
    _log.warning("capture of %s failed, it runs eagerly: %s (%s)", function, event.detail, event.where)


def _frames(state: Function, place: Position | None) -> tuple[UserFrame, ...]:
    """A place in the function, or that of its definition."""
    return as_user_frames((place,)) if place is not None else (frame_of(state.function.__code__),)


def _raised_in(error: BaseException, code: types.CodeType) -> bool:
    """Whether the exception comes from within a call of the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace is not None


def _is_own_fault(error: BaseException) -> bool:
    """Whether capture's own code raised, rather than what it ran for the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, InternalError) or trace is None:
        return isinstance(error, InternalError)
    file = trace.tb_frame.f_code.co_filename
    own = file.startswith(os.path.dirname(__file__)) and os.path.basename(os.path.dirname(file)) != "interpreter"
    return own and os.path.basename(file) not in _RUN_THE_PROGRAM


# Modules of this package from which the program's own C code is called.
_RUN_THE_PROGRAM = frozenset({"recorder.py", "calls.py", "emissions.py", "capture_world.py", "outside.py"})


def _no_graph(state: Function, reason: GraphBreak) -> Entry | None:
    """Capture cannot begin or cannot go on: the function runs as it is, and what it calls is captured."""
    nested, function = state.nested, state.function
    state.stats.record_break(function.__qualname__, reason)
    state.eager = Event(UNSPLIT_FRAME, function.__qualname__, f"[{reason.reason}] {reason.detail}", reason.user_frames)
    state.stats.ledger.add(state.eager)
    if nested is None or state.found:  # the hook that found it looks at what it calls
        return None
    nested.leave_alone(function)

    def run(inputs: list[Any], *flat: Any) -> Any:
        args, kwargs = unflatten(function.__code__, flat)
        with hook_enabled(nested.hook):
            return function(*args, **kwargs)

    return Entry(None, run, Compiled((), None, "", reason, []))


def _parameters(function: types.FunctionType) -> list[str]:
    code = function.__code__
    return [parameter_name(index, name) for index, name in enumerate(code.co_varnames[: flat_size(code)])]


def _generate(state: Function, captured: Captured, ambient: GlobalState) -> tuple[Codegen, list[str]]:
    """Writes values and effects; the tail returns, or goes on after a break."""
    outside = captured.outside
    codegen = Codegen(outside.recorder, outside.externals, outside.overlays, outside.shape_env, outside.symbol_sources)
    with torch._C.DisableTorchFunction():
        tail: list[str] = []
        if captured.stopped is None:
            tail.append(f"return {codegen.value(captured.value)}")
            codegen.side_effects()
        else:
            hook = None if state.nested is None else state.nested.hook
            tail = continue_after(codegen, captured.stopped, _resume_factory(state), hook)
            codegen.side_effects()
        for said in captured.emissions:
            codegen.call_at_each_call(said.function, said.args, said.kwargs)
        for block in captured.close_blocks():
            codegen.effects.append(f"{codegen.pin(block.enter)}({codegen.items(block.args)})")
        if captured.grad_enabled != ambient.grad_enabled:
            codegen.effects.append(f"{codegen.pin(torch._C._set_grad_enabled)}({captured.grad_enabled})")
    return codegen, tail


def _resume_factory(state: Function) -> Resume:
    """Continuations, one for each place, stack layout, set of bound variables and chain of frames inside of it.

    All functions share them.
    """
    nested = state.nested
    assert nested is not None

    def resume(
        function: types.FunctionType, entrance: Entrance, compiled: bool, within: tuple[types.FunctionType, ...]
    ) -> Any:
        key = (id(function.__code__), id(function.__globals__), entrance, compiled, within if compiled else ())
        found = nested.resumes.get(key)
        if found is None:
            resumed = make_resume(function, entrance)
            if compiled:
                part = Function(resumed, state.backend, state.options, state.dump, state.stats)
                part.nested = nested
                nested.parts.append(part)
                found = part.callable()
            else:
                found = resumed
                nested.leave_alone(resumed)
            nested.resumes[key] = found
        return found

    return resume


def _guards(outside: Outside, ambient: GlobalState) -> tuple[Guard, ...]:
    """All guards: those of the reads, and those of the relations between sizes that were asked."""
    externals = outside.externals
    add_shape_guards(outside)
    hashed = [known.source for known in externals.hashed.values()]
    if len(hashed) > 1:
        externals.guards.add(hashed[0], GuardKind.ALL_DISTINCT, tuple(hashed[1:]), ())
    code = Attribute(externals.pins.source(outside.function), "__code__", native=True)
    externals.guards.add(code, GuardKind.IDENTITY, outside.function.__code__, ())
    externals.guards.add(None, GuardKind.GLOBAL_STATE, ambient, ())
    if ambient.torch_function_modes:
        modes = AmbientRead(function_modes, (), function_modes())
        externals.guards.add(None, GuardKind.AMBIENT, modes, ())
    return externals.guards.guards()


def _graph_module(outside: Outside, name: str) -> fx.GraphModule | None:
    if not any(node.op.startswith("call") for node in outside.recorder.graph.nodes):
        return None
    class_name = f"Graph_{name}" if name.isidentifier() else "Graph"
    return graph_module(outside.recorder.regions.modules, outside.recorder.graph, class_name)


def _call_backend(state: Function, graph: fx.GraphModule, inputs: list[GraphInput]) -> Callable[..., Sequence[Any]]:
    began = time.perf_counter()
    try:
        with preserved():
            compiled = state.backend(graph, [item.example for item in inputs])
    finally:
        state.stats.add(backend_seconds=time.perf_counter() - began)
    if not callable(compiled):
        raise TypeError(f"the backend returned {type(compiled).__name__}, expected a callable")
    return compiled


def _written(outside: Outside, inputs: Sequence[GraphInput]) -> tuple[int, ...]:
    """Which of the inputs that the guards read the program writes to, or gives another shape."""
    changed = {id(tensor) for _, tensor in written_inputs(outside)}
    read = [item.example for item in inputs if item.source is not None]
    return tuple(place for place, example in enumerate(read) if id(example) in changed)


def _load(
    text: str, state: Function, outside: Outside, graph: Callable[..., Any] | None, rerun: Rerun
) -> Callable[..., Any]:
    """The generated function. Its text is found by tracebacks and debuggers, as long as it lives."""
    file = f"{GENERATED}{state.function.__qualname__} {next(_names)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {
        "P": outside.externals.pins.objects,
        "G": state.function.__globals__,
        "C": state.function.__closure__ or (),
        "sys": sys,
        "graph": graph,
        "rerun": rerun,
    }
    exec(compile(text, file, "exec"), namespace)
    weakref.finalize(namespace["compiled"], _ended.append, file)
    return namespace["compiled"]  # type: ignore[no-any-return]


_KINDS_THAT_CHANGE = frozenset({GuardKind.TENSOR, GuardKind.EQUALS, GuardKind.IDENTITY, GuardKind.LENGTH})


def _changed_sizes(guards: Sequence[Guard], scope: Scope) -> set[Source]:
    """Sizes, numbers, tuples of constants, lengths and functions that differ from what the version was made for."""
    found: set[Source] = set()
    for guard in guards:
        if guard.source is None or guard.kind not in _KINDS_THAT_CHANGE:
            continue
        try:
            value = resolve(guard.source, scope)
        except (LookupError, AttributeError, TypeError):
            continue
        if guard.kind is GuardKind.IDENTITY:
            both = type(value) is type(guard.payload) is types.FunctionType
            if both and value.__code__ is guard.payload.__code__:
                found.add(guard.source)  # made anew by each call
        elif guard.kind is GuardKind.LENGTH:
            if type(value) is list and len(value) != guard.payload:
                found.add(guard.source)
        elif guard.kind is GuardKind.EQUALS:
            numbers = type(value) in (int, float) and type(guard.payload) in (int, float)
            tuples = type(value) is tuple and type(guard.payload) is tuple
            if (numbers or tuples) and not same_constant(value, guard.payload):
                found.add(guard.source)
        elif isinstance(value, torch.Tensor) and value.dim() == len(guard.payload.sizes):
            for dim, (size, expected) in enumerate(zip(value.shape, guard.payload.sizes, strict=True)):
                if expected is not None and size != expected:
                    found.add(TensorSize(guard.source, dim))
    return found
