"""Globals: read and written name by name, also where the program has a module's dict (`globals()`, `vars(module)`).

What asks such a dict for more than one name (its length, all its keys) breaks the graph: a guard would have to hold a
whole module still.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TypeGuard

from torchdynamo.outside.externals import Externals, is_trusted_module
from torchdynamo.outside.overlays import DELETED, MISSING, Overlays
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Global, InstanceAttribute, Item, Source

Namespace = dict[str, object]


class Namespaces:
    """The globals of modules, as one capture meets them.

    Args:
        function: the root function of the capture.

    Attributes:
        absent: names that modules which are taken as fixed lack.
    """

    def __init__(self, function: types.FunctionType, externals: Externals, overlays: Overlays) -> None:
        self.function = function
        self.externals = externals
        self.overlays = overlays
        self.absent: list[tuple[Namespace, str]] = []

    def get(self, namespace: Namespace, name: str) -> object:
        """The global `name`, or MISSING where there is none, which is guarded (then the builtins are asked)."""
        written = self.overlays.read(namespace, name, "global")
        if written is not MISSING:
            return MISSING if written is DELETED else written
        if name not in namespace:
            if is_trusted_module(str(namespace.get("__name__"))):
                self.absent.append((namespace, name))
            else:
                self.externals.guard(self.externals.pins.source(namespace, "globals"), GuardKind.KEY_ABSENT, name)
            return MISSING
        return self.externals.wrap(namespace[name], self._source(namespace, name))

    def _source(self, namespace: Namespace, name: str) -> Source:
        if namespace is self.function.__globals__:
            return Global(name)
        module = namespace.get("__name__")
        owner = sys.modules.get(module) if isinstance(module, str) else None
        if isinstance(module, str) and owner is not None and owner.__dict__ is namespace:
            if is_trusted_module(module):  # nobody puts another torch in its place
                return InstanceAttribute(self.externals.pins.source(owner, module), name)
            return Global(name, module)
        return Item(self.externals.pins.source(namespace, "globals"), name)

    def set(self, namespace: Namespace, name: str, value: object) -> None:
        """A write of a global, replayed behind the graph."""
        self._know(namespace)
        self.overlays.write(namespace, name, value, "global")

    def delete(self, namespace: Namespace, name: str) -> None:
        """A deletion of a global, replayed behind the graph."""
        self._know(namespace)
        self.overlays.write(namespace, name, DELETED, "global")

    def _know(self, namespace: Namespace) -> None:
        if self.externals.lookup(namespace) is None:
            source = self.externals.pins.source(namespace, "globals")
            known = self.externals._register(namespace, source, namespace)
            self.externals.opaque[id(namespace)] = known  # it lacks what was written: a look into it is a break

    # -- as a dict that the program has ------------------------------------------------------

    def is_one(self, value: object) -> TypeGuard[Namespace]:
        """Whether a value is a module's dict."""
        return type(value) is dict and id(value) in self.externals.opaque and "__builtins__" in value

    def holds(self, value: object, name: str) -> TypeGuard[Namespace]:
        """Whether `value[name]` is a global."""
        return type(value) is dict and name != "__builtins__" and self.is_one(value)

    def item(self, namespace: Namespace, name: str) -> object:
        """`namespace[name]`. Raises KeyError."""
        found = self.get(namespace, name)
        if found is MISSING:
            raise KeyError(name)
        return found

    def pop(self, namespace: Namespace, name: str, *default: object) -> object:
        """`namespace.pop(name, *default)`. Raises KeyError."""
        found = self.get(namespace, name) if default else self.item(namespace, name)
        if found is MISSING:
            return default[0]
        self.delete(namespace, name)
        return found

    def _get(self, namespace: Namespace, name: str, default: object = None) -> object:
        found = self.get(namespace, name)
        return default if found is MISSING else found

    def _set_default(self, namespace: Namespace, name: str, default: object = None) -> object:
        found = self.get(namespace, name)
        if found is MISSING:
            self.set(namespace, name, default)
            return default
        return found

    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A dict's method that asks a namespace for one name, or gives it some by keywords; MISSING for any other."""
        if type(fn) is types.BuiltinFunctionType:
            args = (fn.__self__, *args)
        if not args or not self.is_one(args[0]) or getattr(fn, "__objclass__", dict) is not dict:
            return MISSING
        name = getattr(fn, "__name__", "")
        if name == "update" and len(args) == 1 and "__builtins__" not in kwargs:
            for key, value in kwargs.items():
                self.set(args[0], key, value)
            return None
        if kwargs or not 2 <= len(args) <= 3 or type(args[1]) is not str or not self.holds(args[0], args[1]):
            return MISSING
        rule = _METHODS.get(name)
        return MISSING if rule is None else rule(self, *args)


_METHODS: dict[str, Callable[..., object]] = {
    "get": Namespaces._get,
    "setdefault": Namespaces._set_default,
    "pop": Namespaces.pop,
    "__getitem__": Namespaces.item,
}
