"""Views that a run takes anew: of inputs, of what a compiled graph returned, of gradients as they came."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from aotautograd.schemas import ViewStep
from primtorch.symbolic import IntExpr, expr_as_given

Spell = Callable[[torch.SymInt], IntExpr]
_Arguments = Callable[[Mapping[str, int]], tuple[object, ...]]
# an operator, its arguments, those that it takes by name, their names
_Prepared = tuple[Callable[..., object], _Arguments, _Arguments, list[str]]
# (base, values of symbols) -> the view
Replay = Callable[[torch.Tensor, Mapping[str, int]], torch.Tensor]


def replay_of(steps: Sequence[ViewStep], outside_history: int = 0, spell: Spell = expr_as_given) -> Replay:
    """Takes the views of a base, the first `outside_history` of them under no_grad. `spell` names the symbols of a size
    as whoever replays knows them."""
    prepared = [
        (s.op, _arguments(s.args, spell), _arguments(tuple(v for _, v in s.kwargs), spell), [k for k, _ in s.kwargs])
        for s in steps
    ]
    first, rest = prepared[:outside_history], prepared[outside_history:]

    def replay(base: torch.Tensor, symbols: Mapping[str, int]) -> torch.Tensor:
        if first and base.requires_grad:
            with torch.no_grad():
                base = run(first, base, symbols)
            view: torch.Tensor = run(rest, base, symbols)
        else:
            view = run(prepared, base, symbols)
        return view

    def run(views: Sequence[_Prepared], value: Any, symbols: Mapping[str, int]) -> Any:
        for op, args, values, names in views:
            if op is torch.ops.aten.view_as_real.default:  # there is no such view of a lazily conjugated tensor
                value = op(value.resolve_conj())
            elif op is operator.getitem:
                value = value[args(symbols)[0]]
            else:
                value = op(value, *args(symbols), **dict(zip(names, values(symbols), strict=True)))
        return value

    return replay


def _arguments(args: tuple[object, ...], spell: Spell) -> _Arguments:
    if not _symbolic(args):
        return lambda symbols: args

    def evaluate(a: object, symbols: Mapping[str, int]) -> object:
        if isinstance(a, IntExpr):
            return a.evaluate(symbols)
        if isinstance(a, (tuple, list)):
            return [evaluate(x, symbols) for x in a]
        return a

    prepared = [tree_map_only(torch.SymInt, spell, a) for a in args]
    return lambda symbols: tuple([evaluate(a, symbols) for a in prepared])


def _symbolic(a: object) -> bool:
    return isinstance(a, torch.SymInt) or (isinstance(a, (tuple, list)) and any(map(_symbolic, a)))
