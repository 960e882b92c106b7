"""Torch's functions around nested tensors of the jagged layout: which are interpreted, which run as they are."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import torch
from torch.nested._internal import nested_tensor as jagged

from torchdynamo.graph.jagged import KIND, Jagged, stands_for_one
from torchdynamo.interpreter.protocol import Args, Kwargs

# Interpreted: they make nested tensors by plain tensors' functions. Those of the second row by their `layout`.
_MAKERS: frozenset[object] = frozenset(
    {
        torch.nested.nested_tensor_from_jagged, torch.nested.masked_select,
        jagged.jagged_from_list, jagged.jagged_from_tensor_and_lengths, jagged.nested_view_from_values_offsets,
        jagged.nested_view_from_values_offsets_lengths, jagged.nested_from_padded, jagged._store_val_in_tensor,
    }
)  # fmt: skip
_BY_LAYOUT: frozenset[object] = frozenset(
    {torch.nested.nested_tensor, torch.nested.as_nested_tensor, torch.nested.narrow}
)
_WITHIN = frozenset(
    code
    for maker in (*_MAKERS, *_BY_LAYOUT)
    for code in maker.__code__.co_consts  # type: ignore[attr-defined]
    if isinstance(code, types.CodeType)
)
_METHODS: frozenset[object] = frozenset({KIND.values, KIND.offsets, KIND.lengths})


def is_interpreted(fn: types.FunctionType, kwargs: Kwargs) -> bool:
    """Whether a function of torch's makes nested tensors in the graph."""
    return fn in _MAKERS or fn.__code__ in _WITHIN or (fn in _BY_LAYOUT and kwargs.get("layout") is torch.jagged)


def is_method(fn: types.FunctionType, args: Args) -> bool:
    """Whether a function is a method that gives a part of a nested tensor, and is called with one."""
    return fn in _METHODS and bool(args) and stands_for_one(args[0])


def rules(nested: Jagged) -> Iterator[tuple[object, Callable[..., object]]]:
    """What stands for functions that keep something of their own."""
    yield jagged._nt_view_dummy, lambda fn, args, kwargs: nested.dummy()
