"""flex_attention is one graph, with eager's values and gradients in float64; on a GPU one kernel each way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flex_programs import CASES, F64, SMALL, Case, causal
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask, flex_attention

import torchcompile
import torchinductor
from primtorch.ledger import REFUSED
from primtorch.testing import assert_as_accurate
from torchinductor import InductorOptions, TritonBackend
from torchinductor.codegen.triton.compiler import TritonCompiler
from torchinductor.ir import Attention
from torchinductor.source import planned_operations

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


def test_every_kernel_compiles_without_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_90, with bfloat16 and a head of 64: what is in flight stays in registers."""
    triton = pytest.importorskip("triton")
    graphs: list[torch.fx.GraphModule] = []
    compile_graph = torchinductor.compile_graph
    keep = lambda gm, *args, **more: (graphs.append(gm), compile_graph(gm, *args, **more))[1]
    monkeypatch.setattr(torchinductor, "compile_graph", keep)
    case = Case((1, 1, 256, 1, 256, 64, 64), mask=causal, dtype=torch.bfloat16, block=128)
    case.run(torchcompile.compile(case.program(), fullgraph=True))
    backend, compiler = TritonBackend(90), TritonCompiler(90, tmp_path, workers=2)
    planned = [op for gm in graphs for op in planned_operations(gm, "cuda") if isinstance(op, Attention)]
    sources = [backend.generate_template(template, InductorOptions()).meta for template in planned]
    binaries = compiler.compile(sources)
    compiler.close()
    assert [template.direction for template in planned] == ["forward", "queries", "keys"]
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for binary in binaries:
        assert "wgmma.mma_async" in (tmp_path / f"{binary.key}.ptx").read_text()
        if reader.exists():
            command = [str(reader), "--dump-resource-usage", str(tmp_path / f"{binary.key}.cubin")]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert int(re.findall(r"STACK:(\d+)", told)[-1]) <= 16, told


@pytest.mark.expected_eager("graph_not_compiled")
def test_a_function_of_more_than_numbers_is_told() -> None:
    """It takes rows of a table, which no kernel around a score holds: the graph runs as it was captured."""
    table = torch.randn(70, 8, dtype=F64)
    program = lambda s, b, h, i, j, table: s + (table[i] * table[j]).sum(-1)
    q = torch.randn(1, 2, 70, 16, dtype=F64)
    found = torchcompile.compile(lambda q, t: flex_attention(q, q, q, lambda *a: program(*a, t)))(q, table)
    case = Case(SMALL, lambda s, b, h, i, j, table: s + table @ table.T)
    same([found], [case.judged(q, q, q, table)])
    assert {event.kind.id for event in torchcompile.report().events} == {"graph_not_compiled"}


def test_what_is_given_beside_the_result() -> None:
    q = torch.randn(1, 2, 40, 16, dtype=F64)
    compiled = torchcompile.compile(
        lambda q: flex_attention(q, q, q, return_aux=AuxRequest(lse=True)), fullgraph=True, backend="aot_eager"
    )
    found, aux = compiled(q)
    assert isinstance(aux, AuxOutput) and aux.max_scores is None
    assert aux.lse is not None
    same([found, aux.lse], list(Case(SMALL, with_lse=True).judged(q, q, q)))


def test_autocast_casts_the_operands() -> None:
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    compiled = torchcompile.compile(lambda q: flex_attention(q, q, q), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(q)
    (gradient,) = torch.autograd.grad(found.sum(), q)
    assert found.dtype is torch.bfloat16 and gradient.dtype is torch.float32

    def judged(operand: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = Case(SMALL).judged(operand, operand, operand)
        return out.detach(), torch.autograd.grad(out.sum(), by)[0].to(operand.dtype)

    # The gradient is a sum of three by operands of 8 bits, of each of which eager rounds its own.
    rounded, cast = q.detach().bfloat16().double().requires_grad_(), q.bfloat16()
    assert_as_accurate((found.detach(), gradient.bfloat16()), judged(cast, q), judged(rounded, rounded))


def test_lengths_of_block_masks_may_vary() -> None:
    compiled = torchcompile.compile(lambda q, blocks: flex_attention(q, q, q, block_mask=blocks), fullgraph=True)
    for length in (64, 96, 128, 160, 192):
        q = torch.randn(1, 2, length, 16, dtype=F64)
        blocks = create_block_mask(causal, None, None, length, length, "cpu", 32)
        same([compiled(q, blocks)], [Case(SMALL, mask=causal).judged(q, q, q)])
    assert torchcompile.report().captured <= 3


def test_lengths_may_vary() -> None:
    compiled = torchcompile.compile(
        lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs()), fullgraph=True, dynamic=True
    )
    for length in (20, 33, 70):
        q = torch.randn(1, 2, length, 16, dtype=F64)
        judge = Case(SMALL, lambda s, b, h, i, j: s - (i - j).abs())
        same([compiled(q)], [judge.judged(q, q, q)])
    assert torchcompile.report().captured == 1
