"""Loops over modules that are compiled round by round, where who asks for a capture wants that: eager's results, by a
number of versions that the number of modules has no part in."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo
from primtorch.ledger import Effect, of
from torchdynamo.api import owner_of

DEPTHS = (4, 9)


def _wanted(ahead: int, modules: Sequence[nn.Module]) -> int | None:
    return ahead if len(modules) >= 3 else None


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number, self.calls = nn.Linear(4, 4), number, 0

    def forward(self, x: torch.Tensor, by: Any = 1.0) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.inner(x)) * by


class Model(nn.Module):
    """Its loop is `run`."""

    def __init__(self, run: Callable[[Model, torch.Tensor], Any], depth: int) -> None:
        super().__init__()
        self.layers, self.run = nn.ModuleList(map(Layer, range(depth))), run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x + 1)


def plain(model: Model, x: torch.Tensor) -> Any:
    for layer in model.layers:
        x = layer(x)
    return x + 1


def counted(model: Model, x: torch.Tensor) -> Any:
    total = 0
    for place, layer in enumerate(model.layers, 2):
        x = layer(x, place)
        total += place
    return x * total


def zipped(model: Model, x: torch.Tensor) -> Any:
    for layer, by in zip(model.layers, x.unbind(1) * 3, strict=False):
        x = layer(x) + by[:, None]
    return x


def part(model: Model, x: torch.Tensor) -> Any:
    for layer in model.layers[1:]:
        x = layer(x)
    return x


def copied_list(model: Model, x: torch.Tensor) -> Any:
    for layer in list(model.layers):
        x = layer(x)
    return x


def numbered(model: Model, x: torch.Tensor) -> Any:
    for layer in model.layers:
        x = layer(x, layer.number)
        if layer.number % 2:
            x = x.sin()
    return x


def ends_early(model: Model, x: torch.Tensor) -> Any:
    for place, layer in enumerate(model.layers):
        if place == 1:
            continue
        if place == 3:
            break
        x = layer(x)
    else:
        x = x * 2
    return x


def guarded(model: Model, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        try:
            for layer in model.layers:
                x = layer(x)
        finally:
            x = x * 2
    return x


def nested(model: Model, x: torch.Tensor) -> Any:
    for layer in model.layers:
        for other in model.layers[:3]:
            x = other(layer(x))
    return x


def two(model: Model, x: torch.Tensor) -> Any:
    return plain(model, plain(model, x) * 2)


def listed(model: Model, x: torch.Tensor) -> Any:
    return torch.stack([layer(x) for layer in model.layers]).sum(0)


def generated(model: Model, x: torch.Tensor) -> Any:
    return sum(layer(x) for layer in model.layers) * 2


def given_to_c(model: Model, x: torch.Tensor) -> Any:
    return x * len(list(map(id, model.layers))), max(model.layers, key=lambda layer: layer.number).number


def in_sequence(model: Model, x: torch.Tensor) -> Any:
    return nn.Sequential(*model.layers)(x) * 2


def unpacked(model: Model, x: torch.Tensor) -> Any:
    first, *others = model.layers
    for layer in others:
        x = layer(x)
    return first(x)


def generator(model: Model, x: torch.Tensor) -> Any:
    def states(x: torch.Tensor) -> Any:
        for layer in model.layers:
            x = layer(x)
            yield x

    return sum(states(x))


ROUNDS = [plain, counted, part, copied_list, numbered, ends_early, guarded, nested, two, unpacked]
WHOLE = [generated, given_to_c, in_sequence, generator, zipped, listed]


def _capture(model: nn.Module, ahead: int = 0, **more: Any) -> tuple[Any, Any]:
    options = torchdynamo.CaptureOptions(strict=True, round_by_round=functools.partial(_wanted, ahead), **more)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(model.forward)
    return compiled, owner_of(compiled)


def _trained(model: Model, call: Any) -> list[Any]:
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(3, 4, requires_grad=step > 0)
        result = call(x)
        tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
        if any(t.requires_grad for t in tensors):
            sum(t.float().square().sum() for t in tensors).backward()
        found += [result, x.grad, *(p.grad for p in model.parameters()), [layer.calls for layer in model.layers]]
    return found


@pytest.mark.parametrize("ahead", [0, 2, 4, 20])
@pytest.mark.parametrize("run", [*ROUNDS, *WHOLE], ids=lambda run: run.__name__)
def test_results_are_eager_s(run: Any, ahead: int) -> None:
    versions, told = [], []
    for depth in DEPTHS:
        model = Model(run, depth)
        twin = copy.deepcopy(model)
        compiled, owner = _capture(model, ahead)
        torch.testing.assert_close(_trained(model, compiled), _trained(twin, twin))
        versions.append(len(owner.versions()))
        told.append({event.kind.id for event in of(owner.stats.events, Effect.BREAK, Effect.FALLBACK)})
        assert not owner.stats.fallbacks
    if run in ROUNDS and not ahead:
        assert versions[0] == versions[1] and all(
            kinds - {"ambient_state"} == {"repeated_modules"} for kinds in told
        ), (versions, told)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ahead", [0, 2, 4, 20])
def test_an_iterator_that_outlives_its_loop(ahead: int, depth: int) -> None:
    def program(model: Model, x: torch.Tensor) -> Any:
        layers = iter(model.layers)
        for layer in layers:
            x = layer(x)
            if layer.number == 5:
                break
        return x, layers

    model = Model(program, depth)
    twin = copy.deepcopy(model)
    compiled, owner = _capture(model, ahead)
    for _ in range(3):
        x = torch.randn(3, 4)
        (found, rest), (expected, others) = compiled(x), twin(x)
        torch.testing.assert_close(found, expected)
        assert [layer.number for layer in rest] == [layer.number for layer in others]
    assert not owner.stats.fallbacks


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_rounds_ahead_are_in_the_graph_before_the_loop(ahead: int) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    options = torchdynamo.CaptureOptions(strict=True, round_by_round=functools.partial(_wanted, ahead))
    model = Model(plain, 7)
    torchdynamo.optimize(keep, options=options)(model.forward)(torch.randn(3, 4))
    layers = [sum("tanh" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert layers[0] == ahead and max(layers[1:]) == 1, layers


@pytest.mark.parametrize("run", [plain, numbered, guarded], ids=lambda run: run.__name__)
def test_one_graph_where_it_is_asked_for(run: Any) -> None:
    model = Model(run, 5)
    twin = copy.deepcopy(model)
    compiled, owner = _capture(model, fullgraph=True)
    torch.testing.assert_close(_trained(model, compiled), _trained(twin, twin))
    assert not owner.stats.events or {event.kind.id for event in owner.stats.events} == {"recompiled"}


def test_a_round_that_raises() -> None:
    def raises(model: Model, x: torch.Tensor) -> Any:
        for layer in model.layers:
            if layer.number == 2:
                raise ValueError(layer.number)
            x = layer(x)
        return x

    compiled, owner = _capture(Model(raises, 5))
    for _ in range(3):
        with pytest.raises(ValueError, match="2"):
            compiled(torch.ones(2, 4))
    assert not owner.stats.fallbacks


def test_the_ledger_says_over_what_the_loop_goes_and_what_to_do() -> None:
    compiled, owner = _capture(Model(plain, 5))
    compiled(torch.ones(2, 4))
    (event,) = {(e.kind.id, e.detail, e.line.line) for e in of(owner.stats.events, Effect.BREAK)}
    line = plain.__code__.co_firstlineno + 1
    assert event == ("repeated_modules", "the next round of a loop over 5 modules (Layer)", line)
