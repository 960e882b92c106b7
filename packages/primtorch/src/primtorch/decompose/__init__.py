"""Rules that rewrite ATen overloads into an opset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.decompose.builder import Builder, Results, Value
from primtorch.decompose.table import Rule, RuleTable
from primtorch.prims import PRIMS, Prim

__all__ = ["Builder", "Opset", "Results", "Rule", "TakenWhole", "Value", "decompositions"]

Opset: TypeAlias = Literal["prims", "core_aten"]
_FAMILIES = (
    "pointwise",
    "activations",
    "losses",
    "shapes",
    "padding",
    "copies",
    "creation",
    "reductions",
    "normalization",
    "gather",
    "windows",
    "sliding",
    "resampling",
    "linalg",
    "sampling",
    "legacy",
)
"""Modules with a table of rules, loaded by the first lowering: `import primtorch` is for fakes and sizes too."""


@dataclass(frozen=True)
class TakenWhole:
    """The rule of an operator that is a prim with the same arguments and results."""

    prim: Prim

    def __call__(self, b: Builder, *args: Any, **kwargs: Any) -> Any:
        return b.emit(self.prim, *args, **kwargs)


@lru_cache(maxsize=1)
def _all_rules() -> Mapping[OpOverload, Rule]:
    rules = RuleTable()
    for family in _FAMILIES:
        for overload, rule in import_module(f"primtorch.decompose.{family}").RULES.items():
            rules.add(overload, rule)
    for prim in PRIMS.values():
        if prim.aten is not None and prim.aten not in rules:
            rules.add(prim.aten, TakenWhole(prim))
    return MappingProxyType(rules)


# Overloads whose rule leaves some of their calls as they are: a bitcast between widths.
WHOLE_IN_PART = frozenset({torch.ops.aten.view.dtype})


def decompositions(opset: Opset = "prims", preserve: Sequence[OpOverload] = ()) -> Mapping[OpOverload, Rule]:
    """The rules into `opset`: rule(builder, *args, **kwargs) computes on `Value`s.

    Args:
        opset: "prims", or "core_aten", whose own operators need no rule.
        preserve: overloads to keep whole.

    Raises:
        ValueError: an unknown opset.
    """
    if opset not in ("prims", "core_aten"):
        raise ValueError(f"unknown opset {opset!r}; known: 'prims', 'core_aten'")
    rules = _all_rules()
    if opset == "core_aten":
        return {op: rule for op, rule in rules.items() if torch.Tag.core not in op.tags and op not in preserve}
    return {op: rule for op, rule in rules.items() if op not in preserve} if preserve else rules
