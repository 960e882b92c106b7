"""Numbers taken out of tensors, as places and sizes within others: what eager refuses is refused, nothing is clipped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import torchcompile

pytestmark = pytest.mark.warm


@dataclass(frozen=True)
class Case:
    """A program of a tensor of four rows, numbers that eager takes, and numbers that it does not."""

    program: Callable[[torch.Tensor, torch.Tensor], Any]
    taken: tuple[tuple[int, ...], ...]
    refused: tuple[tuple[int, ...], ...]
    one_graph: bool = True


def written_at(x: torch.Tensor, n: torch.Tensor) -> Any:
    made = x.clone()
    made[n.item()] = 5.0
    return made


def written_in_part(x: torch.Tensor, n: torch.Tensor) -> Any:
    made = x.clone()
    made.narrow(0, n.item(), 1).fill_(2.0)
    return made


def first_rows(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = n.item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return x[:count].sum(0), (x * 2)[:count]


def row(x: torch.Tensor, n: torch.Tensor) -> Any:
    place = n.item()
    torch._check(place >= 0)
    torch._check(place < x.shape[0])
    return x[place].sin()


def views_of_one_result(x: torch.Tensor, n: torch.Tensor) -> Any:
    made = x * 2
    return made.narrow(0, 0, n.item()), made, made.narrow(0, n.item(), 1).t()


FAR = 1 << 40  # a read as far away as this ends the process

CASES: dict[str, Case] = {
    "a narrow view": Case(lambda x, n: x.narrow(0, 1, n.item()), ((1,), (3,), (0,)), ((4,), (-1,), (FAR,), (-FAR,))),
    "narrow views": Case(
        lambda x, n: x.split([n.item(), x.shape[0] - n.item()]), ((1,), (3,), (4,)), ((5,), (-1,), (FAR,), (-FAR,))
    ),
    "views of one result": Case(views_of_one_result, ((1,), (3,), (0,)), ((4,), (-1,), (FAR,), (-FAR,))),
    "views of two results": Case(
        lambda x, n: (*views_of_one_result(x, n[0]), *views_of_one_result(x * 3, n[1])),
        ((1, 2), (3, 0), (0, 3), (2, 2)),
        ((4, 1), (1, 4), (-1, 1), (1, FAR), (-FAR, 2)),
    ),
    "asserted rows": Case(first_rows, ((1,), (4,), (0,)), ((5,), (-1,), (FAR,), (-FAR,))),
    "an asserted row": Case(row, ((1,), (3,), (0,)), ((4,), (-1,), (FAR,), (-FAR,))),
    "narrow": Case(
        lambda x, n: x.narrow(0, *n.tolist()) * 2,
        ((1, 2), (2, 2), (4, 0), (0, 4), (3, 1)),
        ((3, 4), (5, 1), (1, -1), (-9, 1), (2, 3), (1, FAR), (FAR, 1), (-FAR, 1), (-FAR, FAR)),
    ),
    "narrow by its length": Case(
        lambda x, n: x.narrow(0, 1, n.item()).sum(0), ((1,), (3,), (0,)), ((4,), (-1,), (99,), (FAR,))
    ),
    "split": Case(
        lambda x, n: [part * 2 for part in x.split(n.tolist())],
        ((1, 3), (2, 2), (4, 0), (0, 4)),
        ((3, 4), (5, -1), (1, 1), (FAR, 4 - FAR), (-FAR, 4 + FAR)),
    ),
    "split of columns": Case(
        lambda x, n: [part.sum(1) for part in torch.split(x, n.tolist(), dim=1)],
        ((1, 0, 2), (3, 0, 0), (1, 1, 1)),
        ((1, 1, 2), (4, 0, -1), (FAR, 3, -FAR)),
    ),
    "split, computed with": Case(
        lambda x, n: [part.softmax(0) for part in x.split([n[0].item(), x.shape[0] - n[0].item()])],
        ((1,), (3,), (4,)),
        ((5,), (-1,), (FAR,), (-FAR,)),
    ),
    "a row that is written": Case(
        written_at, ((1,), (3,), (0,), (-1,)), ((4,), (-7,), (FAR,), (-FAR,)), one_graph=False
    ),
    "a part that is written": Case(written_in_part, ((1,), (3,), (0,)), ((4,), (9,), (FAR,), (-FAR,))),
    "a slice": Case(
        lambda x, n: x[n[0].item() : n[1].item()] * 2, ((0, 2), (3, 9), (2, 1), (-1, 4), (1, FAR), (-FAR, FAR)), ()
    ),
    "a slice that is given": Case(
        lambda x, n: x.slice_scatter(x[:2] * 3, 0, n[0].item(), n[1].item()),
        ((0, 2), (1, 3), (2, 4)),
        ((0, 3), (3, 5), (2, 1), (0, FAR), (FAR, FAR + 2)),
        one_graph=False,
    ),
    "a row that is given": Case(
        lambda x, n: x.select_scatter(x[0] * 3, 0, n.item()),
        ((0,), (3,), (-1,)),
        ((4,), (-5,), (99,), (FAR,), (-FAR,)),
        one_graph=False,
    ),
    "expand": Case(lambda x, n: x[:1].expand(n.item(), 3) * 2, ((1,), (5,), (0,), (-1,)), ((-2,),)),
}


def outcome(program: Callable[..., Any], numbers: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    leaves = pytree.tree_leaves(program(x, torch.tensor(numbers)))
    total: Any = sum((leaf.sin() * leaf).sum() for leaf in leaves)
    return [*leaves, torch.autograd.grad(total, x)[0]]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_within_bounds_and_beyond(name: str, backend: str) -> None:
    case = CASES[name]
    compiled = torchcompile.compile(case.program, backend=backend)
    for numbers in (n for n in case.taken if min(n) >= 0):  # of others it is told that the call ran again
        torch.testing.assert_close(outcome(compiled, numbers), outcome(case.program, numbers), rtol=1e-9, atol=1e-12)
    assert torchcompile.report().clean or not case.one_graph
    for numbers in (*case.taken, *case.refused, *case.taken):
        try:
            wanted = outcome(case.program, numbers)
        except Exception as error:
            assert numbers in case.refused
            with pytest.raises(type(error)) as told:
                outcome(compiled, numbers)
            assert str(told.value).partition("\n")[0] == str(error).partition("\n")[0]
            continue
        assert numbers in case.taken
        torch.testing.assert_close(outcome(compiled, numbers), wanted, rtol=1e-9, atol=1e-12)


def line_of(program: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(program)
    return f"{__file__}:{next(first + place for place, line in enumerate(lines) if text in line)}"


@pytest.mark.expected_eager("graph_raised")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("program", "number", "line", "condition"),
    [
        (first_rows, 5, "count <= x.shape[0]", "<="),
        (first_rows, -1, "count >= 0", ">= 0"),
        (row, 4, "place < x.shape[0]", "<"),
        (written_in_part, 4, "narrow", "<="),
        (views_of_one_result, -1, "narrow(0, 0", ">= 0"),
    ],
)
def test_a_refusal_names_the_users_line(
    program: Callable[..., Any],
    number: int,
    line: str,
    condition: str,
    dynamic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the assertion, or of the operator that takes such numbers alone; also where the program was found."""
    monkeypatch.setenv("TORCHCOMPILE_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHCOMPILE_CHECK_KERNELS", raising=False)
    for _ in ("compiled", "found"):
        torchcompile.reset()
        compiled = torchcompile.compile(program, dynamic=dynamic)
        x = torch.randn(4, 3, dtype=torch.float64)
        compiled(x, torch.tensor(1))
        with pytest.raises((RuntimeError, IndexError)):
            compiled(x, torch.tensor(number))
        (event,) = (event for event in torchcompile.report().events if event.kind.id == "graph_raised")
        told = re.escape(f"RuntimeError: {line_of(program, line)}: a number that the data told is refused: ")
        assert re.match(rf"{told}u\d {condition}.* does not hold", event.detail), event.detail


def test_as_many_numbers_as_generated_code_has_names_for_types() -> None:
    """Numbers are u0, u1, ...; in C++ u8, u16 and u32 are types."""

    def program(x: torch.Tensor, n: torch.Tensor) -> Any:
        numbers = n.tolist()
        return [torch.full((4,), number) > torch.arange(4) * number for number in numbers], x * sum(numbers)

    compiled = torchcompile.compile(program)
    torch.manual_seed(0)
    x, n = torch.randn(4, 3, dtype=torch.float64), torch.arange(1, 35)
    torch.testing.assert_close(compiled(x, n), program(x, n), rtol=1e-12, atol=0)
    assert torchcompile.report().clean


@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_a_number_of_any_sign_moves_places(dim: int | tuple[int, int]) -> None:
    """How far a tensor is rolled divides as Python's numbers do, whatever its sign."""

    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        far = (n, 1 - n) if isinstance(dim, tuple) else n
        return torch.roll(x, far, dim) * 2

    torchcompile.reset()
    compiled = torchcompile.compile(program)
    for n in (1, 2, 3, -1, -2, -3, -5, 0, 7, -7, 4, -4, 1001, -1001):
        x = torch.randn(4, 6, dtype=torch.float64)
        assert torch.equal(compiled(x, n), program(x, n)), n
