"""Sources as a reader of guards says them: `self.encoder.weight`, not the dictionary look-ups that are really done."""

from __future__ import annotations

from dataclasses import replace

from torchdynamo.sources import Argument, ClosureCell, Global, InstanceAttribute, Item, Pinned, Source

_MEMBERS = frozenset({"_modules", "_parameters", "_buffers"})


def source_text(source: Source) -> str:
    """Short and unambiguous to a person; `Source.expression()` is what generated code evaluates."""
    match source:
        case Argument(name=name):
            return name
        case Global(name=name, module=module):
            return f"global {name}" if module is None else f"{module}.{name}"
        case ClosureCell(name=name):
            return f"nonlocal {name}"
        case Pinned(label=label):
            return label
        case Item(base=InstanceAttribute(base=owner, name=kind), key=str(key)) if kind in _MEMBERS:
            return f"{source_text(owner)}.{key}"
        case InstanceAttribute(base=owner, name=name):
            return f"{source_text(owner)}.{name}"
    record = source
    if not hasattr(record, "base"):
        return source.expression()
    return str(replace(record, base=Argument(0, source_text(record.base))).expression())
