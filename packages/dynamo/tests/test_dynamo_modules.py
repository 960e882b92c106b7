"""nn.Module's world: hooks, parametrizations, attributes, modes. Compiled equals eager at each call, gradients too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_cases import CASES, leaf, train, two_layers
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

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


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torchdynamo.reset()
    yield


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_itself_when_compiled(name: str) -> None:
    case = CASES[name]
    backend = Backend()
    train(case, torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(case.call), same)
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
