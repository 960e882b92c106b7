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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primtorch.fake import FakeTensor
from torchdynamo.calls.collectives import FUNCTIONAL
from torchdynamo.graph.recorder import tensors_in
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


@dataclass(frozen=True, slots=True)
class Group:
    """What a graph knows of a group, guarded. `place(rank)`: the place in it of a rank among all."""

    name: str
    size: int
    place: Callable[[int], int]


def _all_reduce(a: Mapping[str, Any], group: Group) -> None:
    tensor: torch.Tensor = a["tensor"]
    tensor.copy_(_wait(_OPS.all_reduce(tensor, _reduction(a["op"]), group.name)))


def _broadcast(a: Mapping[str, Any], group: Group) -> None:
    tensor, root = a["tensor"], a.get("group_src")
    if root is None:
        root = group.place(a["src"])
    tensor.copy_(_wait(_OPS.broadcast(tensor, root, group.name)))


def _all_gather_into_tensor(a: Mapping[str, Any], group: Group) -> None:
    output, part = a["output_tensor"], a["input_tensor"]
    _one_after_the_other(output, part, group.size)
    gathered = _wait(_OPS.all_gather_into_tensor(part, group.size, group.name))
    output.copy_(gathered.reshape(output.shape))


def _all_gather(a: Mapping[str, Any], group: Group) -> None:
    outputs, part = a["tensor_list"], a["tensor"]
    _of_one_kind(outputs, part, group.size)
    gathered = _wait(_OPS.all_gather_into_tensor(part.contiguous().reshape(1, -1), group.size, group.name))
    for place, output in enumerate(outputs):
        output.copy_(gathered[place].reshape(output.shape))


def _reduce_scatter_tensor(a: Mapping[str, Any], group: Group) -> None:
    output, parts = a["output"], a["input"]
    _one_after_the_other(parts, output, group.size)
    parts = parts.reshape(group.size * output.shape[0], *output.shape[1:])
    output.copy_(_wait(_OPS.reduce_scatter_tensor(parts, _reduction(a["op"]), group.size, group.name)))


def _reduce_scatter(a: Mapping[str, Any], group: Group) -> None:
    output, parts = a["output"], a["input_list"]
    _of_one_kind(parts, output, group.size)
    whole = torch.stack([part.reshape(-1) for part in parts])
    reduced = _wait(_OPS.reduce_scatter_tensor(whole, _reduction(a["op"]), group.size, group.name))
    output.copy_(reduced.reshape(output.shape))


def _all_to_all_single(a: Mapping[str, Any], group: Group) -> None:
    output, given = a["output"], a["input"]
    splits = [a["output_split_sizes"], a["input_split_sizes"]]
    for place, tensor in enumerate((output, given)):
        if tensor.dim() == 0 or (not splits[place] and tensor.shape[0] % group.size):
            raise BreakGraph("distributed", "all_to_all_single() of parts that are not equal")
        splits[place] = splits[place] or [tensor.shape[0] // group.size] * group.size
    output.copy_(_wait(_OPS.all_to_all_single(given, *splits, group.name)))


_WRITING: Mapping[str, Callable[[Mapping[str, Any], Group], None]] = types.MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_single": _all_gather_into_tensor,
        "reduce_scatter": _reduce_scatter,
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
    for tensor in tensors_in(given):
        _check_operand(name, tensor)
    group = _group(outside, name, given["group"])
    with torch.no_grad():
        _WRITING[name](given, group)
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


def _group(outside: Outside, name: str, group: object) -> Group:
    """A group, guarded."""
    c10d: Any = sys.modules[_C10D]
    if not c10d.is_initialized() or c10d._world.pg_coalesce_state:
        raise BreakGraph("distributed", f"call of {_C10D}.{name}")
    if group is not None:
        if outside.externals.lookup(group) is None:
            raise BreakGraph("distributed", f"{name}() in a group that the program makes")
        outside.identity(group)
        if c10d._rank_not_in_group(group):
            raise BreakGraph("distributed", f"{name}() in a group without this process")
    called: Any = outside.ambient(_name_of, (group,))
    size: Any = outside.ambient(c10d.get_world_size, (group,))
    return Group(called, size, lambda rank: rank if group is None else _place(outside, group, rank))


def _place(outside: Outside, group: object, rank: int) -> int:
    c10d: Any = sys.modules[_C10D]
    if rank not in c10d.get_process_group_ranks(group):
        raise BreakGraph("distributed", f"a collective in a group without its rank {rank}")
    return outside.ambient(c10d.get_group_rank, (group, rank))  # type: ignore[return-value]


def _name_of(group: Any) -> str | None:
    """A group's name, the default one's for None."""
    c10d: Any = sys.modules[_C10D]
    return (group or c10d._get_default_group()).group_name if c10d.is_initialized() else None  # type: ignore[no-any-return]


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return _OPS.wait_tensor(tensor)  # type: ignore[no-any-return]


def _reduction(op: object) -> str:
    name = str(getattr(op, "name", ""))
    if name not in _REDUCTIONS:
        raise BreakGraph("distributed", f"a reduction {op}")
    return name.lower()


def _of_one_kind(parts: Sequence[torch.Tensor], own: torch.Tensor, size: int) -> None:
    """A part for each rank, all of one shape: what each rank has is as large."""
    if len(parts) != size or any(part.shape != own.shape or part.dtype != own.dtype for part in parts):
        raise BreakGraph("distributed", "a collective over parts that are not alike")


def _one_after_the_other(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """The ranks' parts are one after the other in memory, whatever the shapes say."""
    if part.dim() == 0 or not part.is_contiguous() or math.prod(whole.shape) != size * math.prod(part.shape):
        raise BreakGraph("distributed", "a collective over parts that do not make up the whole")
