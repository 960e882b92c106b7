"""All that torch.distributed has by which processes talk to each other, or ask about groups: a program each."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import torchcompile

c10d: Any = dist.distributed_c10d


@dataclass(frozen=True)
class Given:
    """What a program is given besides its tensor."""

    group: Any
    alone: Any  # a group of this process
    mesh: Any
    place: int
    other: int


Program = Callable[[torch.Tensor, Given], Any]


def _in_place(call: Callable[[torch.Tensor, Given], object]) -> Program:
    """What is left in a tensor that a call may write to."""

    def program(x: torch.Tensor, given: Given) -> torch.Tensor:
        y = x * (given.place + 2)
        call(y, given)
        return y.sin()

    return program


def _into(call: Callable[[torch.Tensor, torch.Tensor, Given], object], rows: int = 4) -> Program:
    """What is left in a tensor of so many rows."""

    def program(x: torch.Tensor, given: Given) -> torch.Tensor:
        y = x.new_zeros(rows, 3)
        call(y, x * (given.place + 2), given)
        return y.sin()

    return program


def _all_gather(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = [torch.empty_like(x), torch.zeros(3, 4, dtype=x.dtype).t()]
    dist.all_gather(parts, x + given.place)
    return parts[0] - parts[1].sin()


def _gather(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)] if given.place == 0 else None
    dist.gather(x + 1, parts, dst=0)
    return parts[1] * 2 if parts is not None else x


def _scatter(x: torch.Tensor, given: Given) -> torch.Tensor:
    y = torch.empty_like(x)
    dist.scatter(y, [x, x + 1] if given.place == 0 else None, src=0)
    return y * 2


def _gather_by_place(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = [x.new_zeros(3, 4).t() for _ in range(2)] if given.place == 1 else []
    dist.gather((x + 1).t().contiguous().t(), parts, group=given.group, group_dst=1)
    return sum(parts, x).sin()


def _scatter_by_place(x: torch.Tensor, given: Given) -> torch.Tensor:
    y = torch.zeros_like(x)
    work = dist.scatter(y, [x, x.sin()] if given.place == 1 else None, group=given.group, group_src=1, async_op=True)
    work.wait()
    return y * 2 if work.is_completed() else x


def _all_to_all_of_any_size(x: torch.Tensor, given: Given) -> torch.Tensor:
    own = [x[: given.place + 1] * 2, x[: 2 * given.place + 1, :2]]
    parts = [x.new_zeros(1, 3), x.new_zeros(2, 3)] if given.place == 0 else [x.new_zeros(1, 2), x.new_zeros(3, 2)]
    dist.all_to_all(parts, own, group=given.group)
    return torch.cat(parts).sin()


def _received(x: torch.Tensor, given: Given) -> torch.Tensor:
    """What two ranks send to each other, with tags, in the order of the ranks; and from whom it came."""
    y, found = x.new_empty(3, 4), 0
    for rank in range(2):
        if rank == given.place:
            dist.send(x.t().contiguous(), given.other, given.group, tag=5)
        else:
            found = dist.recv(y, group=given.group, group_src=given.other, tag=5)
    return y * (found + 2)


def _reduce_scatter(x: torch.Tensor, given: Given) -> torch.Tensor:
    y = torch.empty_like(x)
    dist.reduce_scatter(y, [x, x.sin()], group=given.group)
    return y * 2


def _all_to_all(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_to_all(parts, [x, x + 1])
    return parts[0] + parts[1]


def _exchanged(send: Any, receive: Any) -> Program:
    """Each rank sends to the other one."""

    def program(x: torch.Tensor, given: Given) -> torch.Tensor:
        y = torch.empty_like(x)
        for rank in range(2):
            work = send(x * 2, given.other) if rank == given.place else receive(y, given.other)
            if isinstance(work, dist.Work):
                work.wait()
        return y.sin()

    return program


def _batch(x: torch.Tensor, given: Given) -> torch.Tensor:
    y = torch.empty_like(x)
    moves = [dist.P2POp(dist.isend, x * 2, given.other), dist.P2POp(dist.irecv, y, given.other)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return y.sin()


def _objects(call: Callable[[list[Any], Given], object], length: int = 2) -> Program:
    """A list of objects that a call writes to."""

    def program(x: torch.Tensor, given: Given) -> torch.Tensor:
        found: list[Any] = [given.place + 1, 5][:length]
        call(found, given)
        return x * sum(value or 0 for value in found)

    return program


def _send_objects(found: list[Any], given: Given) -> None:
    if given.place == 0:
        dist.send_object_list(found, 1)
    else:
        dist.recv_object_list(found, 0)


def _coalesced(x: torch.Tensor, given: Given) -> torch.Tensor:
    a, b = x + 1, x + 2
    with c10d._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    return a * b


def _awaited(x: torch.Tensor, given: Given) -> torch.Tensor:
    y = x * (given.place + 1)
    work = dist.all_reduce(y, group=dist.group.WORLD, async_op=True)
    wave = x.sin()
    work.wait()
    return y + wave


def _result_of_work(x: torch.Tensor, given: Given) -> torch.Tensor:
    work = dist.all_reduce(x * (given.place + 1), async_op=True)
    work.wait()
    return work.result()[0].sin()


def _waited_in_turn(x: torch.Tensor, given: Given) -> tuple[torch.Tensor, ...]:
    """Each is the very tensor that was waited for, also where it is waited for twice."""
    begin = torch.ops._c10d_functional
    parts = begin.all_reduce_coalesced([x.sin(), x.cos()], "sum", given.group.group_name)
    parts.append(begin.all_reduce(x * 2, "max", given.group.group_name))
    waited = [functional.wait_tensor(part) for part in reversed([*parts, *parts])]
    return *(part + 1 for part in parts), *(part * 2 for part in waited)


def _waited_for_as_view(x: torch.Tensor, given: Given) -> tuple[torch.Tensor, ...]:
    whole = torch.ops._c10d_functional.all_reduce(x.sin(), "sum", given.group.group_name)
    view = whole.view(-1)
    waited = functional.wait_tensor(view)
    return view + 1, waited * 2, whole * 3


def _waited_and_written(x: torch.Tensor, given: Given) -> tuple[torch.Tensor, ...]:
    whole = torch.ops._c10d_functional.all_reduce(x.sin(), "sum", given.group.group_name)
    waited = functional.wait_tensor(whole)
    waited.add_(1)
    return whole * 2, waited


def _each(parts: Any) -> tuple[torch.Tensor, ...]:
    return tuple(part * 2 for part in parts)


@dataclass(frozen=True)
class Row:
    """`whole`: it is in the graph; else it breaks it, counted."""

    program: Program
    whole: bool = True


# By the name in torch.distributed.
WRITTEN: Mapping[str, Row] = {
    "all_gather": Row(_all_gather),
    "all_gather_coalesced": Row(
        lambda x, g: dist.all_gather_coalesced([[torch.empty_like(x)] for _ in range(2)], [x]), False
    ),
    "all_gather_into_tensor": Row(_into(lambda y, x, g: dist.all_gather_into_tensor(y, x[:2], group=g.group))),
    "all_gather_single": Row(_into(lambda y, x, g: c10d.all_gather_single(y, x[:2]))),
    "all_gather_object": Row(_objects(lambda found, g: dist.all_gather_object(found, g.place + 7)), False),
    "all_reduce": Row(_in_place(lambda y, g: dist.all_reduce(y, dist.ReduceOp.MAX, g.group))),
    "all_reduce_coalesced": Row(_in_place(lambda y, g: dist.all_reduce_coalesced([y]))),
    "all_to_all": Row(_all_to_all),
    "all_to_all_single": Row(_into(lambda y, x, g: dist.all_to_all_single(y, x))),
    "barrier": Row(_in_place(lambda y, g: dist.barrier())),
    "batch_isend_irecv": Row(_batch),
    "broadcast": Row(_in_place(lambda y, g: dist.broadcast(y, 1, group=g.group))),
    "broadcast_object_list": Row(_objects(lambda found, g: dist.broadcast_object_list(found, 1)), False),
    "gather": Row(_gather),
    "gather_object": Row(
        _objects(lambda found, g: dist.gather_object(g.place + 7, found if g.place == 0 else None)), False
    ),
    "irecv": Row(_exchanged(dist.isend, dist.irecv)),
    "isend": Row(_exchanged(dist.isend, dist.recv)),
    "monitored_barrier": Row(_in_place(lambda y, g: dist.monitored_barrier()), False),
    "recv": Row(_exchanged(dist.send, dist.recv)),
    "recv_object_list": Row(_objects(_send_objects), False),
    "reduce": Row(_in_place(lambda y, g: dist.reduce(y, 0))),
    "reduce_scatter": Row(_reduce_scatter),
    "reduce_scatter_single": Row(_into(lambda y, x, g: c10d.reduce_scatter_single(y, x), 2)),
    "reduce_scatter_tensor": Row(_into(lambda y, x, g: dist.reduce_scatter_tensor(y, x, group=g.group), 2)),
    "scatter": Row(_scatter),
    "scatter_object_list": Row(
        _objects(lambda found, g: dist.scatter_object_list(found, [3, 4] if g.place == 0 else None), 1), False
    ),
    "send": Row(_exchanged(dist.send, dist.recv)),
    "send_object_list": Row(_objects(_send_objects), False),
    # Other ways to say the same.
    "all_to_all, of parts of any size": Row(_all_to_all_of_any_size),
    "barrier, awaited": Row(_in_place(lambda y, g: dist.barrier(g.group, async_op=True).wait())),
    "gather, by place": Row(_gather_by_place),
    "recv, from any": Row(_exchanged(dist.send, lambda y, other: dist.recv(y)), False),
    "recv, from whom": Row(_received),
    "reduce, of a group": Row(
        _in_place(lambda y, g: dist.reduce(y, 1, dist.ReduceOp.MAX, g.group, async_op=True).wait())
    ),
    "reduce, to nobody": Row(_in_place(lambda y, g: dist.reduce(y))),
    "scatter, by place": Row(_scatter_by_place),
    "scatter, into a view": Row(
        _in_place(lambda y, g: dist.scatter(y.t(), [y.t()] * 2 if g.place == 0 else None)), False
    ),
    "send, of a view": Row(_in_place(lambda y, g: dist.send(y.t(), g.other)), False),
    "send, to itself": Row(_in_place(lambda y, g: dist.send(y, g.place))),
    "all_reduce, awaited": Row(_awaited),
    "all_reduce, of the mesh": Row(_in_place(lambda y, g: dist.all_reduce(y, group=g.mesh["b"].get_group()))),
    "all_reduce, alone": Row(_in_place(lambda y, g: dist.all_reduce(y, group=g.alone))),
    "all_reduce, by its future": Row(_in_place(lambda y, g: dist.all_reduce(y, async_op=True).get_future().wait())),
    "all_reduce, by its result": Row(_result_of_work),
    "all_reduce, coalesced": Row(_coalesced, False),
    "broadcast, alone": Row(_in_place(lambda y, g: dist.broadcast(y, g.place, group=g.alone))),
    "broadcast, by place": Row(_in_place(lambda y, g: dist.broadcast(y, group=g.group, group_src=1))),
}
# By the name in torch.distributed._functional_collectives; a group is given as a group, its name, or a mesh.
FUNCTIONAL: Mapping[str, Row] = {
    "all_gather_inplace": Row(lambda x, g: functional.all_gather_inplace([x + 1, x + 2], x), False),
    "all_gather_into_tensor_coalesced": Row(
        lambda x, g: _each(functional.all_gather_into_tensor_coalesced([x, x.sin()], g.group))
    ),
    "all_gather_single": Row(lambda x, g: functional.all_gather_single(x, 1, g.group) * 2),
    "all_gather_single_autograd": Row(lambda x, g: functional.all_gather_single_autograd(x, 0, g.group) * 2),
    "all_gather_single_coalesced": Row(
        lambda x, g: _each(functional.all_gather_single_coalesced([x, x.sin()], g.group))
    ),
    "all_gather_tensor": Row(lambda x, g: functional.all_gather_tensor(x, 1, g.group) * 2),
    "all_gather_tensor_autograd": Row(lambda x, g: functional.all_gather_tensor_autograd(x, 0, g.group) * 2),
    "all_gather_tensor_inplace": Row(
        _into(lambda y, x, g: functional.all_gather_tensor_inplace(y, x[:2], g.group)), False
    ),
    "all_reduce": Row(lambda x, g: functional.all_reduce(x * (g.place + 1), "sum", dist.group.WORLD) * 2),
    "all_reduce_coalesced": Row(lambda x, g: _each(functional.all_reduce_coalesced([x, x.sin()], "max", g.group))),
    "all_reduce_inplace": Row(_in_place(lambda y, g: functional.all_reduce_inplace(y, "sum", g.group)), False),
    "all_to_all_inplace": Row(_into(lambda y, x, g: functional.all_to_all_inplace(y, x, None, None, g.group)), False),
    "all_to_all_single": Row(lambda x, g: functional.all_to_all_single(x, None, None, g.group) * 2),
    "all_to_all_single_autograd": Row(
        lambda x, g: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], g.group) * 2
    ),
    "broadcast": Row(lambda x, g: functional.broadcast(x, 1, g.group) * 2),
    "permute_tensor": Row(lambda x, g: functional.permute_tensor(x.flatten(), [1, 0], g.group) * 2, False),
    "reduce_scatter_single": Row(lambda x, g: functional.reduce_scatter_single(x, "sum", 0, g.group) * 2),
    "reduce_scatter_single_autograd": Row(
        lambda x, g: functional.reduce_scatter_single_autograd(x, "sum", 0, g.group) * 2
    ),
    "reduce_scatter_single_coalesced": Row(
        lambda x, g: _each(functional.reduce_scatter_single_coalesced([x, x.sin()], "sum", [0, 0], g.group))
    ),
    "reduce_scatter_tensor": Row(lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g.group) * 2),
    "reduce_scatter_tensor_autograd": Row(
        lambda x, g: functional.reduce_scatter_tensor_autograd(x, "sum", 0, g.group) * 2
    ),
    "reduce_scatter_tensor_coalesced": Row(
        lambda x, g: _each(functional.reduce_scatter_tensor_coalesced([x, x.sin()], "sum", [0, 0], g.group))
    ),
    "reduce_scatter_tensor_inplace": Row(
        _into(lambda y, x, g: functional.reduce_scatter_tensor_inplace(y, x, "sum", 0, g.group), 2), False
    ),
    "wait_tensor": Row(lambda x, g: functional.wait_tensor(functional.all_reduce(x, "sum", (g.mesh, 1))) * 2),
    "all_reduce, of a mesh's dim": Row(lambda x, g: functional.all_reduce(x, "sum", (g.mesh, 1)) * 2),
    "all_reduce, of a mesh": Row(lambda x, g: functional.all_reduce(x, "sum", g.mesh["b"]) * 2),
    "all_reduce, by name": Row(lambda x, g: functional.all_reduce(x, "sum", g.group.group_name) * 2),
    "wait_tensor, in turn": Row(_waited_in_turn),
    "wait_tensor, of a view": Row(_waited_for_as_view, False),
    "wait_tensor, written": Row(_waited_and_written),
    "all_reduce, of ranks": Row(lambda x, g: functional.all_reduce(x, "sum", [0, 1]) * 2, False),
}


def _asked(x: torch.Tensor, g: Given) -> torch.Tensor:
    """All questions about groups, the default one, and meshes."""
    world = dist.group.WORLD
    known = dist.is_available() and dist.is_initialized() and world is not None and dist.get_backend() == "gloo"
    ranks = dist.get_rank() + 10 * dist.get_rank(g.alone) + 100 * dist.get_rank(group=world) + g.group.rank()
    sizes = dist.get_world_size() + 10 * dist.get_world_size(g.alone) + 100 * g.group.size()
    members = dist.get_global_rank(g.alone, 0) + 10 * dist.get_group_rank(g.group, 1)
    listed = sum(dist.get_process_group_ranks(g.group)) + len(dist.get_process_group_ranks(g.alone))
    sides = g.mesh.ndim + g.mesh.size() + 10 * g.mesh.size(1) + 100 * g.mesh.get_local_rank("b") + g.mesh.get_rank()
    named = len(g.mesh.mesh_dim_names) + len(g.mesh.shape) + (g.mesh.device_type == "cpu") + len(g.group.group_name)
    sides += sum(g.mesh.get_coordinate()) + g.mesh["b"].size() + g.mesh.get_group("b").size()
    there = dist.is_gloo_available() + 2 * dist.is_nccl_available() + 4 * dist.is_mpi_available()
    return x * torch.tensor([float(n) for n in (known, ranks, sizes, members, listed, sides, named, there)]).sum()


QUESTIONS: Mapping[str, Row] = {"all of them": Row(_asked)}
TABLES = {"written": WRITTEN, "functional": FUNCTIONAL, "questions": QUESTIONS}
# What makes and ends groups or asks about the process's surroundings.
_OTHERS = frozenset(
    {
        "destroy_process_group", "init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
        "record_comm", "shrink_group", "split_group", "supports_complex", "allow_inflight_collective_as_graph_input_ctx",
        "batch_p2p_ops_inplace", "irecv_inplace", "isend_inplace",  # of other processes' tensors, by torch's compiler
    }
)  # fmt: skip
_ASKING = ("get_", "is_")
_PARTS = ("_backward", "_setup_context")


def untried() -> list[str]:
    """Public functions that no row of the tables calls."""
    public = [(name, WRITTEN) for name in c10d.__all__] + [(name, FUNCTIONAL) for name in vars(functional)]
    module = {id(WRITTEN): c10d, id(FUNCTIONAL): functional}
    return [
        name
        for name, table in public
        if type(found := vars(module[id(table)]).get(name)) is types.FunctionType
        and inspect.unwrap(found).__module__ == module[id(table)].__name__
        and not name.startswith(("_", *_ASKING))
        and not name.endswith(_PARTS)
        and name not in _OTHERS
        and name not in table
    ]


def _result(run: Callable[..., Any], given: Given) -> list[torch.Tensor] | str:
    """What a program gives, and how many collectives the default group has seen of it; or what it raises."""
    torch.manual_seed(dist.get_rank())
    before = dist.group.WORLD._get_sequence_number_for_group()
    try:
        found = run(torch.randn(4, 3, dtype=torch.float64), given)
        values = list(found) if isinstance(found, (tuple, list)) else [found]
        values = [value + 0 for value in values if isinstance(value, torch.Tensor)]
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__
    return [*values, torch.tensor(dist.group.WORLD._get_sequence_number_for_group() - before)]


def _same(found: list[torch.Tensor] | str, expected: list[torch.Tensor] | str) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def as_eager(kind: str) -> list[str]:
    """What is wrong with the rows of a table: each is in the graph, or breaks it and is told; twice each."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    alone = [dist.new_group([member]) for member in range(2)][rank]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    given = Given(dist.new_group(), alone, mesh, rank, 1 - rank)
    wrong = []
    for name, row in TABLES[kind].items():
        if name.partition(",")[0] not in vars(functional if kind == "functional" else c10d) and kind != "questions":
            continue  # of another torch
        torchcompile.reset()
        expected = _result(row.program, given)
        compiled = torchcompile.compile(row.program, backend="aot_eager")
        for _ in range(2):
            found = _result(compiled, given)
            if not _same(found, expected):
                wrong.append(f"{name}: {found}, eagerly {expected}")
        told = [f"{event.kind.id}: {event.detail}" for event in torchcompile.report().breaks]
        if bool(told) == row.whole and not isinstance(expected, str):
            wrong.append(f"{name}: {told or 'no break is told'}")
    return wrong


def in_one_group_and_another() -> None:
    """What is known of one group is not said of the next that comes in its place."""

    class Holder:
        group: Any = None

    held = Holder()

    def passed(x: torch.Tensor, group: Any) -> torch.Tensor:
        y = x * dist.get_world_size(group) + dist.get_rank(group) + group.size()
        dist.all_reduce(y, group=group)
        return y

    def read(x: torch.Tensor, group: Any) -> torch.Tensor:
        return x * dist.get_world_size(held.group) + dist.get_global_rank(held.group, 0)

    rank = dist.get_rank()
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())][rank]
    whole, x = dist.new_group(), torch.ones(3)
    for program in (passed, read):
        torchcompile.reset()
        compiled = torchcompile.compile(program, backend="aot_eager", fullgraph=True)
        for group in (whole, alone, dist.group.WORLD, whole):
            held.group = group
            assert torch.equal(compiled(x, group), program(x, group))
