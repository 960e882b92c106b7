"""Iterators, generators and containers."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn

from .record import PYTHON, Program, maker, part


@part(PYTHON, "itertools objects returned")
def iterators(x: torch.Tensor) -> Any:
    return list(itertools.accumulate([x, x * 2, x * 3])), itertools.chain([x], [x + 1])


@part(PYTHON, "zip, islice and repeat returned")
def more_iterators(x: torch.Tensor) -> Any:
    return zip([x], [x + 1], strict=True), itertools.islice(itertools.count(1), 2), itertools.repeat(x, 2)


@part(PYTHON, "tee, groupby and pairwise returned, partly consumed")
def begun_iterators(x: torch.Tensor) -> Any:
    first, second = itertools.tee([x, x + 1, x + 2])
    next(first)
    groups = itertools.groupby([x, x + 1, x[:1]], key=len)
    _, group = next(groups)
    next(group)
    pairs = itertools.pairwise([x, x + 1, x + 2])
    next(pairs)
    return first, second, group, map(operator.itemgetter(0), groups), pairs, iter(collections.deque([x]))


@part(PYTHON, "the iterators of itertools, begun and gone on with")
def gone_on_with(x: torch.Tensor) -> Any:
    rows = [x, x + 1, x[:1]]
    made = [
        itertools.accumulate(rows[:2], lambda a, b: a * b, initial=x),
        itertools.chain.from_iterable([rows[:1], rows[1:]]),
        itertools.compress(rows, [1, 0, 1]),
        itertools.cycle(rows[:2]),
        itertools.dropwhile(lambda t: len(t) > 2, [*rows, x]),
        itertools.filterfalse(lambda t: len(t) > 2, [*rows, x[:1]]),
        itertools.islice(rows, 1, None),
        itertools.pairwise(rows),
        itertools.permutations(rows, 2),
        itertools.product(rows, [2, 3]),
        itertools.starmap(torch.add, [(x, x), (x, 1)]),
        itertools.takewhile(lambda t: len(t) > 2, rows),
        itertools.zip_longest(rows, rows[:1], fillvalue=x),
    ]
    return [next(one) for one in made], [next(one) for one in made if type(one) is not itertools.compress], made[0]


@part(PYTHON, "a list that is filled and emptied")
def filled_and_emptied(x: torch.Tensor) -> Any:
    rows = []
    for i in range(x.shape[0]):
        rows.append(x[i] * i)
    while len(rows) > 2:
        rows.pop()
    return torch.cat(rows)


@part(PYTHON, "a list that grows with the batch")
def growing(x: torch.Tensor) -> Any:
    return torch.stack([row.sin() for row in x]).sum(0)


@maker(PYTHON, "functools.singledispatch")
def generic() -> Program:
    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x

    @scaled.register(torch.Tensor)
    def of_tensor(x: torch.Tensor) -> Any:
        return x * 2

    return lambda x: scaled(x) * scaled(3)


@part(PYTHON, "generators")
def generating(x: torch.Tensor) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        for row in x.unbind(1):
            yield row * 2

    return sum(parts())


@part(PYTHON, "a generator that is sent to")
def sent_to(x: torch.Tensor) -> Any:
    def doubling() -> Generator[torch.Tensor, torch.Tensor, None]:
        got = yield x
        yield got * 2

    steps = doubling()
    return steps.send(next(steps) + 1)


@part(
    PYTHON,
    "a generator across a break",
    "print",
    why="it prints: the break is what the program is about; instead: see print",
)
def generating_across(x: torch.Tensor) -> Any:
    def parts() -> Iterator[torch.Tensor]:
        for place, row in enumerate(x.unbind(1)):
            if place == 1:
                print(end="")
            yield row * 2

    return sum(parts())


@part(PYTHON, "collections")
def containers(x: torch.Tensor) -> Any:
    counts = collections.Counter("hello")
    by_name: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    for place, name in enumerate("aba"):
        by_name[name].append(x * place)
    queue = collections.deque([x], maxlen=2)
    queue.append(x * counts["l"])
    return {name: torch.stack(parts).sum(0) for name, parts in by_name.items()}, queue.popleft()


@part(PYTHON, "functools.partial, operator, map, zip")
def functional(x: torch.Tensor) -> Any:
    scaled = functools.partial(torch.mul, other=2)
    return functools.reduce(torch.add, map(scaled, x.unbind(0)))


@maker(PYTHON, "functools.lru_cache")
def caching() -> Program:
    @functools.lru_cache
    def factor(n: int) -> float:
        return math.sqrt(n)

    return lambda x: x * factor(x.shape[1])


@maker(PYTHON, "parameters told apart by id()")
def tied() -> Program:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net.append(net[0])

    def program(x: torch.Tensor) -> Any:
        seen = set()
        for layer in net:
            for parameter in layer.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    x = x + parameter.sum()
        return x, len(seen)

    return program
