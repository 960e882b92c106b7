"""Which sizes and numbers become symbols, and what the program may not do with its inputs in a graph."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import field

import torch
from torch import nn

from primtorch.frozen import record
from primtorch.schemas import UserFrame
from torchdynamo.outside.loops import KnownLoops
from torchdynamo.schemas import RoundByRound
from torchdynamo.size_marks import SizeKind, size_marks
from torchdynamo.sources import Source, TensorSize, TensorStride

# Integers that become symbols lie within these bounds, so that sums of two stay in 64 bits.
INTEGER_BOUND = 1 << 62


@record
class DynamicPolicy:
    """Which sizes become symbols, and what the program may not do with its inputs in a graph.

    Attributes:
        everything: all dims of at least 2 of tensors that are not parameters.
        changed: what differed between calls: sizes and strides of tensors, and the sources of numbers and texts.
        never: nothing becomes a symbol but what the user marked.
        versions: how many there are already.
        breaks_at_data: a size that depends on data breaks the graph.
        refused: the user's stacks where a back end asks for a number that only the data tells; calls there break, too.
        shared: inputs that share memory with others; a write to them breaks the graph.
        unread: the user's stacks where a number is not taken out of a tensor, but read behind a break.
        sizes: where one that is taken is a size.
        plain_texts: where a text is made of the values of its numbers, not at each call.
        read_whole: for which lengths of a list, a tuple or a dict there is a version.
        varied: what of the kind is handed on by a part of the program that has ended for any length.
        loops: those whose number of rounds is guarded in a version.
        in_rounds: the function is the rest of another one, behind a break, where loops go round by round.
        round_by_round: says of modules that a loop goes over in which round the graph ends, if it does.
        unrolled: the user's stacks where it does not end at the head of such a loop all the same.
        guards_floats: C code that needs a float gets it guarded: no break would do.
        asks_data: a condition on data breaks the graph, also where only a `raise` is behind it.
    """

    everything: bool
    changed: frozenset[Source]
    never: bool = False
    versions: int = 0
    breaks_at_data: bool = False
    refused: frozenset[tuple[UserFrame, ...]] = frozenset()
    shared: frozenset[Source] = frozenset()
    asks_data: bool = False
    unread: frozenset[tuple[UserFrame, ...]] = frozenset()
    sizes: frozenset[tuple[UserFrame, ...]] = frozenset()
    plain_texts: frozenset[tuple[UserFrame, ...]] = frozenset()
    guards_floats: bool = False
    read_whole: Mapping[Source, Set[int]] = field(default_factory=dict)
    varied: frozenset[Source] = frozenset()
    loops: KnownLoops = field(default_factory=dict)
    in_rounds: bool = False
    round_by_round: RoundByRound | None = None
    unrolled: frozenset[tuple[UserFrame, ...]] = frozenset()

    def dims(self, tensor: torch.Tensor, source: Source) -> tuple[int, ...]:
        """The dims of an input whose sizes become symbols."""
        marks = size_marks(tensor)
        parameter = isinstance(tensor, nn.Parameter)
        found = []
        for dim, size in enumerate(tensor.shape):
            kind = marks[dim].kind if dim in marks else None
            if size < 2 or kind is SizeKind.STATIC or (self.never and kind is not SizeKind.DYNAMIC):
                continue
            chosen = kind is not None or (self.everything and not parameter)
            if chosen or TensorSize(source, dim) in self.changed:
                found.append(dim)
        return tuple(found)

    def strides(self, tensor: torch.Tensor, source: Source) -> tuple[int, ...]:
        """The dims of an input whose strides become symbols: those of a part of something longer, such as a cache that
        is filled. Not of a tensor whose layout is another one, whose rows lie along another dim."""
        dims = [dim for dim in range(tensor.dim()) if TensorStride(source, dim) in self.changed]
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if self.never or not plain or any(tensor.stride(dim) < 2 <= tensor.shape[dim] for dim in dims):
            return ()
        return tuple(dim for dim in dims if tensor.stride(dim) >= 2)

    def number(self, value: int | float, source: Source) -> bool:
        """Whether a number of the program's becomes a symbol."""
        fits = isinstance(value, float) or abs(value) <= INTEGER_BOUND
        return source in self.changed and not self.never and fits

    def text(self, source: Source) -> bool:
        """Whether what a text is, is known only at each call."""
        return source in self.changed and not self.never
