"""What eager refuses, compiled programs refuse: with its type of error, whether sizes, numbers or values are at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchcompile

INF = float("inf")


def none(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


WHOLE = torch.tensor([4, -5, 6])
SOME_ZERO = torch.tensor([1, 0, 2])
BYTES, BYTES_ZERO = WHOLE.abs().to(torch.uint8), SOME_ZERO.to(torch.uint8)

# Programs without arguments; some of them raise.
PROGRAMS: dict[str, Callable[[], Any]] = {
    **{f"{name} of nothing": lambda name=name: getattr(none(0), name)() for name in (
        "max", "min", "argmax", "argmin", "amax", "amin", "aminmax", "median", "nanmedian", "mode", "sum",
    )},
    **{f"{name} along {dim} of (0, 3)": lambda name=name, dim=dim: getattr(none(0, 3), name)(dim=dim) for dim in (0, 1)
       for name in ("max", "min", "argmax", "argmin", "amax", "amin", "aminmax", "median", "nanmedian", "mode",
                    "logsumexp", "cummax", "sort", "prod", "all")},
    "median of no integers": lambda: torch.empty(0, dtype=torch.int64).median(),
    **{f"norm {p} of nothing": lambda p=p: torch.linalg.vector_norm(none(0), p) for p in (2, 0, 1, INF, -INF, -1)},
    **{f"norm {p} along 0": lambda p=p: torch.linalg.vector_norm(none(0, 3), p, dim=0) for p in (2, INF, -2)},
    "norm inf along 1": lambda: torch.linalg.vector_norm(none(0, 3), INF, dim=1),
    "distance": lambda: torch.dist(none(0), none(0), INF),
    "adaptive average": lambda: F.adaptive_avg_pool2d(none(1, 3, 0, 0), 2),
    "interpolation": lambda: F.interpolate(none(1, 1, 0), 4),
    "interpolation of no samples": lambda: F.interpolate(none(0, 1, 3), 4),
    **{f"{name} by zeros": lambda f=f: f(WHOLE, SOME_ZERO) for name, f in (
        ("floor division", torch.floor_divide), ("remainder", torch.remainder), ("fmod", torch.fmod),
        ("truncated division", lambda a, b: torch.div(a, b, rounding_mode="trunc")), ("division", torch.div),
        ("a part of a remainder", lambda a, b: (a % b)[:1]), ("remainder of a number", lambda a, b: 5 % b),
        ("division in place", lambda a, b: a.clone().floor_divide_(b)), ("gcd", torch.gcd), ("lcm", torch.lcm),
        ("what is not selected", lambda a, b: torch.where(b == 0, 0, a // b)), ("no element", lambda a, b: a[:0] // b[1]),
        ("a float's floor division", lambda a, b: a.double() // b),
    )},
    "bytes by zeros": lambda: (BYTES // BYTES_ZERO, BYTES % BYTES_ZERO),
    "a number zero": lambda: WHOLE // 0,
    "a number": lambda: (WHOLE // 3, WHOLE % -3, 7 // SOME_ZERO.add(1)),
    "around a division": lambda: F.pad(WHOLE // SOME_ZERO.add(1), (1, 2)) + 1,
    "remainder of truth values": lambda: WHOLE.bool() % SOME_ZERO.bool(),
    "negative power": lambda: WHOLE**-1,
    "negative powers": lambda: WHOLE**-SOME_ZERO,
    "empty range": lambda: torch.randint(5, 5, (3,)),
    "turned range": lambda: torch.empty(3).random_(4, 2),
    "range below the dtype": lambda: torch.empty(3, dtype=torch.uint8).random_(-3, 2),
    "range above the dtype": lambda: torch.randint(0, 300, (3,), dtype=torch.uint8),
    "integers of a dtype without random_": lambda: torch.empty(3, dtype=torch.uint32).random_(),
    "integers from a uniform distribution": lambda: torch.rand(3, dtype=torch.int64),
    "probability above one": lambda: torch.empty(3).bernoulli_(1.5),
    "probabilities above one": lambda: torch.bernoulli(torch.full((3,), 1.5)),
    "negative deviations": lambda: torch.normal(0.0, torch.full((2,), -1.0)),
}  # fmt: skip


def outcome(program: Callable[..., Any], *args: Any) -> Any:
    try:
        return program(*args)
    except Exception as error:
        return error


def compare(eager: Any, ours: Any) -> None:
    if isinstance(eager, Exception) or isinstance(ours, Exception):
        assert isinstance(ours, type(eager)), f"{ours!r} where eager has {eager!r}"
    else:
        torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.expected_eager("program_raised", "graph_raised", "graph_not_compiled")
@pytest.mark.parametrize("name", PROGRAMS)
def test_refusals_are_eagers(name: str) -> None:
    program = PROGRAMS[name]
    compare(outcome(program), outcome(torchcompile.compile(program)))


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_divisor_that_is_zero_at_a_later_call(dynamic: bool) -> None:
    def program(a, b):
        return (a // b + 1, (a % b).sum(0))

    compiled = torchcompile.compile(program, fullgraph=True, dynamic=dynamic)
    for rows, divisor in ((3, 2), (3, 0), (70, 1), (70, 0), (5, -1)):
        a, b = torch.arange(rows * 40).view(rows, 40), torch.arange(1, 41)
        b[17] = divisor
        compare(outcome(program, a, b), outcome(compiled, a, b))


OF_SELECTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: x.max(), "amin": lambda x: x.amin(), "argmax": lambda x: x.argmax(), "max.dim": lambda x: x.max(0),
    "median": lambda x: x.median(), "nanmedian": lambda x: x.nanmedian(), "sum": lambda x: x.sum(),
}  # fmt: skip


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("name", OF_SELECTED)
def test_elements_that_only_the_data_knows_of(name: str) -> None:
    def program(x):
        return OF_SELECTED[name](x[x > 0])

    compiled = torchcompile.compile(program, fullgraph=True)
    x = torch.tensor([1.0, -2.0, 3.0])
    for given in (x, -x.abs(), x):
        eager, ours = outcome(program, given), outcome(compiled, given)
        if isinstance(eager, Exception):  # found in the middle of the graph: the call runs again, eagerly
            assert type(ours) is type(eager), ours
        else:
            compare(eager, ours)
