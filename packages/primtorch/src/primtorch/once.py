"""What a process makes once, whichever of its threads comes first."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from primtorch import forks

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """A function that runs `make` at its first call and returns what that returned, at every call and in every thread.

    `functools.cache` promises less: threads that come while the first one is at it each run the function as well, which
    for one that registers something with torch, or owns a folder, is an error. If `make` raises, the next call runs it
    again. `make` may not call the function itself.
    """
    lock = forks.lock()
    made: list[T] = []

    @wraps(make)
    def get() -> T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get
