"""Files of modules crawled from public repositories: what is in a folder of them, and how one is imported.

The format is that of the generated tests which came with the TorchDynamo paper: each `test_*.py` has the classes of one
repository and a list TESTCASES of (class, init arguments, forward arguments, ...), the arguments as functions that give
(args, kwargs). Libraries that are not here are replaced by stand-ins, so that a file can be imported for the modules in
it that do without.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import random
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_ENTRY = re.compile(r"(?m)^    \((\w+),$")
_TABLE = "\nTESTCASES = ["
SUPPORT = "_paritybench_helpers"


def listed(folder: Path) -> list[str]:
    """ "file:index:class" of every module of the folder, sorted. Nothing is imported."""
    names = []
    for path in sorted(folder.glob("test_*.py")):
        text = path.read_text(errors="replace")
        entries = _ENTRY.findall(text, max(text.rfind(_TABLE), 0))
        names += [f"{path.stem}:{index}:{name}" for index, name in enumerate(entries)]
    if not names:
        raise SystemExit(f"no modules in {folder}: it is to hold files test_*.py with a table TESTCASES")
    return names


def shuffled(names: list[str], seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


def load(folder: Path, case: str) -> tuple[type[torch.nn.Module], Callable[[], Any], Callable[[], Any]]:
    """(class, init arguments, forward arguments) of a case as `listed` names it."""
    stem, index, name = case.split(":")
    spec = importlib.util.spec_from_file_location(stem, folder / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    sys.modules[SUPPORT] = support()
    with standing_in(stem):
        spec.loader.exec_module(module)
    entry = module.TESTCASES[int(index)]
    if not (isinstance(entry[0], type) and issubclass(entry[0], torch.nn.Module)):
        raise TypeError(f"{name} is no nn.Module here")
    return entry[0], entry[1], entry[2]


# -- what the files import ---------------------------------------------------------------------


class _StandInType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def stand_in(name: str) -> Any:
    """A class in place of what is not here: a base class, a decorator that changes nothing, a namespace."""

    def called(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return object.__new__(cls)

    def ignore(self: Any, *args: Any, **kwargs: Any) -> None: ...

    def decorate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def attribute(self: Any, attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)
        return stand_in(f"{name}.{attr}")

    body = {"__new__": called, "__init__": ignore, "__call__": decorate, "__getattr__": attribute}
    return _StandInType(name, (), body)


@contextmanager
def standing_in(importer: str) -> Iterator[None]:
    """While it lasts, `importer` (and no other module) gets stand-ins for what cannot be imported."""
    real = builtins.__import__
    made: list[str] = []

    def import_or_stand_in(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if globals is None or globals.get("__name__") != importer:
            return real(name, globals, locals, fromlist, level)
        try:
            found = real(name, globals, locals, fromlist, level)
        except Exception:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in sys.modules:
                    sys.modules[path] = _stand_in_module(path)
                    made.append(path)
                    if end > 1:
                        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
            found = sys.modules[name if fromlist else parts[0]]
        for wanted in fromlist or ():
            if wanted != "*" and not hasattr(found, wanted):
                setattr(found, wanted, stand_in(f"{name}.{wanted}"))
        return found

    builtins.__import__ = import_or_stand_in
    try:
        yield
    finally:
        builtins.__import__ = real
        for path in made:  # libraries that look whether others are here find none
            del sys.modules[path]


def _stand_in_module(path: str) -> types.ModuleType:
    module = types.ModuleType(path)
    module.__path__ = []

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{path}.{name}")

    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


# -- the support module that the files import ---------------------------------------------------


class _Block(torch.nn.ReLU):
    """A layer of any arguments, where a module takes a class of layers."""

    expansion = 1


class _Config(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


def _layer(in_features: Any = None, out_features: Any = None, *args: Any, **kwargs: Any) -> torch.nn.Module:
    return torch.nn.Linear(in_features, out_features, **kwargs) if in_features and out_features else _Block()


def _share_functional() -> None:
    """Some repositories use torch.functional and torch.nn.functional under one name: each gets what the other has."""
    one, other = torch.functional, torch.nn.functional
    names = {module: {n for n in dir(module) if n[0].islower()} for module in (one, other)}
    for source, target in ((one, other), (other, one)):
        for name in names[source] - names[target]:
            setattr(target, name, getattr(source, name))


def support() -> types.ModuleType:
    module = types.ModuleType(SUPPORT)
    module._mock_config = _Config  # type: ignore[attr-defined]
    module._mock_layer = _layer  # type: ignore[attr-defined]
    module.patch_functional = _share_functional  # type: ignore[attr-defined]
    module._paritybench_base = unittest.TestCase  # type: ignore[attr-defined]
    module._fails_compile = lambda: lambda test: test  # type: ignore[attr-defined]
    return module
