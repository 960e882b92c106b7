"""Deep models under DistributedDataParallel: a round of a loop over layers is compiled once, for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import replica_programs
import round_programs
import torch
import torch.distributed as dist
from processes import AVAILABLE, Processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchcompile
import torchinductor
from torchdistributed import reducer_plan

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="needs gloo"),
    pytest.mark.expected_eager("repeated_modules", "distributed"),
]

_OF_WRAPPINGS = {"distributed", "library_code", "recompiled"}
_QUICK = (
    "small_buckets",
    "numbered",
    "part",
    "checkpointed",
    "buffered",
    "skipped",
    "comprehended",
    "no_sync_views",
    "tokens",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    with Processes(2) as processes:
        yield processes


@pytest.fixture
def alone() -> Iterator[None]:
    torchcompile.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_RUNS = [(name, backend) for name in round_programs.CASES for backend in ("aot_eager", "inductor")]
_RUNS.remove(("autocast", "inductor"))  # which adds up a backward's bfloat16 otherwise, with rounds and without
_SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in _RUNS if run[0] not in _QUICK or run[1] == "inductor"]


@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in _QUICK), *_SLOW])
def test_deep_replicas(pair: Processes, name: str, backend: str) -> None:
    for told in pair.run(round_programs.trains_as_eager, name, backend, timeout=120):
        for kinds in told.values():
            assert kinds - _OF_WRAPPINGS == round_programs.CASES[name][1]


def test_more_layers_take_no_more_captures(alone: None) -> None:
    assert round_programs.compiled_for(5) == round_programs.compiled_for(11)
    assert round_programs.compiled_for(5)[2] == {"repeated_modules"}


def test_a_table_s_gradient_comes_before_those_of_the_first_rounds(alone: None) -> None:
    """They are in its graph for that: a gradient cannot wait for one that another graph computes later."""
    torchcompile.reset()
    model = round_programs.Tokens(12)
    compiled = torchcompile.compile(model, options=round_programs.OPTIONS)
    run = DistributedDataParallel(compiled, bucket_cap_mb=400 / (1 << 20))
    for _ in range(4):
        run(torch.rand(2, 6)).sum().backward()
    made = reducer_plan(run)
    bucket_of = {name: bucket.index for bucket in made.buckets for name in bucket.names}
    table, *layers = (bucket_of[name] for name in ("first.weight", *(f"blocks.{i}.layer.weight" for i in range(12))))
    # 960 bytes in the table, 216 in a layer: two of twelve wait, and what the third has first.
    assert made.final and all(layer > table for layer in layers[:2]) and all(layer <= table for layer in layers[2:])
    assert bucket_of["blocks.2.norm.weight"] > table
    tokens = round_programs.Tokens
    assert round_programs.compiled_for(12, tokens)[:2] == round_programs.compiled_for(15, tokens)[:2]


@pytest.mark.expected_eager("repeated_modules", "no_cuda_graph")
@pytest.mark.parametrize("options", [{"replicated_rounds": 0}, {"replicated_rounds": 12}, {"cuda_graphs": True}, {}])
def test_who_wants_one_graph_has_one(alone: None, options: dict[str, int]) -> None:
    captured, _, told = round_programs.compiled_for(11, **options)
    assert (captured == 1) == bool(options) and ("repeated_modules" in told) == (not options)


def test_a_whole_graph_where_breaks_are_errors(alone: None) -> None:
    model = torchcompile.compile(round_programs.Deep(), fullgraph=True, options=round_programs.OPTIONS)
    run = DistributedDataParallel(model)
    for _ in range(3):
        run(torch.ones(2, 6)).sum().backward()
    assert torchcompile.report().captured == 1


def test_without_a_replica_or_gradients_a_loop_is_one_graph(alone: None) -> None:
    model = torchcompile.compile(round_programs.Deep(), options=round_programs.OPTIONS)
    model(torch.ones(2, 6)).sum().backward()
    with torch.no_grad():
        DistributedDataParallel(model)(torch.ones(2, 6))
    report = torchcompile.report()
    assert report.captured == 2 and {event.kind.id for event in report.events} == {"recompiled"}


@pytest.mark.expected_eager("distributed", "c_function", "unsupported_read", "repeated_modules")
def test_an_explanation_tells_of_each_round(alone: None) -> None:
    class Many(round_programs.Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(round_programs.Block(i) for i in range(40))

    model = DistributedDataParallel(Many(), bucket_cap_mb=1.5e-4)
    found = torchcompile.explain(model)(torch.ones(2, 6))
    rows = {title: rows for title, _, rows in found.sections()}
    stages = next(rows for title, rows in rows.items() if title.startswith("Backward in stages"))
    named = sorted(name for row in stages for name in row[3].split(", "))
    assert named == sorted(name for name, _ in model.module.named_parameters())
    assert len(found.graphs) == 3 and {row[0] for row in stages} == {"0", "1", "2"}


def test_experts_of_a_layer_are_no_layers(alone: None) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.rest = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 600)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(sum(expert(x) for expert in self.experts) + self._one_by_one(x))

        def _one_by_one(self, x: torch.Tensor) -> torch.Tensor:
            for expert in self.experts:
                x = x + expert(x)
            return x

    DistributedDataParallel(torchcompile.compile(Experts(), options=round_programs.OPTIONS))(torch.ones(2, 6))
    assert torchcompile.report().captured == 1


def test_how_many_is_a_number() -> None:
    with pytest.raises(torchcompile.errors.InvalidArgument, match="number of modules"):
        torchcompile.compile(replica_programs.Layers(), options={"replicated_rounds": -1})


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("number", range(1, 8))
def test_a_graph_that_cannot_be_compiled_for_a_later_round_raises(
    alone: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where other ranks are told that this one failed: an eager run in its place would wait for them."""
    count, original = 0, torchinductor.compile_graph

    def fails(*args: Any, **settings: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise OSError("no room left for kernels")
        return original(*args, **settings)

    monkeypatch.setattr(torchinductor, "compile_graph", fails)
    model = torchcompile.compile(round_programs.Deep(), options=round_programs.OPTIONS | {"strict": True})
    run = DistributedDataParallel(model, bucket_cap_mb=1.5e-4)
    with pytest.raises(OSError, match="no room"):
        for _ in range(4):
            run(torch.ones(2, 6)).sum().backward()
    assert count == number
