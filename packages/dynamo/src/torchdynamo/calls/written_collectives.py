"""Collectives that write to their arguments, `dist.all_reduce(x)` and the like, as nodes of the graph.

Each is the functional collective of the same meaning, waited for, and a copy into the argument. Operators that
communicate have an effect, so that they stay in the order of the program. Work that the program would wait for is done
when the call returns (`Finished`). What the functional operators cannot say leaves the graph as before.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from primtorch.fake import FakeTensor
from torchdynamo.calls.collectives import FUNCTIONAL
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

_C10D = "torch.distributed.distributed_c10d"
_OPS = torch.ops._c10d_functional
_REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})


class Finished:
    """The work of a collective that is done."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def _all_reduce(a: Mapping[str, Any], group: str, size: int) -> torch.Tensor:
    tensor: torch.Tensor = a["tensor"]
    return tensor.copy_(_wait(_OPS.all_reduce(tensor, _reduction(a["op"]), group)))


def _broadcast(a: Mapping[str, Any], group: str, size: int) -> torch.Tensor:
    tensor, root = a["tensor"], a.get("group_src")
    if root is None and a["group"] is not None:
        raise BreakGraph("distributed", "broadcast() in a group, from a rank among all")
    return tensor.copy_(_wait(_OPS.broadcast(tensor, a["src"] if root is None else root, group)))  # type: ignore[no-any-return]


def _all_gather_into_tensor(a: Mapping[str, Any], group: str, size: int) -> torch.Tensor:
    output, part = a["output_tensor"], a["input_tensor"]
    _one_after_the_other(output, part, size)
    gathered = _wait(_OPS.all_gather_into_tensor(part, size, group))
    return output.copy_(gathered.reshape(output.shape))  # type: ignore[no-any-return]


def _reduce_scatter_tensor(a: Mapping[str, Any], group: str, size: int) -> torch.Tensor:
    output, parts = a["output"], a["input"]
    _one_after_the_other(parts, output, size)
    parts = parts.reshape(size * output.shape[0], *output.shape[1:])
    return output.copy_(_wait(_OPS.reduce_scatter_tensor(parts, _reduction(a["op"]), size, group)))  # type: ignore[no-any-return]


def _all_to_all_single(a: Mapping[str, Any], group: str, size: int) -> torch.Tensor:
    output, given = a["output"], a["input"]
    splits = [a["output_split_sizes"], a["input_split_sizes"]]
    for place, tensor in enumerate((output, given)):
        if tensor.dim() == 0 or (not splits[place] and tensor.shape[0] % size):
            raise BreakGraph("distributed", "all_to_all_single() of parts that are not equal")
        splits[place] = splits[place] or [tensor.shape[0] // size] * size
    return output.copy_(_wait(_OPS.all_to_all_single(given, *splits, group)))  # type: ignore[no-any-return]


_WRITING: Mapping[str, Callable[[Mapping[str, Any], str, int], torch.Tensor]] = types.MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_single": _all_gather_into_tensor,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "reduce_scatter_single": _reduce_scatter_tensor,
        "all_to_all_single": _all_to_all_single,
    }
)


def writes(function: types.FunctionType, module: str) -> bool:
    """Whether a function is a collective that writes to its argument."""
    return (
        module == _C10D and function.__name__ in _WRITING and getattr(sys.modules[_C10D], function.__name__) is function
    )


def write_collective(outside: Outside, function: types.FunctionType, args: Args, kwargs: Kwargs) -> Finished | None:
    """Puts the collective into the graph.

    Raises:
        BreakGraph: it has no place there.
    """
    importlib.import_module(FUNCTIONAL)  # which says what shapes the operators give
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given, name = bound.arguments, function.__name__
    for tensor in given.values():
        if isinstance(tensor, torch.Tensor):
            _check_operand(name, tensor)
    group, size = _group(outside, name, given["group"])
    with torch.no_grad():
        _WRITING[name](given, group, size)
    return Finished() if given["async_op"] else None


def _check_operand(name: str, tensor: torch.Tensor) -> None:
    why = None
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        why = "a tensor of another kind"
    elif tensor.is_complex():
        why = "complex numbers"
    elif torch.is_grad_enabled() and tensor.requires_grad:
        why = "a tensor with a history, which it has no derivative for"
    if why is not None:
        raise BreakGraph("distributed", f"{name}() of {why}")


def _group(outside: Outside, name: str, group: Any) -> tuple[str, int]:
    """Name and size of a group, guarded."""
    c10d: Any = sys.modules[_C10D]
    if not c10d.is_initialized() or c10d._world.pg_coalesce_state:
        raise BreakGraph("distributed", f"call of {_C10D}.{name}")
    if group is not None:
        if outside.externals.lookup(group) is None:
            raise BreakGraph("distributed", f"{name}() in a group that the program makes")
        outside.identity(group)
        if c10d._rank_not_in_group(group):
            raise BreakGraph("distributed", f"{name}() in a group without this process")
    return outside.ambient(_name_of, (group,)), outside.ambient(c10d.get_world_size, (group,))  # type: ignore[return-value]


def _name_of(group: Any) -> str | None:
    """A group's name, the default one's for None."""
    c10d: Any = sys.modules[_C10D]
    return (group or c10d._get_default_group()).group_name if c10d.is_initialized() else None  # type: ignore[no-any-return]


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _OPS.wait_tensor(tensor)  # type: ignore[no-any-return]


def _reduction(op: Any) -> str:
    name = str(getattr(op, "name", ""))
    if name not in _REDUCTIONS:
        raise BreakGraph("distributed", f"a reduction {op}")
    return name.lower()


def _one_after_the_other(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """The ranks' parts are one after the other in memory, whatever the shapes say."""
    if part.dim() == 0 or not part.is_contiguous() or math.prod(whole.shape) != size * math.prod(part.shape):
        raise BreakGraph("distributed", "a collective over parts that do not make up the whole")
