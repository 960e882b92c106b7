"""What ranks tell each other of their compilations, over a store of one process."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from torchdistributed import RankFailed, compilations
from torchdistributed.compilations import Board

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def boards(count: int, limit: float = 60.0) -> list[Board]:
    store = dist.HashStore()
    return [Board(store, rank, count, limit) for rank in range(count)]


def timed(board: Board) -> float:
    began = time.monotonic()
    board.wait()
    return time.monotonic() - began


def test_ranks_that_have_compiled_as_much_do_not_wait() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.begin("a graph")
    first.end("a graph")
    second.end("a graph")
    assert max(timed(first), timed(second)) < 1


def test_a_rank_that_compiles_nothing_is_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "_PATIENCE", 0.3)
    first, _ = boards(2)
    waits = []
    for _ in range(4):
        first.begin("a graph")
        first.end("a graph")
        waits.append(timed(first))
    assert min(waits[:2]) >= 0.3
    assert max(waits[2:]) < 0.3


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_is_raised_once(late: bool) -> None:
    """Also in a rank that comes to its graph when the other one has failed; the next graph is another matter."""
    first, second = boards(2)
    second.begin("a graph")
    if late:
        second.fail("rank 1 failed")
    first.begin("a graph")
    if not late:
        second.fail("rank 1 failed")
    first.end("a graph")
    with pytest.raises(RankFailed, match="rank 1 failed"):
        first.wait()
    for board in (first, second):
        board.begin("another")
        board.end("another")
    assert max(timed(first), timed(second)) < 1


def test_a_rank_that_compiles_for_ever_is_named_when_the_limit_comes() -> None:
    first, second = boards(2, limit=0.3)
    second.begin("the graph at model.py:7")
    first.begin("a graph")
    first.end("a graph")
    with pytest.raises(RankFailed, match=r"rank 1: process \d+ on .* was compiling the graph at model.py:7"):
        first.wait()
