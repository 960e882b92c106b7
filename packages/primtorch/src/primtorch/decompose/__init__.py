"""Rules that rewrite ATen overloads into an opset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.builder import Builder, Results, Value
from primtorch.families import Rule, operators
from primtorch.prims import PRIMS, Prim

__all__ = ["Builder", "Opset", "Results", "Rule", "TakenWhole", "Value", "decompositions"]

Opset: TypeAlias = Literal["prims", "core_aten"]


@dataclass(frozen=True)
class TakenWhole:
    """The rule of an operator that is a prim with the same arguments and results."""

    prim: Prim

    def __call__(self, b: Builder, *args: Any, **kwargs: Any) -> Any:
        return b.emit(self.prim, *args, **kwargs)


@lru_cache(maxsize=1)
def _all_rules() -> Mapping[OpOverload, Rule]:
    """Found by the first lowering: looking up an overload by its name takes torch tens of microseconds."""
    rules: dict[OpOverload, Rule] = {}
    for operator in operators().values():
        overload = operator.overload if operator.rule is not None else None
        if overload is not None and operator.rule is not None:
            rules[overload] = operator.rule
    for prim in PRIMS.values():
        if prim.aten is not None:
            rules.setdefault(prim.aten, TakenWhole(prim))
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
