"""CPU seconds of one thread to trace, clean and cut the joint graph of a BERT-sized encoder, beside torch's tracer.

python tools/bench/aot_joint.py [layers] [--profile]
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from typing import Any

import torch
from functorch.compile import aot_module

from aotautograd import default_partition, min_cut, trace_joint
from aotautograd.api import simplify


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w)
        x = self.norm1(x + self.drop(self.o(a)))
        return self.norm2(x + self.drop(self.down(torch.nn.functional.gelu(self.up(x)))))


class Encoder(torch.nn.Module):
    def __init__(self, layers: int, width: int = 768, heads: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = torch.nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def program_of(model: torch.nn.Module) -> tuple[Any, list[torch.Tensor]]:
    names, tensors = zip(*model.named_parameters(), strict=True)

    def program(*args: torch.Tensor) -> list[torch.Tensor]:
        return [torch.func.functional_call(model, dict(zip(names, args, strict=False)), args[-1:])]

    return program, list(tensors)


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 12
    torch.set_num_threads(1)
    model = Encoder(layers)
    program, inputs = program_of(model)
    inputs.append(torch.randint(0, 30522, (2, 128)))
    rows: list[tuple[float, ...]] = []
    for _ in range(8):
        t0 = time.process_time()
        joint = trace_joint(program, inputs)
        t1 = time.process_time()
        calls = sum(isinstance(n.target, torch._ops.OpOverload) for n in joint.module.graph.nodes)
        simplify(joint)
        t2 = time.process_time()
        parts = default_partition(joint)
        rows.append((t1 - t0, t2 - t1, time.process_time() - t2))
    for name, (trace, clean, cut) in {
        "first": rows[0],
        "least of 8": tuple(map(min, zip(*rows, strict=True))),
    }.items():
        print(
            f"{name}: trace {trace:.3f} s ({calls} ATen operators, {trace / calls * 1e6:.1f} us each), "
            f"clean {clean:.3f} s, cut {cut:.3f} s"
        )
    print(parts.report)
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.runcall(trace_joint, program, inputs)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for budget in (1.0, 0.5, 0.0):
        seconds = []
        for _ in range(3):
            t0 = time.process_time()
            report = min_cut(budget)(joint).report
            seconds.append(time.process_time() - t0)
        print(f"min_cut({budget}) {min(seconds):.3f} s, {report}")
    small = Encoder(1, 64, 4, 100)
    aot_module(small, fw_compiler=lambda g, e: g)(torch.randint(0, 100, (2, 16)))  # its imports are not its speed
    seconds = []
    for _ in range(3):
        t0 = time.process_time()
        aot_module(model, fw_compiler=lambda g, e: g)(inputs[-1])
        seconds.append(time.process_time() - t0)
    t0 = time.process_time()
    model(inputs[-1])
    forward = time.process_time() - t0
    rest = min(seconds) - forward
    print(f"torch's aot_module: joint traced and cut: {rest:.3f} s (the {forward:.3f} s of a forward taken off)")


if __name__ == "__main__":
    main()
