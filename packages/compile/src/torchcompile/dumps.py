"""The dump folder: every stage of every compilation as a numbered, readable file."""

from __future__ import annotations

import threading
from pathlib import Path


class DumpFolder:
    """Writes `NNN_name` files into one folder a compiled graph, numbered in the order in which stages ran."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._count = 0

    def compilation(self, title: str) -> DumpWriter:
        """A writer into a new subfolder `NNN_title`."""
        with self._lock:
            folder = self.root / f"{self._count:03d}_{title}"
            self._count += 1
        return DumpWriter(folder)


class DumpWriter:
    """Callable with (file name, text). The folder is made at the first file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, name: str, text: str) -> None:
        with self._lock:
            number = self._count
            self._count += 1
            self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{number:02d}_{name}").write_text(text)
