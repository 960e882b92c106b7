"""What the program has changed of the outside so far: what a function that becomes a graph may not do."""

from __future__ import annotations

from typing import TypeAlias

from torchdynamo.interpreter.iterators import LocalIterator
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.outside.externals import External
from torchdynamo.outside.outside import Outside
from torchdynamo.sources import own_items

# How many writes there were, what the shadows hold, and how many later ones were written to.
Effects: TypeAlias = tuple[int, list[object], int]


def effects_so_far(outside: Outside, known: Effects | None = None) -> Effects:
    """The program's effects on the outside so far; `known`: an earlier answer, to compare with."""
    count = len(known[1]) if known is not None else None
    shadows = outside.externals.shadows
    contents = [_contents(record) for record in shadows[:count]]
    later = [record for record in shadows[len(contents) :] if _contents(record) != _as_ids(record.snapshot)]
    return outside.overlays.count, contents, len(later)


def _contents(record: External) -> object:
    shadow = record.value
    if isinstance(shadow, LocalIterator):
        return _as_ids({name: getattr(shadow, name, MISSING) for name in record.snapshot})
    return _as_ids(shadow)


def _as_ids(value: object) -> object:
    if isinstance(value, dict):
        return [(id(key), id(dict.__getitem__(value, key))) for key in dict.keys(value)]
    if isinstance(value, (set, frozenset)):
        return set(map(id, own_items(value)))
    return list(map(id, own_items(value)))
