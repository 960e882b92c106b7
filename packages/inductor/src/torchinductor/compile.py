"""The driver: a graph of prims in, a callable out. `begin_graph` is this package's table of contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import fx

from primtorch.frozen import record
from primtorch.higher_order import HigherOrder, InvokeSubgraph, with_bodies
from primtorch.ledger import Event
from primtorch.printing import body_names
from torchinductor.cache import DiskCache
from torchinductor.codegen.base import (
    Built,
    KernelSource,
    bundle_key,
    codegen_for,
    generated,
    legalized,
    takes,
    traits_of,
    warm_codegen,
)
from torchinductor.codegen.base import builds_apart as any_builds_apart
from torchinductor.convolutions import arrange_convolutions
from torchinductor.cuda_graphs import CudaDevice, GraphedProgram, refusal
from torchinductor.early import filter_gradients
from torchinductor.emit import Handle, emit
from torchinductor.errors import InductorError
from torchinductor.events import NO_CUDA_GRAPH, OPERATOR_BY_REFERENCE, passed_by, tell_mended
from torchinductor.executor import PythonExecutor
from torchinductor.ir import Bundle, Kernel, Template, loops_of, verify_kernels
from torchinductor.kept_rows import align_kept_rows
from torchinductor.lowering.context import ExternCall, Operation
from torchinductor.lowering.graph import Lowered, lower_graph
from torchinductor.native import accelerator_of, prepare
from torchinductor.parts import Origins, memory_of
from torchinductor.program import Program, Run, Value
from torchinductor.scheduling.bundles import bundle
from torchinductor.scheduling.in_place import write_in_place
from torchinductor.scheduling.schedule import check_between_passes, schedule
from torchinductor.schemas import NO_MEMORY, Account, Dump, GraphStats, InductorOptions, Memory, Watch
from torchinductor.spliced import Region, spliced


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled graph. Call it with the graph's inputs (symbolic sizes as ints); it returns the outputs in order.

    Attributes:
        sources: the built text by the names of its files.
        kept: what `load_graph` makes it of again; None where the program holds what has no form outside of a process.

    Raises, at a call:
        ValueError: another number of inputs, or a tensor of another dtype, device or number of dims. Sizes and strides
            are for the caller to guard.
    """

    program: Program
    stats: GraphStats
    sources: dict[str, str]
    _run: Run
    _consume: Run
    kept: KeptGraph | None = None
    _sources: tuple[tuple[str, tuple[KernelSource, ...]], ...] = ()

    def __call__(self, *inputs: Value) -> list[Value]:
        return self._run(list(inputs))

    def consume(self, inputs: list[Value]) -> list[Value]:
        """A call that empties `inputs` first, so that an input that nobody else holds is freed after its last use."""
        return self._consume(inputs)


@dataclass(frozen=True)
class KeptConstant:
    """A small tensor of a program, or of a graph, by its elements.

    Attributes:
        slot: its place in the program, or that of its node.
    """

    slot: int
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    elements: tuple[bool | int | float, ...]

    def tensor(self) -> torch.Tensor:
        """The tensor, made anew on its device."""
        return torch.tensor(self.elements, dtype=self.dtype, device=self.device).reshape(self.shape)


MOST_KEPT_ELEMENTS = 4096


def _kept_constants(program: Program) -> tuple[KeptConstant, ...] | None:
    found: list[KeptConstant] = []
    for slot, tensor in program.constants:
        kept = kept_constant(slot, tensor)
        if kept is None:
            return None
        found.append(kept)
    return tuple(found)


def kept_constant(slot: int, tensor: torch.Tensor) -> KeptConstant | None:
    """A tensor as a record; None where it is large, complex, or has strides of its own."""
    if tensor.numel() > MOST_KEPT_ELEMENTS or tensor.is_complex() or not tensor.is_contiguous():
        return None
    elements = tuple(tensor.detach().flatten().tolist())
    return KeptConstant(slot, tensor.dtype, tensor.device, tuple(tensor.shape), elements)


@dataclass(frozen=True)
class KeptGraph:
    """A compiled graph without what belongs to a process: its program, and the kernels as source, by device type.

    Attributes:
        memory: of a call with the sizes that it was compiled with.
        sources: what is built together; that of regions is apart.
    """

    program: Program  # without kernels and constants
    constants: tuple[KeptConstant, ...]
    sources: tuple[tuple[str, tuple[KernelSource, ...]], ...]
    nodes: int
    kernels: int
    aten_calls: int
    memory: Memory = NO_MEMORY


@dataclass(frozen=True, slots=True)
class BegunGraph:
    """A graph whose kernels are being built. Call it for the compiled graph, once.

    Attributes:
        kernels: how many are built.
        apart: whether other processes build them, and this one has nothing to do but wait.

    Raises, at the call:
        CompilerMissing, BuildFailed: generated source could not be built.
    """

    finish: Callable[[], CompiledGraph]
    kernels: int = 0
    apart: bool = False

    def __call__(self) -> CompiledGraph:
        return self.finish()


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[object] = (),
    options: InductorOptions | None = None,
    account: Account | None = None,
) -> CompiledGraph:
    """Compiles a graph that is closed under the prims.

    Args:
        gm: functional; each node has its `meta["val"]`. Placeholders are SymInts and tensors.
        example_inputs: not needed, as the graph says all; any compiler of graphs is given them.

    Raises:
        LoweringError: a node has no rule.
        UnknownDevice: a tensor's device has no code generation back end.
        CompilerMissing, BuildFailed: generated source could not be built.
    """
    return begin_graph(gm, example_inputs, options, account)()


def begin_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[object] = (),
    options: InductorOptions | None = None,
    account: Account | None = None,
) -> BegunGraph:
    """`compile_graph` up to where kernels are built, which goes on while the caller does something else: their builders
    wait for nothing that can be done meanwhile.

    Raises:
        LoweringError, UnknownDevice: see `compile_graph`.
    """
    options, account = options or InductorOptions(), account or Account()
    clock = _Clock(account.watch)
    clock.at("lower")
    for device in _device_types(gm):
        warm_codegen(device, options)
    lowered = lower_graph(gm, options, takes, _Bodies(options, account), traits_of)
    for name, frames in lowered.by_reference:
        account.ledger.add(Event(OPERATOR_BY_REFERENCE, account.title, name, frames))
    clock.lap("lower")
    operations = _planned(lowered, options, clock)
    try:
        sources = _generate(operations, options, clock)
    except Exception:
        verify_kernels(operations)  # what has no text may be unsound, and this says of what
        raise
    clock.lap("generate")
    kernels = sum(len(found.unique) for found in sources.values())
    clock.at("build", 0, kernels)
    building = {device: codegen_for(device).begin(found.unique, options) for device, found in sources.items()}
    clock.lap("build")

    def finish() -> CompiledGraph:
        clock.resume()
        verify_kernels(operations)
        origins = Origins.of(gm)
        known: Program | None = None
        if len(sources) < 2:  # kernels of one kind: which are where is known while they are built
            known = _program(lowered, operations, sources, {}, options, origins)
        clock.lap("emit")
        built = {device: begun.finish() for device, begun in building.items()}
        clock.lap("build")
        program = _with_kernels(known or _program(lowered, operations, sources, built, options, origins), built)
        program, unique = spliced(program, tuple((d, found.unique) for d, found in sources.items()), _region_of)
        clock.lap("emit")
        run, consume = _runnable(program, options, account)
        clock.lap("prepare")
        files = {name: text for b in built.values() for name, text in b.files.items()}
        if account.dump is not None:
            _dump(account.dump, lowered, operations, files, program)
        stats = _stats(gm, operations, built, clock, program, origins)
        return CompiledGraph(program, stats, files, run, consume, _kept_graph(program, unique, stats), unique)

    return BegunGraph(finish, kernels, any(begun.apart for begun in building.values()))


def _planned(lowered: Lowered, options: InductorOptions, clock: _Clock) -> list[Operation]:
    """What a lowered graph becomes, in the order in which it runs, as each device's back end plans it."""
    operations = schedule(lowered, options, traits_of)
    clock.lap("schedule")
    check = check_between_passes(options)
    operations = _legalize(lowered, operations, options)
    check(operations)
    if options.fuse:
        operations = bundle(lowered, operations, bundle_key)
        check(operations)
    if options.reuse_buffers:
        operations = write_in_place(lowered, operations)
    return operations


def planned_program(gm: fx.GraphModule, options: InductorOptions | None = None) -> Program:
    """The program of a graph whose kernels nobody builds, so that it cannot run: for what reads its instructions. Its
    values may be on a device that this machine lacks (`source.on_device`).

    Raises:
        LoweringError, UnknownDevice: see `compile_graph`.
    """
    options = options or InductorOptions()
    lowered = lower_graph(gm, options, takes, traits_of=traits_of)
    operations = _planned(lowered, options, _Clock())
    verify_kernels(operations)
    sources = _generate(operations, options, _Clock())
    built = {device: Built() for device in sources}
    return _program(lowered, operations, sources, built, options, Origins.of(gm))


def begin_early(gm: fx.GraphModule, options: InductorOptions | None = None) -> int:
    """Begins kernels of a joint graph of prims whose text is known before it is cut and fused, where other processes
    build them; says how many. Nobody waits for them: `begin_graph` finds them built, or under way, and tells of what
    cannot be. Behind `choose_layouts`, since operands have to lie in memory as they will."""
    options = options or InductorOptions()
    written: dict[str, dict[str, KernelSource]] = {}  # by device type and text
    for alone in filter_gradients(gm) if builds_apart(gm) else ():
        with suppress(InductorError):
            for template in _templates_of(alone, options):
                source = generated(template, options)
                written.setdefault(template.device.type, {}).setdefault(source.text, source)
    for device, sources in written.items():
        codegen = codegen_for(device)
        codegen.begin(codegen.share(tuple(sources.values()), options), options)
    return sum(map(len, written.values()))


def _templates_of(gm: fx.GraphModule, options: InductorOptions) -> list[Template]:
    """The planned templates of a graph; nothing is planned where it has none."""
    lowered = lower_graph(gm, options, takes, traits_of=traits_of)
    if not any(isinstance(operation, Template) for operation in lowered.operations):
        return []
    return [o for o in _planned(lowered, options, _Clock()) if isinstance(o, Template)]


def _kept_graph(
    program: Program, sources: tuple[tuple[str, tuple[KernelSource, ...]], ...], stats: GraphStats
) -> KeptGraph | None:
    """What `load_graph` takes, where the program's constants have a form outside of the process."""
    bare = replace(program, kernels=(), launchers=(), keepalive=(), constants=())
    constants = _kept_constants(program)
    if constants is None:
        return None
    return KeptGraph(bare, constants, sources, stats.nodes, stats.kernels, stats.aten_calls, stats.memory)


def load_graph(
    kept: KeptGraph, options: InductorOptions | None = None, account: Account | None = None
) -> CompiledGraph:
    """What `compile_graph` made, in another process, of the same graph with the same options: only its kernels are
    built, or found built.

    Raises:
        UnknownDevice, CompilerMissing, BuildFailed: see `compile_graph`.
    """
    options = options or InductorOptions()
    clock = _Clock()
    built = [codegen_for(device).build(unique, options) for device, unique in kept.sources]
    clock.lap("build")
    program = replace(
        kept.program,
        kernels=tuple(address for made in built for address in made.addresses),
        launchers=tuple(launcher for made in built for launcher in made.launchers),
        keepalive=tuple(held for made in built for held in made.keepalive),
        constants=tuple((constant.slot, constant.tensor()) for constant in kept.constants),
    )
    run, consume = _runnable(program, options, account or Account())
    clock.lap("prepare")
    files = {name: text for b in built for name, text in b.files.items()}
    hits, misses = (sum(getattr(b, name) for b in built) for name in ("cache_hits", "cache_misses"))
    counts = kept.nodes, kept.kernels, kept.aten_calls
    stats = GraphStats(*counts, clock.seconds, hits, misses, kept.memory, program.parts)
    return CompiledGraph(program, stats, files, run, consume, kept)


def devices_of(kept: KeptGraph) -> frozenset[str]:
    """The types of the devices that a kept graph computes on."""
    program = kept.program
    made = [item.device.type for item in (*program.inputs, *program.instructions) if hasattr(item, "device")]
    return frozenset((*made, *(device for device, _ in kept.sources)))


def binaries_of(kept: KeptGraph, options: InductorOptions) -> Mapping[str, Path] | None:
    """The files of a kept graph's kernels, by the names under which `load_graph` asks `options.binaries` for them; None
    where one is not there."""
    files: dict[str, Path] = {}
    for device, unique in kept.sources:
        found = codegen_for(device).binaries(unique, options)
        if found is None:
            return None
        files.update(found)
    return files


def _runnable(program: Program, options: InductorOptions, account: Account) -> tuple[Run, Run]:
    """What runs a program, and what runs it and empties its list of inputs."""
    ledger, title = account.ledger, account.title
    mended = tell_mended(ledger, title)
    choices = DiskCache(options.cache_dir).shared("products.txt") if options.tune_products else None
    native = prepare(program, mended, title, choices) if options.native_executor else None
    run: Run = native or PythonExecutor(program, mended)
    consume = native.consume if native is not None else run
    refused = refusal(program) if options.cuda_graphs else None
    if refused is not None:
        ledger.add(Event(NO_CUDA_GRAPH, title, refused))
    elif options.cuda_graphs:
        recorder = CudaDevice(accelerator_of(program) or torch.device("cuda"))
        run = consume = GraphedProgram(program, run, recorder, partial(passed_by, ledger, title))
    return run, consume


def choose_layouts(gm: fx.GraphModule) -> bool:
    """Gives the values of a graph of prims the order in memory that their device wants, and its convolutions the form,
    in place; its results keep theirs. Says whether anything changed.

    For a whole program, before it is cut into a forward and a backward: what the one keeps for the other changes too.
    """
    return arrange_convolutions(gm, traits_of)


def choose_kept_layouts(kept: Iterable[tuple[fx.Node, fx.Node]]) -> bool:
    """Gives what a forward keeps for its backward the rows that their device wants, in place. `kept`: pairs of a result
    of the forward and the backward's placeholder for it, both of prims. Says whether anything changed."""
    return align_kept_rows(kept, traits_of)


@dataclass(frozen=True)
class CompiledBodies:
    """What a program calls where the graph calls an operator over graphs."""

    operator: HigherOrder

    def __call__(self, *operands: Value) -> tuple[Value, ...]:
        return self.operator.run(*operands)

    def __str__(self) -> str:
        return self.operator.name


def bodies_of(call: Callable[..., object]) -> list[CompiledGraph]:
    """The programs that a call runs."""
    bodies = call.operator.bodies if isinstance(call, CompiledBodies) else ()
    return [body for body in bodies if isinstance(body, CompiledGraph)]


def _region_of(call: Callable[..., object]) -> Region | None:
    if not isinstance(call, CompiledBodies) or not isinstance(call.operator, InvokeSubgraph):
        return None
    (body,) = call.operator.bodies
    assert isinstance(body, CompiledGraph)
    return Region(body.program, body._sources)


@dataclass(frozen=True)
class _Bodies:
    """Compiles the graphs that operators over graphs run: each is a program of its own, which the operators call.

    Such a call is no part of a CUDA graph, but for that of a region, whose program becomes a part of the one that calls
    it (`spliced`).
    """

    options: InductorOptions
    account: Account
    compiled: dict[fx.GraphModule, CompiledGraph] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> CompiledBodies:
        operator = node.target
        assert isinstance(operator, HigherOrder)
        options = replace(self.options, cuda_graphs=False)
        for body, name in zip(operator.bodies, body_names(node), strict=True):
            assert isinstance(body, fx.GraphModule)
            if body not in self.compiled:
                dump = None if self.account.dump is None else partial(_dump_as, self.account.dump, name)
                account = Account(f"{self.account.title} {name}", self.account.ledger, dump)
                self.compiled[body] = compile_graph(body, (), options, account)
        return CompiledBodies(with_bodies(operator, [self.compiled[body] for body in operator.bodies]))  # type: ignore[index]


def _dump_as(dump: Dump, prefix: str, name: str, text: str) -> None:
    dump(f"{prefix}_{name}", text)


def builds_apart(gm: fx.GraphModule) -> bool:
    """Whether a caller of `begin_graph` has other processes work for it."""
    return any_builds_apart(_device_types(gm))


def _device_types(gm: fx.GraphModule) -> set[str]:
    """The types of the devices that a graph's inputs are on."""
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    return {torch.device(v.device).type for v in values if hasattr(v, "device")}


class _Clock:
    """Seconds by stage; tells which is under way."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        self._watch = watch

    def at(self, stage: str, done: int = 0, of: int = 0) -> None:
        if self._watch is not None:
            self._watch(stage, done, of)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def resume(self) -> None:
        """Work goes on; what was done since the last lap belongs to something else."""
        self._last = time.perf_counter()


def _legalize(lowered: Lowered, operations: Sequence[Operation], options: InductorOptions) -> list[Operation]:
    """Lets each device's back end cut kernels as the device needs; what they add becomes buffers of the graph."""
    result: list[Operation] = []
    for operation in operations:
        if not isinstance(operation, (Kernel, Template)):
            result.append(operation)
            continue
        for kernel in legalized(operation, options):
            lowered.buffers.update((name, loops_of(kernel).buffers[name]) for name in kernel.arguments)
            result.append(kernel)
    return result


Launched = (Kernel, Template, Bundle)


@record
class _Sources:
    """The kernels of one type of device.

    Attributes:
        unique: what is built.
        launched: each operation's own source, whose text is that of one of these, and its number among them.
    """

    unique: tuple[KernelSource, ...]
    launched: dict[str, tuple[KernelSource, int]]


Sources = dict[str, _Sources]


def _generate(operations: Sequence[Operation], options: InductorOptions, clock: _Clock) -> Sources:
    """Sources by device type."""
    written: dict[str, dict[str, KernelSource]] = {}  # by text
    texts: dict[str, dict[str, str]] = {}  # by operation
    launched = [operation for operation in operations if isinstance(operation, Launched)]
    for done, operation in enumerate(launched):
        clock.at("generate", done, len(launched))
        device = operation.device.type
        source = generated(operation, options)
        written.setdefault(device, {}).setdefault(source.text, source)
        texts.setdefault(device, {})[operation.name] = source.text
    return {device: _shared(device, sources, texts[device], options) for device, sources in written.items()}


def _shared(
    device: str, written: Mapping[str, KernelSource], texts: Mapping[str, str], options: InductorOptions
) -> _Sources:
    """What the back end makes of a program's sources; `texts`: those of the operations, before that."""
    made = dict(zip(written, codegen_for(device).share(tuple(written.values()), options), strict=True))
    unique: dict[str, KernelSource] = {}
    for source in made.values():
        unique.setdefault(source.text, source)
    numbers = {text: number for number, text in enumerate(unique)}
    launched = {name: (made[text], numbers[made[text].text]) for name, text in texts.items()}
    return _Sources(tuple(unique.values()), launched)


def _program(
    lowered: Lowered,
    operations: Sequence[Operation],
    sources: Sources,
    built: dict[str, Built],
    options: InductorOptions,
    origins: Origins,
) -> Program:
    """The program that will launch the kernels: those of a device come behind those that are `built` of others."""
    kernels = launchers = 0
    handles: dict[str, Handle] = {}
    for device, found in sources.items():
        made = built.get(device, Built())
        base = kernels if made.addresses else launchers
        for name, (source, number) in found.launched.items():
            handles[name] = Handle(codegen_for(device), source, base + number)
        kernels += len(made.addresses)
        launchers += len(made.launchers)
    return emit(lowered, operations, handles, options.reuse_buffers, origins)


def _with_kernels(program: Program, built: Mapping[str, Built]) -> Program:
    return replace(
        program,
        kernels=tuple([address for made in built.values() for address in made.addresses]),
        launchers=tuple([launcher for made in built.values() for launcher in made.launchers]),
        keepalive=tuple([held for made in built.values() for held in made.keepalive]),
    )


def _dump(
    dump: Dump, lowered: Lowered, operations: Sequence[Operation], files: dict[str, str], program: Program
) -> None:
    dump("loop_ir.txt", "\n\n".join(map(str, lowered.operations)) + "\n")
    dump("scheduled.txt", "\n\n".join(map(str, operations)) + "\n")
    for name, text in files.items():
        dump(name, text)
    dump("program.txt", str(program) + "\n")


def _stats(
    gm: fx.GraphModule,
    operations: Sequence[Operation],
    built: dict[str, Built],
    clock: _Clock,
    program: Program,
    origins: Origins,
) -> GraphStats:
    calls = [o for o in operations if isinstance(o, ExternCall)]
    bodies = [body for o in calls for body in bodies_of(o.op)]
    return GraphStats(
        nodes=sum(1 for n in gm.graph.nodes if n.op == "call_function"),
        kernels=sum(isinstance(o, Launched) for o in operations) + sum(b.stats.kernels for b in bodies),
        aten_calls=sum(1 if (r := _region_of(o.op)) is None else _calls_of(r) for o in calls),
        seconds=clock.seconds,
        cache_hits=sum(b.cache_hits for b in built.values()),
        cache_misses=sum(b.cache_misses for b in built.values()),
        memory=memory_of(program, origins.sizes),
        parts=program.parts,
    )


def _calls_of(region: Region) -> int:
    return sum(not part.generated for part in region.program.parts)
