"""Names of a package whose rooms are loaded where one of them is first asked for (PEP 562).

For rooms that few programs need and whose loading takes long. A package names them under `TYPE_CHECKING` as well, so
that they have types; whoever uses them writes `package.name`, since `from package import name` asks at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from primtorch import forks


def late(package: str, rooms: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package.

    Args:
        package: its `__name__`.
        rooms: name -> the module that it is in, which is not called like one of the names.
    """

    def load(name: str) -> object:
        room = rooms.get(name)
        if room is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with forks.undivided():
            found = getattr(import_module(room), name)
        setattr(sys.modules[package], name, found)
        return found

    return load
