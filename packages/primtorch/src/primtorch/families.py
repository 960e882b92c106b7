"""What is known of an operator, in one record, and how the file of a family declares it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import wraps
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch._ops import OpOverload

from primtorch import forks
from primtorch.frozen import record
from primtorch.once import once
from primtorch.samples import Call, usual

Formula: TypeAlias = Callable[..., Any]
"""formula(*args, **kwargs): the results' descriptors from the arguments', whose tensors are TensorSpecs or tensors."""
Refusal: TypeAlias = Callable[..., None]
"""refusal(*args, **kwargs): raises what eager raises for these arguments."""
Rule: TypeAlias = Callable[..., Any]
"""rule(builder, *args, **kwargs): the results as Values of prims."""
F = TypeVar("F")

FAMILIES = (
    "elementwise", "special", "activation", "reduction", "scan", "sort", "view", "shape", "creation",
    "advanced_indexing", "indexing", "embedding", "ragged", "window", "adaptive_windows", "patches", "resampling",
    "contraction", "quantised", "attention", "normalization", "batch_normalization", "softmax", "loss", "linalg", "fft",
    "random",
)  # fmt: skip
"""Files of `primtorch.operators`. The first fake tensor or lowering loads them: `import primtorch` is for sizes too."""


class Trait(Enum):
    """What eager does with operands, out= and shared memory of an operator, all overloads of a name or one."""

    ANYWHERE = "copies between devices itself, or reads metadata only"
    INDICES_ANYWHERE = "indices may be on the CPU, and so may a 0-d value to put"
    ONE_DEVICE = "takes no 0-d CPU tensor beside tensors of another device either"
    TO_FIRST = "brings the other operands, of any rank, to the device of the first"
    CONVERTS_OUT = "is not elementwise, and converts its result to the dtype of out="
    EXACT_OUT = "is elementwise, and takes an out= of the dtype of its result alone"
    TRUTH_OUT = "out= is a bool or a byte"
    DTYPE_OF_OUT = "the dtype of out= is that of the result"
    TYPE_ERROR_OUT = "an out= whose dtype does not fit is a TypeError"
    ROWS_OUT = "lays out a resized out= by rows, whatever its own result's layout"
    OVERLAPS = "takes a target that overlaps itself; in-place forms like the others unless named apart"
    SHARES_NOTHING = "refuses an operand in the target's own memory, even at the same place"


@record
class Operator:
    """One overload. What is None here is found elsewhere: a formula in those of variants, torch's own kernels for
    tensors without data, or the rule; an operator without a rule stays a call of itself.

    Args:
        name: without namespace and ".default": "add.Tensor", "relu".
        elementwise: the formula places the result on its operands' common device, as TensorIterator does.
        optional: not every supported torch has it.
    """

    name: str
    family: str
    formula: Formula | None = None
    refusal: Refusal | None = None
    rule: Rule | None = None
    own_samples: tuple[Call, ...] = ()
    elementwise: bool = False
    optional: bool = False

    @property
    def samples(self) -> tuple[Call, ...]:
        """Calls to test it with: its own, or the usual one where its schema says what that is."""
        if self.own_samples or self.overload is None:
            return self.own_samples
        return tuple(usual(self.overload))

    @property
    def overload(self) -> OpOverload | None:
        """Torch's record of it, with the schema; None where this torch has no such operator."""
        packet, _, overload = self.name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        return found if isinstance(found, OpOverload) else None

    @property
    def fresh(self) -> bool:
        """Whether the formula takes a source of sizes that depend on data, as keyword `fresh`."""
        return self.formula is not None and "fresh" in (getattr(self.formula, "__kwdefaults__", None) or ())

    @property
    def core(self) -> bool:
        """Whether it belongs to core ATen."""
        return self.overload is not None and torch.Tag.core in self.overload.tags

    def guarded(self, formula: Formula) -> Formula:
        """A formula of this operator behind its refusal."""
        refusal = self.refusal
        if refusal is None:
            return formula

        @wraps(formula)
        def both(*args: object, **kwargs: object) -> object:
            refusal(*args, **kwargs)
            return formula(*args, **kwargs)

        return both


def overloads(*names: str) -> Iterator[str]:
    """Each overload in strings of names: "add.Tensor|Scalar relu" are add.Tensor, add.Scalar and relu."""
    for name in " ".join(names).split():
        packet, _, alternatives = name.partition(".")
        for overload in alternatives.split("|"):
            yield f"{packet}.{overload}" if overload else packet


class Family:
    """The operators of one file. Each decorator takes names of overloads as `overloads` reads them; one that ends
    in "?" need not exist in every torch that is supported.

    A name may be given a formula, a refusal, a rule and samples, each once.
    """

    def __init__(self, name: str, *, elementwise: bool = False) -> None:
        self.name = name
        self.elementwise = elementwise
        self.formulas: dict[str, Formula] = {}
        self.refusals: dict[str, Refusal] = {}
        self.rules: dict[str, Rule] = {}
        self.calls: dict[str, tuple[Call, ...]] = {}
        self.optional: set[str] = set()
        self.traits: dict[Trait, tuple[str, ...]] = {}

    def formula(self, *names: str) -> Callable[[F], F]:
        """Decorator: the shape-and-stride formula of these operators."""
        return self._declares(self.formulas, "formulas", names)

    def refuses(self, *names: str) -> Callable[[F], F]:
        """Decorator: what these operators refuse."""
        return self._declares(self.refusals, "refusals", names)

    def rule(self, *names: str) -> Callable[[F], F]:
        """Decorator: the rule of these operators into prims."""
        return self._declares(self.rules, "rules", names)

    def samples(self, names: str, *calls: Call) -> None:
        """Calls to test these operators with, where the usual one (`primtorch.samples.usual`) is not for them.

        Raises:
            ValueError: an operator has samples already.
        """
        self._declares(self.calls, "sets of samples", (names,))(calls)

    def trait(self, trait: Trait, names: str) -> None:
        """Says this of the operators of these names, each of an overload or of all."""
        self.traits[trait] = tuple(names.split())

    def _declares(self, table: dict[str, Any], what: str, names: tuple[str, ...]) -> Callable[[F], F]:
        def declare(function: F) -> F:
            for name in overloads(*names):
                plain = name.removesuffix("?")
                if plain in table:
                    raise ValueError(f"two {what} for {plain}")
                if plain is not name:
                    self.optional.add(plain)
                table[plain] = function
            return function

        return declare

    def operators(self) -> Iterator[Operator]:
        """The records.

        Raises:
            ValueError: samples of an operator that has no other part.
        """
        if unknown := self.calls.keys() - self.formulas.keys() - self.refusals.keys() - self.rules.keys():
            raise ValueError(f"samples of operators that {self.name} does not speak of: {', '.join(sorted(unknown))}")
        for name in dict.fromkeys((*self.formulas, *self.refusals, *self.rules)):
            yield Operator(
                name,
                self.name,
                self.formulas.get(name),
                self.refusals.get(name),
                self.rules.get(name),
                self.calls.get(name, ()),
                self.elementwise and name in self.formulas,
                name in self.optional,
            )


def _families() -> Iterator[Family]:
    for name in FAMILIES:
        with forks.undivided():
            family: Family = import_module(f"primtorch.operators.{name}").OP
        yield family


@once
def operators() -> Mapping[str, Operator]:
    """All records, by name.

    Raises:
        ValueError: an operator stands in two families.
    """
    found: dict[str, Operator] = {}
    for family in _families():
        for operator in family.operators():
            known = found.setdefault(operator.name, operator)
            if known is not operator:
                raise ValueError(f"{operator.name} stands in two families: {known.family} and {operator.family}")
    return MappingProxyType(found)


def operator_named(name: str) -> Operator:
    """A record; of an operator that no family speaks of, one that says nothing."""
    return operators().get(name) or Operator(name, "")


@once
def _traits() -> Mapping[str, set[Trait]]:
    found: defaultdict[str, set[Trait]] = defaultdict(set)
    for family in _families():
        for trait, names in family.traits.items():
            for name in names:
                found[name].add(trait)
    return found


def has_trait(trait: Trait, *names: str) -> bool:
    """Whether a family says this of one of the names."""
    return any(trait in _traits().get(name, ()) for name in names)


@once
def elementwise_packets() -> frozenset[str]:
    """What TensorIterator computes, by name without overload."""
    return frozenset(name.partition(".")[0] for name, operator in operators().items() if operator.elementwise)
