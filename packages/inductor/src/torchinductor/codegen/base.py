"""What a code generation back end is, and the registry of them by device type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchinductor.errors import UnknownDevice
from torchinductor.ir import Kernel
from torchinductor.program import Instruction
from torchinductor.schemas import InductorOptions


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as source text. Kernels with equal `text` are built once: the text must not depend on buffers' names."""

    text: str
    meta: Any = None  # whatever the back end needs again for `build` and `instruction`
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """Loaded kernels, one entry a source: addresses for `Program.kernels`, or handles for `Program.launchers`."""

    addresses: tuple[int, ...] = ()
    launchers: tuple[Any, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    keepalive: tuple[Any, ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0


class CodegenBackend(ABC):
    """Maps fused kernels of one device type to code."""

    def warm(self, options: InductorOptions) -> None:  # noqa: B027 - most back ends have nothing to start
        """Called before a graph is lowered: what takes time to start can start in the background."""

    def legalize(self, kernel: Kernel, options: InductorOptions) -> list[Kernel]:
        """Kernels that together do a scheduled kernel's work on this device, in order; by default the kernel itself.

        Buffers that they add (workspaces) stand in their `buffers`; the driver allocates them like any other. What is
        decided here of loops, tiles or threads goes into their `layout`, which nobody else looks at.
        """
        return [kernel]

    @abstractmethod
    def generate(self, kernel: Kernel, options: InductorOptions) -> KernelSource:
        """Source for a kernel. Its pointer arguments are `kernel.arguments`, its int64 ones `kernel.symbols`."""

    @abstractmethod
    def build(self, sources: Sequence[KernelSource], options: InductorOptions) -> Built:
        """Compiles and loads sources, in parallel and through the disk cache."""

    @abstractmethod
    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> Instruction:
        """The instruction that runs the kernel. `handle` indexes Program.kernels or Program.launchers."""


_BACKENDS: dict[str, CodegenBackend] = {}


def register_codegen(device_type: str, backend: CodegenBackend) -> None:
    """Makes `backend` the one for a device type ("cpu", "cuda", ...); the last registration holds."""
    _BACKENDS[device_type] = backend


def warm_codegen(device_type: str, options: InductorOptions) -> None:
    """Lets the back end of a device type, if there is one, start in the background what takes time to start."""
    found = _BACKENDS.get(device_type)
    if found is not None:
        found.warm(options)


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
