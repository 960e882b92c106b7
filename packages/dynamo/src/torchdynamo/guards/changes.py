"""What a call has that differs from what a version was made for."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch

from torchdynamo.graph.run_time_texts import HANDED_ON
from torchdynamo.guards.shape_program import same_constant
from torchdynamo.schemas import Guard, GuardKind
from torchdynamo.sources import Scope, Source, TensorSize, resolve

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
            numbers = type(value) in (int, float) and type(guard.payload) in (int, float)
            alike = type(value) is type(guard.payload) and type(value) in (tuple, *HANDED_ON)
            if (numbers or alike) and not same_constant(value, guard.payload):
                found.add(guard.source)
        elif isinstance(value, torch.Tensor) and value.dim() == len(guard.payload.sizes):
            for dim, (size, expected) in enumerate(zip(value.shape, guard.payload.sizes, strict=True)):
                if expected is not None and size != expected:
                    found.add(TensorSize(guard.source, dim))
    return found
