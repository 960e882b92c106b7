"""Processes over gloo: what talks to other processes happens at every call, as in eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import collective_programs
import distributed_programs
import failing_ranks
import interrupted_shards
import mesh_programs
import parallel_programs
import pytest
import replica_programs
import sharded_programs
import torch
import torch.distributed as dist
import work_programs
from processes import AVAILABLE, Processes
from torch.nn.parallel import DistributedDataParallel

import torchcompile
import torchinductor
from torchdistributed import reducer_plan

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs gloo")


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.mark.parametrize("name", replica_programs.CASES)
def test_replicas(pair: Processes, name: str) -> None:
    backend = "inductor" if name in replica_programs.INDUCTOR else "aot_eager"
    for events in pair.run(replica_programs.trains_as_eager, name, backend):
        assert events["outer"]["distributed"]  # the forward of DistributedDataParallel
        assert name == "interrupted" or "distributed" not in events["inner"]  # what evaluates calls the replica


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("wrapping", ["inner", "outer", "before"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_buckets_are_reduced_while_the_backward_runs(
    pair: Processes, backend: str, wrapping: str, find_unused: bool
) -> None:
    for rounds, buckets in pair.run(distributed_programs.in_buckets, wrapping, backend, find_unused):
        overlapped = [f"{what} {number}" for number in range(4) for what in ("graph", "reduce")]
        first = (
            overlapped if find_unused else [*overlapped[::2], "reduce 0"]
        )  # one bucket, before the reducer made them
        assert rounds == [first, *[overlapped] * 4]
        assert buckets == [(number, False) for number in range(4)]


def test_what_was_compiled_before_there_were_processes_comes_in_stages() -> None:
    torchcompile.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    compiled = torchcompile.compile(model, backend="aot_eager")
    compiled(torch.ones(2, 8))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replicated = DistributedDataParallel(compiled, bucket_cap_mb=2.5e-4)
        for _ in range(3):
            replicated(torch.ones(2, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    stages = torchcompile.report().stages
    assert [(stage.bucket, stage.planned) for stage in stages] == [(0, False), (1, False)]


@pytest.mark.parametrize("blocks", [False, True])
def test_a_backward_is_compiled_once(blocks: bool) -> None:
    """The reducer makes its buckets of the order in which gradients come: it finds those that were compiled for."""
    torchcompile.reset()
    sizes = (8, 3, 16, 2, 8, 12, 4)
    pairs = list(itertools.pairwise(sizes))
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.LayerNorm(b)) for a, b in pairs))
    if blocks:
        torchcompile.compile_in_place(*model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = DistributedDataParallel(model if blocks else torchcompile.compile(model), bucket_cap_mb=4e-4)
        planned = reducer_plan(run)
        for _ in range(4):
            run(torch.ones(2, 8)).sum().backward()
        made = reducer_plan(run)
    finally:
        dist.destroy_process_group()
    assert (planned.final, made.final) == (False, True) and made.buckets == planned.buckets
    report = torchcompile.report()
    backwards = [graph for graph in report.graphs if graph.kind == "backward"]
    assert len(report.graphs) - len(backwards) == (len(pairs) if blocks else 1)
    if not blocks:
        assert len(backwards) == len(planned.buckets) == len(report.stages) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_table_is_sent_before_weights_that_can_wait(tied: bool) -> None:
    """The gradient of a table is known when the whole backward has run but for the products of some weights."""
    torchcompile.reset()
    model = replica_programs.Tokens(tied, layers=8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = DistributedDataParallel(torchcompile.compile(model), bucket_cap_mb=300 / (1 << 20))
        for _ in range(4):
            run(torch.rand(3, 6)).sum().backward()
        made = reducer_plan(run)
    finally:
        dist.destroy_process_group()
    bucket_of = {name: bucket.index for bucket in made.buckets for name in bucket.names}
    # 1,280 bytes in the table, and 352 in a layer: those of half as many bytes come behind it.
    assert bucket_of["layers.2.1.weight"] <= bucket_of["words.weight"] < bucket_of["layers.1.1.weight"]
    report = torchcompile.report()
    backwards = [graph for graph in report.graphs if graph.kind == "backward"]
    assert made.final and len(backwards) == len(made.buckets) == len(report.stages)  # as foreseen, and compiled once


def test_a_table_stays_where_another_graph_has_the_weights() -> None:
    torchcompile.reset()
    model = replica_programs.Tokens(layers=8)
    torchcompile.compile_in_place(model.words, *model.layers)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = DistributedDataParallel(model, bucket_cap_mb=300 / (1 << 20))
        for _ in range(4):
            run(torch.rand(3, 6)).sum().backward()
        made = reducer_plan(run)
    finally:
        dist.destroy_process_group()
    assert made.final and made.buckets[-1].names[-1] == "words.weight"


class _Residual(torch.nn.Module):
    """A layer of many that are built alike; one of them is not."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.norm, self.layer, self.power = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x)).tanh().pow(self.power)


@pytest.mark.parametrize("dynamic", [False, True])
def test_stages_that_are_equal_but_for_names_are_compiled_once(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    made: list[str] = []
    original = torchinductor.compile_graph

    def counted(*args: Any) -> Any:
        made.append(args[-1].title.split()[-1])
        return original(*args)

    monkeypatch.setattr(torchinductor, "compile_graph", counted)
    torchcompile.reset()
    model = torch.nn.Sequential(*(_Residual(3 if number == 5 else 2) for number in range(10))).double()
    twin = copy.deepcopy(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Eight by eight weights and three vectors: a bucket holds a layer.
        run = DistributedDataParallel(torchcompile.compile(model, dynamic=dynamic), bucket_cap_mb=6.6e-4)
        expected = DistributedDataParallel(twin, bucket_cap_mb=6.6e-4)
        for step in range(4):
            torch.manual_seed(step)
            x = torch.randn(3 + step if dynamic else 3, 8, dtype=torch.float64, requires_grad=True)
            inputs = [x, x.detach().clone().requires_grad_()]
            for each, given in zip((run, expected), inputs, strict=True):
                each.zero_grad()
                each(given).square().sum().backward()
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
            for found, parameter in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(found.grad, parameter.grad)
    finally:
        dist.destroy_process_group()
    stages = torchcompile.report().stages
    assert len(stages) == 10
    assert dynamic or made.count("backward") < 7, made  # first, last, the odd one and its neighbours, and all others


@pytest.mark.slow
def test_four_processes() -> None:
    with Processes(4) as processes:
        for name in ("small_buckets", "unused_small", "join_unused"):
            processes.run(replica_programs.trains_as_eager, name, "inductor")
        for name in ("resharded_mixed", "flat_mixed_accumulated", "in_two_ways"):
            assert "distributed" in processes.run(sharded_programs.trains_as_eager, name, "aot_eager")[0]
        for name in ("by_tensor", "by_sequence"):
            processes.run(parallel_programs.trains_as_eager, name, "inductor")
        processes.run(parallel_programs.uneven, "aot_eager")
        for name, wrap in itertools.product(parallel_programs.MODELS, ("whole", "blocks")):
            for counts in processes.run(mesh_programs.in_two_ways, name, wrap, "inductor"):
                assert counts.keys() <= {"captured", "distributed", "library_code", "recompiled", "traced_late"}


@pytest.mark.parametrize("name", sharded_programs.CASES)
def test_shards(pair: Processes, name: str) -> None:
    backend = "inductor" if name in ("whole", "blocks_first", "flat") else "aot_eager"
    for events in pair.run(sharded_programs.trains_as_eager, name, backend):
        # The hooks of the units, which gather parameters; there they are around it. Parallel modules need no break.
        within = name != "flat_blocks" and "parallel" not in name
        assert ("distributed" in events) == within


_QUICK = ("plain", "reset")


@pytest.mark.parametrize("failure", interrupted_shards.FAILURES)
@pytest.mark.parametrize(
    "setting", [s if s in _QUICK else pytest.param(s, marks=pytest.mark.slow) for s in interrupted_shards.SETTINGS]
)
def test_shards_whose_steps_are_interrupted(pair: Processes, setting: str, failure: str) -> None:
    backend = "inductor" if setting == "plain" else "aot_eager"
    for wrap, place in (
        (("whole", 2), ("blocks", 0)) if setting in _QUICK else itertools.product(("whole", "blocks"), (0, 2))
    ):
        for raised in pair.run(interrupted_shards.as_eager, wrap, setting, failure, place, backend):
            assert len(raised) >= 2


@pytest.mark.parametrize("sharded", [False, True])
def test_blocks_that_are_alike_share_a_graph(pair: Processes, sharded: bool) -> None:
    for captured, stages in pair.run(distributed_programs.alike, sharded):
        assert captured == 2  # the input of the first has no gradient
        buckets = [
            (f"{block}.{layer}.weight", f"{block}.{layer}.bias") for block in range(6) for layer in ("first", "second")
        ]
        assert sorted(map(sorted, stages)) == ([] if sharded else sorted(map(sorted, buckets)))


@pytest.mark.parametrize("program", [distributed_programs.collectives])
def test_two_processes(pair: Processes, program) -> None:
    pair.run(program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_functional_collectives(pair: Processes, backend: str) -> None:
    pair.run(distributed_programs.functional_collectives, backend)


def _holds_both_lines(told: list[tuple[str, float]]) -> None:
    file = Path(distributed_programs.__file__)
    lines = file.read_text().splitlines()
    for text, took in told:
        assert took < 25  # the group's limit is 30 seconds
        for rank, called in ((0, "all_reduce(sum, float32[4, 3])"), (1, "all_reduce(max, float64[4, 3])")):
            (line,) = (n for n, line in enumerate(lines, 1) if f"# rank {rank} begins here" in line)
            assert f"rank {rank} calls {called} at {file}:{line} in program" in text


@pytest.mark.parametrize(("backend", "late"), [("eager", False), ("aot_eager", True), ("inductor", False)])
def test_ranks_that_call_collectives_in_other_orders_are_told(pair: Processes, backend: str, late: bool) -> None:
    _holds_both_lines(pair.run(distributed_programs.other_orders, backend, late))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_ranks_may_compile_other_graphs_of_the_same_collectives(pair: Processes, backend: str) -> None:
    pair.run(distributed_programs.some_ranks_compile, backend)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_subgroups(pair: Processes, backend: str) -> None:
    pair.run(distributed_programs.in_a_subgroup, backend)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_graph_with_collectives_that_raises_does_not_run_again(pair: Processes, backend: str) -> None:
    assert pair.run(distributed_programs.raises_behind_a_collective, backend) == [1, 1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_collectives_that_write_to_their_arguments(pair: Processes, backend: str) -> None:
    pair.run(distributed_programs.written_collectives, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_memory_is_nobody_else_s_until_a_collective_is_waited_for(pair: Processes, backend: str) -> None:
    pair.run(distributed_programs.waits_late, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", work_programs.WHOLE)
def test_what_is_begun_is_waited_for_where_the_program_waits(pair: Processes, name: str, backend: str) -> None:
    pair.run(work_programs.whole, name, backend)


@pytest.mark.parametrize(("backend", "breaks"), [("aot_eager", False), ("inductor", True)])
def test_what_nobody_waits_for_is_done_at_the_end_of_the_graph(pair: Processes, backend: str, breaks: bool) -> None:
    pair.run(work_programs.forgotten, backend, breaks)


def test_to_begin_and_to_wait_are_two_nodes(pair: Processes) -> None:
    begun = ["all_reduce", "recv", "sin", "send", "wait_tensor", "cos", "wait_tensor", "wait_tensor", "exp"]
    assert pair.run(work_programs.order) == [begun, begun]


@pytest.mark.parametrize("name", work_programs.LEAVES)
def test_work_that_leaves_the_graph_is_eager_s(pair: Processes, name: str) -> None:
    pair.run(work_programs.leaves, name, "aot_eager")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", parallel_programs.MODELS)
def test_parallel_modules_are_one_graph(pair: Processes, name: str, backend: str) -> None:
    told = ["distributed: embedding() of a DTensor"] if name == "with_words" else []
    for breaks, captured in pair.run(parallel_programs.trains_as_eager, name, backend):
        assert (breaks, captured) == (told, 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_layouts_by_hand(pair: Processes, backend: str) -> None:
    pair.run(parallel_programs.by_hand, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_layouts_in_parts_of_other_sizes(pair: Processes, backend: str) -> None:
    pair.run(parallel_programs.uneven, backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", mesh_programs.PROGRAMS)
def test_each_call_is_answered_by_the_mesh_that_it_is_given(pair: Processes, name: str, backend: str) -> None:
    pair.run(mesh_programs.PROGRAMS[name], backend)


def test_the_graph_of_a_parallel_module_holds_its_collectives(pair: Processes) -> None:
    for found in pair.run(parallel_programs.without_gradients):
        begun = [name for name in found if name != "wait_tensor"]
        assert found == [name for each in begun for name in (each, "wait_tensor")]
        assert begun == ["all_gather_into_tensor", "reduce_scatter_tensor"] * 4 + ["all_gather_into_tensor"] * 2


def test_every_public_collective_has_a_row() -> None:
    assert collective_programs.untried() == []


@pytest.mark.parametrize("kind", collective_programs.TABLES)
def test_collectives_and_questions_are_eager_s(pair: Processes, kind: str) -> None:
    assert pair.run(collective_programs.as_eager, kind) == [[], []]


def test_what_is_known_of_a_group_is_said_of_no_other(pair: Processes) -> None:
    pair.run(collective_programs.in_one_group_and_another)


@pytest.mark.parametrize(
    ("count", "wrapping", "fault"),
    [
        (2, "replicas", "raises"),
        (2, "replicas", "is late"),
        (2, "shards", "dies"),
        (2, "collectives", "raises"),
        (4, "replicas", "dies"),
    ],
)
def test_a_rank_that_fails_to_compile_ends_the_job(count: int, wrapping: str, fault: str) -> None:
    ended = failing_ranks.job(count, wrapping, fault)
    if fault == "raises":
        assert ended.pop(1)[:2] == ("OSError", "no room left for kernels")
    for rank, (kind, text, seconds) in ended.items():
        assert seconds < 15, (rank, kind, text)
        if fault == "is late":
            assert kind == ""
            continue
        assert kind == "RankFailed", (rank, kind, text)
        assert "rank 1" in text
        assert "failing_ranks.py" in text
        assert ("no room left" if fault == "raises" else "is gone") in text


@pytest.mark.expected_eager("distributed", "c_function", "unsupported_read")  # torch imports what it logs with
@pytest.mark.parametrize("cap", [25, 5e-4])
def test_an_explanation_tells_where_the_backward_is_cut_and_why(cap: float) -> None:
    torchcompile.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(replica_programs.Layers((16, 16, 16)), bucket_cap_mb=cap)
        found = torchcompile.explain(model)(torch.ones(2, 16))
        wrapped = torchcompile.explain(torchcompile.compile(model))(torch.ones(2, 16))
    finally:
        dist.destroy_process_group()
    rows = {title: rows for title, _, rows in found.sections()}
    stages = next(rows for title, rows in rows.items() if title.startswith("Backward in stages"))
    assert [row[3].split(", ") for row in stages] == (
        [["layers.1.bias", "layers.1.weight"], ["layers.0.bias", "layers.0.weight"]]
        if cap < 1
        else [["layers.1.bias", "layers.1.weight", "layers.0.bias", "layers.0.weight"]]
    )
    assert [row[5].partition(":")[0].partition(" with")[0] for row in stages] == (
        ["bucket 0 is complete", "the last bucket"]
        if cap < 1
        else ["all parameters are in one bucket of less than 25 MiB"]
    )
    assert wrapped.more == found.more
    assert "why it ends there" in str(found)
