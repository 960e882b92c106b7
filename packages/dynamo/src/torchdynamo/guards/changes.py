"""What a call has that differs from what a version was made for."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence

import torch

from torchdynamo.graph.run_time_texts import HANDED_ON
from torchdynamo.guards.shape_program import same_constant
from torchdynamo.schemas import Guard, GuardKind
from torchdynamo.sources import Item, Scope, Source, TensorSize, resolve

_KINDS_THAT_CHANGE = frozenset({GuardKind.TENSOR, GuardKind.EQUALS, GuardKind.IDENTITY, GuardKind.LENGTH})


def changed_sources(guards: Sequence[Guard], scope: Scope) -> set[Source]:
    """Sizes, numbers, texts, tuples of constants, lengths and functions that are not those of the version."""
    found: set[Source] = set()
    for guard in guards:
        if guard.source is None or guard.kind not in _KINDS_THAT_CHANGE:
            continue
        try:
            value = resolve(guard.source, scope)
        except (LookupError, AttributeError, TypeError, ValueError):
            continue
        if guard.kind is GuardKind.IDENTITY:
            both = type(value) is type(guard.payload) is types.FunctionType
            if both and value.__code__ is guard.payload.__code__:
                found.add(guard.source)  # made anew by each call
        elif guard.kind is GuardKind.LENGTH:
            if type(value) is list and len(value) != guard.payload:
                found.add(guard.source)
        elif guard.kind is GuardKind.EQUALS:
            found.update(_changed_constants(value, guard.payload, guard.source))
        elif isinstance(value, torch.Tensor) and value.dim() == len(guard.payload.sizes):
            for dim, (size, expected) in enumerate(zip(value.shape, guard.payload.sizes, strict=True)):
                if expected is not None and size != expected:
                    found.add(TensorSize(guard.source, dim))
    return found


def is_symbolic(source: Source, scope: Scope) -> bool:
    """Whether a number that has differed becomes a symbol in a version for a call: a size of 0 or 1 is none."""
    value = resolve(source, scope)
    return type(value) is float or (type(value) is int and (value >= 2 or type(source) is not TensorSize))


def _changed_constants(value: object, expected: object, source: Source) -> Iterator[Source]:
    """Of a constant that is another one: itself, and the numbers in a tuple or size that are others."""
    numbers = type(value) in (int, float) and type(expected) in (int, float)
    alike = type(value) is type(expected) and type(value) in (tuple, torch.Size, *HANDED_ON)
    if not (numbers or alike) or same_constant(value, expected):
        return
    yield source
    if isinstance(value, tuple) and isinstance(expected, tuple) and len(value) == len(expected):
        for index, (part, other) in enumerate(zip(value, expected, strict=True)):
            yield from _changed_constants(part, other, Item(source, index))
