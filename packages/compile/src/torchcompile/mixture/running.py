"""Runs a graph in pieces, each by its own back end, and holds what a stranger's gives to what the graph says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from primtorch.frozen import record
from primtorch.memory import memory_of
from primtorch.symbolic import expr_of
from primtorch.symbolic.expr import IntExpr
from torchcompile.errors import CompileError
from torchcompile.mixture.pieces import Part

Run = Callable[..., Sequence[object]]


class WrongPiece(CompileError):
    """What a back end gave for a piece is not what the graph says: another number of results, shape or dtype."""


@record
class Step:
    """One piece of a program.

    Attributes:
        takes, gives: slots.
        last: places among `takes` whose values nobody reads after this.
        boxed: takes one list of its inputs, which it empties.
    """

    run: Run
    boxed: bool
    takes: tuple[int, ...]
    last: tuple[int, ...]
    gives: tuple[int, ...]


class MixedGraph:
    """A graph's pieces one after the other; a value is freed after its last use. It empties the list of its inputs."""

    _boxed_call = True

    def __init__(self, gm: fx.GraphModule, parts: Sequence[tuple[Part, Run]]) -> None:
        slots = {node: slot for slot, node in enumerate(n for n in gm.graph.nodes if n.op != "output")}
        (end,) = gm.graph.find_nodes(op="output")
        results = end.args[0]
        assert isinstance(results, (tuple, list))
        self.placeholders = tuple(slots[n] for n in gm.graph.nodes if n.op == "placeholder")
        self.constants = tuple(
            (slots[n], getattr(gm, str(n.target)))
            for n in gm.graph.find_nodes(op="get_attr", sort=True)
            if n in end.all_input_nodes
        )
        self.results = tuple((slots[r], None) if isinstance(r, fx.Node) else (-1, r) for r in results)
        self.slots = len(slots)
        used = set(end.all_input_nodes)
        steps: list[Step] = []
        for part, run in reversed(parts):
            last = tuple(place for place, node in enumerate(part.takes) if node not in used)
            used.update(part.takes)
            takes, gives = (tuple(slots[n] for n in nodes) for nodes in (part.takes, part.gives))
            steps.append(Step(run, bool(getattr(run, "_boxed_call", False)), takes, last, gives))
        self.steps = tuple(reversed(steps))

    def __call__(self, inputs: list[object]) -> Sequence[object]:
        values: list[object] = [None] * self.slots
        for slot, value in zip(self.placeholders, inputs, strict=True):
            values[slot] = value
            del value  # nothing here holds an input that nobody reads any more
        inputs.clear()
        for slot, value in self.constants:
            values[slot] = value
        with torch._C._DisableAutocast():
            for step in self.steps:
                _take(step, values)
        return [values[slot] if slot >= 0 else constant for slot, constant in self.results]


def _take(step: Step, values: list[object]) -> None:
    given = [values[slot] for slot in step.takes]
    for place in step.last:
        values[step.takes[place]] = None
    made = step.run(given) if step.boxed else step.run(*given)
    for slot, value in zip(step.gives, made, strict=True):
        values[slot] = value


@record
class _Expected:
    """What the graph says of a result. `owner`: the node of the piece in whose memory it lies, None if it is given."""

    node: fx.Node
    shape: tuple[IntExpr, ...]
    strides: tuple[IntExpr, ...]
    owner: fx.Node | None


class HeldToGraph:
    """A stranger's piece. Its results have to be what the graph says; where merely their order in memory is another, or
    two of them are one memory that are two in the graph, a copy mends it, and `tell` is called with what it was."""

    _boxed_call = True

    def __init__(self, who: str, part: Part, run: Run, tell: Callable[[str], None]) -> None:
        self.who = who
        self.run = run
        self.boxed = bool(getattr(run, "_boxed_call", False))
        self.tell = tell
        given = (node.meta.get("val") for node in part.takes)
        self.symbols = tuple(str(expr_of(v)) if isinstance(v, torch.SymInt) else "" for v in given)
        (end,) = part.module.graph.find_nodes(op="output")
        self.expected = tuple(map(_expected, part.gives, map(memory_of, end.all_input_nodes)))

    def __call__(self, inputs: list[Any]) -> list[object]:
        sizes = {symbol: value for symbol, value in zip(self.symbols, inputs, strict=True) if symbol}
        memory: dict[int, fx.Node | None] = {}
        if not self.boxed:  # else what it has freed may be given again, as memory of its own
            memory = {value.untyped_storage()._cdata: None for value in inputs if isinstance(value, torch.Tensor)}
        results = list(self.run(inputs) if self.boxed else self.run(*inputs))
        if len(results) != len(self.expected):
            raise WrongPiece(f"{self.who} gave {len(results)} results for a piece that has {len(self.expected)}")
        return [self._held(*pair, memory, sizes) for pair in zip(results, self.expected, strict=True)]

    def _held(
        self, result: object, expected: _Expected, memory: dict[int, fx.Node | None], sizes: Mapping[str, int]
    ) -> torch.Tensor:
        name, spec = expected.node.name, expected.node.meta["val"]
        if not isinstance(result, torch.Tensor):
            raise WrongPiece(f"{self.who} gave {type(result).__name__} for {name}, which is a tensor")
        shape, strides = _evaluated(expected.shape, sizes), _evaluated(expected.strides, sizes)
        fits = result.dtype == spec.dtype and result.device == spec.device and result.dim() == len(spec.shape)
        if not fits or (shape is not None and tuple(result.shape) != shape):
            found = f"{result.dtype} {tuple(result.shape)} on {result.device}"
            wanted = f"{spec.dtype} {tuple(spec.shape) if shape is None else shape} on {spec.device}"
            raise WrongPiece(f"{self.who} gave {found} for {name}, which is {wanted}")
        if strides is not None and not _is_laid_out(result, strides):
            self.tell(f"{self.who}: {name} has strides {result.stride()}, not {strides}")
            result = _copied(result, strides)
        owner = expected.owner
        if owner is not None and memory.setdefault(result.untyped_storage()._cdata, owner) is not owner:
            self.tell(f"{self.who}: {name} lies in the memory of another value")
            result = _copied(result, result.stride())
        return result


def _expected(node: fx.Node, owner: fx.Node) -> _Expected:
    spec = node.meta["val"]
    shape, strides = (tuple(map(expr_of, sizes)) for sizes in (spec.shape, spec.stride()))
    return _Expected(node, shape, strides, owner if owner.op == "call_function" else None)


def _evaluated(sizes: Sequence[IntExpr], known: Mapping[str, int]) -> tuple[int, ...] | None:
    """None where a size is not known before the piece has run."""
    if any(not size.symbols() <= known.keys() for size in sizes):
        return None
    return tuple(int(size.evaluate(known)) for size in sizes)


def _is_laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    pairs = zip(tensor.stride(), strides, tensor.shape, strict=True)
    return not tensor.numel() or all(found == wanted for found, wanted, size in pairs if size > 1)


def _copied(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
