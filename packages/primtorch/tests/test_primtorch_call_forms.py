"""Calls of one form are asked about once: whatever a formula's answer depends on is in the form."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.builder import Builder, Value
from primtorch.call_forms import form_of
from primtorch.fake import FakeMode
from primtorch.families import FAMILIES, Operator, operators
from primtorch.interrupts import pass_on_interrupt
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from primtorch.testing.samples import cases

CPU = torch.device("cpu")
MOST = 8  # calls of an operator, of those that differ in one leaf


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: tuple[Callable[[], Any], ...] = (
    contextlib.nullcontext,
    lambda: default_dtype(torch.float64),
    torch.no_grad,
    lambda: torch.backends.mkldnn.flags(enabled=False),
    lambda: torch.device("meta"),
)
"""What formulas read of the process."""


def likenesses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A call, and calls that differ from it in one leaf: by a number's type, a tensor's strides, dtype or a size."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    yield args, kwargs
    for place, leaf in enumerate(leaves):
        others: list[Any] = []
        if isinstance(leaf, torch.Tensor):
            others += [leaf.to(torch.float64), leaf.to(torch.int64), leaf[:1] if leaf.dim() else leaf]
            others += [leaf.mT.contiguous().mT] if leaf.dim() > 1 else []
            others += [leaf.contiguous(memory_format=torch.channels_last)] if leaf.dim() == 4 else []
        elif isinstance(leaf, (bool, int)):
            others += [int(leaf), float(leaf), bool(leaf), not leaf]
        elif isinstance(leaf, float):
            others += [int(leaf)] if leaf == leaf // 1 else []
        for other in others:
            yield pytree.tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], structure)


def said(mode: FakeMode, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What a mode says of a call: descriptions, or the class of what it raises."""
    faked = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    try:
        with mode:
            results = operator.overload(*faked[0], **faked[1])  # type: ignore[misc]
    except Exception as error:
        pass_on_interrupt(error)
        return type(error)
    return pytree.tree_map_only(torch.Tensor, TensorSpec.of, results)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mode_says_of_a_call_what_one_says_that_has_seen_none_before(family: str) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    calls: list[tuple[Operator, tuple[Any, ...], dict[str, Any]]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators().values():
            if operator.family != family or operator.overload is None or operator.overload._schema.is_mutable:
                continue
            own = list(likenesses(*draw.choice(operator.samples).draw()))
            calls += [(operator, *call) for call in draw.sample(own, min(len(own), MOST))]
        draw.shuffle(calls)
        known = FakeMode()
        for state in (*STATES, STATES[0]):  # what is known by then is of all of them
            with state():
                for operator, args, kwargs in calls:
                    wanted = said(FakeMode(), operator, args, kwargs)
                    found = said(known, operator, args, kwargs)
                    assert repr(found) == repr(wanted), (
                        f"seed {seed}: {operator.name} of {pytree.tree_map(str, (args, kwargs))}"
                    )


def test_a_builder_says_of_a_call_what_the_prim_says() -> None:
    seed = random.randrange(2**32)
    calls = [(case.prim, *call) for case in cases() for call in likenesses(case.args, case.kwargs)]
    random.Random(seed).shuffle(calls)
    builder = Builder(fx.Graph())

    def described(x: Any) -> Any:
        return TensorSpec.of(x) if isinstance(x, torch.Tensor) else x

    def as_value(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return Value(builder, builder.graph.placeholder("x"), TensorSpec.of(x))

    for prim, args, kwargs in (*calls, *calls):
        if "dynamic" in prim.tags:
            continue
        try:
            wanted = prim.meta(*pytree.tree_map(described, args), **pytree.tree_map(described, kwargs))
        except Exception as error:
            pass_on_interrupt(error)
            continue
        values, named = pytree.tree_map(as_value, (args, kwargs))
        found = builder._meta(prim, values, named)
        assert repr(found) == repr(wanted), f"seed {seed}: {prim.name} of {pytree.tree_map(str, (args, kwargs))}"


def test_what_has_symbols_or_data_has_no_form() -> None:
    size = ShapeEnv().symbol(5, "n")
    spec = TensorSpec((3, 5), (5, 1), torch.float32, CPU)
    assert form_of("add", (spec, 1.0), {"alpha": 2}) is not None
    for lacking in (TensorSpec((3, size), (size, 1), torch.float32, CPU), size, torch.ones(2), object()):
        assert form_of("add", (spec, lacking), {}) is None
        assert form_of("add", (spec, [1, lacking]), {}) is None
        assert form_of("add", (spec,), {"other": lacking}) is None


def test_what_may_ask_for_the_current_device_has_no_form() -> None:
    spec = TensorSpec((3, 5), (5, 1), torch.float32, CPU)
    assert form_of("empty", ([3],), {"device": CPU}) is None  # or None: what is made of no tensor is made by default
    assert form_of("to", (spec,), {"device": torch.device("cuda")}) is None
    assert form_of("to", (spec,), {"device": torch.device("cuda", 1)}) is not None


def test_lists_are_told_apart_from_what_is_in_them() -> None:
    spec = TensorSpec((3, 5), (5, 1), torch.float32, CPU)
    forms = {
        form_of("cat", (spec, *args), {}) for args in (([1, 2], 3), ([1], 2, 3), (1, 2, 3), ([1, 2, 3],), ([[1, 2]], 3))
    }
    assert len(forms) == 5
