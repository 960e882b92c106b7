"""The planner against its definition, and split graphs against the whole."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchdistributed import BucketPlanError, ParameterInfo, parameter_infos, plan_buckets, split_at_buckets
from torchdistributed.buckets import tables_before_weights

MIB = 1 << 20
CPU = torch.device("cpu")
_KIND = torch.float32, CPU, True


def info(name: str, mib: float, dtype: torch.dtype = torch.float32) -> ParameterInfo:
    return ParameterInfo(name, int(mib * MIB), dtype, CPU)


def test_first_bucket_is_small_and_order_is_reverse_registration() -> None:
    plan = plan_buckets([info("a", 20), info("b", 10), info("c", 20), info("d", 0.5), info("e", 0.5)])
    assert [bucket.names for bucket in plan] == [("e", "d"), ("c", "b"), ("a",)]
    assert [bucket.index for bucket in plan] == [0, 1, 2]


def test_dtypes_never_share_a_bucket() -> None:
    plan = plan_buckets([info("a", 1), info("h", 1, torch.bfloat16), info("b", 1)])
    assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in plan)


@given(
    st.lists(st.floats(0.01, 60), min_size=1, max_size=40),
    st.floats(0.5, 50),
    st.floats(0.1, 10),
)
def test_plan_is_a_partition_and_limits_hold(sizes: list[float], cap: float, first: float) -> None:
    parameters = [info(f"p{i}", size) for i, size in enumerate(sizes)]
    plan = plan_buckets(parameters, cap, first)
    flat = [name for bucket in plan for name in bucket.names]
    assert flat == [p.name for p in reversed(parameters)]
    for bucket in plan:
        limit = (first if bucket.index == 0 else cap) * MIB
        without_last = sum(p.nbytes for p in bucket.parameters[:-1])
        assert without_last < limit
        if bucket is not plan[-1]:
            assert bucket.nbytes >= limit


def test_a_table_that_fills_a_bucket_comes_before_weights() -> None:
    table = ParameterInfo("table", 100 * MIB, torch.float32, CPU, looked_up=True)
    small = ParameterInfo("small", 3 * MIB, torch.float32, CPU, looked_up=True)
    layers = [info(f"w{i}", 20) for i in range(6)]
    names = lambda parameters: "".join(p.name[0] if p.looked_up else p.name[1] for p in parameters)
    assert names(tables_before_weights([table, small, *layers])) == "s012t345"  # 60 of 50 MiB
    assert names(tables_before_weights([table, small, *layers], 101)) == "ts012345"
    assert names(tables_before_weights([table, small, *layers[:1]])) == "s0t"
    assert names(tables_before_weights([*layers, table])) == "012345t"
    assert (
        names(tables_before_weights([small, table, *layers, ParameterInfo("other", 40 * MIB, *_KIND)])) == "s012t345o"
    )
    within = {"table", "small", "w0", "w1", "w3"}
    assert names(tables_before_weights([table, small, *layers], within=within)) == "s01t2345"
    assert names(tables_before_weights([table, small, *layers], within=within - {"table"})) == "ts012345"


def test_tables_are_told_from_weights() -> None:
    net = nn.ModuleDict({"words": nn.Embedding(5, 3), "rows": nn.Embedding(5, 3, sparse=True), "out": nn.Linear(3, 5)})
    net["out"].weight = net["words"].weight
    assert [(p.name, p.looked_up) for p in parameter_infos(net)] == [
        ("words.weight", True), ("rows.weight", False), ("out.bias", False),
    ]  # fmt: skip


@pytest.mark.parametrize("limits", [(0, 1), (25, -1)])
def test_limits_must_be_positive(limits: tuple[float, float]) -> None:
    with pytest.raises(BucketPlanError, match="positive"):
        plan_buckets([info("a", 1)], *limits)


def test_a_parameter_listed_twice_is_refused() -> None:
    with pytest.raises(BucketPlanError, match="listed twice"):
        plan_buckets([info("a", 1), info("a", 1)])


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return x


def lifted(net: nn.Module) -> tuple[torch.fx.GraphModule, dict[str, str]]:
    """The module's graph with parameters as placeholders, as capture gives it."""
    graph = torch.fx.Graph()
    names = dict(net.named_parameters())
    nodes = {name: graph.placeholder("p_" + name.replace(".", "_")) for name in names}
    x = graph.placeholder("x")
    for i in range(len(net.layers)):
        x = graph.call_function(torch.nn.functional.linear, (x, nodes[f"layers.{i}.weight"], nodes[f"layers.{i}.bias"]))
        x = graph.call_function(torch.mul, (graph.call_function(torch.relu, (x,)), nodes["scale"]))
    graph.output((x,))
    return torch.fx.GraphModule({}, graph), {name: node.name for name, node in nodes.items()}


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("cap_bytes", [100, 300, 700, 10_000])
def test_split_computes_the_same_and_pieces_follow_buckets(depth: int, cap_bytes: int) -> None:
    torch.manual_seed(depth)
    net = Net(depth)
    gm, placeholders = lifted(net)
    plan = plan_buckets(parameter_infos(net), cap_bytes / MIB, 100 / MIB)
    split = split_at_buckets(gm, plan, placeholders)
    inputs = [*(p for _, p in net.named_parameters()), torch.randn(3, 8)]
    (expected,) = gm(*inputs)
    (found,) = split(*inputs)
    assert torch.equal(expected, found)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    found.sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, net.parameters(), strict=True))
    pieces = [node for node in split.graph.nodes if node.op == "call_module"]
    assert len(pieces) <= len(plan)
    if cap_bytes == 300 and depth == 7:
        assert len(pieces) > 3


def test_a_graph_that_differentiates_stays_whole() -> None:
    net = Net(3)
    gm, placeholders = lifted(net)
    (output,) = gm.graph.find_nodes(op="output")
    weight = next(node for node in gm.graph.nodes if node.op == "placeholder")
    with gm.graph.inserting_before(output):
        total = gm.graph.call_method("sum", (output.args[0][0],))
        slope = gm.graph.call_function(torch.autograd.grad, (total, weight))
    output.args = ((slope,),)
    assert split_at_buckets(gm, plan_buckets(parameter_infos(net), 300 / MIB, 100 / MIB), placeholders) is gm


def test_an_unknown_placeholder_is_named() -> None:
    net = Net(2)
    gm, placeholders = lifted(net)
    with pytest.raises(BucketPlanError, match="nowhere"):
        split_at_buckets(gm, plan_buckets(parameter_infos(net)), {**placeholders, "scale": "nowhere"})


def test_import_is_light() -> None:
    code = "import sys, torchdistributed; print('torch._dynamo' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
