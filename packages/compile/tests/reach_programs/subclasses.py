"""Classes of tensors, and parametrizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.masked import as_masked_tensor, masked_tensor
from torch.nn.utils import parametrizations

from .record import Program, maker, part, sizes

SUBCLASSES = "Tensor subclasses"


class Tagged(torch.Tensor):
    """With __torch_function__ as every subclass has it."""


class Pair(torch.Tensor):
    """Two tensors as one, by __torch_dispatch__."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        each = [
            func(*(getattr(t, name) if isinstance(t, Pair) else t for t in args), **(kwargs or {})) for name in "ab"
        ]
        return cls(*each) if isinstance(each[0], torch.Tensor) else each[0]


@part(SUBCLASSES, "__torch_function__ by default", gradient=False)
def tagged(x: torch.Tensor) -> Any:
    return x.as_subclass(Tagged).sin() + 1


class Logged(torch.Tensor):
    """With a __torch_function__ of its own, which notes what it was asked."""

    asked: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, torch.Tensor) else out


@part(SUBCLASSES, "__torch_function__ of its own", gradient=False)
def logged(x: torch.Tensor) -> Any:
    Logged.asked.clear()
    y = x.as_subclass(Logged).sin() + 1
    return y, len(Logged.asked)


class Multiple:
    """A multiple of the identity, which is no tensor: torch asks its class what a call means."""

    def __init__(self, size: int, factor: torch.Tensor) -> None:
        self.size = size
        self.factor = factor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            return args[0].factor * args[1] if isinstance(args[0], cls) else args[0] * args[1].factor
        if func is torch.cat:
            return cls(sum(one.size for one in args[0]), args[0][0].factor)
        return NotImplemented


@part(SUBCLASSES, "an object in the place of a tensor")
def in_the_place_of_a_tensor(x: torch.Tensor) -> Any:
    multiple = Multiple(3, x.mean())
    both = torch.cat([multiple, multiple])  # type: ignore[list-item]
    return torch.matmul(multiple, x), torch.matmul(x, multiple), both.size, both.factor  # type: ignore[arg-type]


class Shifted:
    """A tensor and what is added to it."""

    def __init__(self, held: torch.Tensor, by: float) -> None:
        self.held = held
        self.by = by

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.held + arg.by if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@part(SUBCLASSES, "operators with an object in the place of a tensor")
def operators_with_an_object(x: torch.Tensor) -> Any:
    shifted = Shifted(x.detach(), 1.0)
    return x + shifted, shifted * x, x / Shifted(x, 5.0), x < shifted, x - shifted, x.add(shifted)


@part(
    SUBCLASSES,
    "two tensors in one, as an input",
    gradient=False,
    calls=lambda: [(Pair(*sizes(3), *sizes(3)),)] * 2,
)
def of_pairs(p: Any) -> Any:
    out = (p.sin() + p) * 2
    return out.a, out.b


@part(SUBCLASSES, "two tensors in one, made and taken apart")
def makes_pairs(x: torch.Tensor) -> Any:
    pair = Pair(x.detach(), x.detach() + 1) * 2
    return pair.a * x, pair.b


class InLevels(torch.Tensor):
    """A weight of int8, as operators see it one of float64."""

    @staticmethod
    def __new__(cls, levels: torch.Tensor) -> InLevels:
        return torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=torch.float64)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, levels: torch.Tensor) -> None:
        self.levels = levels

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["levels"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> InLevels:
        return InLevels(inner["levels"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].levels)
        return func(*(t.levels.double() / 16 if isinstance(t, cls) else t for t in args), **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@maker(SUBCLASSES, "a quantised weight in a module")
def quantised() -> Program:
    net = nn.Linear(3, 4).double()
    net.weight = nn.Parameter(InLevels(torch.arange(-6, 6, dtype=torch.int8).reshape(4, 3)), requires_grad=False)
    return net


@part(SUBCLASSES, "nested jagged", gradient=False)
def jagged(x: torch.Tensor) -> Any:
    return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).sin().values()


def rows(*lengths: int) -> torch.Tensor:
    values = torch.randn(sum(lengths), 3, dtype=torch.float64)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0)).detach()


@part(
    SUBCLASSES,
    "nested jagged, an input and a result",
    calls=lambda: [(rows(2, 3),), (rows(1, 4),), (rows(3, 1, 2),)],
)
def jagged_input(x: Any) -> Any:
    out = (x * 2).softmax(-1) + x
    return out, out.values().sin(), out.size(0), out.shape == x.shape


@maker(SUBCLASSES, "nested jagged through a module", calls=lambda: [(rows(2, 3),), (rows(1, 4),), (rows(3, 1, 2),)])
def jagged_module() -> Program:
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.GELU(), nn.Dropout(0.5), nn.Linear(4, 3)).double()


@part(SUBCLASSES, "nested jagged, made of rows, padded")
def jagged_padded(x: torch.Tensor) -> Any:
    made = torch.nested.as_nested_tensor([x[:1] * 2, x[1:]], layout=torch.jagged)
    return made.cos(), made.to_padded_tensor(0.5) * 3


@part(
    SUBCLASSES,
    "nested jagged, row by row",
    calls=lambda: [(rows(2, 3),), (rows(1, 4),), (rows(3, 1, 2),)],
)
def jagged_rows(x: Any) -> Any:
    return [(row * 2).sum(0) for row in (x + 1).unbind()]


@part(
    SUBCLASSES,
    "nested jagged, attention",
    calls=lambda: [(rows(2, 3),), (rows(1, 4),), (rows(3, 1, 2),)],
)
def jagged_attention(x: Any) -> Any:
    weight = torch.linspace(-1, 1, 24, dtype=x.dtype).view(3, 8)
    query = (x @ weight).unflatten(-1, [1, 8]).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(-2)


@part(SUBCLASSES, "nested jagged, attention to other rows", calls=lambda: [(rows(2, 3),), (rows(4, 1),), (rows(1, 3),)])
def jagged_cross_attention(x: Any) -> Any:
    others = torch.nested.nested_tensor_from_jagged(torch.linspace(-1, 1, 72, dtype=x.dtype).view(9, 8), OTHER_ROWS)
    query = (x @ torch.linspace(-1, 1, 24, dtype=x.dtype).view(3, 8)).unflatten(-1, [2, 4]).transpose(1, 2)
    key = others.unflatten(-1, [2, 4]).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(query, key, key.sin(), scale=0.5).transpose(1, 2).flatten(-2)


OTHER_ROWS = torch.tensor([0, 4, 9])


@maker(SUBCLASSES, "parametrizations")
def parametrized() -> Program:
    torch.manual_seed(3)
    return parametrizations.weight_norm(nn.Linear(3, 3).double())  # type: ignore[no-any-return]


@part(SUBCLASSES, "masked tensors", gradient=False)
def masked(x: torch.Tensor) -> Any:
    return masked_tensor(x * 2, x > 0).sum(1).to_tensor(0.0).sin()


@part(SUBCLASSES, "masked tensors, of which gradients are some")
def masked_with_history(x: torch.Tensor) -> Any:
    data = as_masked_tensor(x * 2, x > 0)
    return (data.exp() * data).mean(1).to_tensor(0.0).sin(), data.get_mask()
