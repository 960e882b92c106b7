"""Two processes on one machine train replicas of a model over gloo, eagerly and compiled.

    python examples/demo_distributed.py

Prints the losses of both, which agree, the time of a step, and where the compiled backward was cut: each stage gives
the gradients of one of DistributedDataParallel's buckets, which is sent while the next stage runs.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcompile

PROCESSES, STEPS, WIDTH, LAYERS, BATCH = 2, 12, 512, 6, 64
WARM = 4  # steps in which the model is compiled, and the reducer makes its buckets


class Block(nn.Module):
    """A normalised layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.inner(self.norm(x)))


def train(compiled: bool) -> tuple[list[float], float]:
    """The losses of each step, the mean over the processes, and the median time of a step in seconds."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
    replicated = DistributedDataParallel(torchcompile.compile(model) if compiled else model, bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(replicated.parameters(), 1e-3)
    losses, times = [], []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(BATCH, WIDTH)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = (replicated(x) - x.mean(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / PROCESSES)
    return losses, sorted(times[WARM:])[(STEPS - WARM) // 2]


def show(results: dict[str, tuple[list[float], float]]) -> None:
    console = Console()
    table = Table("step", *results, title=f"Loss, {PROCESSES} processes")
    for step in range(STEPS):
        table.add_row(str(step), *(f"{losses[step]:.6f}" for losses, _ in results.values()))
    table.add_section()
    table.add_row("ms a step", *(f"{1000 * seconds:.1f}" for _, seconds in results.values()))
    console.print(table)
    stages = Table("graph", "stage", "bucket", "parameters", "MiB", title="Where the compiled backward was cut")
    for s in torchcompile.report().stages:
        stages.add_row(s.title, str(s.stage), str(s.bucket), ", ".join(s.parameters), f"{s.nbytes / 2**20:.2f}")
    console.print(stages)


def work(rank: int, port: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // PROCESSES))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=120),
    )
    results: dict[str, Any] = {name: train(name == "compiled") for name in ("eager", "compiled")}
    if rank == 0:
        show(results)
    pairs = zip(results["eager"][0], results["compiled"][0], strict=True)
    assert all(abs(eager - compiled) < 1e-3 * (1 + abs(eager)) for eager, compiled in pairs), "the losses differ"
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
