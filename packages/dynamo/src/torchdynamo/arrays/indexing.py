"""Items of arrays: basic indices are views, others copies, and both are places that a program writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.arrays.values import Array, arrays_in, model_of
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.arrays.world import ArrayWorld
_WHOLE = (int, slice, type(None), type(...))


def is_basic(key: object) -> bool:
    """Whether NumPy gives a view for a key: slices, integers, None and an ellipsis."""
    items = key if type(key) is tuple else (key,)
    return all(
        (isinstance(item, _WHOLE) and not isinstance(item, bool)) or isinstance(item, numpy.integer) for item in items
    )


def basic(array: Array, key: object) -> tuple[torch.Tensor, frozenset[int]]:
    """The view by a basic index that NumPy took: the tensor along positive strides, and its reversed dims."""
    view, flipped, dim, made = array.tensor, set(), 0, 0
    for item in full_key(key, array.model.ndim):
        if item is None:
            view = view.unsqueeze(made)
            made += 1
            continue
        size = array.model.shape[dim]
        reverse = dim in array.flipped
        dim += 1
        if isinstance(item, slice):
            view, backwards = _slice(view, made, range(size)[item], size, reverse)
            if backwards:
                flipped.add(made)
            made += 1
        else:
            index = int(item) % size
            view = view.select(made, size - 1 - index if reverse else index)
    return view, frozenset(flipped)


def full_key(key: object, ndim: int) -> tuple[Any, ...]:
    """The index with a slice for each dim that it does not name."""
    items = key if type(key) is tuple else (key,)
    named = sum(map(_dims, items))
    rest = (slice(None),) * (ndim - named)
    place = next((place for place, item in enumerate(items) if item is ...), None)
    if place is None:
        return (*items, *rest)
    return (*items[:place], *rest, *items[place + 1 :])


def _dims(item: object) -> int:
    """How many dims an item of an index takes."""
    return 0 if item is None or item is ... else 1


def _slice(view: torch.Tensor, dim: int, places: range, size: int, reverse: bool) -> tuple[torch.Tensor, bool]:
    """Of `view`, the places along a dim, and whether the program sees them in the opposite order."""
    if not places:
        return view.narrow(dim, 0, 0), False
    if reverse:
        places = range(size - 1 - places[0], size - 1 - places[-1] + (-1 if places.step > 0 else 1), -places.step)
    backwards = places.step < 0
    if backwards:
        places = places[::-1]
    if len(places) == size:
        return view, backwards
    key = (slice(None),) * dim + (slice(places[0], places[-1] + 1, places.step),)
    return view[key], backwards


def advanced(world: ArrayWorld, array: Array, key: object) -> tuple[Any, ...]:
    """An advanced index as torch takes it, over the elements as the program sees them."""
    items, dim = full_key(key, array.model.ndim), 0
    found: list[object] = []
    _refuse_scattered(items)
    for item in items:
        if item is None:
            found.append(item)
            continue
        if isinstance(item, slice):
            if item.step is not None and item.step < 0:
                raise BreakGraph("numpy", "an index of whole numbers and of a slice with a negative step")
            found.append(slice(*item.indices(array.model.shape[dim])))
        elif isinstance(item, (Array, list, numpy.ndarray)):
            if _is_mask(item):
                raise BreakGraph("data_dependent_shape", "an index of truth values")
            if isinstance(item, Array) and item.is_scalar:
                raise BreakGraph("tensor_to_number", "a NumPy scalar as an index")
            found.append(world.tensor(item, numpy.dtype("int64")))
        elif isinstance(item, (bool, numpy.bool_)) or not isinstance(item, (int, numpy.integer)):
            raise BreakGraph("numpy", f"an index of type {type(item).__qualname__}")
        else:
            found.append(int(item))
        dim += 1
    return tuple(found)


def _refuse_scattered(items: tuple[object, ...]) -> None:
    """NumPy takes whole numbers as arrays of indices, torch does not: it matters where a slice lies between them."""
    places = [place for place, item in enumerate(items) if item is not None and not isinstance(item, slice)]
    numbers = any(isinstance(items[place], (int, numpy.integer)) for place in places)
    if numbers and places[-1] - places[0] + 1 != len(places):
        raise BreakGraph("numpy", "an index of whole numbers and arrays with slices between them")


def refuse_unknown_slices(key: object) -> None:
    """Breaks the graph at a slice whose places are not known: NumPy, asked of models, would take others."""
    items = key if type(key) is tuple else (key,)
    if any(isinstance(item, slice) and arrays_in(item) for item in items):
        raise BreakGraph("tensor_to_number", "an array as an index")


def has_mask(key: object) -> bool:
    """Whether an index has truth values in it that are not known."""
    items = key if type(key) is tuple else (key,)
    return any(isinstance(item, Array) and _is_mask(item) for item in items)


def _is_mask(item: object) -> bool:
    return (item.model if isinstance(item, Array) else numpy.asarray(item)).dtype == bool


def mask_of(key: object, array: Array) -> Array | numpy.ndarray | None:
    """A mask that is the whole index, of the array's shape, else None."""
    while type(key) is tuple and len(key) == 1:
        key = key[0]
    if isinstance(key, (Array, numpy.ndarray)) and _is_mask(key):
        return key if model_of(key).shape == array.model.shape else None
    return None


def is_repeated(key: object) -> bool:
    """Whether an index may name an element twice, as far as capture knows."""
    parts = [item for item in (key if type(key) is tuple else (key,)) if isinstance(item, (Array, list, numpy.ndarray))]
    if len(parts) != 1 or isinstance(parts[0], Array):
        return True
    known = numpy.asarray(parts[0])
    return bool(len(set(known.ravel().tolist())) != known.size or (known < 0).any())
