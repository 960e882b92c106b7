"""The graph's node for each symbol of a capture."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from primtorch.symbolic import ShapeEnv
from torchdynamo.sources import Source


class SymbolNodes(dict[str, fx.Node]):
    """The node of each symbol. One that follows from numbers known before the graph runs becomes an input when a node
    needs it; one that depends on data has no node of its own, and is computed in the graph."""

    def __init__(self, env: ShapeEnv, sources: dict[str, Source], make: Callable[[str], fx.Node]) -> None:
        super().__init__()
        self.env = env
        self.sources = sources
        self.make = make

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._computable(str(name))

    def __missing__(self, name: str) -> fx.Node:
        if not self._computable(name):
            raise KeyError(name)
        node = self[name] = self.make(name)
        return node

    def _computable(self, name: str) -> bool:
        return name in self.env.definitions and self.env.roots({name}) <= self.sources.keys()
