"""Which kernels attention takes is what the program says where it calls it, and stays what the program leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchcompile
import torchdynamo
from aotautograd import aot_module
from primtorch.ambient import ATTENTION

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Heads = tuple[torch.Tensor, ...]


def within_blocks(*heads: torch.Tensor) -> Any:
    first = F.scaled_dot_product_attention(*heads)
    with sdpa_kernel(SDPBackend.MATH):
        second = F.scaled_dot_product_attention(*heads)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return first, second, F.scaled_dot_product_attention(*heads)


def from_here_on(*heads: torch.Tensor) -> Any:
    torch.backends.cuda.enable_flash_sdp(False)
    return F.scaled_dot_product_attention(*heads)


def across_a_break(*heads: torch.Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        first = F.scaled_dot_product_attention(*heads)
        torchdynamo.graph_break()
        return first, F.scaled_dot_product_attention(*heads)


def before_a_raise(*heads: torch.Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.linalg.cholesky(-heads[0].mT @ heads[0]).sum() + F.scaled_dot_product_attention(*heads)


# program -> (calls of the fused kernel when traced, what is told)
PROGRAMS: dict[Callable[..., Any], tuple[int, set[str]]] = {
    within_blocks: (2, set()),
    from_here_on: (0, set()),
    across_a_break: (0, {"graph_break", "generator", "library_code"}),
    before_a_raise: (0, {"graph_raised"}),
}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[Callable[[], None]]:
    before = [state.read() for state in ATTENTION]

    def put_back() -> None:
        for state, value in zip(ATTENTION, before, strict=True):
            assert state.write is not None
            state.write(value)

    yield put_back
    put_back()


def heads() -> Heads:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))


def outcome(program: Callable[..., Any], put_back: Callable[[], None]) -> Any:
    """Values and gradients, or what is raised, and what is chosen afterwards."""
    put_back()
    given = heads()
    try:
        result = program(*given)
        results = result if isinstance(result, tuple) else (result,)
        after = [state.read() for state in ATTENTION]
        return results, torch.autograd.grad(sum(r.sin().sum() for r in results), given), after
    except RuntimeError as error:
        return str(error).partition(":")[0], None, [state.read() for state in ATTENTION]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_eager(program: Callable[..., Any], backend: str, kernels: Callable[[], None]) -> None:
    _, told = PROGRAMS[program]
    wanted = outcome(program, kernels)
    compiled = torchcompile.compile(program, backend=backend)
    for _ in range(2):
        found = outcome(compiled, kernels)
        if isinstance(wanted[0], str):
            assert found[0] == wanted[0]
        else:
            torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-9, atol=1e-12)
        assert found[2] == wanted[2]
    report = torchcompile.report()
    assert report.captured == 1 or "graph_break" in told
    assert {event.kind.id for event in report.events} == told


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_kernels_chosen_are_those_traced(program: Callable[..., Any], kernels: Callable[[], None]) -> None:
    calls = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        calls.extend(node.target for node in graph.graph.nodes if node.target is FLASH)
        return graph.forward

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        return aot_module(graph, inputs, fw_compiler=compiler)

    outcome(torchcompile.compile(program, backend=backend), kernels)
    assert len(calls) == PROGRAMS[program][0]
