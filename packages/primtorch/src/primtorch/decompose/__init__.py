"""Rules that rewrite ATen overloads into an opset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.builder import Builder, Results, Value
from primtorch.errors import IncompleteOperator
from primtorch.families import Rule, operators
from primtorch.prims import PRIMS, Prim
from primtorch.prims.record import FormulaOf

__all__ = ["Builder", "Opset", "Results", "Rule", "TakenWhole", "Value", "decompositions"]

Opset: TypeAlias = Literal["prims", "core_aten"]


@dataclass(frozen=True)
class TakenWhole:
    """The rule of an operator that is a prim with the same arguments and results."""

    prim: Prim

    def __call__(self, b: Builder, *args: object, **kwargs: object) -> object:
        return b.call(self.prim, args, kwargs)


@lru_cache(maxsize=1)
def _all_rules() -> Mapping[OpOverload, Rule]:
    """Made by the first lowering: finding an overload by its name takes torch tens of microseconds.

    Raises:
        IncompleteOperator: a record lacks what it needs.
    """
    known, rules = operators(), dict[OpOverload, Rule]()
    for operator in known.values():
        if operator.rule is None:
            continue
        overload = operator.overload
        if overload is not None:
            rules[overload] = operator.rule
        elif not operator.optional:
            raise IncompleteOperator(
                operator.name, "torch has no such overload", 'a name that ends in "?" need not exist'
            )
    for prim in PRIMS.values():
        if isinstance(prim.meta, FormulaOf) and getattr(known.get(prim.meta.operator), "formula", None) is None:
            needed = f"prims.{prim.name} is this operator whole, and its meta is the operator's formula"
            raise IncompleteOperator(prim.meta.operator, "it has no formula", needed)
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
