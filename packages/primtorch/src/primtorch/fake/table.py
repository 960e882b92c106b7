"""The table of formulas: own ones by name, in-place and out= variants derived from the functional ones, fallbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.effects import is_foreign, writes
from primtorch.errors import NoFormula
from primtorch.fake.overlap import OverlapCheck, overlap_check
from primtorch.fake.places import on_one_device
from primtorch.fake.structured import has_native_meta, meta_formula
from primtorch.fake.variants import RESTRIDING, derived, is_fresh, out_names
from primtorch.families import Formula, operator_named
from primtorch.frozen import record

Fallback: TypeAlias = Callable[[OpOverload], Formula | None]


@record
class Rule:
    """How an overload acts on fake tensors. `fresh`: the formula takes a source of data-dependent sizes;
    `restrides`: the first argument gets the result's shape and strides (t_, unsqueeze_, resize_).

    `alias` is the position of the argument whose memory the result shares; `mutates` are positions and keyword names
    of the arguments it writes, `outs` those that out= results go to; `overlap` raises where eager refuses to write.
    `registered`: the operator is not torch's own; there is no formula, but what its author registered.
    """

    formula: Formula
    restrides: bool
    fresh: bool
    alias: int | None
    mutates: tuple[int | str, ...]
    outs: tuple[str, ...]
    overlap: OverlapCheck | None
    source: str
    registered: bool = False


class RuleTable(dict[OpOverload, Rule]):
    """Rules by overload, found on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: dict[str, Formula] = {}  # by name, from outside
        self.fallbacks: list[Fallback] = []
        self._by_identity: dict[int, Rule] = {}  # of overloads that are keys here

    def of(self, op: OpOverload) -> Rule:
        """As `self[op]`, without the overload's hash, which is a function in Python."""
        rule = self._by_identity.get(id(op))
        if rule is None:
            rule = self._by_identity[id(op)] = self[op]
        return rule

    def __delitem__(self, op: OpOverload) -> None:
        self._by_identity.pop(id(op), None)
        super().__delitem__(op)

    def __missing__(self, op: OpOverload) -> Rule:
        alias, mutates = _effects(op)
        if self._named(op_key(op)) is None and is_foreign(op) and not is_composite(op):
            rule = self[op] = Rule(_unused, False, False, alias, mutates, (), None, "registered", True)
            return rule
        formula, source = self._find(op)
        restrides = op_key(op) in RESTRIDING
        rule = self[op] = Rule(
            on_one_device(op, formula),
            restrides,
            is_fresh(op),
            alias,
            mutates,
            out_names(op),
            overlap_check(op, restrides),
            source,
        )
        return rule

    def _named(self, name: str) -> Formula | None:
        operator = operator_named(name)
        own = None if operator.formula is None else operator.guarded(operator.formula)
        return self.registered.get(name, own)

    def _find(self, op: OpOverload) -> tuple[Formula, str]:
        key = op_key(op)
        guarded = operator_named(key).guarded
        found = self._named(key)
        if found is not None:
            return found, "formula"
        variant = derived(op, self._named, lambda other: self[other].formula)
        if variant is not None:
            return guarded(variant), "derived"
        formula = next(filter(None, (fallback(op) for fallback in self.fallbacks)), None)
        if has_native_meta(op):
            return guarded(meta_formula(op, formula)), "meta"
        if formula is None:
            raise NoFormula(op.name())
        return guarded(formula), "fallback"


RULES = RuleTable()


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Whether the dispatcher has a program of other operators for it, and would have run that under autograd."""
    name = op.name()
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


def _unused(*args: object, **kwargs: object) -> object:
    raise AssertionError("an operator with registered shapes has no formula")


def op_key(op: OpOverload) -> str:
    """The name under which the table knows an overload: "add.Tensor", "relu"; other namespaces keep theirs."""
    name: str = op.name()
    return name.removeprefix("aten::")


def formula_of(op: OpOverload) -> Formula:
    """The formula that gives an overload's result from descriptors.

    It takes the overload's arguments with a TensorSpec (or any tensor) for each tensor, and returns TensorSpecs.
    """
    return RULES[op].formula


def register_formula(op: OpOverload | str, formula: Formula) -> None:
    """Give an operator a formula, or replace its formula.

    Args:
        op: an overload, or its name: "add.Tensor", "mylib::myop".
    """
    key = op if isinstance(op, str) else op_key(op)
    RULES.registered[key] = formula
    for known in [k for k in RULES if op_key(k) == key]:
        del RULES[known]


def register_fallback(fallback: Fallback) -> None:
    """A source of formulas for operators that have none here, asked once an operator in order of registration.

    Args:
        fallback: overload -> formula, or None where it has none.
    """
    RULES.fallbacks.append(fallback)
    for op in [op for op, rule in RULES.items() if rule.source != "formula"]:
        del RULES[op]


def _effects(op: OpOverload) -> tuple[int | None, tuple[int | str, ...]]:
    """(argument that the result is a view of, arguments written)."""
    arguments = op._schema.arguments
    # detach_ writes no data, and comes with real tensors.
    written = () if op.name() == "aten::detach_" else writes(op)
    mutates = tuple(name if arguments[place].kwarg_only else place for place, name in written)
    views = (place for place, argument in enumerate(arguments) if argument.alias_info is not None)
    return (None if mutates else next(views, None)), mutates
