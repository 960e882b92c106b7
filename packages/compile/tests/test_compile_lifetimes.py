"""Compiling keeps nothing of a program alive: its classes, functions, modules and tensors go when it goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile
import torchdynamo
import torchinductor

pytestmark = [pytest.mark.warm, pytest.mark.usefixtures("collector_of_new_objects")]


def _module(breaks: bool) -> tuple[Any, dict[str, Any]]:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.settings = {"shift": 1}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if breaks:
                torchdynamo.graph_break()
            return y + self.settings["shift"]

    model = Local()
    return model, {"class": Local, "module": model, "parameter": model.linear.weight}


def _closure() -> tuple[Any, dict[str, Any]]:
    class Settings:
        scale = 2.0

        def times(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    settings, shift = Settings(), torch.ones(3)
    model, held = _module(breaks=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        return settings.times(x) + shift + model(x) + isinstance(settings, Settings)

    return function, {**held, "function": function, "settings": settings, "its class": Settings, "tensor": shift}


def _generator() -> tuple[Any, dict[str, Any]]:
    def function(x: torch.Tensor) -> Any:
        def rows() -> Any:
            for row in x:
                yield row * 2
                torchdynamo.graph_break()

        return sum(rows())

    return function, {"function": function}


def _exception() -> tuple[Any, dict[str, Any]]:
    class Refused(Exception):
        pass

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            raise Refused(x.shape)
        except Refused:
            return x.sin()

    return function, {"function": function, "exception": Refused}


PROGRAMS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "module": lambda: _module(breaks=False),
    "module that breaks": lambda: _module(breaks=True),
    "closure": _closure,
    "generator": _generator,
    "exception": _exception,
}


@pytest.mark.expected_eager("graph_break")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("reset", [False, True], ids=["dropped", "reset"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_of_a_program_is_kept(program: str, reset: bool, backend: str) -> None:
    function, objects = PROGRAMS[program]()
    alive = {name: weakref.ref(value) for name, value in objects.items()}
    compiled = torchcompile.compile(function, backend=backend)
    x = torch.rand(2, 3)
    compiled(x)
    compiled(x.requires_grad_()).sum().backward()  # another version, whose graph has a history
    if reset:
        torchcompile.reset()
    del function, objects, compiled
    gc.collect()
    assert not [name for name, reference in alive.items() if reference() is not None]


def _compiled_code() -> int:
    gc.collect()
    kinds = (torchinductor.CompiledGraph, torch.fx.GraphModule)
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())


@pytest.mark.parametrize("called", ["without gradients", "with gradients", "through the backward", "held by a result"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_goes_with_its_function(backend: str, called: str) -> None:
    """Forward, backward and what would make another one lead to each other, some of it by way of C++."""
    held: list[torch.Tensor] = []

    def compile_and_call() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        y = torchcompile.compile(model, backend=backend)(torch.ones(2, 3, requires_grad=called != "without gradients"))
        if called == "through the backward":
            torch.autograd.grad(y.sum(), model[0].weight, create_graph=True)[0].sum().backward()
        if called == "held by a result":
            held.append(y)

    compile_and_call()
    held.clear()
    before = _compiled_code()
    for _ in range(3):
        compile_and_call()
    if held:
        assert _compiled_code() > before
        torch.stack(held).sum().backward()  # is compiled now, though nothing is left of the function
    held.clear()
    assert _compiled_code() <= before


def test_reset_while_an_exported_graph_lives() -> None:
    exported = torchdynamo.export(lambda x: x * 2)(torch.ones(2))
    torchcompile.reset()
    assert exported(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.expected_eager("c_function", "program_raised")
@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was(on: bool) -> None:
    """It is held back during capture and compilation alone: the program's own calls, and what it asks of the collector,
    run with it as the program has it."""
    found: list[bool] = []

    def watched(gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(gc.isenabled())
        return compile_graph(gm, inputs, *args, **kwargs)

    compile_graph, was = torchinductor.compile_graph, gc.isenabled()
    torchinductor.compile_graph = watched
    try:
        gc.enable() if on else gc.disable()
        for shift in (1, 2):
            x = torch.ones(3, requires_grad=True)
            program = torchcompile.compile(lambda x, shift=shift: (x * x + shift).sum(), options={"cache": None})
            program(x).backward()
            assert gc.isenabled() == on
        assert (
            torchcompile.compile(lambda x: x + 1 if gc.isenabled() else x, backend="eager")(torch.zeros(())).item()
            == on
        )
        with pytest.raises(ZeroDivisionError):
            torchcompile.compile(lambda x: x / (1 // 0), backend="eager")(torch.zeros(()))
        assert gc.isenabled() == on
    finally:
        torchinductor.compile_graph = compile_graph
        gc.enable() if was else gc.disable()
    assert found == [False] * 4
