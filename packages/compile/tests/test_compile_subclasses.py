"""Tensor subclasses in the captured graph: values, gradients, classes and attributes are eager's, and one graph holds
what it can hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile
import torchdynamo
from primtorch.ledger import REFUSED

BACKENDS = ("eager", "aot_eager", "inductor")


# -- classes with a __torch_function__ -----------------------------------------------------------


class Tagged(torch.Tensor):
    """By default: results keep the class."""

    factor = 3

    def scaled(self) -> Any:
        return self * self.factor

    @property
    def half(self) -> Any:
        return self / 2

    @classmethod
    def of(cls, x: torch.Tensor) -> Any:
        return x.as_subclass(cls)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return super().sum(*args, **kwargs) * 2


class Inner(Tagged):
    """A subclass of a subclass is asked first."""


class Doubling(torch.Tensor):
    """Changes what a function means."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func in (torch.sin, torch.Tensor.sin) else out


class Noted(torch.Tensor):
    """Unwraps by itself, and keeps a note on each result."""

    def __new__(cls, x: torch.Tensor, note: str = "") -> Any:
        return torch.Tensor._make_subclass(cls, x)

    def __init__(self, x: torch.Tensor, note: str = "") -> None:
        self.note = note

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out = out.as_subclass(Noted)
            out.note = "".join(a.note for a in args if isinstance(a, Noted)) + func.__name__
        return out


class Counting(torch.Tensor):
    """Counts the calls that it is asked about."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Refusing(torch.Tensor):
    """Leaves most calls to others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.add and func is not torch.add:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class Disabled(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def of(kind: type, *sizes: int, grad: bool = True) -> Any:
    torch.manual_seed(sum(sizes))
    data = torch.randn(*(sizes or (3, 3)), dtype=torch.float64)
    return torch.Tensor._make_subclass(kind, data, grad)


def plain(*sizes: int) -> Any:
    return of(torch.Tensor, *sizes)


def in_place(t: Any, y: Any) -> Any:
    t.mul_(2)
    y.add_(t)
    return t, y


def without_grad(t: Any) -> Any:
    with torch.no_grad():
        y = t * 2
    return y, y * t


def attributes(t: Any) -> Any:
    t.note = 5
    y = t + 1
    y.kind = ["k", t.note]
    return y, hasattr(y, "note"), t.note


def across_a_break(t: Any) -> Any:
    y = t.sin()
    torchdynamo.graph_break()
    return y.cos() * isinstance(y, Tagged), y


def under_a_switch(t: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        y = t + 1
    return y, type(y).__name__, t * y


def of_plain_and_back(t: Any) -> Any:
    y = t.as_subclass(torch.Tensor) + 1
    return y, y.as_subclass(Inner), y.add_(t)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(of(Tagged, grad=False))
        self.register_buffer("shift", of(Inner, grad=False))

    def forward(self, x: Any) -> Any:
        known = isinstance(self.weight, nn.Parameter), isinstance(self.weight, Tagged), type(self.shift).__name__
        return x @ self.weight + self.shift, known


@dataclass(frozen=True)
class Case:
    """A program, what makes its arguments, how many graphs it becomes, and what it breaks for."""

    program: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    graphs: int = 1
    breaks: tuple[str, ...] = ()

    def made(self) -> Callable[..., Any]:
        return self.program() if isinstance(self.program, type) else self.program


CASES: dict[str, Case] = {
    "made from a plain tensor": Case(lambda x: x.as_subclass(Tagged).sin() + 1, lambda: (plain(),)),
    "an input": Case(lambda t: (t.sin() + 1, t.shape, type(t).__name__, isinstance(t, Tagged)), lambda: (of(Tagged),)),
    "methods": Case(lambda t: (t.scaled(), t.half, Tagged.of(t.half)), lambda: (of(Tagged),)),
    "a method of its own and super()": Case(lambda t: (t.sum(), torch.sum(t)), lambda: (of(Inner),)),
    "with plain tensors": Case(lambda t, x: (torch.relu(t) @ x, x + t, x), lambda: (of(Tagged), plain())),
    "two classes": Case(lambda a, b: (a + b, b + a), lambda: (of(Tagged), of(Inner))),
    "several results": Case(lambda t: (*torch.max(t, dim=0), *t.split(1), torch.stack([t, t])), lambda: (of(Tagged),)),
    "functions of nn": Case(lambda t: nn.functional.layer_norm(t, (3,)).relu(), lambda: (of(Tagged),)),
    "of its own": Case(lambda t: (t.sin(), torch.sin(t), t.cos()), lambda: (of(Doubling),)),
    "of its own, in a list": Case(lambda t: torch.cat([t, t]).sin(), lambda: (of(Doubling),)),
    "notes": Case(lambda a, b: (a + b).relu(), lambda: (Noted(plain(), "a"), Noted(plain(), "b"))),
    "made by its class": Case(lambda x: (Tagged(x) * 2, Noted(x, "n") * 2, Noted(x)), lambda: (plain(),)),
    "disabled": Case(lambda t: (t + 1, t), lambda: (of(Disabled),)),
    "one that refuses": Case(lambda t, u: t + u, lambda: (of(Refusing, grad=False), of(Refusing, grad=False))),
    "in place": Case(in_place, lambda: (of(Tagged, grad=False), of(torch.Tensor, grad=False))),
    "views": Case(lambda t: (t.view(-1)[2:], t.T, t), lambda: (of(Tagged),)),
    "no_grad": Case(without_grad, lambda: (of(Tagged),)),
    "attributes": Case(attributes, lambda: (of(Tagged),)),
    "across a break": Case(across_a_break, lambda: (of(Tagged),), 2, ("graph_break",)),
    "under a switch": Case(under_a_switch, lambda: (of(Tagged),)),
    "plain and back": Case(of_plain_and_back, lambda: (of(Tagged),)),
    "in a module": Case(Weighted, lambda: (plain(),)),
}  # fmt: skip


def copied(value: Any) -> Any:
    """The same tensor again, with its class and attributes."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if hasattr(value, "__tensor_flatten__"):
        with torch.no_grad():
            return value.clone().requires_grad_(value.requires_grad)
    data = bare(value).clone()
    made = torch.Tensor._make_subclass(type(value), data, wants_gradient(value))
    made.__dict__.update(value.__dict__)
    return made


def bare(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)


def wants_gradient(value: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return value.requires_grad


def alike(found: Any, wanted: Any) -> None:
    """Values, classes, attributes, and what autograd knows."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert wants_gradient(found) == wants_gradient(wanted)
        if hasattr(wanted, "__tensor_flatten__"):
            (names, context), (others, other) = wanted.__tensor_flatten__(), found.__tensor_flatten__()
            assert names == others and context == other
            for name in names:
                alike(getattr(found, name), getattr(wanted, name))
            return
        assert bare(found).shape == bare(wanted).shape
        torch.testing.assert_close(bare(found), bare(wanted), rtol=1e-12, atol=1e-12)
        assert found.__dict__.keys() == wanted.__dict__.keys()
        alike(list(found.__dict__.values()), list(wanted.__dict__.values()))
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            alike(one, other)
    else:
        assert found == wanted


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def run(program: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Results, the arguments afterwards, gradients."""
    result = program(*arguments)
    total = [(bare_with_history(t) * (k + 1)).sum() for k, t in enumerate(tensors(result)) if wants_gradient(t)]
    if total:
        torch.stack(list(map(plain_number, total))).sum().backward()
    parameters = list(program.parameters()) if isinstance(program, nn.Module) else []
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [t.grad for t in (*tensors(arguments), *parameters) if t.is_leaf]
    return result, arguments, gradients


def bare_with_history(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if hasattr(tensor, "__tensor_flatten__") else tensor.as_subclass(torch.Tensor)


def plain_number(tensor: Any) -> torch.Tensor:
    return tensor.whole() if hasattr(tensor, "whole") else tensor


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_a_program_of_subclasses(name: str, backend: str) -> None:
    case = CASES[name]
    for _ in range(2):
        arguments = case.arguments()
        wanted = run(case.made(), tuple(map(copied, arguments)))
        found = run(torchcompile.compile(case.made(), backend=backend), tuple(map(copied, arguments)))
        alike(found, wanted)
    told = {event.kind.id for event in torchcompile.report().events if event.effect in REFUSED}
    assert told == set(case.breaks)
    torchcompile.reset()
    torchcompile.compile(case.made(), backend=backend)(*case.arguments())
    assert torchdynamo.stats().graphs == case.graphs


def test_what_torch_function_writes_is_written_at_every_call() -> None:
    t = of(Counting)
    compiled = torchcompile.compile(lambda t: t.sin() + 1, backend="eager")
    for _ in range(3):
        before = Counting.calls
        compiled(t)
        assert Counting.calls == before + 2


@pytest.mark.expected_eager(...)
def test_guards_notice_another_class_and_another_torch_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(t: Any) -> Any:
        return torch.sin(t), type(t).__name__

    compiled = torchcompile.compile(program, backend="aot_eager")
    for kind in (torch.Tensor, Tagged, Inner, Doubling, Tagged):
        alike(compiled(of(kind)), program(of(kind)))

    def thrice(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) * 3

    monkeypatch.setattr(Doubling, "__torch_function__", classmethod(thrice))
    alike(compiled(of(Doubling)), program(of(Doubling)))


@pytest.mark.expected_eager(...)
def test_sizes_vary() -> None:
    def program(t: Any) -> Any:
        return t.sin() * t.shape[0] + t.size(1)

    for kind in (Tagged, Noted):
        compiled = torchcompile.compile(program)
        before = torchdynamo.stats().graphs
        for size in (3, 4, 5, 6):
            t = Noted(plain(size, 2), "n") if kind is Noted else of(kind, size, 2)
            alike(compiled(t), program(t))
        assert torchdynamo.stats().graphs - before == 2


def test_a_lazy_module_is_captured_from_its_second_call_on() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)).double()
    compiled = torchcompile.compile(net, backend="eager", fullgraph=True)
    x = torch.rand(2, 3, dtype=torch.float64)
    first = compiled(x)
    assert torchdynamo.stats().graphs == 0
    torch.testing.assert_close(compiled(x), first)
    assert torchdynamo.stats().graphs == 1
    assert [event.kind.id for event in torchcompile.report().events] == ["lazy_module"]
