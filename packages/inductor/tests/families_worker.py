"""Runs layers of many sizes in Triton's interpreter with kernels of their own and with shared ones; prints a JSON line
a draw. Started with TRITON_INTERPRET=1.

python families_worker.py SEED DRAWS
"""

import json
import random
import sys
import traceback

import torch
import torch.nn.functional as F
from triton_interpreter import InterpreterBackend

import primtorch
import torchinductor
from torchinductor import InductorOptions


def normalised(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 / x.shape[0] + 0.1)


def turned(x: torch.Tensor) -> torch.Tensor:
    return (x.transpose(0, 1) + 1).contiguous()


def summed(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(0) / (x.numel() + 0.5)


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.sin()], 1)


def lines(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 1:] - x[:, :-1]) * x[:1, 1:]


LAYERS = (normalised, turned, summed, joined, lines)


def draw(chance: random.Random) -> dict[str, object]:
    step = chance.choice((1, 2, 4))
    shapes = [(chance.randint(17, 31) * 2, chance.randint(17, 31) * step) for _ in range(4)]  # tiles of one size
    layers = chance.sample(LAYERS, 2)
    inputs = [torch.randn(shape).to(chance.choice((torch.float32, torch.float32, torch.bfloat16))) for shape in shapes]

    def program(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for x in xs for layer in layers]

    graph = primtorch.lower(primtorch.trace(program, *inputs))
    alone, shared = (
        torchinductor.compile_graph(graph, inputs, InductorOptions(shared_kernels=share, fuse=False))
        for share in (False, True)
    )
    same = all(torch.equal(a, b) for a, b in zip(alone(*inputs), shared(*inputs), strict=True))
    counts = [len(compiled.program.launchers) for compiled in (alone, shared)]
    return {"shapes": shapes, "layers": [layer.__name__ for layer in layers], "same": same, "kernels": counts}


torchinductor.register_codegen("cpu", InterpreterBackend())
seed, draws = map(int, sys.argv[1:])
chance = random.Random(seed)
torch.manual_seed(seed)
for _ in range(draws):
    try:
        reply = draw(chance)
    except Exception:
        reply = {"failure": traceback.format_exc()[-2500:]}
    print(json.dumps(reply), flush=True)
