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


MOST_UNSEEN = 2_000_000  # objects, of a hundred bytes: what is made for a large model's step is half as many
ASKED_AGAIN = 100  # blocks behind one at whose end the program had frozen objects


class _Collector:
    """Python's collector of cyclic garbage, whose youngest objects are old when it goes on.

    The first of its rounds would walk through whatever was made while it was off, nearly all of which lives on, and the
    next ones through it again: a seventh of a compilation. Garbage among it waits for a round over old objects, or
    until there may be too much of it.
    """

    def __init__(self) -> None:
        self._unseen = 0
        self._left_alone = 0  # blocks

    def set(self, on: bool) -> None:
        if not on:
            gc.disable()
            return
        if self._left_alone:
            self._left_alone -= 1
        elif gc.get_freeze_count():  # what a program has frozen stays so; it is counted one by one
            self._left_alone = ASKED_AGAIN
        else:
            self._age()
        gc.enable()

    def _age(self) -> None:
        self._unseen += gc.get_count()[0]
        if self._unseen > MOST_UNSEEN:
            self._unseen = 0
            gc.collect()
        else:
            gc.freeze()
            gc.unfreeze()


# It would walk through all that the process holds several times over, for a quarter of a compilation and for half of a
# capture.
COLLECTOR = Withheld(gc.isenabled, _Collector().set)
