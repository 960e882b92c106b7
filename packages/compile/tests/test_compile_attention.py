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


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float | None) -> torch.Tensor:
    """By plain operators."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row without any score is zero
    return weights @ v


SEEN = torch.ones(6, 8, dtype=torch.bool).tril(2)
DRAWN = torch.linspace(-2, 2, 2 * 4 * 6 * 8, dtype=torch.float64)
# The mask, and what is given beside it.
MASKS: dict[str, tuple[torch.Tensor | None, dict[str, Any]]] = {
    "none": (None, {}),
    "is_causal": (None, {"is_causal": True}),
    "a scale": (None, {"scale": 0.3}),
    "bool": (SEEN, {}),
    "bool, of batches": (torch.arange(8) < torch.tensor([5, 8])[:, None, None, None], {}),
    "bool, an empty row": (SEEN & (torch.arange(6) != 3)[:, None], {}),
    "numbers": (DRAWN[:48].view(6, 8), {}),
    "numbers, of heads": (DRAWN[: 4 * 48].view(4, 6, 8), {"scale": 0.5}),
    "numbers, of all": (DRAWN.view(2, 4, 6, 8), {}),
    "numbers, by keys": (DRAWN[:8].view(1, 1, 1, 8), {}),
}


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_with_heads_that_share_keys(name: str, heads: int) -> None:
    mask, more = MASKS[name]
    learnt = mask is not None and mask.is_floating_point()
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((2, 4, 6, 5), (2, heads, 8, 5), (2, heads, 8, 5))]
    inputs = [t.requires_grad_() for t in inputs] + (
        [mask.clone().requires_grad_()] if learnt and mask is not None else []
    )
    known = torch.ones(6, 8, dtype=torch.bool).tril() if "is_causal" in more else mask

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        chosen = given[0] if given else mask
        return F.scaled_dot_product_attention(q, k, v, chosen, enable_gqa=heads < 4, **more)

    found = torchcompile.compile(program, fullgraph=True)(*inputs)
    wanted = plain(*inputs[:3], inputs[3] if learnt else known, more.get("scale"))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64)
    of_plain = torch.autograd.grad((wanted * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), inputs), of_plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_heads_that_share_keys_are_attended_to_as_they_lie(training: bool, dropout: float) -> None:
    """Keys and values expanded over the heads of their queries, as models with few key heads have them."""

    def program(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shared = (t[:, :, None].expand(-1, -1, query.shape[1], -1, -1).flatten(1, 2) for t in (key, value))
        return F.scaled_dot_product_attention(query, *shared, dropout_p=dropout)

    compiled = torchcompile.compile(program, options={"strict": True, "eager_random": True})
    for length in (4, 6, 7):
        shapes = ((2, 4, length, 8), (2, 1, length, 8), (2, 1, length, 8))
        heads = [torch.randn(shape, dtype=torch.float64, requires_grad=training) for shape in shapes]
        results = []
        for run in (program, compiled):
            torch.manual_seed(length)
            results.append(run(*heads))
        torch.testing.assert_close(*results)
        if training:
            torch.testing.assert_close(*[torch.autograd.grad(result.sum(), heads) for result in results])


def _masks(length: int) -> dict[str, Any]:
    padding = torch.arange(length)[None] >= torch.tensor([length, length - 2])[:, None]
    causal = torch.nn.Transformer.generate_square_subsequent_mask(length).isinf()
    return {
        "none": {},
        "padding": {"padding": padding},
        "causal": {"mask": causal},
        "both": {"padding": padding, "mask": causal},
    }


@pytest.mark.parametrize("masks", _masks(3))
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_a_transformer_in_inference_are_in_the_graph(norm_first: bool, masks: str) -> None:
    """Without gradients torch's own layers call one operator each, which other compilers leave outside of the graph."""
    torch.manual_seed(0)
    kind = {"dtype": torch.float64, "batch_first": True}
    attention = torch.nn.MultiheadAttention(8, 2, **kind).eval()
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=norm_first, **kind).eval()

    def program(x: torch.Tensor, padding: Any = None, mask: Any = None) -> Heads:
        out, weights = attention(x, x, x, key_padding_mask=padding, attn_mask=mask, average_attn_weights=norm_first)
        return layer(out + x, src_mask=mask, src_key_padding_mask=padding), weights

    compiled = torchcompile.compile(program, fullgraph=True, options={"strict": True})
    for length in (5, 7, 6):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        given = _masks(length)[masks]
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, **given), program(x, **given))
