"""Programs that talk to other processes, eagerly and compiled, as each rank runs them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from replica_programs import Branches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchcompile


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


def sharded() -> None:
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
            loss = run(torch.randn(4, 6), True).pow(2).sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        results.append(torch.stack(found))
    torch.testing.assert_close(results[1], results[0])
