"""Collectives that write to their arguments, `dist.all_reduce(x)` and the like, as nodes of the graph.

Each is the functional collective of the same meaning, torch's own where there is one (`primtorch.communication` has the
others), waited for, and a copy into the argument. Operators that communicate have an effect, so that they stay in the
order of the program. Waiting and copying are where the program waits (`works`), or else in the call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from primtorch import communication
from primtorch.fake import FakeTensor
from primtorch.frozen import record
from torchdynamo.calls.collectives import FUNCTIONAL
from torchdynamo.calls.process_groups import begins_together
from torchdynamo.calls.works import Begun, Works
from torchdynamo.graph.recorder import Recorder, tensors_in
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph

_C10D = "torch.distributed.distributed_c10d"
_OPS = torch.ops._c10d_functional
_REDUCTIONS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"})


# Waits for what a collective has begun, and writes to its arguments.
Finish = Callable[[], None]


class Given(TypedDict, total=False):
    """The arguments of a call by the names that torch's functions have for them, defaults with them."""

    tensor: torch.Tensor
    tensors: torch.Tensor | Sequence[torch.Tensor]
    tensor_list: Sequence[torch.Tensor]
    gather_list: Sequence[torch.Tensor] | None
    scatter_list: Sequence[torch.Tensor] | None
    input: torch.Tensor
    input_list: Sequence[torch.Tensor]
    input_tensor: torch.Tensor
    input_tensor_list: Sequence[torch.Tensor]
    input_split_sizes: Sequence[int] | None
    output: torch.Tensor
    output_tensor: torch.Tensor
    output_tensor_list: Sequence[torch.Tensor]
    output_split_sizes: Sequence[int] | None
    op: object
    src: int | None
    dst: int | None
    group_src: int | None
    group_dst: int | None
    tag: int
    group: object
    async_op: bool
    device_ids: object
    timeout: object


@record
class Group:
    """What a graph knows of a group, guarded. `rank`: this process's place in it. `place(rank)`: that of a rank among
    all."""

    name: str
    size: int
    rank: int
    place: Callable[[int], int]
    recorder: Recorder

    def call(self, operator: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Puts an operator into the graph, with this group as its last argument."""
        with torch._C.DisableTorchFunction():  # the recorder is told here already
            given: object = self.recorder.adopt_all(((*args, self.name), kwargs))
            return self.recorder.record(operator, *given)


def _into(targets: Sequence[torch.Tensor], begun: Sequence[torch.Tensor]) -> Finish:
    """Each of what was begun, into its own tensor."""

    def finish() -> None:
        for target, value in zip(targets, begun, strict=True):
            given = _wait(value)
            target.copy_(given if given.shape == target.shape else given.reshape(target.shape))

    return finish


def _all_reduce(a: Given, group: Group) -> Finish:
    return _into([a["tensor"]], [_OPS.all_reduce(a["tensor"], _reduction(a["op"]), group.name)])


def _all_reduce_coalesced(a: Given, group: Group) -> Finish:
    tensors = a["tensors"]
    if isinstance(tensors, torch.Tensor) or a["async_op"]:  # then it gives a future
        raise BreakGraph("distributed", "all_reduce_coalesced() of one tensor, or of work to wait for")
    return _into(tensors, _OPS.all_reduce_coalesced(list(tensors), _reduction(a["op"]), group.name))


def _broadcast(a: Given, group: Group) -> Finish:
    return _into([a["tensor"]], [_OPS.broadcast(a["tensor"], _rank(a, "src", group), group.name)])


def _reduce(a: Given, group: Group) -> Finish:
    tensor, root = a["tensor"], _rank(a, "dst", group)
    return _into([tensor], [group.call(communication.reduce, tensor, _reduction(a["op"]), root)])


def _gather(a: Given, group: Group) -> Finish:
    tensor, parts, root = a["tensor"], list(a["gather_list"] or ()), _rank(a, "dst", group, 0)
    _given_by_one(parts, tensor, group, root)
    begun = group.call(communication.gather, tensor, root, parts=len(parts))
    return _into(parts, begun) if parts else _only(begun[0])


def _scatter(a: Given, group: Group) -> Finish:
    tensor, parts, root = a["tensor"], list(a["scatter_list"] or ()), _rank(a, "src", group, 0)
    _given_by_one(parts, tensor, group, root)
    _in_memory_order("scatter", tensor, *parts)
    return _into([tensor], [group.call(communication.scatter, tensor, root, parts=parts)])


def _all_to_all(a: Given, group: Group) -> Finish:
    outputs, parts = list(a["output_tensor_list"]), list(a["input_tensor_list"])
    if {len(outputs), len(parts)} != {group.size} or len({t.dtype for t in (*outputs, *parts)}) != 1:
        raise BreakGraph("distributed", "all_to_all() without a part of one dtype for each rank")
    _in_memory_order("all_to_all", *outputs)
    return _into(outputs, group.call(communication.all_to_all, outputs, parts))


def _send(a: Given, group: Group) -> Finish:
    return _only(group.call(communication.send, a["tensor"], _other(a, "dst", group), a["tag"]))


def _recv(a: Given, group: Group) -> Finish:
    return _into([a["tensor"]], [group.call(communication.recv, a["tensor"], _other(a, "src", group), a["tag"])])


def _irecv(a: Given, group: Group) -> Finish:
    if a["src"] is not None or a["group_src"] is not None:
        return _recv(a, group)
    _in_memory_order("a message", a["tensor"])
    return _into([a["tensor"]], [group.call(communication.recv, a["tensor"], None, a["tag"])])


def _barrier(a: Given, group: Group) -> Finish:
    if a["device_ids"] is not None or a.get("timeout") is not None:
        raise BreakGraph("distributed", "barrier() with devices or a time limit")
    return _only(group.call(communication.barrier))


def _all_gather_into_tensor(a: Given, group: Group) -> Finish:
    output, part = a["output_tensor"], a["input_tensor"]
    _one_after_the_other(output, part, group.size)
    return _into([output], [_OPS.all_gather_into_tensor(part, group.size, group.name)])


def _all_gather(a: Given, group: Group) -> Finish:
    outputs, part = a["tensor_list"], a["tensor"]
    _of_one_kind(outputs, part, group.size)
    begun = _OPS.all_gather_into_tensor(part.contiguous().reshape(1, -1), group.size, group.name)

    def finish() -> None:
        gathered = _wait(begun)
        for place, output in enumerate(outputs):
            output.copy_(gathered[place].reshape(output.shape))

    return finish


def _reduce_scatter_tensor(a: Given, group: Group) -> Finish:
    output, parts = a["output"], a["input"]
    _one_after_the_other(parts, output, group.size)
    parts = parts.reshape(group.size * output.shape[0], *output.shape[1:])
    return _into([output], [_OPS.reduce_scatter_tensor(parts, _reduction(a["op"]), group.size, group.name)])


def _reduce_scatter(a: Given, group: Group) -> Finish:
    output, parts = a["output"], a["input_list"]
    _of_one_kind(parts, output, group.size)
    whole = torch.stack([part.reshape(-1) for part in parts])
    return _into([output], [_OPS.reduce_scatter_tensor(whole, _reduction(a["op"]), group.size, group.name)])


def _all_to_all_single(a: Given, group: Group) -> Finish:
    output, given = a["output"], a["input"]
    splits = [a["output_split_sizes"], a["input_split_sizes"]]
    for place, tensor in enumerate((output, given)):
        if tensor.dim() == 0 or (not splits[place] and tensor.shape[0] % group.size):
            raise BreakGraph("distributed", "all_to_all_single() of parts that are not equal")
        splits[place] = splits[place] or [tensor.shape[0] // group.size] * group.size
    return _into([output], [_OPS.all_to_all_single(given, *splits, group.name)])


_WRITING: Mapping[str, Callable[[Given, Group], Finish]] = types.MappingProxyType(
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
        "isend": _send,
        "irecv": _irecv,
        "barrier": _barrier,
    }
)
_ASYNCHRONOUS = frozenset({"isend", "irecv"})  # they give work, whether it is asked for or not
_GIVES = {"all_reduce", "broadcast", "reduce"}  # whose work gives the tensor; of others that is the back end's to say


def writes(function: types.FunctionType, module: str) -> bool:
    """Whether a function is a collective that writes to its argument, or hands on what it is given."""
    return (
        module == _C10D and function.__name__ in _WRITING and getattr(sys.modules[_C10D], function.__name__) is function
    )


def write_collective(
    outside: Outside, works: Works, function: types.FunctionType, args: Args, kwargs: Kwargs
) -> object:
    """Puts the collective into the graph. Gives its work, where that is asked for, and from whom `recv` received.

    Raises:
        BreakGraph: it has no place there.
    """
    importlib.import_module(FUNCTIONAL)  # which says what shapes the operators give
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given: Given = bound.arguments  # type: ignore[assignment]
    name = function.__name__
    if outside.recorder.regions.open:
        raise BreakGraph("distributed", f"{name}() within a function that becomes a graph of its own")
    for tensor in tensors_in(given):
        _check_operand(name, tensor)
    group = _group(outside, name, given["group"])
    later = name in _ASYNCHRONOUS or given.get("async_op")
    if later:
        works.refuse(name)
    with torch.no_grad():
        finish = _WRITING[name](given, group)
        if later:
            written = [given["tensor"]] if name in _GIVES else None
            settled = outside.ambient(_back_end, (given["group"],)) == "gloo" and not name.startswith("reduce_scatter")
            return works.begun(Begun(finish, written, settled))
        finish()
    if name == "recv":
        return given["src"] if given["src"] is not None else _global_rank(outside, given)
    return None


def inlined(function: types.FunctionType, module: str) -> types.FunctionType | None:
    """What capture reads in a function's place where messages are begun in a batch, or what is asked about these."""
    if module != _C10D or function.__qualname__.partition(".<locals>")[0] not in _OF_BATCHES:
        return None
    return _one_by_one if function.__name__ == "batch_isend_irecv" else function  # type: ignore[return-value]


_OF_BATCHES = frozenset(
    {
        "P2POp.__init__", "P2POp.__new__", "_canonicalize_group_rank", "_check_op", "_check_p2p_op_list",
        "_check_single_tensor", "_group_or_default_group", "batch_isend_irecv",
    }
)  # fmt: skip


def _one_by_one(p2p_op_list: list[torch.distributed.P2POp]) -> list[object]:
    """`batch_isend_irecv` where the back end begins each message for itself."""
    c10d = torch.distributed.distributed_c10d
    c10d._check_p2p_op_list(p2p_op_list)
    begins_together(p2p_op_list[0].group, p2p_op_list[0].tensor.device)
    begun = []
    for move in p2p_op_list:
        place = {"group_dst" if move.op is c10d.isend else "group_src": move.group_peer}
        begun.append(move.op(move.tensor, group=move.group, tag=move.tag, **place))
    return begun


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
    c10d = sys.modules[_C10D]
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
    c10d = sys.modules[_C10D]
    if rank not in c10d.get_process_group_ranks(group):
        raise BreakGraph("distributed", f"a collective in a group without its rank {rank}")
    return outside.ambient(c10d.get_group_rank, (group, rank))  # type: ignore[return-value]


def _name_of(group: torch.distributed.ProcessGroup | None) -> str | None:
    """A group's name, the default one's for None."""
    c10d = sys.modules[_C10D]
    return (group or c10d._get_default_group()).group_name if c10d.is_initialized() else None  # type: ignore[no-any-return]


def _back_end(group: torch.distributed.ProcessGroup | None) -> str:
    c10d = sys.modules[_C10D]
    return c10d.get_backend(group)  # type: ignore[no-any-return]


def _global_rank(outside: Outside, given: Given) -> int:
    c10d = sys.modules[_C10D]
    group = given["group"]
    place = given["group_src"]
    assert place is not None  # `_rank` has seen that it is one or the other
    return place if group is None else outside.ambient(c10d.get_global_rank, (group, place))  # type: ignore[return-value]


def _rank(a: Given, name: Literal["src", "dst"], group: Group, default: int | None = None) -> int:
    """The place in a group of the rank that a call names, by its place or by its rank among all."""
    place = a.get("group_src") if name == "src" else a.get("group_dst")
    rank = a[name]
    if place is None and rank is None:
        rank = default
    if place is None and rank is not None:
        return group.place(rank)
    if place is not None and rank is None:
        return place
    raise BreakGraph("distributed", f"a call with {'no' if rank is None else 'two'} {name}")


def _other(a: Given, name: Literal["src", "dst"], group: Group) -> int:
    _in_memory_order("a message", a["tensor"])
    place = _rank(a, name, group)
    if place == group.rank:
        raise BreakGraph("distributed", "a message of a rank to itself")
    return place


def _in_memory_order(what: str, *tensors: torch.Tensor) -> None:
    """Back ends refuse other tensors, or take their memory as it lies."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise BreakGraph("distributed", f"{what} of tensors that are not contiguous")


def _only(token: torch.Tensor) -> Finish:
    """Waits, and writes nothing."""

    def finish() -> None:
        _wait(token)

    return finish


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
