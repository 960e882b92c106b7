"""Python's collector of cyclic garbage, held back while programs are captured and compiled: it would walk through all
that the process holds several times over, for a quarter of a compilation and for half of a capture."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class Collector:
    """Off while one of its blocks runs, in whichever thread; afterwards what it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._was_on = False

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        with self._lock:
            if not self._blocks:
                self._was_on = gc.isenabled()
                gc.disable()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks and self._was_on:
                    gc.enable()


COLLECTOR = Collector()
