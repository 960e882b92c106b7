"""Two processes over gloo: what talks to other processes happens at every call, as in eager."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcompile

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


class Branches(nn.Module):
    """Its second branch is used in some steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden + self.second(x).sigmoid() if both else hidden)


def _train(model: Any, arguments: Callable[[int], tuple[Any, ...]]) -> list[torch.Tensor]:
    """The gradients of each of five steps, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 3), *arguments(step)).pow(2).sum().backward()
        found += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


def _replicas(make: Callable[[], nn.Module], arguments: Callable[[int], tuple[Any, ...]], **settings: Any) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(make(), **settings)
        results.append(_train(torchcompile.compile(model) if compiled else model, arguments))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
        others = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(others, found)
        assert torch.equal(others[0], others[1])  # the replicas are one model


def linear() -> None:
    _replicas(lambda: nn.Linear(3, 1), lambda step: ())


def branches() -> None:
    _replicas(Branches, lambda step: (step % 2 == 1,), find_unused_parameters=True)


def collectives() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x * (dist.get_rank() + 1) if dist.is_initialized() else x
        dist.all_reduce(total)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x + dist.get_rank())
        work = dist.all_reduce(parts[0], async_op=True)
        work.wait()
        return total + 1, torch.cat(parts)

    compiled = torchcompile.compile(program)
    for call in range(4):
        x = torch.full((2,), float(call))
        for expected, found in zip(program(x), compiled(x), strict=True):
            assert torch.equal(expected, found)
    assert any(event.kind.id == "distributed" for event in torchcompile.report().breaks)


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Branches()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        run = torchcompile.compile(model) if compiled else model
        torch.manual_seed(1 + dist.get_rank())
        found = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(torch.randn(4, 3), True).pow(2).sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        results.append(torch.stack(found))
    torch.testing.assert_close(results[1], results[0])


def _worker(rank: int, port: int, program: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        program()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still be ending, which would abort the interpreter's own end


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [linear, branches, collectives, sharded])
def test_two_processes(program: Callable[[], None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, program), nprocs=2)
