"""The C++ back end as a plug-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from torchinductor.codegen.base import Built, CodegenBackend, KernelSource
from torchinductor.codegen.cpp.attention import plan_attention, write_attention
from torchinductor.codegen.cpp.libraries import files_of, libraries_of, text_of, units_of
from torchinductor.codegen.cpp.plan import Layout, planned
from torchinductor.codegen.cpp.rows import rows_of
from torchinductor.codegen.cpp.writer import write
from torchinductor.codegen.naming import described, name_of
from torchinductor.indexing import variable
from torchinductor.ir import Attention, Kernel, Template
from torchinductor.program import KernelCall
from torchinductor.schemas import DeviceTraits, InductorOptions


class CppBackend(CodegenBackend):
    """Kernels as C++ functions of one (or a few) translation units."""

    templates = MappingProxyType({"attention": plan_attention})
    # A core adds to its cache, and computes neighbouring positions together only where these are the channels of one
    # position. On an 8 x 64 x 112 x 112 image under 3 x 3 windows of stride 2 one core takes 2.7 ms to scatter and
    # 19.6 ms to gather by rows, 11.8 ms and 2.7 ms channels-last.
    traits: ClassVar[DeviceTraits] = DeviceTraits(walks_windows=True, repeated_roots=32)

    def legalize(self, kernel: Kernel, options: InductorOptions) -> list[Kernel]:
        kernel = planned(kernel, options.parallel_grain)
        return [replace(kernel, rows=rows_of(kernel, kernel.laid_out(Layout)))]

    def generate(self, kernel: Kernel, options: InductorOptions) -> KernelSource:
        text, title = write(kernel), described(stage.body for stage in kernel.stages)
        return KernelSource(text, name_of(title, text), kernel.origins)

    def generate_template(self, template: Template, options: InductorOptions) -> KernelSource:
        assert isinstance(template, Attention)
        text = write_attention(template)
        bodies = [function.body for function in template.functions]
        title = described(bodies, template.kind, template.direction, otherwise="")
        return KernelSource(text, name_of(title, text), template.loops.origins)

    def build(self, sources: Sequence[KernelSource], options: InductorOptions) -> Built:
        if not sources:
            return Built()
        found = libraries_of(sources, options)
        addresses = {number: loaded.address(sources[number]) for loaded in found for number in loaded.kernels}
        hits = sum(loaded.was_there for loaded in found)
        texts = [text_of(sources, unit) for unit in units_of(sources)]
        files = {f"kernels{k if k else ''}.cpp": text for k, text in enumerate(texts)}
        held = tuple(loaded.library for loaded in found)
        return Built(tuple(addresses[n] for n in range(len(sources))), (), files, held, hits, len(found) - hits)

    def facts(self) -> Mapping[str, str]:
        return {}  # the processor's are those of the process

    def binaries(self, sources: Sequence[KernelSource], options: InductorOptions) -> Mapping[str, Path] | None:
        return files_of(sources, options)

    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> KernelCall:
        symbols = tuple(variable(s) for s in kernel.symbols)
        return KernelCall(handle, slots, symbols, source.meta)
