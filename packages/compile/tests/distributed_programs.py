"""Programs that talk to other processes, eagerly and compiled, as each rank runs them."""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from replica_programs import WRAPPINGS, Layers, before
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchcompile
import torchdynamo
from aotautograd.stages import StagedRun
from primtorch.communication import communicates
from torchdistributed import CollectivesDiffer, agreement, compilations


def collectives() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x * (dist.get_rank() + 1) if dist.is_initialized() else x
        dist.all_reduce(total)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x + dist.get_rank())
        work = dist.all_reduce(parts[0], async_op=True)
        work.wait()
        return total + 1, torch.cat(parts)

    torchcompile.reset()
    compiled = torchcompile.compile(program)
    for call in range(4):
        x = torch.full((2,), float(call))
        for expected, found in zip(program(x), compiled(x), strict=True):
            assert torch.equal(expected, found)
    assert torchcompile.report().clean


def written_collectives(backend: str) -> None:
    """Collectives that write to their arguments are nodes of one graph, in order; nobody reads the last."""

    def program(x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x * (dist.get_rank() + 1)
        dist.all_reduce(total)
        dist.all_reduce(kept, op=dist.ReduceOp.MAX)
        work = dist.all_reduce(total, async_op=True)
        wave = x.sin()
        work.wait()
        whole = x.new_empty(2 * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole, total + wave)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, whole * (1 + dist.get_rank()))
        dist.broadcast(part, 1)
        turned = torch.empty_like(x)
        dist.all_to_all_single(turned, part + dist.get_rank())
        dist.reduce(turned, 1, dist.ReduceOp.MAX)
        dist.barrier()
        root = dist.get_rank() == 1
        parts = [torch.empty_like(x) for _ in range(2)] if root else None
        dist.gather(part, parts, dst=1)
        dist.scatter(part, [turned.exp(), parts[0] * 2] if root else None, src=1)
        dist.all_to_all(list(whole.split(len(x))), [part, part + 1])
        if root:
            dist.send(part.cos(), 0)
        else:
            dist.recv(part, 1)
        dist.all_reduce(x + 1)
        return total, whole, part, turned

    def broken(x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        work = dist.all_reduce(kept, async_op=True)
        torchdynamo.graph_break()
        work.wait()
        return (kept * 2,)

    for run in (program, broken):
        torchcompile.reset()
        compiled = torchcompile.compile(run, backend=backend, fullgraph=run is program)
        nodes: list[Any] = []
        for call in range(3):
            torch.manual_seed(call + 10 * dist.get_rank())
            x, kept = torch.randn(4, 3, dtype=torch.float64), torch.randn(5)
            twin = kept.clone()
            pairs = zip((*run(x, kept), kept), (*compiled(x, twin), twin), strict=True)
            for expected, found in pairs:
                torch.testing.assert_close(found, expected)
        assert torchcompile.report().clean == (run is program)
    torchdynamo.optimize(lambda gm, inputs: nodes.extend(gm.graph.nodes) or gm.forward)(program)(x, kept)
    called = [str(node.target).partition(".")[2] for node in nodes if communicates(node.target)]
    order = ["all_reduce"] * 3 + [
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "all_to_all_single",
    ]
    waited = [name for each in order for name in (each, "wait_tensor")]
    own = {"gather": 1 if dist.get_rank() == 0 else 2, "all_to_all": 2}  # a rank waits for each part
    last = ("reduce", "barrier", "gather", "scatter", "all_to_all", "send" if dist.get_rank() == 1 else "recv")
    waited += [name for each in (*last, "all_reduce") for name in (each, *["wait_tensor"] * own.get(each, 1))]
    assert [name.partition(".")[0] for name in called] == waited


def waits_late(backend: str) -> None:
    """The program begins collectives by torch's operators and waits later, in another order: what is sent and what comes
    is nobody else's memory until then. Rank 1 comes late, and rank 0 computes meanwhile."""
    ops = torch.ops._c10d_functional

    def program(x: torch.Tensor, name: str, rounds: int, forgotten: bool) -> tuple[torch.Tensor, ...]:
        flying, rest = [], x
        for turn in range(rounds):
            given = (rest * (turn + 1)).sin()
            flying.append(ops.all_gather_into_tensor(given, 2, name))
            flying.append(ops.all_to_all_single(given.cos(), [len(x) // 2] * 2, [len(x) // 2] * 2, name))
            flying += ops.all_gather_into_tensor_coalesced([given.exp(), given.tanh()], 2, name)
            flying.append(ops.reduce_scatter_tensor(given * 3, "sum", 2, name))
            flying.append(ops.all_reduce(given + 1, "max", name))
            rest = (given * 0.5 + rest).tanh() + (given @ given.t()).softmax(0)  # in memory of the same size
            rest = rest * torch.ones_like(x).cumsum(0) / len(x)
        whole = rest.sum() * torch.zeros(())
        for place in range(forgotten, len(flying)):
            waited = ops.wait_tensor(flying[-1 - place])
            assert waited is flying[-1 - place]
            whole = whole + flying[-1 - place].sum() * (place + 1) + waited.amax()
        return whole, rest, *flying[forgotten:]

    world = dist.group.WORLD.group_name
    for rounds, forgotten in ((1, False), (3, False), (2, True)):
        torchcompile.reset()
        compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
        for call in range(3):
            torch.manual_seed(call + 10 * dist.get_rank())
            x = torch.rand(64, 64, dtype=torch.float64) + 1
            arguments = (x, world, rounds, forgotten)
            expected = program(*arguments)
            dist.barrier()
            if dist.get_rank() == 1:
                time.sleep(0.05)
            found = compiled(*arguments)
            dist.barrier()
            torch.testing.assert_close(found, expected)
    assert torchcompile.report().clean


def other_orders(backend: str, late: bool) -> tuple[str, float]:
    """What a rank raises that calls collectives in another order than the other one, and how long that took. Where
    one rank comes `late`, the other is told when its collective ends: the other process is gone, or the limit has come."""

    world = dist.new_group(timeout=datetime.timedelta(seconds=4)) if late else dist.group.WORLD

    def program(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            first = functional.all_reduce(x, "sum", world)  # rank 0 begins here
            return first + functional.all_reduce(x.double(), "max", world).mean()
        second = functional.all_reduce(x.double(), "max", world)  # rank 1 begins here
        return second.mean() + functional.all_reduce(x, "sum", world)

    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    began = time.monotonic()
    with patience(0.2 if late else 20.0), pytest.raises(CollectivesDiffer) as raised:
        if late and dist.get_rank() == 1:
            time.sleep(1.5)
        compiled(torch.ones(4, 3))
    took = time.monotonic() - began
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    return str(raised.value), took


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """How long ranks wait for others at a graph's first run, and behind its compilation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_PATIENCE", seconds)
        patch.setattr(compilations, "_PATIENCE", min(seconds, compilations._PATIENCE))
        yield


def some_ranks_compile(backend: str) -> None:
    """Ranks whose graphs differ where they may: one rank runs eagerly, one has other sizes, one breaks its graph, one has
    a group of its own, one compiles again."""

    world = dist.group.WORLD

    def program(x: torch.Tensor, breaks: bool, own: Any) -> torch.Tensor:
        total = functional.all_reduce(x.sum(), "sum", world) + functional.all_reduce(x.mean(), "sum", own)
        if breaks:
            torchdynamo.graph_break()
        if dist.get_rank() == 1:
            total = total.sin().cos()
        return total + functional.all_reduce(x.max() * 2, "max", world)

    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    for eager, breaks, sizes in ((None, None, (3, 3)), (0, None, (3, 3)), (None, 1, (3, 5)), (None, 0, (4, 4))):
        torchcompile.reset()
        run = program if eager == rank else torchcompile.compile(program, backend=backend)
        for call in range(2):
            x = torch.arange(float(sizes[rank] + call * (rank == 0)))
            arguments = (x, breaks == rank, groups[rank])
            with patience(0.1):
                torch.testing.assert_close(run(*arguments), program(*arguments))


def in_a_subgroup(backend: str) -> None:
    """What breaks the graph in the middle happens at each call, in the group that was asked for."""

    def program(x: torch.Tensor, group: Any, others: Any) -> torch.Tensor:
        y = x * (dist.get_rank() + 2)
        dist.monitored_barrier(group)
        if dist.get_rank() == 1:
            y = y.sin()
            dist.broadcast(y, 1, group=others)
        dist.broadcast(y, 0, group=group)
        z = y.cos()
        dist.all_reduce(z, group=group)
        return z + y

    group, alone = dist.new_group(), [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    torchcompile.reset()
    compiled = torchcompile.compile(program, backend=backend)
    for call in range(3):
        torch.manual_seed(call + 10 * dist.get_rank())
        x, others = torch.randn(4), alone[dist.get_rank()]
        torch.testing.assert_close(compiled(x, group, others), program(x, group, others))
    assert any(event.kind.id == "distributed" for event in torchcompile.report().breaks)


def raises_behind_a_collective(backend: str) -> int:
    """How many collectives a rank calls in a graph that raises in it alone: a second run would wait for the others."""

    def program(x: torch.Tensor, place: torch.Tensor, world: Any) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", world)
        return total[place] * 2

    torchcompile.reset()
    world = dist.new_group(timeout=datetime.timedelta(seconds=8))
    compiled = torchcompile.compile(program, backend=backend)
    x, good, bad = torch.ones(4), torch.tensor([1]), torch.tensor([9])
    torch.testing.assert_close(compiled(x, good, world), program(x, good, world))
    before = world._get_sequence_number_for_group()
    if dist.get_rank() == 0:
        with pytest.raises(IndexError):
            compiled(x, bad, world)
    else:
        compiled(x, good, world)
    return world._get_sequence_number_for_group() - before


def functional_collectives(backend: str) -> None:
    """They are nodes of one graph, differentiated as in eager; those whose results nobody reads, and those that another
    one has done already, happen all the same."""

    def program(x: torch.Tensor, group: Any) -> torch.Tensor:
        total = functional.all_reduce(x * (dist.get_rank() + 1), "sum", group)
        functional.all_reduce(x, "max", group)
        columns = functional.all_gather_tensor(total.sin(), 1, group)
        rows = functional.reduce_scatter_tensor(columns.cos(), "sum", 0, group)
        turned = functional.all_to_all_single(rows * 2, None, None, group) if len(rows) % 2 == 0 else rows
        return turned + functional.all_reduce(x * (dist.get_rank() + 1), "sum", group).mean()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in (mesh, (mesh, 0), dist.group.WORLD, functional._resolve_group_name(mesh)):
        torchcompile.reset()
        nodes: list[Any] = []
        compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
        for call in range(2):
            torch.manual_seed(call + 10 * dist.get_rank())
            given = torch.randn(4, 3, dtype=torch.float64)
            results = []
            for run in (program, compiled):
                x = given.clone().requires_grad_()
                result = run(x, group)
                (result * (1 + dist.get_rank())).sum().backward()
                assert x.grad is not None
                results.append((torch.as_tensor(result.detach() + 0), x.grad.clone()))
            for expected, found in zip(*results, strict=True):
                torch.testing.assert_close(found, getattr(expected, "wait", lambda e=expected: e)())
        assert torchcompile.report().clean
        torchdynamo.optimize(lambda gm, inputs: nodes.extend(gm.graph.nodes) or gm.forward)(program)(given, group)
        called = [str(node.target) for node in nodes if "_c10d_functional" in str(node.target)]
        assert sum("all_reduce" in name for name in called) == 3
        assert sum("wait_tensor" in name for name in called) == len(called) / 2 == 6
        assert all("wait_tensor" in name for name in called[1::2])


def in_buckets(wrapping: str, backend: str, find_unused: bool) -> tuple[list[list[str]], list[tuple[int, bool]]]:
    """The events of each backward, in order, and the buckets of the backward's stages at the end.

    A bucket's reduction begins ("reduce 1") before the graph of the next stage runs ("graph 2").
    """
    torchcompile.reset()
    torch.manual_seed(0)
    events: list[str] = []

    def hook(state: None, bucket: dist.GradBucket) -> Any:
        events.append(f"reduce {bucket.index()}")
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda finished: finished.value()[0] / 2)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    settings = {"bucket_cap_mb": 5e-4, "find_unused_parameters": find_unused}
    run, model = {**WRAPPINGS, "before": before}[wrapping](Layers((8, 8, 8, 8, 8)).double(), settings, backend)
    model.register_comm_hook(None, hook)
    rounds = []
    for _ in range(5):
        x = torch.randn(2, 8, dtype=torch.float64)
        loss = run(x).sum()
        with recorded(events):
            loss.backward()
        rounds.append(events.copy())
        events.clear()
    return rounds, [(stage.bucket, stage.planned) for stage in torchcompile.report().stages]


class Pair(torch.nn.Module):
    """Two layers, a bucket each, and a number of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first, self.second, self.number = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * getattr(self, "scale", 1.5))


def alike(sharded: bool) -> tuple[int, list[tuple[str, ...]]]:
    """Blocks that are built alike, compiled in place: how many graphs were captured, and the parameters of each stage
    of a backward. Gradients are eager's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*map(Pair, range(6))).double()
    twin = copy.deepcopy(model)
    torchcompile.reset()
    torchcompile.compile_in_place(*model, backend="aot_eager")
    runs = [_in_units(m) if sharded else DistributedDataParallel(m, bucket_cap_mb=5e-4) for m in (model, twin)]
    for step in range(4):
        torch.manual_seed(step + 10 * dist.get_rank())
        x = torch.randn(2, 8, dtype=torch.float64)
        for run in runs:
            run.zero_grad()
            run(x).square().sum().backward()
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(_local(found.grad), _local(expected.grad))
    report = torchcompile.report()
    return report.captured, [stage.parameters for stage in report.stages]


def _in_units(model: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """Notes where the graph of a stage begins."""
    original = StagedRun.__call__

    def noted(run: StagedRun) -> list[object]:
        events.append(f"graph {run.at}")
        return original(run)

    StagedRun.__call__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        StagedRun.__call__ = original  # type: ignore[method-assign]
