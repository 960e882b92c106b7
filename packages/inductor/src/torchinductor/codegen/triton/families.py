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
    likenesses = replaced(form.body, lambda mark: f"{{{mark.likeness}}}")
    return form.title, form.parameters, form.warps, source.stages, source.symbols, source.written, likenesses


def _as_one(members: Sequence[TritonSource]) -> list[TritonSource]:
    """Kernels of one key, with the text that takes the numbers in which they differ."""
    bodies = [source.form.body for source in members if source.form is not None]
    columns = list(zip(*map(marks_of, bodies), strict=True))  # of each number, what the members have there
    names: dict[tuple[object, ...], str] = {}  # arguments by the values that the members have for them
    given: list[tuple[Mark, ...]] = []  # by argument
    for column in columns:
        values = _values(column)
        if len({mark.value for mark in column}) > 1 and values not in names:
            names[values] = f"{'n' if column[0].integral else 'f'}{len(names)}"
            given.append(column)
    if len(given) > _MOST:
        return [replace(source, form=None) for source in members]
    first = members[0]
    assert first.form is not None
    texts = iter([column[0].named(names[v]) if (v := _values(column)) in names else column[0].plain for column in columns])
    body = replaced(bodies[0], lambda _: next(texts))
    arguments = [(names[_values(column)], _TYPES.get(column[0].use, "i32")) for column in given]
    begun = len(first.signature)
    divisors = tuple(
        (begun + place, column[0].divisor)
        for place, column in enumerate(given)
        if column[0].integral and column[0].divisor > 1
    )
    name, text = written_out(first.form, body, arguments, divisors)
    return [
        replace(
            source,
            name=name,
            text=text,
            signature=(*source.signature, *arguments),
            divisors=divisors,
            numbers=tuple(_cell(column[member]) for column in given),
            form=None,
        )
        for member, source in enumerate(members)
    ]


def _values(column: Sequence[Mark]) -> tuple[object, ...]:
    """Where the members have the same numbers of one type in several places, these are one argument."""
    return (_TYPES.get(column[0].use, "i32"), *(mark.value for mark in column))


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
