"""Collectives that write to their arguments, `dist.all_reduce(x)` and the like, as nodes of the graph.

Each is the functional collective of the same meaning, torch's own where there is one (`primtorch.communication` has the
others), waited for, and a copy into the argument. Operators that communicate have an effect, so that they stay in the
order of the program. Work that the program would wait for is done when the call returns (`Finished`). What two ranks
exchange in work of their own, `isend` and `irecv`, leaves the graph: each would wait for the other to begin.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primtorch import communication
from primtorch.fake import FakeTensor
from torchdynamo.calls.collectives import FUNCTIONAL
from torchdynamo.graph.recorder import Recorder, tensors_in
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

_C10D = "torch.distributed.distributed_c10d"
_OPS = torch.ops._c10d_functional
_REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})


class Finished:
    """The work of a collective that is done, with what it wrote to."""

    def __init__(self, written: Sequence[torch.Tensor]) -> None:
        self.written = written

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def is_finished(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self.written)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self.written))
        return future


@dataclass(frozen=True, slots=True)
class Group:
    """What a graph knows of a group, guarded. `rank`: this process's place in it. `place(rank)`: that of a rank among
    all."""

    name: str
    size: int
    rank: int
    place: Callable[[int], int]
    recorder: Recorder

    def call(self, operator: object, *args: object, **kwargs: Any) -> Any:
        """Puts an operator into the graph, with this group as its last argument."""
        with torch._C.DisableTorchFunction():  # the recorder is told here already
            given: Any = self.recorder.adopt_all(((*args, self.name), kwargs))
            return self.recorder.record(operator, *given)


def _all_reduce(a: Mapping[str, Any], group: Group) -> None:
    tensor: torch.Tensor = a["tensor"]
    tensor.copy_(_wait(_OPS.all_reduce(tensor, _reduction(a["op"]), group.name)))


def _all_reduce_coalesced(a: Mapping[str, Any], group: Group) -> None:
    tensors = a["tensors"]
    if isinstance(tensors, torch.Tensor) or a["async_op"]:  # then it gives a future
        raise BreakGraph("distributed", "all_reduce_coalesced() of one tensor, or of work to wait for")
    for tensor, reduced in zip(
        tensors, _OPS.all_reduce_coalesced(list(tensors), _reduction(a["op"]), group.name), strict=True
    ):
        tensor.copy_(_wait(reduced))


def _broadcast(a: Mapping[str, Any], group: Group) -> None:
    tensor = a["tensor"]
    tensor.copy_(_wait(_OPS.broadcast(tensor, _rank(a, "src", group), group.name)))


def _reduce(a: Mapping[str, Any], group: Group) -> None:
    tensor, root = a["tensor"], _rank(a, "dst", group)
    tensor.copy_(group.call(communication.reduce, tensor, _reduction(a["op"]), root))


def _gather(a: Mapping[str, Any], group: Group) -> None:
    tensor, parts, root = a["tensor"], list(a["gather_list"] or ()), _rank(a, "dst", group, 0)
    _given_by_one(parts, tensor, group, root)
    gathered = group.call(communication.gather, tensor, root, parts=len(parts))
    for part, value in zip(parts, gathered, strict=True):
        part.copy_(value)


def _scatter(a: Mapping[str, Any], group: Group) -> None:
    tensor, parts, root = a["tensor"], list(a["scatter_list"] or ()), _rank(a, "src", group, 0)
    _given_by_one(parts, tensor, group, root)
    _in_memory_order("scatter", tensor, *parts)
    tensor.copy_(group.call(communication.scatter, tensor, root, parts=parts))


def _all_to_all(a: Mapping[str, Any], group: Group) -> None:
    outputs, parts = list(a["output_tensor_list"]), list(a["input_tensor_list"])
    if {len(outputs), len(parts)} != {group.size} or len({t.dtype for t in (*outputs, *parts)}) != 1:
        raise BreakGraph("distributed", "all_to_all() without a part of one dtype for each rank")
    _in_memory_order("all_to_all", *outputs)
    for output, value in zip(outputs, group.call(communication.all_to_all, outputs, parts), strict=True):
        output.copy_(value)


def _send(a: Mapping[str, Any], group: Group) -> None:
    group.call(communication.send, a["tensor"], _other(a, "dst", group), a["tag"])


def _recv(a: Mapping[str, Any], group: Group) -> None:
    tensor = a["tensor"]
    tensor.copy_(group.call(communication.recv, tensor, _other(a, "src", group), a["tag"]))


def _barrier(a: Mapping[str, Any], group: Group) -> None:
    if a["device_ids"] is not None or a.get("timeout") is not None:
        raise BreakGraph("distributed", "barrier() with devices or a time limit")
    group.call(communication.barrier)


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
        "all_reduce_coalesced": _all_reduce_coalesced,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "all_gather_single": _all_gather_into_tensor,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "reduce_scatter_single": _reduce_scatter_tensor,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "reduce": _reduce,
        "gather": _gather,
        "scatter": _scatter,
        "send": _send,
        "recv": _recv,
        "barrier": _barrier,
    }
)


def writes(function: types.FunctionType, module: str) -> bool:
    """Whether a function is a collective that writes to its argument, or hands on what it is given."""
    return (
        module == _C10D and function.__name__ in _WRITING and getattr(sys.modules[_C10D], function.__name__) is function
    )


def write_collective(
    outside: Outside, function: types.FunctionType, args: Args, kwargs: Kwargs
) -> Finished | int | None:
    """Puts the collective into the graph. Gives its work, where that is asked for, and from whom `recv` received.

    Raises:
        BreakGraph: it has no place there.
    """
    importlib.import_module(FUNCTIONAL)  # which says what shapes the operators give
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given, name = bound.arguments, function.__name__
    if outside.recorder.regions.open:
        raise BreakGraph("distributed", f"{name}() within a function that becomes a graph of its own")
    for tensor in tensors_in(given):
        _check_operand(name, tensor)
    group = _group(outside, name, given["group"])
    with torch.no_grad():
        _WRITING[name](given, group)
    if name == "recv":
        return given["src"] if given["src"] is not None else _global_rank(outside, given)
    return Finished(tensors_in(given)) if given.get("async_op") else None


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
    own: Any = outside.ambient(c10d.get_rank, (group,))
    place = (lambda rank: rank) if group is None else functools.partial(_place, outside, group)
    return Group(called, size, own, place, outside.recorder)


def _place(outside: Outside, group: object, rank: int) -> int:
    c10d: Any = sys.modules[_C10D]
    if rank not in c10d.get_process_group_ranks(group):
        raise BreakGraph("distributed", f"a collective in a group without its rank {rank}")
    return outside.ambient(c10d.get_group_rank, (group, rank))  # type: ignore[return-value]


def _name_of(group: Any) -> str | None:
    """A group's name, the default one's for None."""
    c10d: Any = sys.modules[_C10D]
    return (group or c10d._get_default_group()).group_name if c10d.is_initialized() else None  # type: ignore[no-any-return]


def _global_rank(outside: Outside, given: Mapping[str, Any]) -> int:
    c10d: Any = sys.modules[_C10D]
    group = given["group"]
    place: int = given["group_src"]
    return place if group is None else outside.ambient(c10d.get_global_rank, (group, place))  # type: ignore[return-value]


def _rank(a: Mapping[str, Any], name: str, group: Group, default: int | None = None) -> int:
    """The place in a group of the rank that a call names, by its place or by its rank among all."""
    place, rank = a.get(f"group_{name}"), a[name]
    if place is None and rank is None:
        rank = default
    if (place is None) == (rank is None):
        raise BreakGraph("distributed", f"a call with {'no' if rank is None else 'two'} {name}")
    return group.place(rank) if place is None else place


def _other(a: Mapping[str, Any], name: str, group: Group) -> int:
    _in_memory_order("a message", a["tensor"])
    place = _rank(a, name, group)
    if place == group.rank:
        raise BreakGraph("distributed", "a message of a rank to itself")
    return place


def _in_memory_order(what: str, *tensors: torch.Tensor) -> None:
    """Back ends refuse other tensors, or take their memory as it lies."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise BreakGraph("distributed", f"{what} of tensors that are not contiguous")


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


def _given_by_one(parts: Sequence[torch.Tensor], own: torch.Tensor, group: Group, root: int) -> None:
    """The root has a part for each rank, and nobody else any."""
    if group.rank == root:
        _of_one_kind(parts, own, group.size)
    elif parts:
        raise BreakGraph("distributed", "parts that another rank is to give")


def _one_after_the_other(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """The ranks' parts are one after the other in memory, whatever the shapes say."""
    if part.dim() == 0 or not part.is_contiguous() or math.prod(whole.shape) != size * math.prod(part.shape):
        raise BreakGraph("distributed", "a collective over parts that do not make up the whole")
