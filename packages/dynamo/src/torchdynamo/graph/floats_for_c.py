"""Floats that differ between calls, where C code looks at them: `json.dumps({"loss": loss})`, `Decimal(loss)`.

C code that no rule is known of needs a float's value. A guard on it would fail at the next call, and each call would be
compiled anew: the graph ends at the call that looks instead, which is given the float as it is then. Sizes, whole
numbers, and floats that are compared, are guarded: programs have few of them, or few outcomes.

The graph does not end there while it holds the body of another operator, and where breaks are errors; there the value
is guarded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from primtorch.errors import DataDependent
from primtorch.symbolic import ShapeEnv
from primtorch.symbolic.relation import FloatRelation
from primtorch.symbolic.sym_node import SymNode
from torchdynamo.graph.run_time_texts import RunTimeText, parts_of
from torchdynamo.reasons import BreakGraph


class FloatsForC:
    """Those of one capture.

    Args:
        guarded: their values are guarded; no graph ends for their sake.
        nested: whether the graph holds the body of another operator now.
    """

    def __init__(self, env: ShapeEnv, guarded: bool, nested: Callable[[], bool]) -> None:
        self.env = env
        self.guarded = guarded
        self.nested = nested

    @contextmanager
    def looked_at(self, function: object) -> Iterator[None]:
        """C code runs. Ends the graph before it where it fixes a float, or cannot tell without its value."""
        known = len(self.env.guards)
        try:
            yield
        except DataDependent as error:
            self._end(function, error.symbols)
            raise
        for guard in self.env.guards[known:]:
            if isinstance(guard.expr, FloatRelation) and guard.expr.op == "same":
                self._end(function, guard.expr.symbols())

    def need(self, function: object, *values: object) -> None:
        """C code needs what is in tuples, lists and dicts as it is: ends the graph before it if a float is there."""
        for part in parts_of(values):
            self._end(function, _symbols(part))

    def need_texts(self, function: object, *values: object) -> None:
        """The same of texts alone, and of rounded floats. Other texts are asked for (TextNeeded)."""
        for part in parts_of(values):
            if isinstance(part, RunTimeText):
                self._end(function, _symbols(part))
                part.need()

    def _end(self, function: object, symbols: Collection[str]) -> None:
        if self.guarded or not self._of_floats(symbols) or self.nested():
            return
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise BreakGraph("float_of_each_call", f"call of {name}")

    def _of_floats(self, symbols: Collection[str]) -> bool:
        """Whether these come down to a float that the program is given, or takes out of a tensor."""
        roots = self.env.roots(set(symbols)) if symbols else ()
        return any(isinstance(self.env.named(name), torch.SymFloat) for name in roots)


def _symbols(value: object) -> set[str]:
    """The symbols of a float, or of the floats in a text."""
    if isinstance(value, RunTimeText):
        return set().union(*map(_symbols, value.args))
    if isinstance(value, torch.SymFloat) and isinstance(value.node, SymNode):
        return set(value.node.expr.symbols())
    return set()
