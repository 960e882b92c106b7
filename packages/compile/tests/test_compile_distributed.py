"""Processes over gloo: what talks to other processes happens at every call, as in eager."""

from __future__ import annotations

from collections.abc import Iterator

import distributed_programs
import pytest
import replica_programs
from processes import AVAILABLE, Processes

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
        assert "distributed" not in events["inner"]


@pytest.mark.slow
def test_four_replicas() -> None:
    with Processes(4) as processes:
        for name in ("small_buckets", "unused_small", "join_unused"):
            processes.run(replica_programs.trains_as_eager, name, "inductor")


@pytest.mark.parametrize("program", [distributed_programs.collectives, distributed_programs.sharded])
def test_two_processes(pair: Processes, program) -> None:
    pair.run(program)
