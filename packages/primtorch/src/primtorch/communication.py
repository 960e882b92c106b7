"""Processes that talk to each other, as operators that a graph can hold.

Torch's own are of `_c10d_functional`: a call begins a collective and gives a tensor for `wait_tensor`. What these
cannot say is here, in the same way: operators that begin, and give new tensors, each for a `wait_tensor` of its own.
One without a result gives a token, a tensor without elements. All of them have effects (`effects.is_foreign`): they
stay in order, and none is dropped, merged or called twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.fake.tensor import FakeMode, FakeTensor, register_special
from primtorch.layout import contiguous_strides
from primtorch.spec import TensorSpec

NAMESPACE = "primtorch_collectives"
_TORCH_S = ("_c10d_functional", "_c10d_functional_autograd")
_library = torch.library.Library(NAMESPACE, "DEF")
# A rank in them is one in the group. Each gives `parts` of its own, or none. A message from any rank has no source.
_library.define("reduce(Tensor input, str reduce_op, int root, str group_name) -> Tensor")
_library.define("gather(Tensor input, int root, str group_name, *, int parts) -> Tensor[]")
_library.define("scatter(Tensor like, int root, str group_name, *, Tensor[] parts) -> Tensor")
_library.define("all_to_all(Tensor[] like, Tensor[] parts, str group_name) -> Tensor[]")
_library.define("send(Tensor input, int to, int tag, str group_name) -> Tensor")
_library.define("recv(Tensor like, int? source, int tag, str group_name) -> Tensor")
_library.define("barrier(str group_name) -> Tensor")
_BETWEEN_TWO = frozenset({"send", "recv"})


def communicates(target: object) -> bool:
    """Whether a call of an operator, or of one of its overloads, talks to other processes or waits for them."""
    op = _overload(target)
    return op is not None and op.namespace in (*_TORCH_S, NAMESPACE)


def is_wait(target: object) -> bool:
    """Whether an operator waits for what another one began. It gives the tensor that it waits for."""
    op = _overload(target)
    return op is not None and op.namespace in _TORCH_S and op._opname == "wait_tensor"


def begins(target: object) -> bool:
    """Whether what an operator reads and gives is in use until `wait_tensor`: it goes on beside the graph."""
    op = _overload(target)
    return op is not None and communicates(op) and not is_wait(op)


def collective_of(target: object) -> OpOverload | None:
    """The collective that a node calls together with all ranks of a group. None for anything else: a wait, or what one
    rank sends to another."""
    op = _overload(target)
    if op is None or not communicates(op) or is_wait(op):
        return None
    return None if op.namespace == NAMESPACE and op._opname in _BETWEEN_TWO else op


def _overload(target: object) -> OpOverload | None:
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target if isinstance(target, OpOverload) else None


# -- the operators -------------------------------------------------------------------------------------------------


def _distributed() -> Any:
    return torch.distributed.distributed_c10d


def _begun(work: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of what a group has begun, or a token, for `wait_tensor` to find the work by."""
    results = results or [torch.empty(0, dtype=torch.float32, device="cpu")]
    for result in results:
        if work is not None:
            torch._C._distributed_c10d._register_work(result, work)
    return results


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _whole(t: torch.Tensor) -> torch.Tensor:
    """A tensor as back ends send it."""
    return t.contiguous()


def _reduce(input: torch.Tensor, reduce_op: str, root: int, group_name: str) -> torch.Tensor:
    c10d = _distributed()
    result = input.clone(memory_format=torch.contiguous_format)
    options = c10d.ReduceOptions()
    options.reduceOp, options.rootRank = getattr(c10d.ReduceOp, reduce_op.upper()), root
    return _begun(c10d._resolve_process_group(group_name).reduce([result], options), [result])[0]


def _gather(input: torch.Tensor, root: int, group_name: str, *, parts: int) -> list[torch.Tensor]:
    c10d = _distributed()
    results = [_new(input) for _ in range(parts)]
    options = c10d.GatherOptions()
    options.rootRank = root
    group = c10d._resolve_process_group(group_name)
    return _begun(group.gather([results] if group.rank() == root else [], [_whole(input)], options), results)


def _scatter(like: torch.Tensor, root: int, group_name: str, *, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    c10d = _distributed()
    result = _new(like)
    options = c10d.ScatterOptions()
    options.rootRank = root
    group = c10d._resolve_process_group(group_name)
    given = [list(map(_whole, parts))] if group.rank() == root else []
    return _begun(group.scatter([result], given, options), [result])[0]


def _all_to_all(like: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group_name: str) -> list[torch.Tensor]:
    c10d = _distributed()
    results = list(map(_new, like))
    group = c10d._resolve_process_group(group_name)
    return _begun(group.alltoall(results, list(map(_whole, parts)), c10d.AllToAllOptions()), results)


def _send(input: torch.Tensor, to: int, tag: int, group_name: str) -> torch.Tensor:
    group = _distributed()._resolve_process_group(group_name)
    return _begun(group.send([_whole(input)], to, tag), [])[0]


def _recv(like: torch.Tensor, source: int | None, tag: int, group_name: str) -> torch.Tensor:
    result = _new(like)
    group = _distributed()._resolve_process_group(group_name)
    work = group.recv_anysource([result], tag) if source is None else group.recv([result], source, tag)
    return _begun(work, [result])[0]


def _barrier(group_name: str) -> torch.Tensor:
    c10d = _distributed()
    return _begun(c10d.barrier(c10d._resolve_process_group(group_name), async_op=True), [])[0]


for _name, _kernel in {
    "reduce": _reduce, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all, "send": _send,
    "recv": _recv, "barrier": _barrier,
}.items():  # fmt: skip
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")

_operators = torch.ops.primtorch_collectives
reduce, gather, scatter = _operators.reduce.default, _operators.gather.default, _operators.scatter.default
all_to_all, barrier = _operators.all_to_all.default, _operators.barrier.default
send, recv = _operators.send.default, _operators.recv.default


def _fake(mode: FakeMode, like: torch.Tensor) -> FakeTensor:
    shape = tuple(like.shape)
    return mode.from_spec(TensorSpec(shape, contiguous_strides(shape), like.dtype, like.device))


def _token(mode: FakeMode, *args: object) -> FakeTensor:
    return mode.from_spec(TensorSpec((0,), (1,), torch.float32, torch.device("cpu")))


register_special(reduce, lambda mode, input, *args: _fake(mode, input))
register_special(gather, lambda mode, like, *args, parts: [_fake(mode, like) for _ in range(parts)] or [_token(mode)])
register_special(scatter, lambda mode, like, *args, parts: _fake(mode, like))
register_special(all_to_all, lambda mode, like, *args: [_fake(mode, one) for one in like])
register_special(recv, lambda mode, like, *args: _fake(mode, like))
for _op in (send, barrier):
    register_special(_op, _token)
