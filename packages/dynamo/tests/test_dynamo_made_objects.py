"""Classes, functions and exceptions that a program makes and hands out: new ones at each call, as in eager."""

from __future__ import annotations

import collections
import itertools
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

Made = tuple[torch.Tensor, tuple[Any, ...]]  # a result, and what is new at each call


def local_class(x: torch.Tensor) -> Made:
    class Local:
        count = 0

    Local.count += 1
    return x + Local.count, (Local,)


def class_of_an_instance(x: torch.Tensor) -> Made:
    class Local:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    made = Local(x * 2)
    return made.value, (type(made), made)


def class_kept_in_a_list(x: torch.Tensor) -> Made:
    kept = []
    for scale in (1, 2):

        class Local:
            factor = scale

        kept.append(Local)
    return x * kept[1].factor, tuple(kept)


def class_made_by_type(x: torch.Tensor) -> Made:
    return x + 1, (type("Made", (Exception,), {"code": 3}),)


def named_tuple(x: torch.Tensor) -> Made:
    pair = collections.namedtuple("Pair", "a b")(x, x + 1)
    return pair.b, (type(pair),)


def class_behind_a_break(x: torch.Tensor) -> Made:
    print(end="")

    class Local(Exception):
        pass

    return x + 1, (Local,)


def local_functions(x: torch.Tensor) -> Made:
    def bare() -> int:
        return 1

    def with_default(n: int = 2) -> int:
        return n

    return x + bare(), (bare, with_default, lambda: 3, lambda: bare)


def kept_exception(x: torch.Tensor) -> Made:
    kept: list[BaseException] = []
    try:
        _raise_below(3)
    except KeyError as error:
        kept.append(error)
    return x + len(kept), tuple(kept)


def exception_that_was_never_raised(x: torch.Tensor) -> Made:
    return x + 1, (ValueError("kept"),)


def _raise_below(depth: int) -> None:
    if depth == 0:
        raise KeyError("deep")
    _raise_below(depth - 1)


PROGRAMS: list[Callable[[torch.Tensor], Made]] = [
    local_class,
    class_of_an_instance,
    class_kept_in_a_list,
    class_made_by_type,
    named_tuple,
    class_behind_a_break,
    local_functions,
    kept_exception,
    exception_that_was_never_raised,
]


def described(made: Any) -> Any:
    """What is the same of an object at each call."""
    if isinstance(made, (type, types.FunctionType)):
        return made.__module__, made.__qualname__, sorted(vars(made))
    if isinstance(made, BaseException):
        return made.args, [(frame.name, frame.lineno) for frame in traceback.extract_tb(made.__traceback__)]
    return None


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_program_makes_is_new_at_each_call(program: Callable[[torch.Tensor], Made]) -> None:
    x = torch.ones(2)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    expected, wanted = program(x)
    results = [compiled(x) for _ in range(3)]
    for result, made in results:
        assert torch.equal(result, expected)
        assert list(map(described, made)) == list(map(described, wanted))
    for same in zip(*(made for _, made in results), strict=True):
        assert len(set(map(id, same))) == len(same), same


def test_a_class_that_stays_within_the_program_is_part_of_its_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        class Scale:
            def __init__(self, by: float) -> None:
                self.by = by

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.by

        return Scale(2.0)(x)

    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True)
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward, options=options)(program)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


# -- iterators of itertools ----------------------------------------------------------------------


def itertools_over(x: torch.Tensor) -> dict[str, Any]:
    a = [x, x * 2, x * 3]
    return {
        "chain": itertools.chain(a, [x + 1]),
        "from_iterable": itertools.chain.from_iterable([[x], [x - 1]]),
        "accumulate": itertools.accumulate(a),
        "accumulate by a function": itertools.accumulate(a, lambda p, q: p - q),
        "cycle": itertools.islice(itertools.cycle(a), 5),
        "islice": itertools.islice(a, 1, 3),
        "zip_longest": itertools.zip_longest(a, [x]),
        "product": itertools.product(a, [x]),
        "permutations": itertools.permutations(a, 2),
        "combinations": itertools.combinations(a, 2),
        "starmap": itertools.starmap(torch.add, [(x, x), (x, x)]),
        "takewhile": itertools.takewhile(lambda t: t.dim() == 1, a),
        "dropwhile": itertools.dropwhile(lambda t: t.dim() == 2, a),
        "filterfalse": itertools.filterfalse(lambda t: t.dim() == 2, a),
        "compress": itertools.compress(a, [1, 0, 1]),
        "repeat": itertools.repeat(x, 2),
        "count": itertools.islice(itertools.count(3), 2),
    }


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="these iterators no longer say what they are made of")
@pytest.mark.parametrize("advanced", [0, 1])
@pytest.mark.parametrize("name", itertools_over(torch.ones(1)))
def test_iterators_leave_the_graph_as_far_as_they_have_come(name: str, advanced: int) -> None:
    def program(x: torch.Tensor) -> Any:
        iterator = itertools_over(x)[name]
        for _ in range(advanced):
            next(iterator)
        return iterator, x.sin()

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    for x in (torch.randn(3), torch.randn(3)):
        found, wanted = compiled(x)[0], program(x)[0]
        assert type(found) is type(wanted)
        torch.testing.assert_close(list(found), list(wanted))
    assert not torchdynamo.stats().breaks
