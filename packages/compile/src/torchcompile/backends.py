"""Back ends by name. A back end takes a captured graph and gives a callable; any such callable works too.

`backend(gm: torch.fx.GraphModule, example_inputs: list) -> callable(*inputs) -> sequence of outputs`
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

import torchinductor
from aotautograd import aot_module, default_partition, min_cut, run_graph
from aotautograd.schemas import JointGraph, Opset, Partition, Partitioner, Shelf
from primtorch import forks
from primtorch.ambient import preserved
from primtorch.errors import DataDependent
from primtorch.interrupts import pass_on_interrupt
from primtorch.ledger import LEDGER, Event, Ledger, own_line, warn_of
from primtorch.ledger import Kind as EventKind
from primtorch.withheld import COLLECTOR
from torchcompile.capability import Capability
from torchcompile.dumps import Dump, DumpFolder
from torchcompile.errors import ArtifactMismatch, CompilerDied, InvalidArgument, unknown
from torchcompile.events import GRAPH_NOT_COMPILED, KERNELS_NOT_BUILT, NO_COMPILER
from torchcompile.faults.examine import WATCHING, Examiner
from torchcompile.faults.makers import StageSettings, makers, makers_of
from torchcompile.faults.schemas import Program
from torchcompile.journal import CapturedGraphRecord, CompiledGraphRecord, Journal, Kind, StageRecord
from torchcompile.never_slower import Timed
from torchcompile.options import CompileOptions
from torchcompile.passes import attention_masks, plain_graph
from torchcompile.progress import Progress
from torchcompile.shelf import Brought, FrameTexts, Kept, ProgramShelf, key_of, lines_of
from torchcompile.signature import facts, program_form, shape_env, signature
from torchcompile.store import Store
from torchdistributed import FollowsReducer, ParameterInfo, agreed, is_parameter, told_to_ranks
from torchdistributed.replicas import Stages
from torchdynamo.errors import TorchDynamoError, mark_of_compiler
from torchinductor import BuildFailed, CompilerMissing, InductorError, InductorOptions
from torchinductor.program import Value

Inputs: TypeAlias = list[Value]
Runner = Callable[..., Sequence[object]]
Backend = Callable[[torch.fx.GraphModule, Inputs], Runner]
MadeT = TypeVar("MadeT")
AtFailure = Callable[[], str]  # what to add to an error's message: see `Examiner.at_failure`


def partitioner_of(options: CompileOptions) -> Partitioner:
    """What chooses the activations to keep."""
    return default_partition if options.partitioner == "default" else min_cut(options.memory_budget)


def laid_out(partitioner: Partitioner, settings: torchinductor.InductorOptions | None = None) -> Partitioner:
    """Chooses the values' order in memory for the whole program, then what to keep, and how that lies. With `settings`,
    kernels that do not depend on what is kept are begun meanwhile."""

    @functools.wraps(partitioner)
    def choose(joint: JointGraph) -> Partition:
        torchinductor.choose_layouts(joint.module)
        if settings is not None:
            torchinductor.begin_early(joint.module, settings)
        parts = partitioner(joint)
        names = parts.saved_placeholders
        placeholders = {n.name: n for n in parts.backward.graph.nodes if n.op == "placeholder"}
        kept = zip(parts.saved_values, (placeholders[name] for name in names), strict=True)
        if torchinductor.choose_kept_layouts(kept):
            parts.forward.recompile()
        return parts

    return choose


class Boxed:
    """A compiled graph called with one list that it empties, so that activations are freed after their last use."""

    _boxed_call = True

    def __init__(self, graph: torchinductor.CompiledGraph) -> None:
        self.graph = graph
        self.consume: Callable[[Inputs], Sequence[object]] = graph.consume

    def __call__(self, inputs: Inputs) -> Sequence[object]:
        return self.consume(inputs)


class Toolchain:
    """What a named back end needs beside the graph: options, the dump folder, the journal and the ledger."""

    def __init__(
        self,
        options: CompileOptions,
        dumps: DumpFolder | None,
        journal: Journal,
        ledger: Ledger,
        name: str | None = None,
    ) -> None:
        self.prefix = re.sub(r"\W", "_", name) + "_" if name else ""
        self.options = options
        self.dumps = dumps
        self.journal = journal
        self.ledger = ledger
        self.progress = Progress(options.progress)
        if dumps is not None:
            journal.dumped_to(dumps)
        self.brought: Brought | None = None  # what `torchcompile.load` took from a file
        self.kept: list[Kept] = []  # captured graphs, for `torchcompile.save`
        self.frames: FrameTexts | None = None  # where captured frames are kept
        self.at_failure: dict[str, AtFailure] = {}  # by the title of a graph that is examined
        self.compiled: dict[Hashable, Runner] = {}  # by `signature`: an equal graph is not compiled again

    def start(self, gm: torch.fx.GraphModule) -> tuple[str, Dump | None]:
        """Title and dump writer of a captured graph."""
        title = self.prefix + self.journal.next_title()
        found = [own_line(node.meta.get("stack", ())) for node in gm.graph.nodes if node.op.startswith("call")]
        lines = tuple(dict.fromkeys(line for line in found if line is not None))
        self.journal.captured(CapturedGraphRecord(title, len(found), lines))
        now = time.perf_counter()
        self.journal.span(title, "capture", gm.meta.get("began", now), now)
        return title, self.dumps.named(title) if self.dumps is not None else None

    @property
    def folder(self) -> Path | None:
        """Where reproducers of faults are written; None for nowhere."""
        if WATCHING.watch is not None:
            return WATCHING.watch.folder
        return Path(self.options.dump or ".") if self.options.minify_on_error else None

    def not_compiled(self, title: str, error: Exception) -> None:
        """What was to be compiled runs by PyTorch's own kernels: say so with the remedy, and count it.

        Raises:
            Exception: under `strict` the error itself, unless there is merely no compiler; what the ledger raises for
                it (`fullgraph`).
        """
        kind = _kind_of(error)
        reproducer = self.at_failure.get(title.partition(" ")[0], str)() if kind is not NO_COMPILER else ""
        if self.options.strict and kind is not NO_COMPILER:
            if reproducer:
                error.add_note(reproducer.strip())
            raise error
        told = str(error) if isinstance(error, InductorError) else f"{type(error).__name__}: {error}"
        event = Event(kind, title, told + reproducer)
        self.ledger.add(event, error)
        warn_of(event)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A captured graph that a back end is to make run. What compiles the backward later keeps it, so that it holds none
    of the caller's tensors.

    Attributes:
        stages: of its backward: groups of inputs whose gradients are wanted one after the other.
        title: its name in the report.
        rows: its signature, where it is known.
    """

    toolchain: Toolchain
    gm: torch.fx.GraphModule
    stages: Stages
    title: str
    dump: Dump | None
    rows: Hashable | None = None


Compile = Callable[[Job, Inputs], Runner]


def _kind_of(error: Exception) -> EventKind:
    if isinstance(error, CompilerMissing):
        return NO_COMPILER
    return KERNELS_NOT_BUILT if isinstance(error, (BuildFailed, OSError)) else GRAPH_NOT_COMPILED


# What a ledger raises in the place of an event, and what capture mends: it ends the graph before a number that only the
# data tells.
TOLD_OTHERWISE = (TorchDynamoError, DataDependent)


def or_as_captured(job: Job, compile: Callable[[], Runner], also: tuple[type[Exception], ...] = ()) -> Runner:
    """What `compile` makes of a captured graph. Nothing has run yet: where it fails, the graph runs as it is.

    Raises:
        Exception: one of `TOLD_OTHERWISE` or of `also`.
    """
    try:
        return compile()
    except (*TOLD_OTHERWISE, *also):
        raise
    except Exception as error:
        pass_on_interrupt(error)
        return as_captured(job, error)


def as_captured(job: Job, error: Exception) -> Runner:
    """A graph that is not compiled, for this reason. Raises what `Toolchain.not_compiled` does."""
    job.toolchain.not_compiled(job.title, error)
    return agreed(job.gm.forward, job.gm)


def through_autograd(
    job: Job,
    inputs: Inputs,
    compiler: Callable[[Kind], Backend],
    partitioner: Partitioner,
    opset: Opset | None,
    shelf: Shelf | None = None,
) -> Runner:
    """The halves of a captured graph, or the whole where there is no backward, each by the compiler of its kind, in
    operators of `opset`; None leaves ATen's."""
    options = job.toolchain.options
    return aot_module(
        attention_masks(job.gm),
        inputs,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partitioner=partitioner,
        decompositions=opset,
        distinct_inputs=True,  # capture guards it
        dump=job.dump,
        eager_random=options.eager_random,
        preserve=options.preserve,
        walks_windows=torchinductor.walks_windows,
        stages=job.stages,
        shelf=shelf,
    )


def eager(toolchain: Toolchain, gm: torch.fx.GraphModule, example_inputs: Inputs) -> Runner:
    """Runs the captured graph as it is."""
    toolchain.start(gm)
    return agreed(gm.forward, gm)


def run_agreed(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Runner:
    """A graph as it is, held to what other ranks call."""
    return agreed(run_graph(graph, inputs), graph)


def aot_eager(toolchain: Toolchain, gm: torch.fx.GraphModule, example_inputs: Inputs) -> Runner:
    """Forward and backward graphs by ahead-of-time autograd, run by PyTorch's own kernels."""
    title, dump = toolchain.start(gm)
    partitioner = partitioner_of(toolchain.options)
    tried, to_eager = _examined(toolchain, gm, example_inputs, lambda: title, _examiner(toolchain, None))

    def compile(stages: Stages, inputs: Inputs) -> Runner:
        job = Job(toolchain, gm, stages, title, dump)
        died = tried()
        if died is not None:
            return as_captured(job, died)
        return or_as_captured(job, lambda: through_autograd(job, inputs, lambda kind: run_agreed, partitioner, None))

    return to_eager(for_replicas(toolchain, lambda: title, example_inputs, compile))


def for_replicas(
    toolchain: Toolchain, title: Callable[[], str], inputs: Inputs, compile: Callable[[Stages, Inputs], Runner]
) -> Runner:
    """What `compile` makes of a graph for the stages of its backward: where processes train replicas of a model, those
    that the reducer of DistributedDataParallel waits for."""
    if not dist.is_available() or sum(map(is_parameter, inputs)) < 2:
        return compile((), inputs)

    # A later call may be in the middle of anything that guards allow.
    def compile_within(stages: Stages, inputs: Sequence[Any]) -> Runner:
        with preserved(), told_to_ranks(title, DataDependent):
            try:
                return compile(stages, list(inputs))
            except DataDependent:
                raise
            except Exception as error:
                mark_of_compiler(error)  # the other ranks hear of it, and stop: so does this one
                raise

    def tell(stages: Sequence[tuple[int, Sequence[ParameterInfo]]], final: bool) -> None:
        records = []
        for stage, (bucket, parameters) in enumerate(stages):
            names, nbytes = tuple(p.name for p in parameters), sum(p.nbytes for p in parameters)
            records.append(StageRecord(title(), stage, bucket, names, nbytes, planned=not final))
        toolchain.journal.split(title(), records)

    return FollowsReducer(compile_within, tell, inputs)


def inductor(toolchain: Toolchain, gm: torch.fx.GraphModule, example_inputs: Inputs) -> Runner:
    """Forward and backward as generated kernels: C++ and OpenMP on CPU, Triton on NVIDIA GPUs.

    A graph equal to an earlier one is compiled once: a function whose guards failed for a reason that does not show in
    its graph (an attribute that the first call wrote, say), layers captured one by one, resumed code.
    """
    return compiled_once(toolchain, gm, example_inputs, _Kernels.of)


@COLLECTOR.off()
def compiled_once(
    toolchain: Toolchain, gm: torch.fx.GraphModule, example_inputs: Inputs, compile_graph: Compile
) -> Runner:
    """What `compile_graph` makes of a captured graph, or made of an equal one; held to eager where that is asked."""
    key, ordered = signature(gm), torch.are_deterministic_algorithms_enabled()
    start = functools.cache(functools.partial(toolchain.start, gm))
    examiner = _examiner(toolchain, compile_graph)
    tried, to_eager = _examined(toolchain, gm, example_inputs, lambda: start()[0], examiner)

    def compile(stages: Stages, inputs: Inputs) -> Runner:
        runner = toolchain.compiled.get((key, stages, ordered)) if key is not None else None
        if runner is None:
            asked, job = facts(gm), Job(toolchain, gm, stages, *start(), key)
            died = tried()
            runner = compile_graph(job, inputs) if died is None else as_captured(job, died)
            if toolchain.options.never_slower and len(stages) < 2 and runner != gm.forward:
                runner = _timed(toolchain, gm, runner, start()[0])
            if key is not None and facts(gm) == asked:  # else it holds for this capture's guards alone
                toolchain.compiled[key, stages, ordered] = runner
        return runner

    return to_eager(for_replicas(toolchain, lambda: start()[0], example_inputs, compile))


def _examined(
    toolchain: Toolchain,
    gm: torch.fx.GraphModule,
    inputs: Inputs,
    title: Callable[[], str],
    examiner: Examiner,
) -> tuple[Callable[[], CompilerDied | None], Callable[[Runner], Runner]]:
    """Keeps a captured graph as it is before anybody works on it, where it is to be examined. What this gives says why
    it must not be compiled in this process, if so; and takes the compiled graph, and holds it to eager."""
    if not examiner.active:
        return lambda: None, lambda runner: runner
    program = Program.of(plain_graph(gm, with_facts=True), inputs)
    toolchain.at_failure[title()] = examiner.at_failure(program)

    def to_eager(runner: Runner) -> Runner:
        examiner.hold(program, runner, title())
        return runner

    return lambda: examiner.tried(program, title()), to_eager


def _examiner(toolchain: Toolchain, compile_graph: Compile | None) -> Examiner:
    """Examines what a back end makes of a graph; of None, one without kernels. Parts are compiled beside the toolchain:
    they are no graphs of the program's."""
    given = dataclasses.replace(
        toolchain.options, strict=True, verify=False, minify_on_error=False, dump=None, cache=None, cuda_graphs=False
    )
    apart = Toolchain(given, None, Journal(), Ledger())

    def whole(gm: torch.fx.GraphModule, inputs: Inputs) -> Runner:
        assert compile_graph is not None
        return compile_graph(Job(apart, plain_graph(gm, with_facts=True), (), "part", None), inputs)

    def program(gm: torch.fx.GraphModule, inputs: Inputs) -> Runner:
        account = torchinductor.Account("part", apart.ledger)
        return torchinductor.compile_graph(gm, inputs, inductor_options(given), account)

    settings = StageSettings(partitioner_of(given), given.preserve, given.eager_random)
    made = makers(settings, whole, program) if compile_graph is not None else makers(settings)
    return Examiner(made, toolchain.options.verify, toolchain.folder, toolchain.ledger)


def _timed(toolchain: Toolchain, gm: torch.fx.GraphModule, runner: Runner, title: str) -> Runner:
    def compiled() -> list[CompiledGraphRecord]:
        return [graph for graph in toolchain.journal.graphs if f"{graph.title} ".startswith(f"{title} ")]

    return Timed(
        gm,
        runner,
        title,
        toolchain.ledger,
        kernels=lambda: sum(graph.kernels for graph in compiled()),
        has_backward=lambda: any(graph.kind == "backward" for graph in compiled()),
    )


def inductor_options(given: CompileOptions) -> InductorOptions:
    """What code generation is asked for, by the options and by what the program has set."""
    return InductorOptions(
        cache_dir=given.cache,
        cxx=given.cxx,
        cuda_graphs=given.cuda_graphs,
        round_like_eager=given.precision == "eager",
        templates=given.templates,
        tune_products=given.tune_products,
        shared_kernels=given.shared_kernels,
        verify=given.verify or given.check_kernels,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # capture guards it
    )


def record(
    job: Job, kind: Kind, prims: int, compiled: torchinductor.CompiledGraph, start: float, shared: bool = False
) -> None:
    """Keeps what became of a graph that inductor compiled from `start` on, and when it did. `shared`: an equal graph
    was compiled before."""
    journal, stats, seconds = job.toolchain.journal, compiled.stats, time.perf_counter() - start
    counts = prims, stats.kernels, stats.aten_calls
    parts, memory = stats.parts, stats.memory
    journal.add(CompiledGraphRecord(job.title, kind, *counts, seconds, stats.cache_hits, parts, memory), compiled)
    for stage, took in () if shared else stats.seconds.items():
        journal.span(f"{job.title} {kind}", stage, start, start := start + took)


class _Kernels:
    """The way of a captured graph to generated kernels, or to those that were kept of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.began = time.perf_counter()
        self.told = self._told()  # when compilation began
        self.by_form: weakref.WeakValueDictionary[Hashable, torchinductor.CompiledGraph] = weakref.WeakValueDictionary()
        brought = job.toolchain.brought
        self.settings = dataclasses.replace(
            inductor_options(job.toolchain.options), binaries=brought.binaries if brought is not None else None
        )

    @classmethod
    def of(cls, job: Job, inputs: Inputs) -> Runner:
        """The graph compiled, and kept for `torchcompile.save` and other processes."""
        toolchain, kernels = job.toolchain, cls(job)
        kept = Kept(job.title, key_of(job.gm, job.rows, toolchain.options) if len(job.stages) < 2 else None)
        shelf = kernels.shelf(kept)
        with toolchain.progress.working(job.title) as watch:
            watch("trace", 0, 0)
            runner = or_as_captured(job, lambda: kernels.compile(inputs, shelf), (ArtifactMismatch,))
        toolchain.kept.append(kept)
        return runner

    @COLLECTOR.off()
    def compile(self, inputs: Inputs, shelf: Shelf | None) -> Runner:
        return through_autograd(self.job, inputs, self.compiler, self.partitioner(), "prims", shelf)

    def shelf(self, kept: Kept) -> Shelf | None:
        """Where its compiled form is kept, if it is."""
        toolchain = self.job.toolchain
        ledger, brought = toolchain.ledger, toolchain.brought

        def missing() -> None:
            if brought is not None:
                brought.lacks(self.job.title, ledger)

        if kept.content is None:
            missing()
        if kept.content is None or toolchain.options.cache is None:
            return None

        def told_missing() -> None:
            missing()
            self.told = self._told()

        quiet = lambda: self._told() == self.told
        store = Store(toolchain.options.cache)
        gm = self.job.gm
        return ProgramShelf(store, kept, self.load, quiet, lines_of(gm), told_missing, brought, shape_env(gm))

    def _told(self) -> int:
        """How often the ledgers were told anything: what has its own takes it there, the others to the process's."""
        return LEDGER.told + self.job.toolchain.ledger.told

    def partitioner(self) -> Partitioner:
        """The program's, which also says when tracing ended and how long the cut took."""
        toolchain, journal = self.job.toolchain, self.job.toolchain.journal
        partitioner = laid_out(partitioner_of(toolchain.options), self.settings)

        @functools.wraps(partitioner)
        def choose(joint: JointGraph) -> Partition:
            start = time.perf_counter()
            journal.span(self.job.title, "trace", self.began, start)
            found = partitioner(joint)
            journal.span(self.job.title, "partition", start, time.perf_counter())
            return found

        return choose

    def load(self, kind: Kind, kept: torchinductor.KeptGraph) -> Runner:
        """Makes a kept half run."""
        start, half = time.perf_counter(), f"{self.job.title} {kind}"
        loaded = torchinductor.load_graph(kept, self.settings, torchinductor.Account(half, self.job.toolchain.ledger))
        record(self.job, kind, kept.nodes, loaded, start)
        return Boxed(loaded)

    def compiler(self, kind: Kind) -> Backend:
        """What compiles a half of a kind."""
        return _Half(self, kind)

    def begin(self, graph: torch.fx.GraphModule, inputs: Inputs, kind: Kind) -> _BegunHalf:
        """Begins to compile a half. Raises what a stage of the compiler does."""
        start, before = time.perf_counter(), self._told()
        if kind == "inference":
            self.job.toolchain.journal.span(self.job.title, "trace", self.began, start)
        begun, shared = self._of_form(graph, inputs, kind)
        took, told = time.perf_counter() - start, self._told() - before
        if kind == "backward":
            self.told += told  # of the forward, which may be under way, it is not

        def finish() -> Runner:
            if kind == "backward":  # what the program was told of since is not of it
                self.told = self._told() - told
            resumed = time.perf_counter()
            compiled = begun()
            prims = sum(node.op == "call_function" for node in graph.graph.nodes)
            record(self.job, kind, prims, compiled, resumed - took, shared)
            return agreed(Boxed(compiled), graph)

        return _BegunHalf(begun.apart, finish)

    def _of_form(
        self, graph: torch.fx.GraphModule, inputs: Inputs, kind: Kind
    ) -> tuple[torchinductor.BegunGraph, bool]:
        """The begun graph, and whether another stage's is taken: of layers that are built alike many are equal."""
        alone = len(self.job.stages) < 2 or kind != "backward" or self.settings.cuda_graphs  # whose memory is its own
        form = None if alone else program_form(graph)
        known = self.by_form.get(form) if form is not None else None
        if known is not None:
            return torchinductor.BegunGraph(lambda: known), True
        begun = self._begun(graph, inputs, kind)
        if form is None:
            return begun, False

        def finish() -> torchinductor.CompiledGraph:
            self.by_form[form] = compiled = begun()
            return compiled

        return dataclasses.replace(begun, finish=finish), False

    def _begun(self, graph: torch.fx.GraphModule, inputs: Inputs, kind: Kind) -> torchinductor.BegunGraph:
        toolchain, half, dump = self.job.toolchain, f"{self.job.title} {kind}", self.job.dump
        named_dump = (lambda name, text: dump(f"{kind}_{name}", text)) if dump is not None else None

        def by(compiler: Callable[..., MadeT]) -> MadeT:
            with toolchain.progress.working(half) as watch:
                account = torchinductor.Account(half, toolchain.ledger, named_dump, watch)
                return compiler(graph, inputs, self.settings, account)

        if kind == "inference":
            torchinductor.choose_layouts(graph)
        if kind == "inference" or not torchinductor.builds_apart(graph):
            return torchinductor.BegunGraph(lambda: by(torchinductor.compile_graph))
        begun = by(torchinductor.begin_graph)

        def finish() -> torchinductor.CompiledGraph:
            with toolchain.progress.working(half) as watch:
                watch("build", 0, begun.kernels)
                return begun()

        return dataclasses.replace(begun, finish=finish)


@dataclasses.dataclass(frozen=True, slots=True)
class _BegunHalf:
    """See `aotautograd.schemas.Begun`."""

    apart: bool
    finish: Callable[[], Runner]

    def __call__(self) -> Runner:
        return self.finish()


@dataclasses.dataclass(frozen=True, slots=True)
class _Half:
    """Compiles the halves of a kind: see `aotautograd.schemas.BeginningCompiler`."""

    kernels: _Kernels
    kind: Kind

    @COLLECTOR.off()
    def __call__(self, graph: torch.fx.GraphModule, inputs: Inputs) -> Runner:
        def compile() -> Runner:
            return self.kernels.begin(graph, inputs, self.kind)()

        return self._settled(graph, inputs, compile)

    @COLLECTOR.off()
    def begin(self, graph: torch.fx.GraphModule, inputs: Inputs) -> _BegunHalf:
        begun = self.kernels.begin(graph, inputs, self.kind)
        return _BegunHalf(begun.apart, COLLECTOR.off()(lambda: self._settled(graph, inputs, begun)))

    def _settled(self, graph: torch.fx.GraphModule, inputs: Inputs, compile: Callable[[], Runner]) -> Runner:
        """What `compile` makes of a half; a backward that cannot be compiled runs as it is.

        Raises:
            Exception: of another half, behind which nothing has run yet: the captured graph as a whole runs eagerly.
        """
        job = self.kernels.job
        half = f"{job.title} {self.kind}"
        with told_to_ranks(lambda: half, DataDependent):
            try:
                return compile()
            except TOLD_OTHERWISE:
                raise
            except Exception as error:
                if self.kind != "backward":
                    raise
                pass_on_interrupt(error)
                job.toolchain.not_compiled(half, error)
                return run_agreed(graph, inputs)


def _by_torchs(name: str, toolchain: Toolchain, gm: torch.fx.GraphModule, example_inputs: Inputs) -> Runner:
    """One of torch.compile's back ends, registered with torch or by an entry point of an installed package.

    Raises:
        InvalidArgument: sizes of the graph are symbols, which it would take for the numbers that they were.
    """
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in gm.graph.find_nodes(op="placeholder")):
        raise InvalidArgument(f"backend={name!r} is torch's, which reads no symbolic sizes: leave their marks out")
    theirs: Any = torch._TorchCompileWrapper(name, None, None, None).compiler_fn

    def compile(graph: torch.fx.GraphModule, inputs: Inputs) -> Runner:
        run: Runner = theirs(plain_graph(graph), inputs)
        return run

    return _counted(toolchain, compile, gm, example_inputs, TORCH_PREFIX + name)


def _counted(
    toolchain: Toolchain,
    backend: Backend,
    gm: torch.fx.GraphModule,
    example_inputs: Inputs,
    name: str | None = None,
) -> Runner:
    """A caller's own back end; its graphs are counted, and held to eager, as those of the named ones are. Its errors
    are for the caller.

    Args:
        name: of one of torch's.
    """
    title, _ = toolchain.start(gm)
    examiner = Examiner(makers_of(backend, name), toolchain.options.verify, toolchain.folder, toolchain.ledger)
    tried, to_eager = _examined(toolchain, gm, example_inputs, lambda: title, examiner)
    try:
        died = tried()
        if died is not None:
            raise died
        runner = backend(gm, example_inputs)
    except Exception as error:
        pass_on_interrupt(error)
        reproducer = toolchain.at_failure.get(title, str)()
        if reproducer:
            error.add_note(reproducer.strip())
        raise
    return to_eager(runner)


NAMED: Mapping[str, Callable[[Toolchain, torch.fx.GraphModule, Inputs], Runner]] = MappingProxyType(
    {"eager": eager, "aot_eager": aot_eager, "inductor": inductor}
)


class Registry:
    """Back ends that programs registered by name, with their tags."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._backends: dict[str, tuple[Backend, frozenset[str], Capability | None]] = {}

    def add(self, backend: Backend, name: str, tags: Iterable[str], capability: Capability | None = None) -> None:
        """Takes a back end under a name, in the place of an earlier one of that name.

        Raises:
            InvalidArgument: the name is one of torchcompile's own.
        """
        with self._lock:
            if name in NAMED:
                raise InvalidArgument(f"the name {name!r} is taken: {', '.join(sorted(NAMED))} are torchcompile's own")
            self._backends[name] = backend, frozenset(tags), capability

    def remove(self, name: str) -> None:
        """Forgets a name; one that is not known is no error."""
        with self._lock:
            self._backends.pop(name, None)

    def get(self, name: str) -> Backend | None:
        """The back end of a name; None where nobody registered one."""
        with self._lock:
            found = self._backends.get(name)
        return found[0] if found is not None else None

    def capability(self, name: str) -> Capability | None:
        """What the back end of a name declares of itself."""
        with self._lock:
            found = self._backends.get(name)
        return found[2] if found is not None else None

    def names(self, without: frozenset[str] = frozenset()) -> list[str]:
        """Names in the order of registration, but for back ends that have a tag of `without`."""
        with self._lock:
            return [name for name, (_, tags, _) in self._backends.items() if not tags & without]


REGISTERED = Registry()


def register_backend(
    backend: object = None, name: str | None = None, tags: Iterable[str] = (), capability: Capability | None = None
) -> Any:
    """Gives a back end a name for `compile(backend=name)`; also a decorator, with or without arguments.

    Args:
        backend: `(gm, example_inputs) -> callable`.
        name: None is the function's own.
        tags: by which `list_backends(exclude_tags=...)` leaves it out.
        capability: what it takes of a graph, and at which cost: `compile(backend=[name, "inductor"])` shares each
            graph out. It gets pieces of forward and backward graphs then, also where it is named alone; without one it
            gets captured graphs whole.

    Raises:
        InvalidArgument: no callable, or a name of torchcompile's own back ends.
    """
    if backend is None:
        return functools.partial(register_backend, name=name, tags=tags, capability=capability)
    chosen = name or getattr(backend, "__name__", None)
    if not callable(backend) or not isinstance(chosen, str):
        raise InvalidArgument(f"register_backend takes a callable (gm, example_inputs) -> callable, not {backend!r}")
    if capability is not None and not isinstance(capability, Capability):
        raise InvalidArgument(f"capability is a torchcompile.Capability, not {capability!r}")
    REGISTERED.add(backend, chosen, tags, capability)
    return backend


TORCH_PREFIX = "torch."  # torch's own back end of a name that is one of ours


def is_torchs(backend: object) -> bool:
    """Whether a name is that of one of torch.compile's back ends. Torch's compiler is loaded to ask, for such alone."""
    if not isinstance(backend, str) or backend in NAMED or REGISTERED.get(backend) is not None:
        return False
    return backend.removeprefix(TORCH_PREFIX) in torch.compiler.list_backends(exclude_tags=None)


_ELSEWHERE = (
    "Names of torch's registry are taken, too: import the package that registers it, or name it to "
    "torchcompile.register_backend."
)


def list_backends(without: frozenset[str] = frozenset()) -> list[str]:
    """Names of this package's back ends and of those that were registered with it."""
    return sorted((*NAMED, *REGISTERED.names(without)))


def resolve(backend: object, toolchain: Toolchain) -> Backend:
    """The back end for a name or a callable. Raises `InvalidArgument` for anything else."""
    chosen: Any
    if isinstance(backend, str) and backend in NAMED:
        chosen = functools.partial(NAMED[backend], toolchain)
        chosen.takes_floats = True  # a float that changes between calls arrives as a float
        if NAMED[backend] is inductor:
            chosen.foresee = lambda: torchinductor.foresee(inductor_options(toolchain.options))
        return chosen  # type: ignore[no-any-return]
    if isinstance(backend, str):
        registered = REGISTERED.get(backend)
        if registered is None and is_torchs(backend):
            return functools.partial(_by_torchs, backend.removeprefix(TORCH_PREFIX), toolchain)
        if registered is None:
            raise unknown(
                "backend", backend, list_backends(), torch.compiler.list_backends(exclude_tags=None), _ELSEWHERE
            )
        backend = registered
    if callable(backend):
        chosen = functools.partial(_counted, toolchain, backend)
        chosen.takes_floats = getattr(backend, "takes_floats", False)
        return chosen  # type: ignore[no-any-return]
    names = ", ".join(list_backends())
    raise InvalidArgument(f"backend is one of {names} or a callable (gm, example_inputs) -> callable, not {backend!r}")


def told_of(backend: Backend) -> Backend:
    """A back end whose compilations the other ranks of a job are told of."""

    @functools.wraps(backend)  # what saves programs looks for the one behind it
    def among_ranks(gm: torch.fx.GraphModule, example_inputs: Inputs) -> Runner:
        with told_to_ranks(lambda: title_of(gm), DataDependent):
            return backend(gm, example_inputs)

    among_ranks.takes_floats = getattr(backend, "takes_floats", False)  # type: ignore[attr-defined]
    return among_ranks


def title_of(gm: torch.fx.GraphModule) -> str:
    """A captured graph by the user's line that its last operation came from."""
    frames = next((node.meta["stack"] for node in reversed(gm.graph.nodes) if node.meta.get("stack")), ())
    line = own_line(frames)
    return f"the graph that ends at {line.file}:{line.line} in {line.function}" if line is not None else "a graph"
