"""What a code generation back end is, and the registry of them by device type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch

from primtorch.frozen import record
from torchinductor.errors import InductorError, UnknownDevice
from torchinductor.ir import Bundle, Kernel, Template, TemplateKind, loops_of
from torchinductor.ops import ELEMENTWISE
from torchinductor.program import Instruction, Launcher
from torchinductor.schemas import DeviceTraits, InductorOptions


@record
class KernelSource:
    """A kernel as source text. Kernels with equal `text` are built once: the text must not depend on buffers' names.

    Attributes:
        meta: whatever the back end needs again for `build` and `instruction`.
        origins: names of the graph's nodes that it computes.
    """

    text: str
    meta: Any = None
    origins: tuple[str, ...] = ()


@record
class Built:
    """Loaded kernels, one entry a source: addresses for `Program.kernels`, or handles for `Program.launchers`.

    Attributes:
        files: the text that was built, by the names of its files.
        keepalive: what must live as long as the kernels do.
        cache_hits, cache_misses: how many were found built, and were built.
    """

    addresses: tuple[int, ...] = ()
    launchers: tuple[Launcher, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    keepalive: tuple[object, ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0


@record
class Building:
    """Sources that are being built.

    Attributes:
        finish: waits for the end.
        apart: whether other processes are at work, and this one can go on meanwhile.
    """

    finish: Callable[[], Built]
    apart: bool = False


Planner: TypeAlias = Callable[[Template], Template | None]
"""Gives a template the layout that it is to be generated with; None where the design does not fit it. It is asked when
the template is made, and again when everything that may join it has."""


class CodegenBackend(ABC):
    """Maps fused kernels of one device type to code."""

    # What the back end makes by designs of its own: without an entry, no template of the kind is made for its device.
    templates: ClassVar[Mapping[TemplateKind, Planner]] = MappingProxyType({})
    traits: ClassVar[DeviceTraits] = DeviceTraits()
    builds_apart: ClassVar[bool] = False  # whether `begin` leaves the work to other processes

    def foresee(self, options: InductorOptions) -> None:  # noqa: B027 - most back ends have nothing to start
        """Called before a call is captured of which nothing was kept, whatever its devices are: where the program uses
        this one, what takes time to start can start in the background."""

    def warm(self, options: InductorOptions) -> None:  # noqa: B027
        """The same for a graph with values on the device, of which some or all kernels may be in a cache."""

    def legalize(self, kernel: Kernel, options: InductorOptions) -> list[Kernel]:
        """Kernels that together do a scheduled kernel's work on this device, in order; by default the kernel itself.

        Buffers that they add (workspaces) stand in their `buffers`; the driver allocates them like any other. What is
        decided here of loops, tiles or threads goes into their `layout`, which nobody else looks at.
        """
        return [kernel]

    def legalize_template(self, template: Template, options: InductorOptions) -> list[Kernel | Template]:
        """What does the work of a template that an entry of `templates` has planned, planned too, in order; by default
        the template itself."""
        return [template]

    @abstractmethod
    def generate(self, kernel: Kernel, options: InductorOptions) -> KernelSource:
        """Source for a kernel. Its pointer arguments are `kernel.arguments`, its int64 ones `kernel.symbols`."""

    def generate_template(self, template: Template, options: InductorOptions) -> KernelSource:
        """Source for a template that an entry of `templates` has planned, with the arguments of its loops."""
        raise NotImplementedError(f"{type(self).__name__} offers no template")

    def bundle_key(self, kernel: Kernel) -> Hashable | None:
        """What a planned kernel has to have in common with others for one launch to run them beside each other; None
        where it runs alone."""
        return None

    def generate_bundle(self, bundle: Bundle, options: InductorOptions) -> KernelSource:
        """Source for kernels of one key; its arguments are `bundle.arguments`."""
        raise NotImplementedError(f"{type(self).__name__} bundles no kernels")

    def share(self, sources: Sequence[KernelSource], options: InductorOptions) -> Sequence[KernelSource]:
        """The sources of a program, whose texts are distinct, in their order, where several may be given one text that
        does for all of them. What an entry's `meta` says of its own launches goes to `instruction`; of sources of equal
        text the first is built. By default they stay as they are."""
        return sources

    @abstractmethod
    def build(self, sources: Sequence[KernelSource], options: InductorOptions) -> Built:
        """Compiles and loads sources, in parallel and through the disk cache."""

    def begin(self, sources: Sequence[KernelSource], options: InductorOptions) -> Building:
        """Begins what `build` does; by default all of it is done when it is to be finished."""
        return Building(partial(self.build, sources, options))

    def binaries(self, sources: Sequence[KernelSource], options: InductorOptions) -> Mapping[str, Path] | None:
        """The files that `build` made of sources, by the names under which it asks `options.binaries` for them; None
        where a file is not there, or the back end's kernels are none that can be taken along."""
        return None

    def facts(self) -> Mapping[str, str] | None:
        """What programs for the device depend on beside what the process itself is, by name; None where they are not
        kept for other processes."""
        return None

    @abstractmethod
    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> Instruction:
        """The instruction that runs the kernel. `handle` indexes Program.kernels or Program.launchers."""

    def bundle_instruction(
        self, bundle: Bundle, source: KernelSource, handle: int, slots: tuple[int, ...]
    ) -> Instruction:
        """The instruction that runs a bundle's kernels."""
        raise NotImplementedError(f"{type(self).__name__} bundles no kernels")


_BACKENDS: dict[str, CodegenBackend] = {}


def register_codegen(device_type: str, backend: CodegenBackend) -> None:
    """Makes `backend` the one for a device type ("cpu", "cuda", ...); the last registration holds."""
    _BACKENDS[device_type] = backend


def foresee(options: InductorOptions) -> None:
    """Tells all back ends that something is about to be captured and compiled."""
    for found in _BACKENDS.values():
        found.foresee(options)


def warm_codegen(device_type: str, options: InductorOptions) -> None:
    """Lets the back end of a device type, if there is one, start in the background what takes time to start."""
    found = _BACKENDS.get(device_type)
    if found is not None:
        found.warm(options)


def builds_apart(device_types: Iterable[str]) -> bool:
    """Whether kernels for one of these types of devices are built by other processes."""
    return any(found.builds_apart for kind in device_types if (found := _BACKENDS.get(kind)) is not None)


def codegen_for(device_type: str) -> CodegenBackend:
    """The back end of a device type.

    Raises:
        UnknownDevice: none is registered.
    """
    found = _BACKENDS.get(device_type)
    if found is None:
        known = ", ".join(sorted(_BACKENDS)) or "none"
        raise UnknownDevice(
            f"no code generation back end for device type {device_type!r} (registered: {known}); "
            "give one to torchinductor.register_codegen"
        )
    return found


def legalized(operation: Kernel | Template, options: InductorOptions) -> Sequence[Kernel | Template]:
    """What the back end of an operation's device makes of it, planned, in order."""
    backend = codegen_for(operation.device.type)
    planned = backend.templates[operation.kind](operation) if isinstance(operation, Template) else None
    if planned is None:
        return backend.legalize(loops_of(operation), options)
    return backend.legalize_template(planned, options)


def bundle_key(kernel: Kernel) -> Hashable | None:
    """What the back end of a planned kernel's device says of kernels that may share a launch."""
    return codegen_for(kernel.device.type).bundle_key(kernel)


def generated(operation: Kernel | Template | Bundle, options: InductorOptions) -> KernelSource:
    """The source of what `legalized` has planned."""
    backend = codegen_for(operation.device.type)
    if isinstance(operation, Bundle):
        return backend.generate_bundle(operation, options)
    if isinstance(operation, Template):
        return backend.generate_template(operation, options)
    return backend.generate(operation, options)


def takes(template: Template) -> bool:
    """Whether the back end of a template's device, if there is one, makes it."""
    backend = _BACKENDS.get(template.device.type)
    planner = backend.templates.get(template.kind) if backend is not None else None
    return planner is not None and planner(template) is not None


def traits_of(device: torch.device) -> DeviceTraits:
    """What is cheap and what is dear on a device; the plain traits where no back end says."""
    backend = _BACKENDS.get(device.type)
    return DeviceTraits() if backend is None else backend.traits


def walks_windows(device: torch.device) -> bool:
    """What `primtorch.lower` asks of a device, by its traits."""
    return traits_of(device).walks_windows


def facts_of(device_type: str) -> Mapping[str, str] | None:
    """What the back end of a device type says that programs depend on; None where they are not kept for other
    processes, or nobody makes any."""
    backend = _BACKENDS.get(device_type)
    return None if backend is None else backend.facts()


def require_texts(back_end: str, tables: Iterable[Collection[str]]) -> None:
    """Raises InductorError where a back end's tables have no text for an operation of `ELEMENTWISE`."""
    missing = sorted(ELEMENTWISE.keys() - set().union(*tables))
    if missing:
        raise InductorError(f"the {back_end} back end has no text for {', '.join(missing)}")
