"""`torchcompile.save`: what a compiled function or module has become, in one file."""

from __future__ import annotations

import dataclasses
import inspect
import os
import types
from collections.abc import Callable

import torch

import torchdynamo
import torchinductor
from torchcompile import backends
from torchcompile.artifacts import archive, identity
from torchcompile.artifacts.schemas import FORMAT, Manifest
from torchcompile.backends import Toolchain, inductor_options
from torchcompile.errors import ArtifactError, InvalidArgument
from torchcompile.shelf import Kept, read_graph
from torchdynamo.api import owner_of
from torchdynamo.function import Function

_WHY_NOT = "it calls functions or operators of the program's own, holds objects, or is for a device of another back end"
# Options of the machine, and those under which nothing is kept.
_NOT_SAVED = frozenset(
    {"cache", "keep_frames", "cxx", "dump", "verify", "check_kernels", "minify_on_error", "progress"}
)


def save(compiled: torchdynamo.Exported | Callable[..., object], file: str | os.PathLike[str]) -> None:
    """Writes an exported graph, or what a compiled function or module has become, for `load` in other processes.

    Of a compiled model that is all that its calls have compiled until now: forwards, backwards, every shape. Its
    parameters are not part of it: they are saved as ever, by `state_dict()`.

    Args:
        compiled: what `export` gave, or `compile` with the back end "inductor".

    Raises:
        ArtifactError: nothing has been compiled yet, or something that was has no form in a file; the message names it.
        InvalidArgument: it is nothing that `compile` gave.
        NotExportable: something of an exported graph has no form in a file.
    """
    if isinstance(compiled, torchdynamo.Exported):
        torchdynamo.save(compiled, file)
        return
    state = _state_of(compiled)
    toolchain = _toolchain_of(state)
    contents: dict[str, bytes] = {}
    devices: set[str] = set()
    for kept in toolchain.kept:
        contents.update(_entries(kept, toolchain, devices))
    if not contents:
        raise ArtifactError("nothing has been compiled yet: call the compiled function or module, and save it then")
    frames = toolchain.frames.used if toolchain.frames is not None else {}
    contents.update((archive.frame_entry(key), text.encode()) for key, text in frames.items())
    chosen = toolchain.options
    options = {
        item.name: getattr(chosen, item.name) for item in dataclasses.fields(chosen) if item.name not in _NOT_SAVED
    }
    settings: dict[str, object] = {
        "fullgraph": state.options.fullgraph,
        "dynamic": state.options.dynamic,
        "name": toolchain.prefix.removesuffix("_") or None,
    }
    programs = [row for entry in state.versions() for row in entry.info.interpreted]
    code, titles = identity.rows_of(programs), tuple(kept.title for kept in toolchain.kept)
    bound_to = tuple(sorted(devices))
    manifest = Manifest(FORMAT, identity.facts(bound_to), settings, options, code, titles, bound_to, {})
    archive.write(file, manifest, contents)


def _state_of(compiled: object) -> Function:
    """Capture's record of what `compile` gave, or of a module that was compiled in place."""
    found = compiled
    if isinstance(compiled, torch.nn.Module):
        found = vars(type(compiled)).get("__call__") if "_torchcompile_original" in vars(type(compiled)) else None
        found = found or compiled._compiled_call_impl
    if isinstance(found, types.FunctionType) or found is None:
        raise InvalidArgument(f"save takes what torchcompile.compile or export gave, not {compiled!r}")
    try:
        return owner_of(found)
    except TypeError as error:
        raise InvalidArgument(f"save takes what torchcompile.compile or export gave, not {compiled!r}") from error


def _toolchain_of(state: Function) -> Toolchain:
    backend = inspect.unwrap(state.backend)
    arguments = getattr(backend, "args", ())
    if getattr(backend, "func", None) is not backends.inductor or not isinstance(arguments[0], Toolchain):
        raise ArtifactError("only what the back end 'inductor' compiles is saved")
    return arguments[0]


def _entries(kept: Kept, toolchain: Toolchain, devices: set[str]) -> dict[str, bytes]:
    """The compiled form of a captured graph, and its kernels. `devices` is told what they are for."""
    options = toolchain.options
    if options.cache is None or options.dump is not None or options.verify or options.check_kernels:
        raise ArtifactError(
            "nothing is kept of what is compiled with options cache=None, dump, verify or check_kernels: leave them out"
        )
    if not kept.is_whole:
        raise ArtifactError(
            f"{kept.title} has no form in a file: " + (f"it holds {kept.refused}" if kept.refused else _WHY_NOT)
        )
    brought = toolchain.brought
    settings = dataclasses.replace(inductor_options(options), binaries=brought.binaries if brought else None)
    found: dict[str, bytes] = {}
    for name, text in kept.parts.items():
        found[archive.program_entry(name)] = text.encode()
        graph = read_graph(text)
        if graph is None:
            continue
        devices |= torchinductor.devices_of(graph)
        files = torchinductor.binaries_of(graph, settings)
        if files is None:
            raise ArtifactError(f"{kept.title}: its kernels are no longer in {options.cache}: call it anew, then save")
        found.update((archive.kernel_entry(name), path.read_bytes()) for name, path in files.items())
    return found
