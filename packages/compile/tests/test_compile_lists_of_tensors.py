"""Operators over lists of tensors (`torch._foreach_...`), by torch's own database: what they give and write is eager's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils import _pytree as pytree

import torchcompile

OPERATORS = {
    f"{op.name} {form}": (op, function)
    for kind in ("unary", "binary", "pointwise", "reduce", "other")
    for op in getattr(invocations, f"foreach_{kind}_op_db")
    for form, function in (("new", op.method_variant), ("in place", op.inplace_variant))
    if function is not None
}
DTYPES = (torch.float64, torch.int64, torch.complex128)
MOST = 3  # samples of a dtype


def fresh(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def samples(op: Any, draw: random.Random) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Lists of tensors, in each dtype that the operator has."""
    for dtype in DTYPES:
        try:
            made = op.sample_inputs(
                "cpu", dtype, noncontiguous=draw.random() < 0.3, num_input_tensors=[3], allow_higher_dtype_scalars=True
            )
            known = list(made)
        except (RuntimeError, TypeError):  # no samples of this dtype
            continue
        for sample in draw.sample(known, min(MOST, len(known))):
            named = {key: value for key, value in sample.kwargs.items() if key != "disable_fastpath"}
            yield sample.input, sample.args, named


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("what", OPERATORS)
def test_an_operator_over_lists(what: str) -> None:
    op, function = OPERATORS[what]
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)

    def program(given: Any, args: Any, named: dict[str, Any]) -> Any:
        result = function(given, *args, **named)
        return result, given, type(result).__name__

    for place, sample in enumerate(samples(op, random.Random(seed))):
        told = f"seed {seed}, sample {place}"
        torchcompile.reset()
        expected, found = (attempted(run, fresh(sample)) for run in (program, torchcompile.compile(program)))
        if isinstance(expected, Exception):
            assert type(found) is type(expected) and str(found) == str(expected), f"{told}: {found!r}, not {expected!r}"
            continue
        assert not isinstance(found, Exception), f"{told}: {found!r}"
        for one, other in itertools.zip_longest(pytree.tree_leaves(found), pytree.tree_leaves(expected)):
            if not isinstance(other, torch.Tensor):
                assert one == other, told
            elif other.dtype is torch.float32:  # of integers: rounded otherwise
                assert one.dtype is other.dtype and one.shape == other.shape, told
            else:
                torch.testing.assert_close(one, other, equal_nan=True, check_stride=True, msg=lambda m: f"{told}: {m}")
        report = torchcompile.report()
        assert not report.fallbacks and not report.breaks, f"{told}: {report}"


def attempted(program: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    try:
        return program(*given)
    except Exception as error:  # eager's, or not
        return error
