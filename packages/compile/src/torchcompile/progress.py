"""One live line on a terminal that says what is compiled just now; it is gone when the program goes on.

It stands in the terminal's present line and moves the cursor nowhere else, takes no thread of its own, waits for
nobody, and gives up for good at the first error of the stream: what it is about is not worth one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from primtorch import forks

if TYPE_CHECKING:
    from rich.console import Console

Watch = Callable[[str, int, int], None]

_PATIENCE = 0.3  # seconds that a compilation takes before a line says so
_EVERY = 0.08  # seconds between two lines
_TOLD = {
    "trace": "tracing",
    "lower": "lowering",
    "generate": "kernels {done}/{of}",
    "build": "building {of} kernels",
}


class Progress:
    """What one `compile` tells of its compilations.

    Args:
        wanted: None: where standard error is a terminal; True: elsewhere, too, as one line for each graph that is
            built; False: never.
    """

    _lock = forks.lock()  # of the process's terminal

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._depth = 0
        self._began = self._last = 0.0
        self._console: Console | None = None
        self._shown = False

    @contextmanager
    def working(self, title: str) -> Iterator[Watch]:
        """A block in which a graph is compiled; gives what is told of its stages."""
        if self._wanted is False:
            yield _silent
            return
        self._depth += 1
        if self._depth == 1:
            self._safely(self._start)
        try:
            yield lambda stage, done, of: self._safely(lambda: self._tell(title, stage, done, of))
        finally:
            self._depth -= 1
            self._safely(self._erase)

    def _safely(self, act: Callable[[], None]) -> None:
        if self._wanted is False or not self._lock.acquire(blocking=False):
            return
        try:
            act()
        except Exception:
            self._wanted = False
        finally:
            self._lock.release()

    def _start(self) -> None:
        stream = sys.stderr
        self._began, self._console = time.perf_counter(), None
        if stream is not None and (self._wanted or stream.isatty()):
            self._console = _console(stream)

    def _tell(self, title: str, stage: str, done: int, of: int) -> None:
        console, now = self._console, time.perf_counter()
        if console is None or stage not in _TOLD:
            return
        from rich.text import Text  # loaded with the console

        line = f"{title}: {_TOLD[stage].format(done=done, of=of)}"
        if not console.is_terminal or console.is_dumb_terminal:
            if self._wanted and stage == "build":
                console.print(Text(f"torchcompile: {line}"), soft_wrap=True)
            return
        soon = now - self._last < _EVERY and self._shown and stage == "generate"
        if now - self._began < _PATIENCE or soon:
            return
        text = Text.assemble(("torchcompile ", "dim"), line, (f"  {now - self._began:.0f} s", "dim"))
        text.truncate(max(console.width - 1, 1), overflow="ellipsis")
        self._clear(console)
        console.print(text, end="", soft_wrap=True)
        self._shown, self._last = True, now

    def _erase(self) -> None:
        if self._shown and self._console is not None:
            self._shown = False
            self._clear(self._console)

    def _clear(self, console: Console) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _console(stream: TextIO) -> Console:
    with forks.undivided():
        from rich.console import Console

    class Line(Console):
        def on_broken_pipe(self) -> None:
            """Nothing of what rich does: it ends the process."""
            raise  # noqa: PLE0704 - it is called where the error is handled

    return Line(file=stream, highlight=False)


def _silent(stage: str, done: int, of: int) -> None:
    return
