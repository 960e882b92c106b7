"""Switches of the process that are held off while programs are captured and compiled."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from primtorch import forks


class Withheld:
    """A switch of the process that is held off for a while, in several threads at once maybe.

    What the program has set is what it reads as, and what it is again when the last of them has ended.
    """

    def __init__(self, getter: Callable[[], bool], setter: Callable[[bool], None]) -> None:
        self._get, self._set, self._lock = getter, setter, forks.rlock()
        self._blocks: Counter[int] = Counter()  # by the thread that they are of
        self._wanted = False
        forks.in_child(self._forked)

    def read(self) -> bool:
        """Whether it is on, or was before it was held off."""
        with self._lock:
            return self._wanted if self._blocks else self._get()

    def write(self, on: bool) -> None:
        """Sets it, or what it will be behind the last block."""
        with self._lock:
            if self._blocks:
                self._wanted = on
            else:
                self._set(on)

    @contextmanager
    def off(self) -> Iterator[None]:
        """A block in which it is off."""
        with self._lock:
            if not self._blocks:
                self._wanted = self._get()
                self._set(False)
            self._blocks[threading.get_ident()] += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks[threading.get_ident()] -= 1
                self._keep(+self._blocks)

    def _forked(self) -> None:
        """Ends the blocks of threads that are not in this process."""
        here = threading.get_ident()
        if self._blocks:
            self._keep(Counter({thread: count for thread, count in self._blocks.items() if thread == here}))

    def _keep(self, blocks: Counter[int]) -> None:
        self._blocks = blocks
        if not blocks:
            self._set(self._wanted)


# Python's collector of cyclic garbage: it would walk through all that the process holds several times over, for a
# quarter of a compilation and for half of a capture.
COLLECTOR = Withheld(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
