"""`torchcompile.compile`: the wiring of capture, ahead-of-time autograd and code generation behind one call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

import torchdynamo
from primtorch.ledger import Ledger
from torchcompile import backends
from torchcompile.backends import Backend, Toolchain
from torchcompile.dumps import DumpFolder
from torchcompile.errors import InvalidArgument, NotCompilable
from torchcompile.faults.calls import verified
from torchcompile.faults.examine import WATCHING, rehearse
from torchcompile.journal import Journal
from torchcompile.mixture import driver as mixed
from torchcompile.module import Transform, compile_call, compile_class, compiled_module, original_of
from torchcompile.options import CompileOptions, resolve
from torchcompile.profiling import Profile, profiled
from torchcompile.report import Report
from torchcompile.shelf import Brought, FrameTexts, frames_are_kept
from torchdistributed import ReplicaRounds
from torchdistributed.explained import explain_stages
from torchdynamo import CaptureOptions

ModelT = TypeVar("ModelT", bound=Callable[..., Any])

_journal = Journal()


@overload
def compile(
    model: ModelT,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    backend: str | Backend | Sequence[str] | None = ...,
    mode: str | None = ...,
    options: Mapping[str, object] | None = ...,
    name: str | None = ...,
    disable: bool = ...,
    recompile_limit: int | None = ...,
    isolate_recompiles: bool = ...,
    shapes_spec: None = ...,
) -> ModelT: ...


@overload
def compile(
    model: None = None,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    backend: str | Backend | Sequence[str] | None = ...,
    mode: str | None = ...,
    options: Mapping[str, object] | None = ...,
    name: str | None = ...,
    disable: bool = ...,
    recompile_limit: int | None = ...,
    isolate_recompiles: bool = ...,
    shapes_spec: None = ...,
) -> Callable[[ModelT], ModelT]: ...


def compile(
    model: Callable[..., object] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Backend | Sequence[str] | None = None,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: None = None,
) -> object:
    """Makes `model` (a module or a function) faster, with eager's results; also a decorator.

    Nothing is compiled before the first call. A compiled module is the model in every respect but its
    call: parameters, attributes, `state_dict()` keys and `repr` are the model's own and shared with it.

    Args:
        model: an `nn.Module`, a function or a method; a class, whose objects' calls are compiled from then on; None
            gives a decorator.
        fullgraph: raise where the graph would break, or anything would run eagerly or otherwise than planned, with
            the user's stack, the reason and the remedy.
        dynamic: True: sizes are symbolic from the first call on; None: a size becomes so when it first
            changes; False: never, each size compiles anew.
        backend: a name of `list_backends()` or a callable `(gm, example_inputs) -> callable`; None is "inductor". A
            list of names shares each graph out among them (docs/mixture.md).
        mode: a named set of options.
        options: see `torchcompile.options.CompileOptions`; torch.compile's names are taken for what they mean here.
        name: precedes the graphs' names in the report and the dump.
        disable: give `model` back as it is.
        recompile_limit: the option of that name.
        isolate_recompiles: taken, and so in any case: what one `compile` made counts for no other.
        shapes_spec: not taken; sizes are marked with `mark_dynamic` and the like.

    Raises:
        NotCompilable: `model` is neither a module, a function nor a class whose objects are called.
        InvalidArgument: an unknown backend, mode or option.
    """
    _require_flag("disable", disable)
    settings = _settings(mode, options, recompile_limit, shapes_spec)
    transform = stack_of(fullgraph, dynamic, backend, settings, name)

    def decorate(target: object) -> object:
        return target if disable else compile_one(target, transform)

    return decorate if model is None else decorate(model)


def compile_in_place(
    *models: torch.nn.Module,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Backend | Sequence[str] | None = None,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: None = None,
) -> None:
    """Compiles the calls of modules, which stay the objects that they are: what `nn.Module.compile()` is to eager.

    For a module that others hold already: parts of a larger model (`compile_in_place(*model.blocks)`; what is equal in
    them is compiled once), a model in the hands of a trainer. Hooks run as part of the compiled call. The state does
    not change, and copies and pickles of the module are plain ones.

    Args:
        models: modules; each is compiled for itself.
        disable: make the modules plain again.
        fullgraph, dynamic, backend, mode, options, name, recompile_limit, isolate_recompiles, shapes_spec: see
            `compile`.

    Raises:
        NotCompilable: one of `models` is no module.
        InvalidArgument: an unknown backend, mode or option.
    """
    _require_flag("disable", disable)
    settings = _settings(mode, options, recompile_limit, shapes_spec)
    transform = stack_of(fullgraph, dynamic, backend, settings, name)
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise NotCompilable(
                f"compile_in_place takes nn.Module objects, not {model!r}: use `f = torchcompile.compile(f)`"
            )
    for model in models:
        if disable:
            model._compiled_call_impl = None
        else:
            compile_call(model, transform)


def _settings(
    mode: str | None, options: Mapping[str, object] | None, recompile_limit: int | None, shapes_spec: object
) -> CompileOptions:
    if shapes_spec is not None:
        raise InvalidArgument(
            "shapes_spec is not taken: mark sizes with torchcompile.mark_dynamic(tensor, dim, min=..., max=...), or "
            "say dynamic=True"
        )
    if recompile_limit is not None:
        options = {**(options or {}), "recompile_limit": recompile_limit}
    return resolve(mode, options)


def stack_of(
    fullgraph: bool,
    dynamic: bool | None,
    backend: str | Backend | Sequence[str] | None,
    settings: CompileOptions,
    name: str | None,
    brought: Brought | None = None,
) -> Transform:
    """Capture with a back end behind it, for one call of the interface."""
    _require_flag("fullgraph", fullgraph)
    if dynamic is not None and not isinstance(dynamic, bool):
        raise InvalidArgument(f"dynamic is True, False or None, not {dynamic!r}")
    watch = WATCHING.watch
    if watch is not None:
        settings, backend, dynamic = _watched(settings), watch.backend or backend, False
    dumps = DumpFolder(Path(settings.dump)) if settings.dump else None
    chosen = "inductor" if backend is None else backend
    if backends.is_torchs(chosen):
        if dynamic:
            raise InvalidArgument(f"backend={backend!r} is torch's, which reads no symbolic sizes: leave dynamic out")
        dynamic = False
    capture = _capture_options(settings, fullgraph, dynamic)
    ledger = torchdynamo.new_ledger(capture)
    toolchain = Toolchain(settings, dumps, _journal, ledger, name)
    toolchain.brought = brought
    runner = mixed.resolve(chosen, toolchain) if mixed.is_mixture(chosen) else backends.resolve(chosen, toolchain)
    if frames_are_kept(chosen, settings):
        toolchain.frames = FrameTexts(str(settings.cache), brought)
        runner.frames = torchdynamo.KeptFrames(toolchain.frames)  # type: ignore[attr-defined]
    transform = torchdynamo.optimize(backends.told_of(runner), options=capture, dump=dumps, ledger=ledger)
    if settings.verify:
        return _verifying(transform, dataclasses.replace(capture, fullgraph=False), ledger)
    return transform


def _require_flag(name: str, value: object) -> None:
    """Raises InvalidArgument for what is no truth value: "no" would mean yes."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is True or False, not {value!r}")


def _watched(settings: CompileOptions) -> CompileOptions:
    """The settings while somebody looks for a fault: every difference and every error is one, and sizes are numbers."""
    return dataclasses.replace(settings, verify=True, strict=True, cache=None, cuda_graphs=False)


def _verifying(transform: Transform, options: CaptureOptions, ledger: Ledger) -> Transform:
    """`transform`, with each call held to the function as it was written. What cannot be is told to the ledger."""
    strict = dataclasses.replace(options, strict=True)

    def capture(backend: Backend, function: Callable[..., object]) -> Callable[..., object]:
        return torchdynamo.optimize(backend, options=strict, ledger=Ledger())(function)

    def verifying(function: Callable[..., object]) -> Callable[..., object]:
        return verified(function, transform(function), capture, ledger)

    return verifying


def _capture_options(settings: CompileOptions, fullgraph: bool, dynamic: bool | None) -> CaptureOptions:
    return CaptureOptions(
        fullgraph=fullgraph,
        dynamic=dynamic,
        recompile_limit=settings.recompile_limit,
        on_recompile=settings.on_recompile,
        strict=settings.strict,
        round_by_round=_round_by_round(settings),
        rehearse=rehearse if settings.verify or settings.minify_on_error else None,
    )


def _round_by_round(settings: CompileOptions) -> ReplicaRounds | None:
    """What loops are compiled round by round. None where graphs are replayed as a whole: the memory of one cannot be
    that of another round, too."""
    least = settings.replicated_rounds
    return ReplicaRounds(least) if least and not settings.cuda_graphs else None


# What a class makes functions of when it is asked for an attribute: compiled, it would be one no longer.
_DESCRIPTORS = (classmethod, property, functools.partialmethod, functools.cached_property)  # noqa: TID251 - the program's


def compile_one(target: object, transform: Transform) -> object:
    """The compiled form of one target: a module stays a module, a class a class, a callable becomes a function.

    Raises:
        NotCompilable: the target cannot be called, or is a descriptor other than a staticmethod.
    """
    if isinstance(target, staticmethod):  # in the body of a class, which asks for one
        return staticmethod(transform(target.__func__))
    if isinstance(target, _DESCRIPTORS):
        kind = type(target).__name__
        raise NotCompilable(
            f"compile takes an nn.Module, a function or a method, not a {kind}: compile the function and make a {kind} "
            f"of it, with @{kind} above @torchcompile.compile"
        )
    if isinstance(target, torch.nn.Module):
        return compiled_module(target, transform)
    if inspect.isclass(target):
        return compile_class(target, transform)
    if inspect.isroutine(target) or isinstance(target, torchdynamo.CompiledCallable):
        return transform(target)
    if callable(target):
        return transform(target.__call__)
    given = f"{reprlib.repr(target)} of type {type(target).__name__}"
    raise NotCompilable(f"compile takes an nn.Module, a function or a method, not {given}")


def export(
    model: Callable[..., object],
    *inputs: object,
    dynamic: bool | None = None,
    dynamic_shapes: Mapping[str, object] | None = None,
    aten_graph: bool = False,
    decompositions: Literal["prims", "core_aten"] | None = None,
) -> torchdynamo.Exported:
    """The call `model(*inputs)` as one graph to take away: called as the model is, unpacked as (graph, guards), kept by
    `torchcompile.save` and `load`. `torchdynamo.export(model, ...)(*inputs, **named)` takes arguments by name, too.

    Args:
        dynamic, dynamic_shapes, aten_graph, decompositions: see `torchdynamo.export`.

    Raises:
        Unsupported: the call leaves the graph, at `breaks`.
        NotExportable: the call takes, gives or does what has no place in a graph to take away.
    """
    return torchdynamo.export(
        model, dynamic=dynamic, dynamic_shapes=dynamic_shapes, aten_graph=aten_graph, decompositions=decompositions
    )(*inputs)


def explain(model: Callable[..., object]) -> Callable[..., torchdynamo.Explanation]:
    """`explain(model)(*inputs)` runs the call with every graph as it was captured, and tells graphs, breaks and guards.

    A compiled model or function is explained as it was written. Of a model under DistributedDataParallel it tells where
    the backward is cut as well, and why there.
    """
    if isinstance(model, torch.nn.Module):
        written: Callable[..., object] = original_of(model)
    else:
        written = model.function if isinstance(model, torchdynamo.CompiledCallable) else model
    options = CaptureOptions(round_by_round=_round_by_round(CompileOptions()))
    return torchdynamo.explain(written, explain_stages, options)


def list_backends(exclude_tags: Iterable[str] | None = None) -> list[str]:
    """Names that `compile(backend=...)` takes; any callable `(gm, example_inputs) -> callable` is taken too.

    Args:
        exclude_tags: leaves out back ends that were registered with one of these.
    """
    return backends.list_backends(frozenset(exclude_tags or ()))


def reset() -> None:
    """Forgets every compiled graph and the report; the next call of a compiled object captures anew."""
    torchdynamo.reset()
    _journal.clear()


def report() -> Report:
    """What was compiled in this process since the start or the last `reset()`."""
    stats = torchdynamo.stats()
    return Report(
        captured=_journal.captures,
        capture_seconds=stats.seconds,
        graphs=_journal.graphs,
        events=stats.events,
        stages=_journal.stages,
        pieces=_journal.pieces,
        traced=_journal.all_captured,
        spans=_journal.spans,
        texts=_journal.texts,
        seconds=_journal.seconds,
        bandwidth=_journal.bandwidth,
    )


def profile(fn: Callable[..., object], *args: object, runs: int = 10, **kwargs: object) -> Profile:
    """Calls `fn(*args, **kwargs)`, of which compiled code is part, and measures each kernel and call of that code.

    `print` the result, or write its page with `.html(path)`; `report().html()` then has the times, too. Each row of it
    is one of torch.profiler's, by the same name. On a GPU a row's time is that of its kernels; of what a CUDA graph
    replays, generated kernels have rows and PyTorch's none. The function is called `2 * runs + 2` times.

    Args:
        fn: a compiled function or module, or a function around it: a step with its backward, say.
        runs: calls whose mean is told.

    Raises:
        InvalidArgument: `runs` is less than one.
    """
    return profiled(_journal, lambda: fn(*args, **kwargs), runs)
