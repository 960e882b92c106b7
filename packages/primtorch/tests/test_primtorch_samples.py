"""The samples of the records: each operator has some, and its formula and its rule give what eager gives for them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formula_check import ElsewhereCheck, FormulaCheck, RuleCheck, laid_out
from opdb_replay import check as check_values
from opdb_replay import program_of
from symbolic_check import problem_of
from torch.utils import _pytree as pytree

from primtorch.errors import DataDependent
from primtorch.families import FAMILIES, Family, Operator, operators
from primtorch.samples import call, reals

KNOWN = [operator for operator in operators().values() if operator.overload is not None]
BY_FAMILY = {family: [operator for operator in KNOWN if operator.family == family] for family in FAMILIES}
NOT_UNIQUE = frozenset("geqrf linalg_eig linalg_lstsq linalg_qr _linalg_svd _linalg_eigh linalg_lu".split())
"""Another result may be as right."""
DRAWN = torch.Tag.nondeterministic_seeded


def drawn(operator: Operator) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the samples, the same at each run; none where this torch has no kernel for the CPU."""
    for sample in operator.samples:
        torch.manual_seed(0)
        args, kwargs = sample.draw()
        try:
            with warnings.catch_warnings(), torch.random.fork_rng():
                warnings.simplefilter("ignore")
                operator.overload(*pytree.tree_map(_copy, args), **kwargs)  # type: ignore[misc]
        except NotImplementedError:
            continue
        yield args, kwargs


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def test_every_operator_has_samples() -> None:
    assert [operator.name for operator in KNOWN if not operator.samples] == []


def test_samples_are_declared_once_and_of_operators() -> None:
    family = Family("example")
    family.samples("relu", call(reals(2)))
    with pytest.raises(ValueError, match="two sets of samples for relu"):
        family.samples("relu", call(reals(3)))
    with pytest.raises(ValueError, match="samples of operators that example does not speak of: relu"):
        list(family.operators())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [FormulaCheck, RuleCheck], ids=["formulas", "rules"])
def test_formulas_and_rules_say_what_eager_lays_out(family: str, kind: type[FormulaCheck]) -> None:
    check = kind()
    for operator in BY_FAMILY[family]:
        for args, kwargs in drawn(operator):
            check.__torch_dispatch__(operator.overload, (), pytree.tree_map(_copy, args), kwargs)
            with contextlib.suppress(RuntimeError):  # what eager does not take in another layout
                check.__torch_dispatch__(operator.overload, (), laid_out(args, "reversed"), kwargs)
    assert not check.failed, {name: calls[:1] for name, calls in check.failed.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_formulas_and_rules_agree_about_other_devices(family: str, dtype: torch.dtype) -> None:
    """Kernels of CPUs and GPUs give other layouts and dtypes of what they keep for a backward."""
    check = ElsewhereCheck()
    for operator in BY_FAMILY[family]:
        for args, kwargs in drawn(operator):
            narrowed = pytree.tree_map(lambda x: _as(x, dtype), args)
            with contextlib.suppress(RuntimeError, ValueError):  # the CPU has no kernel for this dtype
                check.__torch_dispatch__(operator.overload, (), narrowed, kwargs)
    assert not check.failed, {name: calls[:1] for name, calls in check.failed.items()}


def _as(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(dtype) if x.dtype is torch.float32 else x.clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_compute_what_eager_computes(family: str) -> None:
    failed = {}
    for operator in BY_FAMILY[family]:
        packet = operator.name.partition(".")[0].removeprefix("_")
        named = SimpleNamespace(name=packet, variant_test_name="", op=operator.overload)
        for args, kwargs in drawn(operator) if operator.rule is not None else ():
            case = program_of(named, SimpleNamespace(input=args[0], args=args[1:], kwargs=kwargs))
            unknown = DRAWN in operator.overload.tags or operator.name in NOT_UNIQUE  # type: ignore[union-attr]
            try:
                check_values(named, torch.float32, *case, drops=unknown)
            except Exception as error:
                failed[operator.name] = f"{type(error).__name__}: {error}"[:200]
    assert not failed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_symbolic_sizes_lead_to_the_same_metadata(family: str) -> None:
    failed = {}
    for operator in BY_FAMILY[family]:
        for args, kwargs in drawn(operator):
            try:
                problem, _ = problem_of(operator.overload, args, kwargs)
            except DataDependent:
                continue
            if problem and "NoFormula" not in problem:
                failed[operator.name] = problem
    assert not failed
