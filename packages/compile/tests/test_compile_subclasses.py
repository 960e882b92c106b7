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
from torch.utils.checkpoint import checkpoint

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


# -- classes with a __torch_dispatch__ that wrap others ------------------------------------------


class Pair(torch.Tensor):
    """Two tensors in one: each operator on both."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Any:
        layout = {"strides": a.stride(), "storage_offset": a.storage_offset(), "dtype": a.dtype, "device": a.device}
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, **layout)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(value: Any, name: str) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(part(item, name) for item in value)
            return getattr(value, name) if isinstance(value, Pair) else value

        a, b = (func(*part(args, name), **part(kwargs or {}, name)) for name in "ab")
        if func is torch.ops.aten._is_all_true.default or not isinstance(a, (torch.Tensor, tuple, list)):
            return a
        return cls(a, b) if isinstance(a, torch.Tensor) else type(a)(map(cls, a, b))

    def swapped(self) -> Any:
        return Pair(self.b, self.a)

    def whole(self) -> torch.Tensor:
        return Total.apply(self)


class Total(torch.autograd.Function):
    """The sum of both, as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, pair: Any) -> Any:
        return pair.a + 3 * pair.b

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return Pair(gradient, gradient * 3)


class Quantized(torch.Tensor):
    """A weight of int8 with scales, which operators see in its own dtype."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, bits: int = 8) -> Any:
        layout = {"strides": data.stride(), "dtype": dtype, "device": data.device}
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, **layout)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, bits: int = 8) -> None:
        self.levels, self.scale, self.bits = data, scale, bits

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int = 8) -> Any:
        scale = weight.detach().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return cls((weight.detach() / scale).round().to(torch.int8), scale, weight.dtype, bits)

    def dequantize(self) -> torch.Tensor:
        return self.levels.to(self.dtype) * self.scale

    def __tensor_flatten__(self) -> Any:
        return ["levels", "scale"], {"dtype": self.dtype, "bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["levels"], inner["scale"], **context)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.t.default, aten.detach.default, aten.clone.default, aten.alias.default):
            whole = args[0]
            return cls(func(whole.levels), func(whole.scale), whole.dtype, whole.bits)
        args = [value.dequantize() if isinstance(value, Quantized) else value for value in args]
        return func(*args, **(kwargs or {}))


class Loud(Pair):
    """Counts what it is asked."""

    asked = 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.asked += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class Printing(Pair):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        print("asked", func)
        return super().__torch_dispatch__(func, types, args, kwargs)


asked: list[str] = []


def note(func: Any) -> None:
    asked.append(func.__name__)


class Listing(Pair):
    """By a function of its module, in a list."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Remembering(Pair):
    """In a global that is not there before."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        global ever_asked
        ever_asked = func.__name__
        return super().__torch_dispatch__(func, types, args, kwargs)


class Marking(Pair):
    """On the tensor itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args[0].noted = func.__name__
        return super().__torch_dispatch__(func, types, args, kwargs)


NOISY_KINDS = (Loud, Printing, Listing, Remembering, Marking)


def pair(*sizes: int, kind: type = Pair, grad: bool = True) -> Any:
    return kind(*(of(torch.Tensor, *sizes, grad=False) * k for k in (1, 2))).requires_grad_(grad)


def quantized(bits: int = 8, kind: type = Quantized) -> Any:
    return kind.of(of(torch.Tensor, 4, 3, grad=False), bits)


def pair_across_a_break(p: Any) -> Any:
    q = p.sin()
    torchdynamo.graph_break()
    return q * p, q.a


def pair_without_grad(p: Any) -> Any:
    with torch.no_grad():
        q = p * 2
    return q, q * p


def pair_in_place(p: Any) -> Any:
    q = p + 1
    q.mul_(2)
    return q


class Halves(nn.Module):
    """A linear layer with a quantised weight, and one whose weight is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantized(), requires_grad=False)
        self.bias = nn.Parameter(of(torch.Tensor, 4, grad=False))
        self.pair = nn.Parameter(pair(4, 4))

    def forward(self, x: Any) -> Any:
        y = nn.functional.linear(x, self.weight, self.bias).relu()
        return y, y @ self.pair, type(self.pair).__name__, isinstance(self.weight, nn.Parameter)


class Packed(Quantized):
    """With a function of its own for one of torch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS_OF_PACKED:
            return FUNCTIONS_OF_PACKED[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def linear_of_packed(x: Any, weight: Any, bias: Any = None) -> Any:
    y = torch.matmul(x, weight.levels.to(x.dtype).t()) * weight.scale.t()
    return y if bias is None else y + bias


FUNCTIONS_OF_PACKED = {nn.functional.linear: linear_of_packed}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient @ ctx.saved_tensors[0], None


def checkpointed(p: Any, x: Any) -> Any:
    return checkpoint(lambda p, x: (p * x).sin() * (p * 2).detach().a, p, x, use_reentrant=False)


class Keeping(Pair):
    """Sums keep their dimension, whoever asks."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.dim_IntList:
            args = (*args[:2], True)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Switched(Pair):
    """Reads a global and an attribute of its class."""

    factor = 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        with torch.no_grad():
            return cls(out.a * cls.factor, out.b * offset) if isinstance(out, Pair) else out


offset = 1


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


# Known from the first call on, such a class breaks where its tensors come in: the function runs as it is.
NOISY = ("tensor_subclass", "unsplit_frame", "suspending_frame")

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
    "a gradient transform": Case(lambda t: torch.func.grad(lambda t: (t * t).sum())(t), lambda: (of(Doubling),)),
    "a loop over rows": Case(lambda t: (torch.stack([r * 2 for r in t]), sum([t, t])), lambda: (of(Doubling),)),
    "operators": Case(lambda t: (1 - t, 2**t, t @ t, -t, ~(t > 0), t[None], t == t), lambda: (of(Tagged),)),
    "made like it": Case(
        lambda t: (t.new_zeros(3), torch.ones_like(t), t.clone(), t.float(), t.detach()), lambda: (of(Tagged),)
    ),
    "a shape changed in place": Case(lambda t: (t.t_(), t.shape), lambda: (of(Tagged, 2, 3, grad=False),)),
    "a pair": Case(lambda p: (p.sin() + p) * 2, lambda: (pair(),)),
    "a pair's parts": Case(lambda p: ((p.sin() * 2).a, p.b + 1, p.shape, p.dtype), lambda: (pair(),)),
    "a pair and plain tensors": Case(lambda p, x: (p * x, x @ x, p @ x), lambda: (pair(), plain())),
    "a pair that is handed on": Case(lambda p, x: (p, x + 1), lambda: (pair(), plain())),
    "a pair as an argument twice": Case(lambda p, q: p * q + p, lambda: (pair(),) * 2),
    "views of a pair": Case(lambda p: (p.t(), p.reshape(-1), (p * 2).t()), lambda: (pair(),)),
    "pieces of a pair": Case(lambda p: (*(p * 2).split(1), torch.cat([p, p])), lambda: (pair(),)),
    "a reduction of a pair": Case(lambda p: (p.sum(), p.softmax(-1)), lambda: (pair(),)),
    "a pair made": Case(lambda x, y: (Pair(x, y) * 2, Pair(x, y).swapped().a), lambda: (plain().detach(),) * 2),
    "a method of a pair": Case(lambda p: (p * 1).detach().swapped() + 1, lambda: (pair(),)),
    "a pair of pairs": Case(lambda p: p.sin() * 2, lambda: (Pair(pair(grad=False), pair(grad=False)),)),
    "a pair without gradient": Case(lambda p: (p + 1).cos(), lambda: (pair(grad=False),)),
    "a pair under no_grad": Case(pair_without_grad, lambda: (pair(),)),
    "a pair across a break": Case(pair_across_a_break, lambda: (pair(),), 2, ("graph_break",)),
    "a quantised weight": Case(lambda x, w: nn.functional.linear(x, w).relu(), lambda: (plain(), quantized())),
    "a quantised weight, unpacked": Case(lambda w: (w.dequantize(), w.scale * 2, w.bits, w.t()), lambda: (quantized(),)),
    "wrappers in a module": Case(Halves, lambda: (plain(),)),
    "a function of its own for a weight": Case(
        lambda x, w: nn.functional.linear(x, w), lambda: (plain(), quantized(kind=Packed))
    ),
    "a quantised weight with a gradient": Case(
        lambda x, w: nn.functional.linear(x, w), lambda: (plain(), quantized().requires_grad_())
    ),
    "a weight in a derivative of its own": Case(lambda x, w: Product.apply(x, w), lambda: (plain(), quantized())),
    "a pair within a derivative of its own": Case(lambda p: (p.whole() * 2, p * 2), lambda: (pair(),)),
    "a checkpoint of pairs": Case(checkpointed, lambda: (pair(), plain())),
    "a pair's rows": Case(lambda p: (p[1:, 0], p.to(torch.float32), torch.zeros_like(p) + p), lambda: (pair(),)),
    "a pair and its view": Case(lambda p: (lambda q: (q, q, q.view(-1)))(p * 2), lambda: (pair(),)),
    "a pair with a history": Case(lambda p: (p * 3, p.is_leaf, p.requires_grad), lambda: (pair() * 1,)),
    "a plain tensor is written beside a pair": Case(
        lambda p, x: (x.add_(1), p * x), lambda: (pair(grad=False), plain().detach())
    ),
    "a part is written": Case(
        lambda p: (p.a.add_(1), p * 2), lambda: (pair(grad=False),), 2, ("tensor_subclass",)
    ),
    "a pair in place": Case(pair_in_place, lambda: (pair(),), 1, ("tensor_subclass",)),
    "a class that counts": Case(lambda p: p.sin(), lambda: (pair(kind=Loud),), 0, NOISY),
    "a class that prints": Case(lambda p: p.sin(), lambda: (pair(kind=Printing),), 0, NOISY),
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


@pytest.mark.expected_eager(...)
def test_guards_notice_what_a_wrapper_is_made_of() -> None:
    def program(w: Any, x: Any) -> Any:
        return x @ w.t() * (w.bits if isinstance(w, Quantized) else 1)

    compiled = torchcompile.compile(program, backend="aot_eager")
    x, before = plain(), torchdynamo.stats().graphs
    kinds = (quantized(), quantized(4), of(torch.Tensor, 4, 3), pair(4, 3), quantized(), quantized(4))
    for number, weight in enumerate(kinds):
        alike(compiled(weight, x), program(weight, x))
        assert torchdynamo.stats().graphs - before == min(number + 1, 4)
    wide = Quantized(quantized().levels.to(torch.int16), quantized().scale, torch.float64)
    alike(compiled(wide, x), program(wide, x))
    assert torchdynamo.stats().graphs - before == 5


@pytest.mark.parametrize("kind", NOISY_KINDS)
@pytest.mark.expected_eager(...)
def test_what_a_wrappers_class_does_besides_is_done_at_every_call(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(p: Any) -> Any:
        return p.sin() + 1

    compiled = torchcompile.compile(program, backend="aot_eager")

    def done(function: Callable[..., Any]) -> Any:
        Loud.asked = 0
        asked.clear()
        globals().pop("ever_asked", None)
        capsys.readouterr()
        p = pair(kind=kind, grad=False)
        result = function(p)
        noted = getattr(p, "noted", None), getattr(result, "noted", None)
        return Loud.asked, list(asked), globals().get("ever_asked"), capsys.readouterr().out, noted

    for _ in range(3):
        assert done(compiled) == done(program)


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_of_plain_tensors_vary_beside_a_quantised_weight(backend: str) -> None:
    def program(x: Any, w: Any) -> Any:
        return nn.functional.linear(x, w).relu() * x.shape[0]

    w = quantized()
    compiled, before = torchcompile.compile(program, backend=backend), torchdynamo.stats().graphs
    for size in (3, 4, 5, 6):
        for _ in range(2):
            x, y = plain(size, 3), plain(size, 3)
            found, wanted = compiled(x, w), program(y, w)
            alike(found, wanted)
            for result in (found, wanted):
                (result**2).sum().backward()
            alike(x.grad, y.grad)
    assert torchdynamo.stats().graphs - before == 2


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_behind_a_wrapper_is_seen(backend: str) -> None:
    """What a wrapper is made of is read at each call; a graph that writes to it breaks there."""

    def program(p: Any, a: Any) -> Any:
        a.add_(1)
        return p * 2

    compiled = torchcompile.compile(program, backend=backend)
    apart, within = (plain().detach() for _ in range(2))
    for a in (apart, within, apart):
        ours, theirs = within.clone(), within.clone()
        other = [ours if a is within else a.clone(), theirs if a is within else a.clone()]
        found = compiled(Pair(ours, ours.clone()), other[0])
        wanted = program(Pair(theirs, theirs.clone()), other[1])
        alike(found, wanted)
        alike(other[0], other[1])


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_gradients_of_another_class_have_a_backward_of_their_own(backend: str) -> None:
    """The tangent of a pair may be a pair, or a plain tensor; the compiled backward is that of what comes."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, p: Any, plainly: bool) -> Any:
            ctx.plainly = plainly
            return p.a + p.b

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return (gradient if ctx.plainly else Pair(gradient, gradient * 2)), None

    def program(p: Any) -> Any:
        return p.sin() * p

    compiled = torchcompile.compile(program, backend=backend)
    for plainly in (False, True, False):
        gradients = []
        for function in (compiled, program):
            p = pair()
            Through.apply(function(p), plainly).sum().backward()
            gradients.append(p.grad)
        alike(*gradients)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_second_derivatives_of_wrappers(backend: str) -> None:
    def second(function: Callable[..., Any]) -> Any:
        p = pair()
        (first,) = torch.autograd.grad(Total.apply(function(p)).sum(), p, create_graph=True)
        return torch.autograd.grad(first.sum(), p, grad_outputs=Pair(*torch.ones(2, dtype=torch.float64)))

    def program(p: Any) -> Any:
        return p.sin() * p

    alike(second(torchcompile.compile(program, backend=backend)), second(program))


@pytest.mark.expected_eager(...)
def test_guards_notice_what_the_methods_of_a_wrapper_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(p: Any) -> Any:
        return p.sin() + 1

    compiled = torchcompile.compile(program, backend="aot_eager")
    p = pair(kind=Switched, grad=False)
    for factor, other in ((1, 1), (2, 1), (2, 3), (1, 1)):
        monkeypatch.setattr(Switched, "factor", factor)
        monkeypatch.setitem(globals(), "offset", other)
        alike(compiled(p), program(p))


@pytest.mark.expected_eager(...)
@pytest.mark.filterwarnings("ignore:fallback to eager")
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_class_that_gives_results_another_shape_than_torch_runs_as_captured(backend: str) -> None:
    def program(p: Any) -> Any:
        return p.sum(0) * 2

    compiled = torchcompile.compile(program, backend=backend)
    p = pair(kind=Keeping, grad=False)
    alike(compiled(p), program(p))
    assert {event.kind.id for event in torchcompile.report().events} == {"graph_not_compiled"}


@pytest.mark.expected_eager(...)
def test_a_wrapper_around_what_requires_a_gradient_breaks_the_graph() -> None:
    """It is made by the class's own code then, whose parts are captured while the wrapper is half made."""

    def program(x: Any) -> Any:
        return Pair(x, x + 1) * 2

    compiled = torchcompile.compile(program, backend="aot_eager")
    for _ in range(2):
        x, y = plain(), plain()
        alike(compiled(x).a.detach(), program(y).a.detach())
    told = {event.kind.id for event in torchcompile.report().events if event.effect in REFUSED}
    assert "tensor_subclass" in told and "capture_fault" not in told


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("make", (lambda: of(Tagged), pair))
def test_bodies_of_higher_order_operators_take_no_subclass(make: Callable[[], Any]) -> None:
    """What those give back is made of sizes: it would have no class."""

    def program(t: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (t,))

    with pytest.raises(torchdynamo.Unsupported, match="a tensor subclass"):
        torchcompile.compile(program, backend="aot_eager", fullgraph=True)(make(), plain())


@pytest.mark.expected_eager(...)
def test_a_view_that_has_a_class_is_not_taken_out_of_its_history() -> None:
    compiled = torchcompile.compile(lambda t: (t * 2).detach_(), backend="aot_eager")
    with pytest.raises(RuntimeError, match="detach views in-place"):
        compiled(of(Tagged))
