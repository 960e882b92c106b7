"""Kernels that differ in numbers alone become one kernel, which is given these numbers: it is compiled once.

A network's layers are few forms at many sizes: of the 991 kernels of a DenseNet-121's training step, 794 are another
one with other numbers. What makes a kernel what it is stays in its family's key: its text but for the numbers, tiles,
threads, and of each number what the compiler makes use of (`Mark.likeness`: whether it is one, and the power of two
that it is a multiple of, which says how wide loads and stores are). A number that all of a family have stays a constant
of its text, and a kernel that is alone keeps all of its own. Which kernels a program has decides, so that another
process finds the same texts in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchinductor.codegen.base import KernelSource

from .expressions import POINTER_TYPES
from .marks import WIDEST, Argument, marks_of, replaced
from .writer import Given, TritonSource, written_out

_MOST = 32  # numbers that a kernel is given
_NAMES = {"i32": "n", "i64": "k"}  # what arguments' names begin with, but for floats'
_SIZES = {name: dtype.itemsize for dtype, name in POINTER_TYPES.items()}


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
    widest = _widest(source)
    likenesses = replaced(form.text, lambda mark: f"{{{mark.likeness(widest)}}}")
    return form.title, form.parameters, form.warps, source.stages, source.symbols, source.written, likenesses


def _widest(source: TritonSource) -> int:
    """Elements of the widest load or store."""
    assert source.form is not None
    return WIDEST // min((_SIZES[kind] for _, kind in source.form.parameters if kind in _SIZES), default=WIDEST)


def _as_one(members: Sequence[TritonSource]) -> list[TritonSource]:
    """Kernels of one key, with the text that takes the numbers in which they differ."""
    forms = [source.form for source in members if source.form is not None]
    widest = _widest(members[0])
    names: dict[tuple[object, ...], str] = {}  # arguments by their types, and the bits that the members have for them
    columns: list[tuple[Argument, ...]] = []  # by argument: the members'
    given: dict[int, Given] = {}
    for place, marks in enumerate(zip(*(marks_of(form.text) for form in forms), strict=True)):
        if len({mark.value for mark in marks}) > 1:
            column = tuple(mark.argument(widest) for mark in marks)
            key = (column[0].kind, *(argument.cell for argument in column))
            if key not in names:
                names[key] = f"{_NAMES.get(column[0].kind, 'f')}{len(names)}"
                columns.append(column)
            given[place] = Given(names[key], min(mark.multiple(widest) if mark.integral else 1 for mark in marks))
    if len(columns) > _MOST:
        return [replace(source, form=None) for source in members]
    arguments = [(name, str(kind)) for (kind, *_), name in names.items()]
    begun = len(members[0].signature)
    multiples = [min(argument.multiple for argument in column) for column in columns]
    divisors = tuple((begun + at, multiple) for at, multiple in enumerate(multiples) if multiple > 1)
    name, text = written_out(forms[0], given, arguments, divisors)
    return [
        replace(
            source,
            name=name,
            text=text,
            signature=(*source.signature, *arguments),
            divisors=divisors,
            numbers=tuple(column[member].cell for column in columns),
            form=None,
        )
        for member, source in enumerate(members)
    ]
