"""Warnings that name the user's line, told once of each: what happens to the user's code, and what torch says of a call
that runs while the code is captured and traced."""

from __future__ import annotations

import builtins
import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from primtorch.schemas import UserFrame


def warn_at(text: str, line: UserFrame) -> None:
    """Warns of something at a line of the user's."""
    warnings.warn_explicit(text, UserWarning, line.file, line.line, registry=_warned_in(line.file))


def called_at(
    frames: Sequence[UserFrame], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a function of torch. What its C++ code warns of is of the innermost of the frames, as if that called it."""
    if not frames:
        return function(*args, **kwargs)
    return _caller(frames[-1].file, frames[-1].line)(function, args, kwargs)


@functools.lru_cache(maxsize=4096)
def _caller(file: str, line: int) -> Callable[..., Any]:
    """`_call` as a function of that line: C code looks for the file, the line and what was said there in its frame."""
    code = _call.__code__.replace(co_filename=file, co_firstlineno=max(line - 1, 0))  # its body is on the next line
    names = {"__builtins__": builtins, "__name__": _MODULES.of(file), "__warningregistry__": _warned_in(file)}
    return types.FunctionType(code, names)


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


class _Modules:
    """Names of modules by their files, looked up anew where there are more of them than there were."""

    def __init__(self) -> None:
        self._count = 0
        self._names: dict[str, str] = {}

    def of(self, file: str) -> str:
        """The module that filters know a file by; the file, where there is none."""
        if file not in self._names and self._count != len(sys.modules):
            loaded = dict(sys.modules)
            self._count = len(loaded)
            self._names = {str(getattr(m, "__dict__", {}).get("__file__")): name for name, m in loaded.items()}
        return self._names.get(file, file)


_MODULES = _Modules()


@functools.lru_cache(maxsize=256)
def _warned_in(file: str) -> dict[str | tuple[str, type[Warning], int], int]:
    """What was warned of in a file, as a module's `__warningregistry__` has it: a filter may ask for each once."""
    return {}
