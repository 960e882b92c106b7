"""The libraries that hold a graph's kernels: of translation units of its own, or of graphs before it.

Graphs of one program have kernels in common: the stages of a backward, layers that are captured one by one. What this
process has loaded is not built again; the others go into units of their own. An index in the cache folder says where a
graph's kernels came to lie, so that another process finds them whichever graphs it compiles.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

from primtorch.frozen import record
from torchinductor.cache import DiskCache, content_key
from torchinductor.codegen.base import KernelSource
from torchinductor.codegen.cpp.build import build_library, built_file, file_of, identity_of, key_of, opened
from torchinductor.codegen.cpp.prelude import prelude
from torchinductor.codegen.naming import PLACEHOLDER
from torchinductor.schemas import InductorOptions

_log = logging.getLogger(__name__)

# A translation unit takes at most this many characters of kernels before a second one is begun in parallel.
_UNIT = 24_000
_INDEX = ".json"  # a text, of the kinds of files that the cache folder holds

Unit: TypeAlias = Sequence[int]  # kernels, by their numbers among a graph's


@record
class Loaded:
    """A library, and which of a graph's kernels are taken from it. `was_there`: it was not built for this graph."""

    library: ctypes.CDLL
    kernels: Unit
    was_there: bool

    def address(self, source: KernelSource) -> int:
        """Where one of its kernels is in memory."""
        return ctypes.cast(getattr(self.library, source.meta), ctypes.c_void_p).value or 0


# Libraries that this process has loaded, by what was built: a kernel, by which compiler, in which cache folder.
_LOADED: dict[str, ctypes.CDLL] = {}


def libraries_of(sources: Sequence[KernelSource], options: InductorOptions) -> list[Loaded]:
    """The libraries of a graph's kernels, which are built where they are neither loaded nor in the cache folder.

    Raises:
        CompilerMissing, BuildFailed: see `build_library`.
    """
    whole = units_of(sources)
    texts = [text_of(sources, unit) for unit in whole]
    cache = DiskCache(options.cache_dir)
    build = partial(_built, sources, cache, options)
    if all(built_file(text, cache, options.cxx, options.binaries) is not None for text in texts):
        found = build(whole)
    else:
        index = _index_key(texts, cache, options)
        found = _indexed(sources, cache, index)
        if not found:
            known = _known(_names(sources, cache, options))
            there = {number for loaded in known for number in loaded.kernels}
            missing = [number for number in range(len(sources)) if number not in there]
            found = [*known, *build(units_of(sources, missing))]
            if known:
                _write_index(cache, index, found)
    names = _names(sources, cache, options) if options.binaries is None else []
    _LOADED.update((names[number], loaded.library) for loaded in found for number in loaded.kernels if names)
    return found


def files_of(sources: Sequence[KernelSource], options: InductorOptions) -> dict[str, Path] | None:
    """The files of a graph's kernels in units of its own, by the names of what is brought along; None where its kernels
    are no longer in the cache folder. Units are built here whose kernels lie in those of other graphs.

    Raises:
        CompilerMissing, BuildFailed: see `build_library`.
    """
    texts = [text_of(sources, unit) for unit in units_of(sources)] if sources else []
    cache = DiskCache(options.cache_dir)
    found = [built_file(text, cache, options.cxx, options.binaries) for text in texts]
    if None in found and _indexed(sources, cache, _index_key(texts, cache, options)):
        for text in texts:
            build_library(text, cache, options.cxx, options.binaries)
        found = [built_file(text, cache, options.cxx, options.binaries) for text in texts]
    files = {file_of(text): path for text, path in zip(texts, found, strict=True) if path is not None}
    return files if None not in found else None


def _index_key(texts: Sequence[str], cache: DiskCache, options: InductorOptions) -> str:
    return content_key("index", *(key_of(text, cache, options.cxx) for text in texts))


def _names(sources: Sequence[KernelSource], cache: DiskCache, options: InductorOptions) -> list[str]:
    """What each kernel is known by in this process."""
    identity = f"{cache.folder}|{identity_of(cache, options.cxx)}"
    return [content_key("kernel", source.text, source.meta, identity) for source in sources]


def _known(names: Sequence[str]) -> list[Loaded]:
    """Libraries that are loaded, and whose files are still there for other processes."""
    held: dict[str, list[int]] = {}
    libraries: dict[str, ctypes.CDLL] = {}
    for number, name in enumerate(names):
        library = _LOADED.get(name)
        if library is not None:
            libraries[library._name] = library
            held.setdefault(library._name, []).append(number)
    return [Loaded(libraries[path], held[path], True) for path in held if Path(path).exists()]


def _built(
    sources: Sequence[KernelSource], cache: DiskCache, options: InductorOptions, units: Sequence[Unit]
) -> list[Loaded]:
    """The libraries of translation units, found in the cache folder or made in parallel."""
    make = partial(build_library, cache=cache, cxx=options.cxx, brought=options.binaries)
    texts = [text_of(sources, unit) for unit in units]
    if len(texts) < 2:
        libraries = [make(text) for text in texts]
    else:
        with ThreadPoolExecutor(max_workers=4) as pool:
            libraries = list(pool.map(make, texts))
    return [Loaded(library, unit, hit) for (library, hit), unit in zip(libraries, units, strict=True)]


# -- the index of a graph whose kernels lie in units of several graphs --------------------------------------------


def _write_index(cache: DiskCache, key: str, found: Iterable[Loaded]) -> None:
    """Says which files hold a graph's kernels, where all of them are in the cache folder."""
    rows = []
    for loaded in found:
        path = Path(loaded.library._name)
        if cache.find(path.stem, path.suffix) != path:
            return
        rows.append([path.stem, list(loaded.kernels)])
    try:
        written = cache.temporary(key, _INDEX)
        written.write_text(json.dumps(rows))
        cache.publish(written, key, _INDEX)
    except OSError as error:  # no room, say: another process builds the kernels anew
        cache.give_up(error)


def _indexed(sources: Sequence[KernelSource], cache: DiskCache, key: str) -> list[Loaded]:
    """The libraries that an index names; none where it is not there, or does not fit the files beside it."""
    path = cache.find(key, _INDEX)
    found: list[Loaded] = []
    try:
        for stem, kernels in json.loads(path.read_text()) if path is not None else ():
            library = opened(cache.find(stem, ".so")) if re.fullmatch("[0-9a-f]{40}", stem) else None
            if library is None:
                return []
            found.append(Loaded(library, [int(number) for number in kernels], True))
            for number in found[-1].kernels:
                found[-1].address(sources[number])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("the index %s of cached kernels does not hold (%s): building them again", path, error)
        return []
    held = sorted(number for loaded in found for number in loaded.kernels)
    return found if held == list(range(len(sources))) else []


# -- translation units ----------------------------------------------------------------------------------------------


def units_of(sources: Sequence[KernelSource], chosen: Iterable[int] | None = None) -> list[list[int]]:
    """The numbers of all kernels, or of those that are chosen, by translation unit, of about equal size."""
    numbers = range(len(sources)) if chosen is None else list(chosen)
    total = sum(len(sources[number].text) for number in numbers)
    count = max(1, min(4, total // _UNIT))
    units: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in numbers:
        unit = loads.index(min(loads))
        units[unit].append(number)
        loads[unit] += len(sources[number].text)
    return [u for u in units if u]


def text_of(sources: Sequence[KernelSource], unit: Unit) -> str:
    """A translation unit as text."""
    parts = [prelude()]
    for number in unit:
        if sources[number].origins:
            parts.append(f"// {', '.join(sources[number].origins[:12])}\n")
        parts.append(sources[number].text.replace(PLACEHOLDER, sources[number].meta, 1))
    return "\n".join(parts)
