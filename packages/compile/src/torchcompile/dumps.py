"""The dump folder: every stage of every compilation as a numbered, readable file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from primtorch import forks
from primtorch.frozen import record

Dump = Callable[[str, str], None]
MOST_REMEMBERED = 10_000


@record
class Text:
    """A stage of a compilation as a person reads it. `title`: the graph that it belongs to, or nothing."""

    name: str
    title: str
    text: str


class DumpFolder:
    """Writes `NNNN_name` files into one folder, numbered in the order in which stages ran.

    Numbers go on from those already in the folder, so that several `compile` calls, and several
    processes one after the other, may share it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: deque[Path] = deque(maxlen=MOST_REMEMBERED)  # by this process
        self._lock = forks.lock()

    def __call__(self, name: str, text: str) -> None:
        with self._lock:
            self.root.mkdir(parents=True, exist_ok=True)
            taken = [int(path.name[:4]) for path in self.root.glob("[0-9][0-9][0-9][0-9]_*")]
            path = self.root / f"{max(taken, default=-1) + 1:04d}_{name}"
            path.write_text(text)
            self.written.append(path)

    def named(self, title: str) -> Dump:
        """A writer whose files' names start with `title`."""
        return lambda name, text: self(f"{title}_{name}", text)

    def texts(self, titles: Iterable[str]) -> Iterator[Text]:
        """What this process wrote, as far as it is still there, each with the one of `titles` that it belongs to."""
        known = sorted(titles, key=len, reverse=True)
        for path in tuple(self.written):
            name = path.name[5:]
            try:
                text = path.read_text()
            except OSError:
                continue
            yield Text(path.name, next((title for title in known if name.startswith(f"{title}_")), ""), text)
