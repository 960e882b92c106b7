"""The dump folder: every stage of every compilation as a numbered, readable file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

Dump = Callable[[str, str], None]


class DumpFolder:
    """Writes `NNNN_name` files into one folder, numbered in the order in which stages ran.

    Numbers go on from those already in the folder, so that several `compile` calls, and several
    processes one after the other, may share it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()

    def __call__(self, name: str, text: str) -> None:
        with self._lock:
            self.root.mkdir(parents=True, exist_ok=True)
            taken = [int(path.name[:4]) for path in self.root.glob("[0-9][0-9][0-9][0-9]_*")]
            (self.root / f"{max(taken, default=-1) + 1:04d}_{name}").write_text(text)

    def named(self, title: str) -> Dump:
        """A writer whose files' names start with `title`."""
        return lambda name, text: self(f"{title}_{name}", text)
