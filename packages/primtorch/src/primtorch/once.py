"""What is made once: by a process, whichever of its threads comes first, and by an object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, overload

from primtorch import forks

T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """What a method returns, kept by the object. Threads that come while the first one is at it each run the method.

    The one of Python 3.11 lets them wait for a lock of the class: for other objects' values, too, and in a process that
    was forked meanwhile for ever.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> cached_property[T] | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value: T = self.func(instance)
        return instance.__dict__.setdefault(self.attrname, value)  # type: ignore[no-any-return]


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
