"""Masked tensors (`torch.masked`): wrappers whose class lacks `__tensor_flatten__` (`primtorch.flattenings`).

Operators on them are nodes like those on any wrapper (`graph/wrapper_tensors.py`). What torch builds for them out of
autograd functions is one node a call, `primtorch.wrappers.Applied`: the constructor that keeps the history, `get_data`,
reductions, `where`. Torch warns at each tensor of the class that its interface may change, and of data that requires a
gradient; of what a program makes, that is said once, at the program's line, when it is captured.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from torch.masked import MaskedTensor
from torch.masked.maskedtensor._ops_refs import _MASKEDTENSOR_FUNCTION_TABLE

from primtorch.fake import FakeTensor
from primtorch.flattenings import warned_of
from primtorch.warned import warn_at
from primtorch.wrappers import ByClass
from torchdynamo.graph import wrapper_calls
from torchdynamo.graph.recorder import Recorder, tensors_in
from torchdynamo.graph.tensor_classes import class_of
from torchdynamo.interpreter.protocol import MISSING, Args, Kwargs
from torchdynamo.outside.outside import Outside

_WARNED = {requires_grad: warned_of(requires_grad) for requires_grad in (False, True)}  # which no mode is to see
_MAKE = frozenset({"as_masked_tensor", "MaskedTensor._from_values"})
# What the class and its module do by operators alone, or without any: interpreted as a program's own code is.
_INTERPRETED = frozenset(
    {
        "masked_tensor", "is_masked_tensor", "_get_data", "_maybe_get_mask", "MaskedTensor.get_mask",
        "MaskedTensor.to_tensor", "MaskedTensor.is_sparse", "MaskedTensor.is_sparse_coo",
        "MaskedTensor.is_sparse_csr", "MaskedTensor.__torch_function__", "MaskedTensor._set_data_mask",
        "MaskedTensor._validate_members", "MaskedTensor.__repr__",
    }
)  # fmt: skip


def call(outside: Outside, function: types.FunctionType, module: str, args: Args, kwargs: Kwargs) -> object:
    """What a function of `torch.masked` gives for masked tensors, or makes one by. MISSING for others."""
    name = function.__qualname__
    if not module.startswith("torch.masked.") or name in _INTERPRETED:
        return MISSING
    makes = name in _MAKE and all(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
    if not makes and not any(class_of(tensor) is MaskedTensor for tensor in tensors_in((args, kwargs))):
        return MISSING
    outside.wrappers.know(MaskedTensor)
    if makes:
        warn_of(outside.recorder, args, kwargs)
    return wrapper_calls.apply(outside.recorder, function, args, kwargs)


def warn_of(recorder: Recorder, args: Args, kwargs: Kwargs) -> None:
    """Says at the program's line what torch says of the masked tensors that are made of these arguments."""
    frames = recorder.user_frames()
    for message in _WARNED[any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))] if frames else ():
        warn_at(message, frames[-1])


def meaning(recorder: Recorder, func: Callable[..., object], args: Args, kwargs: Mapping[str, object] | None) -> object:
    """What a function of torch is for the class, where that is more than operators. MISSING for others."""
    if func not in _MASKEDTENSOR_FUNCTION_TABLE:
        return MISSING
    return wrapper_calls.apply(recorder, ByClass(MaskedTensor, func), args, kwargs or {})


def has_meanings(kinds: tuple[type, ...]) -> bool:
    """Whether masked tensors alone have a say in a call."""
    return kinds == (MaskedTensor,)
