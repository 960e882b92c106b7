"""Products of groups of matrices, whose ends a tensor holds: one graph, with eager's results, layouts and errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchcompile

ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def forget() -> None:
    torchcompile.reset()


def drawn(*shape: int, turned: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix, or a batch of them; if turned, by columns."""
    *lead, rows, columns = shape
    values = torch.randn(*lead, columns, rows).mT if turned else torch.randn(*shape)
    return values.to(dtype).requires_grad_()


OPERANDS: dict[str, Any] = {
    "rows by groups": lambda: (drawn(7, 8), drawn(3, 8, 16, turned=True), ENDS),
    "rows by groups, by rows": lambda: (drawn(7, 8), drawn(3, 8, 16), ENDS),
    "rows by groups, of bfloat16": lambda: (
        drawn(7, 8, dtype=torch.bfloat16), drawn(3, 8, 16, dtype=torch.bfloat16), ENDS
    ),
    "inner sizes by groups": lambda: (drawn(4, 8, turned=True), drawn(8, 16), ENDS + 1),
    "columns by groups": lambda: (drawn(3, 4, 8), drawn(8, 16, turned=True), ENDS + 9),
    "a batch": lambda: (drawn(3, 4, 8), drawn(3, 8, 16, turned=True), None),
}  # fmt: skip

PROGRAMS: dict[str, Any] = {
    "alone": lambda a, b, ends: F.grouped_mm(a, b, offs=ends),
    "of what is computed": lambda a, b, ends: F.grouped_mm(a.sin(), b * 2, offs=ends),
    "of what is turned and back": lambda a, b, ends: F.grouped_mm(a.mT.cos().mT, b.mT.exp().mT, offs=ends).relu(),
    "of columns that are left out": lambda a, b, ends: F.grouped_mm(
        torch.cat([a, a], -1)[..., : a.shape[-1]], torch.cat([b, b], -1)[..., : b.shape[-1]], offs=ends
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("operands", OPERANDS)
def test_products_of_groups(operands: str, program: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    a, b, ends = OPERANDS[operands]()

    def both(function: Any) -> Any:
        result = function(a, b, ends)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
        return result, result.stride(), torch.autograd.grad((result * weights).sum(), (a, b))

    compiled = torchcompile.compile(PROGRAMS[program], dynamic=dynamic, fullgraph=True)
    torch.testing.assert_close(both(compiled), both(PROGRAMS[program]))


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_random_sizes_against_float64(seed: int) -> None:
    """Of all widths that eager takes, in one graph for all ends; the reference multiplies group by group."""
    print("seed", seed)
    torch.manual_seed(seed)
    choose = random.Random(seed)
    groups, inner, columns = choose.randint(1, 5), 4 * choose.randint(1, 4), 4 * choose.randint(1, 4)
    compiled = torchcompile.compile(lambda a, b, ends: F.grouped_mm(a, b.mT, offs=ends).tanh(), fullgraph=True)
    for _ in range(3):
        ends = sorted(choose.randint(0, 20) for _ in range(groups))
        a, b = drawn(ends[-1], inner), drawn(groups, columns, inner)
        result = compiled(a, b, torch.tensor(ends, dtype=torch.int32))
        found = torch.autograd.grad(result.square().sum(), (a, b))
        exact = (a.detach().double().requires_grad_(), b.detach().double().requires_grad_())
        parts = [
            exact[0][start:end] @ exact[1][i].mT
            for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        ]
        wanted = torch.cat(parts).tanh()
        gradients = torch.autograd.grad(wanted.square().sum(), exact)
        for one, other in zip((result, *found), (wanted, *gradients), strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_no_rows_at_all() -> None:
    a, b, ends = drawn(0, 8), drawn(3, 8, 16), torch.zeros(3, dtype=torch.int32)
    result = torchcompile.compile(PROGRAMS["of what is computed"], fullgraph=True)(a, b, ends)
    assert result.shape == (0, 16)
    for found, operand in zip(torch.autograd.grad(result.sum(0).sin().sum(), (a, b)), (a, b), strict=True):
        torch.testing.assert_close(found, torch.zeros_like(operand))


def test_a_width_of_one_keeps_the_stride_that_the_product_looks_at() -> None:
    a, b = torch.randn(7, 8), torch.randn(3, 1, 8)

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a.sin(), (b * 2).mT, offs=ENDS)

    torch.testing.assert_close(torchcompile.compile(program, fullgraph=True)(a, b), program(a, b))


REFUSED: dict[str, Any] = {
    "no ends": lambda a, b: F.grouped_mm(a, b),
    "ends of int64": lambda a, b: F.grouped_mm(a, b, offs=ENDS.long()),
    "an end too few": lambda a, b: F.grouped_mm(a, b, offs=ENDS[1:]),
    "other inner sizes": lambda a, b: F.grouped_mm(a, b[:, :4], offs=ENDS),
    "a bias": lambda a, b: F.grouped_mm(a, b, offs=ENDS, bias=b[0, 0]),
    "another dtype": lambda a, b: F.grouped_mm(a, b, offs=ENDS, out_dtype=torch.bfloat16),
    "a vector": lambda a, b: F.grouped_mm(a[0], b, offs=ENDS),
    "float64": lambda a, b: F.grouped_mm(a.double(), b.double(), offs=ENDS),
    "rows that are not aligned": lambda a, b: F.grouped_mm(a[:, :6].contiguous(), b[:, :6], offs=ENDS),
    "columns with holes": lambda a, b: F.grouped_mm(a[:, ::2], b[:, ::2], offs=ENDS),
}


@pytest.mark.expected_eager("program_raised", "operator_without_meta")
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name: str) -> None:
    torch.manual_seed(0)

    def error_of(function: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            function(torch.randn(7, 8), torch.randn(3, 8, 16))
        return str(caught.value)

    assert error_of(torchcompile.compile(REFUSED[name])) == error_of(REFUSED[name])


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


SCALED: dict[str, Any] = {
    "by one scale": lambda a, b, one: F.scaled_mm(a, b, one, F.ScalingType.TensorWise, one, F.ScalingType.TensorWise),
    "by rows, in float32": lambda a, b, one: F.scaled_mm(
        a, b, one.expand(16, 1).contiguous(), F.ScalingType.RowWise, one.expand(1, 48).contiguous(),
        F.ScalingType.RowWise, output_dtype=torch.float32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_scaled_products_by_recipes(name: str) -> None:
    torch.manual_seed(0)
    operands = (_bytes(16, 32), _bytes(48, 32).t(), torch.full((1,), 0.5))
    try:
        wanted = SCALED[name](*operands)
    except NotImplementedError:
        pytest.skip("this torch has no such kernel for the CPU")
    torch.testing.assert_close(torchcompile.compile(SCALED[name], fullgraph=True)(*operands), wanted)


_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_train_as_one_graph(name: str, dtype: torch.dtype, torchvision: None) -> None:
    """In float64 by an operator of the library's own, whose derivative reads where groups end; eager multiplies weights
    that are gathered for each token. In bfloat16 by grouped products."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **MIXTURES[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    tokens = torch.randint(0, 64, (2, 16))

    def step(run: Any, experts: str) -> list[torch.Tensor]:
        model.set_experts_implementation(experts)
        model.zero_grad()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    compiled = torchcompile.compile(model, fullgraph=True)
    wanted = step(model, "batched_mm" if dtype is torch.float64 else "grouped_mm")
    found = step(compiled, "grouped_mm")
    tolerance = {} if dtype is torch.float64 else {"atol": 3e-2, "rtol": 1e-1}
    torch.testing.assert_close(found, wanted, **tolerance)
