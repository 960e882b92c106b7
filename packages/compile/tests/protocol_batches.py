"""Batches made in another process. It imports nothing but torch: a process that is started afresh does so each time."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset


class Batches(Dataset[Any]):
    """The batches of a program."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> Any:
        return self.batches[step]


def loader(batches: list[Any], start: str | None) -> DataLoader[Any]:
    """From a process that is started in this way, and kept; from this process where it is None."""
    if start is None:
        return DataLoader(Batches(batches), batch_size=None)
    return DataLoader(
        Batches(batches), batch_size=None, num_workers=1, multiprocessing_context=start, persistent_workers=True
    )
