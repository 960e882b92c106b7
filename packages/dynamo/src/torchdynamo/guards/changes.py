"""What a call has that differs from what a version was made for."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence, Set

import torch

from torchdynamo.graph.numpy_values import SCALARS
from torchdynamo.graph.run_time_texts import HANDED_ON
from torchdynamo.guards.shape_program import STRIDE, run_program, same_constant
from torchdynamo.schemas import Guard, GuardKind, ShapeProgram, TensorGuard
from torchdynamo.sources import Item, Scope, Source, TensorSize, TensorStride, base_of, own_keys, resolve

_KINDS_READ = frozenset(
    {
        GuardKind.TYPE, GuardKind.TENSOR, GuardKind.EQUALS, GuardKind.IDENTITY, GuardKind.LENGTH, GuardKind.DICT_KEYS,
    }
)  # fmt: skip


def changed_sources(guards: Sequence[Guard], scope: Scope) -> set[Source]:
    """Sizes, strides, numbers, texts, tuples of constants, lengths, keys and functions that are not those of the
    version."""
    found: set[Source] = set()
    others: set[Source] = set()  # objects of another kind: to look into them as into the version's runs their own code
    for guard in guards:
        if guard.kind is GuardKind.SHAPE and not _is_within(others, *guard.payload.symbols.values()):
            found.update(_changed_stride(guard.payload, scope))
        if guard.source is None or guard.kind not in _KINDS_READ or _is_within(others, guard.source):
            continue
        try:
            value = resolve(guard.source, scope)
        except (LookupError, AttributeError, TypeError, ValueError):
            continue
        if _is_another(value, guard):
            others.add(guard.source)
        if guard.kind is GuardKind.IDENTITY:
            both = type(value) is type(guard.payload) is types.FunctionType
            if both and value.__code__ is guard.payload.__code__:
                found.add(guard.source)  # made anew by each call
        elif guard.kind is GuardKind.LENGTH:
            if type(value) in (list, tuple) and len(value) != guard.payload:
                found.add(guard.source)
        elif guard.kind is GuardKind.DICT_KEYS:
            if type(value) is dict and own_keys(value) != guard.payload:
                found.add(guard.source)
        elif guard.kind is GuardKind.EQUALS:
            found.update(_changed_constants(value, guard.payload, guard.source))
        elif (
            guard.kind is GuardKind.TENSOR
            and isinstance(value, torch.Tensor)
            and value.dim() == len(guard.payload.sizes)
        ):
            found.update(_changed_metadata(value, guard.payload, guard.source))
    return found


def _is_another(value: object, guard: Guard) -> bool:
    """Whether what is read beneath the guard's source may be something else in this object."""
    if guard.kind is GuardKind.TENSOR:
        return type(value) is not guard.payload.type
    if guard.kind is GuardKind.TYPE:
        return type(value) is not guard.payload
    return guard.kind is GuardKind.IDENTITY and value is not guard.payload


def _is_within(others: Set[Source], *sources: Source) -> bool:
    """Whether one of the sources is one of `others`, or reached through it."""
    for source in sources if others else ():
        step: Source | None = source
        while step is not None:
            if step in others:
                return True
            step = base_of(step)
    return False


def _changed_metadata(value: torch.Tensor, expected: TensorGuard, source: Source) -> Iterator[Source]:
    """Sizes that are others, or else strides, which have reasons of their own where the sizes are the same."""
    sizes = [dim for dim, size in enumerate(expected.sizes) if size not in (None, value.shape[dim])]
    yield from (TensorSize(source, dim) for dim in sizes)
    if not sizes and value.layout is torch.strided:
        strides = enumerate(zip(value.stride(), expected.strides, strict=True))
        yield from (TensorStride(source, dim) for dim, (one, other) in strides if other not in (None, one))


def _changed_stride(relation: ShapeProgram, scope: Scope) -> Iterator[Source]:
    """The stride that a relation speaks of, where it does not hold: it does not follow from the sizes."""
    stride = relation.symbols.get(STRIDE)
    if stride is None:
        return
    try:
        values = {name: resolve(source, scope) for name, source in relation.symbols.items()}
        if not run_program(relation.program, values):
            yield stride
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
        return


def outgrown(guards: Sequence[Guard], scope: Scope, symbols: Set[Source]) -> bool:
    """Whether a version does not fit a call for a number that is one of `symbols` from now on, so that what is made for
    the call takes the version's calls, too. A size or stride of 0 or 1 is never a symbol: neither the version's nor the
    call's."""
    alone = {
        TensorSize(guard.source, dim)
        for guard in guards
        if guard.kind is GuardKind.TENSOR and guard.source is not None
        for dim, size in enumerate(guard.payload.sizes)
        if size in (0, 1)
    }
    return any(_is_symbolic(source, scope) for source in (symbols - alone) & changed_sources(guards, scope))


def _is_symbolic(source: Source, scope: Scope) -> bool:
    value = resolve(source, scope)
    if type(source) in (TensorSize, TensorStride):
        return bool(value >= 2)
    return type(value) in (int, float, *SCALARS)


def _changed_constants(value: object, expected: object, source: Source) -> Iterator[Source]:
    """Of a constant that is another one: itself, and the numbers in a tuple or size that are others."""
    if type(value) is tuple and value and expected == ():
        yield source
    numbers = type(value) in (int, float) and type(expected) in (int, float)
    alike = type(value) is type(expected) and type(value) in (tuple, torch.Size, *HANDED_ON, *SCALARS)
    if not (numbers or alike) or same_constant(value, expected):
        return
    yield source
    if isinstance(value, tuple) and isinstance(expected, tuple) and len(value) == len(expected):
        for index, (part, other) in enumerate(zip(value, expected, strict=True)):
            yield from _changed_constants(part, other, Item(source, index))
