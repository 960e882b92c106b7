"""Operators over packed parameters: the weights of dynamically quantised layers, in objects of torch's C++ classes.

In the graph such an operator takes the number of an object of the outside, which each call reads: another object of the
same size may come in its place.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch import packed
from torchdynamo.interpreter.protocol import Args
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Reading

Operator: TypeAlias = OpOverload | OpOverloadPacket


def in_graph(outside: Outside, operator: Operator, args: Args) -> tuple[Operator, Args]:
    """What stands in graphs for a call, and its positional arguments: the call itself where there is nothing,
    for objects that the program makes, that are of another kind or given by name, and for dropout between layers."""
    places = frozenset(i for i, arg in enumerate(args) if _objects(arg))
    if not places or outside.recorder.modes:
        return operator, args
    found = packed.in_graph(operator, places)
    if found is None:
        return operator, args
    overload, draws = found
    if draws and _drops(overload, args):
        return operator, args
    sizes: list[int] = []
    given = list(args)
    for place in sorted(places):
        numbers = []
        for one in _objects(args[place]):
            known = outside.externals.lookup(one)
            if known is None:
                return operator, args
            if torch.is_grad_enabled() and packed.has_history(one):
                raise BreakGraph("backward", f"{operator}() requires a gradient for the bias in its packed parameters")
            outside.externals.guard(Reading(known.source, packed.size_of), GuardKind.EQUALS, packed.size_of(one))
            where = Reading(known.source, packed.number_of)
            numbers.append(outside.symbol_at(where, packed.number_of(one), 0, None))
            sizes.append(packed.size_of(one))
        given[place] = numbers[0] if packed.is_packed(args[place]) else numbers
    return overload, (sizes, *given)


def _objects(value: object) -> list[Any]:
    """The packed parameters that an argument is, or lists."""
    listed = value if isinstance(value, list) else [value]
    return listed if listed and all(map(packed.is_packed, listed)) else []


def _drops(overload: OpOverload, args: Args) -> bool:
    """Whether a recurrent layer in training drops values between its layers, at random."""
    names = [argument.name for argument in overload._schema.arguments[1:]]
    return bool(args[names.index("dropout")] and args[names.index("train")])
