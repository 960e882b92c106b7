"""What goes on behind a break, by names: the continuations that a generated function enters, and what finds the
functions that are called for real."""

from __future__ import annotations

import sys
import types

from torchdynamo.after_break.break_step import Hooked
from torchdynamo.after_break.resume import Entrance, Entry, StackSlot
from torchdynamo.emit.forms import plain_world
from torchdynamo.function import Nested
from torchdynamo.interpreter import PlainWorld
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.names import Finder, Namer
from torchdynamo.kept.rows import Row

# Objects of this package's own that say nothing to `Contents`, by the places where they are.
_OWN = (("torchdynamo.after_break.place", "_pass_on"), ("torchdynamo.after_break.steps", "_END"))


class Continuations:
    """Names of what the parts of one program have in common: see `names.Special`."""

    def __init__(self, nested: Nested) -> None:
        self.nested = nested

    def row(self, obj: object, namer: Namer) -> Row | None:
        """The row of such an object; None for any other."""
        if obj is self.nested.hook:
            return ["hook"]
        if isinstance(obj, Hooked):
            return ["hooked", namer.place(obj.entry)]
        if type(obj) is PlainWorld:
            return ["world"]
        for module, name in _OWN:
            if vars(sys.modules[module]).get(name) is obj:
                return ["own", module, name]
        found = self.nested.continuation(obj)
        if found is None:
            return None
        function, entrance = found.function, found.entrance
        slots = [slot.value for slot in entrance.stack]
        return [
            "continuation", namer.code(function.__code__, function.__module__), namer.place(function.__globals__),
            [function.__name__, function.__qualname__, function.__module__],
            [entrance.offset, slots, list(entrance.locals), entrance.entry.value, entrance.at],
            found.compiled, [namer.place(plain) for plain in found.within],
        ]  # fmt: skip

    def found(self, row: Row, finder: Finder) -> object:
        """This process's object of a row."""
        match row:
            case ["hook"]:
                return self.nested.hook
            case ["world"]:
                return plain_world()
            case ["hooked", entry]:
                return Hooked(self.nested.hook, finder.objects[entry])
            case ["own", module, name] if (module, name) in _OWN:
                return vars(sys.modules[module])[name]
            case ["continuation", [place, way], space, names, [offset, slots, variables, entry, at], compiled, within]:
                function = _bare(finder.code(place, way), finder.objects[space], *names)
                stack = tuple(map(StackSlot, slots))
                entrance = Entrance(offset, stack, tuple(variables), Entry(entry), at)
                inside = tuple(finder.objects[plain] for plain in within)
                return self.nested.resume(function, entrance, compiled, inside, ())
        raise NotKept(f"nothing goes by {row!r}")


def _bare(
    code: types.CodeType, space: dict[str, object], name: str, qualname: str, module: str | None
) -> types.FunctionType:
    """A function as its continuations know it: with cells of its own, of which nobody reads one."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = types.FunctionType(code, space, name, None, cells or None)
    function.__qualname__, function.__module__ = qualname, module  # type: ignore[assignment]
    return function
