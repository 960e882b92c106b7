"""Loops with another number of rounds at each call: eager's results at every number, by a fixed number of versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo
from primtorch.ledger import Effect, of
from torchdynamo.api import owner_of

ROUNDS = (3, 1, 2, 5, 4, 6, 0, 7, 8, 9, 10, 12)  # the versions for the first two are unrolled
MORE = (11, 3, 0, 13)


@dataclass(frozen=True)
class Case:
    """A program, its arguments for a number of rounds, and how many versions its parts have at most together."""

    program: Callable[..., Any]
    given: Callable[[int], tuple[Any, ...]]
    most: int


CASES: dict[str, Case] = {}


def case(given: Callable[[int], tuple[Any, ...]], most: int) -> Callable[[Any], Any]:
    def add(program: Any) -> Any:
        CASES[program.__name__] = Case(program, given, most)
        return program

    return add


def row(i: int, requires_grad: bool = False) -> torch.Tensor:
    return (torch.arange(4.0) + i).requires_grad_(requires_grad)


def parts(n: int) -> tuple[Any, ...]:
    return ([row(i) for i in range(n)],)


def leaves(n: int) -> tuple[Any, ...]:
    return ([row(i, requires_grad=True) for i in range(n)],)


def items(n: int) -> tuple[Any, ...]:
    return ({f"k{i}": row(i) for i in range(n)},)


def number(n: int) -> tuple[Any, ...]:
    return row(1), n


# -- what is looped over ------------------------------------------------------------------------


@case(parts, most=7)
def a_list(xs: Any) -> Any:
    total = 0
    for x in xs:
        total = total + x.sin()
    return total


@case(lambda n: (tuple(parts(n)[0]),), most=7)
def a_tuple(xs: Any) -> Any:
    total = 0
    for x in xs:
        total = total + x.sin()
    return total


@case(lambda n: tuple(parts(n)[0]), most=5)
def all_that_is_given(*xs: Any) -> Any:
    total = torch.zeros(4)
    for x in xs:
        total = total + x.sin()
    return total


@case(items, most=5)
def items_of_a_dict(table: Any) -> Any:
    total = torch.zeros(4)
    for x in table.values():
        total = total + x
    return total


@case(items, most=7)
def keys_of_a_dict(table: Any) -> Any:
    total = torch.zeros(4)
    for name in table:
        total = total + table[name]
    return total


@case(items, most=10)
def a_dict_of_a_dict(table: Any) -> Any:
    return {name: x * 2 for name, x in table.items()}


@case(items, most=15)
def names_that_are_given(table: Any) -> Any:
    return keywords(**table)


def keywords(**table: Any) -> Any:
    total = torch.zeros(4)
    for name, x in table.items():
        total = total + x * len(name)
    return total


@case(number, most=5)
def a_range(x: Any, n: int) -> Any:
    for i in range(n):
        x = x + i
    return x


@case(number, most=7)
def a_comprehension(x: Any, n: int) -> Any:
    return [x * i for i in range(n)]


@case(number, most=13)
def a_range_that_is_kept(x: Any, n: int) -> Any:
    numbers = range(1, n + 1, 2)
    for i in numbers:
        x = x + i
    for i in reversed(numbers):
        x = x * 0.5 + i
    return x, len(numbers), numbers


@case(parts, most=10)
def items_by_their_number(xs: Any) -> Any:
    total = torch.zeros(4)
    for i in range(len(xs)):
        total = total + xs[i]
    return total


@case(number, most=12)
def places_that_are_filled(x: Any, n: int) -> Any:
    found = [None] * 20
    for i in range(n):
        found[i] = x * i
    return found


@case(lambda n: (torch.linspace(-1, 1, 4 * n).reshape(n, 4),), most=8)
def rows(x: Any) -> Any:
    total = torch.zeros(4)
    for part in x:
        total = total + part.sin()
    return total


@case(lambda n: (torch.linspace(-1, 1, 4 * n).reshape(n, 4),), most=9)
def steps_of_a_recurrence(x: Any) -> Any:
    state = torch.zeros(4)
    for step in range(x.shape[0]):
        state = torch.tanh(state * 0.5 + x[step])
    return state


@case(number, most=7)
def while_a_number_says(x: Any, n: int) -> Any:
    i = 0
    while i < n:
        x = x + i
        i += 1
    return x


@case(number, most=9)
def while_two_numbers_say(x: Any, n: int) -> Any:
    i = 0
    while i < n and i < 9:
        x = x + i
        i += 2
    else:
        x = x * 3
    return x, i


@case(number, most=7)
def until_a_number_says(x: Any, n: int) -> Any:
    while True:
        if n <= 0:
            break
        x = x * 0.5 + n
        n -= 1
    return x, n


@case(number, most=14)
def rounds_that_a_number_ends(x: Any, n: int) -> Any:
    for i in range(20):
        if i >= n:
            break
        x = x + i
    return x


@case(lambda n: (*parts(n), *parts(5)), most=7)
def several_at_once(xs: Any, ys: Any) -> Any:
    total = torch.zeros(4)
    for i, (x, y) in enumerate(zip(xs, ys, strict=False), start=1):
        total = total + x * y * i
    return total


@case(lambda n: (*parts(n), *parts(5)), most=7)
def several_of_one_length(xs: Any, ys: Any) -> Any:
    total = torch.zeros(4)
    for x, y in zip(xs, ys, strict=True):
        total = total + x * y
    return total


@case(parts, most=9)
def backwards_mapped_and_filtered(xs: Any) -> Any:
    total = torch.zeros(4)
    for x in reversed(xs):
        total = total * 0.5 + x
    for x in map(lambda a: a * 2, filter(lambda a: a.shape[0] == 4, xs)):
        total = total + x
    return total


@case(parts, most=7)
def pairs_of_one_iterator(xs: Any) -> Any:
    each = iter(xs)
    total = torch.zeros(4)
    for a, b in zip(each, each, strict=False):
        total = total + a * b
    return total


# -- what a round does --------------------------------------------------------------------------


@case(leaves, most=7)
def gradients(xs: Any) -> Any:
    total = 0
    for x in xs:
        total = total + (x * x).sum()
    return total


@case(lambda n: ([torch.ones(3 + i % 3) * i for i in range(n)],), most=7)
def shapes(xs: Any) -> Any:
    total = 0
    for x in xs:
        total = total + x.sum()
    return total


@case(lambda n: ([row(i).to((torch.float32, torch.float64, torch.int64)[i % 3]) for i in range(n)],), most=9)
def dtypes(xs: Any) -> Any:
    found = []
    for x in xs:
        found.append(x * 2)
    return found


@case(parts, most=7)
def writes(xs: Any) -> Any:
    for i, x in enumerate(xs):
        x.add_(i)
        xs[i] = x * 2
    return xs


@case(parts, most=7)
def a_list_that_grows_meanwhile(xs: Any) -> Any:
    for x in xs:
        if len(xs) < 15:
            xs.append(x + 1)
    return xs


@case(parts, most=15)
def a_list_that_shrinks_meanwhile(xs: Any) -> Any:
    total = 0
    for x in xs:
        xs.pop()
        total = total + x
    return total, xs


@case(parts, most=9)
def ways_out(xs: Any) -> Any:
    total = torch.zeros(4)
    for i, x in enumerate(xs):
        if i % 2:
            continue
        if i == 6:
            break
        total = total + x
    else:
        return total * 3
    return total


@case(lambda n: ([parts(i)[0] for i in range(n)],), most=9)
def loops_in_loops(nested: Any) -> Any:
    total = torch.zeros(4)
    for xs in nested:
        for x in xs:
            total = total + x.sin()
        total = total * 2
    return total


@case(number, most=9)
def ranges_in_ranges(x: Any, n: int) -> Any:
    for i in range(n):
        for j in range(i):
            x = x + j * i
    return x


@case(lambda n: ([torch.eye(4) * i for i in range(n)],), most=12)
def under_modes(xs: Any) -> Any:
    total = torch.zeros(4, 4, requires_grad=True) * 1
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for x in xs:
            total = total + x @ x
    return total, total.requires_grad, torch.is_grad_enabled(), total @ total


@case(parts, most=8)
def handled(xs: Any) -> Any:
    total = torch.zeros(4)
    try:
        for i, x in enumerate(xs):
            if i == 5:
                raise ValueError(i)
            total = total + x
    except ValueError:
        total = total * 100
    finally:
        total = total + 1
    return total


@case(parts, most=9)
def raised(xs: Any) -> Any:
    total = torch.zeros(4)
    for i, x in enumerate(xs):
        if i == 5:
            raise ValueError(i)
        total = total + x
        x.mul_(2)
    return total


@case(parts, most=9)
def refused_by_an_operator(xs: Any) -> Any:
    total = torch.zeros(4)
    for i, x in enumerate(xs):
        total = total + x.reshape(2 if i < 4 else 3, -1).sum()
        x.mul_(2)
    return total


@case(parts, most=12)
def one_loop_behind_another(xs: Any) -> Any:
    found = [x.sin() for x in xs]
    total = torch.zeros(4)
    for one in found:
        total = total + one
    return total, found


@case(parts, most=9)
def within_a_generator(xs: Any) -> Any:
    def each() -> Any:
        for x in xs:
            yield x.sin()

    total = torch.zeros(4)
    for y in each():
        total = total + y
    return total


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, xs: Any) -> Any:
        state = torch.zeros(4)
        for x in xs:
            state = state + self.layer(x).relu()
        return state


torch.manual_seed(0)
SUMMED = Summed()


@case(parts, most=7)
def in_a_module(xs: Any) -> Any:
    return SUMMED(xs) * 2


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return {key: copied(item) for key, item in value.items()} if type(value) is dict else value


def called(program: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """What a call gives, or raises; and what it leaves in its arguments, with their gradients."""
    try:
        result = program(*given)
    except (ValueError, RuntimeError) as error:
        result = (type(error).__name__, str(error))
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    return result, given, [getattr(x, "grad", None) for x in given[0]] if given and type(given[0]) is list else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) in (list, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    return type(one) is type(other) and one == other


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("name", CASES)
def test_a_further_number_of_rounds_needs_no_further_version(name: str) -> None:
    found = CASES[name]
    options = torchdynamo.CaptureOptions(strict=True, on_recompile="continue", recompile_limit=8)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(found.program)
    versions = []
    for rounds in (ROUNDS, MORE):
        for n in rounds:
            given = found.given(n)
            wanted, got = called(found.program, copied(given)), called(compiled, given)
            assert same(wanted, got), (n, wanted, got)
        versions.append(len(owner_of(compiled).versions()))
    assert versions[0] == versions[1] <= found.most, versions
    assert not owner_of(compiled).stats.fallbacks, owner_of(compiled).stats.fallbacks


def test_the_loop_is_one_event_that_says_what_to_do() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(a_list)
    for n in ROUNDS:
        compiled(*parts(n))
    (event,) = of(owner_of(compiled).stats.events, Effect.BREAK)
    assert event.kind.id == "loop_of_each_length" and "fullgraph=True" in event.kind.remedy
    assert event.detail == "the next round of a loop over the list at xs"
    assert event.line is not None and event.line.line == a_list.__code__.co_firstlineno + 3


def test_versions_for_the_first_numbers_stay_in_use() -> None:
    """The version for any number of rounds comes last, however often it is used."""
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(a_list)
    for n in (3, 1, 5, 5, 5, 3, 1, 3):
        compiled(*parts(n))
    entries = owner_of(compiled).compiled().entries  # type: ignore[union-attr]
    assert [entry.comes_last for entry in entries] == [False, False, True]
    assert [entry.hits for entry in entries] == [3, 2, 3]


def test_one_number_of_rounds_is_no_reason_to_end_a_graph() -> None:
    """A symbol that is the number of rounds, and another reason for a further version."""
    options = torchdynamo.CaptureOptions(strict=True, dynamic=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(a_range)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(3, dtype=dtype)
        assert torch.equal(compiled(x, 4), a_range(x, 4))
    assert not owner_of(compiled).stats.breaks


def checked(xs: Any, limit: int) -> Any:
    total = torch.zeros(4)
    for x in xs:
        if x.shape[0] > limit:
            raise ValueError(limit)
        total = total + x.sum()
    return total


def test_a_condition_of_numbers_that_ends_no_loop_is_a_guard() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(checked)
    for size, limit in ((2, 9), (3, 8), (4, 7), (5, 6), (6, 7)):
        xs = [torch.ones(size), torch.ones(size)]
        assert torch.equal(compiled(xs, limit), checked(xs, limit))
    assert not owner_of(compiled).stats.breaks


@pytest.mark.parametrize(("program", "given"), [(a_list, parts), (a_range, number), (while_a_number_says, number)])
def test_where_no_graph_may_end_there_is_a_version_for_each_number(program: Any, given: Any) -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True, recompile_limit=4)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    region = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    with torchdynamo.error_on_graph_break():
        for n in (1, 2, 3, 4, 3, 1):
            for one in (compiled, region):
                torch.testing.assert_close(one(*given(n)), program(*given(n)))
    assert not owner_of(region).stats.breaks
    with pytest.raises(torchdynamo.errors.RecompileLimitExceeded, match="length 4 expected, got 7|n = [79]"):
        for n in (7, 9):
            compiled(*given(n))


def pops(xs: list[Any]) -> Any:
    last = xs.pop()
    xs.insert(0, last)
    return last * 2, xs


def test_a_method_of_a_list_is_its_own_behind_the_graph() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(pops)
    for n in (1, 2, 3, 4, 5, 6, 7):
        given = parts(n)
        assert same(pops(*copied(given)), compiled(*given))
    assert owner_of(compiled).stats.breaks


def an_iterator_that_is_left(xs: Any) -> Any:
    each = iter(xs)
    total = torch.zeros(4)
    for x in each:
        total = total + x
        if x[0].item() > 2:
            break
    return total, list(each), type(each).__name__


def test_an_iterator_that_a_loop_leaves_is_pythons_own() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(an_iterator_that_is_left)
    for n in ROUNDS:
        given = parts(n)
        assert same(an_iterator_that_is_left(*copied(given)), compiled(*given))


def done_in_c(x: Any, n: int) -> Any:
    numbers = list(range(n)), sum(range(n)), tuple(reversed(range(n))), sorted(range(n), key=lambda i: -i), {*range(n)}
    return sum(x), list(x), numbers, range(n)[1:], n in range(n), len(range(n)), str(range(n))


def test_rounds_that_are_done_in_c_are_done_for_real() -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(done_in_c)
    for n in ROUNDS:
        x = torch.linspace(-1, 1, 4 * n).reshape(n, 4)
        assert same(done_in_c(x, n), compiled(x, n))


def test_rounds_over_modules_stay_in_one_graph() -> None:
    """Modules are known by their identity: there would be a version of the round for each."""
    layers = [nn.Linear(4, 4) for _ in range(6)]

    def stacked(x: Any, used: list[nn.Module]) -> Any:
        for layer in used:
            x = layer(x)
        return x

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(stacked)
    for n in (2, 4, 6, 2):
        torch.testing.assert_close(compiled(row(1), layers[:n]), stacked(row(1), layers[:n]))
    assert not owner_of(compiled).stats.breaks
