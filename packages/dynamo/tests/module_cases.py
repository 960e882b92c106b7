"""Modules, and what is done to them between calls: programs that a compiled call and eager's must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune


def leaf() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


@dataclass(frozen=True)
class Case:
    """A module, what changes before each call, and what its capture may cost.

    Attributes:
        make: gives the module.
        change: (module, number of the call) before each call.
        call: the program.
        graphs: how many it may take at most, over all calls.
        breaks: reasons of the breaks that it has.
    """

    make: Callable[[], nn.Module]
    change: Callable[[Any, int], Any] = lambda module, i: None
    call: Callable[[Any, Any], Any] = lambda module, x: module(x)
    inputs: Callable[[], torch.Tensor] = leaf
    calls: int = 4
    graphs: int = 1
    breaks: set[str] = field(default_factory=set)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


# -- hooks ------------------------------------------------------------------------------------


def hooked() -> nn.Module:
    model = two_layers()
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[0].register_forward_hook(lambda module, args, out: None)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, kwargs, out: out.sin(), with_kwargs=True)
    model[1].register_forward_hook(lambda module, args, out: out + 1, always_call=True)
    model[1].register_forward_hook(lambda module, args, out: out * 3, prepend=True)
    return model


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, *, scale):
        return self.inner(x) * scale


def keyword_hook() -> nn.Module:
    model = Keywords()
    twice = lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2})
    model.register_forward_pre_hook(twice, with_kwargs=True)
    return model


def come_and_go(model: Any, i: int) -> None:
    if i == 1:
        model.handle = model[0].register_forward_hook(lambda module, args, out: out * 2)
    if i == 2:
        model.handle.remove()


def another_each_time(model: Any, i: int) -> None:
    if hasattr(model, "handle"):
        model.handle.remove()
    model.handle = model[0].register_forward_hook(lambda module, args, out, i=i: out * (i + 2))


def with_effects() -> nn.Module:
    model = two_layers()
    model[0].seen = []
    model[0].register_forward_hook(lambda module, args, out: module.seen.append(out.detach()))
    model[1].register_forward_hook(lambda module, args, out: setattr(module, "last", out.detach()))
    return model


def backward_hooks() -> nn.Module:
    model = two_layers()
    model[1].register_full_backward_hook(lambda module, gave, got: (gave[0] * 2,))
    model[2].register_full_backward_pre_hook(lambda module, got: (got[0] * 3,))
    return model


def parameter_hook(model: Any, i: int) -> None:
    if i == 1:
        model[0].weight.register_hook(lambda grad: grad * 2)
    if i == 2:
        model[2].bias.register_post_accumulate_grad_hook(_triple)


def _triple(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(3)


def hook_on_an_intermediate(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x)
    y.register_hook(lambda grad: grad * 2)
    return model[1](y).sin()


def hook_on_the_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 2)
    return model(x).sin()


# -- parameters and buffers -------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    model = two_layers()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def cached_parametrization(model: Any, x: torch.Tensor) -> torch.Tensor:
    with parametrize.cached():
        return model(x) + model(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def untie(model: Any, i: int) -> None:
    if i == 2:
        model.second.weight = nn.Parameter(torch.ones(4, 4))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        self.count += 1
        return self.inner(x) + self.mean / self.count


class LazyAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(4.0)
        if not hasattr(self, "other"):
            self.other = torch.ones(4) * 2
        return self.inner(x) * self.cache + self.other


class Counter(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.inner, self.used, self.step = nn.Linear(4, 4), used, 0

    def forward(self, x):
        self.step += 1
        return self.inner(x) * self.step if self.used else self.inner(x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.scales = nn.ParameterList([torch.randn(4) for _ in range(2)])
        self.named = nn.ParameterDict({"k": torch.randn(4)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        for scale in self.scales:
            x = x * scale
        return x * self.named["k"] + len(self.scales) + ("z" in self.named)


def grow(model: Any, i: int) -> None:
    if i == 2:
        model.scales.append(nn.Parameter(torch.ones(4) * 3))
        model.named["z"] = nn.Parameter(torch.ones(4))


def replaced(model: Any, i: int) -> None:
    if i == 1:
        model[0].weight = nn.Parameter(torch.full((4, 4), 0.5))
    if i == 2:
        with torch.no_grad():
            model[0].weight.mul_(2)
    if i == 3:
        model[0].weight.data = torch.ones(4, 4)
    if i == 4:
        model[0].weight.requires_grad_(False)
    if i == 5:
        model[0].bias = None
    if i == 6:
        model[2] = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model[2].weight)


# -- what comes and goes ----------------------------------------------------------------------


def backward_hook_comes_and_goes(model: Any, i: int) -> None:
    if i == 1:
        model.handle = model[1].register_full_backward_hook(lambda module, gave, got: (gave[0] * 2,))
    if i == 3:
        model.handle.remove()


def parameter_hook_comes_and_goes(model: Any, i: int) -> None:
    if i == 1:
        model.handle = model[0].weight.register_hook(lambda grad: grad * 2)
    if i == 3:
        model.handle.remove()


def hook_removed_in_the_program(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x)
    handle = y.register_hook(lambda grad: grad * 2)
    z = model[1](y).sin()
    handle.remove()
    return z


def retained_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x)
    y.retain_grad()
    model.last = y
    return model[1](y).sin()


def parametrized_and_back(model: Any, i: int) -> None:
    if i == 1:
        parametrize.register_parametrization(model[0], "weight", Symmetric())
    if i == 3:
        parametrize.remove_parametrizations(model[0], "weight")


def pruned(model: Any, i: int) -> None:
    if i == 1:
        prune.l1_unstructured(model[0], "weight", amount=0.5)
    if i == 2:
        prune.random_unstructured(model[0], "weight", amount=0.2)
    if i == 3:
        prune.remove(model[0], "weight")


def tie(model: Any, i: int) -> None:
    if i == 1:
        model[2].weight = model[0].weight
    if i == 3:
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())


class Registers(nn.Module):
    """Makes a buffer, a parameter and a module of its own at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(4.0), persistent=False)
            self.register_buffer("total", torch.zeros(4))
        self.total.add_(x.detach().sum(0))
        return self.inner(x) * self.mask + self.total


class Average(nn.Module):
    """Follows its own weights, and clamps them, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4, 4))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(self.inner.weight, 0.1)
            self.inner.bias.clamp_(-0.3, 0.3)
        return self.inner(x) @ self.mean


def buffers_change(model: Any, i: int) -> None:
    if i == 1:
        model.mean = torch.ones(4)
    if i == 2:
        model.register_buffer("extra", torch.ones(2))
    if i == 3:
        model.count = torch.tensor(7)
    if i == 4:
        model.mean.zero_()
    if i == 5:
        model._buffers["mean"] = torch.full((4,), 2.0)


class Dynamic(nn.Module):
    """Attributes by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.settings = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        if name == "scale":
            return self.settings["scale"]
        return super().__getattr__(name)

    @property
    def twice(self) -> torch.Tensor:
        return self.inner.weight * 2

    def forward(self, x):
        return self.inner(x) * self.scale @ self.twice


def other_settings(model: Any, i: int) -> None:
    if i == 2:
        model.settings["scale"] = 3.0
    if i == 4:
        model.settings = {"scale": -1.0}


def another_forward(model: Any, i: int) -> None:
    if i == 1:
        model[1].forward = lambda x: x * 2
    if i == 2:
        model[1].forward = torch.sin
    if i == 3:
        del model[1].forward


def submodules_change(model: Any, i: int) -> None:
    if i == 1:
        model.append(nn.Linear(4, 4, bias=False))
        nn.init.ones_(model[3].weight)
    if i == 2:
        model.insert(1, nn.ReLU())
    if i == 3:
        del model[0]
    if i == 4:
        model[0] = nn.Identity()
    if i == 5:
        model.add_module("last_one", nn.Tanh())


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.by_name = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})
        self.chosen = "tanh"

    def forward(self, x):
        for i, layer in enumerate(self.layers[1:]):
            x = layer(x) if i % 2 else self.by_name[self.chosen](layer(x))
        for name, child in self.named_children():
            if name == "layers":
                x = x + child[-1].weight.sum()
        names = [name for name, _ in self.named_modules()]
        return x * len(names) + len(list(self.parameters())) + ("relu" in self.by_name)


def lists_change(model: Any, i: int) -> None:
    if i == 1:
        model.chosen = "relu"
    if i == 2:
        model.layers.pop(0)
    if i == 3:
        model.layers.extend([nn.Linear(4, 4)])
    if i == 4:
        del model.by_name["tanh"]


def half_frozen(model: Any, i: int) -> None:
    model[0].requires_grad_(i % 2 == 0)
    model[2].bias.requires_grad_(i < 2)


# -- modes and methods ------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.no_grad()
    def statistic(self, x):
        return self.inner(x).mean()

    @torch.enable_grad()
    def forward(self, x):
        return self.inner(x) + self.statistic(x)


def functional(model: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, {name: p * 2 for name, p in model.named_parameters()}, (x,))


def stateless(model: Any, x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, ({"0.weight": torch.ones(4, 4)}, {}), (x,)) + model(x)


def transformed(model: Any, x: torch.Tensor) -> torch.Tensor:
    inner = torch.func.grad(lambda v: model(v).sin().sum())(x.detach())
    return torch.vmap(model)(x) + inner


def compiled_by_another() -> nn.Module:
    model = two_layers()
    model[0].compile(backend="eager")
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, 2, batch_first=True), nn.GRU(5, 3)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.gru(out)[0].sin()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, torch.tensor([3, 2]), batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return out.sin()


CASES: dict[str, Case] = {
    "forward hooks": Case(hooked),
    "hooks with keywords": Case(keyword_hook, call=lambda m, x: m(x, scale=3.0)),
    "a hook comes and goes": Case(two_layers, come_and_go, graphs=2),
    "another hook each time": Case(two_layers, another_each_time, graphs=4),
    "hooks with effects": Case(with_effects, graphs=4),
    "full backward hooks": Case(backward_hooks, graphs=4, breaks={"module_hook"}),
    "hooks of parameters": Case(two_layers, parameter_hook),
    "hook on an intermediate": Case(two_layers, call=hook_on_an_intermediate, graphs=2, breaks={"tensor_hook"}),
    "hook on the input": Case(two_layers, call=hook_on_the_input, breaks={"tensor_hook"}),
    "a backward hook comes and goes": Case(
        two_layers, backward_hook_comes_and_goes, calls=5, graphs=4, breaks={"module_hook"}
    ),
    "a parameter's hook comes and goes": Case(two_layers, parameter_hook_comes_and_goes, calls=5),
    "hook removed in the program": Case(two_layers, call=hook_removed_in_the_program, graphs=3, breaks={"tensor_hook"}),
    "a gradient is retained": Case(two_layers, call=retained_gradient, graphs=3, breaks={"tensor_hook"}),
    "parametrized and back": Case(two_layers, parametrized_and_back, calls=5, graphs=3),
    "pruned": Case(two_layers, pruned, calls=5, graphs=4),
    "weight norm by hooks": Case(lambda: nn.utils.weight_norm(nn.Linear(4, 4))),
    "spectral norm by hooks": Case(lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), graphs=2),
    "tied and untied": Case(two_layers, tie, calls=5, graphs=3),
    "registered in forward": Case(Registers, graphs=2),
    "weights followed and written": Case(Average),
    "buffers replaced": Case(Buffers, buffers_change, calls=7, graphs=4),
    "attributes by methods": Case(Dynamic, other_settings, calls=6, graphs=3),
    "another forward": Case(two_layers, another_forward, calls=5, graphs=3),
    "submodules change": Case(two_layers, submodules_change, calls=7, graphs=6),
    "lists of modules change": Case(Lists, lists_change, calls=6, graphs=5),
    "half frozen": Case(two_layers, half_frozen, calls=6, graphs=4),
    "parametrization": Case(symmetric),
    "cached parametrization": Case(symmetric, call=cached_parametrization, graphs=2),
    "weight norm": Case(lambda: parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), graphs=2),
    "orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(4, 4))),
    "tied weights": Case(Tied),
    "weights untied": Case(Tied, untie, graphs=2),
    "buffers reassigned": Case(Buffers, graphs=2),
    "lazy attributes": Case(LazyAttributes, graphs=2),
    "counter": Case(lambda: Counter(False), calls=6, graphs=2),
    "counter used": Case(lambda: Counter(True), calls=6, graphs=2),
    "containers": Case(Containers, grow, graphs=2),
    "parameters replaced": Case(two_layers, replaced, calls=8, graphs=5),
    "train and eval": Case(normed, lambda m, i: m.train(i % 2 == 0), graphs=2),
    "a part in eval": Case(normed, lambda m, i: m[1].train(i % 2 == 0), graphs=2),
    "requires_grad toggled": Case(two_layers, lambda m, i: m[0].weight.requires_grad_(i % 2 == 0), graphs=2),
    "requires_grad_ inside": Case(two_layers, call=lambda m, x: m(x.detach().requires_grad_())),
    "decorators": Case(WithoutGradient),
    "functional_call": Case(two_layers, call=functional),
    "functional_call of tuples": Case(two_layers, call=stateless),
    "transforms": Case(two_layers, call=transformed),
    "compiled by another": Case(compiled_by_another),
    "lazy modules": Case(lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh()), graphs=1),
    "recurrent": Case(Recurrent, inputs=lambda: torch.randn(2, 3, 4, requires_grad=True)),
    "packed": Case(
        Packed,
        inputs=lambda: torch.randn(2, 3, 4, requires_grad=True),
        graphs=9,
        breaks={"data_dependent_shape", "tensor_to_number"},
    ),
}


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def train(case: Case, compiled: Callable[..., Any], close: Callable[[Any, Any], None]) -> None:
    """Trains a module by `compiled(module, x)` and its twin by eager's `case.call`, and holds each step against each.

    Results, gradients, state, attributes that programs here write; `close(ours, theirs)` judges.
    """
    torch.manual_seed(0)
    module = case.make()
    torch.manual_seed(0)
    twin = case.make()
    for i in range(case.calls):
        for one in (module, twin):
            torch.manual_seed(100 + i)
            case.change(one, i)
        x = case.inputs()
        y = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(i)
        ours = compiled(module, x)
        torch.manual_seed(i)
        theirs = case.call(twin, y)
        close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
        if ours.requires_grad:
            module.zero_grad()
            twin.zero_grad()
            torch.manual_seed(i)
            ours.square().sum().backward()
            torch.manual_seed(i)
            theirs.square().sum().backward()
            close(gradients(module), gradients(twin))
            close(x.grad, y.grad)
            for one in (module, twin):
                descend(one)
        assert module.state_dict().keys() == twin.state_dict().keys()
        close(dict(module.state_dict()), dict(twin.state_dict()))
    for one, other in zip(module.modules(), twin.modules(), strict=True):
        for key in WRITTEN:
            close(vars(one).get(key), vars(other).get(key))


WRITTEN = ("seen", "last", "step")  # attributes that hooks and forwards write


@torch.no_grad()
def descend(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)
