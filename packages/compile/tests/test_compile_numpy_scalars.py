"""NumPy's scalars as arguments, other ones in each call: a float32 that no guard compares is an input of the graph, and
so is any that has changed. Beside a tensor torch takes them for Python's numbers, a truth value for a float."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils import _pytree as pytree

import torchcompile

KINDS: dict[str, Callable[[int], Any]] = {
    "float16": lambda i: numpy.float16(i + 0.5),
    "float32": lambda i: numpy.float32(i + 0.1),
    "float64": lambda i: numpy.float64(i + 0.1),
    "int8": lambda i: numpy.int8(i + 1),
    "int64": lambda i: numpy.int64(i + 1),
    "uint8": lambda i: numpy.uint8(i + 1),
    "bool": lambda i: numpy.bool_(i % 2),
}
OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "ge", "eq", "iadd", "isub", "imul")
}
CALLS = 10  # more than there may be versions


class Held:
    """Holds a scalar, as a configuration does."""

    rate: Any = None


HELD = Held()


def from_attribute(x: torch.Tensor, s: Any) -> Any:
    return x * HELD.rate + HELD.rate


def among_numpys_own(x: torch.Tensor, s: Any) -> Any:
    return x + 1, s * 2, numpy.sqrt(s + s), s.dtype.name, s.astype(numpy.float64) * 3


def as_tensors(x: torch.Tensor, s: Any) -> Any:
    return x * torch.tensor(s), torch.as_tensor(s) + x, torch.from_numpy(numpy.array([s, s, s])) + x


def as_numbers(x: torch.Tensor, s: Any) -> Any:
    return x * float(s), x + s.item(), x.clamp(max=s), torch.full((2,), s), x.add(x, alpha=s.item() * 2)


def by_kind(x: torch.Tensor, s: Any) -> Any:
    return x * (2 if isinstance(s, numpy.floating) else 3) * (2 if isinstance(s, float) else 3), s


def placed(x: torch.Tensor, s: Any) -> Any:
    return torch.where(x > s, x, s), x.masked_fill(x < 0, s), (x + s).sum()


PROGRAMS = (from_attribute, among_numpys_own, as_tensors, as_numbers, by_kind, placed)


def run(program: Callable[..., Any], make: Callable[[int], Any], dtype: torch.dtype, seed: int) -> None:
    compiled = torchcompile.compile(program, options={"strict": True})
    for call in range(CALLS):
        torch.manual_seed(seed + call)
        scalar = HELD.rate = make(call)
        x = torch.randn(3, dtype=torch.float64).mul(5).to(dtype)
        x = x if dtype.is_floating_point else x.abs() + 1  # NumPy and torch divide whole numbers by others than zero
        expected, found = (pytree.tree_leaves(one(x.clone(), scalar)) for one in (program, compiled))
        for one, other in zip(found, expected, strict=True):
            told = f"seed {seed}, call {call}: {one!r}, not {other!r}"
            assert type(one) is type(other), told
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, equal_nan=True, msg=told)
            elif isinstance(other, numpy.generic):
                assert one.dtype == other.dtype and numpy.allclose(one, other, equal_nan=True), told
            else:
                assert one == other or one != one, told
    report = torchcompile.report()
    assert report.captured <= 2 and not report.breaks and not report.fallbacks, report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_scalar_of_each_call(program: Callable[..., Any], kind: str) -> None:
    if kind == "bool" and program in (among_numpys_own, as_numbers):
        pytest.skip("a truth value is no number to compute with")
    run(program, KINDS[kind], torch.float64, random.randrange(1 << 30))


@pytest.mark.parametrize("left", [False, True], ids=["behind", "in front"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_beside_a_tensor(name: str, kind: str, left: bool) -> None:
    if left and name.startswith("i"):
        pytest.skip("it is the scalar's name that gets the result")
    apply, seed = OPERATORS[name], random.randrange(1 << 30)

    def program(x: torch.Tensor, s: Any) -> Any:
        return apply(s, x) if left else apply(x, s)

    for dtype in (torch.float64, torch.int64):
        if name.startswith("i") and dtype is torch.int64:
            continue  # of floats eager refuses it
        torchcompile.reset()
        run(program, KINDS[kind], dtype, seed)
        fixed = KINDS[kind](1)
        torchcompile.reset()
        run(program, lambda call, fixed=fixed: fixed, dtype, seed)  # type: ignore[misc]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize(
    "make",
    [
        lambda i: numpy.longdouble(i + 0.5),
        lambda i: numpy.complex64(i + 0.5j),
        lambda i: numpy.str_("a" * i),
        lambda i: numpy.datetime64(i, "D"),
        lambda i: numpy.array([(i,)], dtype=[("a", "i4")])[0],
    ],
    ids=["longdouble", "complex64", "str_", "datetime64", "void"],
)
def test_a_scalar_that_torch_has_no_dtype_of_is_that_of_each_call(make: Callable[[int], Any]) -> None:
    programs: tuple[Callable[..., Any], ...] = (
        lambda x, s: (x + 1, s),
        lambda x, s: (x + 1, s.item()),
        lambda x, s: (x + len(str(s)), str(s)),
        lambda x, s: (x + 1, s == s, numpy.asarray(s).dtype.name),
    )
    for program in programs:
        torchcompile.reset()
        compiled = torchcompile.compile(program)
        for call in range(4):
            x, scalar = torch.randn(3, dtype=torch.float64), make(call)
            expected, found = program(x, scalar), compiled(x, scalar)
            torch.testing.assert_close(found[0], expected[0])
            assert type(found[1]) is type(expected[1]) and found[1:] == expected[1:]


def test_signs_of_zero_and_what_is_no_number() -> None:
    def program(x: torch.Tensor, s: Any) -> Any:
        return 1 / (x * 0 + s), x * s

    compiled = torchcompile.compile(program, options={"strict": True})
    x = torch.ones(2, dtype=torch.float64)
    for kind in (numpy.float32, numpy.float64):
        for value in (0.0, -0.0, float("nan"), float("inf"), -0.0, 0.0):
            torch.testing.assert_close(compiled(x, kind(value)), program(x, kind(value)), equal_nan=True)
