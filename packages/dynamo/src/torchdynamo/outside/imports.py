"""Imports by the captured program. Of what is loaded they are reads; anything else breaks the graph and runs for real.

A module's code makes modules, classes and tables, once in a process and behind what the program did before: it is never
captured, and never run by capture.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdynamo.interpreter.opcodes_calls import submodule
from torchdynamo.interpreter.protocol import MISSING
from torchdynamo.outside.externals import Externals
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Item

# Files of the functions that every import of a module goes through, whoever asks for it.
_MACHINERY = frozenset({"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"})
_LABEL = "imported"
BUILTIN: Any = builtins.__import__


def is_import_machinery(code: types.CodeType) -> bool:
    """Whether code belongs to what finds and runs modules: what runs below it is an import."""
    return code.co_filename in _MACHINERY


def is_import(function: object) -> bool:
    """Whether a call of the function imports."""
    function = getattr(function, "__func__", function)
    if function is BUILTIN:
        return True
    module = getattr(function, "__module__", None) if isinstance(function, types.FunctionType) else None
    return module in _IMPORTERS or (module or "").startswith(("importlib.", "_frozen_importlib"))


_IMPORTERS = frozenset({"importlib", "pkgutil", "runpy"})


def absolute_name(name: str, namespace: Mapping[str, Any], level: int) -> str | None:
    """The name of the module that is meant, or None where this cannot be told."""
    if level == 0:
        return name
    package = namespace.get("__package__")
    if package is None:
        own = namespace.get("__name__")
        package = own if "__path__" in namespace else str(own).rpartition(".")[0]
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except (ImportError, TypeError, ValueError):
        return None


def loaded(name: str | None) -> types.ModuleType | None:
    """A module whose code has run to its end."""
    module = sys.modules.get(name) if name is not None else None
    if not isinstance(module, types.ModuleType) or getattr(module.__spec__, "_initializing", False):
        return None
    return module


def missing(name: str, namespace: Mapping[str, object], fromlist: Sequence[str] | None, level: int) -> str | None:
    """The first module that `__import__` would have to load, as far as this can be told."""
    absolute = absolute_name(name, namespace, level)
    module = loaded(absolute)
    if module is None or absolute is None:
        return absolute
    if "__path__" not in vars(module):
        return None  # no package: what is missing raises
    submodules = (f"{absolute}.{item}" for item in fromlist or () if item not in vars(module))
    return next((item for item in submodules if loaded(item) is None), None)


def captured(
    externals: Externals,
    has: Callable[[types.ModuleType, str], bool],
    name: str,
    namespace: Mapping[str, object],
    fromlist: Sequence[str] | None,
    level: int,
) -> types.ModuleType:
    """What `__import__` gives the captured program; `has` asks for a module's attribute as the program would."""
    if builtins.__import__ is not BUILTIN:
        raise BreakGraph("import", f"import of {name} by what stands for builtins.__import__")
    absolute = absolute_name(name, namespace, level)
    module = loaded(absolute)
    if module is None or absolute is None:
        if absolute is not None and not is_installed(absolute):
            externals.unkept = f"{absolute} is not installed"
            guard_absent(externals, absolute)
            missing_module: types.ModuleType = BUILTIN(name, namespace, None, fromlist, level)  # raises
            return missing_module
        raise BreakGraph("import", f"import of {absolute or name}")
    read(externals, module, absolute)
    if not fromlist:
        top, _, rest = name.partition(".")
        package = loaded(top) if rest else module
        if level or package is None:
            raise BreakGraph("import", f"import of {absolute}")
        return read(externals, package, top)
    for item in fromlist if "__path__" in vars(module) else ():
        known = item in vars(module) or loaded(f"{absolute}.{item}") is not None
        if item == "*" or not (known or has(module, item)):
            raise BreakGraph("import", f"import of {absolute}.{item}")
    return module


def is_installed(name: str) -> bool:
    """Whether there is a package of this name, or of the name's first part."""
    top = name.partition(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None


def read(externals: Externals, module: types.ModuleType, name: str) -> types.ModuleType:
    """The module that is loaded under a name, guarded."""
    source = Item(externals.pins.source(sys.modules, _LABEL), name)
    loaded_module: types.ModuleType = externals.wrap(module, source)
    return loaded_module


def guard_absent(externals: Externals, name: str | None) -> None:
    """What breaks the graph since a module is not loaded is compiled anew when it is."""
    if name is not None and name not in sys.modules:
        externals.guard(externals.pins.source(sys.modules, _LABEL), GuardKind.KEY_ABSENT, name)


def import_from(module: object, name: str) -> object:
    """`from module import name`, once `module` is there."""
    found = getattr(module, name, MISSING)
    return submodule(module, name) if found is MISSING else found
