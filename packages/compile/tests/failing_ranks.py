"""Jobs of several processes in which one rank raises, dies or is late while it compiles, and what becomes of the others.

Processes are forked from one that has imported torch, so that a job begins at once; each is bound by a time limit.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from processes import CONTEXT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcompile
from torchdistributed import agreed

LIMIT = 20.0  # seconds that a rank may take
Backend = Callable[..., Any]
Result = tuple[str, str, float]


def _raises(gm: Any, inputs: Any) -> Any:
    raise OSError("no room left for kernels")


def _dies(gm: Any, inputs: Any) -> Any:
    os._exit(3)


def _is_late(gm: Any, inputs: Any) -> Any:
    time.sleep(2.5)
    return agreed(gm.forward, gm)


FAULTS: Mapping[str, Backend] = {"raises": _raises, "dies": _dies, "is late": _is_late}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * 2


def _replicas(backend: Any, mesh: Any) -> Any:
    return DistributedDataParallel(torchcompile.compile(Model(), backend=backend))


def _shards(backend: Any, mesh: Any) -> Any:
    model = Model()
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return torchcompile.compile(fully_shard(model, mesh=mesh), backend=backend)


def _collectives(backend: Any, mesh: Any) -> Any:
    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x.sin(), "sum", dist.group.WORLD).cos()

    return torchcompile.compile(program, backend=backend)


WRAPPINGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "replicas": _replicas,
    "shards": _shards,
    "collectives": _collectives,
}


def _rank(rank: int, count: int, port: int, wrapping: str, fault: str, answers: Any) -> None:
    torch.set_num_threads(1)
    address, limit = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=4 * LIMIT)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=limit)
    backend = FAULTS[fault] if rank == 1 else "aot_eager"
    mesh = init_device_mesh("cpu", (count,))
    run = WRAPPINGS[wrapping](backend, mesh)
    began = time.monotonic()
    try:
        for _ in range(2):
            run(torch.ones(2, 4, requires_grad=True)).sum().backward()  # type: ignore[union-attr]
        ended = "", ""
    except Exception as error:
        ended = type(error).__name__, str(error)
    answers.put((rank, (*ended, time.monotonic() - began)))
    answers.close()
    answers.join_thread()
    if rank == 1 and fault == "raises":
        time.sleep(LIMIT)  # a program that goes on: nobody is told by a connection that ends
    os._exit(0)


def job(count: int, wrapping: str, fault: str) -> dict[int, Result]:
    """By rank: what was raised there, with its text, and after how many seconds. Ranks that died are not among them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = CONTEXT.Queue()
    running = [
        CONTEXT.Process(target=_rank, args=(rank, count, port, wrapping, fault, answers), daemon=True)
        for rank in range(count)
    ]
    for process in running:
        process.start()
    found: dict[int, Result] = {}
    deadline = time.monotonic() + LIMIT
    try:
        while len(found) < count - (fault == "dies"):
            rank, result = answers.get(timeout=max(0.01, deadline - time.monotonic()))
            found[rank] = result
    finally:
        for process in running:
            process.kill()
            process.join(10)
    return found
