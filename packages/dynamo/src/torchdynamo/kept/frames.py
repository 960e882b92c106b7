"""Captured frames that another process finds: guards, graph and generated function, without a capture.

A frame is kept under a key of what the call looks like, and holds by content whatever capture read: the objects that
guards compare by identity, with digests; what was read and taken for fixed; the code that was interpreted. It is taken
where all of that is the same here and every guard holds for the call. What has no such form is not kept, and a frame
that does not fit is left: the call is captured.
"""

from __future__ import annotations

import builtins
import hashlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from primtorch.ambient import AMBIENT
from primtorch.frozen import record
from primtorch.interrupts import pass_on_interrupt
from primtorch.records import NotARecord, NotAsText, Records
from primtorch.symbolic import Learnt
from primtorch.symbolic.codecs import RECORDS as SYMBOLIC
from primtorch.withheld import COLLECTOR
from torchdynamo._C import GuardTree
from torchdynamo.after_break.resume import origin_of
from torchdynamo.emit.emitted import Emitted
from torchdynamo.emit.graph_inputs import GraphInput, takes_floats
from torchdynamo.function import Function
from torchdynamo.guards.global_state import global_state
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.interpreter.iterators import LocalIterator
from torchdynamo.kept import graphs, symbols
from torchdynamo.kept.contents import Contents, NotKept, code_digest
from torchdynamo.kept.continuations import Continuations
from torchdynamo.kept.names import Finder, Namer, module_of
from torchdynamo.kept.rows import Named, Reader, Row, Writer, is_plain
from torchdynamo.kept.symbols import KnownSymbols
from torchdynamo.kept.taught import Taught, teach
from torchdynamo.marks import mark_of, marks_modules, marks_objects, region
from torchdynamo.outside.externals import is_trusted_module, outside_graphs
from torchdynamo.outside.one_process import Answer, is_builtin, is_of_settings
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import OF_EACH_LENGTH
from torchdynamo.schemas import GlobalState, GraphBreak, Guard, GuardKind
from torchdynamo.size_marks import size_marks
from torchdynamo.sources import Pinned, Scope, Source, own_dict, resolve

_log = logging.getLogger("torchdynamo")

FORMAT = 4
MOST_FRAMES = 8  # under one key


@record
class KeptFrame:
    """A captured frame. Tables of rows: see `Writer`, `Namer`, `graphs.written`.

    Attributes:
        names, digests: of the objects that the rest speaks of.
        pins: by place among what the generated function holds, the object's place among the names.
        fixed: [source, digest] of what was read without a guard.
        builtins: names that the program read as Python has them.
        absent: [module, name] of what the program missed in modules that no guard asks.
        answers: [function, arguments, answer] of torch's questions about the process.
        codes: [module, function, way] of the code that was interpreted.
        states: names of what the graph switches.
        graph_break: [reason, detail, stack] of what ends the graph; empty where nothing does.
        taught: what the capture has taught of the function (`taught.Taught`).
        learnt, read, promised: of numbers that are known at each call alone (`symbols.written`).
        marks: [source, marks of sizes] of tensors that have some (`symbols.marks_of`).
        marked: [source, kind, reason] of modules that the program has marked. Functions' digests tell of theirs.
    """

    names: list[Row]
    digests: list[str]
    frames: list[Row]
    stacks: list[Row]
    sources: list[Row]
    pins: list[int]
    guards: list[Row]
    fixed: list[Row]
    builtins: list[str]
    absent: list[Row]
    answers: list[Row]
    codes: list[Row]
    inputs: list[int]
    graph: list[Row] | None
    title: str
    text: str
    module: str | None
    written: list[int]
    states: list[str]
    graph_break: Row
    taught: Row
    learnt: Learnt
    read: list[Row]
    promised: list[Row]
    marks: list[Row]
    marked: list[Row]


_RECORDS = Records(
    (KeptFrame, Named, GlobalState, *graphs.CLASSES, *SYMBOLIC), codecs=graphs.CODECS, shared=(graphs.Value,)
)


class Texts(Protocol):
    """Where the texts of frames are kept, by key."""

    def find(self, key: str) -> str | None:
        """The text of a key."""

    def keep(self, key: str, text: str) -> None:
        """Keeps a text."""

    def refuse(self, key: str, why: str) -> None:
        """Leaves a text out that says nothing."""


class KeptFrames:
    """The frames that back ends of one kind share with other processes.

    Args:
        texts: where they are.
    """

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def of_call(self, state: Function, flat: Sequence[object]) -> KeptCall | None:
        """The frames of calls that look like this one, before it is captured; None where none are kept of it."""
        if not _is_plain_call(state):
            return None
        try:
            taught = Taught.to(state)
            return KeptCall(self.texts, state, flat, _key(state, flat, taught), taught)
        except NotKept:  # code that holds any objects
            return None


@record
class KeptCall:
    """The frames of calls that look like one: kind, sizes and plain values of what is handed in.

    Attributes:
        key: says how the call looks.
        taught: what earlier captures have taught.
    """

    texts: Texts
    state: Function
    flat: Sequence[object]
    key: str
    taught: Taught

    @COLLECTOR.off()
    def find(self) -> Emitted | None:
        """What another process captured of such a call, where all that it read is the same here."""
        contents = Contents()
        for place in range(MOST_FRAMES):
            name = f"{self.key}.frame_{place}"
            text = self.texts.find(name)
            if text is None:
                return None
            try:
                kept = _RECORDS.value(text)
            except NotARecord as error:
                self.texts.refuse(name, str(error))
                continue
            if not isinstance(kept, KeptFrame):
                self.texts.refuse(name, "it is no frame")
                continue
            try:
                return _made(kept, self.state, self.flat, contents)
            except Exception as error:  # names that lead nowhere here, attributes that are gone
                pass_on_interrupt(error)
                _log.debug("a kept frame of %s does not fit: %s", self.state.function.__qualname__, error)
        return None

    @COLLECTOR.off()
    def written(self, emitted: Emitted, outside: Outside) -> str | None:
        """A captured frame as text; None where it means something in this process alone."""
        if not _is_plain_call(self.state):
            return None
        try:
            return _RECORDS.text(_written(self.state, self.taught, emitted, outside))
        except (NotKept, NotAsText) as error:
            _log.debug("the frame of %s is not kept: %s", self.state.function.__qualname__, error)
            return None

    def keep(self, text: str) -> None:
        """Keeps a frame's text beside the others of its key, or in the place of one."""
        names = [f"{self.key}.frame_{place}" for place in range(MOST_FRAMES)]
        free = (name for name in names if self.texts.find(name) in (None, text))
        self.texts.keep(next(free, names[int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % MOST_FRAMES]), text)


# -- which calls -------------------------------------------------------------------------------


def _is_plain_call(state: Function) -> bool:
    """Whether nothing but the program and its arguments has a say in how the call is captured."""
    talks = dist.is_available() and dist.is_initialized()
    marked = marks_objects() or region().errors is not None
    modes = torch._C._len_torch_function_stack()
    return not (modes or talks or marked)


def _key(state: Function, flat: Sequence[object], taught: Taught) -> str:
    """What a call looks like, cheaply: a frame that is found under it is held to all the rest. Of numbers that may be
    symbols it says nothing: one frame is for all of them."""
    function, options = state.function, state.options
    opens = options.dynamic is not False and (options.dynamic is True or bool(taught.sources["changed"]))
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    parts = (
        FORMAT, function.__module__, function.__qualname__, code_digest(function.__code__), state.options,
        takes_floats(state.backend), global_state(), torch.get_num_threads(),
        [_looks(value, 0, opens) for value in (*flat, *cells)], taught.text(state),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def _looks(value: Any, depth: int, opens: bool) -> object:
    """Kinds, sizes and plain values of what is handed in; not of numbers and texts where that `opens` a frame."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if kind not in (torch.Tensor, nn.Parameter) or outside_graphs(value):
            return kind.__qualname__
        marks = sorted((dim, repr(mark)) for dim, mark in size_marks(value).items())
        fixed = kind is nn.Parameter or not (opens or marks)
        sizes = (tuple(value.shape), value.stride()) if fixed else value.dim()
        return value.dtype, sizes, value.requires_grad, str(value.device), marks
    if isinstance(value, nn.Module):
        return _module_looks(value, depth)
    if opens and kind in (int, float, str):
        return kind.__name__
    if is_plain(value):
        return repr(value)
    if _is_continuation(value):  # what goes on inside of another one
        return code_digest(value.__code__)
    if depth < _DEEPEST and kind in (tuple, list):
        items = [(before, item) for before, item in zip((None, *value), value, strict=False)][:_MOST_ITEMS]
        deeper = [depth if _is_continuation(before) else depth + 1 for before, _ in items]  # each frame has a state
        looks = [_looks(item, at, opens) for (_, item), at in zip(items, deeper, strict=True)]
        return kind.__name__, looks
    if isinstance(value, LocalIterator) and not opens:  # of a loop that breaks in each round
        parts = [(name, getattr(value, name)) for name in kind.__slots__ if name != "world"]
        return kind.__name__, [(name, _looks(part, depth + 1, opens)) for name, part in parts if depth < _DEEPEST]
    if depth < _DEEPEST and kind is dict:
        items = list(value.items())[:_MOST_ITEMS]
        return "dict", [(_looks(k, depth + 1, False), _looks(v, depth + 1, opens)) for k, v in items]
    return kind.__module__, kind.__qualname__


def _is_continuation(value: object) -> bool:
    return type(value) is types.FunctionType and origin_of(value) is not None


def _module_looks(module: nn.Module, depth: int) -> object:
    """A module's class and those within it, with their parameters: none of the program's code is asked."""
    kind, own = type(module), own_dict(module) or {}
    parameters: Any = own.get("_parameters") or {}
    modules: Any = own.get("_modules") or {}
    held = [(name, _looks(parameter, depth, False)) for name, parameter in parameters.items()]
    within = [(name, _module_looks(child, depth)) for name, child in modules.items() if child is not None]
    return kind.__module__, kind.__qualname__, own.get("training"), held, within


_NOWHERE = -1  # the place of an input that generated code computes
_VALUE = 5  # the column of a graph's rows that says what a node gives
_EMPTY = types.CellType()
_DEEPEST = 3
_MOST_ITEMS = 64


# -- a frame as a record -----------------------------------------------------------------------


def _written(state: Function, before: Taught, emitted: Emitted, outside: Outside) -> KeptFrame:
    externals, function, graph_break = outside.externals, state.function, emitted.graph_break
    if externals.unkept:
        raise NotKept(externals.unkept)
    if emitted.communicates:
        raise NotKept("it talks to other processes")
    if graph_break is not None and graph_break.reason in OF_EACH_LENGTH:
        raise NotKept("it goes on with a round of a loop")
    if any(isinstance(one.example, torch.Tensor) and one.source is None for one in emitted.inputs):
        raise NotKept("a tensor is made of a number")
    if _ADDRESS in emitted.text or (graph_break is not None and _ADDRESS in graph_break.detail):
        raise NotKept("an address is written into it")
    _hold_builtins(function)

    def reached(obj: object) -> Sequence[Source]:
        known = externals.by_original.get(id(obj))
        return () if known is None or known.original is not obj else tuple(known.sources)

    contents = Contents()
    assert state.nested is not None
    namer = Namer(function, emitted.guards, reached, emitted.pinned, contents, Continuations(state.nested))
    writer = Writer(namer.place, emitted.pinned)
    namer.source = writer.source
    pins = [namer.place(obj) for obj in emitted.pinned]
    guards = [writer.guard(guard) for guard in emitted.guards if type(guard.payload) is not Answer]
    fixed = [[writer.source(source), contents.of(value)] for source, value in externals.fixed]
    answers = [
        [namer.place(asked), [writer.value(arg) for arg in args], writer.value(value)]
        for asked, args, value in outside.answers
    ]
    codes = []
    for module, code in emitted.programs:
        try:
            codes.append([module, *namer.code(code, module)])
        except NotKept:
            if not is_trusted_module(module):  # of torch and of Python their versions say what it is
                raise
    graph = None if emitted.graph is None else graphs.written(emitted.graph, writer)
    inputs = [_NOWHERE if item.source is None else writer.source(item.source) for item in emitted.inputs]
    learnt = symbols.written(outside, writer)
    marked = [(writer.source(source), symbols.marks_of(tensor)) for source, tensor, _ in outside.tensors]
    absent = list(map(list, dict.fromkeys(map(_absence, outside.namespaces.absent))))
    broke: Row = []
    if graph_break is not None:
        broke = [graph_break.reason, graph_break.detail, writer.stack(graph_break.user_frames)]
    taught = Taught.to(state).since(before, writer)
    own = sorted(_as_python_has(name, value) for name, value in outside.builtins.items())
    marked_modules = [(one.source, mark) for one in externals.by_original.values() if (mark := _mark(one.original))]
    return KeptFrame(
        namer.rows, namer.digests, writer.frames, writer.stacks, writer.sources, pins, guards,
        fixed, own, absent, answers, codes, inputs, graph,
        "" if emitted.graph is None else type(emitted.graph).__name__, emitted.text, emitted.module,
        list(emitted.written), [state.name for state in emitted.states], broke, taught,
        *learnt, [[place, marks] for place, marks in marked if marks],
        [[writer.source(source), *mark] for source, mark in marked_modules],
    )  # fmt: skip


def _as_python_has(name: str, value: Any) -> str:
    """A builtin's name. Raises NotKept where the program has put something else in its place."""
    if not is_builtin(name, value):
        raise NotKept(f"builtins.{name} is not Python's own")
    return name


def _absence(missed: tuple[dict[str, object], str]) -> tuple[str, str]:
    """[module, name] of a name that a module's globals lack."""
    namespace, name = missed
    module = module_of(namespace)
    if module is None:
        raise NotKept(f"{name} is missing where no module is")
    return module, name


def _mark(obj: object) -> Row:
    """[kind, reason] of a marked module; empty for anything else."""
    mark = mark_of(obj) if isinstance(obj, nn.Module) else None
    return [] if mark is None else [mark.kind.value, mark.reason]


def _hold_builtins(function: types.FunctionType) -> None:
    """Raises NotKept where a function finds other builtins than Python's module of them has."""
    if function.__builtins__ is not vars(builtins):  # type: ignore[attr-defined]
        raise NotKept(f"{function.__qualname__} has builtins of its own")


_ADDRESS = " at 0x"


def _made(kept: KeptFrame, state: Function, flat: Sequence[object], contents: Contents) -> Emitted:
    """The frame of this process's objects. Raises whatever says that it does not fit."""
    function = state.function
    assert state.nested is not None
    for name in kept.builtins:
        _as_python_has(name, vars(builtins)[name])
    if any(name in vars(sys.modules[module]) for module, name in kept.absent):
        raise NotKept("a name is there that was missing")
    _hold_builtins(function)
    finder: Finder
    reader: Reader
    pinned = _Places(lambda key: finder.objects[kept.pins[key]])
    scope = Scope(flat, function.__globals__, function.__closure__ or (), pinned, sys.modules)

    def at(place: int) -> object:
        for row in kept.sources[len(reader.sources) : place + 1]:
            reader.add_source(row)
        return resolve(reader.sources[place], scope)

    finder = Finder(function, at, contents, Continuations(state.nested))
    reader = Reader(kept.frames, kept.stacks, finder.objects, kept.pins)
    for row, digest in zip(kept.names, kept.digests, strict=True):
        finder.add(row, digest)
    for row in kept.sources[len(reader.sources) :]:
        reader.add_source(row)
    for asked, args, value in kept.answers:
        answer = finder.objects[asked](*map(reader.value, args))
        expected = reader.value(value)
        if answer is not expected and (type(answer) is not type(expected) or answer != expected):
            raise NotKept(f"{finder.objects[asked]} answers {answer!r}")
    for place, digest in kept.fixed:
        if contents.of(resolve(reader.sources[place], scope)) != digest:
            raise NotKept(f"{reader.sources[place].expression()} is another one")
    held = [finder.objects[place] for place in kept.pins]
    guards = (*map(reader.guard, kept.guards), *_asked_again(kept.answers, held, finder.objects, reader))
    sources = [reader.sources[place] if place != _NOWHERE else None for place in kept.inputs]
    tree = GuardTree(guards, [source for source in sources if source is not None], function, held)
    read = tree.check(flat)
    if read is None:
        failing = tree.explain(flat)
        told = guards if failing is None else guards[failing : failing + 1]
        raise NotKept(f"a guard does not hold: {print_guards(told)}")
    marks: dict[int, Row] = {row[0]: row[1] for row in kept.marks}
    marked = {*marks, *(place for place in kept.inputs if place != _NOWHERE)}
    if any(symbols.marks_of(resolve(reader.sources[place], scope)) != marks.get(place, []) for place in marked):
        raise NotKept("sizes are marked otherwise")
    if kept.marked or marks_modules():
        reached = [resolve(source, scope) for source in reader.sources]
        here = {id(obj): mark for obj in reached if (mark := _mark(obj))}
        if here != {id(reached[place]): mark for place, *mark in kept.marked}:
            raise NotKept("a module is marked otherwise")
    known = symbols.made(kept.learnt, kept.read, kept.promised, reader, lambda source: resolve(source, scope))
    inputs = _inputs(kept, iter(read), known)
    graph = None
    if kept.graph is not None:
        graph = graphs.made(kept.graph, reader, inputs, sources, known, kept.title)
    for _, place, _ in kept.codes:
        _hold_builtins(finder.objects[place])
    states = {switched.name: switched for switched in AMBIENT}
    graph_break = None
    if kept.graph_break:
        reason, detail, stack = kept.graph_break
        graph_break = GraphBreak(reason, detail, reader.stack(stack))
    teach(state, kept.taught, reader)
    return Emitted(
        guards, held, graph, [GraphInput(*pair) for pair in zip(inputs, sources, strict=True)], kept.text, kept.module,
        graph_break, tuple(kept.written), tuple(states[name] for name in kept.states), False,
        tuple((module, finder.code(place, way)) for module, place, way in kept.codes), known,
        len(known.shape_env.guards), tree,
    )  # fmt: skip


def _asked_again(rows: Sequence[Row], held: list[object], objects: Sequence[object], reader: Reader) -> Iterator[Guard]:
    """The guards of answers (`note_answer`), over functions that are held beside what the frame holds."""
    for place, args, answer in rows:
        asked: Any = objects[place]
        if asked is not issubclass and is_of_settings(asked):
            held.append(asked)
            payload = Answer(tuple(map(reader.value, args)), {}, reader.value(answer))
            yield Guard(Pinned(len(held) - 1, asked.__name__), GuardKind.PREDICATE, payload, ())


def _inputs(kept: KeptFrame, read: Iterator[Any], known: KnownSymbols) -> list[Any]:
    """What the graph takes: tensors that the guards have read, and numbers as symbols."""
    found = []
    for place, row in zip(kept.inputs, kept.graph or (), strict=False):
        example = next(read) if place != _NOWHERE else None
        value = row[_VALUE]
        found.append(example if value is None else known.bound(value.expr))
    return found


class _Places(Sequence[object]):
    """What is found by place, when it is asked for."""

    def __init__(self, found: Callable[[int], object]) -> None:
        self._found = found

    def __getitem__(self, key: Any) -> Any:
        return self._found(key)

    def __len__(self) -> int:
        raise TypeError("of no length")

    def __iter__(self) -> Iterator[object]:
        raise TypeError("of no order")
