"""One captured graph's compiled form, kept for other processes: an outline, and a program for each half.

The key is the content of the graph with all that decides what is made of it: metadata of its inputs, ambient state,
options, the versions of torch, Python and this stack's own source, and the processor or GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

import aotautograd
import primtorch
import torchdistributed
import torchdynamo
import torchinductor
from aotautograd import schemas
from aotautograd.schemas import BackwardGraph, BackwardOutline, Compiled, Outline, Shelved
from primtorch.frozen import record
from primtorch.higher_order import InvokeSubgraph
from primtorch.ledger import Ledger, own_line
from primtorch.records import NotARecord, NotAsText, Records
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import IntExpr, Learnt, ShapeEnv, learn, learnt_since, mark_of
from primtorch.symbolic.codecs import CODECS
from primtorch.symbolic.codecs import RECORDS as SYMBOLIC
from primtorch.withheld import COLLECTOR
from torchcompile import kept_backward
from torchcompile.journal import Kind
from torchcompile.kept_backward import KeptBackward
from torchcompile.options import CompileOptions
from torchcompile.signature import facts
from torchcompile.store import Store
from torchdynamo.errors import NotExportable
from torchdynamo.exported.targets import name_of
from torchdynamo.guards.global_state import global_state
from torchinductor import (
    Binaries,
    CompiledGraph,
    InductorError,
    KeptConstant,
    KeptGraph,
    KernelSource,
    codegen_for,
    facts_of,
    program,
)
from torchinductor.codegen.cpp.build import cpu_flags
from torchinductor.codegen.triton.writer import TritonSource
from torchinductor.schemas import Memory

FORMAT = 5
_OUTLINE = "outline"
_GRAPH = "backward_graph"
MOST_CASES = 4  # of one graph: sizes that a compilation told apart


LinedT = TypeVar("LinedT", program.Part, program.Require, program.Expect)


@record
class KeptOutline:
    """The outline of a graph, with what its compilation learnt of its symbols: it holds for examples of that case."""

    outline: Outline
    learnt: Learnt


_RECORDS = Records(
    (
        KeptGraph, KeptConstant, KernelSource, TritonSource, UserFrame, BackwardOutline, program.Program, program.Slot,
        program.TensorInput, program.SymbolInput, program.Alloc, program.Free,
        program.View, program.Claim, program.KernelCall, program.TritonCall, program.AtenCall, program.RandomSeed,
        program.ReadScalar, program.Require, program.Expect,
        program.Output, program.Part, Outline, schemas.ProgramMetadata, schemas.ViewStep, schemas.InputInfo,
        schemas.OutputKind, schemas.OutputInfo, schemas.ForwardOutput, schemas.GradientInfo, schemas.KeptMemory,
        schemas.SymbolSource, KeptOutline, Memory, *SYMBOLIC,
        *kept_backward.CLASSES,
    ),
    namespaces=kept_backward.NAMESPACES,
    codecs=(*CODECS, *kept_backward.CODECS),
    shared=(TensorSpec, UserFrame, IntExpr),
)  # fmt: skip

# Options that say nothing of what is made.
_ELSEWHERE = frozenset(
    {
        "cache", "keep_frames", "cxx", "dump", "recompile_limit", "on_recompile", "strict", "minify_on_error",
        "progress", "never_slower",
    }
)  # fmt: skip
_PACKAGES: tuple[ModuleType, ...] = (primtorch, aotautograd, torchdynamo, torchinductor, torchdistributed)


def key_of(gm: fx.GraphModule, rows: Hashable | None, options: CompileOptions) -> str | None:
    """What a captured graph is, whichever process and machine captures it; None where its compiled form is not kept: it
    holds objects or functions of the program's own, or every stage is asked to run.

    rows: its signature.
    """
    if options.cache is None or options.dump is not None or options.verify or options.check_kernels:
        return None
    if not isinstance(rows, tuple) or torch._C._len_torch_function_stack():
        return None
    devices: set[torch.device] = set()
    settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in _ELSEWHERE}
    known = facts(gm)
    text = [str(FORMAT), str(torch.get_num_threads()), repr(settings), repr(global_state()), repr(known)]
    text.append(str(torch.are_deterministic_algorithms_enabled()))
    for node in _nodes(gm):
        value = node.meta.get("val")
        if node.op == "placeholder":
            if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
                return None
            if isinstance(value, torch.Tensor):
                text.append(f"{value.is_leaf} {type(value).__name__} {getattr(value, '_is_param', False)}")
        if isinstance(value, torch.Tensor):
            devices.add(value.device)
        if node.op == "call_function":
            try:
                text.append(node.target.name if isinstance(node.target, InvokeSubgraph) else name_of(node.target))
            except NotExportable:
                return None
            if isinstance(node.target, OpOverload) and node.target.namespace != "aten":
                return None
    for device_type in sorted({device.type for device in devices}):
        held = facts_of(device_type)
        if held is None or not _is_own(device_type):
            return None
        text.append(f"{device_type} {dict(held)}")
    for row in rows[2 + len(known) :]:
        text.append(repr(_texts(row)))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:40]


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the regions that it calls."""
    for node in gm.graph.nodes:
        yield node
        if isinstance(node.target, InvokeSubgraph):
            (body,) = node.target.bodies
            assert isinstance(body, fx.GraphModule)
            yield from _nodes(body)


def _texts(row: object) -> object:
    """A row of a graph's signature without what no other process knows: its target, unless that is a region."""
    if isinstance(row, tuple):
        return [_texts(part) for part in row]
    return row if isinstance(row, (str, int)) else ""


def cache_key(content: str) -> str:
    """The key of a captured graph's compiled form in the folder that processes share."""
    return hashlib.sha256(f"{_stack()}\n{content}".encode()).hexdigest()[:40]


def _is_own(device_type: str) -> bool:
    """Whether the kernels of a device are made by this stack, and not by somebody's back end for it."""
    return type(codegen_for(device_type)).__module__.partition(".")[0] == torchinductor.__name__


@functools.cache
def _stack() -> str:
    """Versions, the processor, and the state of this stack's own files."""
    roots = [os.path.dirname(str(package.__file__)) for package in (*_PACKAGES, sys.modules["torchcompile"])]
    files = hashlib.sha256(repr([sorted(_files(root)) for root in roots]).encode())
    system = (platform.system(), platform.release(), platform.machine(), *platform.libc_ver())
    parts = (torch.__version__, torch.version.git_version, sys.version, *system, cpu_flags())
    return "\n".join((*map(str, parts), files.hexdigest()))


def _files(root: str) -> list[tuple[str, int, int]]:
    """Python's files and libraries beneath a folder, each with its size and time."""
    rows, folders = [], [root]
    for folder in folders:  # which grows
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".so")):
                    found = entry.stat()
                    rows.append((entry.path[len(root) :], found.st_size, found.st_mtime_ns))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return rows


@dataclass(slots=True)
class Kept:
    """A captured graph that was compiled, or found compiled.

    Attributes:
        title: its name in the report.
        content: see `key_of`.
        parts: of its compiled form, those that were kept or found, by content and name.
        refused: what of it has no form as text.
    """

    title: str
    content: str | None
    parts: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether there is an outline, which says that the forward is there."""
        return any(name.startswith(f"{self.content}.{_OUTLINE}") for name in self.parts)


class Brought(Protocol):
    """Compiled forms that came with a file (`torchcompile.load`)."""

    binaries: Binaries

    def find(self, name: str) -> str | None:
        """The text of a part, by the graph's content and the part's name; of a frame, by its key."""

    def lacks(self, title: str, ledger: Ledger) -> None:
        """A graph, or a half of it, is not in the file: it is to be compiled.

        Raises:
            ArtifactMismatch: that was not asked for.
        """


class ProgramShelf:
    """Where a captured graph's compiled form is kept.

    Args:
        kept: is told which parts there are.
        missing: is called where something has to be compiled.
        brought: is asked first.
        load: makes a kept graph run, as the compiler would: ("forward", "backward" or "inference", the graph).
        quiet: whether nothing was told to the ledger since compilation began; what was is to be told again.
        lines: of each node of the captured graph. What is kept names them by the node: in another process the same
            program may stand elsewhere.
        env: of the graph's symbols.
    """

    def __init__(
        self,
        store: Store,
        kept: Kept,
        load: Callable[[Kind, KeptGraph], Compiled],
        quiet: Callable[[], bool],
        lines: Sequence[UserFrame | None],
        missing: Callable[[], None],
        brought: Brought | None = None,
        env: ShapeEnv | None = None,
    ) -> None:
        assert kept.content is not None
        self.store = store
        self.kept = kept
        self.missing = missing
        self.brought = brought
        self.content = kept.content
        self.env = env
        self.mark = mark_of(env) if env is not None else None
        self.known = self.mark
        self.case = kept.content  # under which the forward and the backward that run are kept
        self.read: dict[str, str] = {}  # outlines as text
        self.load = load
        self.quiet = quiet
        self.by_place = {UserFrame("", place, ""): line for place, line in enumerate(lines) if line is not None}
        self.places = {line: place for place, line in self.by_place.items()}

    def find(self) -> Shelved | None:
        """What another process compiled for this graph, ready to run; where there is nothing, `missing` is called."""
        found = self._find()
        if found is None:
            self.missing()
        return found

    def _find(self) -> Shelved | None:
        for name in self._outlines():
            found = self._read(self.content, name, KeptOutline)
            if not isinstance(found, KeptOutline) or not self._is_case(found.learnt):
                continue
            kind: Kind = "forward" if found.outline.metadata.needs_backward else "inference"
            forward = self._loaded(kind)
            if forward is None or (kind == "forward" and self._text(self.case, _GRAPH) is None):
                return None
            self.kept.parts[f"{self.content}.{name}"] = self.read[name]
            return Shelved(found.outline, forward, self._backward, self._graph)
        return None

    @COLLECTOR.off()
    def _backward(self, missing: tuple[int, ...]) -> tuple[BackwardOutline, Compiled] | None:
        found = self._find_backward(missing)
        if found is None:
            self.missing()
        return found

    def _find_backward(self, missing: tuple[int, ...]) -> tuple[BackwardOutline, Compiled] | None:
        outline = self._read(self.case, _part("backward_outline", missing), BackwardOutline)
        if not isinstance(outline, BackwardOutline):
            return None
        compiled = self._loaded("backward", _part("backward", missing))
        return None if compiled is None else (outline, compiled)

    def _graph(self, env: ShapeEnv | None) -> BackwardGraph:
        kept = self._read(self.case, _GRAPH, KeptBackward)
        assert isinstance(kept, KeptBackward), "the text was there when the forward was found"
        return kept_backward.made(kept.told(self.by_place), env)

    def keep(self, outline: Outline, graph: BackwardGraph | None, forward: Compiled) -> None:
        """Writes the forward, the graph of its backward and its outline, under the case that tracing learnt of symbolic
        sizes."""
        learnt = learnt_since(self.env, self.mark) if self.env is not None and self.mark is not None else Learnt()
        if learnt is None:
            return
        name = self._place(learnt)
        if name is None:
            return
        learnt = _asserted_at(learnt, self.places)
        try:
            self._now(learnt)
        except NotAsText as error:
            self.kept.refused = str(error)
            return
        if graph is not None and not self._keep_graph(graph):
            return
        kind = "forward" if outline.metadata.needs_backward else "inference"
        if self._write(self.case, kind, kept_of(forward)):  # the outline last: it says that the others are there
            self._write(self.content, name, KeptOutline(outline, learnt))

    def _keep_graph(self, graph: BackwardGraph) -> bool:
        try:
            kept = kept_backward.written(graph, self.places)
        except NotAsText as error:
            self.kept.refused = str(error)
            return False
        return self._write(self.case, _GRAPH, kept)

    @COLLECTOR.off()
    def keep_backward(self, missing: tuple[int, ...], outline: BackwardOutline, backward: Compiled) -> None:
        """Writes the backward of calls that lack these tangents, where it was compiled for the forward's case."""
        if self.env is not None and mark_of(self.env) != self.known:
            return  # the backward was compiled for less than the forward's case
        if self._write(self.case, _part("backward", missing), kept_of(backward)):
            self._write(self.case, _part("backward_outline", missing), outline)

    # -- cases: one graph, compiled for sizes that its compilation told apart -----------------------

    def _outlines(self) -> Sequence[str]:
        """Names of the outlines of a graph's cases; a graph without symbols has one."""
        return [_OUTLINE, *(f"{_OUTLINE}_{number}" for number in range(1, MOST_CASES) if self.env is not None)]

    def _place(self, learnt: Learnt) -> str | None:
        """Where the outline of a case is kept; None where there are too many."""
        for name in self._outlines():
            found = self._read(self.content, name, KeptOutline)
            if not isinstance(found, KeptOutline) or found.learnt == learnt:
                return name
        return None

    def _is_case(self, learnt: Learnt) -> bool:
        """Whether the example is of this case; the graph's environment learns it then."""
        if self.env is not None and not learn(self.env, _asserted_at(learnt, self.by_place)):
            return False
        self._now(learnt)
        return True

    def _now(self, learnt: Learnt) -> None:
        """What is read and kept from now on is of this case."""
        self.case = self.content
        if learnt != Learnt():
            case = _RECORDS.text(dataclasses.replace(learnt, frames=()))
            self.case = hashlib.sha256(f"{self.content}\n{case}".encode()).hexdigest()[:40]
        self.known = mark_of(self.env) if self.env is not None else None

    # -- parts as text -------------------------------------------------------------------------------

    def _write(self, content: str, part: str, record: object) -> bool:
        if record is None or not self.quiet():
            return False
        if isinstance(record, KeptGraph):
            record = _told(record, self.places)
        try:
            text = _RECORDS.text(record)
        except NotAsText as error:
            self.kept.refused = str(error)
            return False
        self.store.keep(f"{cache_key(content)}.{part}", text)
        self.kept.parts[f"{content}.{part}"] = text
        return True

    def _text(self, content: str, part: str) -> str | None:
        text = self.brought.find(f"{content}.{part}") if self.brought is not None else None
        if text is None:
            text = self.store.find(f"{cache_key(content)}.{part}")
        if text is not None and not part.startswith(_OUTLINE):  # of one case out of several
            self.kept.parts[f"{content}.{part}"] = text
        return text

    def _read(self, content: str, part: str, kind: type) -> object:
        text = self.kept.parts.get(f"{content}.{part}") or self._text(content, part)
        if text is None:
            return None
        try:
            record = _RECORDS.value(text)
        except NotARecord as error:
            self.store.refuse(f"{cache_key(content)}.{part}", str(error))
            return None
        if not isinstance(record, kind):
            return None
        if kind is KeptOutline:
            self.read[part] = text
        return record

    def _loaded(self, kind: Kind, part: str = "") -> Compiled | None:
        graph = self._read(self.case, part or kind, KeptGraph)
        if not isinstance(graph, KeptGraph):
            return None
        try:
            return self.load(kind, _told(graph, self.by_place))
        except InductorError:  # no compiler, say: what compiles the graph tells of it
            return None


class FrameTexts:
    """Frames as text (`torchdynamo.KeptFrames`): in the folder of compiled programs, or those that came with a file.

    Attributes:
        used: those that were found or kept, for `torchcompile.save`.
    """

    def __init__(self, cache: str, brought: Brought | None) -> None:
        self.store = Store(cache)
        self.brought = brought
        self.used: dict[str, str] = {}

    def find(self, key: str) -> str | None:
        """The text of a key."""
        text = self.store.find(self._name(key)) if self.brought is None else self.brought.find(key)
        if text is not None:
            self.used[key] = text
        return text

    def keep(self, key: str, text: str) -> None:
        """Keeps a text. What is captured beside a file goes into the next one that is saved."""
        self.used[key] = text
        if self.brought is None:
            self.store.keep(self._name(key), text)

    def refuse(self, key: str, why: str) -> None:
        """Leaves an entry out, and tells of it."""
        self.used.pop(key, None)
        if self.brought is None:
            self.store.refuse(self._name(key), why)

    def _name(self, key: str) -> str:
        content, _, part = key.partition(".")
        return f"{cache_key(content)}.{part}"


def frames_are_kept(backend: object, options: CompileOptions) -> bool:
    """Whether captured frames are kept for other processes: where the programs are, and nothing asks for each stage."""
    asks = options.dump is not None or options.verify or options.check_kernels or options.minify_on_error
    return backend == "inductor" and options.keep_frames and options.cache is not None and not asks


def read_graph(text: str) -> KeptGraph | None:
    """A kept graph, where a part's text is of one."""
    record = _RECORDS.value(text)
    return record if isinstance(record, KeptGraph) else None


def lines_of(gm: fx.GraphModule) -> list[UserFrame | None]:
    """The user's line behind each node."""
    return [own_line(node.meta.get("stack", ())) for node in gm.graph.nodes]


def _told(graph: KeptGraph, lines: Mapping[UserFrame, UserFrame]) -> KeptGraph:
    """The graph with other words for the user's lines; a line that has none is left out."""
    made = graph.program
    parts = tuple(_with_lines(part, lines) for part in made.parts)
    instructions = tuple(_instruction_told(i, lines) for i in made.instructions)
    return dataclasses.replace(graph, program=dataclasses.replace(made, parts=parts, instructions=instructions))


def _instruction_told(instruction: program.Instruction, lines: Mapping[UserFrame, UserFrame]) -> program.Instruction:
    match instruction:
        case program.Require():
            return _with_lines(instruction, lines)
        case program.Expect():
            return _with_lines(instruction, lines)
    return instruction


def _asserted_at(learnt: Learnt, lines: Mapping[UserFrame, UserFrame]) -> Learnt:
    """The same with other words for the lines that assert something."""
    found = (own_line([frame for frame in frames if frame in lines]) for frames in learnt.frames)
    return dataclasses.replace(learnt, frames=tuple((lines[line],) if line is not None else () for line in found))


def _with_lines(record: LinedT, lines: Mapping[UserFrame, UserFrame]) -> LinedT:
    return dataclasses.replace(record, frames=tuple(lines[frame] for frame in record.frames if frame in lines))


def kept_of(compiled: Compiled) -> KeptGraph | None:
    """What can be kept of what a compiler gave."""
    graph: CompiledGraph | None = getattr(compiled, "graph", None)
    return graph.kept if graph is not None else None


def _part(name: str, missing: Sequence[int]) -> str:
    return "_without_".join((name, "_".join(map(str, missing)))) if missing else name
