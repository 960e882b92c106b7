"""What is traced or compiled after capture, for symbolic sizes: it asks guards that no call has been checked for.

Capture guards what tracing asks of sizes before the call that it serves. A derivative of the backward, and a backward
itself, are made when they are needed first: what is asked then holds for what is made then, is checked at each use,
and where it does not hold, the same is made again for the sizes at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import fx

from aotautograd.events import tell_other_sizes
from aotautograd.schemas import Compiled, Compiler
from primtorch import forks
from primtorch.frozen import record
from primtorch.symbolic import ShapeEnv, ShapeGuard, TakenForGranted, expr_of, float_expr_of

MadeT = TypeVar("MadeT")
Sizes = Mapping[str, int | float]
MOST_SIZES = 32  # for which one thing is kept; the oldest is made again


@record
class _Made(Generic[MadeT]):
    guards: tuple[ShapeGuard, ...]
    sizes: Sizes
    value: MadeT

    def holds(self, sizes: Sizes, env: ShapeEnv) -> bool:
        if not self.guards or sizes == self.sizes:
            return True
        known = env.with_derived(sizes)
        return all(g.expr.symbols() <= known.keys() and g.expr.evaluate(known) for g in self.guards)  # type: ignore[arg-type]


class Taken:
    """What is taken for granted where something is prepared that is made later: in a trial, what that has asked.

    Args:
        env: of the symbols; None where there are none.
    """

    def __init__(self, env: ShapeEnv | None) -> None:
        self.env = env
        known = env.taken if env is not None else TakenForGranted((), (), {})
        self.guards, self.facts, self.values = known

    def hints(self) -> Sizes:
        """Values of the symbols for which it was prepared."""
        assert self.env is not None
        return {name: info.hint for name, info in self.env.symbols.items() if info.hint is not None} | dict(self.values)


class ForSizes(Generic[MadeT]):
    """One thing that is made after capture, once for all sizes or, where making it asks guards, as often as needed.

    Args:
        what: names it in the ledger.
    """

    def __init__(self, taken: Taken, what: str) -> None:
        self.taken = taken
        self.env = taken.env
        self.what = what
        self.lock = forks.rlock()
        self.made: list[_Made[MadeT]] = []

    def __call__(self, sizes: Sizes, make: Callable[[], MadeT]) -> MadeT:
        """What serves these values of the symbols, made by `make` where nothing does yet."""
        with self.lock:
            for made in self.made:
                if self.env is None or made.holds(sizes, self.env):
                    return made.value
            if self.env is None:
                self.made.append(_Made((), {}, make()))
                return self.made[-1].value
            if self.made:
                tell_other_sizes(self.what, _first_broken(self.made[-1], self.env.with_derived(sizes)))
            known = tuple(self.taken.guards)
            with self.env.trial(sizes, known, self.taken.facts) as asked:
                value = make()
            self.made = [*self.made[1 - MOST_SIZES :], _Made(tuple(asked[len(known) :]), dict(sizes), value)]
            return value

    @property
    def for_all(self) -> bool:
        """Whether what was made holds for all sizes that capture lets through."""
        return all(not made.guards for made in self.made)


def _first_broken(made: _Made[MadeT], known: Sizes) -> str:
    for guard in made.guards:
        if not (guard.expr.symbols() <= known.keys() and guard.expr.evaluate(known)):  # type: ignore[arg-type]
            return str(guard)
    return ""


def sizes_given(module: fx.GraphModule, values: Sequence[object]) -> dict[str, int | float]:
    """The values of a graph's symbols in what its placeholders, or the first of them, are given."""
    found: dict[str, int | float] = {}
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=False):
        symbol = node.meta.get("val")
        if isinstance(value, (int, float)) and isinstance(symbol, (torch.SymInt, torch.SymFloat)):
            found[str(expr_of(symbol) if isinstance(symbol, torch.SymInt) else float_expr_of(symbol))] = value
    return found


def compiled_later(compiler: Compiler, taken: Taken, what: str) -> Compiler:
    """A compiler for graphs that are compiled after capture; `what` names them in the ledger."""

    def compile_graph(module: fx.GraphModule, inputs: list[object]) -> Compiled:
        if taken.env is None:
            return compiler(module, inputs)
        made: ForSizes[Compiled] = ForSizes(taken, what)
        first = made(taken.hints(), lambda: compiler(module, inputs))
        if made.for_all:
            return first

        def call(*values: object) -> Sequence[object]:
            run = made(sizes_given(module, values), lambda: compiler(module, inputs))
            return run(list(values)) if getattr(run, "_boxed_call", False) else run(*values)

        return call

    return compile_graph
