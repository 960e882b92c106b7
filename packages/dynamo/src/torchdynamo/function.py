"""Functions under capture: their compiled versions, and what earlier captures have taught of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import operator
import os
import sysconfig
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import fx

from primtorch import forks
from primtorch.interrupts import pass_on_interrupt
from primtorch.ledger import LEDGER, Event
from primtorch.schemas import UserFrame, calling_frames
from torchdynamo._C import CompiledCallable, Entry, Hook, hook_enabled
from torchdynamo.after_break.held_names import held_names, in_the_programs_words
from torchdynamo.after_break.place import Varied
from torchdynamo.after_break.rerun import raise_at_entry, unflatten
from torchdynamo.after_break.resume import Entrance, make_resume, origin_of
from torchdynamo.capture import Lines, Raised, as_user_frames, lines_from, passes
from torchdynamo.emit.codegen import parameter_name
from torchdynamo.emit.emitted import Emitted
from torchdynamo.errors import InternalError, RecompileLimitExceeded
from torchdynamo.events import (
    CAPTURE_FAULT,
    DISABLED_FUNCTION,
    LAZY_MODULE,
    LIBRARY_CODE,
    PROGRAM_RAISED,
    RECOMPILE_LIMIT,
    RECOMPILE_REFUSED,
    RECOMPILED,
    STANCE,
    STANCE_REFUSES,
    SUSPENDING_FRAME,
    UNSPLIT_FRAME,
    frame_of,
    of_function,
)
from torchdynamo.graph import numpy_values
from torchdynamo.guards.changes import changed_sources, outgrown
from torchdynamo.guards.failure import Failure, first_failure
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.handed_on import body_of, hands_on_to
from torchdynamo.interpreter.loop_tests import SourcePlace
from torchdynamo.interpreter.protocol import Position
from torchdynamo.marks import Mark, MarkKind, mark_of
from torchdynamo.outside.asynchronous import handles_a_signal, is_finalizer
from torchdynamo.outside.dynamic_policy import DynamicPolicy
from torchdynamo.outside.imports import is_import_machinery
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import IN_ROUNDS
from torchdynamo.schemas import Backend, CaptureOptions, Dump, GraphBreak, Guard
from torchdynamo.sources import Argument, Item, Scope, Source
from torchdynamo.stance import current as current_stance
from torchdynamo.stats import Stats
from torchdynamo.watchers import other_compiler_off, watcher

_log = logging.getLogger("torchdynamo")


class CallFrames(Protocol):
    """The frames that are kept of calls that look like one."""

    def find(self) -> Emitted | None:
        """What another process captured of such a call, where it holds here."""

    def written(self, emitted: Emitted, outside: Outside) -> str | None:
        """A captured frame as text, where it has such a form."""

    def keep(self, text: str) -> None:
        """Keeps a frame's text."""


class Frames(Protocol):
    """Where frames are kept for other processes: what a back end has as its `frames`."""

    def of_call(self, state: Function, flat: Sequence[object]) -> CallFrames | None:
        """Those of calls that look like this one; None where none are kept of it."""


# Runs one call: with its arguments, and the first time the error that capture ended in.
_RunOnce: TypeAlias = Callable[[Sequence[object], BaseException | None], object]

_capturing = forks.rlock()  # one thread captures at a time: those that come meanwhile find what it has made
_CAPTURES_OF_A_CALL = 4  # as often as another thread may get in between before it is taken for a fault of capture


@dataclass(slots=True)
class Compiled:
    """What an entry was made from (`Entry.info`)."""

    guards: tuple[Guard, ...] = ()
    graph: fx.GraphModule | None = None
    source: str = ""
    graph_break: GraphBreak | None = None
    pinned: list[object] = field(default_factory=list)
    interpreted: tuple[tuple[str, types.CodeType], ...] = ()  # the program's code that it stands for, with its module
    known: frozenset[Source] = frozenset()  # what had differed between calls when it was made


def as_written(run: Callable[..., object], graph_break: GraphBreak | None = None) -> Entry:
    """An entry for any call, which runs the program and not a graph of it."""
    return Entry(None, run, Compiled(graph_break=graph_break))


class Alike:
    """The functions under capture that one `optimize` made, by what they run: the same code over the same globals and
    cells. A call of one that fits a version of another takes that: the parts of a model that are built alike are
    captured once."""

    def __init__(self) -> None:
        self._by_code: weakref.WeakKeyDictionary[types.CodeType, list[weakref.ref[Function]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, state: Function) -> None:
        """A function whose versions others of the same code may take."""
        known = self._by_code.setdefault(state.function.__code__, [])
        known[:] = [reference for reference in known if reference() is not None]
        known.append(weakref.ref(state))

    def versions(self, state: Function, limit: int) -> Iterator[Entry]:
        """Versions of the others, each once, at most `limit` of them."""
        function, seen = state.function, set[int]()
        for reference in self._by_code.get(function.__code__, ()):
            other = reference()
            if other is None or other is state or not _runs_alike(other.function, function):
                continue
            compiled = other.compiled()
            for entry in compiled.entries if compiled is not None else ():
                if entry.tree is None or id(entry) in seen:
                    continue
                if len(seen) == limit:
                    return
                seen.add(id(entry))
                yield entry


def _runs_alike(one: types.FunctionType, other: types.FunctionType) -> bool:
    """What both read beside their arguments is the same."""
    cells, others = one.__closure__ or (), other.__closure__ or ()
    same_cells = len(cells) == len(others) and all(map(operator.is_, cells, others))
    return one is other or (one.__globals__ is other.__globals__ and same_cells)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Function:
    """One function under capture, over all its versions."""

    function: types.FunctionType
    convert: Callable[[Function, tuple[object, ...]], Entry | None]
    backend: Backend
    options: CaptureOptions
    dump: Dump | None
    alike: Alike
    stats: Stats
    changed: set[Source] = field(default_factory=set)
    fixed: set[Source] = field(default_factory=set)  # integers that are no symbols; texts and lists read as a whole
    plain_texts: set[tuple[UserFrame, ...]] = field(default_factory=set)  # where texts of numbers are looked at
    guards_floats: bool = False  # that C code needs, since no graph can end at its call
    breaks_at_data: bool = False  # where a size depends on data, since the back end cannot do without it
    asks_data: bool = False  # where the way into an exception does, since its graphs cannot begin anew
    refused: set[tuple[UserFrame, ...]] = field(default_factory=set)  # stacks of calls that it cannot do even so
    unread: set[tuple[UserFrame, ...]] = field(default_factory=set)  # where a number is asked for by its value
    read_lengths: dict[Source, set[int]] = field(default_factory=dict)  # of what was read whole, once it varied
    varied: set[Source] = field(default_factory=set)  # what it is handed by code in front of it, for any length
    whole_rounds: bool = False  # loops over modules stay in one graph
    unrolled: set[tuple[UserFrame, ...]] = field(default_factory=set)  # stacks where what goes over modules does
    unrolls: bool = False  # loops and lists have a version for each length, since no graph can end there
    sizes: set[tuple[UserFrame, ...]] = field(default_factory=set)  # where a number is taken that is a size
    shared: set[Source] = field(default_factory=set)  # inputs that shared memory which the program writes to
    eager: Event | None = None  # why calls run as they are from now on
    found: bool = False  # by the frame hook, in a call that runs for real
    raised: set[tuple[type, int]] = field(default_factory=set)  # exceptions of the program that ended calls, and lines
    nested: Nested | None = None
    ran_first: bool = False  # a call has run as it was written, as `eager_then_compile` asks
    began: float = 0.0  # when the capture that is under way did, by time.perf_counter
    lazy: bool = False  # a call has run as it was written for a lazy module to make its parameters
    outgrown: int = 0  # versions that made room for more general ones
    unheld: int = 0  # captures in a row of one call whose guards did not hold: other threads change what it reads
    made: list[weakref.ref[CompiledCallable]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alike.add(self)

    def callable(self) -> CompiledCallable:
        """A new compiled callable, which captures what no version fits."""
        compiled = CompiledCallable(self.function, self.miss)
        self.made.append(weakref.ref(compiled))
        return compiled

    def compiled(self) -> CompiledCallable | None:
        """The latest callable that is still alive."""
        return self.made[-1]() if self.made else None

    def versions(self) -> list[Entry]:
        """The entries of this function and of its continuations."""
        parts = self.nested.parts if self.nested is not None else []
        callables = [part.compiled() for part in (self, *parts)]
        return [entry for compiled in callables if compiled is not None for entry in compiled.entries]

    # -- a call that no version fits --------------------------------------------------------

    def miss(self, compiled: CompiledCallable, flat: tuple[object, ...], *unheld: Guard | None) -> Entry | None:
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
            self.fault(InternalError(f"guards just made do not hold for the call they were made for: {text}"))
            return None
        if self.eager is not None:
            self.stats.ledger.add(self.eager)
            return None
        if not unheld and self._stands_aside():
            return None
        with _capturing:
            return self._version(compiled, flat, again=bool(unheld))

    def _stands_aside(self) -> bool:
        """Whether the stance has a call that no version fits run as it was written.

        Raises:
            RecompileLimitExceeded: it has such a call fail.
        """
        stance = current_stance()
        match stance:
            case "fail_on_recompile":
                raise RecompileLimitExceeded(str(of_function(STANCE_REFUSES, self.function)))
            case "eager_then_compile":
                aside, self.ran_first = not self.ran_first, True
            case _:
                aside = stance in ("eager_on_recompile", "force_eager")
        if aside:
            LEDGER.add(of_function(STANCE, self.function, f"set_stance({stance!r})"))
        return aside

    def _version(self, compiled: CompiledCallable, flat: tuple[object, ...], again: bool) -> Entry | None:
        began, in_backend = time.perf_counter(), self.stats.backend_seconds
        self.began = began
        try:
            why: list[str] = []
            for entry in compiled.entries:
                failure = self._failure(entry, flat)
                if failure is None and entry.tree is not None and not again:
                    return entry  # another thread has made it, or changed back what it reads
                why.append(str(failure or "a guard that holds now failed before"))
            if not again and (shared := self._version_of_another(flat)) is not None:
                return shared
            if len(why) >= self.options.recompile_limit:
                self._drop_outgrown(compiled, flat)
            if why and not self._may_recompile(why, full=len(compiled.entries) >= self.options.recompile_limit):
                return None
            with other_compiler_off():
                return self.convert(self, flat)
        except BaseException as error:
            if origin_of(self.function) is None:
                raise
            return self._for_one_call(error, self._raise_at_entry)
        finally:
            in_backend = self.stats.backend_seconds - in_backend
            self.stats.add(seconds=time.perf_counter() - began - in_backend)

    def _version_of_another(self, flat: tuple[object, ...]) -> Entry | None:
        """What a function that runs the same code has made, and fits this call, too."""
        for entry in self.alike.versions(self, self.options.recompile_limit):
            info: Compiled = entry.info
            if first_failure(info.guards, Scope.of(self.function, flat, info.pinned)) is None:
                return entry
        return None

    def _raise_at_entry(self, flat: Sequence[object], error: BaseException | None) -> object:
        """What raises in a continuation that was to be compiled, under the handlers of the place where it begins."""
        return self.function(*flat) if error is None else raise_at_entry(self.function, flat, error)

    def _failure(self, entry: Entry, flat: Sequence[object]) -> Failure | None:
        """Why a version does not fit a call. Notes what has changed."""
        info: Compiled = entry.info
        scope = Scope.of(self.function, flat, info.pinned)
        failure = first_failure(info.guards, scope)
        if failure is None:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            self.changed.update(changed_sources(info.guards, scope))
        text = in_the_programs_words(failure.text, held_names(self.function, flat))
        hidden = None if body_of(self.function) is self.function else self.function.__code__.co_filename
        return dataclasses.replace(failure, text=text, hidden=hidden)

    def _drop_outgrown(self, compiled: CompiledCallable, flat: tuple[object, ...]) -> None:
        """Gives up versions for numbers that have differed since they were made, in this call, too: what is made now
        has symbols for them, and takes their calls. Not without end: a program may have a new number at each call."""
        for entry in list(compiled.entries):
            info: Compiled = entry.info
            scope = Scope.of(self.function, flat, info.pinned)
            with torch._C.DisableTorchFunctionSubclass():
                old = outgrown(info.guards, scope, self.changed - self.fixed - info.known)
            if old and self.outgrown < _MOST_OUTGROWN * self.options.recompile_limit:
                self.outgrown += 1
                compiled.entries[:] = [other for other in compiled.entries if other is not entry]

    def _may_recompile(self, why: Sequence[str], full: bool) -> bool:
        """Notes why the versions do not fit, each of them; False when no more may be made."""
        policy = self.options.on_recompile
        if not full and policy in ("continue", "warn"):
            event = of_function(RECOMPILED, self.function, "\n".join(dict.fromkeys(why)))
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

    # -- what a capture is told -------------------------------------------------------------

    def policy(self, symbols: bool, whole: Set[Source] = frozenset()) -> DynamicPolicy:
        """What earlier captures have taught. Without `symbols`, numbers are what they are in this call.

        whole: lists that are read as a whole, also where they grow.
        """
        compiled, nested = self.compiled(), self.nested
        ends = None if self.unrolls else nested  # where graphs end at loops
        return DynamicPolicy(
            everything=self.options.dynamic is True and symbols,
            changed=frozenset(self.changed - self.fixed - whole),
            never=not symbols,
            versions=len(compiled.entries) if compiled is not None else 0,
            breaks_at_data=self.breaks_at_data,
            refused=frozenset(self.refused),
            shared=frozenset(self.shared),
            asks_data=self.asks_data,
            unread=frozenset(self.unread),
            sizes=frozenset(self.sizes),
            plain_texts=frozenset(self.plain_texts),
            guards_floats=self.guards_floats,
            read_whole={} if ends is None else {source: frozenset(n) for source, n in self.read_lengths.items()},
            varied=frozenset() if self.unrolls else frozenset(self.varied),
            loops={} if ends is None else ends.loops,
            round_by_round=None if ends is None or self.whole_rounds else self.options.round_by_round,
            unrolled=frozenset(self.unrolled),
            in_rounds=nested is not None and nested.in_rounds and origin_of(self.function) is not None,
        )

    def learn_loops(self, fixed: Mapping[SourcePlace, Set[tuple[object, ...]]], broke: GraphBreak | None) -> None:
        """A capture guards the number of rounds of these: no further one is to do so for another number.

        broke: where the graph ends.
        """
        if self.nested is not None:
            for place, numbers in fixed.items():
                self.nested.loops.setdefault(place, set()).update(numbers)
            self.nested.in_rounds |= broke is not None and broke.reason in IN_ROUNDS

    def learn_varied(self, places: Iterable[tuple[int, ...]]) -> None:
        """What varies of the state that this continuation is handed, by its place there, and there, ...: numbers, and
        what a loop goes through."""
        if not places:
            return
        state = Argument(0, parameter_name(0, self.function.__code__.co_varnames[0]))
        for place in places:
            source: Source = functools.reduce(Item, place, state)  # type: ignore[arg-type]
            self.changed.add(source)
            self.varied.add(source)

    def show(self, file: str, text: Callable[..., str], *of: object) -> None:
        """Dumps a stage, where that is asked for."""
        if self.dump is not None:
            self.dump(file, text(*of))

    def frames(self, place: Position | None = None) -> tuple[UserFrame, ...]:
        """A place in the function, or that of its definition."""
        return as_user_frames((place,)) if place is not None else (frame_of(self.function.__code__),)

    # -- calls that run as they were written ------------------------------------------------

    def fault(self, error: BaseException, place: Position | None = None) -> None:
        """Tells of an error that capture made and the program did not; raises it under `strict` and `fullgraph`."""
        function = self.function.__qualname__
        event = Event(CAPTURE_FAULT, function, f"{type(error).__name__}: {error}", self.frames(place))
        if self.options.strict:
            raise InternalError(str(event)) from error
        self.stats.ledger.add(event, error)
        self.eager = event
        _log.warning("capture of %s failed, it runs eagerly: %s (%s)", function, event.detail, event.where)

    def no_graph(self, reason: GraphBreak) -> Entry | None:
        """Capture cannot begin or cannot go on: the function runs as it is, and what it calls is captured."""
        nested, function = self.nested, self.function
        self.stats.record_break(function.__qualname__, reason)
        detail = f"[{reason.reason}] {reason.detail}"
        self.eager = Event(UNSPLIT_FRAME, function.__qualname__, detail, reason.user_frames)
        self.stats.ledger.add(self.eager)
        if nested is None or self.found:  # the hook that found it looks at what it calls
            return None
        nested.leave_alone(function)

        def run(inputs: list[object], *flat: object) -> object:
            args, kwargs = unflatten(function.__code__, flat)
            with hook_enabled(nested.hook):
                return function(*args, **kwargs)

        return as_written(run, reason)

    def makes_parameters(self, broke: GraphBreak) -> Entry:
        """A lazy module is called for the first time: so is the function, as it was written. Later calls find
        parameters; where one does not, the graph breaks."""
        function, self.lazy = self.function, True
        event = Event(LAZY_MODULE, function.__qualname__, broke.detail, broke.user_frames)

        def run(flat: Sequence[object], error: BaseException | None) -> object:
            self.stats.ledger.add(event)
            args, kwargs = unflatten(function.__code__, flat)
            return function(*args, **kwargs)

        return self._for_one_call(None, run)

    def knows_raise(self, ending: Raised) -> bool:
        """Whether an eager run has shown that the program raises there; a deep recursion may end elsewhere."""
        return ending.place in self.raised and not isinstance(ending.error, RecursionError)

    def judged_by_eager(self, ending: Raised, recorded_at: frozenset[Lines], certain: bool) -> Entry | None:
        """The program raised, or capture is at fault: the eager run of this one call shows which.

        recorded_at: where the graph has calls. One may raise for its data before the program comes to the error.
        certain: the way to the error holds for this call, whatever its data is.
        """
        if isinstance(ending.error, InternalError):
            self.fault(ending.error, ending.where)
            return None
        function, place, where = self.function, ending.place, ending.where

        def run(flat: Sequence[object], error: BaseException | None) -> object:
            args, kwargs = unflatten(function.__code__, flat)
            try:
                result = function(*args, **kwargs)
            except BaseException as raised:
                pass_on_interrupt(raised)
                another = error is not None and type(raised) is not type(error) and isinstance(raised, Exception)
                if another and not passes(lines_from(function.__code__, raised.__traceback__), recorded_at):
                    assert error is not None
                    self.fault(error, where)
                else:
                    if not another:  # else no run has come to that place yet
                        self.raised.add(place)
                    what = f"{type(raised).__name__}: {raised}"
                    self.stats.ledger.add(Event(PROGRAM_RAISED, function.__qualname__, what, self.frames(where)))
                raise
            else:
                if error is not None:
                    self.fault(error, where)
                return result
            finally:
                del error, flat, args, kwargs  # a traceback of what the program raised holds this frame

        return self._for_one_call(ending.error if certain else None, run)

    def _for_one_call(self, error: BaseException | None, run: _RunOnce) -> Entry:
        """An entry that one call takes out. Its `run` gets the arguments and, the first time, the error."""
        held = [error]  # taken out by the run: the error's traceback leads to the arguments

        def once(inputs: list[object], *flat: object) -> object:
            compiled = self.compiled()
            if compiled is not None:
                compiled.entries[:] = [other for other in compiled.entries if other is not entry]
            try:
                return run(flat, held.pop() if held else None)
            finally:
                del flat

        entry = as_written(once)
        return entry


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rest of a function behind a break.

    Attributes:
        function: whose code is entered.
        compiled: whether it is captured on its own.
        within: the plain continuations of the frames inside of it.
        entered: the callable that enters it.
    """

    function: types.FunctionType
    entrance: Entrance
    compiled: bool
    within: tuple[types.FunctionType, ...]
    entered: object
    part: Function | None


class Nested:
    """Captures functions that broken code calls for real: found by the frame hook while such a call runs."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments  # of a `Function`, behind the function itself
        self.parts: list[Function] = []
        self._continuations: dict[tuple[object, ...], Continuation] = {}
        self._entered: dict[int, Continuation] = {}  # by what enters them
        self._answered: Counter[types.CodeType] = Counter()  # functions of it that have callables of their own
        self._plain: set[types.CodeType] = set()
        self.hook = Hook(self.found)
        self.loops: dict[SourcePlace, set[tuple[object, ...]]] = {}  # those whose number of rounds is guarded
        self.in_rounds = False  # a graph ends at a loop's head, for each number of rounds
        self.finds_layers = False  # a module's call runs as it is: torch's layers are part of the program, too

    def leave_alone(self, function: types.FunctionType) -> None:
        """Functions of this code run as they are."""
        self._plain.add(function.__code__)

    def part(self, function: types.FunctionType, found: bool = False) -> Function:
        """A function that is captured on its own: one that is called for real, or a continuation."""
        part = Function(function, *self.arguments, nested=self, found=found)
        self.parts.append(part)
        return part

    def resume(
        self,
        function: types.FunctionType,
        entrance: Entrance,
        compiled: bool,
        within: tuple[types.FunctionType, ...],
        varied: Varied,
    ) -> object:
        """What enters a function's code so, for all functions: one for each place, stack layout, set of bound variables
        and chain of frames inside of it."""
        key = (id(function.__code__), id(function.__globals__), entrance, compiled, within if compiled else ())
        found = self._continuations.get(key)
        if found is None:
            made = make_resume(function, entrance)
            if body_of(function) is not function:
                hands_on_to(made, body_of(function))
            part = self.part(made) if compiled else None
            if part is None:
                self.leave_alone(made)
            entered = made if part is None else part.callable()
            found = self._continuations[key] = Continuation(function, entrance, compiled, within, entered, part)
            self._entered[id(entered)] = found
        if found.part is not None:
            found.part.learn_varied(varied)
        return found.entered

    def continuation(self, entered: object) -> Continuation | None:
        """What `resume` gave `entered` for."""
        return self._entered.get(id(entered))

    def found(self, function: types.FunctionType) -> CompiledCallable | Literal[False] | None:
        """The frame hook's answer: a callable, None (the function runs as it is), False (so does all that it calls).

        None and False are for all functions of the same code from then on.
        """
        code = function.__code__
        if code in self._plain:
            return None
        if is_import_machinery(code):
            return False  # a module's own code makes modules, classes and tables, once: none of it is the program
        if is_finalizer(code) or handles_a_signal(function):
            return False
        ledger = self.arguments[-1].ledger
        mark, marked = _users_mark(function)
        if mark is not None:
            if mark.kind in (MarkKind.DISABLED, MarkKind.SKIPPED):
                ledger.add(of_function(DISABLED_FUNCTION, marked, mark.reason or ""))
            if mark.kind is MarkKind.DISABLED:
                return _as_it_is(function) if self._one_more(code) else False
            return None
        if code.co_filename.startswith(_LEFT_ALONE) and not (self.finds_layers and _is_layer(code)):
            if code.co_filename.startswith(_TORCH):
                ledger.add(Event(LIBRARY_CODE, os.path.relpath(code.co_filename, os.path.dirname(_TORCH))))
            return False if code.co_filename.startswith(_OPERATORS) or _is_compiled_by_torch(code) else None
        if code.co_flags & _SUSPENDS or code.co_name in _COMPREHENSIONS:
            ledger.add(of_function(SUSPENDING_FRAME, function))
            return None
        if not self._one_more(code):
            text = f"{self._answered[code] - 1} functions of this code were captured, each with cells of its own"
            event = of_function(RECOMPILE_LIMIT, function, text)
            ledger.add(event)
            _log.warning("%s", event)
            return None
        return self.part(function, found=True).callable()

    def _one_more(self, code: types.CodeType) -> bool:
        """Whether another function of the code may have a callable of its own: the hook keeps them all."""
        self._answered[code] += 1
        options: CaptureOptions = self.arguments[2]
        return self._answered[code] <= _MOST_ALIKE * options.recompile_limit


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

    def run(inputs: list[object], *flat: object) -> object:
        args, kwargs = unflatten(function.__code__, flat)
        return function(*args, **kwargs)

    entry = as_written(run)
    return CompiledCallable(function, lambda compiled, flat: entry)


def _is_layer(code: types.CodeType) -> bool:
    """Whether it is the forward of a layer of torch's own."""
    return code.co_name == "forward" and code.co_filename.startswith(_LAYERS)


def _is_compiled_by_torch(code: types.CodeType) -> bool:
    """Whether it calls what torch.compile made: that compiler's work and what it makes are none of the program."""
    return code.co_name == "compile_wrapper" and code.co_filename == _TORCH_COMPILER


_MOST_ALIKE = 8  # times the limit of versions: functions of one code that are found where calls run for real
_MOST_OUTGROWN = 3  # times the limit of versions
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Their argument is an iterator, which capture may not advance; what they call is captured.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPERATORS = os.path.join(_TORCH, "_library", "")  # what it calls is the kernel of an operator: whole, as C++ ones are
_TORCH_COMPILER = os.path.join(_TORCH, "_dynamo", "eval_frame.py")
_LAYERS = os.path.join(_TORCH, "nn", "modules", "")
# Files whose functions are not captured on their own: Python's library, torch, NumPy, this package, generated code.
_LEFT_ALONE = (
    sysconfig.get_paths()["stdlib"] + os.sep,
    _TORCH,
    *numpy_values.FOLDER,
    os.path.dirname(__file__) + os.sep,
    "<",
)
