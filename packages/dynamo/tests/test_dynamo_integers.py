"""Integers that change between calls become inputs of the compiled code: a counter costs two versions, not one a call."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo

CALLS = 12
COUNT = 0


def versions(function: Any, calls: Iterable[tuple[Any, ...]], expected: Callable[..., Any], limit: int = 8) -> int:
    """Runs the compiled function beside eager; how many graphs were compiled."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True, recompile_limit=limit)
    compiled = torchdynamo.optimize(backend, options=options)(function)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), expected(*arguments), rtol=0, atol=0)
    return len(graphs)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.table = {"n": 0}
        self.items = [5]
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table["n"] += 2
        self.items[0] -= 1
        return self.linear(x) * self.table["n"] + self.items[0]


def test_module_counter() -> None:
    compiled, eager = Counter(), Counter()
    eager.load_state_dict(compiled.state_dict())
    x = torch.randn(4, 3)
    assert versions(compiled, [(x,)] * CALLS, eager) == 2
    assert (compiled.calls, compiled.table, compiled.items) == (CALLS, {"n": 2 * CALLS}, [5 - CALLS])


def test_global_closure_and_attribute_counters() -> None:
    state, inner = types.SimpleNamespace(step=-3), 0
    globals()["COUNT"] = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        global COUNT
        nonlocal inner
        COUNT += 1
        inner += 10
        state.step = state.step + 1
        return x + 1

    x = torch.randn(3)
    assert versions(step, [(x,)] * CALLS, lambda x: x + 1) == 2
    assert (COUNT, inner, state.step) == (CALLS, 10 * CALLS, CALLS - 3)


@pytest.mark.parametrize(
    ("program", "most"),
    [
        (lambda x, n: x * n + n, 2),
        (lambda x, n: x[: abs(n) + 1], 4),
        (lambda x, n: (x + 1, n, [n * 2 + 1], {"n": -n}, n // 3, n % 3), 2),
        (lambda x, n: torch.full((3,), n) + x, 2),
        (lambda x, n: x + 1 if n > 5 else x - n, 3),
        (lambda x, n: x + min(n, 3) + max(n, 0) + isinstance(n, int) + (type(n) is int), 4),
    ],
)
def test_integer_arguments(program: Callable[..., Any], most: int) -> None:
    x = torch.randn(3)
    assert versions(program, [(x, n) for n in range(-2, 10)], program) <= most


@pytest.mark.parametrize(
    "program",
    [
        lambda x, n: x + len(f"{n}{n!r}{str(n)}{[n]}" + "%s" % n + "{}".format(n)),  # noqa: UP031, UP032
        lambda x, n: {n: x}[n] + hash(n),
        lambda x, n: x + (n in {1, 2, 3}) + (n in (1, 2)),
        lambda x, n: x + divmod(n, 2)[0] + (n & 1) + (n << 1),
        lambda x, n: x + float(n) + int(n) + bool(n) + n / 2 + n**2,
        lambda x, n: x + sum(range(n)) + [1, 2, 3, 4, 5, 6][n],
        lambda x, n: x + ((n + 1) is [3][0]) + 2 * (n is not types.SimpleNamespace(a=2).a),
        lambda x, n: x + ((n > 2) is True) + 2 * ((n + 300) is (n + 299)) + 4 * (n is None),
    ],
)
def test_integers_that_are_needed_as_values(program: Callable[..., Any]) -> None:
    """C code that takes no symbol sees the number itself, and the version is for that number."""
    x = torch.randn(3)
    for sweep in ([1, 2, 3, 4, 5], [5, 1, 0, 3, 1]):
        versions(program, [(x, n) for n in sweep], program)


Pair = collections.namedtuple("Pair", "first second")  # noqa: PYI024  (its `__repr__` is Python code)


class Items(list):  # type: ignore[type-arg]
    pass


HOLDERS: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "float": lambda n: n * 0.5,
    "bool": lambda n: n > 4,
    "nested": lambda n: [{"a": (n,)}],
    "named tuple": lambda n: [Pair(n, 1)],
    "subclass": lambda n: Items([n]),
    "deque": lambda n: collections.deque([n]),
    "ordered": lambda n: collections.OrderedDict(a=n),
    "values": lambda n: {"a": n}.values(),
    "proxy": lambda n: types.MappingProxyType({"a": n}),
    "namespace": lambda n: types.SimpleNamespace(a=n),
    "slice": lambda n: slice(n),
    "shape": lambda n: torch.ones(n, 2).shape,
    "exception": lambda n: KeyError(n),
    "exceptions": lambda n: [ExceptionGroup("a", [ValueError(n, [n])])],
    "system": lambda n: OSError(n, "text"),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_texts_show_numbers(holder: Callable[[int], Any]) -> None:
    """No name of a symbol is in any text that a program makes of what holds a number."""

    def program(x: torch.Tensor, n: int) -> tuple[Any, ...]:
        value = holder(n)
        texts = (str(value), repr(value), ascii(value), f"{value} {value!r}", format(value), "%s %r" % (value, value))  # noqa: UP031
        return (x + n, *texts, "{} {!r}".format(value, value), "{a}".format_map({"a": value}), value.__str__())  # noqa: UP032

    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for n in (3, 4, 5, 4):
        assert repr(compiled(torch.zeros(2), n)) == repr(program(torch.zeros(2), n))


def test_integers_beyond_64_bits() -> None:
    x = torch.randn(3)
    sweep = (1, 2, 2**40, 2**62, 2**63, 2**70, -(2**70))
    versions(lambda x, n: (x + (n > 3), n + 1), [(x, n) for n in sweep], lambda x, n: (x + (n > 3), n + 1))


def test_integer_handed_to_a_continuation() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x + n
        torchdynamo.graph_break()
        return y * n

    compiled = torchdynamo.optimize(backend)(program)
    x = torch.randn(3)
    for n in range(CALLS):
        torch.testing.assert_close(compiled(x, n), (x + n) * n, rtol=0, atol=0)
    assert len(graphs) == 4  # two for each part


CARRIED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a size": lambda x: x.shape,
    "part of a size": lambda x: x.shape[1:],
    "a tuple": lambda x: (x.shape[1], x.shape[0] + 1),
    "a tuple in a tuple": lambda x: (0, (x.shape[0], x.shape[1:])),
}


def numbers_in(value: Any) -> Iterable[int]:
    return (number for part in value for number in numbers_in(part)) if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("name", CARRIED)
def test_sizes_handed_to_a_continuation(name: str) -> None:
    """A size that was read before a break is one number after the other behind it, which become symbols."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    def program(x: torch.Tensor) -> Any:
        carried = CARRIED[name](x)
        torchdynamo.graph_break()
        first, *_, last = numbers_in(carried)
        total = carried.numel() if isinstance(carried, torch.Size) else 0
        return (
            x.sum() * last + torch.zeros(last, first + 1).sum(),
            carried,
            type(carried) is torch.Size,
            len(carried),
            total,
        )

    compiled = torchdynamo.optimize(backend)(program)
    for n in range(CALLS):
        x = torch.randn(n + 2, 3, 2 * n + 3)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
        found, wanted = compiled(x)[1], program(x)[1]
        assert repr(found) == repr(wanted) and type(found) is type(wanted)
    assert len(graphs) == 2  # of the part behind the break: what is before it has nothing to compute


def test_the_elements_of_a_size() -> None:
    shapes = [(n + 2, 3, n + 4) for n in range(CALLS)]
    calls = [(torch.randn(shape),) for shape in shapes]
    program: Callable[[torch.Tensor], Any] = lambda x: (
        x * x.shape.numel(),
        torch.Size.numel(x.shape),
        x.shape[1:].numel(),
    )  # noqa: E731
    assert versions(program, calls, program) == 2


def test_sizes_kept_by_a_key_of_several_parts() -> None:
    """The place of what changes is known again, whatever object its key is."""

    def step(x: torch.Tensor, kept: dict[tuple[object, ...], Any]) -> torch.Tensor:
        size = kept["size", (None, 2), x.dim()]
        kept["size", (None, 2), x.dim()] = x.shape
        return x * size.numel() + size[0]

    keeping: list[dict[tuple[object, ...], Any]] = [{("size", (None, 2), 2): torch.Size((1, 2))} for _ in range(2)]
    shapes = [(n % 7 + 2, n + 3) for n in range(CALLS)]
    calls = ((torch.randn(shape),) for shape in shapes)
    assert versions(lambda x: step(x, keeping[0]), calls, lambda x: step(x, keeping[1])) == 2
