"""Random numbers of a loop are made by blocks of vectors: bit for bit the reference's, wherever a row begins."""

from __future__ import annotations

import random

import pytest
import torch
from prim_graphs import build

from torchinductor import InductorOptions, compile_graph

NARROW = {"256 bits": "-mno-avx512f", "128 bits": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}
SHAPES = [(5, 11), (3, 1027), (9000,), (2, 5001), (4, 3, 130), (1, 7), (70, 64), (0, 5), ()]
USES = ("as they are", "rows", "columns", "computed again")


def hold(seed: int, options: InductorOptions) -> bool:
    choose = random.Random(seed)
    shape, use, stream = choose.choice(SHAPES), choose.choice(USES), choose.randrange(3)
    key = torch.tensor(choose.randrange(-(2**63), 2**63))
    last = len(shape) - 1

    def program(p, key):  # type: ignore[no-untyped-def]
        bits = p.random_bits(key, shape, stream)
        if last < 1 or use == "as they are":
            return bits, p.lt(p.random_uniform(key, shape, stream), 0.25)
        if use == "computed again":
            total = p.sum(bits, (last,), True)
            return p.sub(bits, p.expand(total, shape))
        return p.sum(bits, (last if use == "rows" else 0,))

    gm = build(program, key)
    compiled = compile_graph(gm, (key,), options)
    wanted = gm(key)
    for found, want in zip(compiled(key), wanted if isinstance(wanted, (tuple, list)) else (wanted,), strict=True):
        assert torch.equal(found, want), f"seed {seed}: {shape}, stream {stream}, {use}"
    return "philox_fill(t" in "".join(compiled.sources.values())


def test_random_numbers() -> None:
    assert any([hold(seed, InductorOptions()) for seed in range(24)])


@pytest.mark.parametrize("flags", NARROW)
def test_random_numbers_without_wide_vectors(flags: str) -> None:
    for seed in range(100, 105):
        hold(seed, InductorOptions(cxx=f"g++ {NARROW[flags]}"))
