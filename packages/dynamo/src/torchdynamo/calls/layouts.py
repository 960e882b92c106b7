"""DTensor's layouts over processes: from a local tensor, to another layout, and back, as nodes of the graph.

What operators do with a DTensor, its class says when the graph is traced (`graph/wrapper_tensors.py`), collectives
included. Here are the functions that are no operators: each is one node (`primtorch.wrappers.Relaid`), with the mesh,
which is guarded by identity, and the placements. The hooks that `parallelize_module` sets are read as any function.
"""

from __future__ import annotations

import inspect
import types

import torch

from primtorch.fake import FakeTensor
from primtorch.wrappers import Relaid, whole_of
from torchdynamo.interpreter.protocol import MISSING, Args, Kwargs
from torchdynamo.outside.externals import is_constant
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

_API = "torch.distributed.tensor._api"
_STYLES = "torch.distributed.tensor.parallel.style"
_LAYOUTS = frozenset({"DTensor.from_local", "DTensor.full_tensor", "DTensor.redistribute", "DTensor.to_local"})
_PROPERTIES = frozenset({"DTensor.device_mesh", "DTensor.placements"})


def inlines(function: types.FunctionType, module: str) -> bool:
    """Whether it is a hook of a parallel module."""
    return module == _STYLES or (module == _API and function.__qualname__.startswith("distribute_module.<locals>"))


def layout(outside: Outside, function: types.FunctionType, module: str, args: Args, kwargs: Kwargs) -> object:
    """What a call gives that lays a tensor out over processes, or asks how one is. MISSING for others."""
    name = function.__qualname__
    if module != _API or name not in (*_LAYOUTS, *_PROPERTIES):
        return MISSING
    bound = inspect.signature(function).bind(*args, **kwargs)
    first, *_ = bound.arguments
    tensor = bound.arguments.pop(first)
    if not isinstance(tensor, FakeTensor):
        raise BreakGraph("distributed", f"{name}() of a tensor that the graph does not know")
    if name in _PROPERTIES:
        answer = getattr(whole_of(tensor), function.__name__)
        return outside.externals.hold(answer, function.__name__)
    nowhere = name == "DTensor.from_local" and bound.arguments.get("device_mesh") is None
    if nowhere or bound.arguments.get("run_check"):
        raise BreakGraph("distributed", f"{name}() that compares the ranks, or asks for the mesh of a block")
    bound.arguments.pop("async_op", None)  # the graph waits
    rest = {key: _plain(outside, name, value) for key, value in bound.arguments.items()}
    return outside.recorder.relaid(Relaid(function, (), rest), tensor)


def _plain(outside: Outside, name: str, value: object) -> object:
    """A mesh, placements, or a constant, guarded."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(outside, name, item) for item in value)
    if is_constant(value) or isinstance(value, torch.dtype):
        return value
    known = outside.externals.lookup(value)
    if known is not None:
        outside.identity(value)
        return known.original
    if type(value).__module__.startswith("torch.distributed.tensor.placement_types"):
        return value
    raise BreakGraph("distributed", f"{name}() with a {type(value).__name__} that the program makes")
