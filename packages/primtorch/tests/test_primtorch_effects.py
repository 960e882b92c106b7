"""Which arguments a call writes: what names, flags and schemas say agrees, and with what calls do."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from primtorch.effects import is_inplace, unsaid_writes, written_by

aten = torch.ops.aten
# Sorts of TorchScript's lists; what marks a tensor, and writes no element; one that has its word for it.
OTHERWISE = {"sort", "retain_grad", "record_stream", "set_data", "_flash_attention_forward_no_dropout_inplace"}


def test_names_say_of_the_first_argument_what_schemas_say() -> None:
    known = set(torch._C._dispatch_get_all_op_names())
    names: dict[str, bool] = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and {schema.name, f"{schema.name}.{schema.overload_name}"} & known:
            first = next((a.alias_info for a in schema.arguments if not a.kwarg_only), None)
            name = schema.name.removeprefix("aten::")
            names[name] = names.get(name, False) or bool(first is not None and first.is_write)
    assert len(names) > 1000
    assert {name for name, writes in names.items() if is_inplace(name) != writes} <= OTHERWISE


@pytest.mark.parametrize("name", [name for name in vars(operator) if name.startswith("__i")])
def test_operators_of_python_that_assign(name: str) -> None:
    in_place = name not in ("__inv__", "__invert__", "__index__")
    assert is_inplace(name) == is_inplace(name.strip("_")) == in_place


X, Y = torch.ones(3, 3), torch.ones(3, 3)
MASK = torch.ones(3, 3, dtype=torch.bool)
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "a method": (torch.Tensor.add_, (X, Y), {}),
    "a method of no underscore": (torch.Tensor.__setitem__, (X, 0, 1.0), {}),
    "an operator of Python": (operator.imul, (X, Y), {}),
    "assignment to items": (operator.setitem, (X, 0, 1.0), {}),
    "out=": (torch.add, (Y, Y), {"out": X}),
    "out= of several": (torch.max, (Y, 0), {"out": (X.new_empty(3), torch.empty(3, dtype=torch.int64))}),
    "a flag by its place": (F.relu, (X, True), {}),
    "a flag by its name": (F.relu, (X,), {"inplace": True}),
    "a tensor by its name": (F.relu, (), {"input": X, "inplace": True}),
    "a flag that is off": (F.relu, (X, False), {}),
    "an overload": (aten.add_.Tensor, (X, Y), {}),
    "an overload with out=": (aten.add.out, (Y, Y), {"out": X}),
    "a packet": (aten.mul_, (X, Y), {}),
    "a packet that writes nothing": (aten.mul, (X, Y), {}),
    "a function": (torch.masked_fill, (X, MASK, 1.0), {}),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_a_call_says_is_what_it_writes(what: str) -> None:
    function, args, kwargs = CALLS[what]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    before = [(t, t._version) for t in {id(t): t for t in given}.values()]
    said = written_by(function, args, kwargs)
    function(*args, **kwargs)
    assert {id(t) for t in said} == {id(t) for t, version in before if t._version > version}


def test_the_name_of_a_method_says_it_too() -> None:
    assert written_by("add_", (X, Y), {}) == [X] and not written_by("add", (X, Y), {})


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_are_written_unsaid(training: bool) -> None:
    args = (torch.randn(4, 3), torch.zeros(3), torch.ones(3), None, None, training)
    before = [t.clone() for t in args[1:3]]
    said, unsaid = written_by(F.batch_norm, args, {}), unsaid_writes(F.batch_norm, args, {})
    F.batch_norm(*args)
    changed = [t for t, was in zip(args[1:3], before, strict=True) if not torch.equal(t, was)]
    assert not said and [id(t) for t in unsaid] == [id(t) for t in changed]
