"""Kernels that differ in numbers alone become one kernel, which is given these numbers: it is compiled once.

A network's layers are few forms at many sizes: of the 998 kernels of a DenseNet-121's training step, 729 are another
one with other strides. What makes a kernel what it is stays in its family's key: its text but for the numbers, tiles,
threads, and of each number what the compiler makes use of (`Mark.likeness`: whether it is one, and the power of two
that it is a multiple of, which says how wide loads and stores are). A number that all of a family have stays a constant
of its text, and a kernel that is alone keeps all of its own. Which kernels a program has decides, so that another
process finds the same texts in the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from torchinductor.codegen.base import KernelSource

from .marks import Mark, marks_of, replaced
from .writer import TritonSource, written_out

_MOST = 32  # numbers that a kernel is given
_TYPES = {"f": "fp32", "d": "fp64"}
_PACKED = {"f": ("<f", "<i"), "d": ("<d", "<q")}


def share_sources(sources: Sequence[KernelSource], share: bool) -> list[KernelSource]:
    """The distinct sources of a program, in their order, those of one family with one text if they are to `share`."""
    metas: list[TritonSource] = [source.meta for source in sources]
    found = shared(metas) if share else [replace(meta, form=None) for meta in metas]
    return [replace(source, text=meta.text, meta=meta) for source, meta in zip(sources, found, strict=True)]


def shared(sources: Sequence[TritonSource]) -> list[TritonSource]:
    """The kernels, which have different texts, in their order; those of one family with one text."""
    families: dict[object, list[int]] = {}
    for place, source in enumerate(sources):
        if source.form is not None:
            families.setdefault(_key(source), []).append(place)
    result = [replace(source, form=None) for source in sources]
    for places in families.values():
        if len(places) > 1:
            for place, made in zip(places, _as_one([sources[place] for place in places]), strict=True):
                result[place] = made
    return result


def _key(source: TritonSource) -> object:
    """What the kernels of a family have in common."""
    assert source.form is not None
    form = source.form
    likenesses = replaced(form.text, lambda mark: f"{{{mark.likeness}}}")
    return form.title, form.parameters, form.warps, source.stages, source.symbols, source.written, likenesses


def _as_one(members: Sequence[TritonSource]) -> list[TritonSource]:
    """Kernels of one key, with the text that takes the numbers in which they differ."""
    forms = [source.form for source in members if source.form is not None]
    names: dict[tuple[object, ...], str] = {}  # arguments by the values that the members have for them
    columns: list[tuple[Mark, ...]] = []  # by argument: the members' numbers
    given: dict[int, str] = {}
    for place, column in enumerate(zip(*(marks_of(form.text) for form in forms), strict=True)):
        if len({mark.value for mark in column}) > 1:
            values = (_TYPES.get(column[0].use, "i32"), *(mark.value for mark in column))
            if values not in names:
                names[values] = f"{'n' if column[0].integral else 'f'}{len(names)}"
                columns.append(column)
            given[place] = names[values]
    if len(columns) > _MOST:
        return [replace(source, form=None) for source in members]
    arguments = [(name, str(kind)) for (kind, *_), name in names.items()]
    begun = len(members[0].signature)
    multiples = [min(mark.divisor for mark in column) if column[0].integral else 1 for column in columns]
    divisors = tuple((begun + at, divisor) for at, divisor in enumerate(multiples) if divisor > 1)
    name, text = written_out(forms[0], given, arguments, divisors)
    return [
        replace(
            source,
            name=name,
            text=text,
            signature=(*source.signature, *arguments),
            divisors=divisors,
            numbers=tuple(_cell(column[member]) for column in columns),
            form=None,
        )
        for member, source in enumerate(members)
    ]


def number_of(cell: int, kind: str) -> int | float:
    """What a launch is given as an argument of this type, as a number."""
    use = next((use for use, name in _TYPES.items() if name == kind), None)
    if use is None:
        return cell
    of_float, of_bits = _PACKED[use]
    found: float = struct.unpack(of_float, struct.pack(of_bits, cell))[0]
    return found


def _cell(mark: Mark) -> int:
    """A number as a launch is given it: a float by its bits."""
    if mark.integral:
        return int(mark.value)
    of_float, of_bits = _PACKED[mark.use]
    found: int = struct.unpack(of_bits, struct.pack(of_float, mark.value))[0]
    return found
