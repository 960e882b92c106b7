"""Programs that talk to other processes, eagerly and compiled, as each rank runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from replica_programs import WRAPPINGS, Layers, before

import torchcompile
from aotautograd.stages import StagedRun


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
    assert any(event.kind.id == "distributed" for event in torchcompile.report().breaks)


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
