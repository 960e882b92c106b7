"""The records of operators: names that torch knows, parts that fit together."""

from __future__ import annotations

import inspect

import pytest
import torch

from primtorch.families import FAMILIES, Family, operators, overloads
from primtorch.prims import PRIMS
from primtorch.prims.record import FormulaOf


def test_every_name_is_an_overload_of_torch() -> None:
    assert [name for name, operator in operators().items() if operator.overload is None and not operator.optional] == []


def test_names_with_alternatives() -> None:
    assert list(overloads("mul.Tensor|Scalar relu", "zeta.|other")) == [
        "mul.Tensor", "mul.Scalar", "relu", "zeta", "zeta.other",
    ]  # fmt: skip


def test_a_part_is_declared_once() -> None:
    family = Family("example")
    family.rule("relu")(lambda b, x: x)
    with pytest.raises(ValueError, match="two rules for relu"):
        family.rule("abs relu")(lambda b, x: x)


def test_every_record_is_of_a_family_that_is_loaded() -> None:
    assert {operator.family for operator in operators().values()} == set(FAMILIES)
    assert all(operator.formula or operator.refusal or operator.rule for operator in operators().values())


def test_operators_taken_whole_have_a_formula() -> None:
    whole = [prim.meta.operator for prim in PRIMS.values() if isinstance(prim.meta, FormulaOf)]
    assert len(whole) > 60 and all(operators()[name].formula for name in whole)


@pytest.mark.parametrize("part", ["formula", "refusal", "rule"])
def test_a_part_takes_the_arguments_of_its_overload(part: str) -> None:
    wrong = []
    for name, operator in operators().items():
        function, overload = getattr(operator, part), operator.overload
        if function is None or overload is None:
            continue
        builder = [None] if part == "rule" else []
        placed = [a for a in overload._schema.arguments if not a.kwarg_only]
        named = [a.name for a in overload._schema.arguments if a.kwarg_only]
        try:
            inspect.signature(function).bind(*builder, *placed, **dict.fromkeys(named))
        except TypeError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong


def test_membership_of_core_aten_is_torchs() -> None:
    known = operators()
    assert known["mm"].core and not known["addr"].core and known["mm"].overload is torch.ops.aten.mm.default
