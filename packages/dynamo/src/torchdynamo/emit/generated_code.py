"""Generated functions as code. Their text is found by tracebacks and debuggers, as long as they live."""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torchdynamo.emit.codegen import GENERATED

_names = iter(range(1 << 60))
# Names of generated functions that are gone. Their text is dropped when the next capture begins: a collection of
# garbage may come while the program walks the cache of lines.
_ended: deque[str] = deque()


def forget_ended_code() -> None:
    """Drops the text of generated functions that no longer live."""
    with contextlib.suppress(IndexError):  # of an empty deque, which another thread may have emptied
        while True:
            linecache.cache.pop(_ended.popleft(), None)


def load(text: str, name: str, namespace: dict[str, Any]) -> Callable[..., object]:
    """The function `compiled` of a generated text; `name` is that of the program's function."""
    file = f"{GENERATED}{name} {next(_names)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), namespace)
    weakref.finalize(namespace["compiled"], _ended.append, file)
    return namespace["compiled"]  # type: ignore[no-any-return]
