"""Operators over packed parameters: the weights of quantised layers, in objects of torch's C++ classes.

In the graph such an operator takes the number of an object of the outside, which each call reads: another object of the
same sizes may come in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primtorch import packed
from torchdynamo.graph.quantised import operator_of
from torchdynamo.interpreter.protocol import Args, Kwargs
from torchdynamo.outside.outside import Outside
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Reading

Operator: TypeAlias = OpOverload | OpOverloadPacket
Run: TypeAlias = Callable[[Operator, Args, Kwargs], object]


def call(outside: Outside, run: Run, operator: Operator, args: Args, kwargs: Kwargs) -> object:
    """A call of one of torch's operators: the call itself where no packed parameters are among its arguments, and for
    objects that the program makes, that are of another kind or given by name, and for dropout between layers."""
    places = frozenset(i for i, arg in enumerate(args) if _objects(arg))
    if not places or outside.recorder.modes:
        return run(operator, args, kwargs)
    form = operator_of(operator, args, kwargs)
    if form is not None and form.packed == places:
        numbered = _numbered(outside, operator, places, args)
        if numbered is not None:
            outside.recorder.refuse_call(form.original.name())
            return outside.recorder.quantised.operate(form.original, numbered[1], kwargs, numbered[0])
    found = packed.in_graph(operator, places)
    if found is None:
        return run(operator, args, kwargs)
    overload, draws = found
    if draws and _drops(overload, args):
        return run(operator, args, kwargs)
    numbered = _numbered(outside, operator, places, args)
    return run(operator, args, kwargs) if numbered is None else run(overload, (numbered[0], *numbered[1]), kwargs)


def _numbered(outside: Outside, operator: Operator, places: frozenset[int], args: Args) -> tuple[list[int], Any] | None:
    """The sizes that results depend on, and the arguments with numbers for objects; None for one that the program
    makes."""
    sizes: list[int] = []
    given = list(args)
    for place in sorted(places):
        numbers = []
        for one in _objects(args[place]):
            known = outside.externals.lookup(one)
            if known is None:
                return None
            if torch.is_grad_enabled() and packed.has_history(one):
                raise BreakGraph("backward", f"{operator}() requires a gradient for the bias in its packed parameters")
            outside.externals.guard(Reading(known.source, packed.sizes_of), GuardKind.EQUALS, packed.sizes_of(one))
            where = Reading(known.source, packed.number_of)
            numbers.append(outside.symbol_at(where, packed.number_of(one), 0, None))
            sizes += packed.sizes_of(one)
        given[place] = numbers[0] if packed.is_packed(args[place]) else numbers
    return sizes, given


def _objects(value: object) -> list[Any]:
    """The packed parameters that an argument is, or lists."""
    listed = value if isinstance(value, list) else [value]
    return listed if listed and all(map(packed.is_packed, listed)) else []


def _drops(overload: OpOverload, args: Args) -> bool:
    """Whether a recurrent layer in training drops values between its layers, at random."""
    names = [argument.name for argument in overload._schema.arguments[1:]]
    return bool(args[names.index("dropout")] and args[names.index("train")])
