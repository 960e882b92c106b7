"""One version of a function, whole but for what the back end makes of its graph."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

from torch import fx

from primtorch.ambient import Ambient
from primtorch.frozen import record
from torchdynamo._C import GuardTree
from torchdynamo.emit.graph_inputs import GraphInput
from torchdynamo.guards.shape_guards import Symbols, shape_guards
from torchdynamo.schemas import GraphBreak, Guard


@record
class Emitted:
    """What becomes an entry of a compiled callable.

    Attributes:
        pinned: what the text and the guards hold, by place.
        inputs: of the graph.
        text: of the generated function.
        module: the name of the module that what the text calls last is called from.
        written: which of the inputs that the guards read the program writes to.
        states: what the graph switches.
        communicates: whether it holds collectives.
        programs: the program's code that this stands for, with its module.
        symbols: what is known of numbers that are known at each call alone.
        asked: how many relations of these are among the guards; what the back end asks comes behind.
        tree: of the guards, where they were asked already.
    """

    guards: tuple[Guard, ...]
    pinned: list[object]
    graph: fx.GraphModule | None
    inputs: list[GraphInput]
    text: str
    module: Any
    graph_break: GraphBreak | None
    written: tuple[int, ...]
    states: tuple[Ambient, ...]
    communicates: bool
    programs: tuple[tuple[str, types.CodeType], ...]
    symbols: Symbols
    asked: int
    tree: GuardTree | None = None

    def with_asked(self) -> Emitted:
        """The same, guarded by what the back end took for granted of numbers."""
        more = shape_guards(self.symbols, self.asked) if self.graph is not None else ()
        return replace(self, guards=self.guards + more, tree=None) if more else self
