"""Captured frames that another process finds: guards, graph and generated function, without a capture.

A frame is kept under a key of what the call looks like, and holds by content whatever capture read: the objects that
guards compare by identity, with digests; what was read and taken for fixed; the code that was interpreted. It is taken
where all of that is the same here and every guard holds for the call. What has no such form is not kept, and a frame
that does not fit is left: the call is captured.
"""

from __future__ import annotations

import builtins
import dataclasses
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
from primtorch.interrupts import pass_on_interrupt
from primtorch.records import NotARecord, NotAsText, Records
from primtorch.withheld import COLLECTOR
from torchdynamo._C import GuardTree
from torchdynamo.after_break.resume import origin_of
from torchdynamo.emit.emitted import Emitted
from torchdynamo.emit.graph_inputs import GraphInput, takes_floats
from torchdynamo.function import Function
from torchdynamo.guards.global_state import global_state
from torchdynamo.guards.guard_table import print_guards
from torchdynamo.kept import graphs
from torchdynamo.kept.contents import Contents, NotKept, code_digest
from torchdynamo.kept.names import Finder, Namer, module_of
from torchdynamo.kept.rows import Named, Reader, Row, Writer, is_plain
from torchdynamo.marks import marks_objects, region
from torchdynamo.outside.externals import is_trusted_module, outside_graphs
from torchdynamo.outside.outside import Outside
from torchdynamo.schemas import GlobalState
from torchdynamo.size_marks import size_marks
from torchdynamo.sources import Scope, Source, own_dict, resolve

_log = logging.getLogger("torchdynamo")

FORMAT = 1
MOST_FRAMES = 4  # under one key


@dataclasses.dataclass(frozen=True, slots=True)
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


_RECORDS = Records((KeptFrame, Named, GlobalState, *graphs.CLASSES), codecs=graphs.CODECS)


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
            return KeptCall(self.texts, state, flat, _key(state, flat))
        except NotKept:  # code that holds any objects
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class KeptCall:
    """The frames of calls that look like one: kind, sizes and plain values of what is handed in.

    Attributes:
        key: says how the call looks.
    """

    texts: Texts
    state: Function
    flat: Sequence[object]
    key: str

    @COLLECTOR.off()
    def find(self) -> Emitted | None:
        """What another process captured of such a call, where all that it read is the same here."""
        contents, function = Contents(), self.state.function
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
                return _made(kept, function, self.flat, contents)
            except Exception as error:  # names that lead nowhere here, attributes that are gone
                pass_on_interrupt(error)
                _log.debug("a kept frame of %s does not fit: %s", function.__qualname__, error)
        return None

    @COLLECTOR.off()
    def written(self, emitted: Emitted, outside: Outside) -> str | None:
        """A captured frame as text; None where it means something in this process alone, or for what captures of the
        call have taught."""
        function = self.state.function
        if not _is_plain_call(self.state):
            return None
        try:
            return _RECORDS.text(_written(function, emitted, outside))
        except (NotKept, NotAsText) as error:
            _log.debug("the frame of %s is not kept: %s", function.__qualname__, error)
            return None

    def keep(self, text: str) -> None:
        """Keeps a frame's text beside the others of its key, or in the place of one."""
        names = [f"{self.key}.frame_{place}" for place in range(MOST_FRAMES)]
        free = (name for name in names if self.texts.find(name) in (None, text))
        self.texts.keep(next(free, names[int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % MOST_FRAMES]), text)


# -- which calls -------------------------------------------------------------------------------


def _is_plain_call(state: Function) -> bool:
    """Whether nothing but the program and its arguments has a say in how the call is captured."""
    learnt = (state.changed, state.fixed, state.shared, state.unread, state.plain_texts, state.read_lengths)
    switched = state.breaks_at_data or state.asks_data or state.guards_floats or state.lazy or state.unrolls
    switched = switched or (state.nested is not None and bool(state.nested.loops))
    talks = dist.is_available() and dist.is_initialized()
    marked = marks_objects() or region().errors is not None
    modes = torch._C._len_torch_function_stack()
    return not (any(learnt) or switched or modes or talks or marked) and origin_of(state.function) is None


def _key(state: Function, flat: Sequence[object]) -> str:
    """What a call looks like, cheaply: a frame that is found under it is held to all the rest."""
    function = state.function
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    parts = (
        FORMAT, function.__module__, function.__qualname__, code_digest(function.__code__), state.options,
        takes_floats(state.backend), global_state(), torch.get_num_threads(),
        [_looks(value, 0) for value in (*flat, *cells)],
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def _looks(value: Any, depth: int) -> object:
    """Kinds, sizes and plain values of what is handed in."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if kind not in (torch.Tensor, nn.Parameter) or outside_graphs(value):
            return kind.__qualname__
        return value.dtype, tuple(value.shape), value.stride(), value.requires_grad, str(value.device)
    if isinstance(value, nn.Module):
        return _module_looks(value, depth)
    if is_plain(value):
        return repr(value)
    if depth < _DEEPEST and kind in (tuple, list):
        return kind.__name__, [_looks(item, depth + 1) for item in value[:_MOST_ITEMS]]
    if depth < _DEEPEST and kind is dict:
        return "dict", [(_looks(k, depth + 1), _looks(v, depth + 1)) for k, v in list(value.items())[:_MOST_ITEMS]]
    return kind.__module__, kind.__qualname__


def _module_looks(module: nn.Module, depth: int) -> object:
    """A module's class and those within it, with their parameters: none of the program's code is asked."""
    kind, own = type(module), own_dict(module) or {}
    parameters: Any = own.get("_parameters") or {}
    modules: Any = own.get("_modules") or {}
    held = [(name, _looks(parameter, depth)) for name, parameter in parameters.items()]
    within = [(name, _module_looks(child, depth)) for name, child in modules.items() if child is not None]
    return kind.__module__, kind.__qualname__, own.get("training"), held, within


_EMPTY = types.CellType()
_DEEPEST = 3
_MOST_ITEMS = 64


# -- a frame as a record -----------------------------------------------------------------------


def _written(function: types.FunctionType, emitted: Emitted, outside: Outside) -> KeptFrame:
    externals = outside.externals
    if externals.unkept:
        raise NotKept(externals.unkept)
    if emitted.graph_break is not None or emitted.communicates or outside.shape_env.symbols:
        raise NotKept("it goes on behind a break, talks to other processes, or has sizes that are symbols")
    if any(size_marks(tensor) for _, tensor, _ in outside.tensors) or any(i.source is None for i in emitted.inputs):
        raise NotKept("its sizes are marked, or its inputs computed")
    if _ADDRESS in emitted.text:
        raise NotKept("an address is written into it")
    _hold_builtins(function)

    def reached(obj: object) -> Sequence[Source]:
        known = externals.by_original.get(id(obj))
        return () if known is None or known.original is not obj else tuple(known.sources)

    contents = Contents()
    namer = Namer(function, emitted.guards, reached, emitted.pinned, contents)
    writer = Writer(namer.place, emitted.pinned)
    namer.source = writer.source
    pins = [namer.place(obj) for obj in emitted.pinned]
    guards = [writer.guard(guard) for guard in emitted.guards]
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
    inputs = [writer.source(item.source) for item in emitted.inputs if item.source is not None]
    absent = list(map(list, dict.fromkeys(map(_absence, outside.namespaces.absent))))
    own = sorted(_as_python_has(name, value) for name, value in outside.builtins.items())
    return KeptFrame(
        namer.rows, namer.digests, writer.frames, writer.stacks, writer.sources, pins, guards,
        fixed, own, absent, answers, codes, inputs, graph,
        "" if emitted.graph is None else type(emitted.graph).__name__, emitted.text, emitted.module,
        list(emitted.written), [state.name for state in emitted.states],
    )  # fmt: skip


def _as_python_has(name: str, value: Any) -> str:
    """A builtin's name. Raises NotKept where the program has put something else in its place."""
    made_by_python = isinstance(value, (type, types.BuiltinFunctionType)) and value.__module__ == "builtins"
    own = made_by_python and value.__name__ in (name, *_OTHER_NAMES.get(name, ()))
    if not own and not any(value is constant for constant in _CONSTANTS):
        raise NotKept(f"builtins.{name} is not Python's own")
    return name


def _absence(missed: tuple[dict[str, object], str]) -> tuple[str, str]:
    """[module, name] of a name that a module's globals lack."""
    namespace, name = missed
    module = module_of(namespace)
    if module is None:
        raise NotKept(f"{name} is missing where no module is")
    return module, name


def _hold_builtins(function: types.FunctionType) -> None:
    """Raises NotKept where a function finds other builtins than Python's module of them has."""
    if function.__builtins__ is not vars(builtins):  # type: ignore[attr-defined]
        raise NotKept(f"{function.__qualname__} has builtins of its own")


_CONSTANTS = (True, False, None, NotImplemented, ..., __debug__)
_OTHER_NAMES = {"IOError": ("OSError",), "EnvironmentError": ("OSError",)}
_ADDRESS = " at 0x"


def _made(kept: KeptFrame, function: types.FunctionType, flat: Sequence[object], contents: Contents) -> Emitted:
    """The frame of this process's objects. Raises whatever says that it does not fit."""
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

    finder = Finder(function, at, contents)
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
    guards = tuple(map(reader.guard, kept.guards))
    held = [finder.objects[place] for place in kept.pins]
    sources = [reader.sources[place] for place in kept.inputs]
    tree = GuardTree(guards, sources, function, held)
    inputs = tree.check(flat)
    if inputs is None:
        failing = tree.explain(flat)
        told = guards if failing is None else guards[failing : failing + 1]
        raise NotKept(f"a guard does not hold: {print_guards(told)}")
    if any(size_marks(tensor) for tensor in inputs):
        raise NotKept("sizes are marked")
    graph = None
    if kept.graph is not None:
        texts = [source.expression() for source in sources]
        graph = graphs.made(kept.graph, reader, inputs, texts, kept.title)
    for _, place, _ in kept.codes:
        _hold_builtins(finder.objects[place])
    states = {state.name: state for state in AMBIENT}
    return Emitted(
        guards, held, graph, [GraphInput(*pair) for pair in zip(inputs, sources, strict=True)], kept.text, kept.module,
        None, tuple(kept.written), tuple(states[name] for name in kept.states), False,
        tuple((module, finder.code(place, way)) for module, place, way in kept.codes), tree,
    )  # fmt: skip


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
