"""The way of a captured graph through a mixture: joint graph, halves, pieces, and each piece to its back end."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

import torchinductor
from aotautograd import run_graph
from aotautograd.lowering import drawing_operators
from aotautograd.schemas import Opset
from primtorch.frozen import record
from primtorch.ledger import Event, warn_of
from primtorch.lower import lower
from primtorch.printing import graph_text
from torchcompile import backends
from torchcompile.backends import Backend, Inputs, Job, Runner, Toolchain
from torchcompile.capability import Capability, Stage, everything
from torchcompile.errors import InvalidArgument
from torchcompile.events import PIECE_MENDED
from torchcompile.journal import Kind, PieceRecord
from torchcompile.mixture.pieces import Part, name_sizes, part_of
from torchcompile.mixture.placement import HOST, NoBackend, Piece, is_number, operator_name, place
from torchcompile.mixture.running import HeldToGraph, MixedGraph, Run
from torchcompile.options import CompileOptions

HOST_NAME = "PyTorch"


@record
class Member:
    """One back end of a mixture. `theirs`: what was registered; None for this stack's own."""

    name: str
    capability: Capability
    theirs: Backend | None


def is_mixture(backend: object) -> bool:
    """Whether `compile(backend=...)` was given several back ends, or one that declares what it takes."""
    if isinstance(backend, (list, tuple)):
        return True
    return isinstance(backend, str) and backends.REGISTERED.capability(backend) is not None


def resolve(given: Any, toolchain: Toolchain) -> Backend:
    """The back end for a mixture.

    Raises:
        InvalidArgument: one of them is unknown or declares nothing; they take graphs of different stages.
    """
    names = [given] if isinstance(given, str) else list(given)
    members = tuple(map(_member, names))
    if not members or len({member.name for member in members}) < len(members):
        raise InvalidArgument(f"a mixture names at least one back end, and each once, not {given!r}")
    stages: list[Stage] = [member.capability.stage for member in members if member.theirs is not None]
    if len(set(stages)) > 1:
        taken = ", ".join(f"{m.name} takes {m.capability.stage}" for m in members if m.theirs is not None)
        raise InvalidArgument(f"the back ends of a mixture take graphs of one stage: {taken}")
    if toolchain.options.cuda_graphs:
        raise InvalidArgument("a mixture is not replayed as CUDA graphs: leave cuda_graphs and its modes out")
    stage = stages[0] if stages else "prims"

    def backend(gm: fx.GraphModule, example_inputs: Inputs) -> Runner:
        compile = functools.partial(_compile, members, stage)
        return backends.compiled_once(toolchain, gm, example_inputs, compile)

    backend.takes_floats = all(getattr(m.theirs, "takes_floats", m.theirs is None) for m in members)  # type: ignore[attr-defined]
    return backend


def _member(name: object) -> Member:
    if isinstance(name, str) and name in backends.NAMED:
        return Member(name, Capability(everything), None)
    theirs = backends.REGISTERED.get(name) if isinstance(name, str) else None
    if theirs is None:
        known = ", ".join(backends.list_backends())
        raise InvalidArgument(f"a mixture is made of names of back ends ({known}), not {name!r}")
    capability = backends.REGISTERED.capability(str(name))
    if capability is None:
        raise InvalidArgument(
            f"back end {name!r} does not say what it takes: register it with capability=torchcompile.Capability(...)"
        )
    return Member(str(name), capability, theirs)


class _Theirs(Exception):
    """Carries an error of a registered back end past what mends errors of this stack's own."""


def _compile(members: Sequence[Member], stage: Stage, job: Job, inputs: Inputs) -> Runner:
    prims = stage == "prims"

    def compiler(kind: Kind) -> Backend:
        def build(graph: fx.GraphModule, inputs: Inputs) -> Runner:
            if prims and kind == "inference":
                torchinductor.choose_layouts(graph)
            try:
                return _Half(members, stage, job, kind).build(graph)
            except _Theirs as carried:
                if kind == "backward":  # autograd runs it: nobody on the way mends anything
                    assert carried.__cause__ is not None
                    raise carried.__cause__ from None
                raise

        return build

    partitioner = backends.partitioner_of(job.toolchain.options)
    if prims:
        partitioner = backends.laid_out(partitioner)
    opset: Opset | None = "prims" if prims else None
    compile = functools.partial(backends.through_autograd, job, inputs, compiler, partitioner, opset)
    try:
        return backends.or_as_captured(job, compile, also=(_Theirs, NoBackend))
    except _Theirs as carried:
        assert carried.__cause__ is not None
        raise carried.__cause__ from None


def _lowered(graph: fx.GraphModule, options: CompileOptions) -> fx.GraphModule:
    """A graph of ATen's operators in prims, but for those that stay as they are."""
    whole = (*options.preserve, *(drawing_operators("prims") if options.eager_random else ()))
    return lower(graph, preserve=whole, walks_windows=torchinductor.walks_windows)


class _Half:
    """A forward, backward or inference graph that is compiled in pieces."""

    def __init__(self, members: Sequence[Member], stage: Stage, job: Job, kind: Kind) -> None:
        self.members = members
        self.stage = stage
        self.job = job
        self.kind: Kind = kind

    def build(self, graph: fx.GraphModule) -> MixedGraph:
        names = [member.name for member in self.members]
        name_sizes(graph.graph)
        pieces = place(graph.graph, names, [member.capability for member in self.members])
        known = dict.fromkeys(n for n in graph.graph.nodes if n.op == "placeholder" and is_number(n))
        parts: list[tuple[Part, Run]] = []
        records: list[PieceRecord] = []
        for number, piece in enumerate(pieces):
            part = part_of(graph, piece, known)
            parts.append((part, self._compiled(part, piece, number)))
            known.update(dict.fromkeys(n for n in piece.nodes if is_number(n)))
            if not is_number(piece.nodes[0]):
                records.append(self._record(piece, number))
        self.job.toolchain.journal.place(records)
        if self.job.dump is not None:
            self.job.dump(f"{self.kind}_pieces.txt", "\n".join(map(str, records)) + "\n")
        return MixedGraph(graph, parts)

    def _record(self, piece: Piece, number: int) -> PieceRecord:
        name = HOST_NAME if piece.member == HOST else self.members[piece.member].name
        counted = Counter(operator_name(n) for n in piece.nodes if not operator_name(n).endswith("getitem"))
        stacks = (n.meta.get("stack", ()) for n in piece.nodes)
        lines = dict.fromkeys(f"{stack[-1].file}:{stack[-1].line}" for stack in stacks if stack)
        return PieceRecord(self.job.title, self.kind, number, name, tuple(counted.items()), piece.why, tuple(lines))

    def _compiled(self, part: Part, piece: Piece, number: int) -> Run:
        if piece.member == HOST:
            forward: Run = part.module.forward
            return forward
        member = self.members[piece.member]
        title = f"{self.job.title} {self.kind} piece {number}"
        if self.job.dump is not None:
            file = f"{self.kind}_piece_{number}_{member.name}"
            self.job.dump(f"{file}.py", graph_text(part.module, "piece"))
        inputs = [node.meta["val"] for node in part.takes]
        if member.theirs is not None:
            try:
                run = member.theirs(part.module, inputs)
            except Exception as error:
                raise _Theirs from error
            return HeldToGraph(f"back end {member.name!r}, {title}", part, run, functools.partial(self._tell, title))
        if member.name != "inductor":
            return run_graph(part.module, inputs)
        return self._by_inductor(part.module, inputs, title)

    def _by_inductor(self, graph: fx.GraphModule, inputs: Inputs, title: str) -> Run:
        toolchain, start = self.job.toolchain, time.perf_counter()
        try:
            lowered = graph if self.stage == "prims" else _lowered(graph, toolchain.options)
            account = torchinductor.Account(title, toolchain.ledger)
            compiled = torchinductor.compile_graph(
                lowered, inputs, backends.inductor_options(toolchain.options), account
            )
        except backends.TOLD_OTHERWISE:
            raise
        except Exception as error:
            toolchain.not_compiled(title, error)
            return run_graph(graph, inputs)
        prims = sum(node.op == "call_function" for node in lowered.graph.nodes)
        backends.record(dataclasses.replace(self.job, title=title), self.kind, prims, compiled, start)
        return backends.Boxed(compiled)

    def _tell(self, title: str, detail: str) -> None:
        event = Event(PIECE_MENDED, title, detail)
        self.job.toolchain.ledger.add(event)
        warn_of(event)
