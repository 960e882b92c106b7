"""What ranks tell each other of the collectives of their graphs, over a store of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from torchdistributed import CollectivesDiffer, agreement
from torchdistributed.agreement import Collective, Meeting

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def meetings(*called: str) -> list[Meeting]:
    """Each rank at the same number, about to call this."""
    store = dist.HashStore()
    return [
        Meeting(store, Group(rank, len(called)), [Collective("0", what, f"line {rank}")])
        for rank, what in enumerate(called)
    ]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PATIENCE", 0.05)
    monkeypatch.setattr(agreement, "_SETTLING", 0.05)
    monkeypatch.setattr(agreement, "_fruitless", {})


def test_what_is_called_under_one_number_has_to_be_one() -> None:
    first, second, other = meetings("all_reduce(sum)", "all_reduce(sum)", "all_reduce(max)")
    first.hold()
    second.hold()
    with pytest.raises(CollectivesDiffer, match="rank 0 calls all_reduce.sum. at line 0, and rank 2 calls"):
        other.hold()
    with pytest.raises(CollectivesDiffer):
        first.explain(RuntimeError())


def test_a_number_that_others_are_past_is_another_place() -> None:
    """Two ranks have sent something to each other, which their back end counts: they are one ahead of the third."""
    first, second, third = meetings("all_reduce(sum)", "all_reduce(sum)", "all_reduce(max)")
    for meeting in (first, second):
        meeting.hold()
        meeting.end()
    third.hold()
    third.end()
    first.explain(RuntimeError())
