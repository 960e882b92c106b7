"""What a back end declares of itself, so that it can share graphs with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from primtorch.prims import PRIMS, Prim
from torchcompile.errors import InvalidArgument, unknown

Stage = Literal["aten", "prims"]
Supports = Callable[[fx.Node], bool] | Collection[object]
Cost = Callable[[fx.Node], float] | float


@dataclass(frozen=True, slots=True)
class Capability:
    """What a back end takes of a graph, and at which price. Frozen: it holds for as long as the back end is registered.

    Attributes:
        supports: a predicate on nodes of the stage's graphs, or operators: prims or their names at "prims"; overloads,
            packets (all overloads) or names ("mm", "aten::mm", "aten::add.Tensor") at either stage. A prim's name means
            the prim at "prims". A predicate is asked of every node once for each graph, views and random draws too.
        cost: of one operator, in any unit that the back ends of a mixture share: a number, or a function of the node.
            An operator goes to the back end that takes it at the least; among equals to the one that is named first.
        border: what one piece costs beside its operators (a launch, a transfer), in the same unit. A piece that saves
            less than this against the next back end goes to that one.
        minimum: the fewest operators that are worth a piece; views do not count. A smaller one goes to the next back
            end that takes all of it.
        stage: the graphs that it takes. "prims": closed under the prims, and operators that have no rule. "aten": ATen
            overloads. Both are functional (nothing is written in place) and come as forward and backward.
    """

    supports: Supports
    cost: Cost = 1.0
    border: float = 0.0
    minimum: int = 1
    stage: Stage = "prims"

    def __post_init__(self) -> None:
        if self.stage not in ("aten", "prims"):
            raise unknown("stage", self.stage, ("aten", "prims"))
        if (not callable(self.cost) and not _is_price(self.cost)) or not _is_price(self.border):
            raise InvalidArgument(f"cost and border are numbers from 0 on, not {self.cost!r} and {self.border!r}")
        if type(self.minimum) is not int or self.minimum < 1:
            raise InvalidArgument(f"minimum is a number of operators from 1 on, not {self.minimum!r}")
        if not callable(self.supports):
            if isinstance(self.supports, str) or not isinstance(self.supports, Collection):
                raise InvalidArgument(f"supports is a predicate on nodes or a set of operators, not {self.supports!r}")
            targets = frozenset(target for item in self.supports for target in _targets(item, self.stage))
            object.__setattr__(self, "supports", targets)

    def takes(self, node: fx.Node) -> bool:
        """Whether the back end computes this node's operator."""
        if callable(self.supports):
            return bool(self.supports(node))
        return node.target in self.supports

    def cost_of(self, node: fx.Node) -> float:
        """What the back end says a node costs it, in the unit in which all back ends of one graph say it."""
        return float(self.cost(node)) if callable(self.cost) else float(self.cost)


def everything(node: fx.Node) -> bool:
    """What this stack's own back ends support."""
    return True


def _is_price(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _targets(item: object, stage: Stage) -> Iterator[object]:
    """The targets of nodes that an item of `supports` names."""
    if isinstance(item, str):
        yield from _named(item, stage)
    elif isinstance(item, OpOverloadPacket):
        yield from (getattr(item, name) for name in item.overloads())
    elif isinstance(item, OpOverload) or (isinstance(item, Prim) and stage == "prims"):
        yield item
    else:
        raise InvalidArgument(f"supports takes operators of stage {stage!r}, by themselves or by name, not {item!r}")


def _named(name: str, stage: Stage) -> Iterator[object]:
    if stage == "prims" and name in PRIMS:
        yield PRIMS[name]
        return
    path = name.replace("::", ".").split(".")
    spaces = [path] if "::" in name or len(path) > 2 else [["aten", *path], path]
    for steps in spaces:
        try:
            found = functools.reduce(getattr, steps, torch.ops)
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, (OpOverload, OpOverloadPacket)):
            yield from _targets(found, stage)
            return
    raise unknown("operator", name, PRIMS if stage == "prims" else dir(torch.ops.aten))
