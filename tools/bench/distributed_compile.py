"""How long ranks compile models of few and of many equal blocks, on the CPU over gloo, into an empty cache: what the
first steps take beyond as many steps later.

PYTHONPATH=packages/compile/tests python tools/bench/distributed_compile.py --ranks 1 2 --blocks 12 48
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchcompile

WIDTH, HEADS, STEPS = 32, 4, 4
CASES = ("ddp whole", "ddp blocks", "fsdp blocks")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measure(case: str, blocks: int, cap: float = 0.25) -> tuple[float, float, int, int]:
    """Processor seconds of this process and seconds that compiling adds until graphs are final, captures, stages."""
    torchcompile.reset()
    kind, what = case.split()
    model: Any = Model(blocks)
    options = {"cache": tempfile.mkdtemp()}
    if what == "blocks":
        torchcompile.compile_in_place(*model.blocks, options=options)
    else:
        model = torchcompile.compile(model, options=options)
    if kind == "ddp":
        run: Any = DistributedDataParallel(model, bucket_cap_mb=cap)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    x = torch.randn(2, 16, WIDTH)

    def steps() -> tuple[float, float]:
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            run(x).square().mean().backward()
        return time.process_time() - cpu, time.perf_counter() - wall

    first, later = steps(), steps()
    report = torchcompile.report()
    return first[0] - later[0], first[1] - later[1], report.captured, len(report.stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--cap", type=float, default=0.25, help="MiB of a bucket; a block has 0.049")
    given = parser.parse_args()
    print("| ranks | case | blocks | CPU s | s | captures | stages |\n|---|---|---|---|---|---|---|")
    for ranks in given.ranks:
        with Processes(ranks) as processes:
            for case in given.cases:
                processes.run(measure, case, 1)  # what a process imports and makes once
                for blocks in given.blocks:
                    cpu, wall, captured, stages = processes.run(measure, case, blocks, given.cap, timeout=300)[0]
                    print(
                        f"| {ranks} | {case} | {blocks} | {cpu:.2f} | {wall:.1f} | {captured} | {stages} |", flush=True
                    )


if __name__ == "__main__":
    main()
