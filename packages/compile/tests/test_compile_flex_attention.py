"""flex_attention is one graph, with eager's values and gradients in float64; on a GPU one kernel each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flex_programs import CASES, F64, SMALL, Case, causal
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchcompile
from primtorch.ledger import REFUSED

TESTS = Path(__file__).parent
REST = 1e-6  # what either error may be where the other has none


def same(found: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# The back ends that compute all scores by one function are asked for three.
OTHERS = [(name, backend) for name in ("causal", "documents", "bias") for backend in ("eager", "aot_eager")]


@pytest.mark.parametrize(("name", "backend"), [*((name, "inductor") for name in CASES), *OTHERS])
def test_values_and_gradients(name: str, backend: str) -> None:
    case = CASES[name]
    compiled = torchcompile.compile(case.program(), fullgraph=True, backend=backend)
    same(case.run(compiled, F64), case.run(case.judged, F64))
    assert not [event for event in torchcompile.report().events if event.effect in REFUSED]


FEW = ("grouped", "documents", "bias")


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(CASES), marks=pytest.mark.slow)])
def test_one_kernel_each_way_in_the_interpreter(names: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    inductor = TESTS.parents[1] / "inductor" / "tests"
    path = os.pathsep.join((str(inductor), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "flex_worker.py", *names]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=True, timeout=300)
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [reply["case"] for reply in replies] == list(names)
    for reply in replies:
        assert "failure" not in reply, reply["failure"]
        assert reply["made"] == ["forward", "keys", "queries"], reply
        assert all(a <= 2 * b + REST for a, b in zip(reply["error"], reply["eager"], strict=True)), reply


class Windowed(torch.nn.Module):
    """A block mask as an attribute."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 48, dtype=F64)
        self.blocks = create_block_mask(causal, None, None, length, length, "cpu", 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=self.blocks).transpose(1, 2).flatten(2)


def test_a_block_mask_is_guarded_where_it_lies() -> None:
    module = Windowed(70)
    compiled = torchcompile.compile(module, fullgraph=True)
    judge = Case(SMALL, mask=causal)

    def wanted(x: torch.Tensor, mask: Any) -> torch.Tensor:
        q, k, v = module.linear(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        found: torch.Tensor = Case(SMALL, mask=mask).judged(q, k, v)
        return found.transpose(1, 2).flatten(2)

    assert judge.mask is causal
    for length in (70, 90):
        x = torch.randn(1, length, 16, dtype=F64)
        module.blocks = create_block_mask(causal, None, None, length, length, "cpu", 32)
        same([compiled(x)], [wanted(x, causal)])
    all_keys = lambda b, h, i, j: (i >= j) | (j < 30)
    module.blocks = create_block_mask(all_keys, None, None, 90, 90, "cpu", 32)
    same([compiled(x)], [wanted(x, all_keys)])


@pytest.mark.expected_eager(...)
def test_a_wrong_block_mask_is_eagers_to_refuse() -> None:
    blocks = create_block_mask(causal, None, None, 64, 64, "cpu", 32)
    compiled = torchcompile.compile(lambda q: flex_attention(q, q, q, block_mask=blocks))
    with pytest.raises(ValueError, match="block_mask was created for"):
        compiled(torch.randn(1, 2, 70, 16))


def test_lengths_may_vary() -> None:
    compiled = torchcompile.compile(
        lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs()), fullgraph=True, dynamic=True
    )
    for length in (20, 33, 70):
        q = torch.randn(1, 2, length, 16, dtype=F64)
        judge = Case(SMALL, lambda s, b, h, i, j: s - (i - j).abs())
        same([compiled(q)], [judge.judged(q, q, q)])
    assert torchcompile.report().captured == 1
