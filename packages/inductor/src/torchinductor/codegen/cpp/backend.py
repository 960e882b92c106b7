"""The C++ back end as a plug-in."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from torchinductor.cache import DiskCache
from torchinductor.codegen.base import Built, CodegenBackend, KernelSource
from torchinductor.codegen.cpp.attention import plan_attention, write_attention
from torchinductor.codegen.cpp.build import build_library, built_file, file_of
from torchinductor.codegen.cpp.plan import Layout, planned
from torchinductor.codegen.cpp.prelude import prelude
from torchinductor.codegen.cpp.rows import rows_of
from torchinductor.codegen.cpp.writer import write
from torchinductor.codegen.naming import PLACEHOLDER, described, name_of
from torchinductor.indexing import variable
from torchinductor.ir import Attention, Kernel, Template
from torchinductor.program import KernelCall
from torchinductor.schemas import DeviceTraits, InductorOptions

# A translation unit takes at most this many characters of kernels before a second one is begun in parallel.
_UNIT = 24_000


class CppBackend(CodegenBackend):
    """Kernels as C++ functions of one (or a few) translation units."""

    templates = MappingProxyType({"attention": plan_attention})
    # A core adds to its cache, and computes neighbouring positions together only where these are the channels of one
    # position. On an 8 x 64 x 112 x 112 image under 3 x 3 windows of stride 2 one core takes 2.7 ms to scatter and
    # 19.6 ms to gather by rows, 11.8 ms and 2.7 ms channels-last.
    traits: ClassVar[DeviceTraits] = DeviceTraits(walks_windows=True)

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
        cache = DiskCache(options.cache_dir)
        units, texts = _texts(sources)
        build = partial(build_library, cache=cache, cxx=options.cxx, brought=options.binaries)
        if len(texts) == 1:
            libraries = [build(texts[0])]
        else:
            with ThreadPoolExecutor(max_workers=4) as pool:
                libraries = list(pool.map(build, texts))
        addresses = [0] * len(sources)
        for (library, _), unit in zip(libraries, units, strict=True):
            for number in unit:
                addresses[number] = ctypes.cast(getattr(library, sources[number].meta), ctypes.c_void_p).value or 0
        hits = sum(hit for _, hit in libraries)
        files = {f"kernels{k if k else ''}.cpp": text for k, text in enumerate(texts)}
        return Built(tuple(addresses), (), files, tuple(lib for lib, _ in libraries), hits, len(libraries) - hits)

    def facts(self) -> Mapping[str, str]:
        return {}  # the processor's are those of the process

    def binaries(self, sources: Sequence[KernelSource], options: InductorOptions) -> Mapping[str, Path] | None:
        cache, found = DiskCache(options.cache_dir), {}
        for text in _texts(sources)[1] if sources else ():
            path = built_file(text, cache, options.cxx, options.binaries)
            if path is None:
                return None
            found[file_of(text)] = path
        return found

    def instruction(self, kernel: Kernel, source: KernelSource, handle: int, slots: tuple[int, ...]) -> KernelCall:
        symbols = tuple(variable(s) for s in kernel.symbols)
        return KernelCall(handle, slots, symbols, source.meta)


def _units(sources: Sequence[KernelSource]) -> list[list[int]]:
    """Kernels' numbers by translation unit, of about equal size."""
    total = sum(len(s.text) for s in sources)
    count = max(1, min(4, total // _UNIT))
    units: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number, source in enumerate(sources):
        unit = loads.index(min(loads))
        units[unit].append(number)
        loads[unit] += len(source.text)
    return [u for u in units if u]


def _texts(sources: Sequence[KernelSource]) -> tuple[list[list[int]], list[str]]:
    """The translation units, as kernels' numbers and as text."""
    units = _units(sources)
    return units, [_unit_text(sources, unit) for unit in units]


def _unit_text(sources: Sequence[KernelSource], unit: Sequence[int]) -> str:
    parts = [prelude()]
    for number in unit:
        if sources[number].origins:
            parts.append(f"// {', '.join(sources[number].origins[:12])}\n")
        parts.append(sources[number].text.replace(PLACEHOLDER, sources[number].meta, 1))
    return "\n".join(parts)
