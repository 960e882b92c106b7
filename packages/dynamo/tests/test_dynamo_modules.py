"""nn.Module's world: hooks, parametrizations, attributes, modes. Compiled equals eager at each call, gradients too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrizations, parametrize

import torchdynamo


class Backend:
    """Runs graphs as they were captured, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


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
    "requires_grad_ inside": Case(two_layers, call=lambda m, x: m(x.detach().requires_grad_()), graphs=1),
    "decorators": Case(WithoutGradient),
    "functional_call": Case(two_layers, call=functional),
    "functional_call of tuples": Case(two_layers, call=stateless),
    "transforms": Case(two_layers, call=transformed, graphs=9, breaks={"function_transform"}),
    "compiled by another": Case(compiled_by_another),
    "lazy modules": Case(lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh()), graphs=3, breaks={"tensor_subclass"}),
    "recurrent": Case(
        Recurrent,
        inputs=lambda: torch.randn(2, 3, 4, requires_grad=True),
        graphs=3,
        breaks={"operator_without_meta"},
    ),
    "packed": Case(
        Packed,
        inputs=lambda: torch.randn(2, 3, 4, requires_grad=True),
        graphs=9,
        breaks={"data_dependent_shape", "tensor_to_number"},
    ),
}


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torchdynamo.reset()
    yield


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_itself_when_compiled(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make()
    torch.manual_seed(0)
    twin = case.make()
    backend = Backend()
    compiled = torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(case.call)
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
        same(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
        if ours.requires_grad:
            module.zero_grad()
            twin.zero_grad()
            torch.manual_seed(i)
            ours.square().sum().backward()
            torch.manual_seed(i)
            theirs.square().sum().backward()
            same(gradients(module), gradients(twin))
            same(x.grad, y.grad)
        assert module.state_dict().keys() == twin.state_dict().keys()
        same(dict(module.state_dict()), dict(twin.state_dict()))
    for ours, theirs in zip(module.modules(), twin.modules(), strict=True):
        for key in ("seen", "last", "step"):
            same(vars(ours).get(key), vars(theirs).get(key))
    assert len(backend.graphs) <= case.graphs
    assert {b.reason for b in torchdynamo.stats().break_details} == case.breaks


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_hooks_of_all_modules(kind: str) -> None:
    model, x = two_layers(), leaf()
    backend = Backend()
    compiled = torchdynamo.optimize(backend)(model)
    before = compiled(x)
    same(before, model(x))
    if kind == "forward":
        handle = register_module_forward_hook(lambda module, args, out: out * 2)
    else:
        handle = register_module_full_backward_hook(lambda module, gave, got: (gave[0] * 2,))
    try:
        same(compiled(x), model(x))
        grads = []
        for f in (compiled, model):
            x.grad = None
            f(x).sum().backward()
            grads.append(x.grad)
        same(*grads)
    finally:
        handle.remove()
    same(compiled(x), before)


def test_an_exception_leaves_through_hooks_that_are_always_called() -> None:
    seen: list[str] = []

    class Fails(nn.Module):
        def forward(self, x):
            if x.shape[0] > 2:
                raise ValueError("too many")
            return x

    model = Fails()
    model.register_forward_hook(lambda *_: seen.append("called"), always_call=True)
    compiled = torchdynamo.optimize(Backend())(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="too many"):
            compiled(torch.ones(3))
    assert seen == ["called"] * 2


def test_a_dtype_change_compiles_anew() -> None:
    model = two_layers()
    backend = Backend()
    compiled = torchdynamo.optimize(backend)(model)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        x = torch.randn(3, 4, dtype=dtype)
        same(compiled(x), model(x))
    assert len(backend.graphs) == 3 or len(backend.graphs) == 4  # new parameters, or the old ones converted in place


def test_state_is_loaded_into_a_captured_module() -> None:
    model, other = two_layers(), two_layers()
    compiled = torchdynamo.optimize(backend := Backend())(model)
    x = leaf()
    compiled(x)
    model.load_state_dict(pickle.loads(pickle.dumps(other.state_dict())))
    same(compiled(x), other(x))
    model.load_state_dict(copy.deepcopy(two_layers().state_dict()), assign=True)
    same(compiled(x), model(x))
    assert len(backend.graphs) == 1


def test_inference_and_gradients_are_compiled_apart() -> None:
    model = two_layers()
    compiled = torchdynamo.optimize(backend := Backend())(model)
    x = leaf()
    for _ in range(2):
        assert compiled(x).requires_grad
        with torch.no_grad():
            assert not compiled(x).requires_grad
        with torch.inference_mode():
            same(compiled(x), model(x))
    assert len(backend.graphs) == 3


def test_a_compiled_function_under_a_transform() -> None:
    f = lambda x: (x.sin() * 2).sum()
    compiled = torchdynamo.optimize(backend := Backend(), options=torchdynamo.CaptureOptions(strict=True))(f)
    x = torch.randn(3, 4)
    same(torch.vmap(compiled)(x), torch.vmap(f)(x))
    same(torch.func.grad(compiled)(x), torch.func.grad(f)(x))
    same(compiled(x), f(x))
    same(torch.vmap(compiled)(x), torch.vmap(f)(x))
    assert len(backend.graphs) == 1
