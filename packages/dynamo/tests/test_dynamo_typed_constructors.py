"""`torch.FloatTensor(...)` and its kind in every form: what eager gives, or raises, in one graph where that makes sense;
and what TorchScript runs, which leaves the graph at the call."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo

TYPES: tuple[Any, ...] = (
    torch.Tensor, torch.FloatTensor, torch.DoubleTensor, torch.HalfTensor, torch.BFloat16Tensor, torch.LongTensor,
    torch.IntTensor, torch.BoolTensor, torch.ByteTensor,
)  # fmt: skip


def ones(kind: Any) -> torch.Tensor:
    return torch.ones(3, dtype=torch.get_default_dtype() if kind is torch.Tensor else kind.dtype)


def doubled(kind: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    given = ones(kind)
    made = kind(given)
    made.zero_()
    return given, made


CAPTURED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "nothing": lambda kind, x: kind(), "sizes": lambda kind, x: kind(2, 3).fill_(1),
    "a Size": lambda kind, x: kind(x.shape).fill_(1), "a size, a device": lambda kind, x: kind(2, device=x.device).fill_(1),
    "sizes of a tensor": lambda kind, x: kind(x.shape[1], 2, device="cpu").fill_(0),
    "a range": lambda kind, x: kind(range(x.shape[0])), "a range backwards": lambda kind, x: kind(range(-1, -4, -1)),
    "a list": lambda kind, x: kind([1, 2, 3]), "nested lists": lambda kind, x: kind([[1, 0], [0, 1]]),
    "a tuple": lambda kind, x: kind((1, 0)), "floats": lambda kind, x: kind([1.5, 2.5]), "an empty list": lambda kind, x: kind([]),
    "a list, a device": lambda kind, x: kind([1, 2], device=x.device), "no device": lambda kind, x: kind(3, device=None).fill_(0),
    "a deque": lambda kind, x: kind(collections.deque([1, 2])), "truth values": lambda kind, x: kind([True, False]),
    "mixed numbers": lambda kind, x: kind([1, 2.5, True]), "sizes in a list": lambda kind, x: kind([x.shape[0], x.size(1)]),
    "a tensor": lambda kind, x: kind(ones(kind)), "a tensor, written to": doubled,
}  # fmt: skip
OTHERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a tensor of some dtype": lambda kind, x: kind(x), "tensors": lambda kind, x: kind([x[0, 0], x[0, 1]]),
    "bytes": lambda kind, x: kind(b"ab"), "text": lambda kind, x: kind("ab"), "a float": lambda kind, x: kind(2.0),
    "a set": lambda kind, x: kind({1, 2}), "another keyword": lambda kind, x: kind(2, requires_grad=True),
    "another device": lambda kind, x: kind(2, device="meta"), "memory": lambda kind, x: kind(ones(kind).storage()),
}  # fmt: skip


def seen(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> object:
    try:
        given = call(x)
    except (TypeError, RuntimeError, ValueError) as error:
        return type(error), str(error)
    return [
        (t.dtype, tuple(t.shape), t.stride(), t.tolist()) for t in (given if isinstance(given, tuple) else (given,))
    ]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("form", [*CAPTURED, *OTHERS])
def test_forms(form: str) -> None:
    for kind, dynamic in itertools.product(TYPES, (False, True)):

        def program(x: torch.Tensor) -> Any:
            return (CAPTURED | OTHERS)[form](kind, x)  # noqa: B023

        options = torchdynamo.CaptureOptions(dynamic=dynamic, strict=True)
        torchdynamo.reset()
        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
        for shape in ((2, 3), (2, 3), (4, 5)):
            x = torch.ones(shape)
            assert seen(compiled, x) == seen(program, x), f"{kind.__name__} of {form}"
        if form in CAPTURED:
            assert not torchdynamo.stats().breaks, f"{kind.__name__} of {form}"


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"device": "cpu"}])
def test_ranges_of_sizes_that_vary(make: Any, options: dict[str, Any]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        return (
            x[make(range(size)).long()]
            + make(range(size, -size, -2), **options).sum()
            + make(range(1, size), **options).sum()
        )

    torchdynamo.reset()
    options_of = torchdynamo.CaptureOptions(dynamic=True, strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options_of)(program)
    for size in (3, 5, 8):
        x = torch.ones(size)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
    assert torchdynamo.stats().graphs == 2 and not torchdynamo.stats().breaks  # of the first size, and of any


def test_a_tensor_of_a_tensor_has_its_history() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (torch.Tensor(x) * x).sum()

    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        assert torch.equal(torch.autograd.grad(compiled(x), x)[0], torch.autograd.grad(program(x), x)[0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).relu()

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Around(nn.Module):
    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scripted = torch.jit.script(Scaled()) if scripted else torch.jit.trace(Scaled(), torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        y = self.scripted(h) + self.scripted.forward(h.cos())
        if hasattr(self.scripted, "twice"):
            y = y + self.scripted.twice(h)
        with torch.no_grad():
            z = self.scripted(h)
        return (y * z).sum(-1)


@pytest.mark.parametrize("scripted", [True, False])
def test_scripted_modules_leave_the_graph_at_the_call(scripted: bool) -> None:
    seed = torch.seed()
    print(f"seed {seed}")
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(Around(scripted).double())
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(models[0])
    for _ in range(3):
        x = torch.randn(4, 3, dtype=torch.float64)
        found, expected = compiled(x), models[1](x)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(found, expected)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
            torch.testing.assert_close(one, other)
    told = torchdynamo.stats()
    assert {kind for _, kind, _ in told.breaks} == {"c_function"}
    assert not [event for event in told.ledger.events if event.kind.id == "unsplit_frame"]
