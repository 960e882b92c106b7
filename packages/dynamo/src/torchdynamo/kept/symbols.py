"""The symbols of a captured frame as rows, and in another process: numbers that each call reads, what follows from
them, and what capture took for granted of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from primtorch.frozen import record
from primtorch.symbolic import Given, Learnt, ShapeEnv, bound, learn, learnt_since
from primtorch.symbolic.learnt import Mark
from torchdynamo.guards.shape_guards import Symbols
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.rows import Reader, Row, Writer
from torchdynamo.outside.outside import Outside
from torchdynamo.size_marks import SizeKind, SizeMark, size_marks
from torchdynamo.sources import Source, TensorSize, TensorStride


@record
class KnownSymbols(Symbols):
    """Those of a frame that was found."""

    shape_env: ShapeEnv
    symbol_sources: dict[str, Source]
    promised: dict[str, SizeMark]

    def of_tensor(self, source: Source) -> tuple[Mapping[int, torch.SymInt], Mapping[int, torch.SymInt]]:
        """The symbols among the sizes, and among the strides, of a tensor that the guards read."""
        sizes: dict[int, Any] = {}
        strides: dict[int, Any] = {}
        for name, read in self.symbol_sources.items():
            if isinstance(read, (TensorSize, TensorStride)) and read.base == source:
                (sizes if isinstance(read, TensorSize) else strides)[read.dim] = self.shape_env.named(name)
        return sizes, strides

    def bound(self, number: Any) -> Any:
        """A number of this environment for an expression; anything else as it is."""
        return bound(number, self.shape_env)


def written(outside: Outside, writer: Writer) -> tuple[Learnt, list[Row], list[Row]]:
    """What capture learnt of its symbols; [name, source] of those that are read; [name, kind, bounds] of those that the
    user has said something of.

    Raises:
        NotKept: where one is read is not known.
    """
    env, sources = outside.shape_env, outside.symbol_sources
    learnt = learnt_since(env, Mark(0, 0, 0), sources.keys())
    if learnt is None:
        raise NotKept("a number is read where nobody knows")
    read = [[name, writer.source(source)] for name, source in sources.items()]
    promised = [[name, mark.kind.value, mark.low, mark.high] for name, mark in outside.promised.items()]
    return learnt, read, promised


def made(
    learnt: Learnt, read: list[Row], promised: list[Row], reader: Reader, number_at: Callable[[Source], Any]
) -> KnownSymbols:
    """The symbols of this process, with the numbers of a call.

    Raises:
        NotKept: the call is another case.
    """
    sources = {name: reader.sources[place] for name, place in read}
    given = {name: Given(number_at(source), source.expression()) for name, source in sources.items()}
    if not all(type(known.hint) in (int, float) for known in given.values()):
        raise NotKept("no number is where one was")
    env = ShapeEnv()
    if not learn(env, learnt, given):
        raise NotKept("the numbers are another case")
    return KnownSymbols(env, sources, {name: SizeMark(SizeKind(kind), *bounds) for name, kind, *bounds in promised})


def marks_of(value: object) -> list[Row]:
    """[dim, kind, bounds] of the sizes of which the user has said something; of what is no tensor, nothing."""
    marks = size_marks(value).items() if isinstance(value, torch.Tensor) else ()
    return [[dim, mark.kind.value, mark.low, mark.high] for dim, mark in sorted(marks, key=lambda pair: pair[0])]
