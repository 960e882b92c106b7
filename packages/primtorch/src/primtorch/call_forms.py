"""What a formula's answer depends on, where all sizes are numbers: calls of one form are asked about once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.fx.immutable_collections import immutable_list

from primtorch.spec import TensorSpec

Form: TypeAlias = tuple[object, ...]

_BY_VALUE = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_OF_ONE = frozenset({"cpu", "meta"})  # types of which there is one device
_SEQUENCES = frozenset({list, tuple, torch.Size, immutable_list})


def form_of(target: object, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Form | None:
    """The form of a call with descriptors for tensors: its target, arguments with their types, and the state of the
    process that formulas read; None where an argument is neither a description of numbers nor a plain value, and where
    the call may ask for the current device: it is given no tensor, or a device without an index."""
    # oneDNN chooses the layout of a convolution's result, by the number of threads too.
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch._C._get_mkldnn_enabled()  # type: ignore[attr-defined]
    form: list[object] = [target, state]
    if not _add(args, form):
        return None
    if kwargs:
        form.append(tuple(kwargs))
        if not _add(kwargs.values(), form):
            return None
    found = tuple(form)
    if not _says_where(found):
        return None
    try:
        hash(found)
    except TypeError:  # a description with a symbol
        return None
    return found


def _add(values: Iterable[Any], form: list[object]) -> bool:
    """Adds what values are; says whether they have a form."""
    for value in values:
        kind = type(value)
        if kind is TensorSpec:
            form.append(value)
        elif kind in _BY_VALUE:
            form += (kind, value)  # 1, 1.0 and True are one key
        elif kind in _SEQUENCES:
            form += (kind, len(value))
            if not _add(value, form):
                return False
        else:
            return False
    return True


def _says_where(form: Form) -> bool:
    """Whether what a call makes lies where its tensors do, or at a device that is named whole."""
    among = False
    for part in form:
        kind = type(part)
        if kind is TensorSpec:
            among = True
        elif kind is torch.device and part.index is None and part.type not in _OF_ONE:  # type: ignore[attr-defined]
            return False
    return among


def is_described(result: object) -> bool:
    """Whether a result is nothing but descriptors and plain values, so that it is the same for each call."""
    if isinstance(result, (tuple, list)):
        return all(map(is_described, result))
    return type(result) is TensorSpec or type(result) in _BY_VALUE
