"""Simulated steps against what can be said of them without a simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchdistributed import BucketPlanError, Link, Part, plan, simulate_replicas, simulate_shards

LINK = Link(bandwidth=1e9, latency=0.0)
TIMES = st.floats(0.001, 1.0)


def parts_of(times: list[tuple[float, float, int]]) -> list[Part]:
    return [Part(str(number), forward, backward, nbytes) for number, (forward, backward, nbytes) in enumerate(times)]


def test_a_bucket_is_sent_while_the_next_is_computed() -> None:
    parts = [Part("a", 1.0, 2.0, 10**9), Part("b", 1.0, 2.0, 10**9)]
    step = simulate_replicas(parts, [["b"], ["a"]], LINK, 2)  # an all-reduce of 1e9 bytes by two ranks takes a second
    assert [(s.what, s.begin, s.end) for s in step.spans if s.stream == "link"] == [
        ("bucket 0", 4, 5),
        ("bucket 1", 6, 7),
    ]
    assert (step.seconds, step.busy("compute"), step.busy("link"), step.hidden) == (7, 6, 2, 0.5)
    together = simulate_replicas(parts, [["a", "b"]], LINK, 2)
    assert (together.seconds, together.hidden) == (8, 0)
    assert simulate_replicas(parts, [["a", "b"]], LINK, 1).hidden == 1
    assert "7000.00 ms a step, 50% of 2000.00 ms of communication hidden" in str(step)


def test_what_comes_last_is_sent_beside_gradients_that_can_wait() -> None:
    parts = [Part("table", 0.0, 0.0, 2 * 10**9), *(Part(name, 1.0, 2.0, 10**6, own=1.0) for name in "ab")]
    in_turn = simulate_replicas(parts, [["b"], ["a"], ["table"]], LINK, 2)
    before = simulate_replicas(parts, [["table"], ["b"], ["a"]], LINK, 2)
    assert (in_turn.seconds, before.seconds) == pytest.approx((8.001, 6.002))
    assert before.busy("compute") == in_turn.busy("compute") == 6


def test_a_unit_is_gathered_while_the_one_before_is_computed() -> None:
    units = [Part(name, 4.0, 8.0, 10**9) for name in "abc"]  # gathering takes half a second, and so does reducing
    step = simulate_shards(units, LINK, 2)
    assert [s.what for s in step.spans if s.stream == "link"] == [
        "gather a", "gather b", "gather c", "gather b", "reduce c", "gather a", "reduce b", "reduce a",
    ]  # fmt: skip
    assert step.seconds == 0.5 + 36 + 0.5  # the first gathering and the last reduction are seen
    kept = simulate_shards(units, LINK, 2, reshard=False)
    assert (kept.busy("link"), step.busy("link")) == (3.0, 4.0)


@given(
    st.lists(st.tuples(TIMES, TIMES, st.integers(1, 10**9)), min_size=1, max_size=12), st.sampled_from([1, 2, 64, 1024])
)
def test_a_step_is_as_long_as_what_it_does(times: list[tuple[float, float, int]], ranks: int) -> None:
    parts, link = parts_of(times), Link(1e9, 1e-4)
    names = [part.name for part in reversed(parts)]
    one, each = (simulate_replicas(parts, cut, link, ranks) for cut in ([names], [[name] for name in names]))
    for step in (one, each, simulate_shards(parts, link, ranks)):
        assert step.busy("compute") == pytest.approx(sum(forward + backward for forward, backward, _ in times))
        assert step.seconds >= max(step.busy("compute"), step.busy("link")) * (1 - 1e-9)
        assert step.seconds <= (step.busy("compute") + step.busy("link")) * (1 + 1e-9)
        assert -1e-9 <= step.hidden <= 1 + 1e-9
        for stream in ("compute", "link"):
            spans = [span for span in step.spans if span.stream == stream]
            assert all(a.end <= b.begin for a, b in zip(spans, spans[1:], strict=False))


def test_a_plan_is_the_best_of_what_it_tried() -> None:
    model = nn.Sequential(nn.Embedding(1000, 512), *(nn.Linear(512, 512, device="meta") for _ in range(12)))
    found = {ranks: plan(model, ranks=ranks, tokens=4096, flops=1e14, link=Link(50e9, 1e-5)) for ranks in (2, 1024)}
    for chosen in found.values():
        assert chosen.seconds[chosen.cap_mib] == chosen.timeline.seconds == min(chosen.seconds.values())
        assert sorted(name for bucket in chosen.buckets for name in bucket.names) == sorted(
            dict(model.named_parameters())
        )
    assert found[1024].cap_mib > found[2].cap_mib  # each sending costs more
    assert str(found[2]).startswith(f"bucket_cap_mb={found[2].cap_mib:g}: {len(found[2].buckets)} buckets for 2 ranks")


@pytest.mark.parametrize("ranks", [0, 1025])
def test_what_cannot_be_planned(ranks: int) -> None:
    with pytest.raises(BucketPlanError, match="1 to 1024 ranks"):
        plan(nn.Linear(2, 2), ranks=ranks, tokens=1)
    with pytest.raises(BucketPlanError, match="parameters that learn"):
        plan(nn.Linear(2, 2).requires_grad_(False), ranks=2, tokens=1)
    with pytest.raises(BucketPlanError, match="in one bucket"):
        simulate_replicas([Part("a", 1, 1, 1)], [["a"], ["a"]], LINK, 2)
