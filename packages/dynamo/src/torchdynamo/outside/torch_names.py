"""Names of torch's that are read where capture does not see it, guarded: a program may replace what stands for them.

They are the attributes of tensors' classes, which C code finds, and what the code of torch's own functions finds in
torch's modules (`torch._C._nn.linear`, `_in_projection`): capture runs these as they are, and a back end may again.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator

import torch

from torchdynamo.graph.torch_functions import is_leaf
from torchdynamo.outside.externals import Externals
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import InstanceAttribute

# Replaced in a module these may be another function tomorrow; what else stands for a name there is data.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


class TorchNames:
    """The guards of one capture."""

    def __init__(self, externals: Externals) -> None:
        self.externals = externals
        self._attributes: set[tuple[type, str]] = set()
        self._leaves: set[types.FunctionType] = set()

    def of_tensor(self, kind: type, name: str) -> None:
        """The program uses an attribute of a tensor of this class."""
        if (kind, name) in self._attributes:
            return
        self._attributes.add((kind, name))
        for klass in kind.__mro__[: kind.__mro__.index(torch.Tensor) + 1]:
            source = self.externals.class_source(klass)
            if name in vars(klass):
                self.externals.guard(InstanceAttribute(source, name), GuardKind.IDENTITY, vars(klass)[name])
                return
            self.externals.guard(source, GuardKind.INSTANCE_LACKS, name)

    def of_leaf(self, function: types.FunctionType) -> None:
        """A function of torch runs as it is."""
        if function in self._leaves:
            return
        self._leaves.add(function)
        for module, name, found in _names(function):
            source = InstanceAttribute(self.externals.pins.source(module, module.__name__), name)
            self.externals.guard(source, GuardKind.IDENTITY, found)
            if isinstance(found, types.FunctionType) and is_leaf(found):
                self.of_leaf(found)


def _names(function: types.FunctionType) -> Iterator[tuple[types.ModuleType, str, object]]:
    """(module, name, what stands for it there), for the function's own code and functions in its closure."""
    todo, seen = [function], set()
    while todo:
        function = todo.pop()
        seen.add(function)
        module = _module_of(function)
        for path in _paths(function.__code__) if module is not None else ():
            yield from _steps(module, path)
        for cell in function.__closure__ or ():
            held = cell.cell_contents if cell != types.CellType() else None
            if isinstance(held, types.FunctionType) and held not in seen:
                todo.append(held)


def _module_of(function: types.FunctionType) -> types.ModuleType | None:
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    return module if module is not None and module.__dict__ is function.__globals__ else None


def _steps(module: types.ModuleType | None, path: tuple[str, ...]) -> Iterator[tuple[types.ModuleType, str, object]]:
    """The modules that a path leads through, and the function at its end."""
    found: list[tuple[types.ModuleType, str, object]] = []
    for name in path:
        if not isinstance(module, types.ModuleType) or name not in vars(module):
            return
        value = vars(module)[name]
        found.append((module, name, value))
        if isinstance(value, _FUNCTIONS):
            yield from found
            return
        module = value


@functools.lru_cache(1024)
def _paths(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Global names of the code in its order, each with the attributes that are read of it at once."""
    paths: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            paths[path] = None
            path = (instruction.argval,)
        elif path and instruction.opname in _ATTRIBUTES:
            path = (*path, instruction.argval)
        else:
            paths[path] = None
            path = ()
    return tuple(path for path in paths if path)
