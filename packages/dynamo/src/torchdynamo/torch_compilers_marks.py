"""What users told torch.compile, and capture follows as well: marks on functions and sizes, and the stance.

torch keeps these in modules of its compiler, which it loads when the first of them is made. They are read where they
are loaded, and not loaded for this.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch


def allowed_in_graph(function: object) -> bool:
    """Whether `torch.compiler.allow_in_graph` marked a function."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and id(function) in getattr(rules, "_allowed_callable_ids", ())


def stance() -> str:
    """What `torch.compiler.set_stance` says at present."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return str(getattr(getattr(module, "_stance", None), "stance", "default"))


def sizes(tensor: torch.Tensor) -> Iterator[tuple[str, int, int | None, int | None]]:
    """("dynamic", "maybe dynamic" or "static"; the dimension; the least and the largest size that was promised)."""
    held = tensor.__dict__
    ranges = {r.dim: (r.min, r.max) for r in held.get("_dynamo_dynamic_range", ())}
    for kind, names in _INDICES.items():
        for name in names:
            indices: Collection[int] = held.get(name, ())
            yield from ((kind, index, *ranges.get(index, (None, None))) for index in indices)


# Attributes that `torch.compiler.nested_compile_region` leaves on the function that it wraps, the same at each call.
OF_REGIONS = frozenset(f"__marked_compile_region_{name}__" for name in ("config", "max_reuse_entries", "reuse_hash_fn"))
_INDICES = {
    "static": ("_dynamo_static_indices",),
    "maybe dynamic": ("_dynamo_weak_dynamic_indices",),
    "dynamic": ("_dynamo_unbacked_indices", "_dynamo_dynamic_indices"),
}


def dimension(asked: Any) -> tuple[str, int | None, int | None] | None:
    """(name, least size, largest size) of a `torch.export.Dim`, None for anything else."""
    kind = type(asked)
    if (kind.__module__, kind.__name__) != ("torch.export.dynamic_shapes", "Dim"):
        return None
    return asked.__name__, asked.min if asked.min > 1 else None, asked.max if type(asked.max) is int else None
