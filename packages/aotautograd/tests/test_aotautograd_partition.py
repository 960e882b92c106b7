"""What the partitioners keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aotautograd import aot_function, default_partition, min_cut, partition, run_graph, trace_joint
from aotautograd.api import simplify
from aotautograd.lowering import Lowering, lower_joint
from primtorch.schemas import DONATED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x))
        return self.norm(x + nn.functional.dropout(self.down(hidden), 0.1)).square().sum()


def program() -> tuple[Callable[..., Any], list[torch.Tensor], Block]:
    torch.manual_seed(0)
    block = Block()
    names, values = zip(*block.named_parameters(), strict=True)

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        return [torch.func.functional_call(block, dict(zip(names, args, strict=False)), args[-1:])]

    return run, [*values, torch.randn(8, 16, 32)], block


def kept_by_eager(block: Block, inputs: list[torch.Tensor]) -> int:
    own = {t.untyped_storage().data_ptr() for t in inputs}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive = block(inputs[-1])
    assert alive.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("lowered", [False, True])
def test_min_cut_keeps_at_most_what_eager_keeps(lowered: bool, bfloat16: bool) -> None:
    run, inputs, block = program()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        joint = simplify(trace_joint(run, inputs))
        limit = kept_by_eager(block, inputs)
    if lowered:
        joint = simplify(lower_joint(joint, Lowering("prims")))
    parts = partition(joint, min_cut())
    assert parts.report.bytes <= limit
    assert f"{parts.report.bytes} bytes" in str(parts.report)
    names = [str(n.target) for n in parts.backward.graph.nodes if n.op == "call_function"]
    forward_matmuls = sum("mm" in str(n.target) for n in parts.forward.graph.nodes)
    backward_matmuls = sum("mm" in n for n in names)
    # x needs no gradient: three of four products.
    assert forward_matmuls == 2 and backward_matmuls == 3, "a matmul is computed again"
    assert not any("rand" in n or "bernoulli" in n or "dropout.default" in n for n in names), "a mask is drawn again"


def test_masks_are_kept_as_bool() -> None:
    run, inputs, _ = program()
    joint = simplify(lower_joint(simplify(trace_joint(run, inputs)), Lowering("prims")))
    parts = partition(joint, min_cut())
    kept = [n.meta["val"] for n in parts.backward.graph.nodes if n.op == "placeholder"]
    assert any(v.dtype == torch.bool for v in kept if hasattr(v, "dtype"))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_budget_bounds_what_is_kept(lowered: bool) -> None:
    run, inputs, _ = program()

    def kept(strategy: Any) -> Any:
        joint = simplify(trace_joint(run, inputs))
        return partition(simplify(lower_joint(joint, Lowering("prims"))) if lowered else joint, strategy).report

    whole = kept(min_cut())
    assert whole.bytes <= kept(default_partition).bytes
    budgets = [0.75, 0.5, 0.25, 0.1, 0.0]
    found = [kept(min_cut(budget)) for budget in budgets]
    draws = found[-1].bytes  # a budget of nothing keeps the dropout's mask alone
    assert draws <= 8 * 16 * 32 * 4
    for budget, report in zip(budgets, found, strict=True):
        assert report.bytes <= max(budget * whole.bytes, draws)
    assert [r.recomputed_nodes for r in found] == sorted(r.recomputed_nodes for r in found)
    with pytest.raises(ValueError, match="between 0 and 1"):
        min_cut(1.5)


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.3, 0.0])
@pytest.mark.parametrize("lowered", [None, "core_aten"])
def test_gradients_are_eagers_at_every_budget(budget: float, lowered: Any) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Tanh()).double()
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    names, values = zip(*block.named_parameters(), strict=True)

    def run(*args: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, dict(zip(names, args, strict=False)), args[-1:]).square().sum()

    compiled = aot_function(run, fw_compiler=run_graph, partitioner=min_cut(budget), decompositions=lowered)
    expected = torch.autograd.grad(run(*values, x), (*values, x))
    for a, b in zip(expected, torch.autograd.grad(compiled(*values, x), (*values, x)), strict=True):
        torch.testing.assert_close(b, a)


@torch.library.custom_op("partition_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@scaled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: gradient * 2)

# What a program of x and w gives, and how many of the tensors that it keeps only the compiled pair has ever seen.
KEPT: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], int]] = {
    "an activation": (lambda x, w: [torch.mm(x, w).sigmoid().square().sum()], 1),
    "a result": (lambda x, w: [torch.mm(x, w).sigmoid()], 0),
    "a view of a result": (lambda x, w: [(y := torch.mm(x, w).sigmoid()).t(), y.square().sum()], 0),
    "inputs": (lambda x, w: [torch.mm(x, w)], 0),
    "an input in another order": (lambda x, w: [torch.mm(x.t(), w.t()).sum()], 0),
    "what an operator of the program's own reads": (lambda x, w: [scaled(torch.mm(x, w).sigmoid()).square().sum()], 0),
}


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_what_only_the_forward_and_the_backward_have_seen_is_given_away(name: str, lowered: bool) -> None:
    program, count = KEPT[name]
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    joint = simplify(trace_joint(lambda x, w: program(x, w), inputs))
    if lowered:
        joint = simplify(lower_joint(joint, Lowering("prims")))
    parts = partition(joint, default_partition)
    given = [n.name for n in parts.backward.graph.find_nodes(op="placeholder") if n.meta.get(DONATED)]
    known = {n.name for n in parts.forward.graph.find_nodes(op="placeholder")}
    assert known.isdisjoint(given)
    assert len(given) == count, (given, parts.saved_placeholders)
